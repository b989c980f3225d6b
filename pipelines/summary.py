"""What a train run says at its end: where things are, what they reached, how to serve them."""

from __future__ import annotations

from rich.console import Console

from paceline.models.records import EvalRecord
from paceline.pipelines.run_log import RunLog


def print_summary(run: RunLog, before: EvalRecord, after: EvalRecord, serving: str) -> None:
    """The run's result in a dozen lines; `serving` is the command that serves the drafter."""
    lines = (
        f"acceptance length   {before.acceptance_length:.2f} untrained -> "
        f"{after.acceptance_length:.2f} (greedy rounds of {after.num_speculative_tokens} drafts)",
        f"tokens/s            {after.plain_tokens_per_second:.1f} plain -> "
        f"{after.speculative_tokens_per_second:.1f} speculative ({after.speedup:.2f} x)",
        f"losslessness        {after.audit_tokens} tokens audited, {after.audit_ties} ties, "
        f"{after.audit_mismatches} mismatches",
        f"drafter             {run.out / 'drafter'}",
        f"report              {run.out / 'report.html'}",
        f"evaluation          {run.out / 'evaluate.json'}",
        f"MLflow run          {run.run_id} in {run.tracker.uri}",
        f"serve it with vLLM  {serving}",
    )
    console = Console(soft_wrap=True, highlight=False)
    console.print()
    for line in lines:
        console.print(line, markup=False)
