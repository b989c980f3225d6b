"""Which drafted nodes of a tree stand at a temperature: two rules that keep the target's law.

`tree_walk` needs to know nothing about how the tokens were found. `multi_candidate` is for tokens
that were drawn, knows from what, and so accepts more of them: a single one with probability
sum min(target, draft), the walk with sum target * draft. Letters: M nodes (M1 = M + 1), V
vocabulary. Row 0 of the target is what follows the anchor; row i + 1 is what follows node i, and
judges the children of node i:

    node            0        1        2        3             anchor -+- 0 -+- 2
    parent         -1       -1        0        0                     |     +- 3
    judged by row   0        0        1        1                     +- 1

    row             0        1        2        3        4
    has read        anchor   node 0   node 1   node 2   node 3
    judges          0, 1     2, 3     -        -        -    (only a bonus token)
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.sampling import sample, uniforms
from paceline.kernels.verification import ANCHOR, accept_probs, residual_probs


def tree_walk(
    target_probs_M1V: Tensor, draft_tokens_M: Tensor, parent_M: Tensor, generator: torch.Generator
) -> tuple[list[int], int]:
    """Draws the target's own tokens and descends as long as the drawn token is a child.

    The emitted tokens are, token for token, those of plain sampling with the same generator, so the
    walk is exact for every proposal that does not depend on the draws made here (a beam search,
    best-first or retrieval tree, or sampled tokens). It is the naive sampling that SpecInfer (Miao
    et al., arXiv 2305.09781) compares its rule with.

    Args:
        target_probs_M1V: [M + 1, V] after temperature, top-k and top-p; row 0 follows the anchor,
            row i + 1 follows node i.
        draft_tokens_M: [M] proposed tokens, M may be 0.
        parent_M: [M] index of each node's parent, -1 for children of the anchor. A chain, several
            chains and a tree are all allowed, in any order. Of siblings with the same token only
            the first can be accepted.
        generator: advances by one draw per emitted token: accepted tokens + 1.

    Returns:
        Accepted node indices, root first, and the bonus token: the one drawn at the last accepted
        node, which none of its children holds.

    Raises:
        ValueError: sizes that do not fit, or a parent that is no node.
    """
    children = _children(target_probs_M1V, draft_tokens_M, parent_M)
    tokens = draft_tokens_M.tolist()
    accepted: list[int] = []
    node = ANCHOR
    while True:
        token = int(sample(target_probs_M1V[node + 1].unsqueeze(0), generator))
        child = next((child for child in children.get(node, ()) if tokens[child] == token), None)
        if child is None:
            return accepted, token
        accepted.append(child)
        node = child


def multi_candidate(
    target_probs_M1V: Tensor,
    draft_tokens_M: Tensor,
    parent_M: Tensor,
    draft_probs_MV: Tensor | None,
    generator: torch.Generator,
) -> tuple[list[int], int]:
    """Tries the children of a node one by one, each against what the earlier ones left over.

    A child is accepted with probability min(1, target / draft); after a rejection the target is
    norm(relu(target - draft)). This is the multi-step speculative sampling of SpecInfer (Miao et
    al., arXiv 2305.09781), with children drawn without replacement as in EAGLE (Li et al., arXiv
    2401.15077) and recursive rejection sampling (Jeon et al., arXiv 2402.14160). On a chain it is
    `chain_rejection`.

    Exact if each node was drawn from its row of `draft_probs_MV`, and if it was settled before the
    draw that the node is tried, and when: a node dropped for its token or for what follows it, or
    siblings sorted after they were drawn, make the law wrong.

    Args:
        target_probs_M1V: [M + 1, V] after temperature, top-k and top-p; row 0 follows the anchor,
            row i + 1 follows node i.
        draft_tokens_M: [M] proposed tokens, M may be 0.
        parent_M: [M] index of each node's parent, -1 for children of the anchor. Siblings are
            tried in the order of their indices, which is the order they were drawn in.
        draft_probs_MV: [M, V] the distribution each node was really drawn from: without its earlier
            siblings, renormalised, as `draw_without_replacement` returns it (or with them, if it
            could have been the same token again). None for point masses, which is right for tokens
            chosen deterministically; drawn ones are then only accepted as often as in `tree_walk`.
        generator: advances by M + 1 draws whatever is accepted.

    Returns:
        Accepted node indices, root first, and the bonus token that follows them.

    Raises:
        ValueError: sizes that do not fit, a parent that is no node, or a token its own draft
            distribution cannot produce.
    """
    children = _children(target_probs_M1V, draft_tokens_M, parent_M)
    _check_drafts(target_probs_M1V, draft_tokens_M, draft_probs_MV)
    draws = uniforms(tuple(draft_tokens_M.shape), generator, draft_tokens_M.device).tolist()
    accepted: list[int] = []
    node, target_V = ANCHOR, target_probs_M1V[0]
    while True:
        for child in children.get(node, ()):
            token_1 = draft_tokens_M[child : child + 1]
            draft_1V = None if draft_probs_MV is None else draft_probs_MV[child : child + 1]
            if draws[child] < float(accept_probs(target_V.unsqueeze(0), token_1, draft_1V)):
                break
            draft_V = None if draft_1V is None else draft_1V[0]
            left_V = residual_probs(target_V, int(token_1), draft_V)
            target_V = left_V / left_V.sum()
        else:
            return accepted, int(sample(target_V.unsqueeze(0), generator))
        accepted.append(child)
        node, target_V = child, target_probs_M1V[child + 1]


def _children(
    target_probs_M1V: Tensor, draft_tokens_M: Tensor, parent_M: Tensor
) -> dict[int, list[int]]:
    """The children of each node that has some, in the order of their indices.

    Raises:
        ValueError: sizes that do not fit, or a parent that is no node.
    """
    num_nodes = draft_tokens_M.shape[0]
    if target_probs_M1V.shape[0] != num_nodes + 1 or parent_M.shape[0] != num_nodes:
        raise ValueError(
            f"{num_nodes} draft tokens need {num_nodes + 1} target rows and {num_nodes} parents, "
            f"got {target_probs_M1V.shape[0]} and {parent_M.shape[0]}"
        )
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parent_M.tolist()):
        if not ANCHOR <= parent < num_nodes:
            raise ValueError(f"node {node} has parent {parent}, outside -1..{num_nodes - 1}")
        children.setdefault(parent, []).append(node)
    return children


def _check_drafts(
    target_probs_M1V: Tensor, draft_tokens_M: Tensor, draft_probs_MV: Tensor | None
) -> None:
    """Raises ValueError unless every token is one that its own draft distribution can produce."""
    vocab = target_probs_M1V.shape[-1]
    for node, token in enumerate(draft_tokens_M.tolist()):
        if not 0 <= token < vocab:
            raise ValueError(
                f"node {node} holds token {token}, outside the target's vocabulary "
                f"0..{vocab - 1}: map draft tokens to target tokens first"
            )
    if draft_probs_MV is None:
        return
    if draft_probs_MV.shape != target_probs_M1V[1:].shape:
        raise ValueError(
            f"draft_probs is {tuple(draft_probs_MV.shape)}, {len(draft_tokens_M)} nodes need "
            f"{tuple(target_probs_M1V[1:].shape)}: give one row per node over the target's "
            "vocabulary"
        )
    draft_M = draft_probs_MV.gather(-1, draft_tokens_M.unsqueeze(-1)).squeeze(-1)
    for node, prob in enumerate(draft_M.tolist()):
        if not prob > 0.0:
            raise ValueError(
                f"node {node} holds token {int(draft_tokens_M[node])}, whose draft probability is "
                f"{prob}: pass the distribution it was drawn from, without its earlier siblings"
            )
