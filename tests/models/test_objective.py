"""The objective equals its plain reading: losses of the eager twins, weighted, summed, divided."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from paceline.kernels.losses import cross_entropy_rows, forward_kl_rows, tv_rows
from paceline.models.config import (
    BackboneConfig,
    DrafterConfig,
    LossConfig,
    ObjectiveConfig,
    TargetConfig,
    WeightConfig,
)
from paceline.models.drafter import Drafter, build_drafter
from paceline.models.kv_cache import SlotCache
from paceline.models.objectives.objective import compute_objective
from paceline.models.objectives.position_weights import position_weights
from paceline.models.records import DraftRows, TrainBatch
from paceline.models.target import Target
from paceline.models.vocab import vocab_from_ids

TAPS = (0, 1, 3)
LENGTHS = (19, 14)
BACKBONES = {
    "block": BackboneConfig(kind="block", num_layers=1, block_size=5, anchors_per_sequence=6),
    "autoregressive": BackboneConfig(kind="autoregressive", ttt_steps=3),
}
OBJECTIVES = {
    "ce data exp": ObjectiveConfig(weight=WeightConfig(kind="exp", value=4.0)),
    "ce argmax uniform": ObjectiveConfig(label="teacher_argmax"),
    "kl horizon": ObjectiveConfig(
        loss=LossConfig(kl=1.0),
        weight=WeightConfig(kind="horizon", value=0.8),
        label="teacher_dist",
    ),
    "kl and tv": ObjectiveConfig(loss=LossConfig(kl=0.3, tv=0.7), label="teacher_dist"),
}


@pytest.fixture(scope="module")
def target() -> Target:
    target = Target.load(TargetConfig(model="builtin:tiny-llama", device="cpu"))
    target.tap(TAPS)
    return target


@pytest.fixture(scope="module")
def batch(target: Target) -> TrainBatch:
    """Two documents of the target's real states, prompts of 5 and 4 tokens."""
    generator = torch.Generator().manual_seed(2)
    ids, aux, last = [], [], []
    for length in LENGTHS:
        tokens = torch.randint(4, 250, (1, length), generator=generator)
        with torch.no_grad():
            out = target.forward(
                tokens, torch.arange(length)[None], SlotCache(1, length), slice(0, 1)
            )
        ids.append(tokens[0])
        aux.append(out.aux_hidden_states[0])
        last.append(out.last_hidden_states[0])
    return TrainBatch(
        input_ids=torch.cat(ids),
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS]),
        document_ids=torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS)),
        cu_seqlens=torch.tensor([0, LENGTHS[0], sum(LENGTHS)]),
        loss_mask=torch.cat([torch.arange(n) >= p for n, p in zip(LENGTHS, (5, 4), strict=True)]),
        aux_hidden_states=torch.cat(aux),
        last_hidden_states=torch.cat(last),
    )


def make(target: Target, backbone: str) -> Drafter:
    ids = torch.arange(0, target.spec.vocab_size, 3)
    return build_drafter(
        DrafterConfig(backbone=BACKBONES[backbone], draft_vocab_size=len(ids)),
        target.spec,
        tap_layer_ids=TAPS,
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
        vocab=vocab_from_ids(ids, target.spec.vocab_size),
        seed=1,
    )


def plain_objective(
    drafter: Drafter,
    rows: DraftRows,
    batch: TrainBatch,
    target: Target,
    config: ObjectiveConfig,
) -> tuple[torch.Tensor, float]:
    """The same sums, one row at a time, over whole logits."""
    draft_ids = torch.nonzero(drafter.t2d)[:, 0]
    total, weights = torch.zeros(()), 0.0
    logits_RV = drafter.lm_head(rows.hidden)
    for i in range(len(rows.hidden)):
        label, slot = int(rows.label_index[i]), int(rows.slot[i])
        token = int(batch.input_ids[label])
        if not rows.valid[i] or token not in draft_ids:
            continue
        teacher_1V = target.logits(batch.last_hidden_states[label - 1])[draft_ids][None]
        weight = {
            "uniform": 1.0,
            "exp": math.exp(-slot / config.weight.value),
            "horizon": config.weight.value**slot,
        }[config.weight.kind]
        index = torch.nonzero(draft_ids == token)[0]
        if config.label == "teacher_argmax":
            index = teacher_1V.argmax(dim=-1)
        row_1V = logits_RV[i : i + 1]
        loss = config.loss.ce * cross_entropy_rows(row_1V, index)
        loss = loss + config.loss.kl * forward_kl_rows(row_1V, teacher_1V)
        loss = loss + config.loss.tv * tv_rows(row_1V, teacher_1V)
        total, weights = total + weight * loss[0], weights + weight
    return total, weights


def gradients(drafter: Drafter, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names = [name for name, p in drafter.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [drafter.get_parameter(n) for n in names], allow_unused=True)
    return {n: g for n, g in zip(names, found, strict=True) if g is not None}


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient_equal_the_plain_reading(
    backbone: str, name: str, target: Target, batch: TrainBatch
) -> None:
    drafter, config = make(target, backbone), OBJECTIVES[name]
    head = target.lm_head_weight[drafter.t2d]
    seed = torch.Generator().manual_seed
    ours = compute_objective(
        drafter, drafter.training_forward(batch, seed(7)), batch, head, (config,)
    )
    rows = drafter.training_forward(batch, seed(7))
    loss, weight = plain_objective(drafter, rows, batch, target, config)
    assert weight > 5
    torch.testing.assert_close(ours.loss_sum, loss, atol=1e-4, rtol=1e-4)
    assert float(ours.weight_sum) == pytest.approx(weight, rel=1e-5)
    expected = gradients(drafter, loss)
    found = gradients(drafter, ours.loss_sum)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, atol=2e-4, rtol=1e-3)


def test_b18_labels_outside_the_draft_vocabulary_are_not_supervised(
    target: Target, batch: TrainBatch
) -> None:
    drafter = make(target, "autoregressive")
    head = target.lm_head_weight[drafter.t2d]
    changed = torch.nonzero(batch.loss_mask & drafter.t2d[batch.input_ids])[0]
    input_ids = batch.input_ids.clone()
    input_ids[changed] = int(torch.nonzero(~drafter.t2d)[0])
    rows = drafter.training_forward(batch, torch.Generator().manual_seed(0))
    before, after = (
        compute_objective(drafter, rows, b, head, (OBJECTIVES["ce argmax uniform"],))
        for b in (batch, replace(batch, input_ids=input_ids))
    )
    reached = int((rows.valid & (rows.label_index == changed)).sum())
    assert reached > 0
    assert before.weight_sum - after.weight_sum == reached
    outside = [r.metrics["outside_draft_vocab"][0] for r in (before, after)]
    assert outside[1] - outside[0] == reached


def test_terms_are_added_and_the_first_ones_weights_divide(
    target: Target, batch: TrainBatch
) -> None:
    drafter = make(target, "block")
    head = target.lm_head_weight[drafter.t2d]
    rows = drafter.training_forward(batch, torch.Generator().manual_seed(0))
    first, second = OBJECTIVES["ce data exp"], OBJECTIVES["kl horizon"]
    alone = [compute_objective(drafter, rows, batch, head, (c,)) for c in (first, second)]
    both = compute_objective(drafter, rows, batch, head, (first, second))
    torch.testing.assert_close(both.loss_sum, alone[0].loss_sum + alone[1].loss_sum)
    assert both.weight_sum == alone[0].weight_sum != alone[1].weight_sum


def test_d35_the_first_drafted_token_weighs_most_and_never_nothing() -> None:
    slots = torch.arange(6)
    for kind, value in (("uniform", 1.0), ("exp", 4.0), ("horizon", 0.8)):
        weights = position_weights(WeightConfig(kind=kind, value=value), slots)
        assert weights[0] == 1.0
        assert (weights > 0).all()
        assert (weights.diff() <= 0).all()


@pytest.mark.parametrize("backbone", BACKBONES)
def test_d39_no_guess_reaches_into_another_document_or_before_the_response(
    backbone: str, target: Target, batch: TrainBatch
) -> None:
    drafter = make(target, backbone)
    rows = drafter.training_forward(batch, torch.Generator().manual_seed(0))
    valid = rows.valid
    labels, anchors = rows.label_index[valid], (rows.label_index - rows.slot - 1)[valid]
    assert valid.any()
    assert anchors.min() >= 0
    assert torch.equal(batch.document_ids[labels], batch.document_ids[anchors])
    assert batch.loss_mask[labels].all()
    # Both documents are supervised up to their last token.
    assert {LENGTHS[0] - 1, sum(LENGTHS) - 1} <= set(labels.tolist())


def test_the_estimate_counts_right_guesses_up_to_the_first_wrong_one(
    target: Target, batch: TrainBatch
) -> None:
    drafter = make(target, "autoregressive")
    head = target.lm_head_weight[drafter.t2d]
    rows = drafter.training_forward(batch, torch.Generator().manual_seed(0))
    result = compute_objective(drafter, rows, batch, head, (OBJECTIVES["ce data exp"],))
    guesses = torch.nonzero(drafter.t2d)[:, 0][drafter.lm_head(rows.hidden).argmax(dim=-1)]
    lengths, hits = [], [0, 0, 0]
    for first in range(0, len(rows.hidden), rows.num_slots):
        chain = range(first, first + rows.num_slots)
        right = [bool(guesses[i] == batch.input_ids[rows.label_index[i]]) for i in chain]
        for k, i in enumerate(chain):
            hits[k] += right[k] and bool(rows.valid[i])
        if all(rows.valid[i] for i in chain):
            lengths.append(1 + (right.index(False) if False in right else len(right)))
    assert result.metrics["acceptance_length_estimate"] == (sum(lengths), len(lengths))
    assert [result.metrics[f"accuracy_pos_{k}"][0] for k in range(3)] == hits
