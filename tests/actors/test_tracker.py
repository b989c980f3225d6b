"""Runs, metrics, artifacts and model versions reach MLflow, from this process and from an actor."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from paceline.actors.config import TrackerConfig
from paceline.actors.tracker import PARENT_RUN_TAG, Tracker, tracking_uri


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests of this file: creating its tables takes seconds."""
    return tracking_uri(TrackerConfig(), tmp_path_factory.mktemp("run") / "out")


@pytest.fixture(scope="module")
def tracker(uri: str) -> Tracker:
    return Tracker(uri, "paceline")


@pytest.fixture(scope="module")
def client(uri: str, tracker: Tracker) -> MlflowClient:
    return MlflowClient(uri, uri)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "drafter.json").write_text('{"method": "dflash"}')
    (folder / "drafter.safetensors").write_bytes(b"weights")
    return folder


def test_the_store_is_configured_then_environment_then_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    out = Path("runs/x")
    assert tracking_uri(TrackerConfig(), out) == f"sqlite:///{tmp_path}/runs/x/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert tracking_uri(TrackerConfig(), out) == "http://127.0.0.1:5000"
    relative = TrackerConfig(uri="sqlite:///all.db")
    assert tracking_uri(relative, out) == f"sqlite:///{tmp_path}/all.db"
    assert tracking_uri(TrackerConfig(uri="sqlite:////a/b.db"), out) == "sqlite:////a/b.db"


def test_a_run_keeps_its_nested_configuration_tags_and_children(
    tracker: Tracker, client: MlflowClient
) -> None:
    params = {
        "seed": 3,
        "trainer": {"lr": 6e-4, "betas": (0.9, 0.95)},
        "objective": [{"loss": {"ce": 1.0}}, {"loss": {"tv": 0.5}}],
        "long": "x" * 7000,
        **{f"key{i}": i for i in range(150)},
    }
    parent = tracker.start("train", params, {"workflow": "train"})
    child = tracker.start("rollout", parent=parent)
    found = client.get_run(parent)
    assert found.info.run_name == "train"
    assert found.info.status == "RUNNING"
    assert found.data.params["trainer.lr"] == "0.0006"
    assert found.data.params["trainer.betas"] == "(0.9, 0.95)"
    assert found.data.params["objective.1.loss.tv"] == "0.5"
    assert len(found.data.params["long"]) == 6000
    assert found.data.params["key149"] == "149"
    assert found.data.tags["workflow"] == "train"
    assert client.get_run(child).data.tags[PARENT_RUN_TAG] == parent
    tracker.tag(parent, {"resumed": "yes"})
    assert client.get_run(parent).data.tags["resumed"] == "yes"
    for run_id, status in ((child, "KILLED"), (parent, "FAILED")):
        tracker.end(run_id, status)
        assert client.get_run(run_id).info.status == status


def test_metrics_keep_their_steps_and_values_that_are_no_numbers(
    tracker: Tracker, client: MlflowClient
) -> None:
    run_id = tracker.start("metrics")
    for step in (10, 20):
        tracker.log(run_id, {"loss": 5.0 / step, "accuracy_pos_0": step / 100}, step)
    tracker.log(run_id, {"loss": math.nan}, 30)
    tracker.log(run_id, {f"m{i}": float(i) for i in range(1200)}, 1)
    history = client.get_metric_history(run_id, "loss")
    assert [(m.step, m.value) for m in history[:2]] == [(10, 0.5), (20, 0.25)]
    assert math.isnan(history[2].value)
    assert client.get_run(run_id).data.metrics["m1199"] == 1199.0
    tracker.end(run_id)
    assert client.get_run(run_id).info.status == "FINISHED"


def test_artifacts_lie_beside_the_database(
    tracker: Tracker, uri: str, drafter: Path, tmp_path: Path
) -> None:
    run_id = tracker.start("artifacts")
    config = tmp_path / "config.yaml"
    config.write_text("seed: 0\n")
    tracker.artifact(run_id, config)
    tracker.artifact(run_id, config, "figures")
    tracker.artifact(run_id, drafter)
    kept = Path(uri.removeprefix("sqlite:///")).parent / "mlartifacts" / run_id / "artifacts"
    assert {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()} == {
        "config.yaml",
        "figures/config.yaml",
        "drafter/drafter.json",
        "drafter/drafter.safetensors",
    }
    with pytest.raises(ValueError, match=r"missing\.png does not exist"):
        tracker.artifact(run_id, tmp_path / "missing.png")
    tracker.end(run_id)


def test_registered_drafters_carry_their_target_and_keep_their_own_files(
    tracker: Tracker, client: MlflowClient, drafter: Path
) -> None:
    run_id = tracker.start("register")
    first = tracker.register_model(run_id, drafter, "d", {"target_fingerprint": "fp-a"})
    (drafter / "drafter.safetensors").write_bytes(b"better weights")
    second = tracker.register_model(run_id, drafter, "d", {"target_fingerprint": "fp-b"})
    assert (first, second) == (1, 2)
    tracker.set_alias("d", "champion", 2)
    champion = client.get_model_version_by_alias("d", "champion")
    assert champion.version == 2 and champion.run_id == run_id
    assert champion.tags == {"target_fingerprint": "fp-b"}
    for _ in range(2):
        tracker.set_alias("d", "champion", None)
    assert client.get_registered_model("d").aliases == {}
    weights = []
    for version in ("1", "2"):
        source = client.get_model_version("d", version).source
        folder = Path(source.removeprefix("file://"))
        weights.append((folder / "drafter.safetensors").read_bytes())
    assert weights == [b"weights", b"better weights"]


def test_a_second_tracker_joins_the_experiment_and_a_deleted_one_is_explained(
    tracker: Tracker, client: MlflowClient, uri: str
) -> None:
    assert Tracker(uri, "paceline").experiment_id == tracker.experiment_id
    client.delete_experiment(Tracker(uri, "old").experiment_id)
    with pytest.raises(ValueError, match="'old' .*is deleted.*tracker.experiment="):
        Tracker(uri, "old")


def test_a_tracker_works_as_a_ray_actor_beside_one_in_process(
    tracker: Tracker, client: MlflowClient, uri: str, local_ray: None
) -> None:
    import ray

    actor = ray.remote(Tracker).options(num_cpus=0).remote(uri, "paceline")
    parent = tracker.start("train")
    child = ray.get(actor.start.remote("trainer", {"lr": 1}, parent=parent))
    calls = []
    for step in range(5):
        tracker.log(parent, {"cache_bytes": step}, step)
        calls.append(actor.log.remote(child, {"loss": 1.0 / (step + 1)}, step))
    ray.get([*calls, actor.end.remote(child, "FINISHED")])
    tracker.end(parent)
    assert [m.step for m in client.get_metric_history(child, "loss")] == [0, 1, 2, 3, 4]
    assert client.get_run(child).data.tags[PARENT_RUN_TAG] == parent
    assert client.get_run(child).info.status == "FINISHED"
    ray.kill(actor)


def test_importing_the_tracker_turns_telemetry_off() -> None:
    script = (
        "import paceline.actors.tracker, mlflow.telemetry as t; print(t.get_telemetry_client())"
    )
    environment = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "None"
