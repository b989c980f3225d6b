"""Which drafted tokens stand: the greedy walk and exact chain rejection sampling.

Both are exact: what is emitted is what the target alone would have emitted (token for token, or in
distribution). Letters: M proposed tokens (M1 = M + 1), K tokens of a chain (K1 = K + 1), V
vocabulary. Row 0 of the target is what follows the anchor; row i + 1 is what follows node i:

    row           0        1        2
    has read      anchor   node 0   node 1
    judges        node 0   node 1   -          (chain; the last row only gives a bonus token)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.sampling import sample, uniforms

ANCHOR = -1


def greedy_walk(
    target_tokens_M1: Tensor, draft_tokens_M: Tensor, parent_M: Tensor
) -> tuple[list[int], int]:
    """Walks from the anchor to the child that is the target's argmax, as long as there is one.

    Args:
        target_tokens_M1: [M + 1], row 0 the target's argmax after the anchor, row i + 1 after
            node i.
        draft_tokens_M: [M] proposed tokens.
        parent_M: [M] index of each node's parent, -1 for children of the anchor. A chain, several
            chains and a tree are all allowed, in any order.

    Returns:
        Accepted node indices, root first, and the bonus token: the target's argmax at the last
        accepted node.

    Raises:
        ValueError: sizes that do not fit, or a parent that is no node.
    """
    num_nodes = draft_tokens_M.shape[0]
    if target_tokens_M1.shape[0] != num_nodes + 1 or parent_M.shape[0] != num_nodes:
        raise ValueError(
            f"{num_nodes} draft tokens need {num_nodes + 1} target rows and {num_nodes} parents, "
            f"got {target_tokens_M1.shape[0]} and {parent_M.shape[0]}"
        )
    return walk(target_tokens_M1.tolist(), draft_tokens_M.tolist(), parent_M.tolist())


def walk(
    target_tokens: Sequence[int], draft_tokens: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], int]:
    """`greedy_walk` over Python numbers; more target rows than nodes + 1 may be given."""
    num_nodes = len(draft_tokens)
    child_at: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(parents, draft_tokens, strict=True)):
        if not ANCHOR <= parent < num_nodes:
            raise ValueError(f"node {node} has parent {parent}, outside -1..{num_nodes - 1}")
        child_at.setdefault((parent, token), node)
    accepted: list[int] = []
    # A walk is never longer than the tree, also when the parents form a cycle.
    node = ANCHOR
    while len(accepted) < num_nodes:
        child = child_at.get((node, target_tokens[node + 1]))
        if child is None:
            break
        accepted.append(child)
        node = child
    return accepted, target_tokens[node + 1]


def accept_probs(
    target_probs_KV: Tensor, draft_tokens_K: Tensor, draft_probs_KV: Tensor | None
) -> Tensor:
    """Probability that each drafted token is kept, min(1, target / draft), given all before it.

    Args:
        target_probs_KV: [K, V] the target's distribution at each drafted position.
        draft_tokens_K: [K] drafted tokens.
        draft_probs_KV: [K, V] the distribution each token was really drawn from; None when the
            token was chosen deterministically (a point mass).

    Returns:
        [K] float64.

    Raises:
        ValueError: a token that its own draft distribution could not have produced.
    """
    index_K1 = draft_tokens_K.unsqueeze(-1)
    target_K = target_probs_KV.gather(-1, index_K1).squeeze(-1).double()
    if draft_probs_KV is None:
        return target_K.clamp(max=1.0)
    draft_K = draft_probs_KV.gather(-1, index_K1).squeeze(-1).double()
    if bool((draft_K <= 0.0).any()):
        position = int((draft_K <= 0.0).nonzero()[0])
        raise ValueError(
            f"draft token {int(draft_tokens_K[position])} at position {position} has draft "
            "probability 0: pass the distribution it was sampled from"
        )
    return (target_K / draft_K).clamp(max=1.0)


def residual_probs(target_probs_V: Tensor, token: int, draft_probs_V: Tensor | None) -> Tensor:
    """Weights to draw from after `token` was rejected: relu(target - draft), not normalised.

    Args:
        target_probs_V: [V].
        token: the rejected token.
        draft_probs_V: [V], or None for a point mass on `token`.

    Returns:
        [V] float64 weights with a positive sum.
    """
    if draft_probs_V is None:
        weights_V = target_probs_V.double().index_fill(
            0, torch.tensor([token], device=target_probs_V.device), 0.0
        )
    else:
        weights_V = (target_probs_V.double() - draft_probs_V.double()).clamp(min=0.0)
    # Equal distributions are never rejected but for rounding; then the target's own row is right.
    return weights_V if bool(weights_V.sum() > 0.0) else target_probs_V.double()


def chain_rejection(
    target_probs_K1V: Tensor,
    draft_tokens_K: Tensor,
    draft_probs_KV: Tensor | None,
    generator: torch.Generator,
) -> tuple[int, int]:
    """Accepts a prefix of a chain and draws the bonus token so that the target's law is kept.

    Speculative sampling of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318).

    Args:
        target_probs_K1V: [K + 1, V] after temperature, top-k and top-p.
        draft_tokens_K: [K], K may be 0.
        draft_probs_KV: [K, V] the distribution each token was drawn from (after temperature, top-k
            and top-p), or None for tokens chosen deterministically.
        generator: advances by K + 1 draws whatever is accepted.

    Returns:
        Number of accepted tokens and the bonus token that follows them.

    Raises:
        ValueError: sizes that do not fit, or a token its own draft distribution cannot produce.
    """
    num_drafted = draft_tokens_K.shape[0]
    if target_probs_K1V.shape[0] != num_drafted + 1:
        raise ValueError(
            f"{num_drafted} draft tokens need {num_drafted + 1} target rows, "
            f"got {target_probs_K1V.shape[0]}"
        )
    if draft_probs_KV is not None and draft_probs_KV.shape != target_probs_K1V[:-1].shape:
        raise ValueError(
            f"draft_probs is {tuple(draft_probs_KV.shape)}, the drafted positions of target_probs "
            f"are {tuple(target_probs_K1V[:-1].shape)}: give both over the target's vocabulary"
        )
    accept_K = accept_probs(target_probs_K1V[:-1], draft_tokens_K, draft_probs_KV)
    kept_K = uniforms((num_drafted,), generator, accept_K.device) < accept_K
    num_accepted = int(kept_K.long().cumprod(dim=0).sum())
    bonus_probs_V = target_probs_K1V[num_accepted]
    if num_accepted < num_drafted:
        bonus_probs_V = residual_probs(
            bonus_probs_V,
            int(draft_tokens_K[num_accepted]),
            None if draft_probs_KV is None else draft_probs_KV[num_accepted],
        )
    return num_accepted, int(sample(bonus_probs_V.unsqueeze(0), generator))
