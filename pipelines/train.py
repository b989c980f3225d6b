"""Train a drafter end to end: prompts, rollouts, hidden states, training, evaluation, report.

    paceline train recipe=quickstart
    paceline train recipe=eagle3 target.model=/models/llama data.prompts=prompts.jsonl out=runs/x
    paceline train resume=runs/x

Rollouts and training overlap: the trainer starts on the first shards while workers go on. A tiny
run of every stage: `paceline train recipe=debug`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import closing
from pathlib import Path

import ray

from paceline.actors.drafter_evaluator import DrafterEvaluator
from paceline.actors.drafter_store import DrafterStore
from paceline.actors.trainer_group import TrainerGroup
from paceline.actors.training_records import TrainerSetup
from paceline.models.prompts import load_prompts
from paceline.models.training_state import list_checkpoints
from paceline.pipelines.cluster import ray_cluster
from paceline.pipelines.config import RunConfig, load_config
from paceline.pipelines.export import try_export
from paceline.pipelines.figure_document import write_document
from paceline.pipelines.initial_drafter import initial_drafter
from paceline.pipelines.measurement import (
    evaluation_document,
    measure,
    print_records,
    record_metrics,
)
from paceline.pipelines.preparation import prepare
from paceline.pipelines.progress import Bars, progress_bars
from paceline.pipelines.report import write_report
from paceline.pipelines.rollout_stage import Rollouts
from paceline.pipelines.run_log import RunLog, open_run
from paceline.pipelines.summary import print_summary


def main(argv: list[str] | None = None) -> None:
    """The whole job; see the module docstring."""
    argv = sys.argv[1:] if argv is None else argv
    config = load_config("train", argv)
    command = shlex.join(["paceline", "train", *argv])
    with (
        open_run("train", argv, config) as run,
        ray_cluster(config.cluster),
        progress_bars() as bars,
    ):
        prepared = prepare(config)
        tokenizer = prepared.target.tokenizer
        heldout = load_prompts(
            config.data.heldout, tokenizer=tokenizer, data=config.data, heldout=True
        )
        with Rollouts(config, prepared, run, bars) as rollouts:
            initial = initial_drafter(config, prepared, rollouts, run)
            del prepared  # the driver's copy of the target is not needed any more
            trained = train_drafter(config, rollouts, initial, run, bars)

        registry = run.tracker if config.tracker.register_model else None
        store = DrafterStore(run.out / "store", registry, f"paceline-{config.name}")
        published = store.publish(trained)
        drafter_folder = run.out / "drafter"
        shutil.copytree(published.uri, drafter_folder, dirs_exist_ok=True)

        with run.stage("evaluate") as stage:
            evaluator = (
                ray.remote(DrafterEvaluator)
                .options(num_gpus=config.trainer.num_gpus)
                .remote(config.target, config.evaluate, threads=os.cpu_count())
            )
            some = heldout.prompts[: config.evaluate.untrained_prompts]
            before, _ = measure(evaluator, initial, some, bars, "untrained")
            records, results = measure(evaluator, drafter_folder, heldout.prompts, bars, "evaluate")
            for record in records:
                stage.log(record_metrics(record), step=published.step)
        document = evaluation_document(
            records,
            results,
            command=command,
            settings=config.model_dump(mode="json", by_alias=True),
            before=before[-1],
        )
        write_document(run.out / "evaluate.json", document)
        serving = try_export(drafter_folder, run.out / "exported", config.target)
        report = write_report(run.out)
        for path in (report, run.out / "evaluate.json", *run.out.glob("figures/*.png")):
            run.artifact(path)
        if registry is None:  # a registered drafter is an artifact already
            run.artifact(drafter_folder)
    print_records(records)
    print_summary(run, before[-1], records[-1], serving)


def train_drafter(
    config: RunConfig, rollouts: Rollouts, initial: Path, run: RunLog, bars: Bars
) -> Path:
    """Train while shards arrive; returns the last checkpoint, which loads as a drafter."""
    setup = TrainerSetup(
        target=config.target,
        drafter_folder=str(initial),
        cache_folder=str(rollouts.folder),
        objective=config.objective,
        trainer=config.trainer,
    )
    group = TrainerGroup(setup, run.out / "checkpoints")
    saved = list_checkpoints(group.checkpoint_root)
    checkpoint = saved[-1] if saved else None
    with run.stage("train") as stage, closing(group):
        group.start(resume=checkpoint)
        threads_given = False
        while group.step < config.trainer.steps:
            rollouts.advance(timeout=0.0)
            group.add_shards(rollouts.refs(group.num_shards))
            if rollouts.done:
                group.finish_shards()
                if not threads_given and config.trainer.num_gpus == 0:
                    # The workers are gone: their cores go to the trainer.
                    group.set_threads(max(1, (os.cpu_count() or 1) // config.trainer.num_ranks))
                    threads_given = True
            metrics = group.train_step()
            if metrics is None:
                rollouts.advance(timeout=1.0)
                continue
            note = f"loss {metrics.values['loss']:.3f}"
            bars.update("train", group.step, config.trainer.steps, note)
            if group.step % config.trainer.log_every == 0:
                values = {f"train/{name}": value for name, value in metrics.values.items()}
                stage.log(values, step=group.step)
            if group.step % config.trainer.checkpoint_every == 0:
                checkpoint = group.save_checkpoint() or checkpoint
        checkpoint = group.save_checkpoint() or checkpoint
        while not rollouts.done:  # steps may end before the last prompts
            rollouts.advance(timeout=1.0)
    assert checkpoint is not None
    return checkpoint


if __name__ == "__main__":
    from paceline.pipelines.cli import run_as_module

    run_as_module("train")
