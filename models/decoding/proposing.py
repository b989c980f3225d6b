"""Drafting a round by a strategy: from a drafter's rows to one DraftProposal per sequence.

At a temperature, chains may be drawn from the drafter (`drawn`), which accepts more, or be its
likeliest tokens as trees always are, which emits the very tokens that plain decoding with the same
generator emits, whatever was drafted.

Shapes: B slots, W chains, V draft vocabulary, M nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.sampling import draw_without_replacement, probs_from_logits, sample
from paceline.models.backbones.block import BlockBackbone
from paceline.models.backbones.cache import DraftCache
from paceline.models.decoding import trees
from paceline.models.decoding.strategy import Strategy
from paceline.models.drafter import Drafter
from paceline.models.expansion import Expansion, MarginalExpansion
from paceline.models.records import DraftProposal, SamplingParams

GREEDY = SamplingParams()


def propose(
    drafter: Drafter,
    cache: DraftCache,
    slots: slice,
    anchor_ids: Tensor,
    strategy: Strategy,
    samplings: Sequence[SamplingParams],
    generators: Sequence[torch.Generator],
    *,
    drawn: bool,
) -> list[DraftProposal]:
    """A proposal of the strategy's form for each slot's anchor [B].

    Raises ValueError if the drafter cannot draft in this way.
    """
    if strategy.kind == "chain":
        chosen = list(samplings) if drawn else [GREEDY] * len(samplings)
        return drafter.propose(cache, slots, anchor_ids, strategy.depth, chosen, generators)
    expansion = drafter.expansion(cache, slots, anchor_ids, strategy.depth)
    if strategy.kind == "best_first":
        check_strategy(drafter, strategy)
        assert isinstance(expansion, MarginalExpansion)
        return trees.best_first(expansion, strategy, drafter.target_ids)
    if strategy.kind == "eagle2":
        table = trees.grow_eagle2(expansion, strategy, drafter.target_ids)
        return trees.best_nodes(table, strategy.budget)
    if strategy.kind == "beam":
        table = trees.grow_beams(expansion, strategy, drafter.target_ids)
        return trees.surviving_nodes(table)
    if drawn and any(sampling.temperature > 0.0 for sampling in samplings):
        return drawn_chains(drafter, expansion, strategy, samplings, generators)
    return trees.all_nodes(trees.grow_chains(expansion, strategy, drafter.target_ids))


def check_strategy(drafter: Drafter, strategy: Strategy) -> None:
    """Raise ValueError if the drafter cannot draft by the strategy."""
    limit = drafter.backbone.max_speculative_tokens
    if limit is not None and strategy.depth > limit:
        raise ValueError(
            f"strategy {strategy.name}: a block of {drafter.config.backbone.block_size} "
            f"({drafter.config.backbone.label_layout}) drafts 1 to {limit} tokens"
        )
    if strategy.kind == "best_first" and not isinstance(drafter.backbone, BlockBackbone):
        raise ValueError(
            f"strategy {strategy.name} needs a block drafter, whose slots have marginals; "
            "an autoregressive one drafts trees with eagle2_DEPTH_WIDTH_BUDGET"
        )


def drawn_chains(
    drafter: Drafter,
    expansion: Expansion,
    strategy: Strategy,
    samplings: Sequence[SamplingParams],
    generators: Sequence[torch.Generator],
) -> list[DraftProposal]:
    """`width` chains of each slot that start with different tokens, drawn without replacement.

    Greedy slots take their likeliest tokens instead. A slot whose drafter gives fewer than `width`
    tokens any probability has fewer chains.
    """
    logits_BWV = expansion.first()[:, None]
    levels: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in samplings]
    came_from_BW = None
    for level in range(strategy.depth):
        for i, (sampling, generator) in enumerate(zip(samplings, generators, strict=True)):
            if level == 0:
                drawn = _draw_first(logits_BWV[i, 0], sampling, generator, strategy.width)
            else:
                width = len(levels[i][0][0])
                drawn = _draw_next(logits_BWV[i, :width], sampling, generator)
            levels[i].append(drawn)
        if level + 1 == strategy.depth:
            break
        ids_BW = drafter.target_ids(_padded([slot[-1][0] for slot in levels], strategy.width))
        if came_from_BW is None:
            came_from_BW = torch.zeros_like(ids_BW)
        logits_BWV = expansion.next(ids_BW, came_from_BW)
        came_from_BW = torch.arange(strategy.width, device=ids_BW.device).expand_as(ids_BW)
    return [_chains(drafter, slot) for slot in levels]


def _draw_first(
    logits_V: Tensor, sampling: SamplingParams, generator: torch.Generator, width: int
) -> tuple[Tensor, Tensor | None]:
    """The tokens after the anchor, all different, and what each was drawn from."""
    if sampling.temperature == 0.0:
        return logits_V.topk(width).indices, None
    probs_1V = probs_from_logits(
        logits_V[None], sampling.temperature, sampling.top_k, sampling.top_p
    )
    return draw_without_replacement(probs_1V[0], width, generator)


def _draw_next(
    logits_WV: Tensor, sampling: SamplingParams, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """One token after each node of a level."""
    if sampling.temperature == 0.0:
        return logits_WV.argmax(dim=-1), None
    probs_WV = probs_from_logits(logits_WV, sampling.temperature, sampling.top_k, sampling.top_p)
    return sample(probs_WV, generator), probs_WV


def _padded(tokens: list[Tensor], width: int) -> Tensor:
    return torch.stack([torch.nn.functional.pad(t, (0, width - len(t))) for t in tokens])


def _chains(drafter: Drafter, levels: list[tuple[Tensor, Tensor | None]]) -> DraftProposal:
    """Node (level, chain) has number level * width + chain."""
    width, device = len(levels[0][0]), levels[0][0].device
    numbers = torch.arange(width * len(levels), device=device)
    drawn_from = [level_probs for _, level_probs in levels if level_probs is not None]
    probs = [drafter.over_target(level_probs) for level_probs in drawn_from]
    return DraftProposal(
        tokens=drafter.target_ids(torch.cat([tokens for tokens, _ in levels])),
        parent=(numbers - width).clamp(min=-1),
        depth=numbers // width,
        draft_probs=torch.cat(probs) if probs else None,
    )
