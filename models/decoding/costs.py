"""What a round costs on this device: measured seconds by number of tokens, in between by lines.

Speculation pays where a target pass over several tokens costs little more than one over one token;
where that ends is a property of the device, the target and the batch, so it is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.models.decoding.strategy import Strategy
from paceline.models.drafter import Drafter
from paceline.models.kv_cache import SlotCache
from paceline.models.records import SamplingParams
from paceline.models.target import Target

CONTEXT = 64
"""Tokens that a measured pass has before it."""
ROWS = 8
"""Rows of a sequence in a measured pass; more tokens are more sequences."""
REPEATS = 3
GREEDY = SamplingParams()


class CostTable:
    """Seconds of a pass by its number of tokens."""

    def __init__(self, seconds: dict[int, float]) -> None:
        """Raises ValueError without an entry, or with one that is not positive."""
        if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0.0:
            raise ValueError(f"a cost table needs positive seconds for 1 token or more: {seconds}")
        self.entries = sorted(seconds.items())

    def seconds(self, tokens: float) -> float:
        """By the line between neighbours; beyond the ends by the line of the last two."""
        entries = self.entries
        if tokens <= entries[0][0] or len(entries) == 1:
            return entries[0][1]
        pairs = list(zip(entries, entries[1:], strict=False))
        low, high = next((p for p in pairs if tokens <= p[1][0]), pairs[-1])
        slope = max(0.0, high[1] - low[1]) / (high[0] - low[0])
        return low[1] + slope * (tokens - low[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCosts:
    """Tables of one target and drafter on one device."""

    target: CostTable
    draft: CostTable
    """One pass of the drafter over that many rows."""
    passes_per_depth: bool
    """Whether each drafted level is a pass of its own (autoregressive) or all are one (block)."""

    def seconds(self, strategy: Strategy, batch_size: int, behind: int) -> float:
        """A whole round of `batch_size` sequences; `behind` more tokens are read by the drafter."""
        verify = self.target.seconds(batch_size * (strategy.budget + 1))
        if not strategy.speculates:
            return verify
        read = self.draft.seconds(2 * batch_size + behind)
        if self.passes_per_depth:
            drafts = (strategy.depth - 1) * self.draft.seconds(batch_size * strategy.width)
        else:
            drafts = self.draft.seconds(batch_size * (strategy.depth + 1))
        return verify + read + drafts


@torch.no_grad()
def measure_costs(
    target: Target, drafter: Drafter, *, max_batch: int, max_tokens: int
) -> RoundCosts:
    """Time passes of both models, the largest of `max_tokens` tokens; takes seconds."""
    autoregressive = drafter.backbone.max_speculative_tokens is None
    return RoundCosts(
        target=CostTable(
            {n: _median(_target_pass(target, n)) for n in _sizes(max_tokens)},
        ),
        draft=CostTable(
            {n: _median(_draft_pass(drafter, target, n)) for n in _sizes(2 * max_batch)},
        ),
        passes_per_depth=autoregressive,
    )


def _sizes(limit: int) -> Sequence[int]:
    """1, 2, 4, 8, ... and the limit, at most 512."""
    sizes = [2**i for i in range(10) if 2**i < limit]
    return [*sizes, min(limit, 512)] if limit not in sizes else sizes


def _median(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _shape(tokens: int) -> tuple[int, int]:
    rows = min(tokens, ROWS)
    return -(-tokens // rows), rows


def _target_pass(target: Target, tokens: int) -> Callable[[], object]:
    batch, rows = _shape(tokens)
    cache, slots = SlotCache(batch, CONTEXT + rows), slice(0, batch)
    ids = torch.zeros(batch, rows, dtype=torch.int64, device=target.device)
    positions = torch.arange(CONTEXT, CONTEXT + rows, device=target.device).expand(batch, -1)

    def run() -> object:
        output = target.forward(ids, positions, cache, slots)
        return target.logits(output.last_hidden_states).argmax(dim=-1).tolist()

    return run


def _draft_pass(drafter: Drafter, target: Target, tokens: int) -> Callable[[], object]:
    """Reading `tokens` committed rows and drafting one token after each sequence's last."""
    batch, rows = _shape(tokens)
    shape = (batch, rows, len(target.tap_layer_ids), target.spec.hidden_size)
    taps = torch.zeros(shape, dtype=target.dtype, device=target.device)
    ids = torch.zeros(batch, rows, dtype=torch.int64, device=target.device)
    cache, slots = drafter.start(batch, rows + 2), slice(0, batch)
    greedy: list[SamplingParams] = [GREEDY] * batch

    def run() -> object:
        for slot in range(batch):
            cache.clear(slot)
        drafter.extend(cache, slots, taps, ids, [rows] * batch)
        return drafter.propose(cache, slots, ids[:, 0], 1, greedy, [None] * batch)

    return run
