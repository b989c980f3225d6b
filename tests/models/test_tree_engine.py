"""Every way to draft emits what the target alone emits, and keeps the rows of what it emitted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from paceline.models.decoding.bandit_policy import BanditPolicy
from paceline.models.decoding.policies import Policy, RoundReport, StaticPolicy
from paceline.models.decoding.requests import Request
from paceline.models.decoding.speculative import generate_plain
from paceline.models.decoding.strategy import PLAIN, Strategy, parse_strategy
from paceline.models.drafter import Drafter
from paceline.models.records import DraftProposal, SamplingParams
from paceline.models.target import Target
from tests.models.engine_setup import (
    BACKBONES,
    GREEDY,
    SAMPLED,
    drafter_for,
    engine_of,
    load,
    prompt,
    response,
    serve,
)

TREES = ("chains_3_3", "beam_3_4", "eagle2_3_4_7", "best_first_3_4_9")
PAIRS = [
    (backbone, name)
    for backbone, name in itertools.product(BACKBONES, TREES)
    if not (backbone.startswith("eagle") and name.startswith("best_first"))
]


class Cycle:
    """Another strategy every round, plain ones among them."""

    drawn = False

    def __init__(self, *names: str) -> None:
        self.strategies = tuple(parse_strategy(name) for name in names)
        self.reports: list[RoundReport] = []

    def choose(self, batch_size: int, behind: int) -> Strategy:
        return self.strategies[len(self.reports) % len(self.strategies)]

    def observe(self, report: RoundReport) -> None:
        self.reports.append(report)

    def drafter_changed(self) -> None:
        self.reports.clear()


class Oracle:
    """Drafts what the target will say, at a random place of a random tree, for known prompts."""

    def __init__(self, drafter: Drafter, answers: dict[int, tuple[int, ...]]) -> None:
        self._drafter, self._answers = drafter, answers
        self.tap_layer_ids, self.config = drafter.tap_layer_ids, drafter.config
        self.backbone = drafter.backbone
        self.said: dict[int, int] = {}
        self._random = torch.Generator().manual_seed(0)

    def start(self, num_slots: int, capacity: int):
        return self._drafter.start(num_slots, capacity)

    def extend(self, *arguments) -> None:
        self._drafter.extend(*arguments)

    def propose(self, cache, slots, anchors, depth, samplings, generators):
        return [
            self._tree(self._answers[sampling.seed], self.said[sampling.seed], depth)
            for sampling in samplings
        ]

    def count(self, prompt_id: str, tokens: list[int]) -> None:
        """What is already said; ids of prompts are their seeds."""
        self.said[int(prompt_id)] = self.said.get(int(prompt_id), 0) + len(tokens)

    def _tree(self, answer: tuple[int, ...], said: int, depth: int) -> DraftProposal:
        right = list(answer[said : said + depth])
        tokens, parents, depths, last = [], [], [], -1
        for level, token in enumerate(right):
            for wrong in range(int(torch.randint(0, 3, (1,), generator=self._random))):
                tokens.append((token + 1 + wrong) % 250)
                parents.append(last)
                depths.append(level)
            tokens.append(token)
            parents.append(last)
            depths.append(level)
            last = len(tokens) - 1
        integers = {"dtype": torch.int64}
        return DraftProposal(
            tokens=torch.tensor(tokens, **integers),
            parent=torch.tensor(parents, **integers),
            depth=torch.tensor(depths, **integers),
        )


@pytest.mark.parametrize(("backbone", "name"), PAIRS)
@torch.no_grad()
def test_greedy_trees_emit_plain_decoding(backbone: str, name: str) -> None:
    target = load()
    drafter = drafter_for(target, backbone)
    prompts = [prompt(i) for i in range(6)]
    expected = {p.prompt_id: generate_plain(target, p.token_ids, GREEDY).token_ids for p in prompts}
    policy = StaticPolicy(parse_strategy(name))
    for slots in (1, 4):
        ended = serve(
            engine_of(target, slots, drafter, policy=policy),
            [Request(prompt=p, sampling=GREEDY) for p in prompts],
        )
        assert {i: response(s) for i, s in ended.items()} == expected
        assert all(s.trace.num_drafts > 0 for s in ended.values())


@pytest.mark.parametrize("name", ["chain_3", *TREES])
@torch.no_grad()
def test_sampled_trees_emit_the_tokens_of_plain_decoding_with_the_same_seed(name: str) -> None:
    target = load()
    drafter = drafter_for(target, "fill_in")
    requests = [
        Request(prompt=prompt(i), sampling=replace(SAMPLED, seed=i, temperature=0.5))
        for i in range(8)
    ]
    plain = {i: response(s) for i, s in serve(engine_of(target, 1), requests).items()}
    policy = StaticPolicy(parse_strategy(name), drawn=False)
    for slots in (1, 5):
        ended = serve(engine_of(target, slots, drafter, policy=policy), requests)
        assert {i: response(s) for i, s in ended.items()} == plain


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_accepted_paths_of_trees_leave_the_rows_of_a_plain_pass(family: str) -> None:
    """Paths lie anywhere in their trees, so keys, values and captured rows must be moved."""
    target = load(family)
    requests = [Request(prompt=prompt(i), sampling=replace(GREEDY, seed=i)) for i in range(5)]
    plain = serve(engine_of(target, 5), requests)
    answers = {int(i): response(s) for i, s in plain.items()}
    oracle = Oracle(drafter_for(target), answers)
    policy = StaticPolicy(parse_strategy("chain_4"))
    policy.strategies = (replace(parse_strategy("chain_4"), budget=16),)
    told = [replace(request, on_tokens=oracle.count) for request in requests]
    ended = serve(engine_of(target, 3, oracle, policy=policy), told)
    assert {int(i): response(s) for i, s in ended.items()} == answers
    for i, sequence in ended.items():
        assert sequence.trace.num_accepted_tokens >= len(answers[int(i)]) - 6
        for field in ("aux_hidden_states", "last_hidden_states", "logprobs"):
            torch.testing.assert_close(
                getattr(sequence, field), getattr(plain[i], field), atol=1e-3, rtol=1e-3
            )


@pytest.mark.parametrize("backbone", ["fill_in", "eagle3"])
@torch.no_grad()
def test_strategies_may_change_every_round(backbone: str) -> None:
    target = load()
    drafter = drafter_for(target, backbone)
    names = ["plain", "chain_2", "plain", "plain", "eagle2_3_3_6", "chains_2_2", "beam_3_2"]
    policy = Cycle(*names)
    prompts = [prompt(i, 40 if i == 2 else None) for i in range(6)]
    sampled = {int(p.prompt_id) % 2 * 1.0 for p in prompts}
    assert sampled == {0.0, 1.0}
    requests = [
        Request(prompt=p, sampling=(GREEDY, SAMPLED)[int(p.prompt_id) % 2]) for p in prompts
    ]
    plain = {i: response(s) for i, s in serve(engine_of(target, 1), requests).items()}
    ended = serve(engine_of(target, 3, drafter, policy=policy), requests)
    assert {i: response(s) for i, s in ended.items()} == plain
    assert {report.strategy.name for report in policy.reports} == set(names)


@torch.no_grad()
def test_an_idle_drafter_catches_up_to_where_it_would_stand() -> None:
    """After many plain rounds its drafts are those of a drafter that read along."""
    target = load()
    drafter = drafter_for(target, "eagle3")

    class Late(Cycle):
        def choose(self, batch_size: int, behind: int) -> Strategy:
            return self.strategies[0] if len(self.reports) < 8 else self.strategies[1]

    request = [Request(prompt=prompt(1, 43), sampling=GREEDY)]
    late = serve(engine_of(target, 1, drafter, policy=Late("plain", "chain_3")), request)["1"]
    along = serve(engine_of(target, 1, drafter), request)["1"]
    assert response(late) == response(along)
    committed = list(itertools.accumulate(1 + n for n in along.trace.accepted))
    if 8 in committed:
        assert late.trace.accepted == along.trace.accepted[committed.index(8) + 1 :]
    assert sum(late.trace.accepted) + len(late.trace.accepted) + 9 == len(response(late))


@pytest.mark.parametrize("policy", [StaticPolicy(parse_strategy("chains_3_2")), BanditPolicy([])])
@torch.no_grad()
def test_sampled_second_tokens_of_drawn_chains_have_the_targets_law(policy: Policy) -> None:
    """Chains drawn without replacement, against plain decoding's draws of as many other seeds."""
    target = load()
    drafter = drafter_for(target, "fill_in")
    sampling = SamplingParams(temperature=1.0, top_k=4, max_new_tokens=3)
    counts = []
    for engine, first in (
        (engine_of(target, 32), 0),
        (engine_of(target, 32, drafter, policy=policy), 5000),
    ):
        requests = [
            Request(
                prompt=replace(prompt(2), prompt_id=f"n{n}"), sampling=replace(sampling, seed=n)
            )
            for n in range(first, first + 1500)
        ]
        seen: dict[int, int] = {}
        for sequence in serve(engine, requests).values():
            token = response(sequence)[1]
            seen[token] = seen.get(token, 0) + 1
        counts.append(seen)
    tokens = set(counts[0]) | set(counts[1])
    distance = 0.5 * sum(abs(counts[0].get(t, 0) - counts[1].get(t, 0)) for t in tokens) / 1500
    # Two samples of one law over about 16 tokens differ by 0.04 on average.
    assert distance < 0.08


@torch.no_grad()
def test_a_strategy_that_the_drafter_cannot_follow_is_refused_at_once() -> None:
    target: Target = load()
    with pytest.raises(ValueError, match="best_first_2_2_4 needs a block drafter"):
        policy = StaticPolicy(parse_strategy("best_first_2_2_4"))
        engine_of(target, 1, drafter_for(target, "eagle3"), policy=policy)
    with pytest.raises(ValueError, match="drafts 1 to 5 tokens"):
        policy = StaticPolicy(parse_strategy("beam_6_2"))
        engine_of(target, 1, drafter_for(target, "fill_in"), policy=policy)
    assert PLAIN.depth == 0
