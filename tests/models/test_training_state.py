"""Data order, learning rate, and checkpoint folders that are whole or absent."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.models.training_state import (
    MANIFEST_FILE,
    STATE_FILE,
    SequenceSampler,
    TrainingCheckpointError,
    TrainingState,
    learning_rate,
    list_checkpoints,
    micro_batch_seed,
    new_checkpoint,
    read_checkpoint,
)

SHARDS = [("a", (4, 5, 6)), ("b", (3, 9)), ("c", (2, 2, 2, 7))]
SEQUENCES = {(shard, i): n for shard, (_, ns) in enumerate(SHARDS) for i, n in enumerate(ns)}


def full_sampler(state: TrainingState | None = None, seed: int = 0) -> SequenceSampler:
    sampler = SequenceSampler(batch_tokens=10, seed=seed, state=state)
    for shard in SHARDS:
        sampler.add_shard(*shard)
    sampler.finish()
    return sampler


def test_first_pass_takes_shards_in_index_order_within_the_token_budget() -> None:
    batches = full_sampler().take(5)
    assert [batch.sequences for batch in batches[:4]] == [
        ((0, 0), (0, 1)),
        ((0, 2), (1, 0)),
        ((1, 1),),
        ((2, 0), (2, 1), (2, 2)),
    ]
    assert batches[4].sequences[0] == (2, 3)
    assert [batch.num_tokens for batch in batches[:4]] == [9, 9, 9, 6]
    assert [batch.index for batch in batches] == [0, 1, 2, 3, 4]


def test_later_passes_are_shuffled_and_complete() -> None:
    stream = [key for batch in full_sampler().take(60) for key in batch.sequences]
    passes = [stream[start : start + 9] for start in range(0, 90, 9)]
    assert all(sorted(one) == sorted(SEQUENCES) for one in passes)
    assert passes[0] == list(SEQUENCES)
    assert len({tuple(one) for one in passes}) == len(passes)
    other_seed = [key for batch in full_sampler(seed=1).take(60) for key in batch.sequences]
    assert other_seed[:9] == stream[:9] and other_seed[9:18] != stream[9:18]


def test_arrival_times_do_not_change_the_batches() -> None:
    expected = full_sampler().take(12)
    for trial in range(20):
        draw = random.Random(trial)
        sampler = SequenceSampler(batch_tokens=10, seed=0)
        waiting, taken = list(SHARDS), []
        while len(taken) < 12:
            if waiting and draw.random() < 0.3:
                sampler.add_shard(*waiting.pop(0))
            elif not waiting and not sampler.finished:
                sampler.finish()
            taken.extend(sampler.take(1) or ())
        assert tuple(taken) == expected


def test_waits_without_taking_anything_until_the_step_is_covered() -> None:
    sampler = SequenceSampler(batch_tokens=10, seed=0)
    assert sampler.take(1) is None
    sampler.add_shard(*SHARDS[0])
    assert sampler.take(2) is None
    assert sampler.state(step=0, tokens_seen=0).cursor == 0
    sampler.add_shard(*SHARDS[1])
    assert [batch.index for batch in sampler.take(2)] == [0, 1]


def test_a_sequence_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    sampler = SequenceSampler(batch_tokens=10, seed=0)
    sampler.add_shard("a", (3, 40, 3))
    sampler.finish()
    assert [batch.num_tokens for batch in sampler.take(2)] == [3, 40]


def test_no_sequence_comes_twice_within_one_batch() -> None:
    sampler = SequenceSampler(batch_tokens=1000, seed=0)
    sampler.add_shard("a", (3, 4))
    sampler.finish()
    assert all(sorted(batch.sequences) == [(0, 0), (0, 1)] for batch in sampler.take(5))


@pytest.mark.parametrize("steps_before", [1, 3, 7])
def test_a_resumed_sampler_continues_the_same_stream(steps_before: int) -> None:
    whole = full_sampler()
    expected = [whole.take(2) for _ in range(10)]
    first = full_sampler()
    for _ in range(steps_before):
        first.take(2)
    state = first.state(step=steps_before, tokens_seen=0)
    resumed = full_sampler(state)
    assert [resumed.take(2) for _ in range(10 - steps_before)] == expected[steps_before:]


def test_a_run_resumed_in_its_first_pass_takes_shards_that_came_later() -> None:
    first = SequenceSampler(batch_tokens=10, seed=0)
    first.add_shard(*SHARDS[0])
    expected = full_sampler().take(8)
    assert first.take(1) == expected[:1]
    state = first.state(step=1, tokens_seen=9)
    assert full_sampler(state).take(7) == expected[1:]


def test_more_ranks_split_the_same_stream() -> None:
    one, two = full_sampler(), full_sampler()
    by_ones = [batch for _ in range(6) for batch in one.take(1)]
    by_twos = [batch for _ in range(3) for batch in two.take(2)]
    assert by_ones == by_twos


def test_resuming_on_other_shards_is_refused() -> None:
    state = full_sampler().state(step=4, tokens_seen=0)
    sampler = SequenceSampler(batch_tokens=10, seed=0, state=state)
    sampler.add_shard(*SHARDS[0])
    sampler.add_shard("b", (3, 8))
    with pytest.raises(TrainingCheckpointError, match=r"shard c.*own cache folder"):
        sampler.add_shard(*SHARDS[2])
    fewer = SequenceSampler(batch_tokens=10, seed=0, state=state)
    fewer.add_shard(*SHARDS[0])
    with pytest.raises(TrainingCheckpointError, match="holds 1 shards.*trained on 3"):
        fewer.finish()


def test_no_data_at_all_is_an_error_that_says_what_to_check() -> None:
    with pytest.raises(ValueError, match=r"no sequence to train on.*data\.prompts"):
        SequenceSampler(batch_tokens=10, seed=0).finish()


def test_learning_rate_warms_up_linearly_then_follows_a_cosine() -> None:
    def rate(step: int) -> float:
        return learning_rate(step, lr=2.0, steps=104, warmup_ratio=0.04, min_lr_ratio=0.1)

    assert [rate(step) for step in range(5)] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rate(5) == pytest.approx(2.0)  # ceil(0.04 * 104) = 5 warm-up steps, then progress 0
    assert rate(5 + 99 // 2) == pytest.approx(2.0 * 0.55, rel=0.03)
    assert rate(104) == rate(500) == pytest.approx(0.2)
    assert all(rate(step) > rate(step + 1) for step in range(5, 103))


def test_micro_batch_seeds_differ_by_index_and_by_seed() -> None:
    seeds = {micro_batch_seed(seed, index) for seed in range(3) for index in range(50)}
    assert len(seeds) == 150 and all(0 <= seed < 2**63 for seed in seeds)


def save(root: Path, step: int, content: bytes = b"weights") -> Path:
    with new_checkpoint(root, TrainingState(step=step, tokens_seen=step * 10)) as folder:
        (folder / "weights.bin").write_bytes(content)
    return list_checkpoints(root)[-1]


def test_a_checkpoint_reads_back_what_was_saved(tmp_path: Path) -> None:
    save(tmp_path, 9)
    latest = save(tmp_path, 10)
    assert latest.name == "step-0000010"
    assert read_checkpoint(latest) == TrainingState(step=10, tokens_seen=100)
    assert (latest / "weights.bin").read_bytes() == b"weights"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3, b"old")
    latest = save(tmp_path, 3, b"new")
    assert len(list_checkpoints(tmp_path)) == 1
    assert (latest / "weights.bin").read_bytes() == b"new"
    read_checkpoint(latest)


def test_an_error_while_saving_leaves_only_what_was_there(tmp_path: Path) -> None:
    older = save(tmp_path, 1)
    with pytest.raises(OSError, match="disk full"):
        with new_checkpoint(tmp_path, TrainingState(step=2)) as folder:
            (folder / "weights.bin").write_bytes(b"half")
            raise OSError("disk full")
    assert list(tmp_path.iterdir()) == [older]
    read_checkpoint(older)


def test_killing_a_process_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    older = save(tmp_path, 1)
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from paceline.models.training_state import TrainingState, new_checkpoint\n"
        "with new_checkpoint(Path(sys.argv[1]), TrainingState(step=2)) as folder:\n"
        "    (folder / 'weights.bin').write_bytes(b'half')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "writing\n"
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2  # the half-written folder has another name
    assert list_checkpoints(tmp_path) == [older]
    assert read_checkpoint(older).step == 1
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000001", "step-0000002"]


def test_a_truncated_file_is_refused_with_its_name_and_the_older_checkpoint(tmp_path: Path) -> None:
    older, latest = save(tmp_path, 1), save(tmp_path, 2)
    file = latest / "weights.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TrainingCheckpointError) as error:
        read_checkpoint(latest)
    assert str(file) in str(error.value) and f"resume from {older}" in str(error.value)


@pytest.mark.parametrize("name", ["weights.bin", STATE_FILE, MANIFEST_FILE])
def test_a_missing_file_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    (folder / name).unlink()
    with pytest.raises(TrainingCheckpointError, match=f"{name}.*missing.*start the run again"):
        read_checkpoint(folder)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingCheckpointError, match=r"manifest\.json is missing"):
        read_checkpoint(tmp_path / "nothing")


def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (tmp_path / "outside").write_bytes(b"x")
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["sha256"]["../outside"] = "0"
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(TrainingCheckpointError, match="outside"):
        read_checkpoint(folder)
