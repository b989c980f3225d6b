"""A drafter on disk: drafter.safetensors, then drafter.json, which names its hash.

The JSON holds the DrafterCheckpoint fields, the drafter's configuration and the target's numbers.
The vocabulary map travels inside the safetensors (d2t, t2d): a map in a side file gets lost, and
draft ids then silently mean the first target tokens.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from paceline.models.config import DrafterConfig
from paceline.models.drafter import Drafter, build_drafter
from paceline.models.files import replace_text, write_atomically
from paceline.models.fingerprint import require_same_target
from paceline.models.records import DrafterCheckpoint
from paceline.models.target import Target
from paceline.models.vocab import DraftVocab

DRAFTER_WEIGHTS = "drafter.safetensors"
DRAFTER_RECORD = "drafter.json"


class CheckpointError(ValueError):
    """A drafter folder that is incomplete, damaged or holds numbers that are not finite."""


def new_record(
    config: DrafterConfig, target: Target, mlflow_run_id: str | None = None
) -> DrafterCheckpoint:
    """The record of a drafter that has not been trained yet, reading the target's taps."""
    return DrafterCheckpoint(
        uri="",
        method=config.method,
        drafter_version=0,
        parent_version=None,
        target_model=target.spec.model,
        target_fingerprint=target.fingerprint,
        target_version=target.version,
        tap_layer_ids=target.tap_layer_ids,
        step=0,
        tokens_seen=0,
        sha256="",
        mlflow_run_id=mlflow_run_id,
    )


def save_drafter(folder: Path, drafter: Drafter, record: DrafterCheckpoint) -> DrafterCheckpoint:
    """Write weights first, then the record that vouches for them; returns the record as written.

    Raises CheckpointError, writing nothing, if a weight is not finite.
    """
    tensors = {
        name: tensor.detach().to("cpu").contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    for name, tensor in tensors.items():
        require_finite(folder / DRAFTER_WEIGHTS, name, tensor)
    content = save(tensors)

    def write(file: IO[bytes]) -> None:
        file.write(content)

    _, checksum = write_atomically(folder, lambda _: DRAFTER_WEIGHTS, write)
    written = replace(record, uri=DRAFTER_WEIGHTS, sha256=checksum)
    document = {**asdict(written), "config": drafter.config.model_dump(mode="json")}
    replace_text(folder / DRAFTER_RECORD, json.dumps(document, indent=2) + "\n")
    return written


def read_record(folder: Path) -> tuple[DrafterCheckpoint, DrafterConfig]:
    """What a drafter folder says of itself, without its weights.

    Raises CheckpointError if there is no readable record.
    """
    path = folder / DRAFTER_RECORD
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist: give the folder of a trained drafter, such as "
            "runs/NAME/drafter"
        )
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        config = DrafterConfig.model_validate(document.pop("config"))
        document["tap_layer_ids"] = tuple(document["tap_layer_ids"])
        return DrafterCheckpoint(**document), config
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or of another version ({error}): use another checkpoint"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterState:
    """A whole drafter without a target: what an object reference to a new version holds."""

    name: str
    """Where it comes from, for messages: a file, or a run and version."""
    checkpoint: DrafterCheckpoint
    config: DrafterConfig
    tensors: dict[str, Tensor]


def read_drafter(folder: Path) -> DrafterState:
    """The drafter of a folder.

    Raises CheckpointError naming the file for missing, truncated or changed weights.
    """
    record, config = read_record(folder)
    path = folder / record.uri
    tensors = _read_tensors(path, record.sha256)
    return DrafterState(name=str(path), checkpoint=record, config=config, tensors=tensors)


def load_drafter(folder: Path, target: Target) -> tuple[Drafter, DrafterCheckpoint]:
    """The drafter of a folder, bound to `target`, whose taps are set to the drafter's.

    Raises CheckpointError naming the file for missing, truncated or non-finite weights, and
    TargetMismatchError if the drafter was made for another target.
    """
    record, _ = read_record(folder)
    _require_target(record, str(folder), target)
    drafter = bind_drafter(read_drafter(folder), target)
    target.tap(record.tap_layer_ids)
    return drafter, record


def bind_drafter(state: DrafterState, target: Target) -> Drafter:
    """The drafter with its own copy of the weights, reading `target`, which is left as it is.

    Raises CheckpointError for weights that are not finite or not those of its configuration, and
    TargetMismatchError if it was made for another target.
    """
    record, config, tensors = state.checkpoint, state.config, state.tensors
    _require_target(record, state.name, target)
    for name, tensor in tensors.items():
        require_finite(state.name, name, tensor)
    vocab = _vocab_of(state.name, tensors, config, target.spec.vocab_size)
    drafter = build_drafter(
        config,
        target.spec,
        tap_layer_ids=record.tap_layer_ids,
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
        vocab=vocab,
    )
    try:
        drafter.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{state.name} does not fit its own record {DRAFTER_RECORD}: {error}"
        ) from error
    return drafter


def _require_target(record: DrafterCheckpoint, name: str, target: Target) -> None:
    require_same_target(
        f"the drafter {name}",
        record.target_fingerprint,
        model=target.spec.model,
        lineage=target.lineage,
    )


def _vocab_of(
    path: str, tensors: dict[str, Tensor], config: DrafterConfig, target_vocab_size: int
) -> DraftVocab:
    """The map inside the weights; it must be the one that the record speaks of."""
    size = config.draft_vocab_size or target_vocab_size
    if "d2t" not in tensors or "t2d" not in tensors:
        raise CheckpointError(f"{path} lacks its vocabulary map (d2t, t2d): use another checkpoint")
    vocab = DraftVocab(tensors["d2t"], tensors["t2d"])
    if (vocab.size, len(vocab.t2d)) != (size, target_vocab_size):
        raise CheckpointError(
            f"{path} maps {vocab.size} draft tokens of {len(vocab.t2d)}, but {DRAFTER_RECORD} and "
            f"the target say {size} of {target_vocab_size}: use another checkpoint"
        )
    return vocab


def _read_tensors(path: Path, expected_sha256: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: the drafter's weights are missing")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != expected_sha256:
        raise CheckpointError(
            f"{path} is truncated or changed (sha256 {found[:12]}, recorded "
            f"{expected_sha256[:12]}): use another checkpoint, or train again"
        )
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    return tensors


def require_finite(path: Path | str, name: str, tensor: Tensor) -> None:
    """Raise CheckpointError naming file and tensor if a number is NaN or infinite."""
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{path}: tensor {name} holds NaN or infinite numbers: use an earlier checkpoint"
        )
