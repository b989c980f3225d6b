"""What decoding returns, and the one place where a next token is chosen from target logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.sampling import probs_from_logits, sample
from paceline.models.records import AcceptanceTrace, SamplingParams
from paceline.models.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Response tokens of one prompt (the stop token included) and how they came about."""

    token_ids: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    trace: AcceptanceTrace
    seconds: float  # prefill and decoding


def choose(logits_V: Tensor, sampling: SamplingParams, generator: torch.Generator | None) -> int:
    """Next token from target logits [V]: argmax at temperature 0, else a draw."""
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    assert generator is not None, "sampling needs a generator"
    probs_1V = probs_from_logits(
        logits_V[None], sampling.temperature, sampling.top_k, sampling.top_p
    )
    return int(sample(probs_1V, generator))


def truncate(
    committed: list[int], already: int, sampling: SamplingParams, stop_ids: tuple[int, ...]
) -> tuple[list[int], str | None]:
    """Cut newly committed tokens at the first stop token or the length limit.

    `already` response tokens precede them. Returns what stays and the reason, None to go on.
    """
    for i, token in enumerate(committed):
        if token in stop_ids:
            return committed[: i + 1], "stop"
        if already + i + 1 == sampling.max_new_tokens:
            return committed[: i + 1], "length"
    return committed, None


def check_room(target: Target, prompt_length: int, sampling: SamplingParams, extra: int) -> int:
    """Cache capacity that a generation needs.

    Raises ValueError if prompt and response do not fit the target's context.
    """
    needed = prompt_length + sampling.max_new_tokens + extra
    limit = target.spec.max_position_embeddings
    if needed > limit:
        raise ValueError(
            f"a prompt of {prompt_length} tokens with sampling.max_new_tokens="
            f"{sampling.max_new_tokens} and {extra} draft tokens needs {needed} positions, "
            f"{target.spec.model} has {limit}: shorten the prompt or lower max_new_tokens"
        )
    return needed
