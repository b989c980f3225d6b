"""Continuous batching of plain and speculative decoding, with every token's hidden states kept.

    engine = Engine(target, num_slots=32, capacity=1024, drafter=drafter, num_speculative_tokens=4)
    for sequence in engine.run(Request(prompt=p, sampling=sampling) for p in prompts): ...

Requests join between rounds as soon as a slot is free and leave when they end. Each has its own
length, sampling, stops and random generator, so its tokens do not depend on which others share its
batch (up to floating-point ties: other batch sizes may round differently). A round is one target
pass: the newest token of each sequence and the drafts after it. Rows of rejected drafts lie above
the committed length and are overwritten. A plain round is a round without drafts.

A request that cannot be served fails alone: its sequence carries `error`.

Shapes: B running sequences, K drafts of a round, A tapped layers, D width, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from paceline.models.decoding.generation import choose
from paceline.models.decoding.replay import replay
from paceline.models.decoding.requests import CapturedSequence, Request, check_request
from paceline.models.decoding.slot import Slot, failed
from paceline.models.decoding.speculative import check_drafter, verify_chain
from paceline.models.drafter import Drafter
from paceline.models.fingerprint import require_same_target
from paceline.models.kv_cache import SlotCache, affordable_slots
from paceline.models.records import DrafterCheckpoint, DraftProposal
from paceline.models.target import Target, TargetOutput

PREFILL_CHUNK = 512
"""Prompt tokens that one target pass reads at most."""


class Engine:
    """See the module docstring."""

    def __init__(
        self,
        target: Target,
        *,
        num_slots: int,
        capacity: int,
        capture_dtype: torch.dtype = torch.bfloat16,
        max_cache_bytes: int | None = None,
        drafter: Drafter | None = None,
        drafter_version: int | None = None,
        num_speculative_tokens: int = 0,
    ) -> None:
        """`capacity` tokens, prompt and response, fit a slot; drafts have room of their own.

        Raises ValueError if not even one slot fits `max_cache_bytes`, or if the drafter does not
        fit the target.
        """
        self.target = target
        self.capacity = capacity
        self.capture_dtype = capture_dtype
        self.num_speculative_tokens = num_speculative_tokens if drafter is not None else 0
        self._rows = capacity + num_speculative_tokens + 1
        self.num_slots = affordable_slots(
            target.spec, target.dtype, num_slots, self._rows, max_cache_bytes
        )
        self._cache = SlotCache(self.num_slots, self._rows)
        self._fingerprint = target.fingerprint
        self._slots: list[Slot] = []
        self._waiting: deque[Request] = deque()
        self._drafter: Drafter | None = None
        if drafter is not None:
            self._set_drafter(drafter, drafter_version)

    def add(self, request: Request) -> None:
        """Queue a request; a slot is found for it in a later `step`."""
        self._waiting.append(request)

    def run(self, requests: Iterable[Request]) -> Iterator[CapturedSequence]:
        """Serve requests, taken as slots get free; yields sequences as they end.

        Prompts with a given response are replayed, not decoded.
        """
        source = iter(requests)
        while True:
            while len(self._waiting) + len(self._slots) < self.num_slots:
                request = next(source, None)
                if request is None:
                    break
                self.add(request)
            if not self._waiting and not self._slots:
                return
            yield from self.step()

    @torch.no_grad()
    def step(self) -> list[CapturedSequence]:
        """Let requests join, run one round, and return what has ended."""
        finished = self._admit()
        if self._slots:
            self._round()
            finished += self._leave()
        return finished

    def close(self) -> list[CapturedSequence]:
        """Stop: everything that runs or waits ends now, with an error that says so."""
        for slot in self._slots:
            slot.error = "the engine was closed before this request ended: send it again"
        ended = self._leave()
        ended += [failed(r.prompt, "the engine was closed: send it again") for r in self._waiting]
        self._waiting.clear()
        return ended

    def update_target(self, state: dict[str, Tensor], version: int) -> None:
        """New target weights from the next round on; running sequences note both versions.

        Raises ValueError for weights that are not the target's (see Target.update_weights).
        """
        self.target.update_weights(state, version)

    @torch.no_grad()
    def update_drafter(self, drafter: Drafter, checkpoint: DrafterCheckpoint) -> None:
        """Another drafter from the next round on; running sequences go on with it.

        Raises ValueError, changing nothing, for a drafter of another target or with other taps.
        """
        require_same_target(
            "the drafter",
            checkpoint.target_fingerprint,
            model=self.target.spec.model,
            expected=self._fingerprint,
        )
        self._set_drafter(drafter, checkpoint.drafter_version)
        for i, slot in enumerate(self._slots):
            aux = slot.captured_aux().to(self.target.device)
            following = slot.token_ids[1 : slot.captured + 1]
            self._extend(slice(i, i + 1), aux[None], [following], [len(following)])

    def _set_drafter(self, drafter: Drafter, version: int | None) -> None:
        check_drafter(self.target, drafter, self.num_speculative_tokens)
        self._drafter, self._drafter_version = drafter, version
        self._draft_cache = drafter.start(self.num_slots, self._rows)

    def _admit(self) -> list[CapturedSequence]:
        finished: list[CapturedSequence] = []
        while self._waiting and len(self._slots) < self.num_slots:
            request = self._waiting.popleft()
            try:
                check_request(request, self.target, self.capacity)
            except ValueError as error:
                finished.append(failed(request.prompt, str(error)))
                continue
            if request.prompt.response_token_ids is not None:
                finished.append(replay(self.target, request.prompt, self.capture_dtype))
            else:
                self._join(request)
        return finished

    def _join(self, request: Request) -> None:
        prompt_ids, index = request.prompt.token_ids, len(self._slots)
        slot = Slot(
            request,
            num_taps=len(self.target.tap_layer_ids),
            width=self.target.spec.hidden_size,
            dtype=self.capture_dtype,
            target_version=self.target.version,
        )
        twin = self._twin(prompt_ids)
        if twin is None:
            start = 0
        else:
            # The last prompt token is read again: its row chooses this request's first token.
            slot.copy_prompt(self._slots[twin])
            slot.captured = start = len(prompt_ids) - 1
            self._cache.move(twin, index, start)
        self._slots.append(slot)
        one = slice(index, index + 1)
        for first in range(start, len(prompt_ids), PREFILL_CHUNK):
            output = self._read([list(prompt_ids[first : first + PREFILL_CHUNK])], [first], one)
            slot.capture(output.aux_hidden_states[0], output.last_hidden_states[0])
        logits_V = self.target.logits(output.last_hidden_states[0, -1])
        token = choose(logits_V, request.sampling, slot.generator)
        self._commit(slot, [token], logits_V[None])
        if self._drafter is not None:
            self._draft_cache.clear(index)
            aux = slot.captured_aux().to(self.target.device)
            self._extend(one, aux[None], [[*prompt_ids[1:], token]], [len(prompt_ids)])

    def _twin(self, prompt_ids: tuple[int, ...]) -> int | None:
        """A running sequence with the same prompt, read under the present weights."""
        for i, slot in enumerate(self._slots):
            same = slot.request.prompt.token_ids == prompt_ids
            if same and slot.min_target_version == self.target.version:
                return i
        return None

    def _round(self) -> None:
        """Draft, one target pass over all running sequences, verify, commit."""
        everyone = slice(0, len(self._slots))
        running = any(slot.finish_reason is None for slot in self._slots)
        steps = self.num_speculative_tokens if running else 0
        proposals = self._propose(everyone, steps)
        tokens = [
            [slot.newest, *self._drafted(slot, proposal, steps)]
            for slot, proposal in zip(self._slots, proposals, strict=True)
        ]
        output = self._read(tokens, [slot.length - 1 for slot in self._slots], everyone)
        logits_BRV = self.target.logits(output.last_hidden_states)
        following: list[list[int]] = []
        for i, slot in enumerate(self._slots):
            aux_RAD, last_RD = output.aux_hidden_states[i], output.last_hidden_states[i]
            if slot.error is not None or slot.finish_reason is not None:
                slot.capture(aux_RAD[:1], last_RD[:1])
                following.append([slot.newest])
                continue
            committed = self._verify(slot, proposals[i], logits_BRV[i])
            accepted = len(committed) - 1
            kept = self._commit(slot, committed, logits_BRV[i])
            if steps:
                slot.note_round(steps, min(accepted, kept))
                slot.drafter_version = self._drafter_version
            rows = 1 + min(accepted, kept)
            slot.capture(aux_RAD[:rows], last_RD[:rows])
            following.append(committed)
        if steps:
            counts = [len(ids) for ids in following]
            self._extend(everyone, output.aux_hidden_states, following, counts)

    def _propose(self, slots: slice, steps: int) -> list[DraftProposal | None]:
        if steps == 0 or self._drafter is None:
            return [None] * len(self._slots)
        anchors = torch.tensor([slot.newest for slot in self._slots], device=self.target.device)
        return list(
            self._drafter.propose(
                self._draft_cache,
                slots,
                anchors,
                steps,
                [slot.request.sampling for slot in self._slots],
                [slot.generator for slot in self._slots],
            )
        )

    def _drafted(self, slot: Slot, proposal: DraftProposal | None, steps: int) -> list[int]:
        """The proposed tokens; a proposal that is no proposal fails its sequence alone."""
        if proposal is None:
            return [slot.newest] * steps
        tokens: list[int] = proposal.tokens.tolist()
        vocab, probs = self.target.spec.vocab_size, proposal.draft_probs
        if not all(0 <= token < vocab for token in tokens):
            slot.error = f"the drafter proposed {tokens}, outside the target's {vocab} tokens"
        elif probs is not None and not bool(torch.isfinite(probs).all()):
            slot.error = "the drafter's probabilities are not finite: load an earlier version"
        return tokens if slot.error is None else [slot.newest] * steps

    def _verify(self, slot: Slot, proposal: DraftProposal | None, logits_RV: Tensor) -> list[int]:
        if proposal is None:
            return [choose(logits_RV[0], slot.request.sampling, slot.generator)]
        result = verify_chain(logits_RV, proposal, slot.request.sampling, slot.generator)
        return [*proposal.tokens[list(result.accepted)].tolist(), result.bonus_token]

    def _commit(self, slot: Slot, tokens: list[int], logits_RV: Tensor) -> int:
        """Row r of the logits is where token r comes from."""
        rows_NV = logits_RV[: len(tokens)]
        chosen = torch.tensor(tokens, device=rows_NV.device)[:, None]
        logprobs = (rows_NV.gather(1, chosen)[:, 0] - rows_NV.logsumexp(dim=-1)).tolist()
        return slot.commit(tokens, logprobs, self.target.spec.eos_token_ids, self.target.tokenizer)

    def _extend(
        self, slots: slice, aux_BRAD: Tensor, following: list[list[int]], counts: list[int]
    ) -> None:
        """Give the drafter the taps of committed tokens, padded to one length."""
        assert self._drafter is not None
        longest = aux_BRAD.shape[1]
        padded = [ids + [ids[-1]] * (longest - len(ids)) for ids in following]
        next_ids = torch.tensor(padded, device=self.target.device)
        self._drafter.extend(self._draft_cache, slots, aux_BRAD, next_ids, counts)

    def _read(self, tokens: list[list[int]], starts: list[int], slots: slice) -> TargetOutput:
        device = self.target.device
        ids_BR = torch.tensor(tokens, device=device)
        steps_R = torch.arange(ids_BR.shape[1], device=device)
        positions_BR = torch.tensor(starts, device=device)[:, None] + steps_R
        return self.target.forward(ids_BR, positions_BR, self._cache, slots)

    def _leave(self) -> list[CapturedSequence]:
        ended: list[CapturedSequence] = []
        for i in reversed(range(len(self._slots))):
            slot = self._slots[i]
            if not slot.complete:
                continue
            last = self._slots.pop()
            if last is not slot:
                self._cache.move(len(self._slots), i, last.captured)
                if self._drafter is not None:
                    self._draft_cache.move(len(self._slots), i)
                self._slots[i] = last
            ended.append(slot.result(self.target.version))
        return ended
