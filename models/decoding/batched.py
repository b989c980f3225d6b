"""Continuous batching of plain decoding, with the tapped hidden states of every token kept.

Requests join as soon as a slot is free and leave when they end; each has its own length, random
generator and captured rows, so its tokens do not depend on which others share its batch (up to
floating-point ties: other batch sizes round differently). The last token is read as well, so that a
finished sequence has a hidden row for each of its tokens.

Shapes: B active slots, L sequence length, A tapped layers, D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.models.decoding.generation import choose, truncate
from paceline.models.kv_cache import SlotCache
from paceline.models.records import Prompt, SamplingParams
from paceline.models.target import Target, TargetOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedSequence:
    """A prompt with its response and the target's states of every token."""

    prompt: Prompt
    token_ids: Tensor  # [L] int64, prompt then response
    logprobs: Tensor  # [L] float32, of response tokens under the target; 0 on the prompt
    aux_hidden_states: Tensor  # [L, A, D], in the capture dtype, on CPU
    last_hidden_states: Tensor  # [L, D]
    finish_reason: str


@dataclass(slots=True)
class _Slot:
    prompt: Prompt
    aux_LAD: Tensor
    last_LD: Tensor
    generator: torch.Generator
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    complete: bool = False
    """The final token has been read too, so that every token has its hidden row."""

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) + len(self.response)


class BatchedDecoder:
    """Decodes prompts on `batch_size` slots of one target."""

    def __init__(
        self,
        target: Target,
        *,
        batch_size: int,
        capacity: int,
        sampling: SamplingParams,
        capture_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.target = target
        self.batch_size = batch_size
        self.capacity = capacity
        self.sampling = sampling
        self.capture_dtype = capture_dtype
        self._cache = SlotCache(batch_size, capacity)
        self._slots: list[_Slot] = []

    @torch.no_grad()
    def run(self, prompts: Iterable[Prompt]) -> Iterator[CapturedSequence]:
        """Yield sequences as they end. Prompts with a given response are replayed, not decoded."""
        waiting = iter(prompts)
        while True:
            yield from self._fill(waiting)
            if not self._slots:
                return
            self._step()
            yield from self._leave()

    def _fill(self, waiting: Iterator[Prompt]) -> Iterator[CapturedSequence]:
        while len(self._slots) < self.batch_size:
            prompt = next(waiting, None)
            if prompt is None:
                return
            if prompt.response_token_ids is not None:
                yield self._replay(prompt)
            else:
                self._join(prompt)

    def _join(self, prompt: Prompt) -> None:
        index, count = len(self._slots), len(prompt.token_ids)
        assert count + self.sampling.max_new_tokens <= self.capacity
        rows = count + self.sampling.max_new_tokens
        slot = _Slot(prompt, *self._buffers(rows), self._generator(prompt))
        self._slots.append(slot)
        output = self._read(prompt.token_ids, slice(index, index + 1))
        slot.aux_LAD[:count] = output.aux_hidden_states[0]
        slot.last_LD[:count] = output.last_hidden_states[0]
        self._append(slot, self.target.logits(output.last_hidden_states[0, -1]))

    def _replay(self, prompt: Prompt) -> CapturedSequence:
        """A given response: one prefill over an own cache gives every row and log-probability."""
        assert prompt.response_token_ids is not None
        ids = (*prompt.token_ids, *prompt.response_token_ids)
        positions = torch.arange(len(ids), device=self.target.device)[None]
        token_ids = torch.tensor([ids], device=self.target.device)
        output = self.target.forward(token_ids, positions, SlotCache(1, len(ids)), slice(0, 1))
        first = len(prompt.token_ids)
        logits = self.target.logits(output.last_hidden_states[0, first - 1 : -1])
        logprobs = torch.zeros(len(ids))
        logprobs[first:] = logits.log_softmax(-1).gather(1, token_ids[0, first:, None])[:, 0]
        return CapturedSequence(
            prompt=prompt,
            token_ids=token_ids[0].cpu(),
            logprobs=logprobs,
            aux_hidden_states=output.aux_hidden_states[0].to("cpu", self.capture_dtype),
            last_hidden_states=output.last_hidden_states[0].to("cpu", self.capture_dtype),
            finish_reason="given",
        )

    def _step(self) -> None:
        """Every active slot reads its newest token."""
        device = self.target.device
        newest = torch.tensor([[slot.response[-1]] for slot in self._slots], device=device)
        positions = torch.tensor([[slot.length - 1] for slot in self._slots], device=device)
        output = self.target.forward(newest, positions, self._cache, slice(0, len(self._slots)))
        logits_BV = self.target.logits(output.last_hidden_states[:, 0])
        for i, slot in enumerate(self._slots):
            slot.aux_LAD[slot.length - 1] = output.aux_hidden_states[i, 0]
            slot.last_LD[slot.length - 1] = output.last_hidden_states[i, 0]
            if slot.finish_reason is None:
                self._append(slot, logits_BV[i])
            else:
                slot.complete = True

    def _append(self, slot: _Slot, logits_V: Tensor) -> None:
        token = choose(logits_V, self.sampling, slot.generator)
        slot.logprobs.append(float(logits_V[token] - logits_V.logsumexp(0)))
        _, slot.finish_reason = truncate(
            [token], len(slot.response), self.sampling, self.target.spec.eos_token_ids
        )
        slot.response.append(token)

    def _leave(self) -> Iterator[CapturedSequence]:
        for i in reversed(range(len(self._slots))):
            slot = self._slots[i]
            if not slot.complete:
                continue
            last = self._slots.pop()
            if last is not slot:
                self._cache.move(len(self._slots), i, last.length)
                self._slots[i] = last
            yield self._captured(slot)

    def _captured(self, slot: _Slot) -> CapturedSequence:
        assert slot.finish_reason is not None
        ids = (*slot.prompt.token_ids, *slot.response)
        logprobs = torch.zeros(len(ids))
        logprobs[len(slot.prompt.token_ids) :] = torch.tensor(slot.logprobs)
        return CapturedSequence(
            prompt=slot.prompt,
            token_ids=torch.tensor(ids),
            logprobs=logprobs,
            aux_hidden_states=slot.aux_LAD[: len(ids)].clone(),
            last_hidden_states=slot.last_LD[: len(ids)].clone(),
            finish_reason=slot.finish_reason,
        )

    def _read(self, token_ids: tuple[int, ...], slots: slice) -> TargetOutput:
        device = self.target.device
        positions = torch.arange(len(token_ids), device=device)[None]
        ids = torch.tensor([token_ids], device=device)
        return self.target.forward(ids, positions, self._cache, slots)

    def _buffers(self, rows: int) -> tuple[Tensor, Tensor]:
        taps, width = len(self.target.tap_layer_ids), self.target.spec.hidden_size
        return (
            torch.empty(rows, taps, width, dtype=self.capture_dtype),
            torch.empty(rows, width, dtype=self.capture_dtype),
        )

    def _generator(self, prompt: Prompt) -> torch.Generator:
        # Seed and prompt alone decide a request's draws: neither what shares its batch nor which
        # worker got it.
        digest = hashlib.sha256(f"{self.sampling.seed} {prompt.prompt_id}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7]))
