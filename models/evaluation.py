"""Plain and speculative decoding side by side: acceptance, speed and the losslessness audit.

For each prompt both decode in one run, alternating who goes first. Greedy outputs must be equal; a
difference is a tie only if the target itself, reading the common prefix once more in a single pass,
puts the two tokens within TIE_LOGITS of each other, and a mismatch otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.models.decoding.generation import Generation
from paceline.models.decoding.speculative import generate_plain, generate_speculative
from paceline.models.drafter import Drafter
from paceline.models.kv_cache import SlotCache
from paceline.models.records import (
    AcceptanceTrace,
    DrafterCheckpoint,
    EvalRecord,
    Prompt,
    SamplingParams,
)
from paceline.models.target import Target

TIE_LOGITS = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""How far apart two logits may lie and still be ordered by rounding alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Tokens compared, and how the first difference, if any, is explained."""

    tokens: int
    ties: int
    mismatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """Both generations of one prompt."""

    prompt_id: str
    domain: str
    plain: Generation
    speculative: Generation
    audit: Audit

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens/s on this prompt."""
        plain = len(self.plain.token_ids) / self.plain.seconds
        return len(self.speculative.token_ids) / self.speculative.seconds / plain


def evaluate_prompts(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    num_speculative_tokens: int,
    warmup_prompts: int = 1,
) -> Iterator[PromptResult]:
    """Measure prompts one by one; the first ones are run once more before, untimed, to warm up."""
    for prompt in prompts[:warmup_prompts]:
        generate_plain(target, prompt.token_ids, sampling)
        generate_speculative(target, drafter, prompt.token_ids, sampling, num_speculative_tokens)
    for i, prompt in enumerate(prompts):
        results: dict[bool, Generation] = {}
        for speculate in (i % 2 == 0, i % 2 == 1):
            results[speculate] = (
                generate_speculative(
                    target, drafter, prompt.token_ids, sampling, num_speculative_tokens
                )
                if speculate
                else generate_plain(target, prompt.token_ids, sampling)
            )
        plain, speculative = results[False], results[True]
        greedy = sampling.temperature == 0.0
        audit = Audit(tokens=0, ties=0, mismatches=0)
        yield PromptResult(
            prompt_id=prompt.prompt_id,
            domain=prompt.domain,
            plain=plain,
            speculative=speculative,
            audit=audit_greedy(target, prompt, plain, speculative) if greedy else audit,
        )


@torch.no_grad()
def audit_greedy(
    target: Target, prompt: Prompt, plain: Generation, speculative: Generation
) -> Audit:
    """Compare two greedy responses up to their first difference."""
    shared = 0
    for ours, theirs in zip(speculative.token_ids, plain.token_ids, strict=False):
        if ours != theirs:
            break
        shared += 1
    if shared == len(plain.token_ids) == len(speculative.token_ids):
        return Audit(tokens=shared, ties=0, mismatches=0)
    if shared == min(len(plain.token_ids), len(speculative.token_ids)):
        # One went on where the other stopped: no rounding explains that.
        return Audit(tokens=shared, ties=0, mismatches=1)
    prefix = torch.tensor([[*prompt.token_ids, *plain.token_ids[:shared]]], device=target.device)
    positions = torch.arange(prefix.shape[1], device=target.device)[None]
    output = target.forward(prefix, positions, SlotCache(1, prefix.shape[1]), slice(0, 1))
    logits = target.logits(output.last_hidden_states[0, -1])
    gap = abs(float(logits[plain.token_ids[shared]] - logits[speculative.token_ids[shared]]))
    # Both must also be the top pair: a drafter's token that merely scores alike is no tie.
    top = float(logits.max())
    lowest = min(
        float(logits[plain.token_ids[shared]]), float(logits[speculative.token_ids[shared]])
    )
    tie = gap <= TIE_LOGITS[target.dtype] and top - lowest <= TIE_LOGITS[target.dtype]
    return Audit(tokens=shared, ties=int(tie), mismatches=int(not tie))


def summarise(
    results: Sequence[PromptResult],
    *,
    domain: str,
    target: Target,
    checkpoint: DrafterCheckpoint,
    sampling: SamplingParams,
    num_speculative_tokens: int,
) -> EvalRecord:
    """One record of the given results."""
    trace = AcceptanceTrace.concat([r.speculative.trace for r in results])
    own = [r.speculative.trace.acceptance_length for r in results if r.speculative.trace.accepted]
    plain = _tokens_per_second([r.plain for r in results])
    speculative = _tokens_per_second([r.speculative for r in results])
    return EvalRecord(
        domain=domain,
        num_prompts=len(results),
        num_speculative_tokens=num_speculative_tokens,
        temperature=sampling.temperature,
        acceptance_length=trace.acceptance_length,
        acceptance_length_prompt_weighted=sum(own) / len(own) if own else 1.0,
        acceptance_histogram=trace.histogram,
        accept_rate_per_pos=tuple(n / trace.num_drafts for n in trace.num_accepted_tokens_per_pos),
        num_drafts=trace.num_drafts,
        num_draft_tokens=trace.num_draft_tokens,
        num_accepted_tokens=trace.num_accepted_tokens,
        plain_tokens_per_second=plain,
        speculative_tokens_per_second=speculative,
        speedup=speculative / plain,
        audit_tokens=sum(r.audit.tokens for r in results),
        audit_ties=sum(r.audit.ties for r in results),
        audit_mismatches=sum(r.audit.mismatches for r in results),
        target_fingerprint=target.fingerprint,
        target_version=target.version,
        drafter_version=checkpoint.drafter_version,
        device=str(target.device),
    )


def _tokens_per_second(generations: Sequence[Generation]) -> float:
    return sum(len(g.token_ids) for g in generations) / sum(g.seconds for g in generations)
