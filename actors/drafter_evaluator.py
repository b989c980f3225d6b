"""Measures drafters of one target: acceptance, speed beside plain decoding, losslessness audit.

evaluator = ray.remote(DrafterEvaluator).remote(target_config, evaluate_config)
for ref in evaluator.evaluate.options(num_returns="streaming").remote(folder, prompts): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from paceline.actors.rollout_worker import sampling_params
from paceline.models.checkpoints import load_drafter
from paceline.models.config import EvaluateConfig, TargetConfig
from paceline.models.evaluation import PromptResult, evaluate_prompts, summarise
from paceline.models.records import EvalRecord, Prompt
from paceline.models.target import Target

TOTAL = "total"


class DrafterEvaluator:
    """One target, any of its drafters."""

    def __init__(
        self, target: TargetConfig, evaluate: EvaluateConfig, *, threads: int | None = None
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.target = Target.load(target)
        self.config = evaluate

    def evaluate(self, folder: str, prompts: Sequence[Prompt]) -> Iterator[PromptResult]:
        """Results prompt by prompt. Raises ValueError for a damaged or foreign drafter."""
        drafter, _ = load_drafter(Path(folder), self.target)
        drafter.eval()
        yield from evaluate_prompts(
            self.target,
            drafter,
            prompts,
            sampling_params(self.config.sampling),
            num_speculative_tokens=self.config.num_speculative_tokens,
            warmup_prompts=self.config.warmup_prompts,
        )

    def records(self, folder: str, results: Sequence[PromptResult]) -> list[EvalRecord]:
        """One record per domain, in order of appearance, then the total."""
        _, checkpoint = load_drafter(Path(folder), self.target)
        domains = list(dict.fromkeys(result.domain for result in results))
        return [
            summarise(
                [r for r in results if domain in (TOTAL, r.domain)],
                domain=domain,
                target=self.target,
                checkpoint=checkpoint,
                sampling=sampling_params(self.config.sampling),
                num_speculative_tokens=self.config.num_speculative_tokens,
            )
            for domain in [*domains, TOTAL]
        ]
