"""Shards come back as they were written, and what would train nonsense is refused."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
import torch

from paceline.models.files import write_atomically
from paceline.models.records import HiddenStateShard, ShardRef
from paceline.models.shard_checks import ShardError, ShardSource, check_shard
from paceline.models.shards import read_header, read_shard, shard_path, write_shard

SOURCE = ShardSource(target_fingerprint="fp-a", tokenizer_hash="tok-a", tap_layer_ids=(0, 2, 5))


def make_shard(
    lengths: tuple[int, ...] = (7, 4), dtype: torch.dtype = torch.float32, seed: int = 0
) -> HiddenStateShard:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return HiddenStateShard(
        input_ids=torch.randint(0, 50_000, (tokens,), generator=generator, dtype=torch.int32),
        position_ids=positions.int(),
        loss_mask=positions >= 2,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        aux_hidden_states=torch.randn(tokens, 3, 5, generator=generator).to(dtype),
        last_hidden_states=torch.randn(tokens, 5, generator=generator).to(dtype),
        norm_applied=True,
        domains=tuple(("math", "code")[i % 2] for i in range(len(lengths))),
        sequence_ids=tuple(f"r{i}" for i in range(len(lengths))),
    )


def write(folder: Path, shard: HiddenStateShard, shard_id: str = "s0") -> ShardRef:
    return write_shard(folder, shard, shard_id=shard_id, source=SOURCE, max_target_version=3)


@pytest.mark.filterwarnings("error")  # torch warns when memory is read-only or copied by surprise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_shard_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    shard = make_shard((7, 4, 12), dtype)
    ref = write(tmp_path, shard)
    found = read_shard(tmp_path, ref)
    for name in (
        "input_ids",
        "position_ids",
        "loss_mask",
        "cu_seqlens",
        "aux_hidden_states",
        "last_hidden_states",
    ):
        expected, value = getattr(shard, name), getattr(found, name)
        assert value.dtype == expected.dtype, name
        assert torch.equal(value, expected), name
    assert found.norm_applied is True
    assert found.domains == ("math", "code", "math")
    assert found.sequence_ids == ("r0", "r1", "r2")


def test_a_ref_says_what_the_file_holds(tmp_path: Path) -> None:
    ref = write(tmp_path, make_shard(dtype=torch.bfloat16))
    path = tmp_path / ref.uri
    assert (ref.num_tokens, ref.num_sequences, ref.num_bytes) == (11, 2, path.stat().st_size)
    assert (ref.dtype, ref.tap_layer_ids, ref.domains) == ("bfloat16", (0, 2, 5), ("code", "math"))
    assert (ref.target_fingerprint, ref.tokenizer_hash) == ("fp-a", "tok-a")
    assert (ref.min_target_version, ref.max_target_version) == (0, 3)
    assert read_header(tmp_path, ref).sequence_ids == ("r0", "r1")


def test_hidden_states_made_from_a_view_are_stored_in_row_order(tmp_path: Path) -> None:
    shard = make_shard()
    transposed = shard.aux_hidden_states.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not transposed.is_contiguous()
    ref = write(tmp_path, replace(shard, aux_hidden_states=transposed))
    assert torch.equal(read_shard(tmp_path, ref).aux_hidden_states, shard.aux_hidden_states)


def test_reading_copies_no_hidden_states_and_writing_to_them_spares_the_file(
    tmp_path: Path,
) -> None:
    ref = write(tmp_path, make_shard())
    first, second = read_shard(tmp_path, ref), read_shard(tmp_path, ref)
    # Both columns and the ids share one mapping: they lie within the file's size of each other.
    pointers = [first.input_ids.data_ptr(), first.last_hidden_states.data_ptr()]
    assert max(pointers) - min(pointers) < ref.num_bytes
    first.last_hidden_states.zero_()
    assert second.last_hidden_states.abs().min() > 0
    assert torch.equal(read_shard(tmp_path, ref).last_hidden_states, second.last_hidden_states)


def test_writing_a_shard_id_again_leaves_the_first_file_alone(tmp_path: Path) -> None:
    first = write(tmp_path, make_shard(seed=0))
    second = write(tmp_path, make_shard(seed=1))
    assert first.uri != second.uri
    assert torch.equal(
        read_shard(tmp_path, first).last_hidden_states, make_shard(seed=0).last_hidden_states
    )
    assert write(tmp_path, make_shard(seed=0)) == first


def test_a8_a_capture_shorter_than_its_tokens_is_refused(tmp_path: Path) -> None:
    shard = make_shard()
    for name in ("aux_hidden_states", "last_hidden_states", "loss_mask", "position_ids"):
        short = replace(shard, **{name: getattr(shard, name)[:-1]})
        with pytest.raises(ShardError, match=f"{name} has 10 rows for 11 tokens.*prefix cache"):
            write(tmp_path, short)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("last_hidden_states", 0.0), ("aux_hidden_states", 0.0), ("last_hidden_states", float("nan")),
     ("aux_hidden_states", float("inf"))],
)  # fmt: skip
def test_a11_a13_rows_padded_with_zeros_or_not_finite_are_refused(
    tmp_path: Path, name: str, value: float
) -> None:
    shard = make_shard()
    hidden = getattr(shard, name).clone()
    if value == 0.0:
        hidden[-1, ...] = 0.0
    else:
        hidden.view(11, -1)[-1, 3] = value
    with pytest.raises(ShardError, match=f"sequence r1: {name} row 10 is zero or not finite"):
        write(tmp_path, replace(shard, **{name: hidden}))
    assert list(tmp_path.iterdir()) == []


def test_a13_one_tap_left_empty_is_refused() -> None:
    shard = make_shard()
    hidden = shard.aux_hidden_states.clone()
    hidden[6, 1] = 0.0
    with pytest.raises(ShardError, match=r"sequence r0: aux_hidden_states row 6"):
        check_shard(replace(shard, aux_hidden_states=hidden), SOURCE)


def test_a4_another_number_of_taps_is_refused() -> None:
    shard = make_shard()
    with pytest.raises(ShardError, match=r"2 tapped layers, but tap_layer_ids is \(0, 2, 5\)"):
        check_shard(replace(shard, aux_hidden_states=shard.aux_hidden_states[:, :2]), SOURCE)


@pytest.mark.parametrize(("value", "kind"), [(True, "ones"), (False, "zeros")])
def test_c21_a_mask_of_one_kind_is_refused_per_sequence(value: bool, kind: str) -> None:
    mask = make_shard().loss_mask.clone()
    mask[7:] = value
    with pytest.raises(ShardError, match=f"sequence r1: its loss mask is all {kind} over 4 tokens"):
        check_shard(replace(make_shard(), loss_mask=mask), SOURCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 7, 10]).int()}, "does not tile 11 tokens"),
        ({"cu_seqlens": torch.tensor([0, 7, 7, 11]).int()}, "does not tile"),
        ({"cu_seqlens": torch.tensor([0, 6, 11]).int()}, "position_ids do not count"),
        ({"position_ids": torch.arange(11).int()}, "position_ids do not count"),
        ({"sequence_ids": ("r0",)}, "sequence_ids names 1 sequences, cu_seqlens 2"),
        ({"domains": ()}, "domains names 0 sequences"),
        ({"sequence_ids": ("r0", "r0")}, "not unique"),
        ({"last_hidden_states": torch.ones(11, 5, dtype=torch.bfloat16)}, "the same one of"),
    ],
)
def test_a10_sequences_that_do_not_fit_their_rows_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ShardError, match=message):
        check_shard(replace(make_shard(), **changes), SOURCE)


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path: Path) -> None:
    ref = write(tmp_path, make_shard())
    path = tmp_path / ref.uri
    content = bytearray(path.read_bytes())
    content[content.index(make_shard().last_hidden_states.numpy().tobytes()) + 9] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShardError, match=f"{ref.uri}: sha256 is .* its ref says '{ref.checksum}'"):
        read_shard(tmp_path, ref)


def test_a_truncated_or_missing_file_is_refused(tmp_path: Path) -> None:
    ref = write(tmp_path, make_shard())
    path = tmp_path / ref.uri
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ShardError, match=f"num_bytes is {ref.num_bytes - 100}.*{ref.num_bytes}"):
        read_shard(tmp_path, ref)
    path.unlink()
    with pytest.raises(ShardError, match=f"{ref.uri}: shard s0 has no file"):
        read_shard(tmp_path, ref)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_fingerprint": "fp-b"},
        {"tokenizer_hash": "tok-b"},
        {"tap_layer_ids": (0, 2, 4)},
        {"norm_applied": False},
        {"dtype": "float16"},
        {"num_tokens": 12},
        {"num_sequences": 1},
        {"max_target_version": 4},
        {"schema_version": 2},
        {"domains": ("math",)},
        {"shard_id": "s1"},
    ],
)
def test_a6_a_file_that_differs_from_its_ref_in_any_field_is_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    ref = replace(write(tmp_path, make_shard()), **changes)
    ((name, value),) = changes.items()
    with pytest.raises(ShardError, match=f"{name} is .* its ref says ") as error:
        read_shard(tmp_path, ref)
    assert repr(value) in str(error.value)


def test_a_ref_of_another_target_is_refused_with_both_values(tmp_path: Path) -> None:
    ref = write(tmp_path, make_shard())
    SOURCE.check(ref)
    for name, value in (("target_fingerprint", "fp-b"), ("tap_layer_ids", (1, 2, 5))):
        other = replace(SOURCE, **{name: value})
        with pytest.raises(ShardError, match=name) as error:
            other.check(ref)
        assert repr(value) in str(error.value) and repr(getattr(ref, name)) in str(error.value)


def test_a_uri_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    ref = write(folder, make_shard())
    (tmp_path / "outside.arrow").write_bytes((folder / ref.uri).read_bytes())
    (folder / "link.arrow").symlink_to(tmp_path / "outside.arrow")
    outside = ("../outside.arrow", str(tmp_path / "outside.arrow"), "link.arrow", "", "a/../..")
    for uri in outside:
        with pytest.raises(ShardError, match="leaves the cache folder"):
            shard_path(folder, replace(ref, uri=uri))
    with pytest.raises(ShardError, match="shard id"):
        write(folder, make_shard(), "../s0")


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_running_out_of_room_names_place_and_remedy_and_leaves_no_part(tmp_path: Path) -> None:
    kept = write(tmp_path, make_shard(), "kept")
    with file_size_limit(20_000), pytest.raises(OSError, match="no room to write in .*resume="):
        write(tmp_path, make_shard((900, 900)), "big")
    assert [path.name for path in tmp_path.iterdir()] == [kept.uri]
    read_shard(tmp_path, kept)
    write(tmp_path, make_shard((900, 900)), "big")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_reported_like_a_size_limit(tmp_path: Path) -> None:
    def write_to_full_disk(file: IO[bytes]) -> None:
        file.write(b"part of it")
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"rest")

    with pytest.raises(OSError, match="No space left on device.*free some disk") as error:
        write_atomically(tmp_path, lambda _: "x", write_to_full_disk)
    assert error.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_another_error_while_writing_passes_through_and_leaves_no_part(tmp_path: Path) -> None:
    def fail(file: IO[bytes]) -> None:
        file.write(b"part of it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path, lambda _: "x", fail)
    assert list(tmp_path.iterdir()) == []
