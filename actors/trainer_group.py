"""All ranks of a drafter training as Ray actors: the side that plans, drives and recovers them.

Ranks get the same calls at the same time, since each ends in a collective. What passes is plans
(sequence numbers and shard references), settings and plain floats; ranks map the shards themselves.

    group = TrainerGroup(setup, out / "checkpoints")
    group.start()                                  # or group.start(resume=folder)
    while group.step < setup.trainer.steps:
        group.add_shards(new_refs)                 # in index order; group.num_shards are known
        metrics = group.train_step()               # None: no step yet, shards are missing
        ...                                        # group.save_checkpoint() now and then
    group.close()

If a rank dies, all are started again from the last checkpoint and the data order rewinds with them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayTaskError

from paceline.actors.drafter_trainer import DrafterTrainer
from paceline.actors.training_records import (
    RankReport,
    StepMetrics,
    StepPlan,
    TrainerSetup,
    merge_reports,
)
from paceline.models.records import ShardRef
from paceline.models.training_state import SequenceSampler, TrainingState, list_checkpoints

KEPT_CHECKPOINTS = 2
MAX_RECOVERIES = 3
CLOSE_SECONDS = 20.0
GRACE_SECONDS = 10.0


class TrainerGroup:
    """See the module docstring."""

    def __init__(self, setup: TrainerSetup, checkpoint_root: Path) -> None:
        self.setup = setup
        self.checkpoint_root = checkpoint_root
        self.state = TrainingState()
        self.recoveries = 0
        self._ranks: list[ray.actor.ActorHandle] = []
        self._refs: list[ShardRef] = []
        self._lengths: list[tuple[int, ...]] = []
        self._finished = False
        self._checkpoint: Path | None = None
        self._sampler = self._new_sampler()
        self._plans: list[StepPlan] | None = None
        self._running: list[ObjectRef] = []
        self._threads: int | None = None
        self._idle_since = time.perf_counter()

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    @property
    def num_shards(self) -> int:
        """Shards known; `add_shards` wants those from this index on."""
        return len(self._refs)

    def start(self, resume: Path | None = None) -> None:
        """Start the ranks, from the setup's drafter or from a training checkpoint.

        Raises ValueError naming the file and the remedy if the checkpoint or the drafter is damaged
        or was made for another target.
        """
        self._checkpoint = resume
        self._start_ranks()

    def _start_ranks(self) -> None:
        config = self.setup.trainer
        actor = ray.remote(concurrency_groups={"control": 1})(DrafterTrainer).options(
            num_cpus=config.num_cpus, num_gpus=config.num_gpus
        )
        self._ranks = [
            actor.remote(rank, config.num_ranks, self.setup) for rank in range(config.num_ranks)
        ]
        alone = config.num_ranks == 1
        master = None if alone else _gather([self._ranks[0].rendezvous.remote()])[0]
        checkpoint = None if self._checkpoint is None else str(self._checkpoint)
        self.state = _gather([rank.load.remote(master, checkpoint) for rank in self._ranks])[0]
        if self._threads is not None:
            self.set_threads(self._threads)
        self._plans = None
        self._sampler = self._new_sampler()
        for ref, lengths in zip(self._refs, self._lengths, strict=True):
            self._sampler.add_shard(ref.shard_id, lengths)
        if self._finished:
            self._sampler.finish()
        self._idle_since = time.perf_counter()

    def _new_sampler(self) -> SequenceSampler:
        config = self.setup.trainer
        return SequenceSampler(batch_tokens=config.batch_tokens, seed=config.seed, state=self.state)

    def add_shards(self, refs: Sequence[ShardRef]) -> None:
        """The next shards in index order. Raises ValueError if one is damaged or foreign."""
        for ref in refs:
            try:
                (lengths,) = _gather([self._ranks[0].sequence_lengths.remote(ref)])
            except RayActorError:
                self._recover()
                (lengths,) = _gather([self._ranks[0].sequence_lengths.remote(ref)])
            self._sampler.add_shard(ref.shard_id, lengths)
            self._refs.append(ref)
            self._lengths.append(lengths)

    def finish_shards(self) -> None:
        """All shards are added: once through, training may go over them again.

        Raises ValueError if there is nothing to train on.
        """
        if not self._finished:
            self._sampler.finish()
            self._finished = True

    def train_step(self) -> StepMetrics | None:
        """One step of all ranks.

        None if it cannot be made yet: shards are missing, ranks are paused, or a rank died and all
        went back to the last checkpoint (see `step`). Raises ValueError if loss or gradient is not
        finite, naming the remedy; the last checkpoint stays good.
        """
        plans = self._plans or self._plan()
        if plans is None:
            return None
        self._plans = plans  # kept, because a paused step goes on from where it stopped
        started = time.perf_counter()
        if not self._running:
            self._running = [
                rank.train_step.remote(plan) for rank, plan in zip(self._ranks, plans, strict=True)
            ]
        try:
            reports: list[RankReport | None] = _gather(self._running)
        except RayActorError:
            self._recover()
            return None
        self._running = []
        finished = [report for report in reports if report is not None]
        if not finished:
            return None
        self._plans = None
        ended = time.perf_counter()
        metrics = merge_reports(
            finished,
            data_wait_seconds=started - self._idle_since,
            step_seconds=ended - started,
        )
        self._idle_since = ended
        tokens = self.state.tokens_seen + sum(report.num_tokens for report in finished)
        self.state = self._sampler.state(step=metrics.step, tokens_seen=tokens)
        return metrics

    def _plan(self) -> list[StepPlan] | None:
        config = self.setup.trainer
        each = config.gradient_accumulation_steps
        batches = self._sampler.take(config.num_ranks * each)
        if batches is None:
            return None
        plans = []
        for rank in range(config.num_ranks):
            own = batches[rank * each : (rank + 1) * each]
            shards = {shard for batch in own for shard, _ in batch.sequences}
            plans.append(
                StepPlan(
                    step=self.step,
                    micro_batches=own,
                    shards={shard: self._refs[shard] for shard in sorted(shards)},
                )
            )
        return plans

    def _recover(self) -> None:
        """A rank died: start all again from the last checkpoint, a few times at most."""
        while True:
            self.recoveries += 1
            if self.recoveries > MAX_RECOVERIES:
                raise RuntimeError(
                    f"trainer ranks died {self.recoveries} times: see their logs in Ray's session "
                    "folder (often memory: lower trainer.batch_tokens), then run with resume="
                )
            self._kill()
            try:
                return self._start_ranks()
            except RayActorError:
                continue

    def save_checkpoint(self) -> Path | None:
        """Write checkpoint_root/step-NNNNNNN, whole or not at all; all but the newest two go.

        A step that was interrupted is ended first. The folder also loads as a drafter. Returns it,
        or None if a rank died and all went back to the checkpoint before.
        """
        if self._running:
            self.train_step()
        root, state = str(self.checkpoint_root), self.state
        try:
            folder = _gather([rank.save_checkpoint.remote(root, state) for rank in self._ranks])[0]
        except RayActorError:
            self._recover()
            return None
        self._checkpoint = Path(folder)
        for old in list_checkpoints(self.checkpoint_root)[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
        return self._checkpoint

    def pause(self) -> None:
        """From any thread: ranks stop within one micro-step, and `train_step` returns None."""
        _gather([r.pause.options(concurrency_group="control").remote() for r in self._ranks])

    def unpause(self) -> None:
        _gather([r.unpause.options(concurrency_group="control").remote() for r in self._ranks])

    def set_threads(self, count: int) -> None:
        """CPU threads of each rank from the next step on, for example when rollouts have ended."""
        self._threads = count
        _gather([rank.set_threads.remote(count) for rank in self._ranks])

    def close(self) -> None:
        """End the ranks. Safe to call twice, and after a failure."""
        closing = [rank.close.remote() for rank in self._ranks]
        # A rank that waits for a dead one would never answer.
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []
        self._running = []


def _gather(refs: list[ObjectRef]) -> list:
    """Results of calls made on all ranks; raises as soon as one fails.

    A rank's own error comes without Ray's wrapper. A dead rank makes the others fail in their
    collective, or wait in it: then RayActorError is what is raised.
    """
    waiting, failure = list(refs), None
    while waiting:
        timeout = None if failure is None else GRACE_SECONDS
        done, waiting = ray.wait(waiting, timeout=timeout)
        if not done:
            break
        try:
            ray.get(done)
        except RayTaskError as error:
            failure = failure or error
    if failure is not None:
        raise failure.cause from failure
    return ray.get(refs)
