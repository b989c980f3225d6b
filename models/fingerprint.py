"""Which target something was made for: a hash of config, weights, tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

BIT_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TargetMismatchError(ValueError):
    """Something was made for another target than the one at hand."""


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of vocabulary and chat template."""
    digest = hashlib.sha256()
    digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(str(tokenizer.chat_template).encode())
    return digest.hexdigest()[:16]


def fingerprint(model: Any, tokenizer_hash: str) -> str:
    """Hash of config, weights, tokenizer and chat template.

    Weights enter as name, shape, 64 evenly spread values and the sum of all bit patterns as
    integers: exact in any order of summation, so the same on every device and thread count.
    """
    digest = hashlib.sha256(tokenizer_hash.encode())
    config = model.config.to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(key, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        bits = flat.view(BIT_PATTERNS[flat.element_size()])
        index = torch.arange(64, device=flat.device) * (flat.numel() - 1) // 63
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(str([*bits[index].tolist(), int(bits.sum(dtype=torch.int64))]).encode())
    return digest.hexdigest()[:16]


def require_same_target(what: str, found: str, *, model: str, lineage: Sequence[str]) -> None:
    """Raise TargetMismatchError unless `found` is in the target's lineage, naming both.

    `lineage` are the fingerprints of the target's versions so far: what was made for an earlier
    version of an updated target still belongs to it.
    """
    if found not in lineage:
        raise TargetMismatchError(
            f"{what} was made for the target with fingerprint {found}, but "
            f"target.model={model} has {lineage[-1]}: use the target it was "
            "made for, or make it again for this one"
        )
