"""Exported drafters as folders: config.json, model.safetensors and, for vLLM's DFlash, a mask file.

The same table drives writing and reading, so that what an engine would load can be loaded back into
a Drafter and compared (`read_export`).

    format        EAGLE-3 layer   DFlash mask embedding                  DFlash lm_head
    vllm          midlayer.       mask_embedding.pt                      the drafter's own
    sglang        midlayer.       none (a row of the target's)           none (the target's)
    speculators   layers.0.       a row of embed_tokens.weight           the drafter's own
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.models.backbones.block import BlockBackbone
from paceline.models.config import DrafterConfig
from paceline.models.drafter import Drafter, build_drafter
from paceline.models.export.checks import check_drafter
from paceline.models.export.decoder import Config
from paceline.models.export.engine import (
    engine_config,
    engine_drafter_config,
    sglang_tap_layer_ids,
    vllm_tap_layer_ids,
)
from paceline.models.export.sglang import check_sglang
from paceline.models.export.speculators import (
    Verifier,
    speculators_config,
    speculators_drafter_config,
    speculators_tap_layer_ids,
)
from paceline.models.export.tensors import MASK_EMBEDDING, from_engine, renames, to_engine
from paceline.models.files import with_remedy
from paceline.models.target import Target
from paceline.models.vocab import DraftVocab

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MASK_FILE = "mask_embedding.pt"
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one format says what every format says."""

    layer_prefix: str
    mask: Literal["file", "embedding row", "target's"]
    """Where DFlash's mask embedding goes; with "target's", lm_head is the target's as well."""
    check: Callable[[Drafter], None]
    config: Callable[[Drafter, Verifier], Config]
    tap_layer_ids: Callable[[Config], tuple[int, ...]]
    drafter_config: Callable[[Config], DrafterConfig]


LAYOUTS = {
    "vllm": Layout(
        layer_prefix="midlayer.",
        mask="file",
        check=check_drafter,
        config=lambda drafter, _: engine_config(drafter),
        tap_layer_ids=vllm_tap_layer_ids,
        drafter_config=engine_drafter_config,
    ),
    "sglang": Layout(
        layer_prefix="midlayer.",
        mask="target's",
        check=check_sglang,
        config=lambda drafter, _: engine_config(drafter),
        tap_layer_ids=sglang_tap_layer_ids,
        drafter_config=engine_drafter_config,
    ),
    "speculators": Layout(
        layer_prefix="layers.0.",
        mask="embedding row",
        check=check_drafter,
        config=speculators_config,
        tap_layer_ids=speculators_tap_layer_ids,
        drafter_config=speculators_drafter_config,
    ),
}


def write_export(drafter: Drafter, layout_name: str, out: Path, verifier: Verifier) -> None:
    """Write `drafter` as `layout_name` (a key of LAYOUTS) into the new folder `out`.

    Raises ValueError for what the engine would not serve as it was trained, and if `out` holds
    anything; OSError naming the folder if there is no room.
    """
    layout = LAYOUTS[layout_name]
    layout.check(drafter)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={out} is not an empty folder: give a new one, or remove it first")
    kind = drafter.config.backbone.kind
    tensors = to_engine(drafter.state_dict(), renames(kind, layout.layer_prefix))
    mask_D: Tensor | None = None
    if isinstance(drafter.backbone, BlockBackbone):
        mask_D = drafter.backbone.mask_embedding.detach().cpu()
        if layout.mask == "target's":
            del tensors[HEAD]
        elif layout.mask == "embedding row":
            tensors[EMBEDDING] = _with_row(drafter, mask_D)
    config = json.dumps(layout.config(drafter, verifier), indent=2) + "\n"

    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        save_file(tensors, scratch / WEIGHTS_FILE, metadata={"format": "pt"})
        if mask_D is not None and layout.mask == "file":
            mask_token_id = drafter.target_spec.mask_token_id
            torch.save(
                {"mask_token_id": mask_token_id, "embedding": mask_D.clone()}, scratch / MASK_FILE
            )
        (scratch / CONFIG_FILE).write_text(config)
        scratch.chmod(0o755)
        scratch.replace(out)
    except OSError as error:
        raise with_remedy(error, out) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _with_row(drafter: Drafter, mask_D: Tensor) -> Tensor:
    """The target's embedding [V, D], the mask token's row replaced by the drafter's."""
    embedding_VD = drafter.embedding_weight.detach().cpu().to(mask_D.dtype).clone()
    embedding_VD[drafter.target_spec.mask_token_id] = mask_D
    return embedding_VD


def read_export(folder: Path, layout_name: str, target: Target) -> Drafter:
    """The drafter that an engine reading `layout_name` would serve from `folder` for `target`.

    Raises ValueError if a tensor is missing, unknown or of another shape.
    """
    layout = LAYOUTS[layout_name]
    config = json.loads((folder / CONFIG_FILE).read_text())
    recipe = layout.drafter_config(config)
    kind, spec = recipe.backbone.kind, target.spec
    tensors = load_file(folder / WEIGHTS_FILE)
    embedding = tensors.pop(EMBEDDING, None)
    if kind == "block" and layout.mask == "target's":
        tensors[HEAD] = target.lm_head_weight.detach()
    state = from_engine(tensors, renames(kind, layout.layer_prefix), spec.vocab_size)
    if kind == "block":
        if layout.mask == "file":
            state[MASK_EMBEDDING] = torch.load(folder / MASK_FILE, weights_only=True)["embedding"]
        else:
            rows = target.embedding_weight.detach() if embedding is None else embedding
            state[MASK_EMBEDDING] = rows[spec.mask_token_id]
    drafter = build_drafter(
        recipe,
        spec,
        tap_layer_ids=layout.tap_layer_ids(config),
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
        vocab=DraftVocab(state["d2t"], state["t2d"]),
    )
    try:
        drafter.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{folder} is not the drafter its config describes: {error}") from error
    return drafter
