"""What is emitted is what the target would have emitted: token for token, or in distribution.

The distributions are enumerated: every drafted chain, every number of accepted tokens, every bonus
token. Each exactness test also runs wrong twins of the rule and must refuse them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from paceline.kernels.verification import (
    accept_probs,
    chain_rejection,
    greedy_walk,
    residual_probs,
)

VOCAB = 4
CHAIN = 3


def _walk(target: list[int], tokens: list[int], parents: list[int]) -> tuple[list[int], int]:
    return greedy_walk(torch.tensor(target), torch.tensor(tokens), torch.tensor(parents))


@pytest.mark.parametrize(
    ("target", "accepted", "bonus"),
    [
        ([7, 8, 9, 1], [0, 1, 2], 1),
        ([7, 8, 5, 1], [0, 1], 5),
        ([3, 8, 9, 1], [], 3),
        # A later match is worth nothing after a miss.
        ([7, 5, 9, 1], [0], 5),
    ],
)
def test_greedy_chain_keeps_the_matching_prefix(target, accepted, bonus):
    assert _walk(target, [7, 8, 9], [-1, 0, 1]) == (accepted, bonus)


def test_greedy_tree_descends_to_the_child_that_is_the_argmax():
    #         anchor -> 7 (0), 4 (1);  7 -> 8 (2), 9 (3);  4 -> 5 (4);  9 -> 6 (5)
    tokens, parents = [7, 4, 8, 9, 5, 6], [-1, -1, 0, 0, 1, 3]
    target = [7, 9, 5, 0, 6, 0, 2]  # after anchor 7; after node 0: 9; after node 3: 6; then 2
    assert _walk(target, tokens, parents) == ([0, 3, 5], 2)
    target[0] = 4
    assert _walk(target, tokens, parents) == ([1, 4], 0)


def test_greedy_walk_takes_nodes_in_any_order_and_twins_once():
    assert _walk([7, 1, 8, 8], [8, 7, 7], [1, -1, -1]) == ([1, 0], 1)


def test_greedy_walk_of_an_empty_proposal_is_plain_decoding():
    empty = torch.empty(0, dtype=torch.long)
    assert greedy_walk(torch.tensor([5]), empty, empty) == ([], 5)


def test_greedy_walk_names_sizes_and_parents_that_do_not_fit():
    with pytest.raises(ValueError, match="need 3 target rows"):
        _walk([1, 2], [1, 2], [-1, 0])
    with pytest.raises(ValueError, match="node 1 has parent 2"):
        _walk([1, 2, 3], [1, 2], [-1, 2])


def _conditional(seed: int, prefix: tuple[int, ...], zeros: bool) -> torch.Tensor:
    """A distribution that depends on the prefix, some entries 0."""
    generator = torch.Generator().manual_seed(
        seed + sum(7**i * (t + 1) for i, t in enumerate(prefix))
    )
    probs = torch.rand(VOCAB, generator=generator)
    if zeros:
        probs[int(torch.randint(VOCAB, (1,), generator=generator))] = 0.0
    return probs / probs.sum()


def _target(prefix: tuple[int, ...]) -> torch.Tensor:
    return _conditional(0, prefix, zeros=True)


def _draft(prefix: tuple[int, ...]) -> torch.Tensor:
    return _conditional(900, prefix, zeros=False)


def _law(accept: Callable, residual: Callable, point_mass: bool) -> torch.Tensor:
    """Probability of each sequence of CHAIN + 1 tokens; the target fills up what is not emitted."""
    law = torch.zeros((VOCAB,) * (CHAIN + 1), dtype=torch.float64)
    chains = [(2, 0, 1)] if point_mass else list(itertools.product(range(VOCAB), repeat=CHAIN))
    for chain in chains:
        target_rows = torch.stack([_target(chain[:k]) for k in range(CHAIN + 1)])
        draft_rows = torch.stack([_draft(chain[:k]) for k in range(CHAIN)])
        drawn = 1.0
        if not point_mass:
            drawn = float(
                torch.stack([draft_rows[k, chain[k]] for k in range(CHAIN)]).double().prod()
            )
        draft = None if point_mass else draft_rows
        kept = accept(target_rows[:-1], torch.tensor(chain), draft)
        reach = drawn
        for num_accepted in range(CHAIN + 1):
            weights, stop = target_rows[num_accepted].double(), 1.0
            if num_accepted < CHAIN:
                row = None if draft is None else draft[num_accepted]
                weights = residual(target_rows[num_accepted], chain[num_accepted], row)
                stop = 1.0 - float(kept[num_accepted])
            for bonus in range(VOCAB):
                share = reach * stop * float(weights[bonus] / weights.sum())
                _fill(law, (*chain[:num_accepted], bonus), share)
            if num_accepted < CHAIN:
                reach *= float(kept[num_accepted])
    return law


def _fill(law: torch.Tensor, prefix: tuple[int, ...], share: float) -> None:
    """Spreads the probability of a prefix over its continuations by the target."""
    if len(prefix) == CHAIN + 1:
        law[prefix] += share
    elif share > 0.0:
        for token, prob in enumerate(_target(prefix).double().tolist()):
            _fill(law, (*prefix, token), share * prob)


def _target_law() -> torch.Tensor:
    law = torch.zeros((VOCAB,) * (CHAIN + 1), dtype=torch.float64)
    _fill(law, (), 1.0)
    return law


@pytest.mark.parametrize("point_mass", [False, True], ids=["sampled", "point_mass"])
def test_chain_rejection_keeps_the_targets_law(point_mass):
    law = _law(accept_probs, residual_probs, point_mass)
    torch.testing.assert_close(law, _target_law(), atol=1e-7, rtol=0)


def _accept_all_likely(target_rows, tokens, draft_rows):
    """Wrong: keeps a token whenever the target gives it more than a tenth."""
    return (target_rows.gather(-1, tokens[:, None]).squeeze(-1) > 0.1).double()


def _accept_as_point_mass(target_rows, tokens, draft_rows):
    """Wrong for sampled tokens: forgets what they were drawn from."""
    return accept_probs(target_rows, tokens, None)


def _residual_is_target(target_row, token, draft_row):
    """Wrong: the bonus token after a rejection drawn from the target itself."""
    return target_row.double()


def _residual_only_drops_token(target_row, token, draft_row):
    """Wrong for sampled tokens: the point mass's residual."""
    return residual_probs(target_row, token, None)


@pytest.mark.parametrize(
    ("accept", "residual", "point_mass"),
    [
        (_accept_all_likely, residual_probs, False),
        (_accept_as_point_mass, residual_probs, False),
        (accept_probs, _residual_is_target, False),
        (accept_probs, _residual_only_drops_token, False),
        (accept_probs, _residual_is_target, True),
        (_accept_all_likely, residual_probs, True),
    ],
)
def test_the_enumeration_refuses_wrong_twins(accept, residual, point_mass):
    error = (_law(accept, residual, point_mass) - _target_law()).abs().max()
    assert error > 1e-3


def _emitted(point_mass: bool, num_draws: int) -> torch.Tensor:
    """Counts of (number accepted, first token emitted) over seeded runs of the whole rule."""
    counts = torch.zeros(2, VOCAB)
    generator = torch.Generator().manual_seed(11)
    target_rows = torch.stack([_target(()), _target((2,))])
    draft_row = _draft(())
    for _ in range(num_draws):
        token = 2 if point_mass else int(draft_row.multinomial(1, generator=generator))
        num_accepted, bonus = chain_rejection(
            target_rows,
            torch.tensor([token]),
            None if point_mass else draft_row[None],
            generator,
        )
        counts[num_accepted, token if num_accepted else bonus] += 1
    return counts


@pytest.mark.parametrize("point_mass", [False, True], ids=["sampled", "point_mass"])
def test_seeded_runs_follow_the_enumerated_law(point_mass):
    num_draws = 4000
    counts = _emitted(point_mass, num_draws).double()
    target = _target(()).double()
    draft = torch.eye(VOCAB)[2].double() if point_mass else _draft(()).double()
    accepted = torch.minimum(target, draft)
    expected = torch.stack([target - accepted, accepted]) * num_draws
    possible = expected > 1e-3
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 26.2  # at most 8 cells: one in a thousand


def test_equal_distributions_are_always_accepted():
    probs = torch.stack([_target(())] * 4)
    tokens = torch.tensor([int(_target(()).argmax())] * 3)
    for seed in range(50):
        accepted, _ = chain_rejection(probs, tokens, probs[:3], torch.Generator().manual_seed(seed))
        assert accepted == 3


def test_a_token_the_target_forbids_is_never_accepted():
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    for seed in range(50):
        result = chain_rejection(
            target, torch.tensor([0]), None, torch.Generator().manual_seed(seed)
        )
        assert result == (0, 1)


def test_an_empty_chain_only_draws_the_bonus_token():
    target = torch.tensor([[0.0, 0.0, 1.0]])
    empty = torch.empty(0, dtype=torch.long)
    assert chain_rejection(target, empty, None, torch.Generator()) == (0, 2)
    draft = torch.empty(0, 3)
    assert chain_rejection(target, empty, draft, torch.Generator()) == (0, 2)


def test_the_generator_advances_alike_whatever_is_accepted():
    states = []
    for row in ([1.0, 0.0], [0.0, 1.0]):
        generator = torch.Generator().manual_seed(0)
        chain_rejection(torch.tensor([row] * 3), torch.tensor([0, 0]), None, generator)
        states.append(generator.get_state())
    assert torch.equal(*states)


def test_chain_rejection_names_what_does_not_fit():
    half = torch.full((2, 2), 0.5)
    with pytest.raises(ValueError, match="need 3 target rows"):
        chain_rejection(half, torch.tensor([0, 1]), None, torch.Generator())
    with pytest.raises(ValueError, match="target's vocabulary"):
        chain_rejection(half, torch.tensor([0]), torch.ones(1, 1), torch.Generator())
    with pytest.raises(ValueError, match="draft token 1 at position 0 has draft probability 0"):
        chain_rejection(half, torch.tensor([1]), torch.tensor([[1.0, 0.0]]), torch.Generator())
