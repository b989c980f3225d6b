"""What tests share. The environment is settled before torch or Ray are imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Ray decides by what lies in the home folder when this is unset.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tensors of tests are small: a second thread costs more than it does.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Workers that Ray starts import paceline from this checkout, whatever their working directory is.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of this checkout."""
    return REPOSITORY


@pytest.fixture
def paceline(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `paceline ARGUMENTS...` in its own process, in the test's empty folder."""

    def run(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        script = "import sys; from paceline.pipelines.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of this process alone, for tests of remote actors."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone of the files that belong to this checkout, uncommitted ones included."""
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("needs git and a checkout")

    def git(folder: Path, *arguments: str) -> str:
        return subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", folder, *arguments],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    base = tmp_path_factory.mktemp("checkout")
    for name in git(REPOSITORY, "ls-files", "-co", "--exclude-standard", "-z").split("\0"):
        source = REPOSITORY / name
        if name and (source.is_symlink() or source.is_file()):
            (base / "origin" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, base / "origin" / name, follow_symlinks=False)
    git(base / "origin", "init", "--quiet")
    git(base / "origin", "add", "--all")
    git(base / "origin", "commit", "--quiet", "--message", "all")
    git(base, "clone", "--quiet", "origin", "clone")
    return base / "clone"


FAKE_KERNELS = """
# Stands in for the Hugging Face package of this name: what transformers imports from it is there,
# and does nothing.
import os

if "FAKE_KERNELS_LOG" in os.environ:
    with open(os.environ["FAKE_KERNELS_LOG"], "a") as log:
        log.write(f"{os.getpid()}\\n")


def use_kernel_forward_from_hub(layer_name):
    return lambda layer: layer


def use_kernelized_func(*names):
    return lambda layer: layer


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""


@pytest.fixture(scope="session")
def fake_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds a `kernels` distribution which transformers accepts."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    site = tmp_path_factory.mktemp("fake_kernels")
    package, info = site / "kernels", site / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    (package / "layer").mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(FAKE_KERNELS)
    (package / "layer" / "__init__.py").write_text("")
    (package / "layer" / "mode.py").write_text("class Mode:\n    pass\n")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n"
    )
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    (info / "INSTALLER").write_text("tests\n")
    return site
