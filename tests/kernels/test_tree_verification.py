"""Trees at a temperature: the emitted tokens have the target's law, or are the very tokens of it.

Laws are enumerated exactly: a stand-in for the generator takes one branch of every random choice
that drafting and verifying make, and the round is run again for each branch not taken yet.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator

import pytest
import torch

from paceline.kernels import sampling, tree_verification, verification
from paceline.kernels.sampling import draw_without_replacement, sample
from paceline.kernels.tree_verification import multi_candidate, tree_walk
from paceline.kernels.verification import chain_rejection, greedy_walk

VOCAB = 4
EXACT = 1e-12
CLEARLY_WRONG = 1e-3

# anchor -> 2 (0), 0 (1), 1 (2);  2 -> 2 (3), 3 (4);  0 -> 3 (5), 1 (6);  three levels in all
FIXED_TREE = ([2, 0, 1, 2, 3, 3, 1, 0, 2, 1, 3], [-1, -1, -1, 0, 0, 1, 1, 3, 3, 6, 6])
TWINS = ([2, 2, 0, 1, 3, 3], [-1, -1, -1, 0, 1, 0])


class Branches:
    """Stands for a generator: follows the choices it is given, then takes the first of each."""

    def __init__(self, given: tuple[int, ...]):
        self.given = given
        self.taken: tuple[int, ...] = ()
        self.untried: list[tuple[int, ...]] = []
        self.probability = 1.0

    def choose(self, weights: list[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0.0]
        if len(self.taken) < len(self.given):
            choice = self.given[len(self.taken)]
        else:
            choice = possible[0]
            self.untried += [(*self.taken, other) for other in possible[1:]]
        self.taken += (choice,)
        self.probability *= weights[choice] / sum(weights)
        return choice


class Uniform:
    """A draw from [0, 1) of which only the comparisons made so far are known."""

    def __init__(self, branches: Branches):
        self.branches, self.low, self.high = branches, 0.0, 1.0

    def __lt__(self, threshold: float) -> bool:
        cut = min(max(threshold, self.low), self.high)
        is_below = self.branches.choose([self.high - cut, cut - self.low]) == 1
        self.low, self.high = (self.low, cut) if is_below else (cut, self.high)
        return is_below


class Uniforms(list):
    def tolist(self) -> list[Uniform]:
        return list(self)

    def __lt__(self, thresholds: torch.Tensor) -> torch.Tensor:
        below = [draw < cut for draw, cut in zip(self, thresholds.tolist(), strict=True)]
        return torch.tensor(below, dtype=torch.bool)


@pytest.fixture
def enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the verifiers and draw_without_replacement run on Branches."""

    def branching_sample(weights: torch.Tensor, branches: Branches) -> torch.Tensor:
        return torch.tensor([branches.choose(row) for row in weights.tolist()])

    def branching_uniforms(shape: tuple[int], branches: Branches, device: object) -> Uniforms:
        return Uniforms(Uniform(branches) for _ in range(*shape))

    for module in (sampling, verification, tree_verification):
        monkeypatch.setattr(module, "sample", branching_sample)
        monkeypatch.setattr(module, "uniforms", branching_uniforms)


def _outcomes(run: Callable[[Branches], Hashable]) -> Iterator[tuple[Hashable, float]]:
    """Every outcome of a random computation, with the probability of the branch it ends."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        branches = Branches(pending.pop())
        yield run(branches), branches.probability
        pending += branches.untried


def _law(run: Callable[[Branches], Hashable]) -> dict[Hashable, float]:
    law: dict[Hashable, float] = defaultdict(float)
    for outcome, probability in _outcomes(run):
        law[outcome] += probability
    return law


@functools.cache
def _conditional(seed: int, prefix: tuple[int, ...], zeros: bool) -> torch.Tensor:
    """A distribution that depends on the prefix; with `zeros`, one entry is 0."""
    generator = torch.Generator().manual_seed(
        seed + sum(7**i * (t + 1) for i, t in enumerate(prefix))
    )
    weights = torch.rand(VOCAB, generator=generator, dtype=torch.float64)
    if zeros:
        weights[int(torch.randint(VOCAB, (1,), generator=generator))] = 0.0
    return weights / weights.sum()


def _target(prefix: tuple[int, ...]) -> torch.Tensor:
    return _conditional(0, prefix, zeros=True)


def _draft(prefix: tuple[int, ...]) -> torch.Tensor:
    return _conditional(900, prefix, zeros=False)


def _path(tokens: list[int], parents: list[int], node: int) -> tuple[int, ...]:
    """The tokens from the anchor's child down to a node; of node -1, none."""
    return () if node < 0 else (*_path(tokens, parents, parents[node]), tokens[node])


def _rows(tokens: list[int], parents: list[int], start: tuple[int, ...] = ()) -> torch.Tensor:
    """The target's rows for a proposal after the tokens `start`."""
    nodes = range(-1, len(tokens))
    return torch.stack([_target((*start, *_path(tokens, parents, node))) for node in nodes])


def _verified(rule: Callable, tokens: list[int], parents: list[int], *more) -> tuple[int, ...]:
    """The tokens that one round emits: accepted ones and the bonus token."""
    rows = _rows(tokens, parents)
    accepted, bonus = rule(rows, torch.tensor(tokens), torch.tensor(parents), *more)
    return (*(tokens[node] for node in accepted), bonus)


def _law_error(run: Callable[[Branches], tuple[int, ...]]) -> float:
    """Total variation between the first two tokens emitted and the target's first two.

    What a round leaves open is filled up by the target.
    """
    emitted = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for outcome, probability in _law(run).items():
        first, *rest = outcome
        emitted[first] += probability * (
            torch.eye(VOCAB, dtype=torch.float64)[rest[0]] if rest else _target((first,))
        )
    second = torch.stack([_target((token,)) for token in range(VOCAB)])
    return float((emitted - _target(())[:, None] * second).abs().sum()) / 2


Tree = tuple[list[int], list[int], torch.Tensor]


def _drawn_tree(branches: Branches, widths: list[int], again: list[int]) -> Tree:
    """widths[0] children of the anchor without replacement, again[i] below the i-th of them."""
    tokens, rows = draw_without_replacement(_draft(()), widths[0], branches)
    parents = [-1] * widths[0]
    for node, count in enumerate(again):
        below, below_rows = draw_without_replacement(_draft((int(tokens[node]),)), count, branches)
        tokens, rows = torch.cat([tokens, below]), torch.cat([rows, below_rows])
        parents += [node] * count
    return tokens.tolist(), parents, rows


@pytest.mark.parametrize("tree", [FIXED_TREE, TWINS], ids=["three_levels", "twins"])
def test_fixed_trees_keep_the_targets_law(enumerated, tree):
    assert _law_error(lambda b: _verified(tree_walk, *tree, b)) < EXACT
    assert _law_error(lambda b: _verified(multi_candidate, *tree, None, b)) < EXACT


def test_point_masses_are_accepted_as_often_as_in_a_walk(enumerated):
    walked = _law(lambda b: _verified(tree_walk, *FIXED_TREE, b))
    tried = _law(lambda b: _verified(multi_candidate, *FIXED_TREE, None, b))
    assert tried == pytest.approx(walked, abs=EXACT)
    assert {len(emitted) for emitted in walked} == {1, 2, 3, 4}


@pytest.mark.parametrize(("widths", "again"), [([2], [2, 1]), ([3], [1]), ([4], []), ([1], [3])])
def test_drawn_trees_keep_the_targets_law(enumerated, widths, again):
    def round_(branches):
        tokens, parents, rows = _drawn_tree(branches, widths, again)
        return _verified(multi_candidate, tokens, parents, rows, branches)

    assert _law_error(round_) < EXACT


@pytest.mark.parametrize(
    "rule", [tree_walk, lambda *args: multi_candidate(*args[:3], None, args[3])]
)
def test_drawn_trees_keep_the_targets_law_also_if_the_draws_are_forgotten(enumerated, rule):
    def round_(branches):
        tokens, parents, _ = _drawn_tree(branches, [2], [2])
        return _verified(rule, tokens, parents, branches)

    assert _law_error(round_) < EXACT


def test_siblings_drawn_with_replacement_keep_the_targets_law(enumerated):
    def round_(branches):
        tokens = [branches.choose(_draft(()).tolist()) for _ in range(3)]
        return _verified(multi_candidate, tokens, [-1] * 3, _draft(()).expand(3, -1), branches)

    assert _law_error(round_) < EXACT


def _forgets_the_removal(tokens, rows):
    return tokens, _draft(()).expand(3, -1)


def _sorts_the_siblings(tokens, rows):
    order = sorted(range(3), key=lambda node: -float(_target(())[tokens[node]]))
    return [tokens[node] for node in order], rows[order]


def _drops_unlikely_siblings(tokens, rows):
    kept = [node for node in range(3) if _target(())[tokens[node]] > 0.2]
    return [tokens[node] for node in kept], rows[kept]


@pytest.mark.parametrize(
    "change",
    [_forgets_the_removal, _sorts_the_siblings, _drops_unlikely_siblings],
)
def test_the_enumeration_refuses_misused_draws(enumerated, change):
    def round_(branches):
        tokens, _, rows = _drawn_tree(branches, [3], [])
        tokens, rows = change(tokens, rows)
        return _verified(multi_candidate, tokens, [-1] * len(tokens), rows, branches)

    assert _law_error(round_) > CLEARLY_WRONG


def _two_chains(branches: Branches) -> list[list[int]]:
    chains: list[list[int]] = [[], []]
    for chain in chains:
        for _ in range(2):
            chain.append(branches.choose(_draft(tuple(chain)).tolist()))
    return chains


def _rejection_on(chain: list[int], branches: Branches) -> tuple[int, ...]:
    draft_rows = torch.stack([_draft(tuple(chain[:k])) for k in range(len(chain))])
    rows = _rows(chain, list(range(-1, len(chain) - 1)))
    count, bonus = chain_rejection(rows, torch.tensor(chain), draft_rows, branches)
    return (*chain[:count], bonus)


def test_choosing_among_chains_by_target_score_breaks_the_law(enumerated):
    """Scores are seen after the draws: what is verified then depends on what it is."""

    def score(chain):
        return float(_target(())[chain[0]] * _target((chain[0],))[chain[1]])

    best = _law_error(lambda b: _rejection_on(max(_two_chains(b), key=score), b))
    first = _law_error(lambda b: _rejection_on(_two_chains(b)[0], b))
    merged = _law_error(lambda b: _verified(tree_walk, *_trie(_two_chains(b)), b))
    assert first < EXACT and merged < EXACT
    assert best > CLEARLY_WRONG


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point_mass"])
@pytest.mark.parametrize("chain", [[2, 3, 3], [2, 3], []], ids=len)
def test_a_chain_is_verified_as_by_chain_rejection(enumerated, chain, drawn):
    parents = list(range(-1, len(chain) - 1))
    rows, tokens = _rows(chain, parents), torch.tensor(chain, dtype=torch.long)
    draft_rows = torch.stack([_draft(tuple(chain[:k])) for k in range(len(chain) + 1)])[:-1]
    draft_rows = draft_rows if drawn else None

    def tree_rule(branches):
        accepted, bonus = multi_candidate(
            rows, tokens, torch.tensor(parents, dtype=torch.long), draft_rows, branches
        )
        assert accepted == list(range(len(accepted)))
        return len(accepted), bonus

    expected = _law(lambda branches: chain_rejection(rows, tokens, draft_rows, branches))
    assert _law(tree_rule) == pytest.approx(expected, abs=EXACT)
    assert len(chain) == 0 or len(expected) > 4


def test_a_chain_and_a_seed_give_the_very_tokens_of_chain_rejection():
    chain, parents = [2, 3, 3], [-1, 0, 1]
    rows, tokens = _rows(chain, parents), torch.tensor(chain)
    draft_rows = torch.stack([_draft(tuple(chain[:k])) for k in range(3)])
    counts = set()
    for seed in range(100):
        count, bonus = chain_rejection(rows, tokens, draft_rows, _seeded(seed))
        accepted = multi_candidate(rows, tokens, torch.tensor(parents), draft_rows, _seeded(seed))
        assert accepted == (list(range(count)), bonus)
        counts.add(count)
    assert counts == {0, 1, 2, 3}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _trie(chains: list[list[int]]) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    parents: list[int] = []
    node_at: dict[tuple[int, ...], int] = {(): -1}
    for chain in chains:
        for end in range(1, len(chain) + 1):
            prefix = tuple(chain[:end])
            if prefix not in node_at:
                node_at[prefix] = len(tokens)
                tokens.append(prefix[-1])
                parents.append(node_at[prefix[:-1]])
    return tokens, parents


def _random_tree(rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    """Any shape, siblings may be twins, children may come before their parents."""
    shuffled = rng.sample(range(size), size)
    tokens, parents = [0] * size, [0] * size
    for node in range(size):
        above = rng.randrange(-1, node)
        tokens[shuffled[node]] = rng.randrange(VOCAB)
        parents[shuffled[node]] = -1 if above < 0 else shuffled[above]
    return tokens, parents


def _random_chains(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(3)] for _ in range(count)]


@pytest.mark.parametrize(
    ("propose", "most_accepted"),
    [
        (lambda rng: _trie(_random_chains(rng, 1)), 3),
        (lambda rng: _trie(_random_chains(rng, 5)), 3),
        (lambda rng: _random_tree(rng, 12), 4),
        (lambda rng: ([], []), 0),
    ],
    ids=["chain", "chains", "tree", "empty"],
)
def test_a_walk_emits_the_very_tokens_of_plain_sampling(propose, most_accepted):
    longest = 0
    for seed in range(200):
        rng, walking, plain = random.Random(seed), _seeded(seed), _seeded(seed)
        emitted: list[int] = []
        while len(emitted) < 6:
            tokens, parents = propose(rng)
            accepted, bonus = tree_walk(
                _rows(tokens, parents, tuple(emitted)),
                torch.tensor(tokens, dtype=torch.long),
                torch.tensor(parents, dtype=torch.long),
                walking,
            )
            assert [parents[node] for node in accepted] == [-1, *accepted][: len(accepted)]
            emitted += [*(tokens[node] for node in accepted), bonus]
            longest = max(longest, len(accepted))
        expected: list[int] = []
        while len(expected) < len(emitted):
            expected.append(int(sample(_target(tuple(expected))[None], plain)))
        assert emitted == expected
        assert torch.equal(walking.get_state(), plain.get_state())
    assert longest >= most_accepted


def test_of_twins_the_first_is_taken():
    tokens, parents = torch.tensor([1, 1, 2]), torch.tensor([-1, -1, 1])
    rows = torch.eye(3, dtype=torch.float64)[[1, 2, 2, 0]]
    assert tree_walk(rows, tokens, parents, _seeded(0)) == ([0], 2)
    assert multi_candidate(rows, tokens, parents, None, _seeded(0)) == ([0], 2)


def test_a_certain_target_is_walked_greedily():
    lengths = set()
    for seed in range(50):
        rng = random.Random(seed)
        tokens, parents = (torch.tensor(numbers) for numbers in _random_tree(rng, 10))
        best = torch.tensor([rng.randrange(VOCAB) for _ in range(11)])
        rows = torch.eye(VOCAB)[best]
        draft_rows = torch.rand(10, VOCAB, generator=_seeded(seed)) + 0.1
        expected = greedy_walk(best, tokens, parents)
        assert tree_walk(rows, tokens, parents, _seeded(seed)) == expected
        assert multi_candidate(rows, tokens, parents, None, _seeded(seed)) == expected
        drawn_from = draft_rows / draft_rows.sum(-1, keepdim=True)
        assert multi_candidate(rows, tokens, parents, drawn_from, _seeded(seed)) == expected
        lengths.add(len(expected[0]))
    assert len(lengths) > 2


def test_seeded_rounds_in_float32_follow_the_targets_law():
    num_rounds, generator = 2000, _seeded(5)
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    rows = _rows([0, 1, 2], [-1] * 3).float()
    for _ in range(num_rounds):
        tokens, drawn_from = draw_without_replacement(_draft(()).float(), 2, generator)
        accepted, bonus = multi_candidate(
            rows[:3], tokens, torch.tensor([-1, -1]), drawn_from, generator
        )
        counts[int(tokens[accepted[0]]) if accepted else bonus] += 1
    expected = _target(()) * num_rounds
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected) ** 2 / expected)[expected > 0].sum()
    assert chi_square < 13.8  # 2 degrees of freedom, one in a thousand


def test_multi_candidate_advances_the_generator_alike_whatever_is_accepted():
    tokens, parents, states = torch.tensor([0, 1, 0]), torch.tensor([-1, -1, 0]), []
    for best in range(3):
        generator = _seeded(0)
        multi_candidate(torch.eye(3)[[best] * 4], tokens, parents, None, generator)
        states.append(generator.get_state())
    expected = _seeded(0)
    torch.rand(4, generator=expected, dtype=torch.float64)
    assert all(torch.equal(state, expected.get_state()) for state in states)


def test_drawing_without_replacement_has_the_law_of_one_draw_after_another(enumerated):
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)

    def draw(branches):
        tokens, rows = draw_without_replacement(2.0 * probs, 3, branches)
        left = probs.clone()
        for token, row in zip(tokens, rows, strict=True):
            assert (row - left / left.sum()).abs().max() < 1e-15
            left[token] = 0.0
        return tuple(tokens.tolist())

    expected = {
        (first, second, third): float(probs[first] * probs[second] / (1 - probs[first]))
        for first, second, third in itertools.permutations([0, 2, 3])
    }
    assert _law(draw) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize(("count", "drawn"), [(0, 0), (2, 2), (3, 3), (9, 3)])
def test_no_more_tokens_are_drawn_than_are_possible(count, drawn):
    probs = torch.tensor([0.0, 0.25, 0.0, 1e-30, 0.75])
    for seed in range(20):
        generator, expected = _seeded(seed), _seeded(seed)
        tokens, rows = draw_without_replacement(probs, count, generator)
        assert rows.shape == (drawn, 5) and rows.dtype == probs.dtype
        assert tokens.unique().shape == (drawn,) and set(tokens.tolist()) <= {1, 3, 4}
        torch.rand(drawn, generator=expected, dtype=torch.float64)
        assert torch.equal(generator.get_state(), expected.get_state())


def test_what_does_not_fit_is_named():
    half, both, generator = torch.full((3, 2), 0.5), torch.tensor([0, 1]), torch.Generator()
    roots = torch.tensor([-1, -1])
    for rule in (tree_walk, lambda *args: multi_candidate(*args[:3], None, args[3])):
        with pytest.raises(ValueError, match="2 draft tokens need 3 target rows and 2 parents"):
            rule(half[:2], both, roots, generator)
        with pytest.raises(ValueError, match="got 3 and 1"):
            rule(half, both, roots[:1], generator)
        with pytest.raises(ValueError, match=r"node 1 has parent 2, outside -1\.\.1"):
            rule(half, both, torch.tensor([-1, 2]), generator)
        with pytest.raises(ValueError, match="node 0 has parent -2"):
            rule(half, both, torch.tensor([-2, 0]), generator)
    with pytest.raises(ValueError, match=r"draft_probs is \(2, 3\), 2 nodes need \(2, 2\)"):
        multi_candidate(half, both, roots, torch.ones(2, 3), generator)
    with pytest.raises(ValueError, match=r"node 1 holds token 2, outside .* 0\.\.1: map"):
        multi_candidate(half, torch.tensor([0, 2]), roots, None, generator)
    impossible = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    named = r"node 1 holds token 1, whose draft probability is 0\.0: pass the distribution"
    with pytest.raises(ValueError, match=named):
        multi_candidate(half, both, roots, impossible, generator)
    with pytest.raises(ValueError, match="count=-1 is negative"):
        draw_without_replacement(half[0], -1, generator)
