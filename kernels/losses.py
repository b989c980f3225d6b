"""Token losses row by row, the eager twins of linear_losses: plain, float32, differentiable.

Letters: R rows, V vocabulary. Each returns one value per row, in nats (TV: a probability).
"""

from __future__ import annotations

from torch import Tensor


def cross_entropy_rows(logits_RV: Tensor, labels_R: Tensor) -> Tensor:
    """-log draft_probs[label].

    Args:
        logits_RV: [R, V] the drafter's logits, any float dtype.
        labels_R: [R] int64.

    Returns:
        [R] float32.
    """
    log_probs_RV = logits_RV.float().log_softmax(dim=-1)
    return -log_probs_RV.gather(-1, labels_R.unsqueeze(-1)).squeeze(-1)


def forward_kl_rows(logits_RV: Tensor, teacher_logits_RV: Tensor) -> Tensor:
    """sum_v target_probs (log target_probs - log draft_probs), at temperature 1.

    Args:
        logits_RV: [R, V] the drafter's logits.
        teacher_logits_RV: [R, V] the target's logits; no gradient flows into them.

    Returns:
        [R] float32, not negative but for rounding.
    """
    target_log_RV = teacher_logits_RV.detach().float().log_softmax(dim=-1)
    draft_log_RV = logits_RV.float().log_softmax(dim=-1)
    return (target_log_RV.exp() * (target_log_RV - draft_log_RV)).sum(dim=-1)


def tv_rows(logits_RV: Tensor, teacher_logits_RV: Tensor) -> Tensor:
    """Total variation, 1/2 sum_v |target_probs - draft_probs| = 1 - sum_v min(target, draft).

    Chain rejection keeps a sampled draft token with probability alpha = sum_v min(target, draft) =
    1 - TV, so this loss is the expected rejection rate itself. The difference is taken in float32:
    in bfloat16 it cancels near convergence.

    Args:
        logits_RV: [R, V] the drafter's logits.
        teacher_logits_RV: [R, V] the target's logits; no gradient flows into them.

    Returns:
        [R] float32 in [0, 1].
    """
    target_probs_RV = teacher_logits_RV.detach().float().softmax(dim=-1)
    draft_probs_RV = logits_RV.float().softmax(dim=-1)
    return 0.5 * (target_probs_RV - draft_probs_RV).abs().sum(dim=-1)
