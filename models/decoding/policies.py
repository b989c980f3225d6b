"""Who decides how a round drafts: an engine asks before each round and reports after it.

A policy never sees the tokens of the round it decides on, so its choices cannot bias what is
emitted.

    StaticPolicy     one strategy, always
    LengthPolicy     from measured costs and the acceptance seen so far (length_policy.py)
    BanditPolicy     epsilon-greedy by batch size (bandit_policy.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.models.decoding.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One round of a batch."""

    strategy: Strategy
    batch_size: int
    accepted: tuple[int, ...]  # drafted tokens accepted, of each sequence that still ran
    seconds: float
    caught_up: int = 0
    """Tokens that the drafter read in this round besides what the last round committed."""

    @property
    def tokens_per_sequence(self) -> float:
        """Committed tokens of a sequence, the bonus token included."""
        return 1.0 + (sum(self.accepted) / len(self.accepted) if self.accepted else 0.0)


class Policy(Protocol):
    """See the module docstring."""

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """All that may be chosen; caches are sized for them."""

    @property
    def drawn(self) -> bool:
        """Whether chains of sampled requests are drawn from the drafter (see proposing.py).

        A policy that goes by the clock should not draw: what a seed emits would then depend on it.
        """

    def choose(self, batch_size: int, behind: int) -> Strategy:
        """The next round's strategy; `behind` tokens of the batch are not read by the drafter."""

    def observe(self, report: RoundReport) -> None:
        """Learn from a round that was run."""

    def drafter_changed(self) -> None:
        """What was seen of acceptance is no longer true."""


class StaticPolicy:
    """One strategy, always."""

    def __init__(self, strategy: Strategy, *, drawn: bool = True) -> None:
        self.strategies: tuple[Strategy, ...] = (strategy,)
        self.drawn = drawn

    def choose(self, batch_size: int, behind: int) -> Strategy:
        """See Policy."""
        return self.strategies[0]

    def observe(self, report: RoundReport) -> None:
        """See Policy."""

    def drafter_changed(self) -> None:
        """See Policy."""


def batch_bucket(batch_size: int, edges: Sequence[int]) -> int:
    """The largest edge that is at most the batch size; edges increase from 1."""
    assert edges[0] == 1 and batch_size >= 1
    return max(edge for edge in edges if edge <= batch_size)
