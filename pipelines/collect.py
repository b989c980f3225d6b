"""Let the target answer prompts and keep its hidden states, for a later `paceline train`.

    paceline collect recipe=eagle3 data.prompts=prompts.jsonl out=runs/x

`paceline train resume=runs/x` continues from here.
"""

from __future__ import annotations

import sys

from paceline.pipelines.cluster import ray_cluster
from paceline.pipelines.config import load_config
from paceline.pipelines.preparation import prepare
from paceline.pipelines.progress import progress_bars
from paceline.pipelines.rollout_stage import Rollouts
from paceline.pipelines.run_log import open_run


def main(argv: list[str] | None = None) -> None:
    """Roll out every prompt once and leave a complete cache."""
    argv = sys.argv[1:] if argv is None else argv
    config = load_config("collect", argv)
    with (
        open_run("collect", argv, config) as run,
        ray_cluster(config.cluster),
        progress_bars() as bars,
    ):
        with Rollouts(config, prepare(config), run, bars) as rollouts:
            while not rollouts.done:
                rollouts.advance(timeout=1.0)
    print(f"hidden states: {rollouts.folder}\ncontinue with: paceline train resume={run.out}")


if __name__ == "__main__":
    from paceline.pipelines.cli import run_as_module

    run_as_module("collect")
