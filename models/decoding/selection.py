"""From names to a policy: static, length or bandit, over given strategies.

    policy = build_policy("length", ("chain_2", "chain_4"), target, drafter, max_batch=32)

`length` times both models on this device first, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.models.decoding.bandit_policy import BanditPolicy
from paceline.models.decoding.costs import measure_costs
from paceline.models.decoding.length_policy import LengthPolicy
from paceline.models.decoding.policies import Policy, StaticPolicy
from paceline.models.decoding.strategy import chosen_strategies
from paceline.models.drafter import Drafter
from paceline.models.target import Target

MAX_ROUND_TOKENS = 2048


def build_policy(
    kind: str,
    names: Sequence[str],
    target: Target,
    drafter: Drafter,
    *,
    num_speculative_tokens: int,
    max_batch: int,
    seed: int = 0,
) -> Policy:
    """A policy of a kind (static, length, bandit) for batches of up to `max_batch` sequences.

    Raises ValueError as `chosen_strategies`.
    """
    strategies = chosen_strategies(kind, names, num_speculative_tokens)
    if kind == "static":
        return StaticPolicy(strategies[0])
    if kind == "bandit":
        return BanditPolicy(strategies, max_round_tokens=MAX_ROUND_TOKENS, seed=seed)
    assert kind == "length", kind
    most = max_batch * (1 + max(strategy.budget for strategy in strategies))
    costs = measure_costs(
        target, drafter, max_batch=max_batch, max_tokens=min(most, MAX_ROUND_TOKENS)
    )
    return LengthPolicy(strategies, costs)
