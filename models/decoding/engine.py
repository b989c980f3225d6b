"""Continuous batching of plain and speculative decoding, with every token's hidden states kept.

    engine = Engine(target, num_slots=32, capacity=1024, drafter=drafter, num_speculative_tokens=4)
    for sequence in engine.run(Request(prompt=p, sampling=sampling) for p in prompts): ...

Requests join between rounds as soon as a slot is free and leave when they end. Each has its own
length, sampling, stops and random generator, so its tokens do not depend on which others share its
batch (up to floating-point ties: other batch sizes may round differently). A round is one target
pass over the newest token of each sequence and what was drafted after it: nothing, a chain or a
tree, as the policy decides. Rows of rejected drafts lie above the committed length and are
overwritten.

A request that cannot be served fails alone: its sequence carries `error`.

Shapes: B running sequences, R rows of a round, A tapped layers, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.models.decoding.capture import CaptureStore, capture_row_bytes
from paceline.models.decoding.drafting import Drafting
from paceline.models.decoding.policies import Policy, RoundReport, StaticPolicy
from paceline.models.decoding.prefill import read_prompt
from paceline.models.decoding.replay import replay
from paceline.models.decoding.requests import CapturedSequence, Request, check_request
from paceline.models.decoding.rounds import NO_NODES, Decision, Nodes, decide, round_input
from paceline.models.decoding.slot import Slot, failed
from paceline.models.decoding.strategy import PLAIN, Strategy, chain, room_of
from paceline.models.drafter import Drafter
from paceline.models.fingerprint import require_same_target
from paceline.models.kv_cache import SlotCache, affordable_slots
from paceline.models.records import DrafterCheckpoint, SamplingParams
from paceline.models.target import Target, TargetOutput

GREEDY = SamplingParams()


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
        policy: Policy | None = None,
        strategies: Sequence[Strategy] = (),
    ) -> None:
        """`capacity` tokens, prompt and response, fit a slot; drafts have room of their own.

        Without a policy, chains of `num_speculative_tokens` tokens are drafted. There is room for
        `strategies` too, which the policy of a later drafter may choose. `max_cache_bytes` bounds
        keys, values and captured states of the target.

        Raises ValueError if not even one slot fits `max_cache_bytes`, or if the drafter does not
        fit the target or the policy's strategies.
        """
        self.target = target
        self.capacity = capacity
        self.capture_dtype = capture_dtype
        self.policy = policy or StaticPolicy(chain(num_speculative_tokens if drafter else 0))
        self._room = max(room_of(self.policy.strategies), room_of(strategies))
        rows = capacity + 1 + self._room
        taps = len(target.tap_layer_ids)
        self.num_slots = affordable_slots(
            target.spec,
            target.dtype,
            num_slots,
            rows,
            max_cache_bytes,
            extra_row_bytes=capture_row_bytes(target.spec, taps, capture_dtype),
        )
        self._cache = SlotCache(self.num_slots, rows)
        self._store = CaptureStore(
            self.num_slots,
            capacity,
            num_taps=taps,
            width=target.spec.hidden_size,
            dtype=capture_dtype,
            device=target.device,
        )
        self._slots: list[Slot] = []
        self._waiting: deque[Request] = deque()
        self._drafting: Drafting | None = None
        if drafter is not None:
            self._drafting = Drafting(target, drafter, drafter_version, self.policy)
            self._drafting.start(self.num_slots, rows)

    def add(self, request: Request) -> None:
        """Queue a request; a slot is found for it in a later `step`."""
        self._waiting.append(request)

    def run(
        self, requests: Iterable[Request], between_rounds: Callable[[], None] | None = None
    ) -> Iterator[CapturedSequence]:
        """Serve requests, taken as slots get free; yields sequences as they end.

        Prompts with a given response are replayed, not decoded. `between_rounds` may update the
        target or the drafter.
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
            if between_rounds is not None:
                between_rounds()
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

    def update_drafter(
        self, drafter: Drafter, checkpoint: DrafterCheckpoint, policy: Policy | None = None
    ) -> None:
        """Another drafter, and policy if given, from the next round on, for running sequences too.

        Raises ValueError, changing nothing, for a drafter of another target or with other taps, a
        policy that never drafts, or one whose strategies have no room.
        """
        policy = policy or self.policy
        if room_of(policy.strategies) > self._room or not room_of(policy.strategies):
            raise ValueError(
                f"the engine has room for {self._room} drafts and the drafter's policy takes "
                f"{room_of(policy.strategies)}: make the engine with its strategies"
            )
        require_same_target(
            "the drafter",
            checkpoint.target_fingerprint,
            model=self.target.spec.model,
            lineage=self.target.lineage,
        )
        drafting = Drafting(self.target, drafter, checkpoint.drafter_version, policy)
        drafting.start(self.num_slots, self._cache.capacity)
        self._drafting, self.policy = drafting, policy
        self.policy.drafter_changed()

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
        slot = Slot(request, place=self._store.take(), target_version=self.target.version)
        logits_11V = read_prompt(self.target, self._cache, self._store, self._slots, slot)
        (decision,) = decide(logits_11V, [request.sampling], [slot.generator], [NO_NODES], [None])
        self._commit(slot, decision)
        self._slots.append(slot)
        if self._drafting is not None:
            self._drafting.join(len(self._slots) - 1)

    def _round(self) -> None:
        """Draft, one target pass over all running sequences, verify, commit."""
        started = time.perf_counter()
        running = [slot for slot in self._slots if slot.finish_reason is None]
        strategy, behind = PLAIN, 0
        if self._drafting is not None and running:
            behind = self._drafting.behind(self._slots)
            strategy = self.policy.choose(len(running), behind)
        nodes = [NO_NODES] * len(self._slots)
        probs: list[Tensor | None] = [None] * len(self._slots)
        if self._drafting is not None and strategy.speculates:
            nodes, probs = self._drafting.draft(strategy, self._slots, self._store)
        given = round_input(
            [slot.newest for slot in self._slots],
            [slot.length - 1 for slot in self._slots],
            nodes,
            self.target.device,
        )
        everyone = slice(0, len(self._slots))
        output = self.target.forward(
            given.ids_BR, given.positions_BR, self._cache, everyone, given.tree_BRR
        )
        decisions = decide(
            self.target.logits(output.last_hidden_states),
            [slot.request.sampling if slot.decoding else GREEDY for slot in self._slots],
            [slot.generator for slot in self._slots],
            nodes,
            probs,
        )
        accepted = self._accept(decisions, nodes, output, strategy)
        if running:
            self.policy.observe(
                RoundReport(
                    strategy=strategy,
                    batch_size=len(running),
                    accepted=tuple(accepted),
                    seconds=time.perf_counter() - started,
                    caught_up=behind if strategy.speculates else 0,
                )
            )

    def _accept(
        self,
        decisions: list[Decision],
        nodes: list[Nodes],
        output: TargetOutput,
        strategy: Strategy,
    ) -> list[int]:
        """Commit what was decided and keep its rows; returns accepted drafts of each sequence."""
        accepted: list[int] = []
        places: list[int] = []
        captured: list[int] = []
        index: list[int] = []
        moves: list[tuple[int, int, int]] = []
        width = output.last_hidden_states.shape[1]
        for i, (slot, decision) in enumerate(zip(self._slots, decisions, strict=True)):
            start, rows = slot.captured, [0]
            if slot.decoding:
                kept = self._commit(slot, decision)
                count = min(kept, len(decision.result.accepted))
                rows = list(decision.result.rows[: count + 1])
                accepted.append(count)
                if strategy.speculates and self._drafting is not None:
                    slot.note_round(len(nodes[i]), count, self._drafting.version)
            places += [slot.place] * len(rows)
            captured += range(start, start + len(rows))
            index += [i * width + row for row in rows]
            moves += [(i, start + row, start + j) for j, row in enumerate(rows) if row != j]
            slot.captured += len(rows)
        if moves:
            self._cache.compact(*map(list, zip(*moves, strict=True)))
        aux_NAD, last_ND = output.aux_hidden_states.flatten(0, 1), output.last_hidden_states
        rows_N = torch.tensor(index, device=self.target.device)
        self._store.write_rows(places, captured, aux_NAD[rows_N], last_ND.flatten(0, 1)[rows_N])
        return accepted

    def _commit(self, slot: Slot, decision: Decision) -> int:
        spec, tokenizer = self.target.spec, self.target.tokenizer
        return slot.commit(decision.tokens, decision.logprobs, spec.eos_token_ids, tokenizer)

    def _leave(self) -> list[CapturedSequence]:
        ended: list[CapturedSequence] = []
        for i in reversed(range(len(self._slots))):
            slot = self._slots[i]
            if not slot.complete:
                continue
            last = self._slots.pop()
            if last is not slot:
                self._cache.move(len(self._slots), i, last.captured)
                if self._drafting is not None:
                    self._drafting.move(len(self._slots), i)
                self._slots[i] = last
            ended.append(slot.result(self._store, self.target.version))
            self._store.give_back(slot.place)
        return ended
