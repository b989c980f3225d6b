"""Contestants timed in turn within one run, so that noise of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def alternate(
    contestants: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of every call: each contestant once per repeat, in an order that turns."""
    names = list(contestants)
    for name in names:
        for _ in range(warmup):
            contestants[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            started = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def paired_ratios(numerator: list[float], denominator: list[float]) -> list[float]:
    """Ratio of the two calls of each repeat."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def faster(seconds: Mapping[str, list[float]], *names: str) -> str:
    """The contestant with the lower median."""
    return min(names, key=lambda name: statistics.median(seconds[name]))
