"""The part of config.json that every format shares: sizes and conventions of the decoder layers."""

from __future__ import annotations

from typing import Any

from paceline.models.config import BackboneConfig, DrafterConfig, FuserConfig
from paceline.models.drafter import Drafter, layer_shape

Config = dict[str, Any]


def decoder_config(drafter: Drafter) -> Config:
    """Hugging Face names of the drafter's sizes; vocab_size is the target's."""
    spec, shape = drafter.target_spec, layer_shape(drafter.config, drafter.target_spec)
    block = drafter.config.backbone.kind == "block"
    return {
        # The class of the layers: Qwen3's norms each head's query and key, Llama's does not.
        "model_type": "qwen3" if block else "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": drafter.config.backbone.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": spec.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": spec.vocab_size,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0] if spec.eos_token_ids else None,
        "dtype": str(drafter.lm_head.weight.dtype).removeprefix("torch."),
    }


def drafter_config(
    decoder: Config, *, block_size: int | None, fc_norm: bool, norm_output: bool, head: Config
) -> DrafterConfig:
    """The recipe an exported config describes; training-only options keep their defaults.

    `decoder` holds the sizes, `head` the draft_vocab_size. block_size None means autoregressive.
    """
    kind = "autoregressive" if block_size is None else "block"
    sizes = {
        key: decoder[key]
        for key in (
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
        )
    }
    draft_vocab_size = head.get("draft_vocab_size")
    return DrafterConfig(
        method="eagle3" if block_size is None else "dflash",
        fuser=FuserConfig(kind="concat_fc_normed" if fc_norm else "concat_fc"),
        backbone=BackboneConfig(
            kind=kind,
            num_layers=decoder["num_hidden_layers"],
            block_size=block_size or BackboneConfig.model_fields["block_size"].default,
            norm_output=norm_output,
            **sizes,
        ),
        draft_vocab_size=None if draft_vocab_size == decoder["vocab_size"] else draft_vocab_size,
    )
