"""Ranks as Ray actors: the same result on any number of them, and after losing one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from paceline.actors.trainer_group import TrainerGroup
from paceline.models.training_state import list_checkpoints

OpenRun = Callable[..., Any]
AssertWeights = Callable[..., None]


def test_two_ranks_train_what_one_rank_trains(
    training_world: Any,
    reference: dict[int, Path],
    local_ray: None,
    tmp_path: Path,
    open_run: OpenRun,
    assert_weights: AssertWeights,
) -> None:
    setup = training_world.with_trainer(num_ranks=2, gradient_accumulation_steps=1, num_cpus=0.5)
    group = TrainerGroup(setup, tmp_path)
    try:
        group.start()
        group.add_shards(training_world.refs)
        group.finish_shards()
        group.save_checkpoint()
        for _ in range(3):
            metrics = group.train_step()
            checkpoint = group.save_checkpoint()
    finally:
        group.close()
        group.close()
    assert checkpoint is not None
    assert_weights(checkpoint, reference[3], atol=1e-5)
    # Four were written; the newest two are kept.
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-0000002", "step-0000003"]
    assert metrics is not None and all(type(value) is float for value in metrics.values.values())
    assert {"loss", "lr", "grad_norm", "accuracy_pos_0", "tokens"} <= metrics.values.keys()
    # A checkpoint of two ranks continues on one: the state is kept whole, not by rank.
    with open_run(training_world.setup, checkpoint) as run:
        run.train(3)
        assert_weights(run.weights(), reference[6], atol=1e-5)


def test_a_resumed_group_that_loses_a_rank_still_ends_with_the_same_weights(
    training_world: Any,
    reference: dict[int, Path],
    local_ray: None,
    tmp_path: Path,
    assert_weights: AssertWeights,
) -> None:
    group = TrainerGroup(training_world.with_trainer(num_cpus=0.5), tmp_path)
    try:
        group.start(resume=reference[3])
        assert group.step == 3
        assert group.train_step() is None  # no shards yet
        group.add_shards(training_world.refs[:2])
        group.add_shards(training_world.refs[group.num_shards :])
        group.finish_shards()
        assert group.train_step() is not None
        ray.kill(group._ranks[0])
        assert group.train_step() is None
        assert (group.step, group.recoveries) == (3, 1)
        while group.step < 6:
            assert group.train_step() is not None
        checkpoint = group.save_checkpoint()
    finally:
        group.close()
    assert checkpoint is not None
    assert_weights(checkpoint, reference[6], atol=1e-6)
