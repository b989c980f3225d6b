"""How many tokens to draft: what a round would bring against what it costs on this device.

A strategy's worth is the tokens it is expected to commit per second. Tokens: from the share of
drafts accepted at each depth so far. Seconds: from the measured tables, corrected by the rounds
that were run. Where no strategy beats plain decoding by a margin nothing is drafted; in the long
tail, with few sequences left, the same rule turns drafting on again.

Acceptance that was low once may be better later. It is looked at again, one round at a time, so
seldom that these rounds cost at most about `retry_share` of the time.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from paceline.models.decoding.costs import RoundCosts
from paceline.models.decoding.policies import RoundReport, batch_bucket
from paceline.models.decoding.strategy import PLAIN, Strategy

BUCKET_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PRIOR_RATE = 0.7
PRIOR_WEIGHT = 2.0
"""Drafts of each depth that the prior counts for."""
MEMORY = 0.995
"""What a count is worth one round later: a few hundred rounds are remembered."""
REPAID_OVER = 32
"""Rounds over which the drafter's reading of what it missed is spread."""


class AcceptanceEstimate:
    """Share of drafts accepted at each depth, given that those before were; recent ones count
    more.
    """

    def __init__(self, depth: int) -> None:
        self._tried = [PRIOR_WEIGHT] * depth
        self._kept = [PRIOR_WEIGHT * PRIOR_RATE] * depth

    def add(self, accepted: Sequence[int], depth: int) -> None:
        """One round of sequences that drafted `depth` deep."""
        for level in range(len(self._tried)):
            self._tried[level] *= MEMORY
            self._kept[level] *= MEMORY
        for count in accepted:
            for level in range(min(count + 1, depth)):
                self._tried[level] += 1.0
                self._kept[level] += level < count

    def tokens(self, depth: int) -> float:
        """Expected committed tokens of a round, the bonus token included."""
        total, reached = 1.0, 1.0
        for tried, kept in zip(self._tried[:depth], self._kept[:depth], strict=True):
            # What is forgotten returns to the prior.
            weight = PRIOR_WEIGHT * 0.05
            reached *= (kept + weight * PRIOR_RATE) / (tried + weight)
            total += reached
        return total


class LengthPolicy:
    """See the module docstring."""

    drawn = False

    def __init__(
        self,
        strategies: Sequence[Strategy],
        costs: RoundCosts,
        *,
        margin: float = 0.03,
        retry_share: float = 0.01,
    ) -> None:
        self.strategies = (PLAIN, *(s for s in strategies if s.speculates))
        self.costs = costs
        self._margin, self._retry_share = margin, retry_share
        self._ratios: dict[tuple[int, str], deque[float]] = {}
        self._plain_seconds = 0.0
        self.drafter_changed()

    def drafter_changed(self) -> None:
        """See Policy."""
        # All chains share one estimate: a longer one shows what a shorter one would have kept.
        kinds = {self._family(s): s.depth for s in sorted(self.strategies, key=lambda s: s.depth)}
        self._acceptance = {kind: AcceptanceEstimate(depth) for kind, depth in kinds.items()}

    def choose(self, batch_size: int, behind: int) -> Strategy:
        """See Policy."""
        plain = self.seconds(PLAIN, batch_size, 0)
        best, gain = PLAIN, 1.0 + self._margin
        closest, loss = PLAIN, float("inf")
        for strategy in self.strategies[1:]:
            seconds = self.seconds(strategy, batch_size, behind)
            worth = self.tokens(strategy) * plain
            if worth / seconds > gain:
                best, gain = strategy, worth / seconds
            if seconds - worth < loss:
                closest, loss = strategy, seconds - worth
        if best is PLAIN and loss <= self._plain_seconds * self._retry_share:
            return closest
        return best

    def seconds(self, strategy: Strategy, batch_size: int, behind: int) -> float:
        """Expected seconds of a round."""
        predicted = self.costs.seconds(strategy, batch_size, 0)
        if strategy.speculates and behind:
            late = self.costs.seconds(strategy, batch_size, behind) - predicted
            predicted += late / REPAID_OVER
        ratios = self._ratios.get(self._key(strategy, batch_size))
        return predicted * (statistics.median(ratios) if ratios else 1.0)

    def tokens(self, strategy: Strategy) -> float:
        """Expected committed tokens of a sequence in a round."""
        return self._acceptance[self._family(strategy)].tokens(strategy.depth)

    def observe(self, report: RoundReport) -> None:
        """See Policy."""
        strategy = report.strategy
        if strategy.speculates:
            self._plain_seconds = 0.0
            self._acceptance[self._family(strategy)].add(report.accepted, strategy.depth)
        else:
            self._plain_seconds += report.seconds
        predicted = self.costs.seconds(strategy, report.batch_size, report.caught_up)
        key = self._key(strategy, report.batch_size)
        self._ratios.setdefault(key, deque(maxlen=15)).append(report.seconds / predicted)

    def _key(self, strategy: Strategy, batch_size: int) -> tuple[int, str]:
        return batch_bucket(batch_size, BUCKET_EDGES), strategy.name

    def _family(self, strategy: Strategy) -> str:
        return "chain" if strategy.kind in ("plain", "chain") else strategy.name
