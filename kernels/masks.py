"""Attention masks as booleans, True where a query may look.

Letters: M tree nodes (any leading axes), S sequences, N blocks, L context rows, B slots of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ancestor_mask(parent: Tensor) -> Tensor:
    """Which nodes of a proposal each node sees: itself and its ancestors.

    Args:
        parent: [..., M] index of each node's parent, -1 for a root; a parent comes before its
            children.

    Returns:
        bool [..., M, M], row i is what node i sees. For a chain it is lower triangular.

    Raises:
        ValueError: a parent that does not come before its child.
    """
    num_nodes = parent.shape[-1]
    index_M = torch.arange(num_nodes, device=parent.device)
    wrong = (parent >= index_M) | (parent < -1)
    if bool(wrong.any()):
        node, value = int(wrong.nonzero()[0, -1]), int(parent[wrong][0])
        raise ValueError(f"node {node} has parent {value}: parents come before their children")
    # Node M stands above all roots and sees nothing. After i turns a node sees its 2 ** i nearest
    # ancestors and `jump` is the one after them.
    shape = (*parent.shape[:-1], num_nodes + 1, num_nodes)
    visible = (torch.arange(num_nodes + 1, device=parent.device)[:, None] == index_M).repeat(
        *parent.shape[:-1], 1, 1
    )
    top = parent.new_full((*parent.shape[:-1], 1), num_nodes)
    jump = torch.cat((parent.masked_fill(parent < 0, num_nodes), top), dim=-1)
    for _ in range(num_nodes.bit_length()):
        visible = visible | visible.gather(-2, jump[..., None].expand(shape))
        jump = jump.gather(-1, jump)
    return visible[..., :-1, :]


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
