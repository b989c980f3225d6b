"""Tensor names of exported drafters, in both directions, and the vocabulary map's checks.

Engines agree on almost every name; they differ in the prefix of EAGLE-3's one layer (`midlayer.` or
`layers.0.`). A tensor without an engine name is refused, never dropped: SGLang skips unknown keys
silently, and a drafter with a missing part still serves, only badly.

Shapes: V target vocabulary, Vd draft vocabulary, D drafter width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.vocab import DraftVocab, full_vocab

MASK_EMBEDDING = "backbone.mask_embedding"
CONSTANT_NAMES = (
    ("fuser.fc.", "fc."),
    ("fuser.fc_norm.", "fc_norm."),
    ("backbone.context_norm.", "hidden_norm."),
    ("backbone.norm.", "norm."),
    ("lm_head.", "lm_head."),
)


def renames(kind: str, layer_prefix: str) -> tuple[tuple[str, str], ...]:
    """(our prefix, the engine's prefix) for a backbone kind; `layer_prefix` is EAGLE-3's layer."""
    layers = ("backbone.layers.", "layers.")
    if kind == "autoregressive":
        layers = ("backbone.layers.0.", layer_prefix)
    return (*CONSTANT_NAMES, layers)


def to_engine(state: dict[str, Tensor], names: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    """A drafter's state under engine names; the vocabulary map is in it only if it is reduced.

    Raises ValueError for a tensor that no engine knows, one that is not finite, and a vocabulary
    map that is not one.
    """
    vocab = DraftVocab(state["d2t"], state["t2d"])
    check_vocab(vocab, state["lm_head.weight"])
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name in ("d2t", "t2d", MASK_EMBEDDING):
            continue
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"the drafter's {name} holds values that are not finite: training diverged; "
                "export an earlier checkpoint or train with a lower trainer.lr"
            )
        tensors[_renamed(name, names)] = tensor.detach().contiguous().cpu()
    if vocab.size < len(vocab.t2d):
        tensors["d2t"] = vocab.d2t.cpu().to(torch.int64)
        tensors["t2d"] = vocab.t2d.cpu()
    return tensors


def from_engine(
    tensors: dict[str, Tensor], names: tuple[tuple[str, str], ...], vocab_size: int
) -> dict[str, Tensor]:
    """The inverse of `to_engine`; without a map the vocabulary is the target's of `vocab_size`."""
    back = tuple((theirs, ours) for ours, theirs in names)
    state = {_renamed(name, back): t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    full = full_vocab(vocab_size)
    state["d2t"] = tensors.get("d2t", full.d2t)
    state["t2d"] = tensors.get("t2d", full.t2d)
    return state


def _renamed(name: str, names: tuple[tuple[str, str], ...]) -> str:
    for prefix, other in names:
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    raise ValueError(
        f"tensor {name} has no counterpart in this format, and leaving it out would change what "
        "the drafter proposes: export to another format or train a drafter without that part"
    )


def check_vocab(vocab: DraftVocab, lm_head_VdD: Tensor) -> None:
    """Raise ValueError unless d2t holds offsets that ascend, agree with t2d and fit lm_head."""
    ids = vocab.target_ids
    kept = vocab.t2d.nonzero()[:, 0]
    if len(ids) != len(lm_head_VdD) or not torch.equal(ids, kept):
        raise ValueError(
            f"the draft vocabulary is broken: d2t has {len(ids)} offsets, t2d keeps {len(kept)} "
            f"target ids and lm_head has {len(lm_head_VdD)} rows, and draft_id + d2t[draft_id] "
            "must list the kept ids in order; the drafter's files belong to different runs"
        )
