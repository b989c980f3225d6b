"""The house keeps its shape: imports point down, each library has its door, files stay small.

kernels <- models <- actors <- pipelines. The checks read the source and import nothing.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
LAYERS = ("kernels", "models", "actors", "pipelines")
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60

# Where a library may be imported: a folder, or one file.
DOORS = {
    "ray": ("actors/", "pipelines/"),
    "mlflow": ("actors/tracker.py",),
    "triton": ("kernels/fused/",),
    "vllm": ("actors/engines/vllm_engine.py",),
}

# Imported before a command line is known to be right, so that mistakes answer at once.
LIGHT_FILES = (
    "models/config.py",
    "actors/config.py",
    "pipelines/config.py",
    "pipelines/recipe_files.py",
    "pipelines/cli.py",
    "pipelines/provenance.py",
)
HEAVY = {"torch", "transformers", "datasets", "deepspeed", "mlflow", "matplotlib"}


def source_files() -> list[str]:
    return sorted(
        str(path.relative_to(REPOSITORY))
        for layer in LAYERS
        for path in (REPOSITORY / layer).rglob("*.py")
    )


def imported_modules(source: str) -> Iterator[str]:
    """Every module the source imports, at the top or inside a function; "." for a relative one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "."
            else:
                yield node.module or ""
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_faults(path: str, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path`, relative to the repository."""
    layer = path.split("/")[0]
    faults = []
    for module in imported_modules(source):
        root, *rest = module.split(".")
        if root in LAYERS or module == ".":
            faults.append(f"{path} imports {module}: write paceline.{module}")
        if root == "paceline" and rest and LAYERS.index(rest[0]) > LAYERS.index(layer):
            faults.append(f"{path} imports {module}, which is above {layer}")
        if root in DOORS and not path.startswith(DOORS[root]):
            faults.append(f"{path} imports {root}: only {' and '.join(DOORS[root])} may")
    return faults


def long_functions(path: str, source: str) -> list[str]:
    return [
        f"{path}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


@pytest.mark.parametrize("path", source_files())
def test_imports_point_down_and_go_through_the_doors(path: str) -> None:
    assert import_faults(path, (REPOSITORY / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/a.py", "import paceline.models.records"),
        ("models/a.py", "def f():\n    from paceline.actors.tracker import Tracker"),
        ("models/a.py", "from paceline import actors"),
        ("actors/a.py", "from paceline.pipelines import train"),
        ("models/a.py", "import kernels.losses"),
        ("models/a.py", "from . import records"),
        ("models/a.py", "import ray"),
        ("actors/cache.py", "import mlflow.tracking"),
        ("kernels/losses.py", "import triton.language as tl"),
        ("actors/rollout_worker.py", "from vllm import LLM"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str) -> None:
    assert import_faults(path, source) != []


@pytest.mark.parametrize("path", LIGHT_FILES)
def test_what_the_command_line_reads_first_imports_nothing_heavy(path: str) -> None:
    source = (REPOSITORY / path).read_text()
    assert {m.split(".")[0] for m in imported_modules(source)} & HEAVY == set()


def test_the_four_folders_have_no_init_file() -> None:
    found = [path for layer in LAYERS for path in (REPOSITORY / layer).rglob("__init__.py")]
    assert found == [], "a package named kernels hides the Hugging Face one: remove these"


def test_the_import_root_is_an_empty_file_and_four_relative_links() -> None:
    root = REPOSITORY / "paceline"
    assert (root / "__init__.py").read_text() == ""
    links = {path.name: os.readlink(path) for path in root.iterdir() if path.is_symlink()}
    assert links == {layer: f"../{layer}" for layer in LAYERS}
    kept = {path.name for path in root.iterdir()} - set(links) - {"__pycache__"}
    assert kept == {"__init__.py"}


@pytest.mark.parametrize("path", source_files())
def test_files_and_functions_stay_small_and_say_what_they_are_for(path: str) -> None:
    source = (REPOSITORY / path).read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert long_functions(path, source) == []
    assert ast.get_docstring(ast.parse(source)), f"{path} has no docstring"


def test_a_long_function_is_found() -> None:
    body = "\n".join("    x = 1" for _ in range(MAX_FUNCTION_LINES))
    assert long_functions("a.py", f"def f():\n{body}\n") == ["a.py:1 f has 61 lines"]
    assert long_functions("a.py", f"def f():\n{body[10:]}\n") == []


def test_no_file_is_called_utils() -> None:
    assert [path for path in source_files() if Path(path).stem in {"utils", "helpers"}] == []
