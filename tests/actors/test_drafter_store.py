"""Published drafters are whole, keep their numbers, and can be promoted and rolled back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.actors.drafter_store import ALIASES_FILE, DrafterStore
from paceline.models.checkpoints import CheckpointError, read_record
from paceline.models.config import DrafterConfig
from paceline.models.records import DrafterCheckpoint


def save(folder: Path, weights: bytes, *, step: int = 0, run_id: str | None = None) -> Path:
    """A saved drafter: its folder as training leaves it, with any bytes for weights."""
    folder.mkdir(parents=True, exist_ok=True)
    record = DrafterCheckpoint(
        uri="drafter.safetensors",
        method="dflash",
        drafter_version=0,
        parent_version=None,
        target_model="tiny",
        target_fingerprint="fp-a",
        target_version=0,
        tap_layer_ids=(0, 2),
        step=step,
        tokens_seen=10 * step,
        sha256=hashlib.sha256(weights).hexdigest(),
        mlflow_run_id=run_id,
    )
    (folder / "drafter.safetensors").write_bytes(weights)
    document = {**asdict(record), "config": DrafterConfig().model_dump(mode="json")}
    (folder / "drafter.json").write_text(json.dumps(document))
    return folder


class RecordingTracker:
    """Stands in for MLflow: counts versions and remembers aliases."""

    def __init__(self) -> None:
        self.registered: list[tuple[str, str, dict[str, str]]] = []
        self.aliases: dict[str, int | None] = {}

    def register_model(self, run_id: str, folder: Path, name: str, tags: dict[str, str]) -> int:
        assert (Path(folder) / "drafter.safetensors").is_file()
        self.registered.append((run_id, name, tags))
        return 40 + len(self.registered)

    def set_alias(self, name: str, alias: str, version: int | None) -> None:
        self.aliases[f"{name}@{alias}"] = version


def test_versions_count_up_and_never_change(tmp_path: Path) -> None:
    store = DrafterStore(tmp_path / "store")
    drafter = save(tmp_path / "d", b"one", step=1)
    first = store.publish(drafter)
    save(drafter, b"two", step=2)
    second = store.publish(drafter)
    assert (first.drafter_version, second.drafter_version) == (1, 2)
    assert (Path(first.uri) / "drafter.safetensors").read_bytes() == b"one"
    assert (Path(second.uri) / "drafter.safetensors").read_bytes() == b"two"
    assert store.get() == store.get("latest") == store.get(2) == second
    assert store.get(1) == first
    assert (second.tap_layer_ids, second.step, second.tokens_seen) == ((0, 2), 2, 20)
    record, config = read_record(Path(second.uri))
    assert (record.drafter_version, record.uri) == (2, "drafter.safetensors")
    assert config == DrafterConfig()


def test_publishing_the_same_weights_again_is_one_version(tmp_path: Path) -> None:
    store = DrafterStore(tmp_path / "store")
    drafter = save(tmp_path / "d", b"one")
    assert store.publish(drafter) == store.publish(drafter)
    assert store.versions() == [1]


def test_a_store_is_found_as_it_was_left(tmp_path: Path) -> None:
    store = DrafterStore(tmp_path / "store")
    first = store.publish(save(tmp_path / "d", b"one"))
    store.promote(1)
    (tmp_path / "store").rename(tmp_path / "moved")
    again = DrafterStore(tmp_path / "moved")
    assert again.get("champion").sha256 == first.sha256
    assert Path(again.get(1).uri).is_relative_to(tmp_path / "moved")


def test_a_publish_cut_short_is_invisible_and_its_number_used_again(tmp_path: Path) -> None:
    store = DrafterStore(tmp_path / "store")
    store.publish(save(tmp_path / "d", b"one"))
    for leftover in ("00002", "00002.partial"):  # no record beside them: never published
        save(tmp_path / "store" / "versions" / leftover, b"half")
    assert store.get().drafter_version == 1
    second = store.publish(save(tmp_path / "d", b"two"))
    assert second.drafter_version == 2
    assert (Path(second.uri) / "drafter.safetensors").read_bytes() == b"two"
    names = {path.name for path in (tmp_path / "store" / "versions").iterdir()}
    assert names == {"00001", "00001.json", "00002", "00002.json"}


def test_promotion_moves_the_champion_and_rollback_moves_it_back(tmp_path: Path) -> None:
    store = DrafterStore(tmp_path / "store")
    for weights in (b"one", b"two", b"three"):
        store.publish(save(tmp_path / "d", weights))
    store.promote(1)
    store.promote(3)
    store.promote(3)
    store.promote(2, "challenger")
    assert store.get("champion").drafter_version == 3
    assert store.rollback().drafter_version == 1
    assert store.get("champion").drafter_version == 1
    assert store.get("challenger").drafter_version == 2
    with pytest.raises(ValueError, match="'champion' has no earlier version"):
        store.rollback()
    assert json.loads((tmp_path / "store" / ALIASES_FILE).read_text()) == {
        "champion": [1],
        "challenger": [2],
    }


def test_a_version_that_is_not_there_is_explained(tmp_path: Path) -> None:
    store = DrafterStore(tmp_path / "store")
    with pytest.raises(ValueError, match=r"no drafter version 'latest': it holds \[\]"):
        store.get()
    store.publish(save(tmp_path / "d", b"one"))
    for wanted in (2, "champion"):
        with pytest.raises(ValueError, match=rf"no drafter version {wanted!r}: it holds \[1\]"):
            store.get(wanted)
        with pytest.raises(ValueError, match="no drafter version"):
            store.promote(wanted)
    with pytest.raises(ValueError, match="cannot be an alias"):
        store.promote(1, "latest")


def test_incomplete_and_damaged_drafters_are_neither_published_nor_handed_out(
    tmp_path: Path,
) -> None:
    store = DrafterStore(tmp_path / "store")
    with pytest.raises(CheckpointError, match=r"drafter\.json does not exist"):
        store.publish(tmp_path / "nothing")
    drafter = save(tmp_path / "d", b"weights")
    (drafter / "drafter.safetensors").write_bytes(b"weight")
    with pytest.raises(CheckpointError, match=r"drafter\.safetensors: sha256 is .* record says"):
        store.publish(drafter)
    (drafter / "drafter.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"drafter\.safetensors does not exist"):
        store.publish(drafter)
    assert store.versions() == []
    published = store.publish(save(drafter, b"weights"))
    (Path(published.uri) / "drafter.safetensors").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="sha256"):
        store.get(1)


def test_published_versions_and_aliases_reach_the_registry(tmp_path: Path) -> None:
    tracker = RecordingTracker()
    store = DrafterStore(tmp_path / "store", tracker, "smollm2-dflash")
    store.publish(save(tmp_path / "d", b"one", run_id="run-7"))
    store.publish(save(tmp_path / "d", b"two"))  # no run: nothing to register it under
    ((run_id, name, tags),) = tracker.registered
    assert (run_id, name) == ("run-7", "smollm2-dflash")
    assert tags["target_fingerprint"] == "fp-a"
    assert tags["drafter_version"] == "1"
    store.promote(1)
    assert tracker.aliases == {"smollm2-dflash@champion": 41}
    store.promote(2)
    assert tracker.aliases == {"smollm2-dflash@champion": None}, "it must not name the old one"
    assert store.rollback().drafter_version == 1
    assert tracker.aliases == {"smollm2-dflash@champion": 41}
