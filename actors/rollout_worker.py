"""Target rollouts: prompts in, hidden-state shards on disk out, only references passed on.

    worker = ray.remote(RolloutWorker).remote(target_config, rollout_config, ...)
    for ref in worker.generate.options(num_returns="streaming").remote(numbered_prompts):
        index, shard_ref = ray.get(ref)

A shard is written as soon as the sequences of its prompts have ended. Prompts are cut into shards
by their order, not by who ends first, so the shards of a run do not depend on timing.

As an actor with `max_concurrency=2` it takes new weights while it generates; they are checked in
the call and act from the next round on:

    worker.update_target.remote(state_ref, version)
    worker.update_drafter.remote(drafter_state_ref)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from paceline.actors.config import CacheConfig, RolloutConfig
from paceline.actors.rollout_shards import FinishedShard, ShardTask, shard_from_sequences
from paceline.models.checkpoints import DrafterState, bind_drafter, read_drafter
from paceline.models.config import SamplingConfig, TargetConfig
from paceline.models.decoding.engine import Engine
from paceline.models.decoding.policies import Policy
from paceline.models.decoding.requests import CapturedSequence, Request
from paceline.models.decoding.selection import build_policy
from paceline.models.decoding.strategy import chosen_strategies
from paceline.models.drafter import Drafter
from paceline.models.records import AcceptanceTrace, SamplingParams
from paceline.models.shard_checks import SHARD_DTYPES, ShardSource
from paceline.models.shards import write_shard
from paceline.models.target import Target


class RolloutWorker:
    """One target replica that decodes continuous batches and captures its taps."""

    def __init__(
        self,
        target: TargetConfig,
        rollout: RolloutConfig,
        cache: CacheConfig,
        *,
        tap_layer_ids: tuple[int, ...],
        cache_folder: str,
        threads: int | None = None,
        target_state: dict[str, Tensor] | None = None,
        target_version: int = 0,
        drafter_state: DrafterState | None = None,
    ) -> None:
        """`target_state` and `drafter_state` are newer weights than the configured ones."""
        if threads is not None:
            torch.set_num_threads(threads)
        self.target = Target.load(target)
        self.target.tap(tap_layer_ids)
        self.cache = cache
        self.cache_folder = Path(cache_folder)
        self.source = ShardSource(
            target_fingerprint=self.target.fingerprint,
            tokenizer_hash=self.target.tokenizer_hash,
            tap_layer_ids=tap_layer_ids,
        )
        if target_state is not None:
            self.target.update_weights(target_state, target_version)
        self.rollout = rollout
        if drafter_state is None and rollout.drafter is not None:
            drafter_state = read_drafter(Path(rollout.drafter))
        self._drafter_state = drafter_state
        self.drafter = bind_drafter(drafter_state, self.target) if drafter_state else None
        self._policy: Policy | None = None
        self._device = self.target.device
        self._asleep = False
        self._engine: Engine | None = None
        self._updates: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()

    def set_threads(self, count: int) -> None:
        """CPU threads of this worker's computation from now on."""
        torch.set_num_threads(count)

    def generate(self, tasks: Sequence[ShardTask]) -> Iterator[FinishedShard]:
        """Answer the prompts of all tasks, yielding each shard when it is on disk.

        Raises ShardError if the capture is not fit for training and OSError if the disk is full;
        shards yielded before stay good.
        """
        longest = max(
            len(p.token_ids) + max(len(p.response_token_ids or ()), self.max_new_tokens)
            for task in tasks
            for p in task.prompts
        )
        with self._lock:
            if self._asleep:
                raise ValueError("the rollout worker sleeps: call wake before generate")
            self._engine = self._make_engine(longest)
        try:
            yield from self._shards(self._engine, tasks)
        finally:
            with self._lock:
                self._engine = None
                self._apply_updates()

    def _make_engine(self, capacity: int) -> Engine:
        rollout, state = self.rollout, self._drafter_state
        return Engine(
            self.target,
            num_slots=rollout.batch_size,
            capacity=capacity,
            capture_dtype=SHARD_DTYPES[self.cache.dtype],
            max_cache_bytes=rollout.max_cache_bytes,
            drafter=self.drafter,
            drafter_version=state.checkpoint.drafter_version if state else None,
            policy=None if self.drafter is None else self._policy_for(self.drafter),
            strategies=chosen_strategies(
                rollout.policy, rollout.strategies, rollout.num_speculative_tokens
            ),
        )

    def _policy_for(self, drafter: Drafter) -> Policy:
        if self._policy is None:
            rollout = self.rollout
            self._policy = build_policy(
                rollout.policy,
                rollout.strategies,
                self.target,
                drafter,
                num_speculative_tokens=rollout.num_speculative_tokens,
                max_batch=rollout.batch_size,
                seed=rollout.sampling.seed,
            )
        return self._policy

    def _shards(self, engine: Engine, tasks: Sequence[ShardTask]) -> Iterator[FinishedShard]:
        sampling = sampling_params(self.rollout.sampling)
        missing = {task.index: len(task.prompts) for task in tasks}
        task_of = {p.prompt_id: task.index for task in tasks for p in task.prompts}
        done: dict[int, list[CapturedSequence]] = {task.index: [] for task in tasks}
        by_index = {task.index: task for task in tasks}
        prompts = (prompt for task in tasks for prompt in task.prompts)
        requests = (Request(prompt=p, sampling=sampling) for p in prompts)
        for sequence in engine.run(requests, between_rounds=self._apply_updates):
            if sequence.error is not None:
                raise ValueError(f"prompt {sequence.prompt.prompt_id}: {sequence.error}")
            index = task_of[sequence.prompt.prompt_id]
            done[index].append(sequence)
            missing[index] -= 1
            if missing[index] == 0:
                yield self._write(by_index[index], done.pop(index))

    def update_target(self, state: dict[str, Tensor], version: int) -> None:
        """New target weights from the next round on; shards name the versions they saw.

        Raises ValueError, changing nothing, for weights that are not the target's or a version
        that is not newer.
        """
        self.target.check_update(state, version)
        self._between_rounds(partial(self.target.update_weights, state, version))

    def update_drafter(self, state: DrafterState) -> None:
        """Another drafter from the next round on; running sequences go on with it.

        Raises ValueError, changing nothing, for weights that are not finite, other taps, or a
        drafter of another target.
        """
        drafter = bind_drafter(state, self.target)
        if drafter.tap_layer_ids != self.target.tap_layer_ids:
            raise ValueError(
                f"the drafter {state.name} reads the taps {list(drafter.tap_layer_ids)}, and these "
                f"rollouts capture {list(self.target.tap_layer_ids)}: train it on those"
            )
        self._between_rounds(partial(self._take_drafter, drafter, state))

    def sleep(self) -> None:
        """Free the accelerator: weights go to host memory, the drafter's too.

        Raises ValueError while sequences run.
        """
        with self._lock:
            if self._engine is not None:
                raise ValueError("the rollout worker generates: let it end before sleep")
            self.target.move_to("cpu")
            self.drafter = None  # its state is kept, and bound again
            self._policy = None
            self._asleep = True
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def wake(self) -> None:
        """Back to the accelerator, with the drafter and the versions of before."""
        with self._lock:
            self.target.move_to(self._device)
            if self._drafter_state is not None:
                self.drafter = bind_drafter(self._drafter_state, self.target)
            self._asleep = False

    def versions(self) -> dict[str, int | None]:
        """Versions of the target and of the drafter that the next round uses."""
        state = self._drafter_state
        return {
            "target": self.target.version,
            "drafter": state.checkpoint.drafter_version if state else None,
        }

    def _take_drafter(self, drafter: Drafter, state: DrafterState) -> None:
        if self._engine is not None:
            self._engine.update_drafter(drafter, state.checkpoint, self._policy_for(drafter))
        elif self._policy is not None:
            self._policy.drafter_changed()
        self._drafter_state = state
        self.drafter = None if self._asleep else drafter

    def _between_rounds(self, update: Callable[[], None]) -> None:
        with self._lock:
            self._updates.append(update)
            if self._engine is None:
                self._apply_updates()

    def _apply_updates(self) -> None:
        with self._lock:
            while self._updates:
                self._updates.popleft()()

    @property
    def max_new_tokens(self) -> int:
        return self.rollout.sampling.max_new_tokens

    def _write(self, task: ShardTask, sequences: list[CapturedSequence]) -> FinishedShard:
        order = {prompt.prompt_id: i for i, prompt in enumerate(task.prompts)}
        sequences.sort(key=lambda sequence: order[sequence.prompt.prompt_id])
        ref = write_shard(
            self.cache_folder,
            shard_from_sequences(sequences),
            shard_id=f"shard-{task.index:05d}",
            source=self.source,
            min_target_version=min(s.min_target_version for s in sequences),
            max_target_version=max(s.max_target_version for s in sequences),
        )
        responses = [len(s.token_ids) - len(s.prompt.token_ids) for s in sequences]
        reasons = [s.finish_reason for s in sequences]
        drafted = [s.drafter_version for s in sequences if s.drafter_version is not None]
        return FinishedShard(
            index=task.index,
            ref=ref,
            num_response_tokens=sum(responses),
            mean_logprob=float(sum(s.logprobs.sum() for s in sequences)) / sum(responses),
            finish_reasons={reason: reasons.count(reason) for reason in sorted(set(reasons))},
            trace=AcceptanceTrace.concat([s.trace for s in sequences]),
            drafter_version=max(drafted, default=None),
        )


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The record of a sampling configuration."""
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )
