"""Epsilon-greedy choice of a strategy by batch size (TLT's BEG-MAB, arXiv 2511.16665).

The reward of a round is tokens per second; within a bucket of batch sizes the strategy with the
best median over a sliding window is taken, and now and then another. From `off_from` running
sequences on nothing is drafted, and no round reads more than `max_round_tokens`.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Sequence

from paceline.models.decoding.policies import RoundReport, batch_bucket
from paceline.models.decoding.strategy import PLAIN, Strategy

BUCKET_EDGES = (1, 2, 5, 21)


class BanditPolicy:
    """See the module docstring."""

    drawn = False

    def __init__(
        self,
        strategies: Sequence[Strategy],
        *,
        epsilon: float = 0.1,
        window: int = 300,
        off_from: int = 32,
        max_round_tokens: int = 2048,
        seed: int = 0,
    ) -> None:
        self.strategies = (PLAIN, *(s for s in strategies if s.speculates))
        self._epsilon, self._window = epsilon, window
        self._off_from, self._max_round_tokens = off_from, max_round_tokens
        self._random = random.Random(seed)
        self._rewards: dict[tuple[int, str], deque[float]] = {}

    def choose(self, batch_size: int, behind: int) -> Strategy:
        """See Policy."""
        arms = self.arms(batch_size)
        if len(arms) == 1:
            return arms[0]
        bucket = batch_bucket(batch_size, BUCKET_EDGES)
        untried = [s for s in arms if (bucket, s.name) not in self._rewards]
        if untried:
            return untried[0]
        if self._random.random() < self._epsilon:
            return self._random.choice(arms)
        return max(arms, key=lambda s: statistics.median(self._rewards[bucket, s.name]))

    def arms(self, batch_size: int) -> list[Strategy]:
        """What may be chosen for a batch; plain decoding always may."""
        if batch_size >= self._off_from:
            return [PLAIN]
        return [
            s
            for s in self.strategies
            if s is PLAIN or batch_size * (s.budget + 1) <= self._max_round_tokens
        ]

    def observe(self, report: RoundReport) -> None:
        """See Policy."""
        if not report.accepted:
            return
        key = (batch_bucket(report.batch_size, BUCKET_EDGES), report.strategy.name)
        rewards = self._rewards.setdefault(key, deque(maxlen=self._window))
        rewards.append(report.tokens_per_sequence * report.batch_size / report.seconds)

    def drafter_changed(self) -> None:
        """See Policy."""
        self._rewards = {k: v for k, v in self._rewards.items() if k[1] == PLAIN.name}
