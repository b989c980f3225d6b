"""Masks, drawn out."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.masks import ancestor_mask, block_mask, visible_context_mask


def test_ancestor_mask_of_a_chain_is_causal_and_of_a_tree_its_ancestors():
    assert torch.equal(
        ancestor_mask(torch.tensor([-1, 0, 1])), torch.ones(3, 3, dtype=torch.bool).tril()
    )
    tree = ancestor_mask(torch.tensor([-1, -1, 0, 1, 2]))
    assert tree.long().tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]
    assert ancestor_mask(torch.empty(0, dtype=torch.long)).shape == (0, 0)


def test_ancestor_mask_of_a_batch_is_that_of_each_tree():
    generator = torch.Generator().manual_seed(0)
    parents = torch.stack(
        [
            torch.tensor([int(torch.randint(-1, i, (1,), generator=generator)) for i in range(20)])
            for _ in range(6)
        ]
    )
    together = ancestor_mask(parents)
    for parent, mask in zip(parents, together, strict=True):
        expected = torch.eye(20, dtype=torch.bool)
        for node, above in enumerate(parent.tolist()):
            if above >= 0:
                expected[node] |= expected[above]
        assert torch.equal(mask, expected)
        assert torch.equal(ancestor_mask(parent), expected)


def test_ancestor_mask_refuses_a_child_before_its_parent():
    with pytest.raises(ValueError, match="node 0 has parent 1"):
        ancestor_mask(torch.tensor([1, -1]))


def test_a_block_sees_the_rows_before_its_anchor_and_no_padding():
    mask = visible_context_mask(torch.tensor([[0, 3], [1, 4]]), torch.tensor([5, 2]), 5)
    assert mask.long().tolist() == [
        [[0, 0, 0, 0, 0], [1, 1, 1, 0, 0]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
    ]


def test_block_masks():
    assert block_mask(3, "bidirectional").all()
    assert torch.equal(block_mask(3, "block_causal"), torch.ones(3, 3).tril().bool())
    with pytest.raises(ValueError, match="'sliding'"):
        block_mask(3, "sliding")
