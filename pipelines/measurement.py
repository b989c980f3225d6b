"""Held-out measurement as a stage: run the evaluator, write evaluate.json, print the table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from rich.console import Console
from rich.table import Table

from paceline.models.evaluation import PromptResult
from paceline.models.files import replace_text
from paceline.models.records import EvalRecord, Prompt
from paceline.pipelines.progress import Bars
from paceline.pipelines.provenance import machine, package_versions


def measure(
    evaluator: ActorHandle, folder: Path, prompts: Sequence[Prompt], bars: Bars, stage: str
) -> tuple[list[EvalRecord], list[PromptResult]]:
    """Evaluate a drafter on prompts, with a bar; one record per domain, the total last."""
    results: list[PromptResult] = []
    stream = evaluator.evaluate.options(num_returns="streaming").remote(str(folder), list(prompts))
    for ref in stream:
        results.append(ray.get(ref))
        rounds = sum(r.speculative.trace.num_drafts for r in results)
        accepted = sum(r.speculative.trace.num_accepted_tokens for r in results)
        note = f"acceptance length {1 + accepted / max(rounds, 1):.2f}"
        bars.update(stage, len(results), len(prompts), note)
    return ray.get(evaluator.records.remote(str(folder), results)), results


def evaluation_document(
    records: Sequence[EvalRecord],
    results: Sequence[PromptResult],
    *,
    command: str,
    settings: dict[str, Any],
    before: EvalRecord | None = None,
) -> dict[str, Any]:
    """The figures and records of an evaluation as JSON values."""
    total = records[-1]
    speedups = sorted(result.speedup for result in results)
    low, _, high = statistics.quantiles(speedups, n=4) if len(speedups) > 1 else (speedups[0],) * 3
    length = _figure(total.acceptance_length, "tokens/round", "higher", total.num_drafts)
    figures = {
        "acceptance_length": length,
        "acceptance_length_prompt_weighted": _figure(
            total.acceptance_length_prompt_weighted, "tokens/round", "higher", total.num_prompts
        ),
        "speculative_vs_plain": {
            **_figure(statistics.median(speedups), "ratio", "higher", len(speedups)),
            "low": low,
            "high": high,
            "interval": "quartiles over prompts, both decoded in one run, alternating",
        },
        "speculative_vs_plain_total": _figure(total.speedup, "ratio", "higher", len(speedups)),
        "plain_tokens_per_second": _figure(
            total.plain_tokens_per_second, "tokens/s", "higher", len(speedups)
        ),
        "speculative_tokens_per_second": _figure(
            total.speculative_tokens_per_second, "tokens/s", "higher", len(speedups)
        ),
        "audit_tokens": _figure(total.audit_tokens, "tokens", "higher", total.num_prompts),
        "audit_ties": _figure(total.audit_ties, "prompts", "lower", total.num_prompts),
        "audit_mismatches": _figure(total.audit_mismatches, "prompts", "lower", total.num_prompts),
    }
    if before is not None:
        figures["acceptance_length_untrained"] = _figure(
            before.acceptance_length, "tokens/round", "higher", before.num_drafts
        )
    return {
        "bench": "evaluate",
        "command": command,
        "machine": machine(),
        "versions": package_versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "figures": figures,
        "records": [asdict(record) for record in records],
    }


def _figure(value: float, unit: str, better: str, count: int) -> dict[str, Any]:
    return {"value": value, "unit": unit, "better": better, "n": count}


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write evaluate.json whole or not at all."""
    replace_text(path, json.dumps(document, indent=2) + "\n")


def record_metrics(record: EvalRecord) -> dict[str, float]:
    """An evaluation record as MLflow metrics, named by domain."""
    names = (
        "acceptance_length",
        "acceptance_length_prompt_weighted",
        "plain_tokens_per_second",
        "speculative_tokens_per_second",
        "speedup",
        "audit_tokens",
        "audit_ties",
        "audit_mismatches",
    )
    values = asdict(record)
    metrics = {f"{record.domain}/{name}": float(values[name]) for name in names}
    for k, rate in enumerate(record.accept_rate_per_pos):
        metrics[f"{record.domain}/accept_rate_pos_{k}"] = rate
    return metrics


def print_records(records: Sequence[EvalRecord]) -> None:
    """The records as a table."""
    table = Table(
        "domain",
        "prompts",
        "acceptance length",
        "by prompt",
        "accept rate by position",
        "plain tok/s",
        "spec. tok/s",
        "speed-up",
        "audited tokens",
        "ties",
        "mismatches",
    )
    for record in records:
        table.add_row(
            record.domain,
            str(record.num_prompts),
            f"{record.acceptance_length:.3f}",
            f"{record.acceptance_length_prompt_weighted:.3f}",
            " ".join(f"{rate:.2f}" for rate in record.accept_rate_per_pos),
            f"{record.plain_tokens_per_second:.1f}",
            f"{record.speculative_tokens_per_second:.1f}",
            f"{record.speedup:.2f}",
            str(record.audit_tokens),
            str(record.audit_ties),
            str(record.audit_mismatches),
        )
    Console(width=None if Console().is_terminal else 160).print(table)
