"""The draft vocabulary: which tokens it keeps, and what d2t and t2d say of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.models.checkpoints import CheckpointError, load_drafter, new_record, save_drafter
from paceline.models.config import BackboneConfig, DrafterConfig, TargetConfig
from paceline.models.drafter import Drafter, build_drafter
from paceline.models.target import Target
from paceline.models.vocab import full_vocab, most_frequent_vocab, vocab_from_ids


def test_d2t_is_an_offset_and_t2d_a_mask() -> None:
    vocab = vocab_from_ids(torch.tensor([5, 0, 2]), 6)
    assert vocab.d2t.tolist() == [0, 1, 3]
    assert vocab.t2d.tolist() == [True, False, True, False, False, True]
    assert vocab.target_ids.tolist() == [0, 2, 5]


def test_the_most_frequent_tokens_are_kept_and_ties_go_to_the_lowest_ids() -> None:
    counts = torch.tensor([0, 7, 3, 3, 9, 3, 0])
    assert most_frequent_vocab(counts, 4).target_ids.tolist() == [1, 2, 3, 4]
    assert most_frequent_vocab(counts, 3, always=(6,)).target_ids.tolist() == [1, 4, 6]
    # More places than counted tokens: the lowest ids fill them.
    assert most_frequent_vocab(counts, 6).target_ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_whole_vocabulary_maps_every_token_to_itself() -> None:
    vocab = full_vocab(5)
    assert vocab.target_ids.tolist() == [0, 1, 2, 3, 4]
    assert vocab.t2d.all()


def test_a_draft_vocabulary_larger_than_the_targets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"draft_vocab_size=7 is larger .* of 6: give at most"):
        most_frequent_vocab(torch.ones(6), 7)


@pytest.fixture(scope="module")
def target() -> Target:
    target = Target.load(TargetConfig(model="builtin:tiny-llama", device="cpu"))
    target.tap((0, 1, 3))
    return target


def drafter_of(target: Target, ids: torch.Tensor) -> Drafter:
    return build_drafter(
        DrafterConfig(backbone=BackboneConfig(kind="autoregressive"), draft_vocab_size=len(ids)),
        target.spec,
        tap_layer_ids=(0, 1, 3),
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
        vocab=vocab_from_ids(ids, target.spec.vocab_size),
    )


def test_b14_b20_each_drafter_brings_its_own_map_whatever_was_made_before(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two drafters made in one working folder, sizes equal and different: no map is shared."""
    monkeypatch.chdir(tmp_path)
    choices = [torch.arange(0, 60, 2), torch.arange(1, 61, 2), torch.arange(80)]
    for i, ids in enumerate(choices):
        drafter = drafter_of(target, ids)
        save_drafter(tmp_path / str(i), drafter, new_record(drafter.config, target))
    for i, ids in enumerate(choices):
        loaded, _ = load_drafter(tmp_path / str(i), target)
        assert torch.equal(torch.nonzero(loaded.t2d)[:, 0], ids)
        assert torch.equal(loaded.lm_head.weight, target.lm_head_weight[ids])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"]


def test_b14_a_map_of_other_sizes_than_the_weights_is_refused(
    target: Target, tmp_path: Path
) -> None:
    small, large = drafter_of(target, torch.arange(40)), drafter_of(target, torch.arange(50))
    record = new_record(small.config, target)
    save_drafter(tmp_path, large, record)
    document = (tmp_path / "drafter.json").read_text()
    (tmp_path / "drafter.json").write_text(
        document.replace('"draft_vocab_size": 50', '"draft_vocab_size": 40')
    )
    with pytest.raises(CheckpointError, match=r"maps 50 draft tokens of \d+, but .* say 40 of"):
        load_drafter(tmp_path, target)
