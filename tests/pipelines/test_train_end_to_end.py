"""The training job as a person runs it, on the tiny target: real Ray, DeepSpeed and MLflow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file, save_file

from paceline.models.checkpoints import load_drafter, save_drafter
from paceline.models.config import TargetConfig
from paceline.models.target import Target
from paceline.models.tiny import write_tiny_target

SCRIPT = "import sys; from paceline.pipelines.cli import main; main()"
SETTINGS = ("rollout.shard_tokens=200", "drafter.vocab_sample_tokens=100")

Run = Callable[..., subprocess.CompletedProcess[str]]


def train(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "train", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the debug recipe, from prompts to report."""
    folder = tmp_path_factory.mktemp("train")
    process = train(folder, "recipe=debug", "out=run", *SETTINGS)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "0 mismatches" in output
    assert "acceptance length" in output
    assert "vllm serve" in output
    return folder / "run"


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    return Target.load(TargetConfig(model="builtin:tiny-llama", device="cpu"))


def metrics(run: Path, name: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["name"] == name]


def test_a_run_leaves_its_figures_and_a_lossless_audit(finished: Path) -> None:
    document = json.loads((finished / "evaluate.json").read_text())
    figures = document["figures"]
    assert figures["audit_mismatches"]["value"] == 0
    assert figures["audit_tokens"]["value"] > 0
    domains = [record["domain"] for record in document["records"]]
    assert domains[-1] == "total" and len(domains) == len(set(domains)) >= 2
    total = document["records"][-1]
    assert total["num_accepted_tokens"] == sum(
        n * count for n, count in enumerate(total["acceptance_histogram"])
    )
    expected = 1 + total["num_accepted_tokens"] / total["num_drafts"]
    assert figures["acceptance_length"]["value"] == pytest.approx(expected)
    assert (finished / "report.html").stat().st_size > 10_000


def test_training_starts_while_rollouts_go_on(finished: Path) -> None:
    timeline = [json.loads(line) for line in (finished / "timeline.jsonl").read_text().splitlines()]
    ends = {line["stage"]: line["end"] for line in timeline}
    starts = {line["stage"]: line["start"] for line in timeline}
    assert starts["train"] < ends["rollout"]
    assert len(metrics(finished, "rollout/shards")) >= 3


def test_mlflow_holds_the_run_its_stages_and_the_registered_drafter(
    finished: Path, tiny_target: Target
) -> None:
    client = MlflowClient(f"sqlite:///{finished / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("paceline")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert [run.info.status for run in parents] == ["FINISHED"]
    stages = {run.info.run_name: run for run in runs if run not in parents}
    assert set(stages) == {"rollout", "train", "evaluate"}
    assert parents[0].data.params["trainer.steps"] == "12"
    assert {"train/loss", "train/accuracy_pos_0", "train/idle_share"} <= set(
        stages["train"].data.metrics
    )
    assert stages["rollout"].data.metrics["cache/bytes"] > 0
    assert stages["evaluate"].data.metrics["total/audit_mismatches"] == 0
    kept = {item.path for item in client.list_artifacts(parents[0].info.run_id)}
    assert {"config.yaml", "provenance.json", "report.html", "evaluate.json"} <= kept
    assert "training_curves.png" in kept
    (version,) = client.search_model_versions("name='paceline-debug'")
    assert version.tags["target_fingerprint"] == tiny_target.fingerprint


def test_the_drafter_loads_and_a_foreign_or_damaged_one_does_not(
    finished: Path, tiny_target: Target, tmp_path: Path, paceline: Run
) -> None:
    drafter, record = load_drafter(finished / "drafter", tiny_target)
    assert record.step == 12 and record.drafter_version == 1
    foreign = paceline("evaluate", f"drafter={finished / 'drafter'}", "target=builtin:tiny-qwen3")
    assert foreign.returncode == 2
    assert record.target_fingerprint in foreign.stderr
    assert foreign.stderr.strip().count("\n") == 0

    broken = tmp_path / "broken"
    save_drafter(broken, drafter, record)
    weights = broken / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"drafter\.safetensors is truncated"):
        load_drafter(broken, tiny_target)
    with torch.no_grad():
        drafter.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"lm_head\.weight holds NaN"):
        save_drafter(tmp_path / "nan", drafter, record)


def test_b15_the_vocabulary_map_travels_inside_the_weights(
    finished: Path, tiny_target: Target, tmp_path: Path
) -> None:
    drafter, record = load_drafter(finished / "drafter", tiny_target)
    tensors = load_file(finished / "drafter" / "drafter.safetensors")
    assert torch.equal(tensors["d2t"], drafter.d2t)
    assert torch.equal(tensors["t2d"], drafter.t2d)
    copy = tmp_path / "copy"
    save_drafter(copy, drafter, record)
    del tensors["d2t"]
    save_file(tensors, copy / "drafter.safetensors")
    with pytest.raises(ValueError, match="sha256"):
        load_drafter(copy, tiny_target)


def test_an_interrupted_run_is_killed_in_mlflow_and_resumes_to_the_same_drafter(
    finished: Path, tmp_path: Path
) -> None:
    process = train(tmp_path, "recipe=debug", "out=run", *SETTINGS)
    run, deadline = tmp_path / "run", time.monotonic() + 300
    while not (run / "checkpoints" / "step-0000006").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("paceline")
    assert experiment is not None
    killed = client.search_runs([experiment.experiment_id])
    assert "KILLED" in {r.info.status for r in killed}
    assert "RUNNING" not in {r.info.status for r in killed}

    resumed = train(tmp_path, "resume=run")
    output, _ = resumed.communicate(timeout=400)
    assert resumed.returncode == 0, output
    ours = load_file(run / "drafter" / "drafter.safetensors")
    theirs = load_file(finished / "drafter" / "drafter.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_collect_then_train_on_a_model_and_prompts_of_ones_own(
    tmp_path: Path, paceline: Run
) -> None:
    write_tiny_target("qwen3", tmp_path / "model")
    questions = [f"What is {i} and {i + 1}?" for i in range(7)] + ["word " * 500]
    lines = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    collected = paceline(
        "collect",
        "recipe=debug",
        "target.model=model",
        "data.prompts=prompts.jsonl",
        "data.heldout=prompts.jsonl",
        "trainer.steps=4",
        "out=run",
    )
    assert collected.returncode == 0, collected.stderr
    assert "1 prompts longer than data.max_context_tokens=384 were skipped" in collected.stderr
    shards = {p: p.stat().st_mtime_ns for p in (tmp_path / "run/hidden_states").glob("*.arrow")}
    assert shards

    trained = paceline("train", "resume=run")
    assert trained.returncode == 0, trained.stderr
    assert {p: p.stat().st_mtime_ns for p in shards} == shards  # nothing was rolled out again
    document = json.loads((tmp_path / "run" / "evaluate.json").read_text())
    assert document["figures"]["audit_mismatches"]["value"] == 0
    assert "vllm serve" in trained.stdout
    exported = json.loads((tmp_path / "run" / "exported" / "config.json").read_text())
    assert exported["architectures"] == ["LlamaForCausalLMEagle3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("target.tap_layer_ids=[1,40]",), "layer 40 is outside the model"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(
    paceline: Run, arguments: tuple[str, ...], message: str
) -> None:
    result = paceline("train", "recipe=debug", "out=run", *arguments)
    assert result.returncode == 2
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("paceline train: error:") and message in line


def test_a_used_folder_is_refused_and_stays_as_it_was(finished: Path, paceline: Run) -> None:
    before = sorted(path.name for path in finished.iterdir())
    result = paceline("train", "recipe=debug", f"out={finished}")
    assert result.returncode == 2 and "already holds a run" in result.stderr
    assert sorted(path.name for path in finished.iterdir()) == before


def test_evaluate_writes_one_record_per_domain_and_a_total(
    finished: Path, paceline: Run, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"What is {i} and {i}?", "domain": f"d{i % 2}"} for i in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = paceline(
        "evaluate",
        "recipe=debug",
        f"drafter={finished / 'drafter'}",
        f"data.prompts={prompts}",
        "json=out.json",
    )
    assert result.returncode == 0, result.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert [record["domain"] for record in document["records"]] == ["d0", "d1", "total"]
    assert document["records"][-1]["num_prompts"] == 3
    assert document["figures"]["audit_mismatches"]["value"] == 0
