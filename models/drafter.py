"""A drafter: fuser x backbone x refiner over a draft vocabulary, sharing the target's embedding.

Training: `training_forward` gives supervised rows, models/objectives turns them into a loss.
Drafting: `start`, then per round `extend` with what the target just committed and `propose`.

Shapes: T packed rows, A tapped layers, Dt target width, D drafter width (equal to Dt), V target
vocabulary, Vd draft vocabulary, n newly committed rows, K proposed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.kernels.sampling import probs_from_logits, sample
from paceline.models.backbones.autoregressive import AutoregressiveBackbone
from paceline.models.backbones.block import BlockBackbone
from paceline.models.backbones.cache import DraftCache
from paceline.models.config import DrafterConfig
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

    def start(self) -> DraftCache:
        """State for drafting one sequence."""
        return DraftCache(len(self.backbone.layers))

    def extend(self, cache: DraftCache, aux_hidden_states: Tensor, next_ids: Tensor) -> None:
        """Take the target's taps of newly committed tokens.

        aux_hidden_states [n, A, Dt] are of the n tokens after the cached ones; next_ids [n] are the
        tokens that follow each of them, the last one being the anchor.
        """
        context_ND = self.fuser(aux_hidden_states.to(self.lm_head.weight.dtype))
        self.backbone.extend(cache, context_ND, next_ids, self.embedding_weight)

    def propose(
        self,
        cache: DraftCache,
        anchor_id: int,
        num_tokens: int,
        sampling: SamplingParams,
        generator: torch.Generator | None = None,
    ) -> DraftProposal:
        """A chain of `num_tokens` tokens after the anchor; the cache ends as it began.

        Greedy chains are deterministic (draft_probs None); sampled ones carry the distribution
        each token was really drawn from, over the target's vocabulary.
        """
        committed = cache.length
        if isinstance(self.backbone, BlockBackbone):
            hidden = self.backbone.draft_hidden(cache, anchor_id, num_tokens, self.embedding_weight)
            tokens, probs = self._choose(hidden, sampling, generator)
        else:
            tokens, probs = self._chain(self.backbone, cache, num_tokens, sampling, generator)
        cache.crop(committed)
        index = torch.arange(num_tokens, device=self.device)
        return DraftProposal(tokens=tokens, parent=index - 1, depth=index, draft_probs=probs)

    def _chain(
        self,
        backbone: AutoregressiveBackbone,
        cache: DraftCache,
        num_tokens: int,
        sampling: SamplingParams,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor | None]:
        chosen: list[Tensor] = []
        probs: list[Tensor] = []
        hidden = cache.last_hidden
        assert hidden is not None, "extend before propose"
        for step in range(num_tokens):
            if step > 0:
                hidden = backbone.draft_hidden_next(
                    cache, hidden, int(chosen[-1]), self.embedding_weight
                )
            token, token_probs = self._choose(backbone.norm(hidden), sampling, generator)
            chosen.append(token)
            if token_probs is not None:
                probs.append(token_probs)
        return torch.cat(chosen), torch.cat(probs) if probs else None

    def _choose(
        self, hidden_KD: Tensor, sampling: SamplingParams, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        logits = self.lm_head(self.refiner(hidden_KD)).float()
        if sampling.temperature == 0.0:
            draft_ids = logits.argmax(dim=-1)
            return draft_ids + self.d2t[draft_ids], None
        assert generator is not None, "sampling needs a generator"
        probs = probs_from_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p)
        draft_ids = sample(probs, generator)
        over_target = probs.new_zeros(len(probs), len(self.t2d))
        over_target[:, self.vocab.target_ids] = probs
        return draft_ids + self.d2t[draft_ids], over_target


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
