"""Write a trained drafter in the form an inference engine loads.

    paceline export drafter=runs/quickstart/drafter format=vllm out=exported

`format` is vllm, sglang or speculators. What the engine could only serve as something else is
refused, with the option to change.
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

from paceline.models.checkpoints import load_drafter
from paceline.models.config import TargetConfig
from paceline.models.drafter import Drafter
from paceline.models.embedded import resolve_model
from paceline.models.export.folder import write_export
from paceline.models.export.sglang import sglang_note
from paceline.models.export.speculators import Verifier, recommended_speculative_tokens
from paceline.models.target import Target
from paceline.pipelines.config import load_config
from paceline.pipelines.run_log import open_beside

logger = logging.getLogger(__name__)

METHODS = {"autoregressive": "eagle3", "block": "dflash"}


def main(argv: list[str] | None = None) -> None:
    """Load, check, write, and say how the drafter is served."""
    argv = sys.argv[1:] if argv is None else argv
    config = load_config("export", argv)
    with open_beside("export", argv, config, config.drafter_folder) as run:
        target = Target.load(config.target)
        command = export_drafter(
            config.drafter_folder, config.format, config.out_dir, target, config.target
        )
        run.artifact(config.out_dir, f"exported-{config.format}")
    print(command)


def export_drafter(
    folder: Path, layout: str, out: Path, target: Target, target_config: TargetConfig
) -> str:
    """Write the drafter of `folder` for an engine into `out`; returns the command that serves it.

    Raises ValueError for what the engine could only serve as something else.
    """
    drafter, checkpoint = load_drafter(folder, target)
    write_export(drafter, layout, out, verifier_of(target, target_config))
    logger.info("%s: %s drafter, version %d", out, layout, checkpoint.drafter_version)
    if layout == "sglang" and (note := sglang_note(drafter)):
        logger.warning("%s", note)
    return serving_command(drafter, layout, out, target_config)


def try_export(folder: Path, out: Path, target: TargetConfig) -> str:
    """The vLLM export of a drafter and its serving command, or why no engine can serve it.

    Replaces what an earlier part of the same run exported.
    """
    if out.exists():
        shutil.rmtree(out)
    try:
        return export_drafter(folder, "vllm", out, Target.load(target), target)
    except ValueError as error:
        return f"not possible: {error}"


def verifier_of(target: Target, config: TargetConfig) -> Verifier:
    """The target as a server finds it: builtin ones by the folder they were converted into."""
    architectures = target.model.config.architectures or [type(target.model).__name__]
    return Verifier(resolve_model(config.model), tuple(architectures))


def serving_command(drafter: Drafter, layout: str, out: Path, config: TargetConfig) -> str:
    """The command that serves the target with this export."""
    kind = drafter.config.backbone.kind
    model, tokens = resolve_model(config.model), recommended_speculative_tokens(drafter)
    if layout == "sglang":
        algorithm = {"autoregressive": "EAGLE3", "block": "DFLASH"}[kind]
        # SGLang counts the anchor among the tokens of a round.
        steps = f"--speculative-num-draft-tokens {tokens + 1}"
        if kind == "autoregressive":
            steps = f"--speculative-num-steps {tokens} --speculative-eagle-topk 1 {steps}"
        return (
            f"python -m sglang.launch_server --model-path {model} --speculative-algorithm "
            f"{algorithm} --speculative-draft-model-path {out.resolve()} {steps}"
        )
    return (
        f"vllm serve {model} --dtype {config.dtype} --speculative-config "
        f'\'{{"method": "{METHODS[kind]}", "model": "{out.resolve()}", '
        f'"num_speculative_tokens": {tokens}}}\''
    )


if __name__ == "__main__":
    from paceline.pipelines.cli import run_as_module

    run_as_module("export")
