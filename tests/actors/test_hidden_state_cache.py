"""Nothing acknowledged is lost, nothing unacknowledged is kept, and no tensor passes through."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.actors.config import CacheConfig
from paceline.actors.hidden_state_cache import MANIFEST_FILE, HiddenStateCache, stale_shards
from paceline.models.records import HiddenStateShard, ShardRef
from paceline.models.shards import ShardError, ShardSource, read_shard, write_shard

SOURCE = ShardSource(target_fingerprint="fp-a", tokenizer_hash="tok-a", tap_layer_ids=(0, 2))


def write(folder: Path, number: int, *, seed: int = 0, version: int = 0) -> ShardRef:
    """A shard of two sequences of 8 tokens, ids rN.a and rN.b."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    shard = HiddenStateShard(
        input_ids=torch.arange(16, dtype=torch.int32),
        position_ids=torch.arange(8, dtype=torch.int32).repeat(2),
        loss_mask=torch.arange(8).repeat(2) >= 3,
        cu_seqlens=torch.tensor([0, 8, 16], dtype=torch.int32),
        aux_hidden_states=torch.randn(16, 2, 64, generator=generator),
        last_hidden_states=torch.randn(16, 64, generator=generator),
        norm_applied=True,
        domains=("math", "math"),
        sequence_ids=(f"r{number}.a", f"r{number}.b"),
    )
    return write_shard(
        folder,
        shard,
        shard_id=f"s{number}",
        source=SOURCE,
        min_target_version=version,
        max_target_version=version,
    )


def open_cache(folder: Path, source: ShardSource = SOURCE, **config: int) -> HiddenStateCache:
    return HiddenStateCache(folder, CacheConfig(**config), source)


def shard_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {MANIFEST_FILE}


def test_refs_come_in_index_order_up_to_the_first_gap(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    refs = [write(tmp_path, number) for number in range(4)]
    for index in (2, 0, 3):
        cache.put(index, refs[index])
    assert cache.refs(0) == refs[:1]
    assert cache.refs(1) == []
    cache.put(1, refs[1])
    assert cache.refs() == refs
    assert cache.refs(2) == refs[2:]
    assert cache.refs(4) == []


def test_put_again_changes_nothing_and_the_first_of_two_writers_stays(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    first = write(tmp_path, 0)
    assert cache.put(0, first) == first
    assert cache.put(0, first) == first
    again = write(tmp_path, 0, seed=1)
    assert again.checksum != first.checksum
    assert cache.put(0, again) == first
    assert shard_files(tmp_path) == {first.uri}
    assert cache.stats()["shards"] == 1
    with pytest.raises(ShardError, match="s0 is number 0, not 1"):
        cache.put(1, first)
    with pytest.raises(ShardError, match="index 0 is taken"):
        cache.put(0, write(tmp_path, 1))


def test_rollouts_are_complete_once_every_shard_has_been_put(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    refs = [write(tmp_path, number) for number in range(3)]
    cache.put(0, refs[0])
    cache.put(2, refs[2])
    assert not cache.is_complete()
    cache.complete(3)
    assert not cache.is_complete()
    cache.put(1, refs[1])
    assert cache.is_complete()
    with pytest.raises(ShardError, match="complete with 3 shards"):
        cache.put(3, write(tmp_path, 3))
    cache.close()
    assert open_cache(tmp_path).is_complete()


def test_complete_without_a_total_takes_what_was_put(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    cache.put(0, write(tmp_path, 0))
    cache.complete()
    assert cache.is_complete()
    empty = open_cache(tmp_path / "empty")
    assert not empty.is_complete()
    empty.complete()
    assert empty.is_complete()


def test_a_shard_of_another_target_is_refused_with_both_values(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    ref = write(tmp_path, 0)
    for changes in (
        {"target_fingerprint": "fp-b"},
        {"tokenizer_hash": "tok-b"},
        {"tap_layer_ids": (0, 3)},
    ):
        ((name, value),) = changes.items()
        with pytest.raises(ShardError, match=name) as error:
            cache.put(0, replace(ref, **changes))
        assert repr(value) in str(error.value)
    assert cache.refs() == []


def test_a_cache_of_another_target_is_not_opened_and_not_changed(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    ref = cache.put(0, write(tmp_path, 0))
    cache.close()
    before = (tmp_path / MANIFEST_FILE).read_bytes()
    with pytest.raises(ShardError, match="fp-a.*fp-b.*out="):
        open_cache(tmp_path, replace(SOURCE, target_fingerprint="fp-b"))
    assert (tmp_path / MANIFEST_FILE).read_bytes() == before
    assert open_cache(tmp_path).refs() == [ref]


def test_a_ref_whose_file_is_missing_or_cut_is_refused(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    ref = write(tmp_path, 0)
    path = tmp_path / ref.uri
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ShardError, match="num_bytes"):
        cache.put(0, ref)
    path.unlink()
    with pytest.raises(ShardError, match="has no file"):
        cache.put(0, ref)
    with pytest.raises(ShardError, match="leaves the cache folder"):
        cache.put(0, replace(ref, uri=f"../{ref.uri}"))
    path.write_bytes(whole)
    cache.put(0, ref)


def test_leased_shards_stay_until_every_holder_acknowledged(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    refs = [cache.put(number, write(tmp_path, number)) for number in range(2)]
    assert cache.lease("rank0", ["s0"]) == refs[:1]
    cache.lease("rank1", ["s0"])
    assert cache.stats()["leased"] == 1
    assert cache.evict(["s0", "s1", "unknown"]) == ["s1"]
    cache.ack("rank0", ["s0"])
    assert cache.evict(["s0"]) == []
    cache.ack("rank1")
    assert cache.evict(["s0"]) == ["s0"]
    assert shard_files(tmp_path) == set()
    with pytest.raises(ShardError, match="s1 was evicted"):
        cache.lease("rank0", ["s1"])
    with pytest.raises(ShardError, match="s9 is unknown"):
        cache.lease("rank0", ["s9"])
    assert cache.stats()["leased"] == 0


def test_eviction_gives_room_back_and_is_remembered(tmp_path: Path) -> None:
    budget = 2 * write(tmp_path / "elsewhere", 0, version=1).num_bytes
    cache = open_cache(tmp_path, max_bytes=budget)
    cache.put(0, write(tmp_path, 0, version=1))
    assert cache.has_room()
    second = cache.put(1, write(tmp_path, 1, version=2))
    assert not cache.has_room()
    assert cache.evict(stale_shards(cache.refs(), min_target_version=2)) == ["s0"]
    assert cache.has_room()
    cache.close()

    cache = open_cache(tmp_path, max_bytes=budget)
    assert cache.stats() == {
        "shards": 1,
        "tokens": 16,
        "sequences": 2,
        "bytes": second.num_bytes,
        "leased": 0,
        "evicted": 1,
    }
    with pytest.raises(ShardError, match="number 0 was evicted"):
        cache.refs(0)
    assert cache.refs(1) == [second]
    with pytest.raises(ShardError, match="s0 was evicted"):
        cache.put(0, write(tmp_path, 0))
    assert cache.finished_sequence_ids() == ["r0.a", "r0.b", "r1.a", "r1.b"]


def test_opening_again_sweeps_what_was_never_acknowledged(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    kept = cache.put(0, write(tmp_path, 0))
    cache.close()
    orphan = write(tmp_path, 1)
    (tmp_path / "0123.partial").write_bytes(b"half a shard")
    (tmp_path / "notes.txt").write_text("not ours")
    with (tmp_path / MANIFEST_FILE).open("a") as manifest:
        manifest.write('{"event": "put", "index": 1, "ref": {"shard_id": "s1", "uri": "s1-')
    with_files = HiddenStateCache(tmp_path, CacheConfig(), SOURCE, sweep=False)
    assert orphan.uri in shard_files(tmp_path)
    with_files.close()

    cache = open_cache(tmp_path)
    assert shard_files(tmp_path) == {kept.uri, "notes.txt"}
    assert cache.refs() == [kept]
    again = cache.put(1, write(tmp_path, 1))
    cache.close()
    assert open_cache(tmp_path).refs() == [kept, again]


def test_a_damaged_manifest_is_reported_by_line(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    cache.put(0, write(tmp_path, 0))
    cache.put(1, write(tmp_path, 1))
    cache.close()
    manifest = tmp_path / MANIFEST_FILE
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text(lines[0] + lines[1][: len(lines[1]) // 2] + "\n" + lines[2])
    with pytest.raises(ValueError, match="manifest.jsonl:2: not a line of JSON"):
        open_cache(tmp_path)
    manifest.write_text(lines[0] + '{"event": "merge"}\n')
    with pytest.raises(ValueError, match="manifest.jsonl:2: unknown event 'merge'"):
        open_cache(tmp_path)
    manifest.write_text("".join(lines))
    (tmp_path / next(iter(shard_files(tmp_path)))).unlink()
    with pytest.raises(ShardError, match="has no file"):
        open_cache(tmp_path)


def test_two_runs_cannot_share_a_cache(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    with pytest.raises(ValueError, match="in use by another run"):
        open_cache(tmp_path)
    cache.close()
    open_cache(tmp_path).close()


WRITER = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_hidden_state_cache import open_cache, write

folder = Path(sys.argv[1])
cache = open_cache(folder)
first = len(cache.refs())
for number in itertools.count(first):
    ref = cache.put(number, write(folder, number))
    print(number, ref.checksum, flush=True)
"""


def test_every_acknowledged_shard_survives_kill_9(tmp_path: Path) -> None:
    acknowledged: dict[int, str] = {}
    for shards_before_kill in (1, 7, 12):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert writer.stdout is not None
        for _ in range(shards_before_kill):
            number, checksum = writer.stdout.readline().split()
            acknowledged[int(number)] = checksum
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        for line in writer.stdout.read().splitlines():  # what it still said before it died
            number, checksum = line.split()
            acknowledged[int(number)] = checksum
        # A crash may also leave these; whether this one did is a matter of luck.
        (tmp_path / "ffff.partial").write_bytes(b"\0" * 100)
        with (tmp_path / MANIFEST_FILE).open("a") as manifest:
            manifest.write('{"event": "put", "ind')

        cache = open_cache(tmp_path)
        refs = cache.refs()
        assert [ref.checksum for ref in refs[: len(acknowledged)]] == list(acknowledged.values())
        # The last line may have reached the disk without the writer having had time to say so.
        assert len(refs) - len(acknowledged) in (0, 1)
        acknowledged = {index: ref.checksum for index, ref in enumerate(refs)}
        for index, ref in enumerate(refs):
            assert read_shard(tmp_path, ref).sequence_ids == (f"r{index}.a", f"r{index}.b")
        assert shard_files(tmp_path) == {ref.uri for ref in refs}
        cache.close()
    assert len(acknowledged) >= 20


def tensors_within(value: object) -> list[str]:
    """Paths of every tensor or array inside a message; unknown kinds of objects count as one."""
    if isinstance(value, torch.Tensor | np.ndarray | bytes | memoryview):
        return [type(value).__name__]
    if value is None or isinstance(value, str | int | float | bool):
        return []
    if dataclasses.is_dataclass(value):
        parts = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list | tuple | set):
        parts = list(enumerate(value))
    else:
        return [f"unknown {type(value).__name__}"]
    return [f"{name}.{found}" for name, part in parts for found in tensors_within(part)]


def test_control_messages_carry_no_tensors(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    messages = {
        "put": cache.put(0, write(tmp_path, 0)),
        "refs": cache.refs(0),
        "lease": cache.lease("rank0", ["s0"]),
        "ack": cache.ack("rank0", ["s0"]),
        "stats": cache.stats(),
        "finished": cache.finished_sequence_ids(),
        "evict": cache.evict(["s0"]),
    }
    assert tensors_within(messages) == []
    assert len(json.dumps([dataclasses.asdict(ref) for ref in messages["refs"]])) < 2000
    shard = HiddenStateShard(
        **{f.name: torch.ones(1) for f in dataclasses.fields(HiddenStateShard)}
    )
    assert "x.0.last_hidden_states.Tensor" in tensors_within({"x": [shard]})


def test_the_cache_works_as_a_ray_actor_and_survives_its_death(
    tmp_path: Path, local_ray: None
) -> None:
    import ray

    remote = ray.remote(HiddenStateCache).options(num_cpus=0, max_restarts=1, max_task_retries=-1)
    cache = remote.remote(tmp_path, CacheConfig(), SOURCE, sweep=False)
    refs = [write(tmp_path, number) for number in range(3)]
    puts = [cache.put.remote(index, ref) for index, ref in enumerate(refs)]
    assert ray.get(puts) == refs
    in_flight = write(tmp_path, 3)

    ray.kill(cache, no_restart=False)
    assert ray.get(cache.refs.remote(1)) == refs[1:]
    assert ray.get(cache.put.remote(3, in_flight)) == in_flight
    assert tensors_within(ray.get(cache.refs.remote(0))) == []
    with pytest.raises(ShardError, match="target_fingerprint"):
        ray.get(cache.put.remote(4, replace(refs[0], target_fingerprint="fp-b")))
    ray.kill(cache)
