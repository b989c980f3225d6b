"""lm_head and token loss in one, chunk by chunk: [R, V] logits never exist.

Gradients have a closed form, so the forward pass computes them beside the loss, one chunk of rows
at a time, and keeps only what has the size of the inputs (as Liger-Kernel's fused linear losses).
The eager twin is losses.py; on CUDA the row work is one Triton kernel, fused/linear_losses.py.

Letters: R rows, P rows of nonzero weight, C rows of one chunk, D width of the drafter, Dt of the
target, V vocabulary (of the draft, on both sides).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.matmul import matmul_float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLossOutput:
    """What linear_loss returns. Rows of weight 0 read False and 0."""

    loss_sum: Tensor  # scalar float32, sum over rows of weight * loss; differentiable
    correct_R: Tensor  # [R] bool, the drafter's argmax is the label
    accept_R: Tensor  # [R] float32, sum_v min(target_probs, draft_probs); 0 without a teacher


class LossMix(NamedTuple):
    """Weights of the three token losses."""

    ce: float
    kl: float
    tv: float


class RowLosses(NamedTuple):
    """Loss of each row of a chunk, and its gradient."""

    loss_C: Tensor  # [C] float32
    correct_C: Tensor  # [C] bool
    accept_C: Tensor | None  # [C] float32
    grad_CV: Tensor | None  # [C, V] float32, of loss_C with respect to the logits


def linear_loss(
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    labels_R: Tensor | None,
    teacher_hidden_RDt: Tensor | None,
    teacher_head_VDt: Tensor | None,
    weights_R: Tensor,
    ce: float,
    kl: float,
    tv: float,
    chunk_rows: int,
) -> LinearLossOutput:
    """Weighted sum over rows of ce * cross entropy + kl * forward KL + tv * total variation.

    Softmax and losses are float32 whatever the inputs are. Nothing is normalised here.

    Args:
        hidden_RD: [R, D] the drafter's final hidden states.
        lm_head_VD: [V, D].
        labels_R: [R] int64 in the draft vocabulary; None takes the teacher's argmax.
        teacher_hidden_RDt: [R, Dt] the target's states that predict the same tokens, after its
            final norm; gets no gradient. None when no term needs it.
        teacher_head_VDt: [V, Dt] the target's lm_head rows of the draft vocabulary; no gradient.
        weights_R: [R] float, not negative; rows of weight 0 are skipped, so their labels may be
            anything.
        ce: weight of the cross entropy with the label.
        kl: weight of the forward KL from the teacher.
        tv: weight of the total variation to the teacher.
        chunk_rows: rows of logits that exist at once.

    Returns:
        LinearLossOutput.

    Raises:
        ValueError: a loss that needs a teacher without one, a label outside the vocabulary, or
            chunk_rows below 1.
    """
    has_teacher = teacher_hidden_RDt is not None and teacher_head_VDt is not None
    if not has_teacher and (kl or tv or labels_R is None):
        raise ValueError(
            f"kl={kl}, tv={tv}, labels {'absent' if labels_R is None else 'given'}: kl, tv and "
            "teacher labels need teacher_hidden and teacher_head"
        )
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows} is below 1")
    loss_sum, correct_R, accept_R = _LinearLoss.apply(
        hidden_RD,
        lm_head_VD,
        labels_R,
        teacher_hidden_RDt if has_teacher else None,
        teacher_head_VDt if has_teacher else None,
        weights_R,
        LossMix(ce, kl, tv),
        chunk_rows,
        torch.is_grad_enabled(),
    )
    return LinearLossOutput(loss_sum=loss_sum, correct_R=correct_R, accept_R=accept_R)


class _LinearLoss(torch.autograd.Function):
    """Gradients are made in the forward and only scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        lm_head_VD: Tensor,
        labels_R: Tensor | None,
        teacher_hidden_RDt: Tensor | None,
        teacher_head_VDt: Tensor | None,
        weights_R: Tensor,
        mix: LossMix,
        chunk_rows: int,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_hidden = grad_enabled and ctx.needs_input_grad[0]
        grad_head = grad_enabled and ctx.needs_input_grad[1]
        kept_P = weights_R.nonzero().squeeze(-1)
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
        correct_R = torch.zeros(len(weights_R), dtype=torch.bool, device=hidden_RD.device)
        accept_R = torch.zeros(len(weights_R), dtype=torch.float32, device=hidden_RD.device)
        grad_hidden_RD = torch.zeros_like(hidden_RD) if grad_hidden else None
        # float32: a sum of many chunks loses small terms in bfloat16.
        grad_head_VD = torch.zeros_like(lm_head_VD, dtype=torch.float32) if grad_head else None
        if labels_R is not None:
            _check_labels(labels_R, kept_P, lm_head_VD.shape[0])
        row_losses = _row_losses_for(hidden_RD.device)
        for rows_C in kept_P.split(chunk_rows):
            hidden_CD = hidden_RD[rows_C]
            teacher_CV = None
            if teacher_hidden_RDt is not None and teacher_head_VDt is not None:
                teacher_CV = matmul_float32(teacher_hidden_RDt[rows_C], teacher_head_VDt.T)
            rows = row_losses(
                matmul_float32(hidden_CD, lm_head_VD.T),
                None if labels_R is None else labels_R[rows_C],
                teacher_CV,
                mix,
                with_grad=grad_hidden or grad_head,
            )
            weights_C = weights_R[rows_C].float()
            loss_sum += weights_C @ rows.loss_C
            correct_R[rows_C] = rows.correct_C
            if rows.accept_C is not None:
                accept_R[rows_C] = rows.accept_C
            if rows.grad_CV is None:
                continue
            grad_CV = rows.grad_CV.mul_(weights_C[:, None]).to(lm_head_VD.dtype)
            if grad_hidden_RD is not None:
                grad_hidden_RD[rows_C] = (grad_CV @ lm_head_VD).to(hidden_RD.dtype)
            if grad_head_VD is not None:
                _add_outer(grad_head_VD, grad_CV, hidden_CD)
        if grad_head_VD is not None:
            grad_head_VD = grad_head_VD.to(lm_head_VD.dtype)
        ctx.save_for_backward(grad_hidden_RD, grad_head_VD)
        ctx.mark_non_differentiable(correct_R, accept_R)
        return loss_sum, correct_R, accept_R

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_RD, grad_head_VD = ctx.saved_tensors
        return (
            None if grad_hidden_RD is None else grad_hidden_RD * grad_loss.to(grad_hidden_RD.dtype),
            None if grad_head_VD is None else grad_head_VD * grad_loss.to(grad_head_VD.dtype),
            *(None,) * 7,
        )


def _row_losses_for(device: torch.device) -> Callable[..., RowLosses]:
    """chunk_losses, or its Triton twin on CUDA."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return chunk_losses
    from paceline.kernels.fused import linear_losses as fused

    return fused.chunk_losses


def _check_labels(labels_R: Tensor, kept_P: Tensor, vocab_size: int) -> None:
    labels_P = labels_R[kept_P]
    bad_P = (labels_P < 0) | (labels_P >= vocab_size)
    if bool(bad_P.any()):
        first = int(bad_P.nonzero()[0])
        raise ValueError(
            f"label {int(labels_P[first])} of row {int(kept_P[first])} is outside the draft "
            f"vocabulary of {vocab_size}: give weight 0 to rows whose token is not in it"
        )


def _add_outer(grad_head_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """grad_head += grad.T @ hidden."""
    if grad_CV.dtype == hidden_CD.dtype == torch.float32:
        grad_head_VD.addmm_(grad_CV.T, hidden_CD)
    else:
        grad_head_VD += grad_CV.T @ hidden_CD.to(grad_CV.dtype)


def chunk_losses(
    logits_CV: Tensor,
    labels_C: Tensor | None,
    teacher_CV: Tensor | None,
    mix: LossMix,
    *,
    with_grad: bool,
) -> RowLosses:
    """Loss of each row and its closed-form gradient. Uses up both logits tensors.

    With q the drafter's softmax and p the teacher's, the gradients in the logits are
    CE: q - onehot(label); KL: q - p; TV: q (s - sum q s) with s = sign(q - p) / 2.

    Args:
        logits_CV: [C, V] float32; overwritten.
        labels_C: [C] int64, or None for the teacher's argmax.
        teacher_CV: [C, V] float32, or None; overwritten.
        mix: weights of the losses.
        with_grad: whether grad_CV is wanted.

    Returns:
        RowLosses.
    """
    if labels_C is None:
        assert teacher_CV is not None, "no labels and no teacher"
        labels_C = teacher_CV.argmax(dim=-1)
    label_C1 = labels_C.unsqueeze(-1)
    correct_C = logits_CV.argmax(dim=-1) == labels_C
    draft_log_norm_C = logits_CV.logsumexp(dim=-1)
    loss_C = mix.ce * (draft_log_norm_C - logits_CV.gather(-1, label_C1).squeeze(-1))
    draft_CV = logits_CV.softmax(dim=-1)
    accept_C = None
    grad_CV = None
    if teacher_CV is not None:
        target_CV = teacher_CV.softmax(dim=-1)
        if mix.kl:
            gap_C = draft_log_norm_C - teacher_CV.logsumexp(dim=-1)
            cross_C = (teacher_CV.sub_(logits_CV)).mul_(target_CV).sum(dim=-1)
            loss_C = loss_C + mix.kl * (cross_C + gap_C)
        difference_CV = torch.sub(draft_CV, target_CV, out=logits_CV)
        tv_C = 0.5 * torch.linalg.vector_norm(difference_CV, ord=1, dim=-1)
        accept_C = 1.0 - tv_C
        loss_C = loss_C + mix.tv * tv_C
        if with_grad and mix.tv:
            sign_CV = torch.sign(difference_CV, out=teacher_CV)
            mean_C1 = torch.linalg.vecdot(draft_CV, sign_CV).unsqueeze(-1)
            grad_CV = sign_CV.sub_(mean_C1).mul_(draft_CV).mul_(0.5 * mix.tv)
        if with_grad and mix.kl:
            kl_CV = difference_CV.mul_(mix.kl)
            grad_CV = kl_CV if grad_CV is None else grad_CV.add_(kl_CV)
    if with_grad and (mix.ce or grad_CV is None):
        ce_CV = draft_CV.mul_(mix.ce)
        ce_CV.scatter_add_(-1, label_C1, torch.full_like(label_C1, -mix.ce, dtype=ce_CV.dtype))
        grad_CV = ce_CV if grad_CV is None else grad_CV.add_(ce_CV)
    return RowLosses(loss_C, correct_C, accept_C, grad_CV)
