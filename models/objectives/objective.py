"""Objective = token loss x position weight x label source, summed over supervised rows.

The trainer divides by the sum of weights over all ranks; nothing is normalised here. Of several
terms the losses are added up and the first one's weights divide them, so that a term keeps its
scale when another is added.

Label sources for a row that predicts x_t: `data` is x_t itself; `teacher_argmax` and
`teacher_dist` come from lm_head(last_hidden_states[t - 1]) over the draft vocabulary. A row whose
token x_t lies outside the draft vocabulary is not supervised: the drafter cannot propose it, and
the teacher's distribution, cut to the draft vocabulary and renormalised, would lack its main mass.

Shapes: R supervised rows, K slots, D width, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.linear_losses import linear_loss
from paceline.models.config import ObjectiveConfig
from paceline.models.drafter import Drafter
from paceline.models.objectives.position_weights import position_weights
from paceline.models.records import DraftRows, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveResult:
    """Sums over one micro-batch."""

    loss_sum: Tensor  # scalar, differentiable
    weight_sum: Tensor  # scalar, of the first term
    metrics: dict[str, tuple[float, float]]
    """Name -> (sum, count), so that ranks can be added up before dividing."""


def compute_objective(
    drafter: Drafter,
    rows: DraftRows,
    batch: TrainBatch,
    teacher_head_VD: Tensor,
    configs: tuple[ObjectiveConfig, ...],
) -> ObjectiveResult:
    """Loss of the rows that a training forward produced.

    `teacher_head_VD` holds the target's lm_head rows of the draft vocabulary [Vd, D].
    """
    labels_R = batch.input_ids[rows.label_index]
    representable_R = drafter.t2d[labels_R]
    supervised_R = rows.valid & representable_R
    draft_labels_R = (drafter.t2d.long().cumsum(0) - 1)[labels_R].clamp(min=0)
    loss_sum = rows.hidden.new_zeros((), dtype=torch.float32)
    first_weights_R = position_weights(configs[0].weight, rows.slot) * supervised_R
    correct_R = torch.zeros_like(supervised_R)
    for config in configs:
        weights_R = position_weights(config.weight, rows.slot) * supervised_R
        from_teacher = config.label != "data"
        output = linear_loss(
            rows.hidden,
            drafter.lm_head.weight,
            None if from_teacher else draft_labels_R,
            batch.last_hidden_states[rows.label_index - 1] if from_teacher else None,
            teacher_head_VD if from_teacher else None,
            weights_R,
            config.loss.ce,
            config.loss.kl,
            config.loss.tv,
            config.chunk_rows,
        )
        loss_sum = loss_sum + output.loss_sum
        correct_R = output.correct_R
    return ObjectiveResult(
        loss_sum=loss_sum,
        weight_sum=first_weights_R.sum(),
        metrics=_metrics(rows, supervised_R, correct_R & supervised_R),
    )


def _metrics(
    rows: DraftRows, supervised_R: Tensor, correct_R: Tensor
) -> dict[str, tuple[float, float]]:
    """Per slot the share of right guesses, and the greedy acceptance length that follows.

    A token outside the draft vocabulary counts as a miss, as it is when decoding.
    """
    valid_NK = rows.valid.view(-1, rows.num_slots)
    correct_NK = correct_R.view(-1, rows.num_slots)
    full_N = valid_NK.all(dim=1)
    accepted = correct_NK[full_N].long().cumprod(dim=1).sum()
    metrics = {
        f"accuracy_pos_{k}": (float(correct_NK[:, k].sum()), float(valid_NK[:, k].sum()))
        for k in range(rows.num_slots)
    }
    metrics["acceptance_length_estimate"] = (
        float(accepted + full_N.sum()),
        float(full_N.sum()),
    )
    metrics["outside_draft_vocab"] = (
        float((rows.valid & ~supervised_R).sum()),
        float(rows.valid.sum()),
    )
    return metrics
