"""One training rank: exact normalisation, resuming, pausing and what it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.actors.drafter_trainer import OPTIMIZER_FILE, DrafterTrainer, ObjectiveModule
from paceline.models.batches import batch_from_sequences
from paceline.models.checkpoints import DRAFTER_RECORD, DRAFTER_WEIGHTS, load_drafter
from paceline.models.config import TargetConfig
from paceline.models.shards import read_shard
from paceline.models.tiny import write_tiny_target
from paceline.models.training_state import (
    MANIFEST_FILE,
    SequenceSampler,
    TrainingCheckpointError,
    micro_batch_seed,
)

OpenRun = Callable[..., Any]
AssertWeights = Callable[..., None]


def plain_torch_run(
    training_world: Any, steps: int
) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """The same steps without DeepSpeed: all of a step's rows in one graph, AdamW, clipping."""
    config = training_world.setup.trainer
    drafter, _ = load_drafter(Path(training_world.setup.drafter_folder), training_world.target)
    module = ObjectiveModule(
        drafter, training_world.setup.objective, training_world.target.lm_head_weight
    )
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
    )
    folder = Path(training_world.setup.cache_folder)
    shards = [read_shard(folder, ref) for ref in training_world.refs]
    sampler = SequenceSampler(batch_tokens=config.batch_tokens, seed=config.seed)
    for ref, shard in zip(training_world.refs, shards, strict=True):
        sampler.add_shard(ref.shard_id, shard.cu_seqlens.diff().tolist())
    sampler.finish()
    history = []
    for step in range(steps):
        # Warm-up is one step (0.04 of 6, rounded up), then the cosine over the other five.
        progress = torch.tensor(max(0, step - 1) / 5 * torch.pi)
        optimizer.param_groups[0]["lr"] = config.lr * 0.5 * (1.0 + float(progress.cos()))
        loss_sum, weight_sum = torch.zeros(()), torch.zeros(())
        for micro in sampler.take(config.gradient_accumulation_steps) or ():
            batch = batch_from_sequences([(shards[shard], i) for shard, i in micro.sequences])
            generator = torch.Generator()
            generator.manual_seed(micro_batch_seed(config.seed, micro.index))
            loss, weight, _ = module(batch, generator)
            loss_sum, weight_sum = loss_sum + loss, weight_sum + weight
        optimizer.zero_grad()
        (loss_sum / weight_sum).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
        optimizer.step()
        history.append((float((loss_sum / weight_sum).detach()), float(norm)))
    return dict(drafter.state_dict()), history


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_steps_equal_plain_torch_on_the_whole_batch(
    training_world: Any, zero_stage: int, open_run: OpenRun, assert_weights: AssertWeights
) -> None:
    expected, history = plain_torch_run(training_world, 3)
    with open_run(training_world.with_trainer(zero_stage=zero_stage)) as run:
        reports = run.train(3)
        assert_weights(run.weights(), expected, atol=1e-5)
    for report, (loss, norm) in zip(reports, history, strict=True):
        assert report.loss == pytest.approx(loss, abs=1e-5)
        assert report.grad_norm == pytest.approx(norm, rel=1e-4)
        assert norm > training_world.setup.trainer.grad_clip, (
            "clipping must be part of the comparison"
        )


def test_metrics_are_summed_over_micro_steps(training_world: Any, open_run: OpenRun) -> None:
    # A budget below the shortest sequence makes each a micro-batch of its own.
    single = training_world.with_trainer(batch_tokens=1, gradient_accumulation_steps=4, steps=1)
    with open_run(single) as run:
        (report,) = run.train(1)
    assert report.num_sequences == 4
    totals = [count for name, (_, count) in report.metrics.items() if name == "accuracy_pos_0"]
    assert totals and totals[0] > 4


def test_training_lowers_the_loss(training_world: Any, open_run: OpenRun) -> None:
    with open_run(training_world.with_trainer(steps=30, lr=1e-2)) as run:
        reports = run.train(30)
    losses = [report.loss for report in reports]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert [report.step for report in reports] == list(range(1, 31))


@pytest.mark.parametrize(
    "changes",
    [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2}, {"dtype": "bfloat16"}],
    ids=lambda changes: "-".join(f"{name}-{value}" for name, value in changes.items()),
)
def test_resuming_equals_not_stopping(
    training_world: Any,
    tmp_path: Path,
    changes: dict[str, object],
    open_run: OpenRun,
    assert_weights: AssertWeights,
) -> None:
    setup = training_world.with_trainer(**changes)
    with open_run(setup) as whole:
        whole.train(2)
        checkpoint = whole.save(tmp_path)
        whole.train(2)
        expected = whole.weights()
        moments = whole.trainer.engine.optimizer_state()
    with open_run(setup, checkpoint) as resumed:
        assert resumed.state.step == 2
        resumed.train(2)
        assert_weights(resumed.weights(), expected, atol=1e-6)
        assert_weights(resumed.trainer.engine.optimizer_state(), moments, atol=1e-6)


def test_bfloat16_keeps_float32_master_weights(
    training_world: Any, tmp_path: Path, open_run: OpenRun
) -> None:
    setup = training_world.with_trainer(dtype="bfloat16", lr=1e-5)
    with open_run(setup) as run:
        before = run.weights()
        run.train(3)
        state = run.trainer.engine.optimizer_state()
    name = "drafter.backbone.layers.0.mlp.up_proj.weight"
    master, start = state[f"master.{name}"], before[name.removeprefix("drafter.")]
    assert master.dtype == torch.float32 and start.dtype == torch.bfloat16
    # Steps of 1e-5 vanish in bfloat16 weights of this size; the master weights keep them.
    moved = (master - start.float()).abs()
    assert 1e-6 < float(moved.max()) < 1e-4


def test_bfloat16_without_zero_is_refused_with_the_remedy(training_world: Any) -> None:
    trainer = DrafterTrainer(0, 1, training_world.with_trainer(dtype="bfloat16", zero_stage=0))
    with pytest.raises(ValueError, match=r"zero_stage=0.*trainer\.zero_stage=1"):
        trainer.load()


def test_a_paused_step_goes_on_where_it_stopped(
    reference: dict[int, Path], open_run: OpenRun, assert_weights: AssertWeights
) -> None:
    with open_run() as run:
        run.train(2)
        plan = run.plan()
        run.trainer.forward_backward(plan.micro_batches[0], plan.shards)
        run.trainer.engine.end_micro_step()
        run.trainer.pause()
        assert run.trainer.train_step(plan) is None
        assert run.trainer.train_step(plan) is None
        run.trainer.unpause()
        run.done(run.trainer.train_step(plan))
        assert run.state.step == 3
        assert_weights(run.weights(), reference[3], atol=1e-6)


def copy_checkpoint(source: Path, root: Path) -> Path:
    folder = root / source.name
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_truncated_checkpoint_is_refused_by_name(
    training_world: Any, reference: dict[int, Path], tmp_path: Path
) -> None:
    folder = copy_checkpoint(reference[3], tmp_path)
    file = folder / DRAFTER_WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TrainingCheckpointError, match=f"{file}.*truncated.*start the run again"):
        DrafterTrainer(0, 1, training_world.setup).load(checkpoint=str(folder))


@pytest.mark.parametrize("name", [DRAFTER_WEIGHTS, OPTIMIZER_FILE])
def test_a_checkpoint_with_nan_is_refused_by_name(
    training_world: Any, reference: dict[int, Path], tmp_path: Path, name: str, open_run: OpenRun
) -> None:
    folder = copy_checkpoint(reference[3], tmp_path)
    tensors = load_file(folder / name)
    next(t for t in tensors.values() if t.is_floating_point()).view(-1)[0] = torch.nan
    save_file(tensors, folder / name)
    reseal(folder)
    trainer = DrafterTrainer(0, 1, training_world.setup)
    try:
        with pytest.raises(ValueError, match=rf"{name}.*(NaN|not finite)"):
            trainer.load(checkpoint=str(folder))
    finally:
        if torch.distributed.is_initialized():
            trainer.close()


def reseal(folder: Path) -> None:
    """Make all hashes fit the files: the damage was there when the checkpoint was written."""
    record = json.loads((folder / DRAFTER_RECORD).read_text())
    record["sha256"] = sha256(folder / DRAFTER_WEIGHTS)
    (folder / DRAFTER_RECORD).write_text(json.dumps(record))
    names = json.loads((folder / MANIFEST_FILE).read_text())["sha256"]
    sums = {name: sha256(folder / name) for name in names}
    (folder / MANIFEST_FILE).write_text(json.dumps({"sha256": sums}))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_checkpoint_of_another_target_is_refused(
    training_world: Any, reference: dict[int, Path], tmp_path: Path
) -> None:
    write_tiny_target("llama", tmp_path / "other", seed=1)
    other = TargetConfig(model=str(tmp_path / "other"), device="cpu")
    trainer = DrafterTrainer(0, 1, dataclasses.replace(training_world.setup, target=other))
    with pytest.raises(ValueError, match=training_world.target.fingerprint):
        trainer.load(checkpoint=str(reference[3]))


def test_a_shard_of_another_target_is_refused_before_it_is_trained_on(
    training_world: Any, open_run: OpenRun
) -> None:
    foreign = dataclasses.replace(training_world.refs[0], target_fingerprint="someone-else")
    with open_run() as run:
        run.trainer._shards.clear()
        with pytest.raises(ValueError, match="someone-else"):
            run.trainer.sequence_lengths(foreign)


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(
    training_world: Any, open_run: OpenRun, assert_weights: AssertWeights
) -> None:
    with open_run() as run:
        run.train(1)
        before = run.weights()
        plan = run.plan()
        for shard in run.trainer._shards.values():
            shard.aux_hidden_states.fill_(torch.nan)  # mapped copy-on-write: the files are safe
        with pytest.raises(ValueError, match=r"step 2: the loss is nan.*trainer\.lr"):
            run.trainer.train_step(plan)
        assert_weights(run.weights(), before, atol=0.0)


def tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def test_messages_between_group_and_ranks_carry_no_tensors(
    training_world: Any, open_run: OpenRun
) -> None:
    with open_run() as run:
        plan = run.plan()
        report = run.done(run.trainer.train_step(plan))
        messages = [training_world.setup, plan, report, run.state]
    assert not list(tensors_in(messages))
    assert list(tensors_in([plan, {"x": (torch.ones(1),)}])), "the search itself must find tensors"
