"""A run can be told from its record: command, code, versions, configuration."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from paceline.pipelines.config import load_config
from paceline.pipelines.provenance import collect_provenance, git_revision, write_provenance


def test_the_record_repeats_the_run(tmp_path: Path) -> None:
    argv = ["recipe=debug", "data.prompts=my prompts.jsonl"]
    config = load_config("train", argv)
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    provenance = collect_provenance("train", argv, config, now=now)
    paths = write_provenance(tmp_path / "new", provenance, config)
    assert [path.name for path in paths] == ["provenance.json", "config.yaml"]
    record = json.loads(paths[0].read_text())
    assert record["command"] == "paceline train recipe=debug 'data.prompts=my prompts.jsonl'"
    assert record["started"] == "2026-01-02T03:04:05+00:00"
    assert {"python", "torch", "transformers", "ray"} <= set(record["versions"])
    assert record["machine"]["cores"] >= 1
    assert record["config"]["data"]["prompts"] == "my prompts.jsonl"
    assert load_config("train", [f"recipe={paths[1]}"]) == config


def test_a_password_in_the_command_is_blotted_out() -> None:
    config = load_config("train", ["recipe=debug"])
    argv = ["tracker.uri=postgresql://me:secret@host/db"]
    command = collect_provenance("train", argv, config)["command"]
    assert "secret" not in command
    assert "postgresql://me:***@host/db" in command


def test_the_revision_tells_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True)

    assert git_revision(tmp_path) is None
    git("init", "--quiet")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "--quiet", "--message", "a")
    clean = git_revision(tmp_path)
    assert clean is not None
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "a").write_text("2")
    changed = git_revision(tmp_path)
    assert changed == {"commit": clean["commit"], "dirty": True}
