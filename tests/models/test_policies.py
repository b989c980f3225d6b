"""Policies in a small world: known costs, known acceptance, no clock."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.models.decoding.bandit_policy import BanditPolicy
from paceline.models.decoding.costs import CostTable, RoundCosts, measure_costs
from paceline.models.decoding.length_policy import AcceptanceEstimate, LengthPolicy
from paceline.models.decoding.policies import Policy, RoundReport
from paceline.models.decoding.requests import Request
from paceline.models.decoding.strategy import PLAIN, Strategy, chain, parse_strategy
from tests.models.engine_setup import GREEDY, drafter_for, engine_of, load, prompt, response, serve

CHAINS = [chain(k) for k in (1, 2, 3, 4, 6, 8)]
# Flat up to 8 tokens, as where weights are read once, then 3 ms for each.
TARGET = CostTable({1: 0.020, 8: 0.024, 64: 0.192, 512: 1.536})
DRAFT = CostTable({1: 0.002, 64: 0.010, 512: 0.08})
COSTS = RoundCosts(target=TARGET, draft=DRAFT, passes_per_depth=True)


class World:
    """Rounds of a batch whose drafts are each accepted with probability `rate`."""

    def __init__(self, rate: float, slower: float = 1.0, seed: int = 0) -> None:
        self.rate, self.slower = rate, slower
        self.seconds, self.tokens = 0.0, 0
        self.chosen: dict[str, int] = {}
        self._random = random.Random(seed)

    def rounds(self, policy: Policy, batch_size: int, count: int) -> None:
        for _ in range(count):
            strategy = policy.choose(batch_size, 0)
            accepted = tuple(self._accepted(strategy.depth) for _ in range(batch_size))
            seconds = COSTS.seconds(strategy, batch_size, 0) * self._random.uniform(0.95, 1.05)
            seconds *= self.slower if strategy.speculates else 1.0
            self.seconds += seconds
            self.tokens += sum(1 + n for n in accepted)
            self.chosen[strategy.name] = self.chosen.get(strategy.name, 0) + 1
            policy.observe(
                RoundReport(
                    strategy=strategy, batch_size=batch_size, accepted=accepted, seconds=seconds
                )
            )

    def _accepted(self, depth: int) -> int:
        count = 0
        while count < depth and self._random.random() < self.rate:
            count += 1
        return count


def plain_seconds_per_token(batch_size: int) -> float:
    return COSTS.seconds(PLAIN, batch_size, 0) / batch_size


def seconds_per_token(strategy: Strategy, batch_size: int, rate: float) -> float:
    tokens = sum(rate**k for k in range(strategy.depth + 1))
    return COSTS.seconds(strategy, batch_size, 0) / (batch_size * tokens)


def best_seconds_per_token(batch_size: int, rate: float) -> float:
    return min(seconds_per_token(strategy, batch_size, rate) for strategy in (PLAIN, *CHAINS))


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
def test_the_length_policy_is_near_the_best_and_hardly_ever_slower_than_plain(
    batch_size: int, rate: float
) -> None:
    world = World(rate)
    world.rounds(LengthPolicy(CHAINS, COSTS), batch_size, 1500)
    got = world.seconds / world.tokens
    assert got <= 1.03 * plain_seconds_per_token(batch_size)
    assert got <= 1.06 * best_seconds_per_token(batch_size, rate)


def test_a_cost_table_that_is_wrong_is_corrected_by_the_rounds_that_are_run() -> None:
    """Drafting takes three times what was measured: the policy turns it off."""
    world = World(0.6, slower=3.0)
    world.rounds(LengthPolicy(CHAINS, COSTS), 1, 1500)
    assert world.chosen["plain"] > 1400
    assert world.seconds / world.tokens <= 1.03 * plain_seconds_per_token(1)


def test_drafting_stops_in_large_batches_and_starts_again_in_the_tail() -> None:
    policy, chosen = LengthPolicy(CHAINS, COSTS), []
    for batch_size in (1, 64, 48, 24, 8, 4, 2, 1):
        world = World(0.7)
        world.rounds(policy, batch_size, 200)
        chosen.append(max(world.chosen, key=world.chosen.__getitem__))
    assert chosen[0] != "plain" and chosen[1:4] == ["plain"] * 3
    depths = [parse_strategy(name).depth for name in chosen[1:]]
    assert depths == sorted(depths) and depths[-1] >= 3


def test_a_drafter_that_became_better_is_noticed_without_being_told() -> None:
    policy = LengthPolicy(CHAINS, COSTS)
    World(0.0).rounds(policy, 1, 1000)
    better = World(0.9)
    better.rounds(policy, 1, 4000)
    assert better.chosen["plain"] < 3000
    policy.drafter_changed()
    fresh = World(0.9)
    fresh.rounds(policy, 1, 200)
    assert fresh.chosen.get("plain", 0) < 10


def test_what_the_drafter_missed_is_part_of_the_price() -> None:
    policy = LengthPolicy([chain(1)], COSTS, margin=0.0)
    gain = policy.tokens(chain(1)) * policy.seconds(PLAIN, 4, 0)
    behind = next(n for n in range(0, 10**6, 1000) if policy.seconds(chain(1), 4, n) > gain)
    assert policy.choose(4, 0) == chain(1) and policy.choose(4, behind) == PLAIN


def test_the_acceptance_estimate_is_the_share_at_each_depth() -> None:
    estimate = AcceptanceEstimate(4)
    generator = random.Random(0)
    rates = (0.9, 0.5, 0.7, 0.2)
    for _ in range(3000):
        count = 0
        while count < 4 and generator.random() < rates[count]:
            count += 1
        estimate.add([count], 4)
    expected = 1 + 0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.7 + 0.9 * 0.5 * 0.7 * 0.2
    assert estimate.tokens(4) == pytest.approx(expected, rel=0.05)
    assert estimate.tokens(0) == 1.0


def test_the_bandit_finds_the_best_arm_of_each_bucket_and_rests_in_large_batches() -> None:
    policy = BanditPolicy(CHAINS, seed=1)
    for batch_size in (1, 8, 40):
        world = World(0.8)
        world.rounds(policy, batch_size, 1200)
        favourite = max(world.chosen, key=world.chosen.__getitem__)
        if batch_size == 40:
            assert world.chosen == {"plain": 1200}
            continue
        # Medians of few whole tokens are coarse: the arm is good, not always the very best.
        got = seconds_per_token(parse_strategy(favourite), batch_size, 0.8)
        assert got <= 1.25 * best_seconds_per_token(batch_size, 0.8)
        assert world.chosen[favourite] > 600
        # One sequence gains by drafting; of eight, each draft costs as much as a token.
        assert (got < 0.8 * plain_seconds_per_token(batch_size)) == (batch_size == 1)


def test_the_bandit_reads_no_more_tokens_in_a_round_than_allowed() -> None:
    policy = BanditPolicy([chain(3), chain(63)], max_round_tokens=256)
    assert policy.arms(4) == [PLAIN, chain(3), chain(63)]
    assert policy.arms(5) == [PLAIN, chain(3)]
    assert policy.arms(32) == [PLAIN]


def test_the_bandit_explores_anew_for_a_new_drafter_and_repeats_itself() -> None:
    runs = []
    for _ in range(2):
        policy, world = BanditPolicy(CHAINS, seed=3), World(0.5)
        world.rounds(policy, 2, 300)
        policy.drafter_changed()
        assert policy.choose(2, 0) == CHAINS[0]
        runs.append(world.chosen)
    assert runs[0] == runs[1]


def test_a_cost_table_lies_on_its_lines() -> None:
    table = CostTable({8: 0.024, 1: 0.010, 2: 0.012})
    assert table.seconds(1) == 0.010 and table.seconds(2) == pytest.approx(0.012)
    assert table.seconds(5) == pytest.approx(0.018)
    assert table.seconds(14) == pytest.approx(0.036)
    assert CostTable({4: 0.1}).seconds(100) == 0.1
    for seconds in ({}, {1: 0.0}, {0: 1.0}):
        with pytest.raises(ValueError, match="positive seconds"):
            CostTable(seconds)


@pytest.mark.parametrize("name", ["fill_in", "eagle3"])
@torch.no_grad()
def test_measured_costs_drive_the_engine_and_leave_its_output_alone(name: str) -> None:
    target = load()
    drafter = drafter_for(target, name)
    costs = measure_costs(target, drafter, max_batch=4, max_tokens=20)
    assert [n for n, _ in costs.target.entries] == [1, 2, 4, 8, 16, 20]
    assert costs.passes_per_depth == (name == "eagle3")
    requests = [Request(prompt=prompt(i), sampling=GREEDY) for i in range(8)]
    plain = {i: response(s) for i, s in serve(engine_of(target, 4), requests).items()}
    policy = LengthPolicy([chain(1), chain(4)], costs)
    ended = serve(engine_of(target, 4, drafter, policy=policy), requests)
    assert {i: response(s) for i, s in ended.items()} == plain
