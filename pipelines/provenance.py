"""What a run was: command, git revision, package versions, machine and resolved configuration.

Every workflow writes it into its folder at the start, as provenance.json and config.yaml, and the
tracker keeps both files as artifacts. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.pipelines.config import RESOLVED_CONFIG, RunConfig

PROVENANCE_FILE = "provenance.json"

PACKAGES = (
    "paceline",
    "torch",
    "transformers",
    "ray",
    "deepspeed",
    "mlflow",
    "datasets",
    "pyarrow",
    "safetensors",
    "numpy",
    "triton",
    "vllm",
)


def collect_provenance(
    workflow: str, argv: Sequence[str], config: RunConfig, *, now: datetime | None = None
) -> dict[str, Any]:
    """Everything needed to run it again, as JSON values.

    Passwords within URLs are blotted out of the command; the configuration refuses them itself.
    """
    command = shlex.join(["paceline", workflow, *argv])
    return {
        "command": re.sub(r"(://[^/\s:]*:)[^/\s@]*@", r"\1***@", command),
        "started": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
        "git": git_revision(),
        "versions": package_versions(),
        "machine": machine(),
        "config": config.model_dump(mode="json", by_alias=True),
    }


def write_provenance(folder: Path, provenance: dict[str, Any], config: RunConfig) -> list[Path]:
    """Writes provenance.json and config.yaml into `folder` and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    record, resolved = folder / PROVENANCE_FILE, folder / RESOLVED_CONFIG
    record.write_text(json.dumps(provenance, indent=2) + "\n")
    resolved.write_text(config.to_yaml())
    return [record, resolved]


def package_versions() -> dict[str, str]:
    """Versions of the packages a result depends on; one that is not installed is left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_revision(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the checkout this code runs from, and whether files differ from it.

    None outside a checkout (a wheel, the copy that Ray uploads) and where git is not installed.
    """
    folder = folder or Path(__file__).resolve().parent
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (subprocess.CalledProcessError, FileNotFoundError):
        return None
    return {"commit": commit, "dirty": bool(changed)}


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, system."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": platform.platform(),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
