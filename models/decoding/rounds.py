"""One round of several sequences: what the target reads, and what its answer decides.

A slot's row 0 is its anchor, row i + 1 is node i of its proposal. Slots with fewer nodes are padded
with their anchor, which nothing looks at. Node i's token is judged by the row of its parent:

    node          0     1     2         parent  -1  -1  0
    row           1     2     3
    judged by     0     0     1         accepted (0, 2): tokens of rows 0, 1 and 3 are committed

Greedy slots walk along the target's argmax. At a temperature, tokens that were drawn from the
drafter are accepted against the probabilities they were drawn with; tokens that were not drawn are
taken where the target's own draw meets them, so that such a round emits what plain decoding with
the same generator emits.

Shapes: B slots, R rows of each, V vocabulary, N committed tokens of all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.masks import ancestor_mask
from paceline.kernels.sampling import probs_from_logits, sample
from paceline.kernels.tree_verification import multi_candidate, tree_walk
from paceline.kernels.verification import chain_rejection, walk
from paceline.models.records import DraftProposal, SamplingParams, VerifyResult


@dataclass(frozen=True, slots=True)
class Nodes:
    """A proposal as Python numbers: token, parent (-1 the anchor) and depth of each node."""

    tokens: list[int]
    parent: list[int]
    depth: list[int]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parent == list(range(-1, len(self.parent) - 1))


NO_NODES = Nodes([], [], [])


@dataclass(frozen=True, slots=True)
class RoundInput:
    """What the target reads."""

    ids_BR: Tensor
    positions_BR: Tensor
    tree_BRR: Tensor | None  # None: all slots have chains, or nothing


@dataclass(frozen=True, slots=True)
class Decision:
    """What one slot commits."""

    result: VerifyResult
    tokens: list[int]
    logprobs: list[float]  # of those tokens under the distribution they were chosen from


def nodes_of(proposals: Sequence[DraftProposal]) -> list[Nodes]:
    """All proposals as numbers, with one transfer from the device."""
    if not proposals:
        return []
    fields = [[getattr(p, name) for p in proposals] for name in ("tokens", "parent", "depth")]
    flat = torch.stack([torch.cat(columns) for columns in fields]).tolist()
    found, first = [], 0
    for proposal in proposals:
        end = first + len(proposal.tokens)
        found.append(Nodes(*(numbers[first:end] for numbers in flat)))
        first = end
    return found


def round_input(
    anchors: Sequence[int], starts: Sequence[int], nodes: Sequence[Nodes], device: torch.device
) -> RoundInput:
    """Anchors and nodes of all slots side by side; `starts` are the anchors' positions."""
    count = 1 + max(len(n) for n in nodes)
    ids, positions, parents = [], [], []
    chains = all(n.is_chain for n in nodes)
    for anchor, start, n in zip(anchors, starts, nodes, strict=True):
        missing = count - 1 - len(n)
        ids.append([anchor, *n.tokens, *[anchor] * missing])
        if chains:
            positions.append(list(range(start, start + count)))
        else:
            positions.append([start, *(start + 1 + d for d in n.depth), *[start] * missing])
            parents.append([-1, *(parent + 1 for parent in n.parent), *[0] * missing])
    return RoundInput(
        ids_BR=torch.tensor(ids, device=device),
        positions_BR=torch.tensor(positions, device=device),
        tree_BRR=None if chains else ancestor_mask(torch.tensor(parents, device=device)),
    )


def decide(
    logits_BRV: Tensor,
    samplings: Sequence[SamplingParams],
    generators: Sequence[torch.Generator],
    nodes: Sequence[Nodes],
    draft_probs: Sequence[Tensor | None],
) -> list[Decision]:
    """The tokens that every slot commits, from the target's logits of its rows."""
    results: list[VerifyResult] = [NOTHING] * len(samplings)
    row_probs: dict[int, Tensor] = {}
    greedy = [i for i, sampling in enumerate(samplings) if sampling.temperature == 0.0]
    if greedy:
        chosen = logits_BRV if len(greedy) == len(samplings) else logits_BRV[greedy]
        for i, best_R in zip(greedy, chosen.argmax(dim=-1).tolist(), strict=True):
            results[i] = _result(*walk(best_R, nodes[i].tokens, nodes[i].parent))
    for (temperature, top_k, top_p), slots in _groups(samplings).items():
        probs_BRV = probs_from_logits(logits_BRV[slots], temperature, top_k, top_p)
        for i, probs_RV in zip(slots, probs_BRV, strict=True):
            row_probs[i] = probs_RV
            results[i] = _sampled(probs_RV, nodes[i], draft_probs[i], generators[i])
    tokens = [
        [*(n.tokens[node] for node in result.accepted), result.bonus_token]
        for n, result in zip(nodes, results, strict=True)
    ]
    logprobs = _logprobs(logits_BRV, results, tokens, row_probs)
    return [Decision(*parts) for parts in zip(results, tokens, logprobs, strict=True)]


NOTHING = VerifyResult(accepted=(), bonus_token=-1, rows=(0,))


def _groups(
    samplings: Sequence[SamplingParams],
) -> dict[tuple[float, int, float], list[int]]:
    """Slots that sample alike share one computation of their distributions."""
    found: dict[tuple[float, int, float], list[int]] = {}
    for i, s in enumerate(samplings):
        if s.temperature > 0.0:
            found.setdefault((s.temperature, s.top_k, s.top_p), []).append(i)
    return found


def _result(accepted: Sequence[int], bonus: int) -> VerifyResult:
    return VerifyResult(
        accepted=tuple(accepted), bonus_token=bonus, rows=(0, *(node + 1 for node in accepted))
    )


def _sampled(
    probs_RV: Tensor, nodes: Nodes, draft_probs: Tensor | None, generator: torch.Generator
) -> VerifyResult:
    """One slot at a temperature."""
    rows_M1V = probs_RV[: len(nodes) + 1]
    if not nodes:
        return _result((), int(sample(rows_M1V, generator)))
    device = probs_RV.device
    tokens_M = torch.tensor(nodes.tokens, device=device)
    if draft_probs is not None and nodes.is_chain:
        count, bonus = chain_rejection(rows_M1V, tokens_M, draft_probs, generator)
        return _result(range(count), bonus)
    parent_M = torch.tensor(nodes.parent, device=device)
    if draft_probs is not None:
        return _result(*multi_candidate(rows_M1V, tokens_M, parent_M, draft_probs, generator))
    return _result(*tree_walk(rows_M1V, tokens_M, parent_M, generator))


def _logprobs(
    logits_BRV: Tensor,
    results: Sequence[VerifyResult],
    tokens: Sequence[list[int]],
    row_probs: dict[int, Tensor],
) -> list[list[float]]:
    """Greedy: log-softmax of the logits. At a temperature: of the distribution drawn from."""
    found: list[list[float]] = [[] for _ in results]
    greedy = [i for i in range(len(results)) if i not in row_probs]
    rows = [(i, row) for i in greedy for row in results[i].rows]
    if rows:
        device = logits_BRV.device
        if len(rows) == logits_BRV.shape[0] * logits_BRV.shape[1]:
            logits_NV = logits_BRV.flatten(0, 1)
        else:
            index = torch.tensor(rows, device=device)
            logits_NV = logits_BRV[index[:, 0], index[:, 1]]
        token_N1 = torch.tensor([t for i in greedy for t in tokens[i]], device=device)[:, None]
        values = (logits_NV.gather(1, token_N1)[:, 0] - logits_NV.logsumexp(dim=1)).tolist()
        for (i, _), value in zip(rows, values, strict=True):
            found[i].append(value)
    for i, probs_RV in row_probs.items():
        rows_N = torch.tensor(results[i].rows, device=probs_RV.device)
        token_N = torch.tensor(tokens[i], device=probs_RV.device)
        found[i] = probs_RV[rows_N, token_N].log().tolist()
    return found
