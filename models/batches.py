"""Sequences of hidden-state shards -> the packed batch of one micro-step.

Shapes: T packed tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.records import HiddenStateShard, TrainBatch


def batch_from_sequences(
    sequences: Sequence[tuple[HiddenStateShard, int]],
    *,
    min_target_version: int = 0,
    max_target_version: int = 0,
) -> TrainBatch:
    """Pack sequences, each given as a shard and its index within it.

    Raises ValueError if a shard's last hidden states are before the final norm, since lm_head
    would then give a wrong teacher.
    """
    assert sequences, "a batch holds at least one sequence"
    parts: list[tuple[HiddenStateShard, slice]] = []
    for shard, index in sequences:
        if not shard.norm_applied:
            raise ValueError(
                "a shard holds last_hidden_states before the final norm (norm_applied=false): "
                "apply the target's norm when capturing, lm_head needs normed states"
            )
        start, end = shard.cu_seqlens[index : index + 2].tolist()
        parts.append((shard, slice(start, end)))
    lengths = torch.tensor([rows.stop - rows.start for _, rows in parts])
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return TrainBatch(
        input_ids=torch.cat([s.input_ids[rows] for s, rows in parts]).long(),
        position_ids=torch.cat([s.position_ids[rows] for s, rows in parts]).long(),
        document_ids=torch.repeat_interleave(torch.arange(len(parts)), lengths),
        cu_seqlens=cu_seqlens,
        loss_mask=torch.cat([s.loss_mask[rows] for s, rows in parts]),
        aux_hidden_states=torch.cat([s.aux_hidden_states[rows] for s, rows in parts]),
        last_hidden_states=torch.cat([s.last_hidden_states[rows] for s, rows in parts]),
        min_target_version=min_target_version,
        max_target_version=max_target_version,
    )
