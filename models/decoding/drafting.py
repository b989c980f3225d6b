"""The engine's drafter: its cache, how far it has read each sequence, and what it proposes.

It reads committed tokens only when it is about to draft, so that rounds without drafts cost
nothing; a drafter that was idle, or is new, reads what it missed from the captured states.

Shapes: B slots, A tapped layers, D width, M nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.backbones.cache import DraftCache
from paceline.models.decoding.capture import CaptureStore
from paceline.models.decoding.policies import Policy
from paceline.models.decoding.proposing import check_strategy, propose
from paceline.models.decoding.rounds import NO_NODES, Nodes, nodes_of
from paceline.models.decoding.slot import Slot
from paceline.models.decoding.speculative import check_drafter
from paceline.models.decoding.strategy import Strategy
from paceline.models.drafter import Drafter
from paceline.models.records import DraftProposal
from paceline.models.target import Target

ALONE = 32
"""Sequences that miss more tokens than this are read one by one: no padding to the longest."""
CHUNK = 1024
"""Tokens of one sequence that one pass reads at most."""


class Drafting:
    """See the module docstring."""

    cache: DraftCache

    def __init__(
        self, target: Target, drafter: Drafter, version: int | None, policy: Policy
    ) -> None:
        """Raises ValueError if the drafter does not fit the target or a strategy."""
        for strategy in policy.strategies:
            if strategy.speculates:
                check_drafter(target, drafter, strategy.depth)
                check_strategy(drafter, strategy)
        self.version = version
        self._drafter = drafter
        self._drawn = policy.drawn
        self._vocab_size = target.spec.vocab_size
        self._device = target.device

    def start(self, num_slots: int, capacity: int) -> None:
        """Make the cache; nothing is read yet."""
        self.cache = self._drafter.start(num_slots, capacity)

    def join(self, index: int) -> None:
        """A new sequence takes slot `index`."""
        self.cache.clear(index)

    def move(self, source: int, destination: int) -> None:
        """The sequence of one slot goes to another."""
        self.cache.move(source, destination)

    def behind(self, slots: list[Slot]) -> int:
        """Tokens of all sequences that are not read, but for what the last round committed."""
        missing = (self._missing(i, slot) - slot.last_kept for i, slot in enumerate(slots))
        return sum(max(0, count) for count in missing)

    def draft(
        self, strategy: Strategy, slots: list[Slot], store: CaptureStore
    ) -> tuple[list[Nodes], list[Tensor | None]]:
        """Nodes of every slot, none for those that have ended, and what they were drawn from.

        A proposal that is no proposal fails its sequence alone.
        """
        self._catch_up(slots, store)
        anchors = torch.tensor([slot.newest for slot in slots], device=self._device)
        proposals = propose(
            self._drafter,
            self.cache,
            slice(0, len(slots)),
            anchors,
            strategy,
            [slot.request.sampling for slot in slots],
            [slot.generator for slot in slots],
            drawn=self._drawn,
        )
        nodes = nodes_of(proposals)
        probs: list[Tensor | None] = [proposal.draft_probs for proposal in proposals]
        for i, slot in enumerate(slots):
            if slot.decoding:
                slot.error = proposal_fault(nodes[i], proposals[i], self._vocab_size)
            if not slot.decoding:
                nodes[i], probs[i] = NO_NODES, None
        return nodes, probs

    def _missing(self, index: int, slot: Slot) -> int:
        # The drafter reads a token's states together with the token that follows it.
        return min(slot.captured, slot.length - 1) - self.cache.lengths[index]

    def _catch_up(self, slots: list[Slot], store: CaptureStore) -> None:
        for i, slot in enumerate(slots):
            while self._missing(i, slot) > ALONE:
                self._read(i, [slot], [min(self._missing(i, slot), CHUNK)], store)
        counts = [self._missing(i, slot) for i, slot in enumerate(slots)]
        if any(counts):
            self._read(0, slots, counts, store)

    def _read(self, first: int, slots: list[Slot], counts: list[int], store: CaptureStore) -> None:
        """Slots first .. of the cache read counts [b] more tokens each."""
        where = slice(first, first + len(slots))
        starts, longest = self.cache.lengths[where], max(counts)
        aux_BNAD = store.taps([slot.place for slot in slots], starts, longest)
        following = [
            slot.tokens[start + 1 : start + 1 + count]
            for slot, start, count in zip(slots, starts, counts, strict=True)
        ]
        padded = [ids + [0] * (longest - len(ids)) for ids in following]
        next_ids = torch.tensor(padded, device=self._device)
        self._drafter.extend(self.cache, where, aux_BNAD, next_ids, counts)


def proposal_fault(nodes: Nodes, proposal: DraftProposal, vocab_size: int) -> str | None:
    """Why a proposal cannot be verified, or None."""
    if not all(0 <= token < vocab_size for token in nodes.tokens):
        return f"the drafter proposed {nodes.tokens}, outside the target's {vocab_size} tokens"
    if not all(-1 <= parent < node for node, parent in enumerate(nodes.parent)):
        return f"the drafter proposed a tree with parents {nodes.parent}: no parent comes later"
    probs = proposal.draft_probs
    if probs is not None and not bool(torch.isfinite(probs).all()):
        return "the drafter's probabilities are not finite: load an earlier version"
    return None
