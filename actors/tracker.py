"""The only door to MLflow: runs, metrics, artifacts and registered drafters.

    tracker = Tracker(tracking_uri(config.tracker, out), config.tracker.experiment)
    run_id = tracker.start("train", params=config.model_dump())
    tracker.log(run_id, {"loss": 2.5}, step=10)
    tracker.end(run_id, "FINISHED")

Runs are named by id in every call and MLflow's global "active run" is never touched, so the class
works alike in the pipeline's process, in several at once, and as a Ray actor:
`ray.remote(Tracker).remote(uri, experiment)`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

# Read while mlflow is imported: without it, every run is reported to a server of MLflow's.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, ErrorCode
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from paceline.actors.config import TrackerConfig

ARTIFACTS_FOLDER = "mlartifacts"
PARENT_RUN_TAG = MLFLOW_PARENT_RUN_ID
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

# Limits of MLflow's API for one request.
_MAX_PARAMS = 100
_MAX_METRICS = 1000
_MAX_PARAM_CHARACTERS = 6000


def tracking_uri(config: TrackerConfig, out: Path) -> str:
    """Where runs are kept: tracker.uri, else MLFLOW_TRACKING_URI, else `<out>/mlflow.db`.

    A relative SQLite path is made absolute, since actors have another working directory.
    """
    uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return f"sqlite:///{(out / 'mlflow.db').resolve()}"
    database = _database(uri)
    return uri if database is None else f"sqlite:///{database.resolve()}"


class Tracker:
    """A client of one MLflow server or database, for one experiment."""

    def __init__(self, uri: str, experiment: str) -> None:
        """Connects, and creates the database and the experiment where they are missing.

        Artifacts of a SQLite store lie beside it in mlartifacts/; a server has its own place.
        """
        for name in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(name).setLevel(logging.WARNING)  # else a line per migration
        self.uri = uri
        self.experiment = experiment
        location = None
        database = _database(uri)
        if database is not None:
            database.parent.mkdir(parents=True, exist_ok=True)
            location = (database.parent / ARTIFACTS_FOLDER).resolve().as_uri()
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self.experiment_id = self._find_or_create_experiment(location)

    def __reduce__(self) -> tuple[type[Tracker], tuple[str, str]]:
        return Tracker, (self.uri, self.experiment)  # another process makes its own connection

    def start(
        self,
        run_name: str,
        params: Mapping[str, object] | None = None,
        tags: Mapping[str, str] | None = None,
        parent: str | None = None,
    ) -> str:
        """Opens a run, below the run `parent` if given, and returns its id.

        Nested params are flattened to dotted keys, as they are written on the command line; a value
        beyond MLflow's 6,000 characters is cut (config.yaml, an artifact, has it whole).
        """
        all_tags = dict(tags or {})
        if parent is not None:
            all_tags[PARENT_RUN_TAG] = parent
        run_id = self._client.create_run(
            self.experiment_id, tags=all_tags, run_name=run_name
        ).info.run_id
        entries = [
            Param(key, str(value)[:_MAX_PARAM_CHARACTERS]) for key, value in _flat(params or {})
        ]
        for first in range(0, len(entries), _MAX_PARAMS):
            self._client.log_batch(run_id, params=entries[first : first + _MAX_PARAMS])
        return run_id

    def log(self, run_id: str, metrics: Mapping[str, float], step: int = 0) -> None:
        """Records metric values at a step."""
        now = int(time.time() * 1000)
        entries = [Metric(name, float(value), now, step) for name, value in metrics.items()]
        for first in range(0, len(entries), _MAX_METRICS):
            self._client.log_batch(run_id, metrics=entries[first : first + _MAX_METRICS])

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Sets tags of a run."""
        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def artifact(self, run_id: str, path: Path | str, dest: str | None = None) -> None:
        """Keeps a file, or a folder with all that is in it, under the run's folder `dest`.

        Raises ValueError if there is nothing at `path`.
        """
        if Path(path).is_dir():
            self._client.log_artifacts(run_id, str(path), dest or Path(path).name)
        elif Path(path).is_file():
            self._client.log_artifact(run_id, str(path), dest)
        else:
            raise ValueError(f"{path} does not exist, so it cannot be kept as an artifact")

    def end(self, run_id: str, status: RunStatus = "FINISHED") -> None:
        """Closes a run; a run that is not closed stays RUNNING for ever."""
        self._client.set_terminated(run_id, status)

    def register_model(
        self, run_id: str, folder: Path | str, name: str, tags: Mapping[str, str]
    ) -> int:
        """Registers a drafter's folder as a new version of the model `name`, and returns it.

        The folder is kept as the run's artifact `drafter/N`, the copy that the version names.
        `tags` carry the target's fingerprint, so that a server can refuse a drafter that does not
        fit.
        """
        artifact = f"drafter/{len(self._client.list_artifacts(run_id, 'drafter')) + 1}"
        self.artifact(run_id, folder, artifact)
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            _ignore_existing(error)
        source = f"{self._client.get_run(run_id).info.artifact_uri.rstrip('/')}/{artifact}"
        version = self._client.create_model_version(name, source, run_id=run_id, tags=dict(tags))
        return int(version.version)

    def set_alias(self, name: str, alias: str, version: int | None) -> None:
        """Points an alias, such as champion, of a registered model to a version; None: to none."""
        if version is not None:
            self._client.set_registered_model_alias(name, alias, str(version))
        elif alias in self._client.get_registered_model(name).aliases:
            self._client.delete_registered_model_alias(name, alias)

    def _find_or_create_experiment(self, location: str | None) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            try:
                return self._client.create_experiment(self.experiment, artifact_location=location)
            except MlflowException as error:
                _ignore_existing(error)  # another process was quicker
            found = self._client.get_experiment_by_name(self.experiment)
        if found.lifecycle_stage != "active":
            raise ValueError(
                f"the MLflow experiment {self.experiment!r} at {self.uri} is deleted: restore it "
                "(`mlflow experiments restore`), or give another name with tracker.experiment="
            )
        return found.experiment_id


def _ignore_existing(error: MlflowException) -> None:
    if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
        raise error


def _database(uri: str) -> Path | None:
    """File of a SQLite store; None for any other."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _flat(params: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            yield from _flat({str(i): entry for i, entry in enumerate(value)}, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
