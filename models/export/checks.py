"""What no engine can serve, refused before anything is written.

Engines do not complain: they guess a missing list of layers and skip a norm they do not know, and
acceptance is low while the output stays right. Each refusal names the option and the remedy.
"""

from __future__ import annotations

from paceline.models.backbones.block import BlockBackbone
from paceline.models.drafter import Drafter


def check_drafter(drafter: Drafter) -> None:
    """Raise ValueError for what neither vLLM nor SGLang reproduces, whatever the format."""
    _check_taps(drafter)
    config = drafter.config
    if config.refiner.kind != "none":
        raise ValueError(
            f"drafter.refiner.kind={config.refiner.kind} cannot be exported: the engines' EAGLE-3 "
            "and DFlash classes have no such head and would ignore it; train with kind=none"
        )
    if isinstance(drafter.backbone, BlockBackbone):
        _check_block(drafter)


def _check_taps(drafter: Drafter) -> None:
    taps, last = list(drafter.tap_layer_ids), drafter.target_spec.num_layers - 2
    if not taps:
        raise ValueError(
            "the drafter names no tap_layer_ids; an engine would then tap layers of its own choice "
            "and acceptance would collapse: set target.tap_layer_ids and train again"
        )
    if taps != sorted(set(taps)) or taps[0] < 0 or taps[-1] > last:
        raise ValueError(
            f"tap_layer_ids={taps}: engines sort the layers and drop repeated ones, and norm the "
            f"last one differently; only increasing ids from 0 to {last} keep their meaning"
        )


def _check_block(drafter: Drafter) -> None:
    config, spec = drafter.config, drafter.target_spec
    if config.backbone.label_layout != "fill_in":
        raise ValueError(
            f"drafter.backbone.label_layout={config.backbone.label_layout} cannot be exported: "
            "engines never sample from the anchor's row of a DFlash block; train with "
            "label_layout=fill_in"
        )
    if config.fuser.kind != "concat_fc":
        raise ValueError(
            f"drafter.fuser.kind={config.fuser.kind} cannot be exported with a block backbone: the "
            "engines' DFlash class has no fc_norm; train with kind=concat_fc"
        )
    if config.backbone.block_size < 2:
        raise ValueError("drafter.backbone.block_size=1 drafts nothing: give at least 2")
    if not 0 <= spec.mask_token_id < spec.vocab_size:
        raise ValueError(
            f"the target's mask token id {spec.mask_token_id} is outside its embedding of "
            f"{spec.vocab_size} rows: add a mask token to the tokenizer of {spec.model}"
        )
