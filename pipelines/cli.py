"""The command line: `paceline WORKFLOW [recipe=NAME|FILE.yaml] [key=value ...]`.

`python -m paceline.pipelines.WORKFLOW` is the same. A workflow's module is imported only once its
configuration holds, so that help, recipes, --print-config and mistakes answer without torch.

Exit codes: 0 done, 1 a fault of Paceline's (with its traceback), 2 something the user can mend (one
line on standard error), 130 interrupted.
"""

from __future__ import annotations

import importlib
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.pipelines.config import load_config, recipe_config
from paceline.pipelines.recipe_files import RECIPES_FOLDER, recipe_names

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train, measure and export drafters for speculative decoding.",
    epilog="`paceline recipes` lists the recipes; `paceline train --print-config` shows every key.",
)

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]...", help="recipe=NAME|FILE.yaml and any key to change."),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the resolved configuration and stop.")
]
ShowTraceback = Annotated[
    bool, typer.Option("--traceback", help="Show where in the code an error comes from.")
]


def _guarded(workflow: str, show_traceback: bool, work: Callable[[], None]) -> None:
    """Runs `work`; errors of the user's become one line and exit code 2.

    SIGTERM, as `ray job stop` and schedulers send it, ends a run like Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work()
    except (ValueError, OSError) as error:
        if show_traceback:
            traceback.print_exc()
        print(f"paceline {workflow}: error: {_cause(error)}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        print(f"paceline {workflow}: interrupted", file=sys.stderr)
        raise SystemExit(130) from error


def _cause(error: Exception) -> BaseException:
    """What an actor raised, rather than Ray's report of it with the actor's traceback."""
    if "ray" in sys.modules:
        from ray.exceptions import RayTaskError

        while isinstance(error, RayTaskError):
            error = error.cause
    return error


def _run(
    workflow: str, settings: list[str] | None, print_config: bool, show_traceback: bool
) -> None:
    def work() -> None:
        config = load_config(workflow, settings or [])
        if print_config:
            print(config.to_yaml(), end="")
            return
        module = importlib.import_module(f"paceline.pipelines.{workflow}")
        module.main(list(settings or []))

    _guarded(workflow, show_traceback, work)


@app.command()
def collect(
    settings: Settings = None,
    print_config: PrintConfig = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Let the target answer prompts and keep its hidden states."""
    _run("collect", settings, print_config, show_traceback)


@app.command()
def train(
    settings: Settings = None,
    print_config: PrintConfig = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Roll out, train a drafter meanwhile, and measure it; resume=RUN continues a run."""
    _run("train", settings, print_config, show_traceback)


@app.command()
def evaluate(
    settings: Settings = None,
    print_config: PrintConfig = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Measure drafter=DIR on held-out prompts; json=FILE keeps the records."""
    _run("evaluate", settings, print_config, show_traceback)


@app.command()
def export(
    settings: Settings = None,
    print_config: PrintConfig = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Write drafter=DIR as format=vllm|sglang|speculators to out=DIR."""
    _run("export", settings, print_config, show_traceback)


@app.command()
def report(
    settings: Settings = None,
    print_config: PrintConfig = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Write the HTML report of run=DIR."""
    _run("report", settings, print_config, show_traceback)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="engine")],
    settings: Settings = None,
    show_traceback: ShowTraceback = False,
) -> None:
    """Measure a part beside its peers; json=FILE keeps the figures, small=true does less."""

    def work() -> None:
        load_config("bench", settings or [])
        module = importlib.import_module("paceline.pipelines.bench")
        module.main([name, *(settings or [])])

    _guarded("bench", show_traceback, work)


@app.command()
def recipes() -> None:
    """List the recipes of this package."""

    def work() -> None:
        table = Table("recipe", "method", "what it is")
        for name in recipe_names():
            table.add_row(name, recipe_config(name).drafter.method, describe_recipe(name))
        Console().print(table)

    _guarded("recipes", False, work)


def describe_recipe(name: str) -> str:
    """The comment a recipe begins with, its first paragraph on one line."""
    lines = []
    for line in (RECIPES_FOLDER / f"{name}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def run_as_module(workflow: str) -> None:
    """What `python -m paceline.pipelines.WORKFLOW` calls: the same as `paceline WORKFLOW`."""
    app([workflow, *sys.argv[1:]], prog_name="paceline")


def main() -> None:
    """The `paceline` command."""
    app(prog_name="paceline")
