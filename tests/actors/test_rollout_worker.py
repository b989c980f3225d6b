"""Rollout workers: the same shards whoever makes them, whatever shares a batch, whoever dies."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from paceline.actors.config import CacheConfig, RolloutConfig
from paceline.actors.hidden_state_cache import HiddenStateCache
from paceline.actors.rollout_pool import RolloutPool
from paceline.actors.rollout_shards import FinishedShard, ShardTask, shard_tasks
from paceline.actors.rollout_worker import RolloutWorker
from paceline.models.checkpoints import new_record, save_drafter
from paceline.models.config import BackboneConfig, DrafterConfig, SamplingConfig, TargetConfig
from paceline.models.drafter import build_drafter
from paceline.models.records import HiddenStateShard, Prompt
from paceline.models.shard_checks import ShardSource
from paceline.models.shards import read_shard
from paceline.models.target import Target

TARGET = TargetConfig(model="builtin:tiny-llama", device="cpu")
TAPS = (0, 1, 3)
CACHE = CacheConfig(dtype="float32")
SAMPLED = SamplingConfig(temperature=1.0, top_k=50, seed=3, max_new_tokens=16)


def prompts(count: int = 12) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    return [
        Prompt(
            prompt_id=f"p{i}",
            domain=f"d{i % 2}",
            token_ids=tuple(torch.randint(4, 250, (4 + i % 5,), generator=generator).tolist()),
        )
        for i in range(count)
    ]


def tasks(count: int = 12) -> list[ShardTask]:
    return shard_tasks(prompts(count), shard_tokens=60, response_tokens=16)


def make(
    folder: Path, own: list[ShardTask], batch_size: int, sampling: SamplingConfig = SAMPLED
) -> dict[int, HiddenStateShard]:
    rollout = RolloutConfig(batch_size=batch_size, sampling=sampling)
    worker = RolloutWorker(TARGET, rollout, CACHE, tap_layer_ids=TAPS, cache_folder=str(folder))
    return {done.index: read_shard(folder, done.ref) for done in worker.generate(own)}


def test_tasks_keep_the_order_and_cut_by_tokens() -> None:
    cut = tasks()
    assert [task.index for task in cut] == list(range(len(cut)))
    assert [p.prompt_id for task in cut for p in task.prompts] == [f"p{i}" for i in range(12)]
    for task in cut[:-1]:
        sizes = [len(p.token_ids) + 16 for p in task.prompts]
        assert sum(sizes) >= 60 > sum(sizes[:-1])


def test_sampled_shards_are_the_same_whatever_shares_the_batch_or_the_worker(
    tmp_path: Path,
) -> None:
    cut = tasks()
    together = make(tmp_path / "a", cut, batch_size=5)
    split = {
        **make(tmp_path / "b", cut[1::2], batch_size=1),
        **make(tmp_path / "c", cut[0::2][::-1], batch_size=3),
    }
    assert together.keys() == split.keys()
    for index, shard in together.items():
        assert torch.equal(shard.input_ids, split[index].input_ids)
        assert shard.sequence_ids == split[index].sequence_ids
        torch.testing.assert_close(
            shard.aux_hidden_states, split[index].aux_hidden_states, atol=1e-4, rtol=1e-3
        )
    other = make(tmp_path / "d", cut, 5, SAMPLED.model_copy(update={"seed": 4}))
    assert any(not torch.equal(other[i].input_ids, s.input_ids) for i, s in together.items())


def test_given_responses_are_replayed_and_masked_by_position(tmp_path: Path) -> None:
    given = [
        Prompt(prompt_id="g", domain="d", token_ids=(5, 6, 7), response_token_ids=(9, 6, 7, 8))
    ]
    (shard,) = make(tmp_path, [ShardTask(index=0, prompts=tuple(given))], 4).values()
    assert shard.input_ids.tolist() == [5, 6, 7, 9, 6, 7, 8]
    assert shard.loss_mask.tolist() == [False] * 3 + [True] * 4


def test_a6_last_hidden_states_of_a_shard_give_the_targets_own_next_tokens(tmp_path: Path) -> None:
    """Greedy responses: lm_head of row t - 1 must choose x_t, which states before the norm fail."""
    greedy = SamplingConfig(max_new_tokens=16)
    target = Target.load(TARGET)
    for shard in make(tmp_path, tasks(), 4, greedy).values():
        assert shard.norm_applied
        chosen = target.logits(shard.last_hidden_states[:-1]).argmax(dim=-1)
        mask = shard.loss_mask[1:]
        assert torch.equal(chosen[mask], shard.input_ids[1:][mask].long())


def test_rollouts_that_speculate_make_the_same_shards(tmp_path: Path) -> None:
    target = Target.load(TARGET)
    target.tap(TAPS)
    drafter = build_drafter(
        DrafterConfig(backbone=BackboneConfig(kind="autoregressive")),
        target.spec,
        tap_layer_ids=TAPS,
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
    )
    save_drafter(tmp_path / "drafter", drafter, new_record(drafter.config, target))
    greedy = SamplingConfig(max_new_tokens=16)
    plain = make(tmp_path / "plain", tasks(), 4, greedy)
    rollout = RolloutConfig(batch_size=4, sampling=greedy, drafter=str(tmp_path / "drafter"))
    folder = tmp_path / "speculative"
    worker = RolloutWorker(TARGET, rollout, CACHE, tap_layer_ids=TAPS, cache_folder=str(folder))
    made = {done.index: read_shard(folder, done.ref) for done in worker.generate(tasks())}
    assert made.keys() == plain.keys()
    for index, shard in made.items():
        assert torch.equal(shard.input_ids, plain[index].input_ids)
        torch.testing.assert_close(
            shard.last_hidden_states, plain[index].last_hidden_states, atol=1e-4, rtol=1e-3
        )
    other = RolloutWorker(TARGET, rollout, CACHE, tap_layer_ids=(0, 2), cache_folder=str(folder))
    with pytest.raises(ValueError, match="tap_layer_ids"):
        next(other.generate(tasks()))


def test_a_worker_killed_with_9_is_replaced_and_no_shard_is_lost_or_made_twice(
    tmp_path: Path, local_ray: None
) -> None:
    import ray

    target = Target.load(TARGET)
    target.tap(TAPS)
    source = ShardSource(
        target_fingerprint=target.fingerprint,
        tokenizer_hash=target.tokenizer_hash,
        tap_layer_ids=TAPS,
    )
    cache = (
        ray.remote(HiddenStateCache)
        .options(num_cpus=0)
        .remote(tmp_path / "cache", CACHE, source, sweep=False)
    )
    rollout = RolloutConfig(num_workers=2, batch_size=2, sampling=SAMPLED, num_cpus=0.5)
    pool = RolloutPool(
        TARGET, rollout, CACHE, cache, tap_layer_ids=TAPS, cache_folder=str(tmp_path / "cache")
    )
    own = tasks(40)
    pool.start(own)
    made: list[FinishedShard] = []
    victims: list[int] = []
    deadline = time.monotonic() + 120
    while not pool.done:
        assert time.monotonic() < deadline
        made += pool.poll(timeout=0.5)
        if made and not victims:
            victims = [
                child.pid
                for child in psutil.Process().children(recursive=True)
                if "RolloutWorker" in "".join(child.cmdline())
            ]
            os.kill(victims[0], signal.SIGKILL)
    pool.close()
    assert victims
    assert sorted(done.index for done in made) == [task.index for task in own]
    refs = ray.get(cache.refs.remote(0))
    assert len(refs) == len(own)
    ids = [i for ref in refs for i in read_shard(tmp_path / "cache", ref).sequence_ids]
    assert ids == [f"p{i}" for i in range(40)]
    ray.kill(cache)


def test_a_full_disk_stops_the_worker_and_keeps_the_shards_before(
    tmp_path: Path,
) -> None:
    cut = tasks()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    rollout = RolloutConfig(batch_size=1, sampling=SAMPLED)
    worker = RolloutWorker(TARGET, rollout, CACHE, tap_layer_ids=TAPS, cache_folder=str(tmp_path))
    stream = worker.generate(cut)
    first = next(stream)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (first.ref.num_bytes // 2, hard))
    try:
        with pytest.raises(OSError, match="resume="):
            next(stream)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert read_shard(tmp_path, first.ref).sequence_ids[0] == "p0"
    assert [path.name for path in tmp_path.iterdir()] == [first.ref.uri]
