"""A tiny target, an untrained drafter and shards, and ranks that train on them in this process.

Hidden states are random, because what is tested is the trainer and not what a drafter learns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.actors.config import TrainerConfig
from paceline.actors.drafter_trainer import DrafterTrainer
from paceline.actors.training_records import RankReport, StepPlan, TrainerSetup
from paceline.models.checkpoints import DRAFTER_WEIGHTS, new_record, save_drafter
from paceline.models.config import BackboneConfig, DrafterConfig, ObjectiveConfig, TargetConfig
from paceline.models.drafter import build_drafter
from paceline.models.records import HiddenStateShard, ShardRef
from paceline.models.shard_checks import ShardSource
from paceline.models.shards import write_shard
from paceline.models.target import Target
from paceline.models.tiny import write_tiny_target
from paceline.models.training_state import SequenceSampler

TAPS = (1, 2)


@dataclasses.dataclass(frozen=True)
class World:
    """A target, an untrained drafter and some shards, on disk."""

    setup: TrainerSetup
    target: Target
    refs: tuple[ShardRef, ...]

    def with_trainer(self, **changes: object) -> TrainerSetup:
        trainer = TrainerConfig(**{**self.setup.trainer.model_dump(), **changes})
        return dataclasses.replace(self.setup, trainer=trainer)


@pytest.fixture(scope="session")
def training_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("trainer")
    write_tiny_target("llama", root / "target")
    target_config = TargetConfig(model=str(root / "target"), device="cpu")
    target = Target.load(target_config)
    target.tap(TAPS)
    config = DrafterConfig(
        method="block",
        backbone=BackboneConfig(kind="block", block_size=4, anchors_per_sequence=3),
    )
    drafter = build_drafter(
        config,
        target.spec,
        tap_layer_ids=TAPS,
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
    )
    save_drafter(root / "drafter", drafter, new_record(config, target))
    refs = tuple(make_shard(root / "cache", target, index) for index in range(4))
    setup = TrainerSetup(
        target=target_config,
        drafter_folder=str(root / "drafter"),
        cache_folder=str(root / "cache"),
        objective=(ObjectiveConfig(),),
        trainer=TrainerConfig(
            steps=6, batch_tokens=60, gradient_accumulation_steps=2, lr=1e-3, grad_clip=0.5
        ),
    )
    return World(setup, target, refs)


def make_shard(folder: Path, target: Target, index: int) -> ShardRef:
    generator = torch.Generator().manual_seed(index)
    lengths = torch.randint(12, 30, (5,), generator=generator).tolist()
    total, width = sum(lengths), target.spec.hidden_size
    shard = HiddenStateShard(
        input_ids=torch.randint(4, 200, (total,), generator=generator, dtype=torch.int32),
        position_ids=torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
        # Masks of different weight in each sequence, so that a mean of means would be wrong.
        loss_mask=torch.cat([torch.arange(n) >= 2 + 3 * (i % 2) for i, n in enumerate(lengths)]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        aux_hidden_states=torch.randn(total, len(TAPS), width, generator=generator),
        last_hidden_states=torch.randn(total, width, generator=generator),
        norm_applied=True,
        domains=("test",) * 5,
        sequence_ids=tuple(f"{index}-{i}" for i in range(5)),
    )
    source = ShardSource(
        target_fingerprint=target.fingerprint,
        tokenizer_hash=target.tokenizer_hash,
        tap_layer_ids=TAPS,
    )
    return write_shard(folder, shard, shard_id=f"s{index}", source=source)


class Run:
    """One rank driven in this process, as a group would drive it."""

    def __init__(self, world: World, setup: TrainerSetup, checkpoint: Path | None = None) -> None:
        self.world, config = world, setup.trainer
        self.trainer = DrafterTrainer(0, 1, setup)
        self.accumulation = config.gradient_accumulation_steps
        self.state = self.trainer.load(checkpoint=str(checkpoint) if checkpoint else None)
        self.sampler = SequenceSampler(
            batch_tokens=config.batch_tokens, seed=config.seed, state=self.state
        )
        for ref in world.refs:
            self.sampler.add_shard(ref.shard_id, self.trainer.sequence_lengths(ref))
        self.sampler.finish()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.trainer.close()

    def plan(self) -> StepPlan:
        batches = self.sampler.take(self.accumulation)
        assert batches is not None
        shards = {shard: self.world.refs[shard] for b in batches for shard, _ in b.sequences}
        return StepPlan(step=self.state.step, micro_batches=batches, shards=shards)

    def train(self, steps: int) -> list[RankReport]:
        return [self.done(self.trainer.train_step(self.plan())) for _ in range(steps)]

    def done(self, report: RankReport | None) -> RankReport:
        assert report is not None
        tokens = self.state.tokens_seen + report.num_tokens
        self.state = self.sampler.state(step=report.step, tokens_seen=tokens)
        return report

    def save(self, root: Path) -> Path:
        return Path(self.trainer.save_checkpoint(str(root), self.state))

    def weights(self) -> dict[str, Tensor]:
        state = self.trainer.drafter.state_dict()
        return {name: tensor.detach().clone() for name, tensor in state.items()}


@pytest.fixture(scope="session")
def open_run(training_world: World) -> Callable[..., Run]:
    """Starts a rank: open_run(setup, checkpoint=None), a context manager."""
    return lambda setup=training_world.setup, checkpoint=None: Run(
        training_world, setup, checkpoint
    )


@pytest.fixture(scope="session")
def reference(
    open_run: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """Checkpoints of an uninterrupted run of one rank, after 3 and after all 6 steps."""
    root = tmp_path_factory.mktemp("reference")
    with open_run() as run:
        run.train(3)
        middle = run.save(root)
        run.train(3)
        return {3: middle, 6: run.save(root)}


@pytest.fixture(scope="session")
def assert_weights() -> Callable[..., None]:
    """assert_weights(found, expected, atol): tensors by name, or the checkpoint they are in."""

    def check(
        found: dict[str, Tensor] | Path, expected: dict[str, Tensor] | Path, atol: float
    ) -> None:
        found, expected = _tensors(found), _tensors(expected)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=0.0, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
            )

    return check


def _tensors(source: dict[str, Tensor] | Path) -> dict[str, Tensor]:
    return load_file(source / DRAFTER_WEIGHTS) if isinstance(source, Path) else source
