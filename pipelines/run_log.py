"""One workflow run: its folder, its MLflow runs, its metrics on disk and its end, however it comes.

    with open_run("train", argv, config) as run:
        with run.stage("rollout") as stage:
            stage.log({"tokens_per_second": 210.0}, step=1)

The folder keeps config.yaml, provenance.json, metrics.jsonl (a line per value) and timeline.jsonl
(a line per stage). Ctrl-C closes the MLflow runs as KILLED, an error as FAILED.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.actors.tracker import RunStatus, Tracker, tracking_uri
from paceline.pipelines.config import RESOLVED_CONFIG, ConfigError, RunConfig
from paceline.pipelines.provenance import collect_provenance, write_provenance

METRICS_FILE = "metrics.jsonl"
TIMELINE_FILE = "timeline.jsonl"


@dataclass(frozen=True, slots=True)
class Stage:
    """A child run."""

    run: RunLog
    run_id: str

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record values at a step, in MLflow and in the run's folder."""
        self.run.tracker.log(self.run_id, metrics, step)
        now = time.time()
        with (self.run.out / METRICS_FILE).open("a") as file:
            for name, value in metrics.items():
                line = {"step": step, "name": name, "value": float(value), "time": now}
                file.write(json.dumps(line) + "\n")


class RunLog:
    """The parent run. Open it with `open_run`."""

    def __init__(self, out: Path, tracker: Tracker, run_id: str) -> None:
        self.out = out
        self.tracker = tracker
        self.run_id = run_id

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """A stage as a child run; its start and end go to the timeline."""
        run_id = self.tracker.start(name, parent=self.run_id)
        started = time.time()
        with _closing(self.tracker, run_id):
            yield Stage(self, run_id)
        line = {"stage": name, "start": started, "end": time.time()}
        with (self.out / TIMELINE_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record values of the workflow as a whole."""
        self.tracker.log(self.run_id, metrics, step)

    def artifact(self, path: Path, dest: str | None = None) -> None:
        """Keep a file or folder of the run in MLflow."""
        self.tracker.artifact(self.run_id, path, dest)


@contextmanager
def open_run(workflow: str, argv: Sequence[str], config: RunConfig) -> Iterator[RunLog]:
    """Claim the run's folder and open its MLflow run.

    Raises ConfigError if the folder holds another run; `resume=` continues that one instead.
    """
    out = config.out_dir.resolve()
    if config.resume is None and (out / RESOLVED_CONFIG).exists():
        raise ConfigError(
            f"{out} already holds a run: give another folder with out= (or name=), continue it "
            f"with `paceline train resume={out}`, or remove it"
        )
    provenance = collect_provenance(workflow, argv, config)
    files = write_provenance(out, provenance, config)
    tracker = Tracker(tracking_uri(config.tracker, out), config.tracker.experiment)
    tags = {"workflow": workflow, "command": provenance["command"]}
    run_id = tracker.start(f"{workflow} {config.name}", provenance["config"], tags)
    for path in files:
        tracker.artifact(run_id, path)
    with _closing(tracker, run_id):
        yield RunLog(out, tracker, run_id)


@contextmanager
def open_beside(
    workflow: str, argv: Sequence[str], config: RunConfig, drafter: Path
) -> Iterator[RunLog]:
    """A run about a drafter that is there already, kept with the run the drafter belongs to."""
    out = drafter.resolve().parent
    provenance = collect_provenance(workflow, argv, config)
    tracker = Tracker(tracking_uri(config.tracker, out), config.tracker.experiment)
    tags = {"workflow": workflow, "command": provenance["command"], "drafter": str(drafter)}
    run_id = tracker.start(f"{workflow} {drafter}", provenance["config"], tags)
    with _closing(tracker, run_id):
        with tempfile.TemporaryDirectory() as folder:
            for path in write_provenance(Path(folder), provenance, config):
                tracker.artifact(run_id, path)
        yield RunLog(out, tracker, run_id)


@contextmanager
def _closing(tracker: Tracker, run_id: str) -> Iterator[None]:
    status: RunStatus = "FAILED"
    try:
        yield
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        tracker.end(run_id, status)
