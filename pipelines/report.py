"""A run as one self-contained HTML page, with its figures beside it as PNG.

    paceline report run=runs/quickstart

Reads config.yaml of the run's folder, and whatever else is there of evaluate.json, metrics.jsonl,
timeline.jsonl, provenance.json and drafter/drafter.json; writes report.html and figures/*.png. A
run that stopped half-way has a report too.
"""

from __future__ import annotations

import base64
import html
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.pipelines import figures
from paceline.pipelines.config import RESOLVED_CONFIG, load_config

REPORT_FILE = "report.html"
FIGURES_FOLDER = "figures"
EVALUATION_FILE = "evaluate.json"
TRAIN_PREFIX = "train/"

_RECORD_COLUMNS = (
    ("prompts", "num_prompts", ",d"),
    ("acceptance length", "acceptance_length", ".2f"),
    ("by prompt", "acceptance_length_prompt_weighted", ".2f"),
    ("rounds", "num_drafts", ",d"),
    ("plain tokens/s", "plain_tokens_per_second", ".1f"),
    ("speculative tokens/s", "speculative_tokens_per_second", ".1f"),
    ("speed-up", "speedup", ".2f"),
    ("audited tokens", "audit_tokens", ",d"),
    ("ties", "audit_ties", "d"),
    ("mismatches", "audit_mismatches", "d"),
)
_RECORD_KEYS = {
    "domain",
    "temperature",
    "acceptance_histogram",
    "accept_rate_per_pos",
    *(key for _, key, _ in _RECORD_COLUMNS),
}
_NOT_SHOWN = ("config", "shapes", "uri")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What a run's folder says, as far as the run got."""

    name: str
    config: str
    evaluation: dict[str, Any]
    records: dict[str, dict[str, Any]]
    """EvalRecords as JSON, by domain, in the file's order."""
    metrics: dict[str, list[tuple[int, float]]]
    """(step, value) by metric; a step logged again by a resumed run counts once."""
    stages: list[tuple[str, float, float]]
    """(stage, start, end), seconds since 1970."""
    drafter: dict[str, Any]
    provenance: dict[str, Any]


def main(argv: list[str] | None = None) -> None:
    """Writes the report of run=DIR and says where it is."""
    config = load_config("report", sys.argv[1:] if argv is None else argv)
    run = Path(str(config.run))
    if not run.is_dir() and (Path("runs") / run).is_dir():
        run = Path("runs") / run
    print(f"report: {write_report(run)}")


def write_report(run: Path) -> Path:
    """Writes report.html and figures/*.png into a run's folder; returns the page.

    Raises ValueError naming the file (and line) if the folder is no run or a file is damaged.
    """
    files = read_run(run)
    drawn = draw_figures(files, run / FIGURES_FOLDER)
    page = run / REPORT_FILE
    page.write_text(render_page(files, drawn), encoding="utf-8")
    return page


def read_run(run: Path) -> RunFiles:
    """Raises ValueError as `write_report` does."""
    config = run / RESOLVED_CONFIG
    if not config.is_file():
        raise ValueError(f"{config} does not exist: give the folder of a run, such as run=runs/x")
    evaluation = _read_json(run / EVALUATION_FILE)
    metrics: dict[str, dict[int, float]] = {}
    for line in _read_lines(run / "metrics.jsonl", ("name", "step", "value")):
        metrics.setdefault(line["name"], {})[line["step"]] = line["value"]
    stages = _read_lines(run / "timeline.jsonl", ("stage", "start", "end"))
    records = _records_by_domain(run / EVALUATION_FILE, evaluation.get("records", []))
    return RunFiles(
        name=run.resolve().name,
        config=config.read_text(),
        evaluation=evaluation,
        records=records,
        metrics={name: sorted(values.items()) for name, values in metrics.items()},
        stages=[(stage["stage"], stage["start"], stage["end"]) for stage in stages],
        drafter=_read_json(run / "drafter" / "drafter.json"),
        provenance=_read_json(run / "provenance.json"),
    )


def draw_figures(files: RunFiles, folder: Path) -> list[Path]:
    """Draws every figure that the run has numbers for."""
    records = files.records
    draw: dict[str, Callable[[Path], None]] = {}
    training = {
        name.removeprefix(TRAIN_PREFIX): series
        for name, series in files.metrics.items()
        if name.startswith(TRAIN_PREFIX)
    }
    if f"{TRAIN_PREFIX}loss" in files.metrics:
        draw["training_curves"] = lambda path: figures.training_curves(training, path)
    overall = records.get("total") or next(iter(records.values()), None)
    if overall is not None and overall["num_drafts"]:
        histogram = overall["acceptance_histogram"]
        draw["acceptance_histogram"] = lambda path: figures.acceptance_histogram(histogram, path)
        rates = {domain: record["accept_rate_per_pos"] for domain, record in records.items()}
        draw["accept_rate_per_position"] = lambda path: figures.accept_rate_per_position(
            rates, path
        )
    if records:
        speeds = {
            domain: (record["plain_tokens_per_second"], record["speculative_tokens_per_second"])
            for domain, record in records.items()
        }
        draw["speed_by_domain"] = lambda path: figures.speed_by_domain(speeds, path)
    if files.stages:
        draw["stage_timeline"] = lambda path: figures.stage_timeline(files.stages, path)
    for name, draw_into in draw.items():
        draw_into(folder / f"{name}.png")
    return [folder / f"{name}.png" for name in draw]


def render_page(files: RunFiles, drawn: Sequence[Path]) -> str:
    """The page, with the figures inside it."""
    parts = [f"<h1>{html.escape(files.name)}</h1>", _subtitle(files), _headline(files)]
    parts += [_image(path) for path in drawn if path.stem != "stage_timeline"]
    if files.records:
        parts += ["<h2>Evaluation</h2>", _records_table(files.records)]
    if files.evaluation.get("figures"):
        parts += ["<h2>Figures</h2>", _figures_table(files.evaluation["figures"])]
    if files.drafter:
        shown = {key: value for key, value in files.drafter.items() if key not in _NOT_SHOWN}
        parts += ["<h2>Drafter</h2>", _table(("field", "value"), list(shown.items()))]
    parts += [_image(path) for path in drawn if path.stem == "stage_timeline"]
    parts.append(_details("Configuration", files.config))
    if files.provenance:
        parts.append(_details("Provenance", json.dumps(files.provenance, indent=2)))
    return PAGE.format(title=html.escape(files.name), body="\n".join(parts))


def _subtitle(files: RunFiles) -> str:
    command = files.provenance.get("command") or files.evaluation.get("command")
    date = files.provenance.get("started") or files.evaluation.get("date")
    facts = [f"<code>{html.escape(command)}</code>"] if command else []
    return f"<p>{', '.join([*facts, *([html.escape(date)] if date else [])])}</p>"


def _headline(files: RunFiles) -> str:
    total = files.records.get("total")
    if total is None:
        return "<p>This run has not been evaluated.</p>"
    audited = f"{total['audit_tokens']:,} tokens, {total['audit_ties']} ties"
    untrained = files.evaluation.get("figures", {}).get("acceptance_length_untrained")
    before = f"; untrained {untrained['value']:.2f}" if untrained else ""
    tiles = [
        (f"{total['acceptance_length']:.2f}", f"acceptance length, bonus token included{before}"),
        (f"{total['speedup']:.2f}×", "speculative over plain decoding"),
        (f"{total['audit_mismatches']}", f"mismatches in the greedy audit ({audited})"),
    ]
    if total["temperature"] > 0:
        tiles[2] = ("-", "no greedy audit at a temperature above 0")
    cells = (f"<div><b>{value}</b>{html.escape(label)}</div>" for value, label in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _records_table(records: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (domain, *(format(record[key], form) for _, key, form in _RECORD_COLUMNS))
        for domain, record in records.items()
    ]
    return _table(("domain", *(title for title, _, _ in _RECORD_COLUMNS)), rows)


def _figures_table(named: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ("value", "unit", "better", "n", "low", "high")
    rows = [
        (name, *(_number(figure.get(column, "")) for column in columns))
        for name, figure in named.items()
    ]
    return _table(("figure", *columns), rows)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    alt = html.escape(path.stem.replace("_", " "))
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">'


def _details(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary><pre>{html.escape(text)}</pre></details>"


def _records_by_domain(path: Path, records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for record in records:
        if missing := _RECORD_KEYS - record.keys():
            raise ValueError(
                f"{path}: records: {record.get('domain')!r} lacks {', '.join(sorted(missing))}: "
                "evaluate again with `paceline evaluate`"
            )
    return {record["domain"]: record for record in records}


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object; an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): make it again or remove it") from error


def _read_lines(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Objects of a JSON lines file; a last line that a crash cut short is left out."""
    if not path.is_file():
        return []
    text = path.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    objects = []
    for number, line in enumerate(lines, start=1):
        try:
            objects.append({key: json.loads(line)[key] for key in keys})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: needs {', '.join(keys)}, but {error!r}: remove the line"
            ) from error
    return objects


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #0b0b0b; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }}
code, pre {{ font: 13px/1.45 ui-monospace, monospace; }}
pre {{ background: #f6f5f2; padding: 1rem; overflow-x: auto; }}
img {{ max-width: 100%; display: block; margin: 1.5rem 0; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
.tiles div {{ flex: 1 1 12rem; border: 1px solid #e4e3df; border-radius: 8px; padding: .8rem 1rem;
  color: #52514e; }}
.tiles b {{ display: block; font-size: 1.9rem; line-height: 1.2; color: #0b0b0b; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .3rem .8rem; border-bottom: 1px solid #e4e3df; }}
th {{ color: #52514e; font-weight: 500; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
details {{ margin: 1rem 0; }}
</style>
{body}
</html>
"""


if __name__ == "__main__":
    from paceline.pipelines.cli import run_as_module

    run_as_module("report")
