"""The attention equals dense masked attention over everything they may see, value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels import attention
from paceline.kernels.attention import context_block_attention

HEADS = [(4, 4), (6, 2), (3, 1)]  # query heads, key heads


@pytest.fixture(params=[40, 1 << 18], ids=["many_tiles", "one_tile"], autouse=True)
def tile_size(request, monkeypatch):
    """One block per tile, or all of a sequence in one."""
    monkeypatch.setattr(attention, "TILE_SCORES_CPU", request.param)


def _leaf(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float32).requires_grad_()


def _dense(query, key, value, visible):
    """[S, Q, H, d] with keys [S, K, G, d] and bool [S, Q, K], in plain scaled dot product form."""
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=visible[:, None],
        enable_gqa=True,
    )
    return out.transpose(1, 2)


def _dense_block(query, context_key, context_value, block_key, block_value, visible, block_mask):
    """Context rows and all blocks' rows laid side by side, blocks hidden from each other."""
    seqs, blocks, slots, heads, width = query.shape
    others = torch.eye(blocks, dtype=torch.bool)[:, None, :, None] & block_mask[None, :, None]
    own = others.reshape(blocks * slots, blocks * block_mask.shape[1]).expand(seqs, -1, -1)
    mask = torch.cat([visible.repeat_interleave(slots, dim=1), own], dim=-1)
    out = _dense(
        query.flatten(1, 2),
        torch.cat([context_key, block_key.flatten(1, 2)], dim=1),
        torch.cat([context_value, block_value.flatten(1, 2)], dim=1),
        mask,
    )
    return out.view(seqs, blocks, slots, heads, width)


def _assert_same(got, expected, leaves, generator):
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(got.shape, generator=generator)
    got_grads = torch.autograd.grad(got, leaves, upstream)
    expected_grads = torch.autograd.grad(expected, leaves, upstream)
    for got_grad, expected_grad in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(got_grad, expected_grad, atol=2e-5, rtol=2e-5)


def _block_leaves(generator, seqs, blocks, slots, rows, heads, key_heads, width=8):
    return [
        _leaf(generator, seqs, blocks, slots, heads, width),
        _leaf(generator, seqs, rows, key_heads, width),
        _leaf(generator, seqs, rows, key_heads, width),
        _leaf(generator, seqs, blocks, slots, key_heads, width),
        _leaf(generator, seqs, blocks, slots, key_heads, width),
    ]


@pytest.mark.parametrize("causal_block", [False, True])
@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
def test_block_attention_equals_dense(heads, key_heads, causal_block):
    generator = torch.Generator().manual_seed(heads)
    leaves = _block_leaves(generator, 2, 5, 3, 11, heads, key_heads)
    visible = torch.rand(2, 5, 11, generator=generator) > 0.5
    visible[0, 2] = False  # a block without context
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask = mask.tril() if causal_block else mask
    got = context_block_attention(*leaves, visible, mask)
    _assert_same(got, _dense_block(*leaves, visible, mask), leaves, generator)


def test_a_block_without_context_attends_to_itself_only():
    generator = torch.Generator().manual_seed(0)
    leaves = _block_leaves(generator, 1, 2, 3, 0, 2, 2)
    mask = torch.eye(3, dtype=torch.bool)
    got = context_block_attention(*leaves, torch.ones(1, 2, 0, dtype=torch.bool), mask)
    torch.testing.assert_close(got, leaves[4])


def test_hidden_context_rows_do_not_leak_into_blocks():
    generator = torch.Generator().manual_seed(1)
    leaves = _block_leaves(generator, 1, 3, 2, 9, 4, 2)
    visible = torch.arange(9) < torch.tensor([0, 2, 5])[None, :, None]
    mask = torch.ones(2, 2, dtype=torch.bool)
    clean = context_block_attention(*leaves, visible, mask)
    with torch.no_grad():
        leaves[1][:, 5:] = 1e4
        leaves[2][:, 5:] = -1e4
    dirty = context_block_attention(*leaves, visible, mask)
    assert torch.equal(clean, dirty)
    grad_key, grad_value = torch.autograd.grad(dirty.square().sum(), leaves[1:3])
    assert not grad_key[:, 5:].any() and not grad_value[:, 5:].any()
    assert grad_key[:, :5].any() and grad_value[:, :5].any()


def test_blocks_do_not_see_each_other():
    generator = torch.Generator().manual_seed(2)
    leaves = _block_leaves(generator, 1, 3, 2, 4, 2, 1)
    visible = torch.ones(1, 3, 4, dtype=torch.bool)
    out = context_block_attention(*leaves, visible, torch.ones(2, 2, dtype=torch.bool))
    grads = torch.autograd.grad(out[:, 1].square().sum(), [leaves[0], *leaves[3:]])
    assert all(not grad[:, [0, 2]].any() and grad[:, 1].any() for grad in grads)


def test_large_scores_stay_finite():
    generator = torch.Generator().manual_seed(3)
    leaves = _block_leaves(generator, 1, 2, 2, 6, 2, 2)
    scaled = [leaves[0] * 1e3, leaves[1] * 1e3, leaves[2], leaves[3] * 1e3, leaves[4]]
    visible = torch.ones(1, 2, 6, dtype=torch.bool)
    mask = torch.ones(2, 2, dtype=torch.bool)
    out = context_block_attention(*scaled, visible, mask)
    torch.testing.assert_close(out, _dense_block(*scaled, visible, mask), atol=1e-4, rtol=1e-4)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


def test_bfloat16_stays_near_float32():
    generator = torch.Generator().manual_seed(4)
    leaves = _block_leaves(generator, 1, 3, 4, 20, 4, 2, width=16)
    visible = torch.rand(1, 3, 20, generator=generator) > 0.3
    mask = torch.ones(4, 4, dtype=torch.bool)
    halves = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    got = context_block_attention(*halves, visible, mask)
    expected = context_block_attention(*(half.float() for half in halves), visible, mask)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-2)
    got_grads = torch.autograd.grad(got.float().square().sum(), halves)
    expected_grads = torch.autograd.grad(expected.square().sum(), halves)
    for got_grad, expected_grad in zip(got_grads, expected_grads, strict=True):
        error = (got_grad - expected_grad).float().norm() / expected_grad.float().norm()
        assert error < 2e-2


def _chain_leaves(generator, seqs, rows, heads, key_heads, num_steps, width=8):
    context = [_leaf(generator, seqs, rows, n, width) for n in (heads, key_heads, key_heads)]
    steps = [_leaf(generator, seqs, rows, key_heads, width) for _ in range(2 * num_steps)]
    return context, steps[:num_steps], steps[num_steps:]


def _chain(context, step_keys, step_values, lengths):
    """One step of training-time test: a block of one slot per row, whose keys are the steps'."""
    query, key, value = context
    row = torch.arange(query.shape[1])
    real = row < lengths[:, None]
    none = key.new_empty((*key.shape[:2], 0, *key.shape[2:]))
    out = context_block_attention(
        query.unsqueeze(2),
        key,
        value,
        torch.stack(step_keys, dim=2) if step_keys else none,
        torch.stack(step_values, dim=2) if step_values else none,
        (row <= row[:, None]) & real[:, :, None],
        torch.ones(1, len(step_keys), dtype=torch.bool),
    )
    return out.squeeze(2).masked_fill(~real[..., None, None], 0.0)


def _dense_chain(context, step_keys, step_values, lengths):
    """Context and every step laid side by side: lower triangle, then one diagonal per step."""
    query, key, value = context
    rows = query.shape[1]
    square = torch.ones(rows, rows, dtype=torch.bool)
    mask = torch.cat([square.tril(), *[torch.eye(rows).bool()] * len(step_keys)], dim=1)
    out = _dense(
        query,
        torch.cat([key, *step_keys], dim=1),
        torch.cat([value, *step_values], dim=1),
        mask.expand(len(lengths), -1, -1),
    )
    padding = torch.arange(rows) >= lengths[:, None]
    return out.masked_fill(padding[..., None, None], 0.0)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
def test_a_chain_equals_dense(heads, key_heads, num_steps):
    generator = torch.Generator().manual_seed(heads + num_steps)
    context, step_keys, step_values = _chain_leaves(generator, 2, 13, heads, key_heads, num_steps)
    lengths = torch.tensor([13, 6])
    got = _chain(context, step_keys, step_values, lengths)
    expected = _dense_chain(context, step_keys, step_values, lengths)
    _assert_same(got, expected, [*context, *step_keys, *step_values], generator)


def test_d36_training_time_test_gradients_reach_every_step():
    """Wrong normaliser gradients in the cached attention of training-time test."""
    generator = torch.Generator().manual_seed(9)
    context, step_keys, step_values = _chain_leaves(generator, 1, 4, 2, 1, 2, width=4)
    leaves = [x.detach().double() for x in (*context, *step_keys, *step_values)]
    lengths = torch.tensor([4])

    def loss(x: torch.Tensor, which: int) -> torch.Tensor:
        parts = [x if i == which else leaf for i, leaf in enumerate(leaves)]
        parts = [part.float() for part in parts]
        return _chain(parts[:3], parts[3:5], parts[5:], lengths).pow(3).sum()

    for which, leaf in enumerate(leaves):
        x = leaf.float().requires_grad_()
        (grad,) = torch.autograd.grad(loss(x, which), x)
        direction = torch.randn(leaf.shape, generator=generator).double()
        step = 1e-2
        numeric = (loss(leaf + step * direction, which) - loss(leaf - step * direction, which)) / (
            2 * step
        )
        torch.testing.assert_close((grad * direction).sum().float(), numeric, atol=2e-2, rtol=1e-2)


def test_padding_rows_do_not_leak_and_return_zero():
    generator = torch.Generator().manual_seed(5)
    context, step_keys, step_values = _chain_leaves(generator, 2, 8, 4, 2, 1)
    lengths = torch.tensor([8, 3])
    clean = _chain(context, step_keys, step_values, lengths)
    leaves = [*context, *step_keys, *step_values]
    with torch.no_grad():
        for leaf in leaves:
            leaf[1, 3:] = 1e4
    dirty = _chain(context, step_keys, step_values, lengths)
    assert torch.equal(clean, dirty) and not dirty[1, 3:].any()
    for grad in torch.autograd.grad(dirty.sum(), leaves):
        assert not grad[1, 3:].any() and grad[1, :3].isfinite().all()


def test_the_future_does_not_leak_into_the_past():
    generator = torch.Generator().manual_seed(6)
    context, step_keys, step_values = _chain_leaves(generator, 1, 6, 2, 2, 2)
    out = _chain(context, step_keys, step_values, torch.tensor([6]))
    for grad in torch.autograd.grad(out[:, 2].sum(), [*context[1:], *step_keys, *step_values]):
        assert not grad[:, 3:].any()


def test_no_sequence_of_scores_is_kept_for_the_backward_pass():
    generator = torch.Generator().manual_seed(7)
    leaves = _block_leaves(generator, 1, 16, 4, 512, 2, 1)
    visible = torch.ones(1, 16, 512, dtype=torch.bool)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        context_block_attention(*leaves, visible, torch.ones(4, 4, dtype=torch.bool))
    num_scores = 2 * 16 * 4 * 512
    assert kept and max(x.numel() for x in kept if x.is_floating_point()) < num_scores / 4


def test_head_counts_that_do_not_fit_are_named():
    generator = torch.Generator().manual_seed(8)
    leaves = _block_leaves(generator, 1, 1, 1, 2, 3, 2)
    ones = torch.ones(1, 1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        context_block_attention(*leaves, ones, torch.ones(1, 1, dtype=torch.bool))
