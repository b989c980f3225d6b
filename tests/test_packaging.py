"""Paceline beside the Hugging Face `kernels` package: from a clone, a wheel, an editable install.

transformers imports from whatever answers to the name `kernels` once a distribution of that name
has a version it accepts. Each case loads a Llama with such a distribution present (a fake one) and
imports paceline.kernels in the same process. The case of a Ray job is in pipelines/test_ray_job.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)

PROBE = """
import importlib.metadata, pathlib, sys
import transformers.utils.import_utils as lookup
from transformers import LlamaConfig, LlamaForCausalLM

assert lookup.is_kernels_available(), importlib.metadata.version("kernels")
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))

import kernels
import paceline, paceline.kernels, paceline.models.records
import paceline.kernels.verification
from paceline.pipelines.recipe_files import recipe_names

assert kernels.CUDAProperties and not hasattr(paceline.kernels, "CUDAProperties")
workload = pathlib.Path(paceline.__file__).parent / "pipelines" / "workload"
print("paceline:", pathlib.Path(paceline.__file__).parent)
print("kernels:", pathlib.Path(kernels.__file__).parent)
print("recipes:", *recipe_names())
print("workload:", *sorted(path.name for path in workload.glob("*.jsonl")))
"""


def probe(python: Path | str, folder: Path, *, pythonpath: str = "") -> dict[str, str]:
    """What PROBE prints when `python` runs it in `folder`."""
    done = subprocess.run(
        [python, "-c", PROBE],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": pythonpath},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (line.partition(":") for line in done.stdout.splitlines())
    return {name: value.strip() for name, _, value in lines}


def make_environment(folder: Path, fake_kernels: Path) -> tuple[Path, Path]:
    """A virtual environment that sees this one's packages but not its Paceline; python and site."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.copytree(fake_kernels, site, dirs_exist_ok=True)
    return folder / "bin" / "python", site


def pip(python: Path | str, *arguments: str | Path) -> None:
    """pip of this environment working on that of `python`; builds use the setuptools of ours."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--python", python, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, checkout)
    (built,) = folder.glob("paceline-*.whl")
    return built


def test_a_clean_clone_works_beside_the_hugging_face_kernels(
    checkout: Path, fake_kernels: Path
) -> None:
    seen = probe(sys.executable, checkout, pythonpath=str(fake_kernels))
    assert seen["paceline"] == str(checkout / "paceline")
    assert seen["kernels"] == str(fake_kernels / "kernels")
    assert "quickstart" in seen["recipes"]


def test_a_wheel_works_beside_the_hugging_face_kernels(
    wheel: Path, fake_kernels: Path, tmp_path: Path
) -> None:
    python, site = make_environment(tmp_path / "venv", fake_kernels)
    before = (site / "kernels" / "__init__.py").read_bytes()
    pip(python, "install", "--no-deps", "--ignore-installed", wheel)
    assert (site / "kernels" / "__init__.py").read_bytes() == before
    seen = probe(python, tmp_path)
    assert seen["paceline"] == str(site / "paceline")
    assert seen["kernels"] == str(site / "kernels")
    assert "quickstart" in seen["recipes"]
    assert seen["workload"] == "heldout.jsonl train.jsonl"


def test_an_editable_install_works_beside_the_hugging_face_kernels(
    checkout: Path, fake_kernels: Path, tmp_path: Path
) -> None:
    python, site = make_environment(tmp_path / "venv", fake_kernels)
    install = ["install", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    pip(python, *install, "--editable", checkout)
    seen = probe(python, tmp_path)
    assert seen["paceline"] == str(checkout / "paceline")
    assert seen["kernels"] == str(site / "kernels")
    assert "quickstart" in seen["recipes"]


def test_an_init_file_in_our_kernels_would_break_transformers(
    checkout: Path, fake_kernels: Path, tmp_path: Path
) -> None:
    """Why the four folders have none: the same probe fails, so it can tell."""
    ours = tmp_path / "kernels"
    ours.mkdir()
    (ours / "__init__.py").write_text("")
    (tmp_path / "paceline").symlink_to(checkout / "paceline")
    with pytest.raises(AssertionError, match="cannot import name 'CUDAProperties'"):
        probe(sys.executable, tmp_path, pythonpath=str(fake_kernels))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"paceline"}
    assert not [name for name in names if "test" in name]
    assert "paceline/kernels/native/skinny_linear.cpp" in names
    assert [name for name in names if name.endswith("/__init__.py")] == ["paceline/__init__.py"]


def test_every_folder_with_code_is_listed_for_the_wheel(repository: Path) -> None:
    settings = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        ".".join(("paceline", *path.parent.relative_to(repository).parts))
        for layer in ("kernels", "models", "actors", "pipelines")
        for path in (repository / layer).rglob("*.py")
    }
    assert set(settings["packages"]) == {"paceline", *folders}


def test_ray_accepts_the_cluster_file(repository: Path) -> None:
    import yaml
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((repository / "cluster.yaml").read_text())
    validate_config(prepare_config(config))
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert any("RAY_AUTH_MODE=token" in command for command in commands)
