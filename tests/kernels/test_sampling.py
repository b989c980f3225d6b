"""The sampling distribution is transformers' own, and draws follow it."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from paceline.kernels import sampling
from paceline.kernels.sampling import probs_from_logits, sample


def _transformers_probs(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    ids = torch.zeros(logits.shape[0], 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.7, 5, 1.0), (1.0, 0, 0.9), (0.8, 20, 0.5), (1.0, 0, 1e-9)],
)
def test_probs_equal_transformers_warpers(temperature, top_k, top_p):
    logits = torch.randn(16, 301, generator=torch.Generator().manual_seed(0)) * 3
    expected = _transformers_probs(logits, temperature, top_k, top_p)
    got = probs_from_logits(logits, temperature, top_k, top_p)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(got > 0, expected > 0), "the kept tokens differ"


def test_top_k_keeps_ties_and_a_top_k_beyond_the_vocabulary_is_off():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert (probs_from_logits(logits, 1.0, top_k=2) > 0).tolist() == [[True, True, True, False]]
    torch.testing.assert_close(probs_from_logits(logits, 1.0, top_k=9), logits.softmax(-1))


def test_bfloat16_logits_are_worked_on_in_float32():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    probs = probs_from_logits(logits, 0.7, top_p=0.95)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(3), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0.0,), "temperature=0.0"), ((1.0, -1), "top_k=-1"), ((1.0, 0, 0.0), "top_p=0.0")],
)
def test_parameters_out_of_range_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        probs_from_logits(torch.zeros(1, 4), *arguments)


def test_draws_follow_the_distribution_and_never_hit_probability_zero():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    num_draws = 20_000
    draws = sample(probs.expand(num_draws, -1), torch.Generator().manual_seed(0))
    counts = draws.bincount(minlength=6).double()
    assert counts[probs == 0].sum() == 0
    expected = probs.double()[probs > 0] * num_draws
    chi_square = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    assert chi_square < 13.8  # 2 degrees of freedom, one in a thousand


@pytest.mark.parametrize(("draw", "token"), [(0.0, 1), (1.0 - 2.0**-53, 3)])
def test_the_smallest_and_largest_draw_hit_possible_tokens(monkeypatch, draw, token):
    monkeypatch.setattr(
        sampling, "uniforms", lambda shape, *_: torch.full(shape, draw, dtype=torch.float64)
    )
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    scales = torch.logspace(-30, 30, 41)[:, None]
    assert sample(weights * scales, torch.Generator()).unique().tolist() == [token]


def test_one_seed_gives_one_result_and_rows_are_independent():
    probs = torch.rand(8, 100, generator=torch.Generator().manual_seed(3))
    first = sample(probs, torch.Generator().manual_seed(5))
    again = sample(probs, torch.Generator().manual_seed(5))
    assert torch.equal(first, again) and first.unique().numel() > 1
