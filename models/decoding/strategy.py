"""How a round drafts: one name, one record. `plain` drafts nothing.

chain_4               4 tokens one after another
chains_3_5            3 chains of 5 tokens that differ from the first token on, as one trie
beam_5_4              a beam search 5 deep and 4 wide, its beams' prefixes merged
eagle2_5_4_16         5 levels, the 4 best nodes of each opened with their 4 best tokens, the
                      16 best nodes of all levels verified (EAGLE-2, arXiv 2406.16858)
best_first_6_7_32     the 32 best nodes of the product of a block's marginals, 6 deep, the 7
                      best tokens of each slot (JetSpec's tree, arXiv 2606.18394)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KINDS = {"plain": 0, "chain": 1, "chains": 2, "beam": 2, "eagle2": 3, "best_first": 3}
"""How many numbers follow each kind."""
FORMS = "plain, chain_DEPTH, chains_COUNT_DEPTH, beam_DEPTH_WIDTH, eagle2_DEPTH_WIDTH_BUDGET or "
FORMS += "best_first_DEPTH_WIDTH_BUDGET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to draft a round; see the module docstring."""

    kind: str
    depth: int = 0
    width: int = 1
    """Chains, beams, or the nodes of a level that are opened."""
    budget: int = 0
    """Most nodes that the target reads in a round, its anchor not counted."""

    @property
    def name(self) -> str:
        numbers = {
            0: (),
            1: (self.depth,),
            2: (self.width, self.depth) if self.kind == "chains" else (self.depth, self.width),
            3: (self.depth, self.width, self.budget),
        }[KINDS[self.kind]]
        return "_".join((self.kind, *map(str, numbers)))

    @property
    def speculates(self) -> bool:
        return self.depth > 0

    @property
    def is_tree(self) -> bool:
        """Whether nodes may have siblings: rows and positions then differ."""
        return self.kind not in ("plain", "chain")

    @property
    def draft_rows(self) -> int:
        """Most rows above the committed ones that a drafter's cache needs."""
        return self.depth * self.width


PLAIN = Strategy(kind="plain")


def chain(depth: int) -> Strategy:
    """`depth` tokens one after another; 0 is plain decoding."""
    return Strategy(kind="chain", depth=depth, budget=depth) if depth else PLAIN


def room_of(strategies: Sequence[Strategy]) -> int:
    """Most rows that one of the strategies needs besides the anchor's; 0: none drafts."""
    return max((max(s.budget, s.draft_rows) for s in strategies), default=0)


def parse_strategy(name: str) -> Strategy:
    """The strategy of a name. Raises ValueError for a name of no known form."""
    kind = next((k for k in KINDS if name == k or name.startswith(f"{k}_")), None)
    parts = name[len(kind) + 1 :].split("_") if kind is not None and name != kind else []
    if kind is None or len(parts) != KINDS[kind] or not all(p.isdecimal() for p in parts):
        raise ValueError(f"unknown strategy {name!r}: write {FORMS}")
    numbers = [int(part) for part in parts]
    if not all(numbers):
        raise ValueError(f"strategy {name!r} has a 0: all its numbers are at least 1")
    if kind == "plain":
        return PLAIN
    if kind == "chain":
        return chain(numbers[0])
    if kind == "chains":
        width, depth = numbers
        return Strategy(kind=kind, depth=depth, width=width, budget=width * depth)
    depth, width = numbers[:2]
    budget = numbers[2] if kind in ("eagle2", "best_first") else width * depth
    return Strategy(kind=kind, depth=depth, width=width, budget=budget)


def chosen_strategies(
    kind: str, names: Sequence[str], num_speculative_tokens: int
) -> list[Strategy]:
    """Strategies of a policy (static, length, bandit) by name; without names chains
    of up to `num_speculative_tokens` tokens, or of just that many where the policy is static.

    Raises ValueError for an unknown name, or if a static policy has several to choose from.
    """
    strategies = [parse_strategy(name) for name in names]
    if kind == "static" and len(strategies) > 1:
        raise ValueError(
            f"rollout.policy=static takes one strategy and rollout.strategies has {list(names)}: "
            "choose rollout.policy=length or bandit, or one of them"
        )
    if strategies:
        return strategies
    shortest = num_speculative_tokens if kind == "static" else 1
    return [chain(depth) for depth in range(shortest, num_speculative_tokens + 1)]
