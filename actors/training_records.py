"""What passes between a trainer group and its ranks: references and plain numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.actors.config import TrainerConfig
from paceline.models.config import ObjectiveConfig, TargetConfig
from paceline.models.records import ShardRef
from paceline.models.training_state import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """What every rank is built from. Folders must be visible to all ranks."""

    target: TargetConfig
    drafter_folder: str
    """The drafter to start from, written by models/checkpoints.py."""
    cache_folder: str
    """What the shards' uris are relative to."""
    objective: tuple[ObjectiveConfig, ...]
    trainer: TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One rank's part of a step."""

    step: int
    """Steps done before this one."""
    micro_batches: tuple[MicroBatch, ...]
    shards: dict[int, ShardRef]
    """Those that the micro-batches name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank measured in a step."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Of the whole step, over all ranks."""
    lr: float
    grad_norm: float
    """Before clipping."""
    num_tokens: int
    num_sequences: int
    load_seconds: float
    compute_seconds: float
    metrics: dict[str, tuple[float, float]]
    """Name -> (sum, count) over this rank's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step over all ranks."""

    step: int
    """Steps done, this one included."""
    values: dict[str, float]
    """loss, lr, grad_norm, accuracy_pos_K, ..., tokens, tokens_per_second, seconds by cause, and
    idle_share: the part of the time since the step before in which no rank computed."""


def merge_reports(
    reports: list[RankReport], *, data_wait_seconds: float, step_seconds: float
) -> StepMetrics:
    """Add up the ranks' sums before dividing; times are of the slowest rank."""
    first = reports[0]
    tokens = sum(report.num_tokens for report in reports)
    sums: dict[str, tuple[float, float]] = {}
    for report in reports:
        add_metrics(sums, report.metrics)
    compute = max(report.compute_seconds for report in reports)
    values = {
        "loss": first.loss,
        "lr": first.lr,
        "grad_norm": first.grad_norm,
        "tokens": float(tokens),
        "sequences": float(sum(report.num_sequences for report in reports)),
        "tokens_per_second": tokens / step_seconds,
        "data_wait_seconds": data_wait_seconds,
        "load_seconds": max(report.load_seconds for report in reports),
        "compute_seconds": compute,
        "step_seconds": step_seconds,
        "idle_share": 1.0 - compute / (data_wait_seconds + step_seconds),
    }
    values |= {name: total / count for name, (total, count) in sums.items() if count > 0.0}
    return StepMetrics(step=first.step, values=values)


def add_metrics(sums: dict[str, tuple[float, float]], more: dict[str, tuple[float, float]]) -> None:
    """Add (sum, count) pairs by name, in place."""
    for name, (total, count) in more.items():
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + total, before[1] + count)
