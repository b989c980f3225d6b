"""The scheduler finds the best lengths of one peak, and never looks where it may not."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from paceline.kernels.verification import accept_probs as acceptance
from paceline.kernels.verification import residual_probs
from paceline.models.decoding.scheduler import schedule_lengths

Lengths = Callable[[Sequence[Sequence[float]], Callable[[int], float]], list[int]]


class Watched(Sequence):
    """A sequence that remembers which entries were read; entries that are None must not be."""

    def __init__(self, entries: list[float | None]):
        self.entries, self.read = entries, []

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index):
        self.read.append(index)
        assert self.entries[index] is not None, f"entry {index} was read"
        return self.entries[index]


def _linear(base: float, slope: float) -> Callable[[int], float]:
    return lambda num_tokens: base + slope * num_tokens


def _rate(
    accept_probs: Sequence[Sequence[float]],
    seconds: Callable[[int], float],
    lengths: Sequence[int],
) -> float:
    """Expected tokens per second: the anchors' own, and each verified draft's."""
    tokens = len(lengths) + sum(
        math.prod(probs[: draft + 1])
        for probs, length in zip(accept_probs, lengths, strict=True)
        for draft in range(length)
    )
    return tokens / seconds(len(lengths) + sum(lengths))


def _lengths_without_break(accept_probs, seconds):
    """Wrong for sampling: the best of all lengths, whatever had to be looked at to find it."""
    return list(
        max(
            itertools.product(*(range(len(probs) + 1) for probs in accept_probs)),
            key=lambda lengths: _rate(accept_probs, seconds, lengths),
        )
    )


def test_lengths_are_the_best_of_all_where_the_rate_has_one_peak():
    """The sum of decreasing gains is concave, and over convex seconds it has one peak."""
    seen = set()
    for seed in range(300):
        rng = random.Random(seed)
        probs = [
            [rng.uniform(0.3, 1.0) for _ in range(rng.randint(0, 4))]
            for _ in range(rng.randint(1, 4))
        ]
        base, slope = rng.uniform(1.0, 20.0), rng.uniform(0.01, 1.0)
        knee, steeper = rng.randint(1, 12), rng.uniform(0.0, 5.0)

        def seconds(num_tokens, base=base, slope=slope, knee=knee, steeper=steeper):
            return base + slope * num_tokens + steeper * max(0, num_tokens - knee)

        lengths = schedule_lengths(probs, seconds)
        best = _lengths_without_break(probs, seconds)
        assert lengths == best
        seen.add((sum(lengths) > 0, lengths == [len(row) for row in probs]))
    assert len(seen) == 4, "some, none and all drafts verified should all occur"


def test_the_schedule_ends_at_the_first_visit_that_does_not_help():
    seconds = [None, 1.0, 1.9, 2.0, 2.0].__getitem__  # 2 tokens are slow, 3 would pay off
    assert schedule_lengths([[0.8, 1.0]], seconds) == [0]
    assert _lengths_without_break([[0.8, 1.0]], seconds) == [2]
    # Equal is no improvement.
    assert schedule_lengths([[1.0, 1.0]], _linear(0.0, 1.0)) == [0]


def test_a_chain_is_cut_where_its_prefix_and_not_its_entry_is_unlikely():
    # 1 / 1.2, 1.9 / 1.4, then 1.99 / 1.6: the certain entries after it come too late.
    assert schedule_lengths([[0.9, 0.1, 1.0, 1.0]], _linear(1.0, 0.2)) == [1]


def test_ties_go_to_the_lower_sequence_and_along_it():
    fast_up_to = [None, None, 1.0, 1.0, 1.0, 9.0, 9.0].__getitem__
    half = [0.5, 1.0]
    assert schedule_lengths([half, half], fast_up_to) == [2, 0]
    assert schedule_lengths([[0.4, 1.0], half], fast_up_to) == [0, 2]
    assert schedule_lengths([[0.5, 0.5], half], fast_up_to) == [1, 1]


def test_nothing_after_the_break_is_read():
    probs = [
        Watched([0.9, 0.8, 0.1, None]),
        Watched([0.2, None, None]),
        Watched([0.95, 0.95]),
        Watched([]),
    ]
    lengths = schedule_lengths(probs, _linear(10.0, 1.0))
    assert lengths == [2, 0, 2, 0]
    assert [row.read for row in probs] == [[0, 1, 2], [0], [0, 1], []]


def _anticipates(lengths_of: Lengths, seed: int) -> bool:
    """Whether verifying some draft j depends on the entries from j + 1 on, on jagged timings."""
    rng = random.Random(seed)
    probs = [[rng.random() ** 0.3 for _ in range(3)] for _ in range(3)]
    seconds = list(itertools.accumulate(rng.choice([0.1, 1.0, 2.0]) for _ in range(13))).__getitem__
    lengths = lengths_of(probs, seconds)
    for sequence, draft in itertools.product(range(3), range(3)):
        changed = [list(row) for row in probs]
        changed[sequence][draft + 1 :] = [rng.random() for _ in range(2 - draft)]
        if (lengths_of(changed, seconds)[sequence] > draft) != (lengths[sequence] > draft):
            return True
    return False


def test_a_draft_is_decided_on_before_any_entry_that_its_token_may_change():
    assert not any(_anticipates(schedule_lengths, seed) for seed in range(300))
    assert any(_anticipates(_lengths_without_break, seed) for seed in range(20))


TARGET_PROBS = torch.tensor([0.7, 0.3], dtype=torch.float64)
DRAFT_PROBS = torch.tensor([0.5, 0.5], dtype=torch.float64)
SECOND_ENTRY = (0.9, 0.0)
"""How likely the second draft is accepted after each first one."""


def _first_token_law(lengths_of: Lengths) -> torch.Tensor:
    """The law of the first emitted token, for one sequence with two drafts."""
    seconds = [None, 1.0, 1.0 / 0.5, 1.0 / 0.45].__getitem__
    law = torch.zeros(2, dtype=torch.float64)
    for token in range(2):
        drawn = float(DRAFT_PROBS[token])
        length = lengths_of([[0.8, SECOND_ENTRY[token]]], seconds)[0]
        if length == 0:
            law += drawn * TARGET_PROBS
            continue
        accept = float(acceptance(TARGET_PROBS[None], torch.tensor([token]), DRAFT_PROBS[None]))
        residual = residual_probs(TARGET_PROBS, token, DRAFT_PROBS)
        law[token] += drawn * accept
        law += drawn * (1.0 - accept) * residual / residual.sum()
    return law


def test_the_break_keeps_the_targets_law():
    def always(accept_probs, seconds):
        return [2]

    assert _first_token_law(schedule_lengths).tolist() == pytest.approx([0.7, 0.3], abs=1e-12)
    assert _first_token_law(always).tolist() == pytest.approx([0.7, 0.3], abs=1e-12)
    without = _first_token_law(_lengths_without_break).tolist()
    assert without == pytest.approx([0.85, 0.15], abs=1e-12)


def test_no_sequence_and_no_drafts_need_no_lengths():
    def never(num_tokens):
        raise AssertionError("nothing to time")

    assert schedule_lengths([], never) == []
    assert schedule_lengths([[], []], _linear(1.0, 0.1)) == [0, 0]


@pytest.mark.parametrize("wrong", [-0.1, 1.5, math.nan])
def test_a_probability_outside_its_range_is_named(wrong):
    with pytest.raises(ValueError, match=rf"sequence 1 .* {wrong} at position 1, outside 0\.\.1"):
        schedule_lengths([[0.5], [0.9, wrong]], _linear(10.0, 1.0))
