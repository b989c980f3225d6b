"""Attention masks as booleans, True where a query may look.

Letters: M tree nodes, S sequences, N blocks, L context rows, B slots of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ancestor_mask(parent_M: Tensor) -> Tensor:
    """Which nodes of a proposal each node sees: itself and its ancestors.

    Args:
        parent_M: [M] index of each node's parent, -1 for children of the anchor; a parent comes
            before its children.

    Returns:
        bool [M, M], row i is what node i sees. For a chain it is lower triangular.

    Raises:
        ValueError: a parent that does not come before its child.
    """
    parents = parent_M.tolist()
    visible_MM = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}: parents come before their children")
        if parent >= 0:
            visible_MM[node] |= visible_MM[parent]
    return visible_MM.to(parent_M.device)


def visible_context_mask(anchor_SN: Tensor, lengths_S: Tensor, num_rows: int) -> Tensor:
    """Context rows that a block may see: those before its anchor, inside its own sequence.

    The anchor's own hidden row does not exist yet when the block is drafted: it is excluded.

        context row   0  1  2  3  4
        anchor 3      x  x  x  .  .

    Args:
        anchor_SN: [S, N] row of each block's anchor in its sequence.
        lengths_S: [S] rows of each sequence that are not padding.
        num_rows: L, rows of the padded context.

    Returns:
        bool [S, N, L].
    """
    row_L = torch.arange(num_rows, device=anchor_SN.device)
    limit_SN = torch.minimum(anchor_SN, lengths_S[:, None])
    return row_L < limit_SN[..., None]


def block_mask(num_slots: int, kind: str, device: torch.device | None = None) -> Tensor:
    """What the slots of one block see of each other.

    Args:
        num_slots: B.
        kind: `bidirectional`, every slot sees every slot; `block_causal`, slot k sees slots up to
            k (arXiv 2606.18394), so that a wider block leaves its earlier slots unchanged.
        device: where the mask goes.

    Returns:
        bool [B, B], row k is what slot k sees.

    Raises:
        ValueError: an unknown kind.
    """
    full_BB = torch.ones(num_slots, num_slots, dtype=torch.bool, device=device)
    if kind == "bidirectional":
        return full_BB
    if kind == "block_causal":
        return full_BB.tril()
    raise ValueError(f"unknown block mask {kind!r}: use bidirectional or block_causal")
