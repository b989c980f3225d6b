"""The draft vocabulary: the target tokens a drafter can propose.

d2t is an offset, as engines read it: target_id = draft_id + d2t[draft_id]. t2d is True for target
ids inside. Example: target ids 0, 2, 5 kept of 6 gives d2t [0, 1, 3] and t2d [T, F, T, F, F, T].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """Maps between target ids and draft ids."""

    d2t: Tensor  # [Vd] int64 offsets
    t2d: Tensor  # [V] bool

    @property
    def target_ids(self) -> Tensor:  # [Vd] int64, ascending
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def size(self) -> int:
        return len(self.d2t)


def full_vocab(target_vocab_size: int) -> DraftVocab:
    """Every target token, in order."""
    return DraftVocab(
        torch.zeros(target_vocab_size, dtype=torch.int64),
        torch.ones(target_vocab_size, dtype=torch.bool),
    )


def vocab_from_ids(target_ids: Tensor, target_vocab_size: int) -> DraftVocab:
    """A vocabulary of the given distinct target ids [Vd]."""
    ids = target_ids.sort().values
    assert (ids[1:] > ids[:-1]).all(), "target ids must be distinct"
    t2d = torch.zeros(target_vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return DraftVocab(ids - torch.arange(len(ids)), t2d)


def most_frequent_vocab(
    token_counts: Tensor, draft_vocab_size: int, *, always: tuple[int, ...] = ()
) -> DraftVocab:
    """The `draft_vocab_size` most frequent tokens of `token_counts` [V], `always` among them.

    Ties, and places that no counted token fills, go to the lowest ids.
    Raises ValueError if the size exceeds the target's vocabulary.
    """
    vocab_size = len(token_counts)
    if draft_vocab_size > vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size={draft_vocab_size} is larger than the target's vocabulary "
            f"of {vocab_size}: give at most that, or leave it out to keep the whole vocabulary"
        )
    counts = token_counts.to(torch.int64).clone()
    counts[list(always)] = counts.max() + 1
    order = torch.argsort(counts, descending=True, stable=True)
    return vocab_from_ids(order[:draft_vocab_size], vocab_size)
