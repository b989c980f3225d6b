"""config.json in the engines' own form: LlamaForCausalLMEagle3 and DFlashDraftModel.

vLLM (0.32) and SGLang read the same keys, save for the layers of EAGLE-3. Tap id i is the output of
decoder layer i, counted from 0:

    key                                            value    read by
    eagle_aux_hidden_state_layer_ids (top level)   i + 1    vLLM: the stream that enters layer i + 1
    eagle_config.eagle_aux_hidden_state_layer_ids  i        SGLang, which adds 1
    dflash_config.target_layer_ids                 i        both, which add 1
"""

from __future__ import annotations

from paceline.models.config import DrafterConfig
from paceline.models.drafter import Drafter
from paceline.models.export.decoder import Config, decoder_config, drafter_config

EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
DFLASH_ARCHITECTURE = "DFlashDraftModel"


def engine_config(drafter: Drafter) -> Config:
    """The whole config.json as a dictionary."""
    kind = drafter.config.backbone.kind
    own = _eagle3_config(drafter) if kind == "autoregressive" else _dflash_config(drafter)
    return {
        **decoder_config(drafter),
        "draft_vocab_size": drafter.vocab.size,
        "target_hidden_size": drafter.target_spec.hidden_size,
        **own,
    }


def _eagle3_config(drafter: Drafter) -> Config:
    taps = list(drafter.tap_layer_ids)
    return {
        "architectures": [EAGLE3_ARCHITECTURE],
        # The residual stream is the hidden before its norm. Defaults differ between engines.
        "norm_before_residual": False,
        "fc_norm": drafter.config.fuser.kind == "concat_fc_normed",
        "norm_output": drafter.config.backbone.norm_output,
        # Without it vLLM sizes fc for three taps whatever the list says.
        "num_aux_hidden_states": len(taps),
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in taps],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": taps,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
    }


def _dflash_config(drafter: Drafter) -> Config:
    backbone = drafter.config.backbone
    return {
        "architectures": [DFLASH_ARCHITECTURE],
        "block_size": backbone.block_size,
        "num_target_layers": drafter.target_spec.num_layers,
        "layer_types": ["full_attention"] * backbone.num_layers,
        "use_sliding_window": False,
        "dflash_config": {
            "block_size": backbone.block_size,
            "mask_token_id": drafter.target_spec.mask_token_id,
            "target_layer_ids": list(drafter.tap_layer_ids),
            "causal": False,
        },
    }


def vllm_tap_layer_ids(config: Config) -> tuple[int, ...]:
    """The taps vLLM would use, as our ids."""
    if config["architectures"] == [DFLASH_ARCHITECTURE]:
        return tuple(config["dflash_config"]["target_layer_ids"])
    return tuple(i - 1 for i in config["eagle_aux_hidden_state_layer_ids"])


def sglang_tap_layer_ids(config: Config) -> tuple[int, ...]:
    """The taps SGLang would use, as our ids."""
    if config["architectures"] == [DFLASH_ARCHITECTURE]:
        return tuple(config["dflash_config"]["target_layer_ids"])
    return tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])


def engine_drafter_config(config: Config) -> DrafterConfig:
    """The recipe that `engine_config` described."""
    return drafter_config(
        config,
        block_size=config.get("block_size"),
        fc_norm=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
        head=config,
    )
