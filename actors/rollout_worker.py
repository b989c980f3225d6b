"""Target rollouts: prompts in, hidden-state shards on disk out, only references passed on.

    worker = ray.remote(RolloutWorker).remote(target_config, rollout_config, ...)
    for ref in worker.generate.options(num_returns="streaming").remote(numbered_prompts):
        index, shard_ref = ray.get(ref)

A shard is written as soon as the sequences of its prompts have ended. Prompts are cut into shards
by their order, not by who ends first, so the shards of a run do not depend on timing.

Shapes: T packed tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.actors.config import CacheConfig, RolloutConfig
from paceline.models.checkpoints import load_drafter
from paceline.models.config import SamplingConfig, TargetConfig
from paceline.models.decoding.engine import Engine
from paceline.models.decoding.requests import CapturedSequence, Request
from paceline.models.drafter import Drafter
from paceline.models.records import HiddenStateShard, Prompt, SamplingParams, ShardRef
from paceline.models.shard_checks import SHARD_DTYPES, ShardSource
from paceline.models.shards import write_shard
from paceline.models.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """The prompts of one shard; `index` is its place in the run's order."""

    index: int
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedShard:
    """What a worker says of a shard it wrote: references and numbers, no tensors."""

    index: int
    ref: ShardRef
    num_response_tokens: int
    mean_logprob: float  # of response tokens, nats
    finish_reasons: dict[str, int]


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
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.target = Target.load(target)
        self.target.tap(tap_layer_ids)
        self.drafter: Drafter | None = None
        self.drafter_version: int | None = None
        if rollout.drafter is not None:
            self.drafter, checkpoint = load_drafter(Path(rollout.drafter), self.target)
            self.drafter_version = checkpoint.drafter_version
            self.target.tap(tap_layer_ids)  # the engine refuses a drafter that reads others
        self.rollout = rollout
        self.cache = cache
        self.cache_folder = Path(cache_folder)
        self.source = ShardSource(
            target_fingerprint=self.target.fingerprint,
            tokenizer_hash=self.target.tokenizer_hash,
            tap_layer_ids=tap_layer_ids,
        )

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
        engine = Engine(
            self.target,
            num_slots=self.rollout.batch_size,
            capacity=longest,
            capture_dtype=SHARD_DTYPES[self.cache.dtype],
            max_cache_bytes=self.rollout.max_cache_bytes,
            drafter=self.drafter,
            drafter_version=self.drafter_version,
            num_speculative_tokens=self.rollout.num_speculative_tokens,
        )
        sampling = sampling_params(self.rollout.sampling)
        missing = {task.index: len(task.prompts) for task in tasks}
        task_of = {p.prompt_id: task.index for task in tasks for p in task.prompts}
        done: dict[int, list[CapturedSequence]] = {task.index: [] for task in tasks}
        by_index = {task.index: task for task in tasks}
        prompts = (prompt for task in tasks for prompt in task.prompts)
        for sequence in engine.run(Request(prompt=p, sampling=sampling) for p in prompts):
            if sequence.error is not None:
                raise ValueError(f"prompt {sequence.prompt.prompt_id}: {sequence.error}")
            index = task_of[sequence.prompt.prompt_id]
            done[index].append(sequence)
            missing[index] -= 1
            if missing[index] == 0:
                yield self._write(by_index[index], done.pop(index))

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
            min_target_version=self.target.version,
            max_target_version=self.target.version,
        )
        responses = [len(s.token_ids) - len(s.prompt.token_ids) for s in sequences]
        reasons = [s.finish_reason for s in sequences]
        return FinishedShard(
            index=task.index,
            ref=ref,
            num_response_tokens=sum(responses),
            mean_logprob=float(sum(s.logprobs.sum() for s in sequences)) / sum(responses),
            finish_reasons={reason: reasons.count(reason) for reason in sorted(set(reasons))},
        )


def shard_from_sequences(sequences: Sequence[CapturedSequence]) -> HiddenStateShard:
    """Pack sequences in the order given; the loss mask is set by position."""
    lengths = torch.tensor([len(s.token_ids) for s in sequences], dtype=torch.int32)
    starts = torch.zeros(1, dtype=torch.int32)
    return HiddenStateShard(
        input_ids=torch.cat([s.token_ids for s in sequences]).to(torch.int32),
        position_ids=torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
        loss_mask=torch.cat(
            [torch.arange(len(s.token_ids)) >= len(s.prompt.token_ids) for s in sequences]
        ),
        cu_seqlens=torch.cat((starts, lengths.cumsum(0, dtype=torch.int32))),
        aux_hidden_states=torch.cat([s.aux_hidden_states for s in sequences]),
        last_hidden_states=torch.cat([s.last_hidden_states for s in sequences]),
        norm_applied=True,
        domains=tuple(s.prompt.domain for s in sequences),
        sequence_ids=tuple(s.prompt.prompt_id for s in sequences),
    )


def shard_tasks(
    prompts: Sequence[Prompt], *, shard_tokens: int, response_tokens: int
) -> list[ShardTask]:
    """Cut prompts, in order, into tasks of about `shard_tokens` tokens, responses as given or
    `response_tokens` each.
    """
    tasks: list[ShardTask] = []
    group: list[Prompt] = []
    tokens = 0
    for prompt in prompts:
        group.append(prompt)
        tokens += len(prompt.token_ids)
        tokens += len(prompt.response_token_ids or ()) or response_tokens
        if tokens >= shard_tokens:
            tasks.append(ShardTask(index=len(tasks), prompts=tuple(group)))
            group, tokens = [], 0
    if group:
        tasks.append(ShardTask(index=len(tasks), prompts=tuple(group)))
    return tasks


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The record of a sampling configuration."""
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )
