"""What the engine is asked and what it answers: one request, one captured sequence.

Shapes: L sequence length, A tapped layers, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.models.records import AcceptanceTrace, Prompt, SamplingParams
from paceline.models.target import Target

OnTokens = Callable[[str, list[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt with its own way of sampling; `on_tokens` gets (prompt_id, new tokens) per round."""

    prompt: Prompt
    sampling: SamplingParams
    on_tokens: OnTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedSequence:
    """A prompt with its response and the target's states of every token."""

    prompt: Prompt
    token_ids: Tensor  # [L] int64, prompt then response
    logprobs: Tensor  # [L] float32, of response tokens under the target; 0 on the prompt
    aux_hidden_states: Tensor  # [L, A, D], in the capture dtype, on CPU
    last_hidden_states: Tensor  # [L, D]
    finish_reason: str  # "stop", "length", "given" or "error"
    trace: AcceptanceTrace = AcceptanceTrace()
    min_target_version: int = 0
    max_target_version: int = 0
    drafter_version: int | None = None
    """Of the last round that speculated."""
    error: str | None = None
    """Why there is no response; the other requests are not affected."""


def check_request(request: Request, target: Target, capacity: int) -> None:
    """Raise ValueError, naming the field and the remedy, if the request cannot be served.

    `capacity` is the number of tokens that one slot of the engine holds.
    """
    prompt, sampling = request.prompt, request.sampling
    vocab, count = target.spec.vocab_size, len(prompt.token_ids)
    if not prompt.token_ids:
        raise ValueError("the prompt is empty: give at least one token")
    given = (*prompt.token_ids, *(prompt.response_token_ids or ()), *sampling.stop_token_ids)
    for token in given:
        if not 0 <= token < vocab:
            raise ValueError(f"token {token} is outside the target's vocabulary of {vocab}")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={sampling.max_new_tokens}: give at least 1")
    if not 0.0 <= sampling.temperature < math.inf:
        raise ValueError(f"temperature={sampling.temperature}: give 0 for greedy or more")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p={sampling.top_p} is outside (0, 1]: give 1.0 to turn it off")
    if sampling.top_k < 0:
        raise ValueError(f"top_k={sampling.top_k} is negative: give 0 to turn it off")
    needed = count + (len(prompt.response_token_ids or ()) or sampling.max_new_tokens)
    limit = min(target.spec.max_position_embeddings, capacity)
    if needed > limit:
        raise ValueError(
            f"a prompt of {count} tokens and max_new_tokens={sampling.max_new_tokens} need "
            f"{needed} positions and there are {limit}: shorten the prompt or ask for less"
        )
