"""The block backbone (DFlash, arXiv 2602.06036): one pass fills a whole block.

Block inputs are [anchor, MASK, MASK, ...]; attention is bidirectional inside the block and sees the
fused target features of the tokens strictly before the anchor, whose own feature does not exist yet
when it is drafted from. Context rows feed every layer's keys and values and are never updated.

Index alignment, anchor at position 7, block_size 4 (s = supervised):

    block row            0       1       2       3
    position             7       8       9       10
    input                x7      MASK    MASK    MASK
    context seen         rows 0..6 of the target's taps, in every layer
    fill_in predicts     -       x8 s    x9 s    x10 s     3 drafts, slots 0..2
    shift predicts       x8 s    x9 s    x10 s   x11 s     4 drafts, slots 0..3

Drafting K tokens feeds exactly K + 1 rows (fill_in) or K rows (shift): because attention is
bidirectional, a longer block would change the early rows.

Shapes: T packed rows, S sequences, L longest sequence, N anchors per sequence, B block rows,
K slots, H heads, G key/value heads, d head width, D drafter width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.kernels.attention import context_block_attention
from paceline.models.backbones.cache import DraftCache
from paceline.models.config import BackboneConfig
from paceline.models.layers import AttentionProjections, LayerShape, RMSNorm, SwiGLU
from paceline.models.packing import padded_index
from paceline.models.records import DraftRows, TrainBatch


class BlockLayer(nn.Module):
    """Pre-norm decoder layer whose keys and values also cover the context rows."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = AttentionProjections(shape, input_size=shape.hidden_size, qk_norm=True)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGLU(shape)

    def forward(
        self,
        hidden_SNBD: Tensor,
        position_SNB: Tensor,
        context_key_SLGd: Tensor,
        context_value_SLGd: Tensor,
        context_visible_SNL: Tensor,
    ) -> Tensor:
        normed = self.input_layernorm(hidden_SNBD)
        query = self.self_attn.query(normed, position_SNB)
        key, value = self.self_attn.key_value(normed, position_SNB)
        rows = hidden_SNBD.shape[2]
        attended = context_block_attention(
            query,
            context_key_SLGd,
            context_value_SLGd,
            key,
            value,
            context_visible_SNL,
            torch.ones(rows, rows, dtype=torch.bool, device=hidden_SNBD.device),
        )
        hidden_SNBD = hidden_SNBD + self.self_attn.output(attended)
        return hidden_SNBD + self.mlp(self.post_attention_layernorm(hidden_SNBD))


class BlockBackbone(nn.Module):
    """DFlash layers over [anchor, MASK...] blocks."""

    def __init__(self, config: BackboneConfig, shape: LayerShape) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.context_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(shape.hidden_size))
        self.first_supervised = 1 if config.label_layout == "fill_in" else 0

    @property
    def max_speculative_tokens(self) -> int:
        return self.config.block_size - self.first_supervised

    def training_forward(
        self,
        batch: TrainBatch,
        context_TD: Tensor,
        embedding_VD: Tensor,
        generator: torch.Generator,
    ) -> DraftRows:
        """Rows of randomly drawn anchors, all blocks at once."""
        index_SL, real_SL = padded_index(batch.cu_seqlens)
        anchor_SN, drawn_SN = _draw_anchors(
            batch.loss_mask[index_SL] & real_SL, self.config.anchors_per_sequence, generator
        )
        rows_B = torch.arange(self.config.block_size, device=context_TD.device)
        first_S = batch.cu_seqlens[:-1]
        position_SNB = anchor_SN[:, :, None] + rows_B
        visible_SNL = torch.arange(index_SL.shape[1], device=index_SL.device) < anchor_SN[..., None]
        hidden_SNBD = self._run(
            batch.input_ids[first_S[:, None] + anchor_SN],
            position_SNB,
            self.context_norm(context_TD)[index_SL],
            batch.position_ids[index_SL],
            visible_SNL & real_SL[:, None],
            embedding_VD,
        )
        return self._rows(batch, hidden_SNBD, anchor_SN, drawn_SN)

    def _rows(
        self, batch: TrainBatch, hidden_SNBD: Tensor, anchor_SN: Tensor, drawn_SN: Tensor
    ) -> DraftRows:
        first_S, end_S = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
        slots_K = torch.arange(self.max_speculative_tokens, device=anchor_SN.device)
        label_SNK = (first_S[:, None] + anchor_SN)[..., None] + 1 + slots_K
        inside = label_SNK < end_S[:, None, None]
        label_SNK = torch.minimum(label_SNK, end_S[:, None, None] - 1)
        enabled = inside & batch.loss_mask[label_SNK]
        # Only the contiguous enabled prefix counts: what follows a gap is never verified.
        valid_SNK = enabled.long().cumprod(dim=-1).bool() & drawn_SN[..., None]
        return DraftRows(
            hidden=hidden_SNBD[:, :, self.first_supervised :].flatten(0, 2),
            slot=slots_K.expand_as(label_SNK).flatten(),
            label_index=label_SNK.flatten(),
            valid=valid_SNK.flatten(),
            num_slots=len(slots_K),
        )

    def _run(
        self,
        anchor_ids_SN: Tensor,
        position_SNB: Tensor,
        context_SLD: Tensor,
        context_position_SL: Tensor,
        visible_SNL: Tensor,
        embedding_VD: Tensor,
    ) -> Tensor:
        hidden = self._block_inputs(anchor_ids_SN, position_SNB.shape[2], embedding_VD)
        for layer in self.layers:
            key, value = layer.self_attn.key_value(context_SLD, context_position_SL)
            hidden = layer(hidden, position_SNB, key, value, visible_SNL)
        return self.norm(hidden)

    def _block_inputs(self, anchor_ids_SN: Tensor, rows: int, embedding_VD: Tensor) -> Tensor:
        anchor_SN1D = embedding_VD[anchor_ids_SN][:, :, None]
        mask = self.mask_embedding.to(anchor_SN1D.dtype)
        masks_SNBD = mask.expand(*anchor_ids_SN.shape, rows - 1, -1)
        return torch.cat((anchor_SN1D, masks_SNBD), dim=2)

    def extend(
        self,
        cache: DraftCache,
        slots: slice,
        context_BTD: Tensor,
        next_ids_BT: Tensor,
        counts: list[int],
        embedding_VD: Tensor,
    ) -> None:
        """Add the context rows of newly committed tokens; the two unused arguments are for other
        backbones.
        """
        positions_BT = cache.place(slots, context_BTD.shape[1], context_BTD.device)
        normed_BTD = self.context_norm(context_BTD)
        for i, layer in enumerate(self.layers):
            key_BTGd, value_BTGd = layer.self_attn.key_value(normed_BTD, positions_BT)
            cache.rows.update(key_BTGd.transpose(1, 2), value_BTGd.transpose(1, 2), i)
        cache.commit(slots, counts)

    def draft_hidden(
        self,
        cache: DraftCache,
        slots: slice,
        anchor_ids_B: Tensor,
        num_tokens: int,
        embedding_VD: Tensor,
    ) -> Tensor:
        """Rows [B, K, D] for lm_head, one pass; the cache keeps only its context rows."""
        rows = num_tokens + self.first_supervised
        device = embedding_VD.device
        lengths_B = torch.tensor(cache.lengths[slots], device=device)
        longest = max(cache.lengths[slots])
        position_B1R = (lengths_B[:, None] + torch.arange(rows, device=device))[:, None]
        visible_B1L = (torch.arange(longest, device=device) < lengths_B[:, None])[:, None]
        hidden_B1RD = self._block_inputs(anchor_ids_B[:, None], rows, embedding_VD)
        for i, layer in enumerate(self.layers):
            key_BLGd = cache.rows.keys[i][slots, :, :longest].transpose(1, 2)
            value_BLGd = cache.rows.values[i][slots, :, :longest].transpose(1, 2)
            hidden_B1RD = layer(hidden_B1RD, position_B1R, key_BLGd, value_BLGd, visible_B1L)
        return self.norm(hidden_B1RD)[:, 0, self.first_supervised :]


def _draw_anchors(
    eligible_SL: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Up to `count` anchors per sequence without replacement, where tokens a and a + 1 are enabled.

    Returns positions [S, N] and which of them were really drawn.
    """
    pair_SL = eligible_SL.clone()
    pair_SL[:, :-1] &= eligible_SL[:, 1:]
    pair_SL[:, -1] = False
    key = torch.rand(pair_SL.shape, generator=generator).to(pair_SL.device)
    key = torch.where(pair_SL, key, -1.0)
    number = min(count, int(pair_SL.sum(dim=1).max().clamp(min=1)))
    top = key.topk(number, dim=1)
    order = top.indices.sort(dim=1)
    drawn = top.values.gather(1, order.indices) >= 0
    # A place that was not drawn points at row 0: it must exist, and its rows are never valid.
    return order.values.masked_fill(~drawn, 0), drawn
