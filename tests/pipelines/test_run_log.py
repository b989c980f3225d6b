"""Runs end in MLflow the way they ended, signals included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from paceline.pipelines.config import load_config
from paceline.pipelines.run_log import open_run

SCRIPT = """
import time
from paceline.pipelines.cli import _guarded
from paceline.pipelines.cluster import ray_cluster
from paceline.pipelines.config import load_config
from paceline.pipelines.run_log import open_run

def work():
    config = load_config("train", ["recipe=debug", "out=run"])
    with open_run("train", [], config) as run, ray_cluster(config.cluster), run.stage("rollout"):
        print("ready", flush=True)
        time.sleep(120)

_guarded("train", False, work)
"""


def statuses(run: Path) -> dict[str, str]:
    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("paceline")
    assert experiment is not None
    return {r.info.run_name: r.info.status for r in client.search_runs([experiment.experiment_id])}


def test_a_run_stopped_by_sigterm_is_killed_with_its_stage(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().endswith("paceline train: interrupted")
    assert statuses(tmp_path / "run") == {"train debug": "KILLED", "rollout": "KILLED"}


def test_an_error_fails_the_stage_and_the_run(tmp_path: Path) -> None:
    config = load_config("train", ["recipe=debug", f"out={tmp_path / 'run'}"])
    with (
        pytest.raises(ValueError, match="wrong"),
        open_run("train", [], config) as run,
        run.stage("rollout"),
    ):
        raise ValueError("wrong")
    assert statuses(tmp_path / "run") == {"train debug": "FAILED", "rollout": "FAILED"}
