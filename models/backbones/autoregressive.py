"""The autoregressive backbone (EAGLE-3, arXiv 2503.01840; norm options of arXiv 2605.09992).

One decoder layer whose attention reads [norm(embedding), norm(hidden)] and whose residual stream is
the hidden. Row t pairs the target's fused feature f_t with the NEXT token and predicts the one
after it; training-time test then feeds the layer's own output back, as drafting does.

Index alignment, chain started at row 4 (anchor x5):

    step                 0              1              2
    embedding            x5             x6             x7
    hidden               f4             out of step 0  out of step 1
    position             4              5              6
    keys seen            rows 0..4      rows 0..4 of step 0, and its own steps 1, 2
    predicts             x6 (slot 0)    x7 (slot 1)    x8 (slot 2)

Shapes: T packed rows, S sequences, L longest sequence, N chains per sequence, K steps, H heads,
G key/value heads, d head width, D drafter width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels.attention import context_block_attention
from paceline.models.backbones.cache import DraftCache
from paceline.models.config import BackboneConfig
from paceline.models.layers import AttentionProjections, LayerShape, RMSNorm, SwiGLU
from paceline.models.packing import padded_index
from paceline.models.records import DraftRows, TrainBatch


class AutoregressiveLayer(nn.Module):
    """Attention over [norm(embedding), norm(hidden)] (2D wide), residual on the hidden."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = AttentionProjections(
            shape, input_size=2 * shape.hidden_size, qk_norm=False
        )
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGLU(shape)

    def attention_input(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """[..., D] and [..., D] -> [..., 2D], the embedding first."""
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(hidden)), dim=-1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + self.self_attn.output(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class AutoregressiveBackbone(nn.Module):
    """EAGLE-3's layer with training-time test."""

    def __init__(self, config: BackboneConfig, shape: LayerShape) -> None:
        super().__init__()
        if config.num_layers != 1:
            raise ValueError(
                f"drafter.backbone.num_layers={config.num_layers}: the autoregressive backbone "
                "has one layer (engines load no more); use kind=block for a deeper drafter"
            )
        self.config = config
        self.layers = nn.ModuleList([AutoregressiveLayer(shape)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    @property
    def layer(self) -> AutoregressiveLayer:
        layer = self.layers[0]
        assert isinstance(layer, AutoregressiveLayer)
        return layer

    @property
    def max_speculative_tokens(self) -> int | None:
        """None: a chain can be drafted beyond the steps it was trained for."""
        return None

    def training_forward(
        self,
        batch: TrainBatch,
        context_TD: Tensor,
        embedding_VD: Tensor,
        generator: torch.Generator,
    ) -> DraftRows:
        """Rows of every chain whose first prediction is supervised, `ttt_steps` slots each."""
        index_SL, real_SL = padded_index(batch.cu_seqlens)
        start_SN, chosen_SN = _chain_starts(batch.loss_mask[index_SL] & real_SL)
        end_S1 = batch.cu_seqlens[1:, None]
        row_SN = batch.cu_seqlens[:-1, None] + start_SN
        attention = self.layer.self_attn

        next_ids_SL = batch.input_ids[torch.minimum(index_SL + 1, end_S1 - 1)]
        inputs_SLE = self.layer.attention_input(embedding_VD[next_ids_SL], context_TD[index_SL])
        position_SL = batch.position_ids[index_SL]
        key_SLGd, value_SLGd = attention.key_value(inputs_SLE, position_SL)
        before_SNL = torch.arange(index_SL.shape[1], device=row_SN.device) < start_SN[..., None]

        hidden_SND = context_TD[row_SN]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        out: list[Tensor] = []
        for step in range(self.config.ttt_steps):
            ids = batch.input_ids[torch.minimum(row_SN + 1 + step, end_S1 - 1)]
            inputs = self.layer.attention_input(embedding_VD[ids], hidden_SND)
            positions = batch.position_ids[row_SN] + step
            query = attention.query(inputs, positions)
            key, value = attention.key_value(inputs, positions)
            keys.append(key)
            values.append(value)
            # Row `start` of step 0 equals the context row there, so the context part is strict and
            # the chain part holds this chain's own steps, step 0 included.
            attended = context_block_attention(
                query[:, :, None],
                key_SLGd,
                value_SLGd,
                torch.stack(keys, dim=2),
                torch.stack(values, dim=2),
                before_SNL,
                torch.ones(1, step + 1, dtype=torch.bool, device=query.device),
            )[:, :, 0]
            hidden_SND = self.layer.finish(hidden_SND, attended)
            normed = self.norm(hidden_SND)
            out.append(normed)
            hidden_SND = normed if self.config.norm_output else hidden_SND
        return _draft_rows(batch, torch.stack(out, dim=2), row_SN, chosen_SN)

    def extend(
        self,
        cache: DraftCache,
        slots: slice,
        context_BTD: Tensor,
        next_ids_BT: Tensor,
        counts: list[int],
        embedding_VD: Tensor,
    ) -> None:
        """Run the rows of newly committed tokens, each with the token that follows it."""
        positions_BT = cache.place(slots, context_BTD.shape[1], context_BTD.device)
        output_BTD = self._rows(cache, embedding_VD[next_ids_BT], context_BTD, positions_BT)
        cache.keep_last(slots, output_BTD, counts)
        cache.commit(slots, counts)

    def draft_hidden_next(
        self,
        cache: DraftCache,
        slots: slice,
        hidden_BD: Tensor,
        token_ids_B: Tensor,
        step: int,
        embedding_VD: Tensor,
    ) -> Tensor:
        """Feed each slot its drafted token number `step` (from 0) and the output that drafted it.

        Returns the layer's next outputs [B, D]. The rows lie above the committed ones.
        """
        fed_back_BD = self.norm(hidden_BD) if self.config.norm_output else hidden_BD
        positions_B1 = cache.place(slots, 1, hidden_BD.device, ahead=step)
        embedding_B1D = embedding_VD[token_ids_B][:, None]
        return self._rows(cache, embedding_B1D, fed_back_BD[:, None], positions_B1)[:, 0]

    def draft_hidden_tree(
        self,
        cache: DraftCache,
        slots: slice,
        hidden_BWD: Tensor,
        embedding_BWD: Tensor,
        level: int,
        visible_BWX: Tensor,
    ) -> Tensor:
        """Feed the W opened nodes of a tree's `level` (from 0) and their parents' outputs.

        visible [B, W, X] marks which of the X draft rows so far, these W last, each node sees.
        Returns the layer's outputs [B, W, D].
        """
        fed_back_BWD = self.norm(hidden_BWD) if self.config.norm_output else hidden_BWD
        positions_BW = cache.place_tree(slots, level, visible_BWX)
        return self._rows(cache, embedding_BWD, fed_back_BWD, positions_BW)

    def _rows(
        self, cache: DraftCache, embedding_BTD: Tensor, hidden_BTD: Tensor, positions_BT: Tensor
    ) -> Tensor:
        attention = self.layer.self_attn
        inputs = self.layer.attention_input(embedding_BTD, hidden_BTD)
        query_BTHd = attention.query(inputs, positions_BT)
        new_key_BTGd, new_value_BTGd = attention.key_value(inputs, positions_BT)
        key_BGLd, value_BGLd = cache.rows.update(
            new_key_BTGd.transpose(1, 2), new_value_BTGd.transpose(1, 2), 0
        )
        attended_BHTd = F.scaled_dot_product_attention(
            query_BTHd.transpose(1, 2),
            key_BGLd,
            value_BGLd,
            attn_mask=cache.rows.visible(),
            enable_gqa=True,
        )
        return self.layer.finish(hidden_BTD, attended_BHTd.transpose(1, 2))


def _chain_starts(enabled_SL: Tensor) -> tuple[Tensor, Tensor]:
    """Rows t whose slot-0 label x_{t+2} is enabled, padded to [S, N], and which are real.

    The enabled tokens of x_{t+1} too: while decoding, an anchor is always a response token.
    """
    start_SL = torch.zeros_like(enabled_SL)
    start_SL[:, :-2] = enabled_SL[:, 1:-1] & enabled_SL[:, 2:]
    number = int(start_SL.sum(dim=1).max().clamp(min=1))
    # A stable sort on "not a start" puts the starts first, in order.
    order = (~start_SL).to(torch.uint8).argsort(dim=1, stable=True)[:, :number]
    chosen = start_SL.gather(1, order)
    # A place without a start points at row 0: it must exist, and its rows are never valid.
    return order.masked_fill(~chosen, 0), chosen


def _draft_rows(
    batch: TrainBatch, hidden_SNKD: Tensor, row_SN: Tensor, chosen_SN: Tensor
) -> DraftRows:
    end_S11 = batch.cu_seqlens[1:, None, None]
    slots_K = torch.arange(hidden_SNKD.shape[2], device=row_SN.device)
    label_SNK = row_SN[..., None] + 2 + slots_K
    inside = label_SNK < end_S11
    label_SNK = torch.minimum(label_SNK, end_S11 - 1)
    enabled = inside & batch.loss_mask[label_SNK]
    valid_SNK = enabled.long().cumprod(dim=-1).bool() & chosen_SN[..., None]
    return DraftRows(
        hidden=hidden_SNKD.flatten(0, 2),
        slot=slots_K.expand_as(label_SNK).flatten(),
        label_index=label_SNK.flatten(),
        valid=valid_SNK.flatten(),
        num_slots=len(slots_K),
    )
