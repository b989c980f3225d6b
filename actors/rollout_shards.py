"""The shards of a rollout: which prompts go into each, and how answered prompts are packed.

Shapes: T packed tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.models.decoding.requests import CapturedSequence
from paceline.models.records import AcceptanceTrace, HiddenStateShard, Prompt, ShardRef


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
    trace: AcceptanceTrace
    """All speculative rounds of its sequences."""
    drafter_version: int | None
    """The newest that drafted for it; None if none did."""


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
