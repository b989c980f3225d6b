"""From logits to the distribution a token is drawn from, and the draw itself.

Letters: R rows, V vocabulary, C tokens drawn without replacement.
"""

from __future__ import annotations

import torch
from torch import Tensor


def probs_from_logits(
    logits_RV: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """The distribution that sampling draws from: temperature, then top-k, then top-p.

    Same order and same tie rules as transformers' logits warpers, so that a plain `generate` call
    and a verifier agree on the distribution. Greedy decoding has no distribution: take the argmax.

    Args:
        logits_RV: [R, V], any float dtype; the work is done in float32.
        temperature: above 0.
        top_k: keep the k most likely tokens (and ties with the last of them); 0 is off.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 1 is
            off. At least one token is kept.

    Returns:
        [R, V] float32, rows sum to 1.

    Raises:
        ValueError: a parameter outside its range.
    """
    if temperature <= 0.0:
        raise ValueError(f"temperature={temperature} is not above 0: for greedy take the argmax")
    if top_k < 0:
        raise ValueError(f"top_k={top_k} is negative: use 0 to turn it off")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p} is outside (0, 1]: use 1.0 to turn it off")
    scaled_RV = logits_RV.float() / temperature
    if 0 < top_k < scaled_RV.shape[-1]:
        kth_R1 = scaled_RV.topk(top_k, dim=-1).values[..., -1:]
        scaled_RV = scaled_RV.masked_fill(scaled_RV < kth_R1, -torch.inf)
    probs_RV = scaled_RV.softmax(dim=-1)
    if top_p < 1.0:
        probs_RV = _keep_top_p(probs_RV, top_p)
    return probs_RV


def _keep_top_p(probs_RV: Tensor, top_p: float) -> Tensor:
    """Drops the tail whose total probability is at most 1 - top_p, and renormalises."""
    # Ascending, as transformers does it: ties at the cut are broken by the same order.
    ascending_RV, token_RV = probs_RV.sort(dim=-1, descending=False)
    dropped_RV = ascending_RV.cumsum(dim=-1) <= 1.0 - top_p
    dropped_RV[..., -1] = False
    dropped_RV = torch.zeros_like(dropped_RV).scatter(-1, token_RV, dropped_RV)
    kept_RV = probs_RV.masked_fill(dropped_RV, 0.0)
    return kept_RV / kept_RV.sum(dim=-1, keepdim=True)


def uniforms(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Float64 draws from [0, 1) made on the generator's device, so that one seed means one result.

    Args:
        shape: of the result.
        generator: on any device; a CPU generator gives the same draws whatever `device` is.
        device: where the result goes.
    """
    draws = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
    return draws.to(device)


def sample(probs_RV: Tensor, generator: torch.Generator) -> Tensor:
    """Draws one token per row by inverting the cumulative distribution, one uniform per row.

    A token of probability 0 is never drawn. Rows need not sum to 1: they are taken as weights.

    Args:
        probs_RV: [R, V], not negative, each row with a positive sum.
        generator: source of the randomness; advances by R draws.

    Returns:
        [R] int64 token ids.
    """
    cumulative_RV = probs_RV.double().cumsum(dim=-1)
    # A uniform is at most 1 - 2 ** -53, so in float64 the product stays below the total: the first
    # cumulative sum above it is that of a token with a positive weight.
    draw_R1 = uniforms((*probs_RV.shape[:-1], 1), generator, probs_RV.device)
    draw_R1 = draw_R1 * cumulative_RV[..., -1:]
    return torch.searchsorted(cumulative_RV, draw_R1, right=True).squeeze(-1)


def draw_without_replacement(
    probs_V: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draws distinct tokens one after another, each from what the earlier ones left.

    Args:
        probs_V: [V], not negative, with a positive sum; weights, as in `sample`.
        count: how many tokens, at least 0; fewer when fewer have a positive probability.
        generator: advances by one draw per returned token.

    Returns:
        [count] int64 token ids in the order they were drawn, and [count, V] in the dtype of
        `probs_V` the distribution each was drawn from: earlier tokens at 0, summing to 1.

    Raises:
        ValueError: a negative count.
    """
    if count < 0:
        raise ValueError(f"count={count} is negative: use 0 to draw nothing")
    count = min(count, int(probs_V.count_nonzero()))
    tokens_C = torch.empty(count, dtype=torch.long, device=probs_V.device)
    probs_CV = probs_V.new_empty(count, probs_V.shape[-1])
    weights_V = probs_V.double()
    for i in range(count):
        probs_CV[i] = weights_V / weights_V.sum()
        tokens_C[i : i + 1] = sample(probs_CV[i : i + 1], generator)
        weights_V = weights_V.index_fill(0, tokens_C[i : i + 1], 0.0)
    return tokens_C, probs_CV
