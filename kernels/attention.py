"""Attention of the drafter backbones: each block of slots sees context and its own keys.

A block of DFlash holds the slots of one pass; a chain of training-time test (EAGLE-3) is a block of
one slot whose own keys are those of its steps so far:

    context    step 1 adds    step 2 adds
    x . .      x . .          x . .
    x x .      . x .          . x .
    x x x      . . x          . . x

It is one softmax over two parts whose keys live in different tensors, so that neither the context
is repeated per block nor a key head per query head. Scores exist one tile at a time and
are computed again in the backward pass (as FlashAttention does, arXiv 2205.14135); a tile ends at
the last context row that one of its blocks sees, so blocks in order of position cost half.

Grouped-query attention: query head h reads key head h // (H // G).

Letters: S sequences, L context rows, N blocks, B slots of a block, X key slots of a block, H query
heads, G key heads, E = H // G query heads per key head, Q = B * E, d head width, n blocks of one
tile, l context rows of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.kernels.matmul import matmul_float32

# Scores that exist at once: on CPU they fit the cache, elsewhere launches should be few.
TILE_SCORES_CPU = 1 << 18
TILE_SCORES_ACCELERATOR = 1 << 28


def context_block_attention(
    query_SNBHd: Tensor,
    context_key_SLGd: Tensor,
    context_value_SLGd: Tensor,
    block_key_SNBGd: Tensor,
    block_value_SNBGd: Tensor,
    context_visible_SNL: Tensor,
    block_mask_BB: Tensor,
) -> Tensor:
    """Each slot attends to its block's visible context rows and to the slots of its own block.

    Scores are scaled by d ** -0.5. Values and gradients do not depend on context rows that no
    block sees, as long as they are finite. A slot that sees nothing returns 0.

    Args:
        query_SNBHd: [S, N, B, H, d].
        context_key_SLGd: [S, L, G, d], shared by all blocks of a sequence.
        context_value_SLGd: [S, L, G, d].
        block_key_SNBGd: [S, N, X, G, d], X = B when a block attends to itself.
        block_value_SNBGd: [S, N, X, G, d].
        context_visible_SNL: bool [S, N, L]; a block may see no row at all.
        block_mask_BB: bool [B, X], row k is what slot k sees.

    Returns:
        [S, N, B, H, d].

    Raises:
        ValueError: H is not a multiple of G.
    """
    num_slots, num_heads, width = query_SNBHd.shape[2:]
    num_key_heads = context_key_SLGd.shape[2]
    if num_heads % num_key_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_key_heads} key heads")
    per_key = num_heads // num_key_heads
    query_SNBGEd = query_SNBHd.unflatten(3, (num_key_heads, per_key)) * width**-0.5
    query_SGNQd = query_SNBGEd.permute(0, 3, 1, 2, 4, 5).flatten(3, 4).contiguous()
    out_SGNQd = _TwoPartAttention.apply(
        query_SGNQd,
        context_key_SLGd.transpose(1, 2).contiguous(),
        context_value_SLGd.transpose(1, 2).contiguous(),
        block_key_SNBGd.permute(0, 3, 1, 2, 4).contiguous(),
        block_value_SNBGd.permute(0, 3, 1, 2, 4).contiguous(),
        context_visible_SNL,
        block_mask_BB.repeat_interleave(per_key, dim=0),
    )
    out_SGNBEd = out_SGNQd.unflatten(3, (num_slots, per_key))
    return out_SGNBEd.permute(0, 2, 3, 1, 4, 5).reshape_as(query_SNBHd)


class _TwoPartAttention(torch.autograd.Function):
    """softmax([context scores, block scores]) @ [context values, block values]; query is scaled."""

    @staticmethod
    def forward(
        ctx: Any,
        query_SGNQd: Tensor,
        context_key_SGLd: Tensor,
        context_value_SGLd: Tensor,
        block_key_SGNXd: Tensor,
        block_value_SGNXd: Tensor,
        visible_SNL: Tensor,
        block_mask_QX: Tensor,
    ) -> Tensor:
        out_SGNQd = torch.zeros_like(query_SGNQd)
        block_SGNQX = _block_scores(query_SGNQd, block_key_SGNXd, block_mask_QX)
        log_norm_SGNQ = block_SGNQX.logsumexp(dim=-1)
        for seq, blocks, num_rows in _tiles(query_SGNQd, visible_SNL):
            scores_GnQl = _context_scores(
                query_SGNQd, context_key_SGLd, visible_SNL, seq, blocks, num_rows
            )
            block_norm_GnQ = log_norm_SGNQ[seq, :, blocks]
            # A row that sees nothing has maximum -inf: any finite shift makes its weights 0.
            shift_GnQ = torch.maximum(scores_GnQl.amax(dim=-1), block_norm_GnQ)
            shift_GnQ = shift_GnQ.clamp(min=torch.finfo(torch.float32).min)
            weights_GnQl = scores_GnQl.sub_(shift_GnQ.unsqueeze(-1)).exp_()
            total_GnQ = weights_GnQl.sum(dim=-1) + (block_norm_GnQ - shift_GnQ).exp_()
            total_GnQ = total_GnQ.clamp(min=torch.finfo(torch.float32).tiny)
            values_Gld = context_value_SGLd[seq, :, :num_rows]
            out_Gmd = torch.bmm(weights_GnQl.flatten(1, 2).to(values_Gld.dtype), values_Gld)
            out_SGNQd[seq, :, blocks] = out_Gmd.view_as(out_SGNQd[seq, :, blocks]).div_(
                total_GnQ.unsqueeze(-1)
            )
            log_norm_SGNQ[seq, :, blocks] = shift_GnQ + total_GnQ.log_()
        out_SGNQd += (
            _block_probs(block_SGNQX, log_norm_SGNQ).to(out_SGNQd.dtype) @ block_value_SGNXd
        )
        ctx.save_for_backward(
            query_SGNQd,
            context_key_SGLd,
            context_value_SGLd,
            block_key_SGNXd,
            block_value_SGNXd,
            visible_SNL,
            block_mask_QX,
            out_SGNQd,
            log_norm_SGNQ,
        )
        return out_SGNQd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, block_key, block_value, visible, block_mask, out, log_norm = (
            ctx.saved_tensors
        )
        grad_out = grad_out.contiguous()
        # With the total normaliser and output, each part's gradient is that of its own softmax
        # columns: grad_score = prob * (grad_prob - sum_v grad_out * out).
        mean_SGNQ1 = (grad_out.float() * out.float()).sum(dim=-1, keepdim=True)
        probs = _block_probs(_block_scores(query, block_key, block_mask), log_norm)
        grad_block_value = probs.to(out.dtype).mT @ grad_out
        grad_scores = probs.mul_((grad_out @ block_value.mT).float() - mean_SGNQ1).to(out.dtype)
        grad_query = grad_scores @ block_key
        grad_block_key = grad_scores.mT @ query
        grad_key = torch.zeros_like(key, dtype=torch.float32)
        grad_value = torch.zeros_like(value, dtype=torch.float32)
        for seq, blocks, num_rows in _tiles(query, visible):
            scores = _context_scores(query, key, visible, seq, blocks, num_rows)
            probs_GnQl = scores.sub_(log_norm[seq, :, blocks].unsqueeze(-1)).exp_()
            probs_Gml = probs_GnQl.flatten(1, 2)
            grad_out_Gmd = grad_out[seq, :, blocks].flatten(1, 2)
            grad_value[seq, :, :num_rows] += probs_Gml.to(out.dtype).mT @ grad_out_Gmd
            grad_probs_Gml = matmul_float32(grad_out_Gmd, value[seq, :, :num_rows].mT)
            grad_probs_Gml.sub_(mean_SGNQ1[seq, :, blocks].flatten(1, 2))
            grad_scores_Gml = probs_Gml.mul_(grad_probs_Gml).to(out.dtype)
            grad_key[seq, :, :num_rows] += grad_scores_Gml.mT @ query[seq, :, blocks].flatten(1, 2)
            grad_query_tile = grad_query[seq, :, blocks]
            grad_query_tile += (grad_scores_Gml @ key[seq, :, :num_rows]).view_as(grad_query_tile)
        grad_key, grad_value = grad_key.to(key.dtype), grad_value.to(value.dtype)
        return grad_query, grad_key, grad_value, grad_block_key, grad_block_value, None, None


def _tiles(query_SGNQd: Tensor, visible_SNL: Tensor) -> Iterator[tuple[int, slice, int]]:
    """(sequence, blocks, context rows to read) of each tile with a visible row."""
    num_key_heads, num_blocks, num_queries = query_SGNQd.shape[1:4]
    num_rows = visible_SNL.shape[-1]
    if num_rows == 0:
        return
    budget = TILE_SCORES_CPU if query_SGNQd.device.type == "cpu" else TILE_SCORES_ACCELERATOR
    step = max(1, budget // (num_key_heads * num_queries * num_rows))
    rows_L = torch.arange(1, num_rows + 1, dtype=torch.int32, device=visible_SNL.device)
    last_rows = (visible_SNL * rows_L).amax(dim=-1).tolist()
    for seq, last_row in enumerate(last_rows):
        for start in range(0, num_blocks, step):
            tile_rows = max(last_row[start : start + step])
            if tile_rows:
                yield seq, slice(start, min(start + step, num_blocks)), tile_rows


def _context_scores(
    query_SGNQd: Tensor,
    key_SGLd: Tensor,
    visible_SNL: Tensor,
    seq: int,
    blocks: slice,
    num_rows: int,
) -> Tensor:
    """[G, n, Q, l] float32, -inf where not visible."""
    query_GnQd = query_SGNQd[seq, :, blocks]
    scores_Gml = matmul_float32(query_GnQd.flatten(1, 2), key_SGLd[seq, :, :num_rows].mT)
    scores_GnQl = scores_Gml.view(*query_GnQd.shape[:3], num_rows)
    hidden_1n1l = ~visible_SNL[seq, blocks, :num_rows][None, :, None]
    return scores_GnQl.masked_fill_(hidden_1n1l, -torch.inf)


def _block_scores(query_SGNQd: Tensor, key_SGNXd: Tensor, mask_QX: Tensor) -> Tensor:
    """[S, G, N, Q, X] float32, -inf where the mask hides a slot."""
    scores_SGNQX = matmul_float32(query_SGNQd.flatten(0, 2), key_SGNXd.flatten(0, 2).mT)
    scores_SGNQX = scores_SGNQX.view(*query_SGNQd.shape[:4], key_SGNXd.shape[3])
    return scores_SGNQX.masked_fill_(~mask_QX, -torch.inf)


def _block_probs(scores_SGNQX: Tensor, log_norm_SGNQ: Tensor) -> Tensor:
    """The block's columns of the softmax, in place of its scores; 0 in a row that sees nothing."""
    log_norm_SGNQ = log_norm_SGNQ.clamp(min=torch.finfo(torch.float32).min)
    return scores_SGNQX.sub_(log_norm_SGNQ.unsqueeze(-1)).exp_()
