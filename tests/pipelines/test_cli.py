"""The command line answers without torch, and turns mistakes into one line and an exit code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from typer.testing import CliRunner

from paceline.pipelines import cli
from paceline.pipelines.config import WORKFLOWS, RunConfig
from paceline.pipelines.recipe_files import recipe_names

Paceline = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["recipes"],
        ["train", "--print-config"],
        ["train", "recipe=debug", "trainer.stpes=3"],
    ],
)
def test_answers_come_without_torch_or_ray(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from paceline.pipelines.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print('loaded:', *sorted({'torch', 'ray'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "loaded:", done.stderr


def test_help_names_every_workflow() -> None:
    shown = CliRunner().invoke(cli.app, ["--help"]).output
    for command in ("collect", "train", "evaluate", "export", "report", "recipes"):
        assert command in shown


def test_recipes_are_listed_with_method_and_purpose(paceline: Paceline) -> None:
    done = paceline("recipes")
    assert done.returncode == 0
    for name in recipe_names():
        assert name in done.stdout
    assert "DFlash: a block of tokens drafted in one pass" in done.stdout


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_begins_with_what_it_is(name: str) -> None:
    assert len(cli.describe_recipe(name)) > 20
    assert name == "debug" or "arXiv" in cli.describe_recipe(name)


def test_the_printed_configuration_is_yaml_that_loads(paceline: Paceline) -> None:
    done = paceline("train", "recipe=debug", "seed=7", "--print-config")
    assert done.returncode == 0, done.stderr
    assert RunConfig.model_validate(yaml.safe_load(done.stdout)).seed == 7


def test_a_mistake_is_one_line_and_exit_code_2(paceline: Paceline) -> None:
    done = paceline("train", "recipe=debug", "trainer.stpes=3")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("paceline train: error: unknown key trainer.stpes")
    assert "Traceback" in paceline("train", "trainer.stpes=3", "--traceback").stderr


def run_with(
    monkeypatch: pytest.MonkeyPatch, main: Callable[[list[str]], None], *arguments: str
) -> int:
    """Exit code of `paceline train ARGUMENTS...` where the workflow is `main`."""
    module = ModuleType("paceline.pipelines.train")
    monkeypatch.setattr(module, "main", main, raising=False)
    monkeypatch.setitem(sys.modules, "paceline.pipelines.train", module)
    return CliRunner().invoke(cli.app, ["train", *arguments]).exit_code


def test_the_workflow_gets_the_arguments_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    assert run_with(monkeypatch, seen.append, "recipe=debug", "seed=7") == 0
    assert seen == [["recipe=debug", "seed=7"]]


def test_exit_codes_tell_the_users_mistakes_from_interrupts_and_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails_with(error: BaseException) -> Callable[[list[str]], None]:
        def main(argv: list[str]) -> None:
            raise error

        return main

    codes = {
        error: run_with(monkeypatch, fails_with(error))
        for error in (ValueError("x"), OSError("disk full"), KeyboardInterrupt(), RuntimeError())
    }
    assert list(codes.values()) == [2, 2, 130, 1]


def test_an_error_inside_an_actor_is_shown_as_the_actor_raised_it() -> None:
    from ray.exceptions import RayTaskError

    inner = ValueError("prompts.jsonl:3: no messages")
    error = RayTaskError("generate", "Traceback: many lines", inner).as_instanceof_cause()
    assert isinstance(error, ValueError)
    assert cli._cause(error) is inner


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_workflow_run_as_a_module_is_the_command(workflow: str, repository: Path) -> None:
    source = (repository / "pipelines" / f"{workflow}.py").read_text()
    assert source.rstrip().endswith(f'run_as_module("{workflow}")')
