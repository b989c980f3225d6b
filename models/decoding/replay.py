"""Given responses: the target reads them once, nothing is decoded."""

from __future__ import annotations

import torch

from paceline.models.decoding.requests import CapturedSequence
from paceline.models.kv_cache import SlotCache
from paceline.models.records import Prompt
from paceline.models.target import Target

LOGIT_ROWS = 512
"""Rows of logits that exist at once."""


def replay(target: Target, prompt: Prompt, capture_dtype: torch.dtype) -> CapturedSequence:
    """A given response: one prefill over an own cache gives every row and log-probability."""
    assert prompt.response_token_ids is not None
    ids = (*prompt.token_ids, *prompt.response_token_ids)
    positions = torch.arange(len(ids), device=target.device)[None]
    token_ids = torch.tensor([ids], device=target.device)
    output = target.forward(token_ids, positions, SlotCache(1, len(ids)), slice(0, 1))
    first = len(prompt.token_ids)
    logprobs = torch.zeros(len(ids))
    for start in range(first, len(ids), LOGIT_ROWS):
        rows = slice(start, min(start + LOGIT_ROWS, len(ids)))
        logits = target.logits(output.last_hidden_states[0, rows.start - 1 : rows.stop - 1])
        chosen = token_ids[0, rows, None]
        logprobs[rows] = logits.log_softmax(dim=-1).gather(1, chosen)[:, 0].cpu()
    return CapturedSequence(
        prompt=prompt,
        token_ids=token_ids[0].cpu(),
        logprobs=logprobs,
        aux_hidden_states=output.aux_hidden_states[0].to("cpu", capture_dtype),
        last_hidden_states=output.last_hidden_states[0].to("cpu", capture_dtype),
        finish_reason="given",
        min_target_version=target.version,
        max_target_version=target.version,
    )
