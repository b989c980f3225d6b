"""A run's report shows what the run reached, whole in one file, however far the run got."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.pipelines.report import read_run, write_report

PNG = b"\x89PNG\r\n\x1a\n"


def record(domain: str, **changes: Any) -> dict[str, Any]:
    return {
        "domain": domain,
        "num_prompts": 20,
        "num_speculative_tokens": 3,
        "temperature": 0.0,
        "acceptance_length": 1.87,
        "acceptance_length_prompt_weighted": 1.91,
        "acceptance_histogram": [40, 30, 20, 10],
        "accept_rate_per_pos": [0.6, 0.3, 0.1],
        "num_drafts": 100,
        "num_draft_tokens": 300,
        "num_accepted_tokens": 100,
        "plain_tokens_per_second": 13.25,
        "speculative_tokens_per_second": 19.5,
        "speedup": 1.47,
        "audit_tokens": 5120,
        "audit_ties": 2,
        "audit_mismatches": 0,
        "target_fingerprint": "fp-a",
        "target_version": 0,
        "drafter_version": 1,
        "device": "cpu",
        **changes,
    }


def metric(step: int, name: str, value: float) -> str:
    return json.dumps({"step": step, "name": name, "value": value, "time": 0.0}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as a finished train run leaves it."""
    folder = tmp_path / "quick"
    (folder / "drafter").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: quick\nseed: 7\n")
    figures = {
        "acceptance_length_untrained": {"value": 1.02, "unit": "tokens/round", "better": "higher"}
    }
    records = [record("math"), record("<script>$x_"), record("total")]
    evaluation = {"command": "paceline train", "figures": figures, "records": records}
    (folder / "evaluate.json").write_text(json.dumps(evaluation))
    (folder / "metrics.jsonl").write_text(
        "".join(
            metric(step, f"train/{name}", value / step)
            for step in range(1, 40)
            for name, value in (("loss", 8.0), ("accuracy_pos_0", 0.5), ("accuracy_pos_10", 0.1))
        )
        + metric(3, "rollout/tokens_per_second", 210.0)
    )
    stages = [("rollout", 100.0, 400.0), ("train", 120.0, 700.0), ("rollout", 450.0, 500.0)]
    (folder / "timeline.jsonl").write_text(
        "".join(
            json.dumps({"stage": name, "start": start, "end": end}) + "\n"
            for name, start, end in stages
        )
    )
    drafter = {"method": "dflash", "sha256": "c0ffee", "config": {"hidden": "not shown"}}
    (folder / "drafter" / "drafter.json").write_text(json.dumps(drafter))
    return folder


class Page(HTMLParser):
    """Text, tags and image sources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.images: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.images += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def test_a_finished_run_is_shown_whole_in_one_file(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html"
    page = Page(path.read_text())
    for expected in ("1.87", "1.47×", "0", "13.2", "19.5", "dflash", "c0ffee", "<script>$x_"):
        assert expected in page.words, expected
    text = " ".join(page.words)
    assert "untrained 1.02" in text and "5,120 tokens, 2 ties" in text and "seed: 7" in text
    assert "not shown" not in text
    assert "script" not in page.tags, "names must be escaped"
    figures = sorted((run / "figures").glob("*.png"))
    assert [figure.stem for figure in figures] == [
        "accept_rate_per_position",
        "acceptance_histogram",
        "speed_by_domain",
        "stage_timeline",
        "training_curves",
    ]
    embedded = {base64.b64decode(image.partition("base64,")[2]) for image in page.images}
    assert embedded == {figure.read_bytes() for figure in figures}
    assert all(data.startswith(PNG) for data in embedded)
    assert not re.search(r"(src|href)=\"(?!data:)", path.read_text()), "nothing is loaded from afar"


def test_figures_show_the_numbers_they_are_given(run: Path) -> None:
    write_report(run)
    before = {path.stem: path.read_bytes() for path in (run / "figures").iterdir()}
    write_report(run)
    again = {path.stem: path.read_bytes() for path in (run / "figures").iterdir()}
    assert again == before, "the same numbers give the same pictures"
    evaluation = json.loads((run / "evaluate.json").read_text())
    evaluation["records"][2]["acceptance_histogram"] = [10, 20, 30, 40]
    (run / "evaluate.json").write_text(json.dumps(evaluation))
    write_report(run)
    changed = {
        path.stem for path in (run / "figures").iterdir() if path.read_bytes() != before[path.stem]
    }
    assert changed == {"acceptance_histogram"}


def test_a_run_that_only_has_a_configuration_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: bare\n")
    page = Page(write_report(tmp_path).read_text())
    assert "This run has not been evaluated." in page.words
    assert page.images == []
    assert "name: bare" in " ".join(page.words)


def test_a_step_logged_again_by_a_resumed_run_counts_once(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(metric(39, "train/loss", 0.125) + metric(40, "train/loss", 0.1))
        file.write('{"step": 41, "name": "train/lo')  # the run was killed here
    series = read_run(run).metrics["train/loss"]
    assert series[-2:] == [(39, 0.125), (40, 0.1)]
    assert len(series) == 40


def test_few_values_and_no_accepted_token_still_draw(run: Path) -> None:
    (run / "metrics.jsonl").write_text(
        metric(1, "train/loss", float("nan")) + metric(2, "train/loss", 3.0)
    )
    nothing = record(
        "total",
        temperature=0.7,
        acceptance_histogram=[5],
        accept_rate_per_pos=[],
        num_drafts=5,
        plain_tokens_per_second=0.0,
    )
    (run / "evaluate.json").write_text(json.dumps({"records": [nothing]}))
    page = Page(write_report(run).read_text())
    assert len(page.images) == 5
    assert "no greedy audit at a temperature above 0" in page.words


def test_damaged_files_are_named_with_line_and_remedy(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere/config\.yaml does not exist.*run=runs/x"):
        write_report(tmp_path / "nowhere")
    metrics = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(metric(1, "train/loss", 1.0) + '{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: needs name, step, value"):
        write_report(run)
    (run / "metrics.jsonl").write_text(metrics)
    incomplete = record("total")
    del incomplete["speedup"]
    (run / "evaluate.json").write_text(json.dumps({"records": [incomplete]}))
    with pytest.raises(ValueError, match=r"evaluate\.json: records: 'total' lacks speedup"):
        write_report(run)
    (run / "evaluate.json").write_text("{")
    with pytest.raises(ValueError, match=r"evaluate\.json is not JSON"):
        write_report(run)


def test_the_command_writes_the_report_and_says_where(
    run: Path, paceline: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = paceline("report", f"run={run}")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"report: {run / 'report.html'}" in done.stdout
    missing = paceline("report", "run=runs/none")
    assert missing.returncode == 2
    assert "runs/none/config.yaml does not exist" in missing.stderr
