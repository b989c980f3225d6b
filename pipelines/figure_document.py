"""The one form of measured figures that `evaluate` and every bench write and a reader can check.

{"bench": ..., "command": ..., "machine": ..., "versions": ..., "date": ..., "settings": ...,
 "figures": {NAME: {"value": 1.6, "unit": "ratio", "better": "higher", "n": 7, ...}}}
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.models.files import replace_text
from paceline.pipelines.provenance import machine, package_versions

Figure = dict[str, Any]


def figure(value: float, unit: str, better: str, count: int) -> Figure:
    """A figure of `count` samples; `better` is higher or lower."""
    return {"value": value, "unit": unit, "better": better, "n": count}


def ratio_figure(samples: Sequence[float], better: str, interval: str) -> Figure:
    """The median of paired ratios with its quartiles; `interval` says over what."""
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (samples[0],) * 3
    return {
        **figure(statistics.median(samples), "ratio", better, len(samples)),
        "low": low,
        "high": high,
        "interval": interval,
    }


def figure_document(
    bench: str, command: str, settings: dict[str, Any], figures: dict[str, Figure]
) -> dict[str, Any]:
    """Figures with what they were measured with."""
    return {
        "bench": bench,
        "command": command,
        "machine": machine(),
        "versions": package_versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "figures": figures,
    }


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write the JSON file whole or not at all."""
    replace_text(path, json.dumps(document, indent=2) + "\n")
