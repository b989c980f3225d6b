"""Published drafters: numbered versions that never change, and aliases that point to one.

    folder/versions/00002/             drafter.safetensors and drafter.json, as published
    folder/versions/00002.json         its record; written last, so it stands for a whole version
    folder/aliases.json                {"champion": [1, 2]}: the last is current, the rest its past

An engine that polls for the newest version thus never sees weights that are half there. An ordinary
class; `ray.remote(DrafterStore)` makes it an actor.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.models.checkpoints import (
    DRAFTER_RECORD,
    DRAFTER_WEIGHTS,
    CheckpointError,
    read_record,
)
from paceline.models.files import fsync_folder, replace_text, with_remedy
from paceline.models.records import DrafterCheckpoint

if TYPE_CHECKING:
    from paceline.actors.tracker import Tracker

ALIASES_FILE = "aliases.json"
LATEST = "latest"
CHAMPION = "champion"


class DrafterStore:
    """Versions of one line of drafters."""

    def __init__(
        self, folder: Path | str, tracker: Tracker | None = None, model_name: str = "drafter"
    ) -> None:
        """Opens the store, new or as it was left. With a tracker, versions are registered too."""
        self.folder = Path(folder)
        self.tracker = tracker
        self.model_name = model_name
        self._versions_folder = self.folder / "versions"
        self._versions_folder.mkdir(parents=True, exist_ok=True)

    def publish(self, folder: Path | str) -> DrafterCheckpoint:
        """Copies a saved drafter into the store as its next version.

        Publishing the newest version's weights again returns that version, so a call may be
        repeated after a crash. Raises CheckpointError naming the file if the drafter is
        incomplete or its weights are not those its record was written for.
        """
        source = Path(folder)
        record, _ = read_record(source)
        _check_weights(source, record.sha256)
        newest = self._newest()
        if newest and self._entry(newest)["checkpoint"]["sha256"] == record.sha256:
            return self.get(newest)
        version = newest + 1
        name = f"{version:05d}"
        self._copy(source, self._versions_folder / name, version)
        checkpoint = replace(record, drafter_version=version, uri=f"versions/{name}")
        entry = {"checkpoint": asdict(checkpoint), "registry_version": self._register(checkpoint)}
        replace_text(self._versions_folder / f"{name}.json", json.dumps(entry, indent=2) + "\n")
        return self.get(version)

    def versions(self) -> list[int]:
        """All published versions, oldest first."""
        return sorted(int(path.stem) for path in self._versions_folder.glob("*.json"))

    def get(self, version: int | str = LATEST) -> DrafterCheckpoint:
        """A version by number, `latest`, or alias; its uri is the folder to load it from.

        Raises ValueError if there is none, or its weights are damaged.
        """
        entry = self._entry(self._resolve(version))
        checkpoint = _checkpoint(entry["checkpoint"])
        folder = self.folder.resolve() / checkpoint.uri
        _check_weights(folder, checkpoint.sha256)
        return replace(checkpoint, uri=str(folder))

    def promote(self, version: int | str, alias: str = CHAMPION) -> DrafterCheckpoint:
        """Points `alias` to a version; what it pointed to before is kept for `rollback`."""
        if alias == LATEST or not alias.isidentifier():
            raise ValueError(f"{alias!r} cannot be an alias: use a word such as {CHAMPION!r}")
        checkpoint = self.get(version)
        past = self._aliases().get(alias, [])
        if past[-1:] != [checkpoint.drafter_version]:
            self._point(alias, [*past, checkpoint.drafter_version])
        return checkpoint

    def rollback(self, alias: str = CHAMPION) -> DrafterCheckpoint:
        """Points `alias` back to the version before. Raises ValueError if there is none."""
        past = self._aliases().get(alias, [])
        if len(past) < 2:
            raise ValueError(f"{alias!r} has no earlier version to go back to: it had {past}")
        checkpoint = self.get(past[-2])
        self._point(alias, past[:-1])
        return checkpoint

    def _newest(self) -> int:
        return max(self.versions(), default=0)

    def _resolve(self, version: int | str) -> int:
        number = version
        if version == LATEST:
            number = self._newest()
        elif isinstance(version, str):
            number = self._aliases().get(version, [0])[-1]
        if number not in self.versions():
            aliases = ", ".join(self._aliases()) or "none"
            raise ValueError(
                f"{self.folder} has no drafter version {version!r}: it holds {self.versions()}, "
                f"aliases {aliases}"
            )
        return int(number)

    def _entry(self, version: int) -> dict[str, Any]:
        return json.loads((self._versions_folder / f"{version:05d}.json").read_text())

    def _aliases(self) -> dict[str, list[int]]:
        path = self.folder / ALIASES_FILE
        return json.loads(path.read_text()) if path.is_file() else {}

    def _point(self, alias: str, history: list[int]) -> None:
        aliases = {**self._aliases(), alias: history}
        replace_text(self.folder / ALIASES_FILE, json.dumps(aliases, indent=2) + "\n")
        if self.tracker is not None:
            registered = self._entry(history[-1])["registry_version"]
            self.tracker.set_alias(self.model_name, alias, registered)

    def _copy(self, source: Path, place: Path, version: int) -> None:
        """Weights, then the record, under a name that nothing reads until both are there."""
        partial = place.with_suffix(".partial")
        for leftover in (partial, place):  # of a publish that was cut short
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        try:
            shutil.copyfile(source / DRAFTER_WEIGHTS, partial / DRAFTER_WEIGHTS)
            with (partial / DRAFTER_WEIGHTS).open("rb") as weights:
                os.fsync(weights.fileno())
            record = json.loads((source / DRAFTER_RECORD).read_text())
            record["drafter_version"] = version
            replace_text(partial / DRAFTER_RECORD, json.dumps(record, indent=2) + "\n")
            partial.rename(place)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise with_remedy(error, place) from None
        fsync_folder(self._versions_folder)

    def _register(self, checkpoint: DrafterCheckpoint) -> int | None:
        """Number of the version in MLflow's registry; None without a tracker or a run."""
        if self.tracker is None or checkpoint.mlflow_run_id is None:
            return None
        tags = {
            "method": checkpoint.method,
            "drafter_version": str(checkpoint.drafter_version),
            "target_model": checkpoint.target_model,
            "target_fingerprint": checkpoint.target_fingerprint,
            "target_version": str(checkpoint.target_version),
            "sha256": checkpoint.sha256,
        }
        return self.tracker.register_model(
            checkpoint.mlflow_run_id, self.folder / checkpoint.uri, self.model_name, tags
        )


def _checkpoint(values: dict[str, Any]) -> DrafterCheckpoint:
    return DrafterCheckpoint(**{**values, "tap_layer_ids": tuple(values["tap_layer_ids"])})


def _check_weights(folder: Path, expected: str) -> None:
    path = folder / DRAFTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: {folder} is not a whole drafter")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{path}: sha256 is {found}, its record says {expected}: the file is truncated or "
            "another one; save the drafter again"
        )
