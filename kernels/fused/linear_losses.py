"""Triton twin of linear_losses.chunk_losses: row losses and their gradient in one kernel.

One program per row reads the logits three times (normalisers and argmax; sums; gradient) and
writes the gradient over the logits, where the eager form makes about ten passes over memory.
Imported only where it runs: on CUDA, or under TRITON_INTERPRET=1 on CPU.

Letters: C rows of one chunk, V vocabulary.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.linear_losses import LossMix, RowLosses

MAX_TILE = 8192
NUM_WARPS = 8


def chunk_losses(
    logits_CV: Tensor,
    labels_C: Tensor | None,
    teacher_CV: Tensor | None,
    mix: LossMix,
    *,
    with_grad: bool,
) -> RowLosses:
    """Loss of each row and its closed-form gradient; same as linear_losses.chunk_losses.

    Args:
        logits_CV: [C, V] float32, contiguous; overwritten by the gradient.
        labels_C: [C] int64, or None for the teacher's argmax.
        teacher_CV: [C, V] float32, contiguous, or None; read only.
        mix: weights of the losses.
        with_grad: whether grad_CV is wanted.

    Returns:
        RowLosses.
    """
    assert logits_CV.is_contiguous() and logits_CV.dtype == torch.float32
    assert teacher_CV is None or (teacher_CV.is_contiguous() and teacher_CV.dtype == torch.float32)
    assert labels_C is not None or teacher_CV is not None, "no labels and no teacher"
    num_rows, vocab_size = logits_CV.shape
    loss_C = torch.empty(num_rows, dtype=torch.float32, device=logits_CV.device)
    correct_C = torch.empty(num_rows, dtype=torch.bool, device=logits_CV.device)
    accept_C = torch.empty_like(loss_C)
    if num_rows:
        _row_kernel[(num_rows,)](
            logits_CV,
            logits_CV if teacher_CV is None else teacher_CV,
            correct_C if labels_C is None else labels_C.contiguous(),
            loss_C,
            correct_C,
            accept_C,
            vocab_size,
            mix.ce,
            mix.kl,
            mix.tv,
            HAS_TEACHER=teacher_CV is not None,
            HAS_LABELS=labels_C is not None,
            WITH_GRAD=with_grad,
            TILE=min(MAX_TILE, triton.next_power_of_2(vocab_size)),
            num_warps=NUM_WARPS,
        )
    return RowLosses(
        loss_C,
        correct_C,
        None if teacher_CV is None else accept_C,
        logits_CV if with_grad else None,
    )


@triton.jit
def _peak_norm_argmax(row_ptr, vocab_size, TILE: tl.constexpr):
    """A row's maximum, log sum exp(row - maximum), and the first index of the maximum.

    Maximum and norm stay apart: their sum would round away digits of large logits.
    """
    peak = -float("inf")
    total = 0.0
    best = 0
    for start in range(0, vocab_size, TILE):
        column = start + tl.arange(0, TILE)
        logits = tl.load(row_ptr + column, mask=column < vocab_size, other=-float("inf"))
        tile_peak = tl.max(logits, axis=0)
        best = tl.where(tile_peak > peak, start + tl.argmax(logits, axis=0), best)
        new_peak = tl.maximum(peak, tile_peak)
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(logits - new_peak), axis=0)
        peak = new_peak
    return peak, tl.log(total), best


@triton.jit
def _log_probs(row_ptr, column, vocab_size, peak, norm):
    """Log probabilities of one tile, -inf past the vocabulary."""
    logits = tl.load(row_ptr + column, mask=column < vocab_size, other=-float("inf"))
    return (logits - peak) - norm


@triton.jit
def _sign(difference):
    return tl.where(difference > 0.0, 1.0, tl.where(difference < 0.0, -1.0, 0.0))


@triton.jit
def _row_kernel(
    logits_ptr,
    teacher_ptr,
    labels_ptr,
    loss_ptr,
    correct_ptr,
    accept_ptr,
    vocab_size,
    ce,
    kl,
    tv,
    HAS_TEACHER: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * vocab_size
    teacher_row_ptr = teacher_ptr + row.to(tl.int64) * vocab_size
    peak, norm, best = _peak_norm_argmax(row_ptr, vocab_size, TILE)
    label = best
    loss = 0.0
    teacher_peak = 0.0
    teacher_norm = 0.0
    sign_mean = 0.0
    if HAS_TEACHER:
        teacher_peak, teacher_norm, label = _peak_norm_argmax(teacher_row_ptr, vocab_size, TILE)
        kl_sum = 0.0
        gap_sum = 0.0
        for start in range(0, vocab_size, TILE):
            column = start + tl.arange(0, TILE)
            draft_log = _log_probs(row_ptr, column, vocab_size, peak, norm)
            target_log = _log_probs(teacher_row_ptr, column, vocab_size, teacher_peak, teacher_norm)
            draft = tl.exp(draft_log)
            target = tl.exp(target_log)
            # Past the vocabulary both logs are -inf and their difference is no number.
            log_gap = tl.where(column < vocab_size, target_log - draft_log, 0.0)
            kl_sum += tl.sum(target * log_gap, axis=0)
            gap_sum += tl.sum(tl.abs(draft - target), axis=0)
            sign_mean += tl.sum(draft * _sign(draft - target), axis=0)
        loss += kl * kl_sum + tv * 0.5 * gap_sum
        tl.store(accept_ptr + row, 1.0 - 0.5 * gap_sum)
    if HAS_LABELS:
        label = tl.load(labels_ptr + row).to(tl.int32)
    loss += ce * (norm - (tl.load(row_ptr + label) - peak))
    tl.store(loss_ptr + row, loss)
    tl.store(correct_ptr + row, best == label)
    if WITH_GRAD:
        for start in range(0, vocab_size, TILE):
            column = start + tl.arange(0, TILE)
            draft = tl.exp(_log_probs(row_ptr, column, vocab_size, peak, norm))
            grad = ce * (draft - tl.where(column == label, 1.0, 0.0))
            if HAS_TEACHER:
                target = tl.exp(
                    _log_probs(teacher_row_ptr, column, vocab_size, teacher_peak, teacher_norm)
                )
                sign = _sign(draft - target)
                grad += kl * (draft - target) + tv * 0.5 * draft * (sign - sign_mean)
            tl.store(row_ptr + column, grad, mask=column < vocab_size)
