"""Benches run, alternate their contestants fairly, and write the form that others can check."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from paceline.models.checkpoints import new_record, save_drafter
from paceline.models.config import BackboneConfig, DrafterConfig, TargetConfig
from paceline.models.drafter import build_drafter
from paceline.models.target import Target
from paceline.pipelines.benches.alternation import alternate, faster, paired_ratios
from paceline.pipelines.figure_document import ratio_figure


def test_contestants_take_turns_and_the_first_place_moves() -> None:
    calls: list[str] = []
    seconds = alternate({n: lambda n=n: calls.append(n) for n in "abc"}, repeats=4, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 4, "b": 4, "c": 4}


def test_ratios_are_of_the_same_repeat_and_the_median_is_kept() -> None:
    ratios = paired_ratios([2.0, 9.0, 4.0], [1.0, 3.0, 1.0])
    assert ratios == [2.0, 3.0, 4.0]
    entry = ratio_figure(ratios, "higher", "quartiles")
    assert (entry["value"], entry["low"], entry["high"], entry["n"]) == (3.0, 2.0, 4.0, 3)
    assert ratio_figure([1.5], "lower", "one")["low"] == 1.5
    assert faster({"a": [1.0, 9.0, 2.0], "b": [3.0, 3.0, 3.0]}, "a", "b") == "a"


def test_the_engine_bench_writes_its_figures(
    paceline: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    target = Target.load(TargetConfig(model="builtin:tiny-llama", device="cpu"))
    target.tap((0, 1))
    drafter = build_drafter(
        DrafterConfig(backbone=BackboneConfig(kind="autoregressive")),
        target.spec,
        tap_layer_ids=(0, 1),
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
    )
    save_drafter(tmp_path / "drafter", drafter, new_record(drafter.config, target))
    result = paceline(
        "bench",
        "engine",
        "target=builtin:tiny-llama",
        "drafter=drafter",
        "small=true",
        "json=engine.json",
    )
    assert result.returncode == 0, result.stderr
    document = json.loads((tmp_path / "engine.json").read_text())
    assert document["bench"] == "engine"
    assert document["machine"]["cores"] >= 1 and document["versions"]["torch"]
    expected = {
        "decode1_vs_transformers",
        "verify8_vs_decode1_fp32",
        "verify4_vs_decode1_bf16",
        "bandwidth_share_decode1",
        "plain_vs_transformers_b1",
        "plain_vs_transformers_b8",
        "plain_vs_transformers_b32",
        "speculative_vs_plain_b1",
        "ideal_share_b1",
    }
    assert expected <= set(document["figures"])
    assert all(entry["value"] > 0 for entry in document["figures"].values())


def test_a_bench_that_is_not_there_is_named(
    paceline: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    result = paceline("bench", "nothing")
    assert result.returncode == 2
    assert "paceline bench needs a name: engine" in result.stderr
