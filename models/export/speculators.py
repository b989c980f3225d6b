"""config.json of the `speculators` form, which names the verifier and carries its own settings.

Layer ids are those of vLLM for both methods: tap i is written as i + 1 (vLLM then subtracts 1 again
for DFlash).
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.models.config import DrafterConfig
from paceline.models.drafter import Drafter
from paceline.models.export.decoder import Config, decoder_config, drafter_config

SPECULATORS_VERSION = "0.9.0"
"""The release whose form this is."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """The target, as a server will find it."""

    name_or_path: str
    architectures: tuple[str, ...]


def speculators_config(drafter: Drafter, verifier: Verifier) -> Config:
    """The whole config.json as a dictionary."""
    block = drafter.config.backbone.kind == "block"
    algorithm = "dflash" if block else "eagle3"
    layers = decoder_config(drafter)
    layers.pop("dtype")
    own = _dflash_config(drafter) if block else _eagle3_config(drafter)
    if not block:
        # A key of the layers, not of the speculator: only there does vLLM look for it.
        layers["num_aux_hidden_states"] = len(drafter.tap_layer_ids)
    return {
        "architectures": ["DFlashSpeculator" if block else "Eagle3Speculator"],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": recommended_speculative_tokens(drafter),
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier.name_or_path,
                "architectures": list(verifier.architectures),
            },
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": drafter.vocab.size,
        "target_hidden_size": drafter.target_spec.hidden_size,
        "dtype": str(drafter.lm_head.weight.dtype).removeprefix("torch."),
        **own,
    }


def recommended_speculative_tokens(drafter: Drafter) -> int:
    """Draft tokens per round that the drafter was trained for: a fill_in block has one less than
    inputs, since its first input is the anchor.
    """
    backbone = drafter.config.backbone
    return backbone.block_size - 1 if backbone.kind == "block" else backbone.ttt_steps


def _eagle3_config(drafter: Drafter) -> Config:
    return {
        # vLLM's default when the key is missing is True.
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": drafter.config.fuser.kind == "concat_fc_normed",
        "norm_output": drafter.config.backbone.norm_output,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in drafter.tap_layer_ids],
    }


def _dflash_config(drafter: Drafter) -> Config:
    return {
        "block_size": drafter.config.backbone.block_size,
        "mask_token_id": drafter.target_spec.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in drafter.tap_layer_ids],
        "sample_from_anchor": False,
        # vLLM makes every layer causal when this is false, full attention included.
        "sliding_window_non_causal": True,
    }


def speculators_tap_layer_ids(config: Config) -> tuple[int, ...]:
    """The taps, as our ids."""
    key = "aux_hidden_state_layer_ids"
    if config["speculators_model_type"] == "eagle3":
        key = f"eagle_{key}"
    return tuple(i - 1 for i in config[key])


def speculators_drafter_config(config: Config) -> DrafterConfig:
    """The recipe that `speculators_config` described."""
    return drafter_config(
        config["transformer_layer_config"],
        block_size=config.get("block_size"),
        fc_norm=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
        head=config,
    )
