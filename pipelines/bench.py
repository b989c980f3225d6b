"""Measure a part of Paceline beside its peers on the machine at hand.

paceline bench engine json=engine.json
paceline bench engine drafter=runs/x/drafter small=true
"""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.pipelines.config import ConfigError, load_config
from paceline.pipelines.figure_document import Figure, figure_document, write_document

BENCHES = ("engine",)


def main(argv: list[str] | None = None) -> None:
    """Run one bench, print its figures, and write `json=` if given."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in BENCHES:
        raise ConfigError(f"paceline bench needs a name: {', '.join(BENCHES)}")
    name = argv[0]
    config = load_config("bench", argv[1:])
    figures: dict[str, Figure] = importlib.import_module(
        f"paceline.pipelines.benches.{name}"
    ).figures(config)
    print_figures(figures)
    if config.json_path is not None:
        document = figure_document(
            name,
            shlex.join(["paceline", "bench", *argv]),
            config.model_dump(mode="json", by_alias=True),
            figures,
        )
        write_document(Path(config.json_path), document)
        print(f"wrote {config.json_path}")


def print_figures(figures: dict[str, Figure]) -> None:
    """Name, value, quartiles where there are any, and which direction is better."""
    table = Table("figure", "value", "low", "high", "unit", "better", "n")
    for name, entry in figures.items():
        spread = (f"{entry[key]:.3f}" if key in entry else "" for key in ("low", "high"))
        value = f"{entry['value']:.3f}"
        table.add_row(name, value, *spread, entry["unit"], entry["better"], str(entry["n"]))
    Console(width=None if Console().is_terminal else 120).print(table)


if __name__ == "__main__":
    from paceline.pipelines.cli import run_as_module

    run_as_module("bench")
