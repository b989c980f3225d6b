"""A drafter: fuser x backbone x refiner over a draft vocabulary, sharing the target's embedding.

Training: `training_forward` gives supervised rows, models/objectives turns them into a loss.
Drafting: `start`, then per round `extend` with what the target just committed and `propose`.

Shapes: T packed rows, A tapped layers, Dt target width, D drafter width (equal to Dt), V target
vocabulary, Vd draft vocabulary, B slots (sequences that are drafted together), K proposed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.kernels.sampling import probs_from_logits, sample
from paceline.models.backbones.autoregressive import AutoregressiveBackbone
from paceline.models.backbones.block import BlockBackbone
from paceline.models.backbones.cache import DraftCache
from paceline.models.config import DrafterConfig
from paceline.models.expansion import Expansion, LayerExpansion, MarginalExpansion
from paceline.models.fusers import build_fuser
from paceline.models.layers import LayerShape, Linear
from paceline.models.records import DraftProposal, DraftRows, SamplingParams, TrainBatch
from paceline.models.refiners.registry import REFINERS
from paceline.models.target_spec import TargetSpec
from paceline.models.vocab import DraftVocab, full_vocab

BACKBONES: dict[str, type[BlockBackbone] | type[AutoregressiveBackbone]] = {
    "block": BlockBackbone,
    "autoregressive": AutoregressiveBackbone,
}


Chooser = tuple[SamplingParams, torch.Generator | None]


class Drafter(nn.Module):
    """See the module docstring. Build one with `build_drafter`."""

    d2t: Tensor  # [Vd] int64
    t2d: Tensor  # [V] bool
    backbone: BlockBackbone | AutoregressiveBackbone

    def __init__(
        self,
        config: DrafterConfig,
        spec: TargetSpec,
        tap_layer_ids: tuple[int, ...],
        vocab: DraftVocab,
        embedding_weight: Tensor,
    ) -> None:
        super().__init__()
        self.config = config
        self.target_spec = spec
        self.tap_layer_ids = tap_layer_ids
        shape = layer_shape(config, spec)
        self.fuser = build_fuser(
            config.fuser,
            num_taps=len(tap_layer_ids),
            target_size=spec.hidden_size,
            hidden_size=shape.hidden_size,
            eps=shape.rms_norm_eps,
        )
        self.backbone = BACKBONES[config.backbone.kind](config.backbone, shape)
        self.refiner = REFINERS[config.refiner.kind]()
        self.lm_head = Linear(shape.hidden_size, vocab.size)
        self.lm_head.requires_grad_(config.train_head)
        self.register_buffer("d2t", vocab.d2t.clone())
        self.register_buffer("t2d", vocab.t2d.clone())
        # A plain tensor: the target owns it, so it is neither trained nor saved here.
        self.embedding_weight = embedding_weight.detach()

    @property
    def vocab(self) -> DraftVocab:
        return DraftVocab(self.d2t, self.t2d)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def training_forward(self, batch: TrainBatch, generator: torch.Generator) -> DraftRows:
        """Supervised rows of a packed batch; `generator` draws the anchors."""
        context_TD = self.fuser(batch.aux_hidden_states)
        rows = self.backbone.training_forward(batch, context_TD, self.embedding_weight, generator)
        return DraftRows(
            hidden=self.refiner(rows.hidden),
            slot=rows.slot,
            label_index=rows.label_index,
            valid=rows.valid,
            num_slots=rows.num_slots,
        )

    def start(self, num_slots: int, capacity: int) -> DraftCache:
        """State for drafting `num_slots` sequences of up to `capacity` rows, drafts included."""
        return DraftCache(num_slots, capacity)

    def extend(
        self,
        cache: DraftCache,
        slots: slice,
        aux_hidden_states: Tensor,
        next_ids: Tensor,
        counts: list[int],
    ) -> None:
        """Take the target's taps of newly committed tokens.

        aux_hidden_states [B, T, A, Dt] are of the T tokens after each slot's cached ones, next_ids
        [B, T] the tokens that follow each of them. Of slot b only the first counts[b] are
        committed, the last of which is followed by the anchor; the others are padding.
        """
        context_BTD = self.fuser(aux_hidden_states.to(self.lm_head.weight.dtype))
        self.backbone.extend(cache, slots, context_BTD, next_ids, counts, self.embedding_weight)

    def propose(
        self,
        cache: DraftCache,
        slots: slice,
        anchor_ids: Tensor,
        num_tokens: int,
        samplings: Sequence[SamplingParams],
        generators: Sequence[torch.Generator | None],
    ) -> list[DraftProposal]:
        """A chain of `num_tokens` tokens after each slot's anchor [B].

        Greedy chains are deterministic (draft_probs None); sampled ones carry the distribution
        each token was really drawn from, over the target's vocabulary.
        """
        choosers = list(zip(samplings, generators, strict=True))
        if isinstance(self.backbone, BlockBackbone):
            hidden_BKD = self.backbone.draft_hidden(
                cache, slots, anchor_ids, num_tokens, self.embedding_weight
            )
            tokens_BK, probs = self._choose(hidden_BKD, choosers)
        else:
            tokens_BK, probs = self._chain(self.backbone, cache, slots, num_tokens, choosers)
        index = torch.arange(num_tokens, device=self.device)
        return [
            DraftProposal(tokens=tokens_K, parent=index - 1, depth=index, draft_probs=probs_KV)
            for tokens_K, probs_KV in zip(tokens_BK, probs, strict=True)
        ]

    def expansion(
        self, cache: DraftCache, slots: slice, anchor_ids: Tensor, depth: int
    ) -> Expansion:
        """What may follow each slot's anchor [B] and the nodes after it, `depth` levels deep."""
        if isinstance(self.backbone, BlockBackbone):
            hidden_BKD = self.backbone.draft_hidden(
                cache, slots, anchor_ids, depth, self.embedding_weight
            )
            return MarginalExpansion(self._logits(hidden_BKD))
        return LayerExpansion(self.backbone, self._logits, self.embedding_weight, cache, slots)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for ids of the draft vocabulary."""
        return draft_ids + self.d2t[draft_ids]

    def over_target(self, probs_KV: Tensor) -> Tensor:
        """Probabilities over the draft vocabulary, over the target's."""
        over_target_KV = probs_KV.new_zeros(len(probs_KV), len(self.t2d))
        over_target_KV[:, self.vocab.target_ids] = probs_KV
        return over_target_KV

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.refiner(hidden)).float()
        return logits

    def _chain(
        self,
        backbone: AutoregressiveBackbone,
        cache: DraftCache,
        slots: slice,
        num_tokens: int,
        choosers: list[Chooser],
    ) -> tuple[Tensor, list[Tensor | None]]:
        assert cache.last_hidden is not None, "extend before propose"
        hidden_BD = cache.last_hidden[slots]
        tokens: list[Tensor] = []
        probs: list[list[Tensor | None]] = []
        for step in range(num_tokens):
            if step > 0:
                hidden_BD = backbone.draft_hidden_next(
                    cache, slots, hidden_BD, tokens[-1][:, 0], step - 1, self.embedding_weight
                )
            token_B1, step_probs = self._choose(backbone.norm(hidden_BD)[:, None], choosers)
            tokens.append(token_B1)
            probs.append(step_probs)
        joined = [_join(slot_probs) for slot_probs in zip(*probs, strict=True)]
        return torch.cat(tokens, dim=1), joined

    def _choose(
        self, hidden_BKD: Tensor, choosers: list[Chooser]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Target ids [B, K], and per slot what they were drawn from [K, V], None where greedy."""
        logits_BKV = self._logits(hidden_BKD)
        draft_ids_BK = logits_BKV.argmax(dim=-1)
        probs: list[Tensor | None] = [None] * len(choosers)
        for i, (sampling, generator) in enumerate(choosers):
            if sampling.temperature == 0.0:
                continue
            assert generator is not None, "sampling needs a generator"
            probs_KV = probs_from_logits(
                logits_BKV[i], sampling.temperature, sampling.top_k, sampling.top_p
            )
            draft_ids_BK[i] = sample(probs_KV, generator)
            probs[i] = self.over_target(probs_KV)
        return self.target_ids(draft_ids_BK), probs


def _join(step_probs: tuple[Tensor | None, ...]) -> Tensor | None:
    drawn = [probs_1V for probs_1V in step_probs if probs_1V is not None]
    return torch.cat(drawn) if drawn else None


def layer_shape(config: DrafterConfig, spec: TargetSpec) -> LayerShape:
    """The drafter's sizes: the recipe's where it states them, else the target's."""
    backbone = config.backbone
    return LayerShape(
        hidden_size=spec.hidden_size,
        intermediate_size=backbone.intermediate_size or spec.intermediate_size,
        num_attention_heads=backbone.num_attention_heads or spec.num_attention_heads,
        num_key_value_heads=backbone.num_key_value_heads or spec.num_key_value_heads,
        head_dim=backbone.head_dim or spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope_theta,
    )


def default_tap_layer_ids(config: DrafterConfig, num_layers: int) -> tuple[int, ...]:
    """The backbone's usual taps: EAGLE-3 early, middle, late; DFlash spread evenly from 1 to N - 3.

    Both count the outputs of 0-based decoder layers. Few layers give fewer distinct taps.
    """
    if config.backbone.kind == "autoregressive":
        ids: tuple[int, ...] = (1, num_layers // 2 - 1, num_layers - 4)
    elif config.backbone.num_layers == 1:
        ids = (num_layers // 2,)
    else:
        taps = config.backbone.num_layers
        last = num_layers - 3
        ids = tuple(round(1 + i * (last - 1) / (taps - 1)) for i in range(taps))
    return tuple(sorted({min(max(i, 0), num_layers - 2) for i in ids}))


def build_drafter(
    config: DrafterConfig,
    spec: TargetSpec,
    *,
    tap_layer_ids: tuple[int, ...],
    embedding_weight: Tensor,
    lm_head_weight: Tensor,
    vocab: DraftVocab | None = None,
    seed: int = 0,
) -> Drafter:
    """A new drafter; its lm_head starts as the target's rows [V, D] of the draft vocabulary.

    Raises ValueError if the draft vocabulary exceeds the target's.
    """
    size = config.draft_vocab_size or spec.vocab_size
    if size > spec.vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size={size} is larger than the vocabulary of "
            f"{spec.model} ({spec.vocab_size}): give at most that"
        )
    vocab = vocab or full_vocab(spec.vocab_size)
    assert vocab.size == size and len(vocab.t2d) == spec.vocab_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config, spec, tap_layer_ids, vocab, embedding_weight)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(lm_head_weight[vocab.target_ids.to(lm_head_weight.device)])
        if isinstance(drafter.backbone, BlockBackbone):
            # The mean token: inside the embeddings' range, and no single token's.
            drafter.backbone.mask_embedding.copy_(embedding_weight.float().mean(dim=0))
    return drafter.to(embedding_weight.device)
