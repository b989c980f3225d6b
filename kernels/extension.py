"""C++ kernels: built by torch's extension loader on first use, kept, and done without where that
is not possible (no compiler, another processor).

The library lies in the cache folder (`PACELINE_CACHE`, default `~/.cache/paceline`) under a name
that follows from its source, the flags and torch's version. Each process builds into a folder of
its own and renames the result, so that workers which start together neither wait for a lock that a
killed one left behind nor load half a file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).resolve().parent / "native"
FLAGS = ("-O3", "-mavx2", "-mfma", "-fopenmp")
CAPABILITIES = ("AVX2", "AVX512")
"""Processors, in torch's words, that the flags suit."""

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Folder of what is made once on a machine: converted targets, built kernels."""
    return Path(os.environ.get("PACELINE_CACHE", Path.home() / ".cache" / "paceline"))


@cache
def load_extension(name: str) -> bool:
    """Make torch.ops.paceline.NAME available from native/NAME.cpp; False if that cannot be.

    The first call on a machine compiles, for some ten seconds.
    """
    if torch.backends.cpu.get_cpu_capability() not in CAPABILITIES:
        return False
    source = SOURCES / f"{name}.cpp"
    key = hashlib.sha256(repr((FLAGS, torch.__version__)).encode())
    for file in (source, *sorted(SOURCES.glob("*.h"))):
        key.update(file.read_bytes())
    library = cache_folder() / "native" / key.hexdigest()[:16] / f"{name}.so"
    if not library.exists() and not _build(source, library):
        return False
    try:
        torch.ops.load_library(library)
    except OSError as error:
        logger.warning("%s cannot be loaded (%s): decoding on CPU is slower", library, error)
        return False
    return True


def _build(source: Path, library: Path) -> bool:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        logger.warning(
            "there is no C++ compiler %s, so %s is not built: decoding on CPU is slower",
            compiler,
            source.name,
        )
        return False
    from torch.utils.cpp_extension import load

    logger.info("building %s, once on this machine", source.name)
    library.parent.mkdir(parents=True, exist_ok=True)
    path = os.environ.get("PATH", "")
    # ninja comes with a package of this environment, which need not be activated.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), path))
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            load(
                name=source.stem,
                sources=[str(source)],
                extra_cflags=list(FLAGS),
                build_directory=folder,
                is_python_module=False,
            )
            os.replace(Path(folder) / f"{source.stem}.so", library)
    except (RuntimeError, OSError) as error:
        logger.warning("%s cannot be built: decoding on CPU is slower (%s)", source.name, error)
        return False
    finally:
        os.environ["PATH"] = path
    return True
