"""Draft, verify, commit: speculative decoding of one sequence, and plain decoding beside it.

Greedy output equals plain decoding token for token; sampled output has the target's distribution
(Leviathan et al., arXiv 2211.17192). The batch engine is another matter: here it must be right.

One round, anchor x7 (committed, not yet read by the target), K = 3, drafts d8 d9 d10:

    target pass reads    x7      d8      d9      d10        positions 7..10
    its rows decide      d8?     d9?     d10?    bonus
    d8 accepted, d9 not: commit d8 and the token that row d8 gives; rows x7, d8 are now context

Shapes: K draft tokens, V vocabulary.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from paceline.kernels.sampling import probs_from_logits
from paceline.kernels.verification import chain_rejection, greedy_walk
from paceline.models.decoding.generation import Generation, check_room, choose, truncate
from paceline.models.drafter import Drafter
from paceline.models.kv_cache import SlotCache
from paceline.models.records import AcceptanceTrace, DraftProposal, SamplingParams, VerifyResult
from paceline.models.target import Target, TargetOutput

ONE_SLOT = slice(0, 1)


@torch.no_grad()
def generate_plain(
    target: Target, prompt_ids: tuple[int, ...], sampling: SamplingParams
) -> Generation:
    """One token a pass: what speculation is measured against and audited with."""
    started = time.perf_counter()
    cache = SlotCache(1, check_room(target, len(prompt_ids), sampling, 0))
    generator = torch.Generator().manual_seed(sampling.seed)
    output = _read(target, cache, list(prompt_ids), 0)
    response: list[int] = []
    reason = None
    while reason is None:
        token = choose(target.logits(output.last_hidden_states[0, -1]), sampling, generator)
        kept, reason = truncate([token], len(response), sampling, target.spec.eos_token_ids)
        response += kept
        if reason is None:
            output = _read(target, cache, [token], len(prompt_ids) + len(response) - 1)
    return Generation(
        token_ids=tuple(response),
        finish_reason=reason,
        trace=AcceptanceTrace(),
        seconds=time.perf_counter() - started,
    )


@torch.no_grad()
def generate_speculative(
    target: Target,
    drafter: Drafter,
    prompt_ids: tuple[int, ...],
    sampling: SamplingParams,
    num_speculative_tokens: int,
) -> Generation:
    """Chains of `num_speculative_tokens` tokens, verified in one target pass each.

    Every round drafts the full chain, as engines do; tokens beyond a stop or the length limit are
    neither returned nor counted as accepted.
    """
    started = time.perf_counter()
    check_drafter(target, drafter, num_speculative_tokens)
    capacity = check_room(target, len(prompt_ids), sampling, num_speculative_tokens + 1)
    cache, draft_cache = SlotCache(1, capacity), drafter.start(1, capacity)
    generator = torch.Generator().manual_seed(sampling.seed)
    stop_ids = target.spec.eos_token_ids

    output = _read(target, cache, list(prompt_ids), 0)
    anchor = choose(target.logits(output.last_hidden_states[0, -1]), sampling, generator)
    response, reason = truncate([anchor], 0, sampling, stop_ids)
    aux, next_ids = output.aux_hidden_states[0], [*prompt_ids[1:], anchor]
    accepted: list[int] = []
    while reason is None:
        following = torch.tensor([next_ids], device=aux.device)
        drafter.extend(draft_cache, ONE_SLOT, aux[None], following, [len(next_ids)])
        (proposal,) = drafter.propose(
            draft_cache,
            ONE_SLOT,
            following[:, -1],
            num_speculative_tokens,
            [sampling],
            [generator],
        )
        start = len(prompt_ids) + len(response) - 1
        output = _read(target, cache, [anchor, *proposal.tokens.tolist()], start)
        logits_K1V = target.logits(output.last_hidden_states[0])
        result = verify_chain(logits_K1V, proposal, sampling, generator)
        committed = [*proposal.tokens[list(result.accepted)].tolist(), result.bonus_token]
        kept, reason = truncate(committed, len(response), sampling, stop_ids)
        response += kept
        accepted.append(min(len(result.accepted), len(kept)))
        anchor = committed[-1]
        aux, next_ids = output.aux_hidden_states[0, list(result.rows)], committed
    rounds = (num_speculative_tokens,) * len(accepted)
    return Generation(
        token_ids=tuple(response),
        finish_reason=reason,
        trace=AcceptanceTrace(proposed=rounds, verified=rounds, accepted=tuple(accepted)),
        seconds=time.perf_counter() - started,
    )


def verify_chain(
    logits_K1V: Tensor,
    proposal: DraftProposal,
    sampling: SamplingParams,
    generator: torch.Generator,
) -> VerifyResult:
    """Decide how much of a chain stays, from target logits after the anchor and each draft."""
    if sampling.temperature == 0.0:
        path, bonus = greedy_walk(logits_K1V.argmax(dim=-1), proposal.tokens, proposal.parent)
        accepted = tuple(path)
    else:
        probs = probs_from_logits(logits_K1V, sampling.temperature, sampling.top_k, sampling.top_p)
        count, bonus = chain_rejection(probs, proposal.tokens, proposal.draft_probs, generator)
        accepted = tuple(range(count))
    return VerifyResult(
        accepted=accepted, bonus_token=bonus, rows=(0, *(node + 1 for node in accepted))
    )


def check_drafter(target: Target, drafter: Drafter, num_speculative_tokens: int) -> None:
    """Raise ValueError if the target taps other layers or the block is too short for K."""
    if target.tap_layer_ids != drafter.tap_layer_ids:
        raise ValueError(
            f"the drafter reads the taps {list(drafter.tap_layer_ids)}, the target taps "
            f"{list(target.tap_layer_ids)}: set target.tap_layer_ids to the drafter's"
        )
    limit = drafter.backbone.max_speculative_tokens
    if num_speculative_tokens < 1 or (limit is not None and num_speculative_tokens > limit):
        raise ValueError(
            f"num_speculative_tokens={num_speculative_tokens}: a block of "
            f"{drafter.config.backbone.block_size} ({drafter.config.backbone.label_layout}) "
            f"drafts 1 to {limit} tokens"
        )


def _read(target: Target, cache: SlotCache, token_ids: list[int], start: int) -> TargetOutput:
    device = target.device
    positions = torch.arange(start, start + len(token_ids), device=device)[None]
    return target.forward(torch.tensor([token_ids], device=device), positions, cache, ONE_SLOT)
