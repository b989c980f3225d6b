"""Trees of drafted tokens: built level by level from an Expansion, cut to their best nodes.

One growth covers three ways to draft. Each level opens `width` nodes; what is kept differs:

    eagle2   every child of an opened node is a candidate, the best of all levels are verified
             (arXiv 2406.16858)
    beam     only the opened nodes are kept, and of those the prefixes of the last level's
             (ReDrafter, arXiv 2403.09919)
    chains   the children of the anchor each go on alone

`best_first` takes the best products of a block's marginals with a heap (arXiv 2606.18394).

A node's score is the log-probability of its path, so a parent is never worse than its child, and
a table in order of levels, cut by score with earlier rows first among equals, keeps every parent.

Shapes: B slots, W opened nodes of a level, C children of each, N rows of a table, V draft
vocabulary, M nodes of a proposal.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.decoding.strategy import Strategy
from paceline.models.expansion import Expansion, MarginalExpansion
from paceline.models.records import DraftProposal

ToTarget = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class NodeTable:
    """Candidates of all slots, level after level; parent is a row of the table, -1 the anchor."""

    tokens_BN: Tensor
    parent_BN: Tensor
    score_BN: Tensor
    depth_N: Tensor


def grow_eagle2(expansion: Expansion, strategy: Strategy, target_ids: ToTarget) -> NodeTable:
    """All children of the `width` best nodes of each level; cut it with `best_nodes`."""
    return _grow(expansion, strategy.depth, strategy.width, target_ids, keep_children=True)


def grow_beams(expansion: Expansion, strategy: Strategy, target_ids: ToTarget) -> NodeTable:
    """The `width` best nodes of each level; cut it with `surviving_nodes`."""
    return _grow(expansion, strategy.depth, strategy.width, target_ids, keep_children=False)


def _grow(
    expansion: Expansion, depth: int, width: int, target_ids: ToTarget, *, keep_children: bool
) -> NodeTable:
    top = _top(expansion.first(), width)
    tokens_BW, score_BW = target_ids(top.indices), top.values
    opened_BW = torch.arange(tokens_BW.shape[1], device=tokens_BW.device).expand_as(tokens_BW)
    parent_BW = torch.full_like(tokens_BW, -1)
    levels: list[tuple[Tensor, ...]] = [(tokens_BW, parent_BW, score_BW)]
    rows = tokens_BW.shape[1]
    came_from_BW = torch.zeros_like(tokens_BW)
    for _ in range(1, depth):
        top = _top(expansion.next(tokens_BW, came_from_BW), width)
        children = top.indices.shape[2]
        scores_BK = (score_BW[..., None] + top.values).flatten(1)
        tokens_BK = target_ids(top.indices).flatten(1)
        parents_BK = opened_BW.repeat_interleave(children, dim=1)
        best_BW = scores_BK.sort(dim=1, descending=True, stable=True).indices[:, :width]
        kept = (tokens_BK, parents_BK, scores_BK)
        chosen = tuple(tensor.gather(1, best_BW) for tensor in kept)
        tokens_BW, parent_BW, score_BW = chosen
        levels.append(kept if keep_children else chosen)
        opened_BW = (
            best_BW + rows
            if keep_children
            else torch.arange(rows, rows + best_BW.shape[1], device=best_BW.device).expand_as(
                best_BW
            )
        )
        rows += levels[-1][0].shape[1]
        came_from_BW = best_BW // children
    return _table(levels)


def grow_chains(expansion: Expansion, strategy: Strategy, target_ids: ToTarget) -> NodeTable:
    """The `width` best first tokens, each followed by the likeliest token after it, and so on."""
    top = _top(expansion.first(), strategy.width)
    tokens_BW, score_BW = target_ids(top.indices), top.values
    width = tokens_BW.shape[1]
    itself_BW = torch.arange(width, device=tokens_BW.device).expand_as(tokens_BW)
    levels = [(tokens_BW, torch.full_like(tokens_BW, -1), score_BW)]
    came_from_BW = torch.zeros_like(tokens_BW)
    for level in range(1, strategy.depth):
        top = _top(expansion.next(tokens_BW, came_from_BW), 1)
        tokens_BW, score_BW = target_ids(top.indices[..., 0]), score_BW + top.values[..., 0]
        levels.append((tokens_BW, itself_BW + (level - 1) * width, score_BW))
        came_from_BW = itself_BW
    return _table(levels)


def best_first(
    expansion: MarginalExpansion, strategy: Strategy, target_ids: ToTarget
) -> list[DraftProposal]:
    """The `budget` likeliest paths of a product of marginals, `width` tokens of each slot.

    A path's successors are its next best sibling and its own best child, so the heap yields nodes
    in order of score and every parent before its children.
    """
    top = _top(expansion.logits_BKV[:, : strategy.depth], strategy.width)
    tokens = target_ids(top.indices).tolist()
    scores = top.values.tolist()
    return [
        _best_first_of_slot(tokens_KW, scores_KW, strategy.budget, top.indices.device)
        for tokens_KW, scores_KW in zip(tokens, scores, strict=True)
    ]


def _best_first_of_slot(
    tokens_KW: list[list[int]], scores_KW: list[list[float]], budget: int, device: torch.device
) -> DraftProposal:
    # (minus the score, order of birth, parent's score, parent node, level, rank)
    heap = [(-scores_KW[0][0], 0, 0.0, -1, 0, 0)]
    born = 1
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    while heap and len(tokens) < budget:
        negative, _, above, parent, level, rank = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(tokens_KW[level][rank])
        parents.append(parent)
        depths.append(level)
        if rank + 1 < len(tokens_KW[level]):
            score = above + scores_KW[level][rank + 1]
            heapq.heappush(heap, (-score, born, above, parent, level, rank + 1))
        if level + 1 < len(tokens_KW):
            score = scores_KW[level + 1][0] - negative
            heapq.heappush(heap, (-score, born + 1, -negative, node, level + 1, 0))
        born += 2
    return DraftProposal(
        tokens=torch.tensor(tokens, device=device),
        parent=torch.tensor(parents, device=device),
        depth=torch.tensor(depths, device=device),
    )


def best_nodes(table: NodeTable, budget: int) -> list[DraftProposal]:
    """The `budget` nodes of each slot with the best scores; their parents are among them."""
    order_BN = table.score_BN.sort(dim=1, descending=True, stable=True).indices
    kept_BM = order_BN[:, :budget].sort(dim=1).values
    return [proposal_of(table, slot, kept_M) for slot, kept_M in enumerate(kept_BM)]


def surviving_nodes(table: NodeTable) -> list[DraftProposal]:
    """The nodes of each slot that lead to a node of the last level."""
    alive_BN = (table.depth_N == table.depth_N[-1]).expand_as(table.parent_BN).clone()
    for level in range(int(table.depth_N[-1]), 0, -1):
        rows = table.depth_N == level
        parents_BW = table.parent_BN[:, rows]
        # A dead row must not bury a parent that another row keeps alive: only the alive point.
        pointed_BW = parents_BW.masked_fill(~alive_BN[:, rows], table.parent_BN.shape[1])
        marks_BN = torch.zeros(
            len(alive_BN), alive_BN.shape[1] + 1, dtype=torch.bool, device=alive_BN.device
        )
        alive_BN |= marks_BN.scatter_(1, pointed_BW, True)[:, :-1]
    return [
        proposal_of(table, slot, alive_N.nonzero()[:, 0]) for slot, alive_N in enumerate(alive_BN)
    ]


def all_nodes(table: NodeTable) -> list[DraftProposal]:
    """Every node of each slot."""
    everything_N = torch.arange(len(table.depth_N), device=table.depth_N.device)
    return [proposal_of(table, slot, everything_N) for slot in range(len(table.tokens_BN))]


def proposal_of(table: NodeTable, slot: int, kept_M: Tensor) -> DraftProposal:
    """The rows `kept` (increasing) of one slot, parents renumbered among themselves."""
    number_N = torch.full((len(table.depth_N) + 1,), -1, device=kept_M.device)
    number_N[kept_M] = torch.arange(len(kept_M), device=kept_M.device)
    # Index -1, the anchor, reads the place after the last row, which stays -1.
    return DraftProposal(
        tokens=table.tokens_BN[slot, kept_M],
        parent=number_N[table.parent_BN[slot, kept_M]],
        depth=table.depth_N[kept_M],
    )


def _table(levels: Sequence[tuple[Tensor, ...]]) -> NodeTable:
    tokens_BN, parent_BN, score_BN = (
        torch.cat(columns, dim=1) for columns in zip(*levels, strict=True)
    )
    sizes = torch.tensor([level[0].shape[1] for level in levels], device=tokens_BN.device)
    depth_N = torch.arange(len(levels), device=tokens_BN.device).repeat_interleave(sizes)
    return NodeTable(tokens_BN, parent_BN, score_BN, depth_N)


def _top(logits: Tensor, count: int) -> torch.return_types.topk:
    """The best `count` of the last axis with their log-probabilities, best first."""
    log_probs = logits.log_softmax(dim=-1)
    # Rounding may lift a certain token above 0, and a child above its parent.
    return log_probs.clamp(max=0.0).topk(min(count, logits.shape[-1]), dim=-1)
