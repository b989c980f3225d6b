"""Held-out measurement as a stage: run the evaluator, write evaluate.json, print the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from rich.console import Console
from rich.table import Table

from paceline.models.evaluation import PromptResult
from paceline.models.records import EvalRecord, Prompt
from paceline.pipelines.figure_document import figure, figure_document, ratio_figure
from paceline.pipelines.progress import Bars


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
    speedups = [result.speedup for result in results]
    length = figure(total.acceptance_length, "tokens/round", "higher", total.num_drafts)
    figures = {
        "acceptance_length": length,
        "acceptance_length_prompt_weighted": figure(
            total.acceptance_length_prompt_weighted, "tokens/round", "higher", total.num_prompts
        ),
        "speculative_vs_plain": ratio_figure(
            speedups,
            "higher",
            "quartiles over prompts, both decoded in one run, alternating",
        ),
        "speculative_vs_plain_total": figure(total.speedup, "ratio", "higher", len(speedups)),
        "plain_tokens_per_second": figure(
            total.plain_tokens_per_second, "tokens/s", "higher", len(speedups)
        ),
        "speculative_tokens_per_second": figure(
            total.speculative_tokens_per_second, "tokens/s", "higher", len(speedups)
        ),
        "audit_tokens": figure(total.audit_tokens, "tokens", "higher", total.num_prompts),
        "audit_ties": figure(total.audit_ties, "prompts", "lower", total.num_prompts),
        "audit_mismatches": figure(total.audit_mismatches, "prompts", "lower", total.num_prompts),
    }
    if before is not None:
        figures["acceptance_length_untrained"] = figure(
            before.acceptance_length, "tokens/round", "higher", before.num_drafts
        )
    document = figure_document("evaluate", command, settings, figures)
    return {**document, "records": [asdict(record) for record in records]}


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
