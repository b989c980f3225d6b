"""One rank of drafter training: a DeepSpeed engine (ZeRO 0 to 2) around drafter and objective.

An ordinary class; actors/trainer_group.py wraps one per rank as a Ray actor and drives all ranks
through the same calls. Messages carry shard references, sequence numbers and plain floats.

Loss. A step covers all micro-batches of all ranks; with W the sum of their row weights, the loss
is (sum of all row losses) / W, whatever the split. W is known only after the last forward, so
gradients of plain sums are accumulated and divided by W / ranks (DeepSpeed averages over ranks)
just before the update, as a loss scale. Bfloat16 keeps float32 master weights in ZeRO.

DeepSpeed is used without its compiled extensions: nothing is built when a rank starts.
"""

from __future__ import annotations

import gc
import math
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray.util
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.actors.training_engine import TrainingEngine
from paceline.actors.training_records import RankReport, StepPlan, TrainerSetup, add_metrics
from paceline.models.batches import batch_from_sequences
from paceline.models.checkpoints import load_drafter, require_finite, save_drafter
from paceline.models.config import ObjectiveConfig
from paceline.models.drafter import Drafter
from paceline.models.objectives.objective import compute_objective
from paceline.models.records import HiddenStateShard, ShardRef, TrainBatch
from paceline.models.shard_checks import ShardSource
from paceline.models.shards import read_shard
from paceline.models.target import DTYPES, Target
from paceline.models.training_state import (
    MicroBatch,
    TrainingCheckpointError,
    TrainingState,
    checkpoint_name,
    learning_rate,
    micro_batch_seed,
    new_checkpoint,
    read_checkpoint,
)

OPTIMIZER_FILE = "optimizer.safetensors"


class ObjectiveModule(nn.Module):
    """Drafter and objective as the one module whose forward DeepSpeed wraps."""

    def __init__(
        self, drafter: Drafter, objective: tuple[ObjectiveConfig, ...], teacher_head_VD: Tensor
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective
        # A plain tensor: the target's, neither trained nor saved.
        self.teacher_head_VD = teacher_head_VD

    def forward(
        self, batch: TrainBatch, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, dict[str, tuple[float, float]]]:
        rows = self.drafter.training_forward(batch, generator)
        result = compute_objective(self.drafter, rows, batch, self.teacher_head_VD, self.objective)
        return result.loss_sum, result.weight_sum, result.metrics


@dataclass(slots=True)
class _StepSums:
    """What the micro-steps of an unfinished step have added up."""

    done: int = 0
    loss: float = 0.0
    weight: float = 0.0
    num_tokens: int = 0
    num_sequences: int = 0
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


class DrafterTrainer:
    """One rank. Call `load` first, on all ranks at once, as every method that says so."""

    def __init__(self, rank: int, world_size: int, setup: TrainerSetup) -> None:
        self.rank = rank
        self.world_size = world_size
        self.setup = setup
        self.device = "cuda" if setup.trainer.num_gpus > 0 else "cpu"
        self.dtype = DTYPES[setup.trainer.dtype]
        self._paused = threading.Event()
        self._shards: dict[str, HiddenStateShard] = {}
        self._sums = _StepSums()
        self._steps_done = 0

    def rendezvous(self) -> tuple[str, int]:
        """Address and free port at which the other ranks can meet this one."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((address, 0))
            return address, free.getsockname()[1]

    def load(
        self, master: tuple[str, int] | None = None, checkpoint: str | None = None
    ) -> TrainingState:
        """Build drafter and engine, from the setup's drafter or from a training checkpoint.

        All ranks call it with rank 0's rendezvous (a single rank needs none). Raises ValueError
        naming file and remedy if a checkpoint is damaged, holds NaN or is of another target.
        """
        state = TrainingState() if checkpoint is None else read_checkpoint(Path(checkpoint))
        folder = Path(checkpoint or self.setup.drafter_folder)
        target = Target.load(self.setup.target.model_copy(update={"device": self.device}))
        self.drafter, self.record = load_drafter(folder, target)
        self._source = ShardSource(
            target_fingerprint=target.fingerprint,
            tokenizer_hash=target.tokenizer_hash,
            tap_layer_ids=self.drafter.tap_layer_ids,
        )
        self.drafter.embedding_weight = self.drafter.embedding_weight.to(self.dtype)
        head = target.lm_head_weight.detach()[self.drafter.vocab.target_ids].to(self.dtype)
        del target
        gc.collect()  # only the embedding and the head's rows stay in memory
        self.engine = TrainingEngine(
            ObjectiveModule(self.drafter, self.setup.objective, head),
            self.setup.trainer,
            device=self.device,
            rank=self.rank,
            world_size=self.world_size,
            master=master,
        )
        self._steps_done = state.step
        if state.step > 0:
            self._load_optimizer(folder / OPTIMIZER_FILE, state.step)
        return state

    def _load_optimizer(self, path: Path, step: int) -> None:
        tensors = load_file(path)
        found = {name: tensor.shape for name, tensor in tensors.items()}
        if found != self.engine.optimizer_state_shapes():
            raise TrainingCheckpointError(
                f"checkpoint file {path} does not fit this drafter: it was written with other "
                "trainable parameters or another trainer.dtype; resume with the run's own "
                "configuration, or start a new run from the drafter"
            )
        for name, tensor in tensors.items():
            require_finite(path, name, tensor)
        self.engine.load_optimizer_state(tensors, step=step)

    def sequence_lengths(self, ref: ShardRef) -> tuple[int, ...]:
        """Tokens of each sequence of a shard, which is verified by it."""
        return tuple(self._shard(ref).cu_seqlens.diff().tolist())

    def _shard(self, ref: ShardRef) -> HiddenStateShard:
        """The shard, mapped once and verified then; mapped pages are the system's to drop."""
        shard = self._shards.get(ref.shard_id)
        if shard is None:
            self._source.check(ref)
            shard = read_shard(Path(self.setup.cache_folder), ref)
            self._shards[ref.shard_id] = shard
        return shard

    def train_step(self, plan: StepPlan) -> RankReport | None:
        """One step of all ranks, each with its own part; None if paused before its end.

        A paused step keeps its gradients: called again with the same plan, it goes on. Raises
        ValueError if the loss or the gradient is not finite, before it reaches the weights.
        """
        for micro_batch in plan.micro_batches[self._sums.done :]:
            if self.engine.all_sum([float(self._paused.is_set())])[0] > 0.0:
                return None
            self.forward_backward(micro_batch, plan.shards)
            if self._sums.done < len(plan.micro_batches):
                self.engine.end_micro_step()
        return self.optim_step(plan.step)

    def forward_backward(self, micro_batch: MicroBatch, shards: dict[int, ShardRef]) -> None:
        """Add one micro-batch's gradient and sums to the step."""
        started = time.perf_counter()
        batch = batch_from_sequences(
            [(self._shard(shards[shard]), sequence) for shard, sequence in micro_batch.sequences],
            min_target_version=min(ref.min_target_version for ref in shards.values()),
            max_target_version=max(ref.max_target_version for ref in shards.values()),
        ).to(self.device, self.dtype)
        generator = torch.Generator()
        generator.manual_seed(micro_batch_seed(self.setup.trainer.seed, micro_batch.index))
        loaded = time.perf_counter()
        loss_sum, weight_sum, metrics = self.engine.forward_backward(batch, generator)
        sums = self._sums
        sums.loss += float(loss_sum.detach())
        sums.weight += float(weight_sum)
        add_metrics(sums.metrics, metrics)
        sums.num_tokens += micro_batch.num_tokens
        sums.num_sequences += len(micro_batch.sequences)
        sums.load_seconds += loaded - started
        sums.compute_seconds += time.perf_counter() - loaded
        sums.done += 1

    def optim_step(self, step: int) -> RankReport:
        """End the step: normalise over all ranks and update the weights."""
        started = time.perf_counter()
        sums, self._sums = self._sums, _StepSums()
        config = self.setup.trainer
        lr = learning_rate(
            step,
            lr=config.lr,
            steps=config.steps,
            warmup_ratio=config.warmup_ratio,
            min_lr_ratio=config.min_lr_ratio,
        )
        loss_sum, weight_sum = self.engine.all_sum([sums.loss, sums.weight])
        loss = loss_sum / weight_sum if weight_sum > 0.0 else 0.0
        _require_finite_step("loss", loss, step)
        norm = self.engine.update(lr=lr, weight_sum=weight_sum)
        _require_finite_step("gradient norm", norm, step)
        self._steps_done = step + 1
        return RankReport(
            step=step + 1,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            num_tokens=sums.num_tokens,
            num_sequences=sums.num_sequences,
            load_seconds=sums.load_seconds,
            compute_seconds=sums.compute_seconds + time.perf_counter() - started,
            metrics=sums.metrics,
        )

    def save_checkpoint(self, root: str, state: TrainingState) -> str:
        """Write root/step-NNNNNNN: drafter, optimizer and state. All ranks call it; rank 0 writes.

        It is whole or absent, even if the process dies meanwhile. Returns the folder.
        """
        assert state.step == self._steps_done, "state and weights must be of the same step"
        tensors = self.engine.optimizer_state() if state.step > 0 else {}
        if self.rank == 0:
            with new_checkpoint(Path(root), state) as folder:
                if tensors:
                    save_file(tensors, folder / OPTIMIZER_FILE)
                record = replace(self.record, step=state.step, tokens_seen=state.tokens_seen)
                save_drafter(folder, self.drafter, record)
        self.engine.barrier()
        return str(Path(root) / checkpoint_name(state.step))

    def pause(self) -> None:
        """From another thread: the running step stops before its next micro-step, on all ranks."""
        self._paused.set()

    def unpause(self) -> None:
        self._paused.clear()

    def set_threads(self, count: int) -> None:
        """CPU threads of this rank's computation from now on."""
        torch.set_num_threads(count)

    def close(self) -> None:
        self._shards.clear()
        self.engine.close()


def _require_finite_step(what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise ValueError(
            f"step {step + 1}: the {what} is {value}; the weights are unharmed as of step {step}: "
            "resume from the last checkpoint with a lower trainer.lr or trainer.grad_clip"
        )
