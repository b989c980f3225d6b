"""Measure a trained drafter on held-out prompts: acceptance, speed, losslessness audit.

    paceline evaluate drafter=runs/x/drafter target=builtin:smollm2-135m-instruct \
        data.prompts=heldout.jsonl json=evaluate.json
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import ray

from paceline.actors.drafter_evaluator import DrafterEvaluator
from paceline.models.checkpoints import read_record
from paceline.models.prompts import load_prompts
from paceline.models.target import load_tokenizer
from paceline.pipelines.cluster import ray_cluster
from paceline.pipelines.config import load_config
from paceline.pipelines.figure_document import write_document
from paceline.pipelines.measurement import (
    evaluation_document,
    measure,
    print_records,
    record_metrics,
)
from paceline.pipelines.progress import progress_bars
from paceline.pipelines.run_log import open_beside


def main(argv: list[str] | None = None) -> None:
    """Evaluate, print one row per domain, and write `json=` if given."""
    argv = sys.argv[1:] if argv is None else argv
    config = load_config("evaluate", argv)
    assert config.drafter_dir is not None
    folder = Path(config.drafter_dir).resolve()
    checkpoint, _ = read_record(folder)  # a wrong folder is said before anything is loaded
    # The prompts given to evaluate are the held-out ones: `data.prompts`, under either limit.
    data = config.data.model_copy(update={"limit": config.data.limit or config.data.heldout_limit})
    given = "prompts" in config.data.model_fields_set
    source = config.data.prompts if given else config.data.heldout
    prompts = load_prompts(source, tokenizer=load_tokenizer(config.target), data=data)
    with (
        open_beside("evaluate", argv, config, folder) as run,
        ray_cluster(config.cluster),
        progress_bars() as bars,
    ):
        evaluator = (
            ray.remote(DrafterEvaluator)
            .options(num_gpus=config.rollout.num_gpus)
            .remote(config.target, config.evaluate, threads=os.cpu_count())
        )
        records, results = measure(evaluator, folder, prompts.prompts, bars, "evaluate")
        for record in records:
            run.log(record_metrics(record), step=checkpoint.step)
        if config.json_path is not None:
            document = evaluation_document(
                records,
                results,
                command=shlex.join(["paceline", "evaluate", *argv]),
                settings=config.model_dump(mode="json", by_alias=True),
            )
            write_document(Path(config.json_path), document)
            run.artifact(Path(config.json_path))
    print_records(records)
    if config.json_path is not None:
        print(f"wrote {config.json_path}")


if __name__ == "__main__":
    from paceline.pipelines.cli import run_as_module

    run_as_module("evaluate")
