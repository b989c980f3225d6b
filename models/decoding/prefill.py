"""Reading prompts: in chunks, and once for all running requests that share one.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.models.decoding.capture import CaptureStore
from paceline.models.decoding.slot import Slot
from paceline.models.kv_cache import SlotCache
from paceline.models.target import Target

PREFILL_CHUNK = 512
"""Prompt tokens that one target pass reads at most."""


def read_prompt(
    target: Target, cache: SlotCache, store: CaptureStore, slots: Sequence[Slot], slot: Slot
) -> Tensor:
    """Read a joining request's prompt into slot `len(slots)`; logits [1, 1, V] after its end."""
    prompt_ids, index = slot.request.prompt.token_ids, len(slots)
    twin = _twin(prompt_ids, slots, target.version)
    start = 0
    if twin is not None:
        # The last prompt token is read again: its row chooses this request's first token.
        start = len(prompt_ids) - 1
        store.copy(slots[twin].place, slot.place, start)
        cache.move(twin, index, start)
    for first in range(start, len(prompt_ids), PREFILL_CHUNK):
        ids = torch.tensor([prompt_ids[first : first + PREFILL_CHUNK]], device=target.device)
        positions = torch.arange(first, first + ids.shape[1], device=target.device)[None]
        output = target.forward(ids, positions, cache, slice(index, index + 1))
        aux, last = output.aux_hidden_states[0], output.last_hidden_states[0]
        store.write(slot.place, first, aux, last)
    slot.captured = len(prompt_ids)
    return target.logits(last[None, -1:])


def _twin(prompt_ids: tuple[int, ...], slots: Sequence[Slot], target_version: int) -> int | None:
    """A running sequence with the same prompt, read under the present weights."""
    for i, slot in enumerate(slots):
        same = slot.request.prompt.token_ids == prompt_ids
        if same and slot.min_target_version == target_version:
            return i
    return None
