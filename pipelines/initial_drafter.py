"""The drafter before its first step: its vocabulary from the first responses, its layers.

The vocabulary is counted on the target's own responses, which have to be rolled out first; training
starts as soon as the sample is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.models.checkpoints import DRAFTER_RECORD, new_record, save_drafter
from paceline.models.drafter import build_drafter
from paceline.models.records import Prompt, ShardRef
from paceline.models.shards import read_shard
from paceline.models.target import Target
from paceline.models.vocab import DraftVocab, full_vocab, most_frequent_vocab
from paceline.models.warm_start import start_from_target
from paceline.pipelines.config import RunConfig
from paceline.pipelines.preparation import Preparation
from paceline.pipelines.rollout_stage import Rollouts
from paceline.pipelines.run_log import RunLog

RESPONSE_WEIGHT = 1_000_000
"""Response tokens come first in the draft vocabulary; prompt tokens fill what is left."""


def initial_drafter(
    config: RunConfig, prepared: Preparation, rollouts: Rollouts, run: RunLog
) -> Path:
    """The untrained drafter, once enough responses are there to choose its vocabulary from."""
    folder = run.out / "initial"
    if (folder / DRAFTER_RECORD).exists():
        return folder
    wanted = config.drafter.vocab_sample_tokens if config.drafter.draft_vocab_size else 0
    refs = rollouts.refs(0)
    while not rollouts.done and sum(ref.num_tokens for ref in refs) < wanted:
        rollouts.advance(timeout=1.0)
        refs = rollouts.refs(0)
    # Only the shards that the sample needs, so that the choice does not depend on timing.
    sample = [
        ref
        for i, ref in enumerate(refs)
        if sum(earlier.num_tokens for earlier in refs[:i]) < wanted
    ]
    prompts = prepared.prompts.prompts
    vocab = choose_vocab(config, prepared.target, prompts, rollouts.folder, sample)
    make_drafter(config, prepared.target, vocab, folder, run.run_id)
    return folder


def choose_vocab(
    config: RunConfig,
    target: Target,
    prompts: Sequence[Prompt],
    cache_folder: Path,
    refs: Sequence[ShardRef],
) -> DraftVocab:
    """The draft vocabulary: the tokens most frequent in the given shards' responses."""
    if config.drafter.draft_vocab_size is None:
        return full_vocab(target.spec.vocab_size)
    counts = torch.zeros(target.spec.vocab_size, dtype=torch.int64)
    for ref in refs:
        shard = read_shard(cache_folder, ref)
        responses = shard.input_ids[shard.loss_mask].long()
        counts += RESPONSE_WEIGHT * torch.bincount(responses, minlength=len(counts))
    for prompt in prompts:
        counts += torch.bincount(torch.tensor(prompt.token_ids), minlength=len(counts))
    return most_frequent_vocab(
        counts, config.drafter.draft_vocab_size, always=target.spec.eos_token_ids
    )


def make_drafter(
    config: RunConfig, target: Target, vocab: DraftVocab, folder: Path, mlflow_run_id: str
) -> None:
    """An untrained drafter of the recipe, saved into `folder`."""
    drafter = build_drafter(
        config.drafter,
        target.spec,
        tap_layer_ids=target.tap_layer_ids,
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
        vocab=vocab,
        seed=config.seed,
    )
    start_from_target(drafter, target)
    record = new_record(config.drafter, target, mlflow_run_id)
    save_drafter(folder, drafter, record)
