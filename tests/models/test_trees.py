"""Trees hold the nodes they promise: against every path of a small vocabulary, scored by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from paceline.kernels.masks import ancestor_mask
from paceline.models.decoding import trees
from paceline.models.decoding.strategy import parse_strategy
from paceline.models.expansion import MarginalExpansion
from paceline.models.records import DraftProposal

VOCAB = 7
DEPTH = 4
Path = tuple[int, ...]


class Table:
    """What follows a path depends on the whole path, as with an autoregressive drafter."""

    def __init__(self, slots: int, seed: int = 0) -> None:
        self.logits: dict[Path, Tensor] = {}
        self._slots, self._seed = slots, seed
        self._paths: list[list[Path]] = [[()] for _ in range(slots)]

    def of(self, slot: int, path: Path) -> Tensor:
        key = (slot, *path)
        if key not in self.logits:
            seed = hash((self._seed, *key)) % 2**31  # of integers: the same in every process
            generator = torch.Generator().manual_seed(seed)
            self.logits[key] = 2.0 * torch.randn(VOCAB, generator=generator)
        return self.logits[key]

    def first(self) -> Tensor:
        return torch.stack([self.of(slot, ()) for slot in range(self._slots)])

    def next(self, target_ids_BW: Tensor, parent_BW: Tensor) -> Tensor:
        rows = []
        for slot in range(self._slots):
            self._paths[slot] = [
                (*self._paths[slot][parent], token)
                for token, parent in zip(
                    target_ids_BW[slot].tolist(), parent_BW[slot].tolist(), strict=True
                )
            ]
            rows.append(torch.stack([self.of(slot, path) for path in self._paths[slot]]))
        return torch.stack(rows)

    def score(self, slot: int, path: Path) -> float:
        return sum(
            float(self.of(slot, path[:i]).log_softmax(-1)[token]) for i, token in enumerate(path)
        )


def same(ids: Tensor) -> Tensor:
    return ids


def paths(proposal: DraftProposal) -> list[Path]:
    """Tokens from the anchor to each node; also checks parents, depths and order."""
    found: list[Path] = []
    for node, (token, parent, depth) in enumerate(
        zip(
            proposal.tokens.tolist(),
            proposal.parent.tolist(),
            proposal.depth.tolist(),
            strict=True,
        )
    ):
        assert -1 <= parent < node
        above = () if parent < 0 else found[parent]
        assert depth == len(above)
        found.append((*above, token))
    assert len(set(found)) == len(found)
    ancestor_mask(proposal.parent)
    return found


def test_best_first_takes_the_likeliest_paths_of_the_marginals() -> None:
    logits = 1.5 * torch.randn(3, DEPTH, VOCAB, generator=torch.Generator().manual_seed(1))
    strategy = parse_strategy(f"best_first_{DEPTH}_5_20")
    log_probs = logits.log_softmax(-1)
    for slot, proposal in enumerate(
        trees.best_first(MarginalExpansion(logits), strategy, lambda ids: ids + 100)
    ):
        allowed = [log_probs[slot, k].topk(5).indices.tolist() for k in range(DEPTH)]
        scored = {
            path: sum(float(log_probs[slot, k, t]) for k, t in enumerate(path))
            for n in range(1, DEPTH + 1)
            for path in itertools.product(*allowed[:n])
        }
        best = sorted(scored, key=scored.__getitem__, reverse=True)[:20]
        assert {tuple(t - 100 for t in path) for path in paths(proposal)} == set(best)


def reference_eagle2(table: Table, slot: int, width: int, budget: int) -> set[Path]:
    candidates: dict[Path, float] = {}
    opened: list[Path] = [()]
    for _ in range(DEPTH):
        children = {}
        for path in opened:
            for token in table.of(slot, path).topk(width).indices.tolist():
                children[(*path, token)] = table.score(slot, (*path, token))
        candidates |= children
        opened = sorted(children, key=children.__getitem__, reverse=True)[:width]
    return set(sorted(candidates, key=candidates.__getitem__, reverse=True)[:budget])


@pytest.mark.parametrize(("width", "budget"), [(1, 4), (2, 6), (3, 12), (4, 40)])
def test_eagle2_keeps_the_best_nodes_of_all_levels(width: int, budget: int) -> None:
    strategy = parse_strategy(f"eagle2_{DEPTH}_{width}_{budget}")
    grown = trees.grow_eagle2(Table(3), strategy, same)
    for slot, proposal in enumerate(trees.best_nodes(grown, budget)):
        assert set(paths(proposal)) == reference_eagle2(Table(3), slot, width, budget)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_are_those_of_beam_search_with_their_prefixes_merged(width: int) -> None:
    table = Table(3, seed=2)
    strategy = parse_strategy(f"beam_{DEPTH}_{width}")
    for slot, proposal in enumerate(trees.surviving_nodes(trees.grow_beams(table, strategy, same))):
        beams: list[Path] = [()]
        for _ in range(DEPTH):
            longer = [(*path, token) for path in beams for token in range(VOCAB)]
            beams = sorted(longer, key=lambda p: table.score(slot, p), reverse=True)[:width]
        expected = {beam[:n] for beam in beams for n in range(1, DEPTH + 1)}
        assert set(paths(proposal)) == expected


def test_chains_start_differently_and_go_on_with_the_likeliest_token() -> None:
    table = Table(2, seed=3)
    strategy = parse_strategy(f"chains_3_{DEPTH}")
    for slot, proposal in enumerate(trees.all_nodes(trees.grow_chains(table, strategy, same))):
        expected = set()
        for token in table.of(slot, ()).topk(3).indices.tolist():
            path: Path = (token,)
            expected.add(path)
            while len(path) < DEPTH:
                path = (*path, int(table.of(slot, path).argmax()))
                expected.add(path)
        assert set(paths(proposal)) == expected


def test_equal_scores_never_part_a_node_from_its_parent() -> None:
    """Certain tokens: a child scores exactly as its parent, and ties are everywhere."""
    logits = torch.full((1, DEPTH, VOCAB), -torch.inf)
    logits[..., :2] = 0.0
    logits[0, 1:, 1] = -torch.inf
    for budget in range(1, 9):
        strategy = parse_strategy(f"eagle2_{DEPTH}_2_{budget}")
        grown = trees.grow_eagle2(MarginalExpansion(logits), strategy, same)
        (proposal,) = trees.best_nodes(grown, budget)
        assert len(paths(proposal)) == budget


@pytest.mark.parametrize(
    "name", ["tree_4", "chain", "chain_0", "chain_x", "chains_3", "eagle2_4_4", "beam_1_2_3"]
)
def test_a_strategy_of_no_known_form_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        parse_strategy(name)


@pytest.mark.parametrize(
    "name",
    ["plain", "chain_4", "chains_3_5", "beam_5_4", "eagle2_5_4_16", "best_first_6_7_32"],
)
def test_a_strategy_is_its_name(name: str) -> None:
    assert parse_strategy(name).name == name
