"""What a run needs before its first rollout: the target's facts, prompts, taps and shard tasks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from paceline.actors.rollout_shards import ShardTask, shard_tasks
from paceline.models.drafter import default_tap_layer_ids
from paceline.models.prompts import PromptSet, load_prompts
from paceline.models.shard_checks import ShardSource
from paceline.models.target import Target
from paceline.pipelines.config import RunConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Facts that every stage shares."""

    target: Target
    tap_layer_ids: tuple[int, ...]
    source: ShardSource
    prompts: PromptSet
    tasks: tuple[ShardTask, ...]


def prepare(config: RunConfig) -> Preparation:
    """Load the target and the prompts, and check the configuration against both.

    Raises ValueError for whatever does not fit, before any work is done.
    """
    target = Target.load(config.target)
    taps = config.target.tap_layer_ids
    if taps is None:
        taps = default_tap_layer_ids(config.drafter, target.spec.num_layers)
    target.tap(taps)
    size = config.drafter.draft_vocab_size or 0
    if size > target.spec.vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size={size} is larger than the vocabulary of "
            f"{target.spec.model} ({target.spec.vocab_size}): give at most that"
        )
    prompts = load_prompts(config.data.prompts, tokenizer=target.tokenizer, data=config.data)
    check_positions(target, prompts, config.rollout.sampling.max_new_tokens)
    if prompts.skipped_too_long:
        logger.warning(
            "%d prompts longer than data.max_context_tokens=%d were skipped",
            prompts.skipped_too_long,
            config.data.max_context_tokens,
        )
    tasks = shard_tasks(
        prompts.prompts,
        shard_tokens=config.rollout.shard_tokens,
        response_tokens=config.rollout.sampling.max_new_tokens,
    )
    return Preparation(
        target=target,
        tap_layer_ids=taps,
        source=ShardSource(
            target_fingerprint=target.fingerprint,
            tokenizer_hash=target.tokenizer_hash,
            tap_layer_ids=taps,
        ),
        prompts=prompts,
        tasks=tuple(tasks),
    )


def check_positions(target: Target, prompts: PromptSet, max_new_tokens: int) -> None:
    """Raise ValueError if a prompt and its response would leave the target's context."""
    limit = target.spec.max_position_embeddings
    longest = max(len(prompt.token_ids) for prompt in prompts.prompts)
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"the longest prompt of {prompts.source} has {longest} tokens; with sampling."
            f"max_new_tokens={max_new_tokens} that exceeds the {limit} positions of "
            f"{target.spec.model}: lower data.max_context_tokens or max_new_tokens"
        )
