"""New weights and a nap: a rollout worker takes both without losing a sequence or its drafter."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from paceline.actors.config import CacheConfig, RolloutConfig
from paceline.actors.hidden_state_cache import HiddenStateCache
from paceline.actors.rollout_pool import RolloutPool
from paceline.actors.rollout_shards import FinishedShard, ShardTask, shard_tasks
from paceline.actors.rollout_worker import RolloutWorker
from paceline.models.checkpoints import (
    CheckpointError,
    DrafterState,
    bind_drafter,
    new_record,
    read_drafter,
    save_drafter,
)
from paceline.models.config import SamplingConfig, TargetConfig
from paceline.models.fingerprint import TargetMismatchError
from paceline.models.records import HiddenStateShard, Prompt
from paceline.models.shards import read_shard
from paceline.models.target import Target
from tests.models.engine_setup import TAPS, drafter_for

TARGET = TargetConfig(model="builtin:tiny-llama", device="cpu")
CACHE = CacheConfig(dtype="float32")
GREEDY = SamplingConfig(max_new_tokens=16)
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def target() -> Target:
    target = Target.load(TARGET)
    target.tap(TAPS)
    return target


def drafter_state(target: Target, folder: Path, seed: int = 0, version: int = 1) -> DrafterState:
    drafter = drafter_for(target, seed=seed)
    record = replace(new_record(drafter.config, target), drafter_version=version)
    save_drafter(folder, drafter, record)
    return read_drafter(folder)


def tasks(count: int = 8) -> list[ShardTask]:
    generator = torch.Generator().manual_seed(1)
    prompts = [
        Prompt(
            prompt_id=f"p{i}",
            domain="d",
            token_ids=tuple(torch.randint(4, 250, (5,), generator=generator).tolist()),
        )
        for i in range(count)
    ]
    return shard_tasks(prompts, shard_tokens=20, response_tokens=16)


def worker_of(folder: Path, **options: object) -> RolloutWorker:
    rollout = RolloutConfig.model_validate({"batch_size": 1, "sampling": GREEDY, **options})
    return RolloutWorker(TARGET, rollout, CACHE, tap_layer_ids=TAPS, cache_folder=str(folder))


def tokens(folder: Path, made: list[FinishedShard]) -> list[Tensor]:
    shards: list[HiddenStateShard] = [read_shard(folder, done.ref) for done in made]
    return [shard.input_ids for shard in shards]


def louder(target: Target) -> dict[str, Tensor]:
    return {UP: target.model.state_dict()[UP] * 3.0}


def test_new_target_weights_act_on_running_rollouts_and_are_on_record(
    tmp_path: Path, target: Target
) -> None:
    worker = worker_of(tmp_path / "a")
    stream = worker.generate(tasks())
    made = [next(stream), next(stream)]
    worker.update_target(louder(target), 4)
    made += stream
    assert [d.ref.min_target_version for d in made[:2]] == [0, 0]
    assert {d.ref.max_target_version for d in made[3:]} == {4}
    old, new = (worker_of(tmp_path / name) for name in ("b", "c"))
    new.update_target(louder(target), 4)
    got = tokens(tmp_path / "a", made)
    before = tokens(tmp_path / "b", list(old.generate(tasks())))
    after = tokens(tmp_path / "c", list(new.generate(tasks())))
    assert all(torch.equal(a, b) for a, b in zip(got[:2], before[:2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(got[3:], after[3:], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before[3:], after[3:], strict=True))
    assert worker.versions() == {"target": 4, "drafter": None}


@pytest.mark.parametrize(
    ("state", "version", "message"),
    [
        ({"layers.0.mlp.up_proj.weight": torch.zeros(1)}, 1, "layers.0.mlp.up_proj.weight"),
        ({UP: torch.zeros(3, 3)}, 1, r"\(3, 3\)"),
        ({}, 1, "no weights"),
        ({UP: torch.zeros(3, 3)}, 0, "version 0"),
    ],
)
def test_f58_an_update_that_would_do_nothing_is_refused_in_the_call(
    tmp_path: Path, state: dict[str, Tensor], version: int, message: str
) -> None:
    worker = worker_of(tmp_path)
    stream = worker.generate(tasks())
    next(stream)
    with pytest.raises(ValueError, match=message):
        worker.update_target(state, version)
    assert {d.ref.max_target_version for d in stream} == {0}


def test_f58_a_new_drafter_drafts_from_the_next_round_on_and_changes_no_token(
    tmp_path: Path, target: Target
) -> None:
    first, second = (drafter_state(target, tmp_path / str(n), n, n) for n in (1, 2))
    plain = tokens(tmp_path / "p", list(worker_of(tmp_path / "p").generate(tasks())))
    worker = worker_of(tmp_path / "s", drafter=str(tmp_path / "1"))
    stream = worker.generate(tasks())
    made = [next(stream), next(stream)]
    worker.update_drafter(second)
    made += stream
    assert [d.drafter_version for d in made[:2]] == [1, 1]
    assert {d.drafter_version for d in made[3:]} == {2}
    got = tokens(tmp_path / "s", made)
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    assert worker.drafter is not None
    bound = worker.drafter.state_dict()
    assert any(not torch.equal(bound[name], first.tensors[name]) for name in bound)
    assert all(torch.equal(bound[name], second.tensors[name]) for name in bound)


@pytest.mark.parametrize("policy", ["static", "length", "bandit"])
def test_a_worker_without_a_drafter_speculates_once_it_gets_one(
    tmp_path: Path, target: Target, policy: str
) -> None:
    worker = worker_of(tmp_path / "w", policy=policy, strategies=["eagle2_2_2_3"])
    stream = worker.generate(tasks())
    assert next(stream).trace.num_drafts == 0
    worker.update_drafter(drafter_state(target, tmp_path / "d"))
    later = list(stream)
    assert sum(d.trace.num_drafts for d in later) > 0
    assert later[-1].drafter_version in (1, None)


def test_f60_weights_of_another_model_never_get_into_the_drafter(
    tmp_path: Path, target: Target
) -> None:
    """The target's own weights, another target's drafter, other taps, NaN."""
    state = drafter_state(target, tmp_path / "d")
    worker = worker_of(tmp_path / "w", drafter=str(tmp_path / "d"))
    with pytest.raises(CheckpointError, match="d2t"):
        worker.update_drafter(replace(state, tensors=dict(target.model.state_dict())))
    name = next(n for n, t in state.tensors.items() if t.is_floating_point())
    nan = {**state.tensors, name: torch.full_like(state.tensors[name], torch.nan)}
    with pytest.raises(CheckpointError, match=name):
        worker.update_drafter(replace(state, tensors=nan))
    alien = replace(state.checkpoint, target_fingerprint="0123")
    with pytest.raises(TargetMismatchError, match="0123"):
        worker.update_drafter(replace(state, checkpoint=alien))
    other = replace(state.checkpoint, tap_layer_ids=(0, 1, 2))
    with pytest.raises(ValueError, match=r"\[0, 1, 2\]"):
        worker.update_drafter(replace(state, checkpoint=other))
    assert worker.drafter is not None
    assert all(torch.equal(t, state.tensors[n]) for n, t in worker.drafter.state_dict().items())


def test_a_drafter_of_an_earlier_version_of_the_target_still_belongs_to_it(
    tmp_path: Path, target: Target
) -> None:
    state = drafter_state(target, tmp_path / "d")
    worker = worker_of(tmp_path / "w")
    worker.update_target(louder(target), 1)
    worker.update_drafter(state)
    assert worker.versions() == {"target": 1, "drafter": 1}


def test_f59_the_drafter_survives_sleep_and_wake(tmp_path: Path, target: Target) -> None:
    newer = drafter_state(target, tmp_path / "new", seed=7, version=3)
    drafter_state(target, tmp_path / "old")
    worker = worker_of(tmp_path / "w", drafter=str(tmp_path / "old"))
    worker.update_drafter(newer)
    worker.update_target(louder(target), 2)
    before = list(worker.generate(tasks()))
    stream = worker.generate(tasks())
    next(stream)
    with pytest.raises(ValueError, match="sleep"):
        worker.sleep()
    list(stream)
    worker.sleep()
    with pytest.raises(ValueError, match="wake"):
        next(worker.generate(tasks()))
    worker.wake()
    after = list(worker.generate(tasks()))
    assert worker.versions() == {"target": 2, "drafter": 3}
    assert [d.trace for d in after] == [d.trace for d in before]
    assert [d.drafter_version for d in after] == [3] * len(after)
    folder = tmp_path / "w"
    pairs = zip(tokens(folder, before), tokens(folder, after), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_weights_go_to_workers_that_generate_and_to_those_started_again(
    tmp_path: Path, target: Target, local_ray: None
) -> None:
    """By object reference, while both workers generate; then one is killed."""
    import ray

    state = drafter_state(target, tmp_path / "d", version=5)
    cache = (
        ray.remote(HiddenStateCache)
        .options(num_cpus=0)
        .remote(tmp_path / "cache", CACHE, worker_of(tmp_path / "w").source, sweep=False)
    )
    rollout = RolloutConfig(num_workers=2, batch_size=1, sampling=GREEDY, num_cpus=0.5)
    pool = RolloutPool(
        TARGET, rollout, CACHE, cache, tap_layer_ids=TAPS, cache_folder=str(tmp_path / "cache")
    )
    own = tasks(40)
    pool.start(own)
    made: list[FinishedShard] = []
    killed = False
    deadline = time.monotonic() + 120
    while not pool.done:
        assert time.monotonic() < deadline
        made += pool.poll(timeout=0.5)
        if made and not killed:
            pool.update_target(ray.put(louder(target)), 2)
            pool.update_drafter(ray.put(state))
            with pytest.raises(ValueError, match="version 1"):
                pool.update_target(ray.put(louder(target)), 1)
            victim = next(
                child.pid
                for child in psutil.Process().children(recursive=True)
                if "RolloutWorker" in "".join(child.cmdline())
            )
            os.kill(victim, signal.SIGKILL)
            killed = True
    pool.close()
    ray.kill(cache)
    assert sorted(done.index for done in made) == [task.index for task in own]
    last = sorted(made, key=lambda done: done.index)[-4:]
    assert {done.ref.min_target_version for done in last} == {2}
    assert {done.drafter_version for done in last} == {5}


def test_a_bound_drafter_has_weights_of_its_own(tmp_path: Path, target: Target) -> None:
    """Arrays from an object store are read-only and shared: training on them would be a fault."""
    state = drafter_state(target, tmp_path / "d")
    drafter = bind_drafter(state, target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(1.0)
    again = read_drafter(tmp_path / "d").tensors
    assert all(torch.equal(tensor, again[name]) for name, tensor in state.tensors.items())
