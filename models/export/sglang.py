"""What SGLang cannot serve, although vLLM can.

Its DFlash class has neither a head nor a mask embedding of its own: logits come from the target's
lm_head, masks are rows of the target's embedding. Its EAGLE-3 class leaves `fc` out when the taps
together are as wide as the drafter, and only releases of 2026 read fc_norm and norm_output.

Shapes: V target vocabulary, D drafter width.
"""

from __future__ import annotations

import torch

from paceline.models.backbones.block import BlockBackbone
from paceline.models.drafter import Drafter
from paceline.models.export.checks import check_drafter

UNSUPPORTED = "cannot be exported for SGLang: export format=vllm, or train with"


def check_sglang(drafter: Drafter) -> None:
    """`check_drafter`, and ValueError for what only SGLang would serve as something else."""
    check_drafter(drafter)
    if isinstance(drafter.backbone, BlockBackbone):
        _check_dflash(drafter, drafter.backbone)
        return
    spec = drafter.target_spec
    if len(drafter.tap_layer_ids) == 1:
        raise ValueError(
            f"an EAGLE-3 drafter with the single tap {drafter.tap_layer_ids[0]} (width "
            f"{spec.hidden_size}) {UNSUPPORTED} more target.tap_layer_ids; SGLang skips fc there"
        )


def _check_dflash(drafter: Drafter, backbone: BlockBackbone) -> None:
    spec = drafter.target_spec
    if drafter.vocab.size < spec.vocab_size or drafter.config.train_head:
        raise ValueError(
            f"a DFlash drafter with its own lm_head (draft_vocab_size={drafter.vocab.size} of "
            f"{spec.vocab_size}, train_head={drafter.config.train_head}) {UNSUPPORTED} "
            "drafter.train_head=false and no drafter.draft_vocab_size; SGLang uses the target's"
        )
    row_D = drafter.embedding_weight[spec.mask_token_id]
    if not torch.equal(backbone.mask_embedding.to(row_D.dtype), row_D):
        raise ValueError(
            "a DFlash drafter with a mask embedding of its own cannot be exported for SGLang, "
            f"which puts the target's embedding of token {spec.mask_token_id} in its place: export "
            "format=vllm"
        )


def sglang_note(drafter: Drafter) -> str | None:
    """What the reader of the export has to know about SGLang's version."""
    config = drafter.config
    if config.fuser.kind == "concat_fc_normed" or config.backbone.norm_output:
        return (
            "fc_norm and norm_output need an SGLang whose LlamaForCausalLMEagle3 reads them; "
            "older ones ignore both, and acceptance is then far below paceline evaluate's"
        )
    return None
