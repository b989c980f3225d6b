"""The chunked lm_head losses equal their eager twins, and no [R, V] tensor is ever made."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.kernels.linear_losses import linear_loss
from paceline.kernels.losses import cross_entropy_rows, forward_kl_rows, tv_rows

MIXES = {
    "ce": (1.0, 0.0, 0.0),
    "kl": (0.0, 1.0, 0.0),
    "tv": (0.0, 0.0, 1.0),
    "mix": (0.1, 0.4, 0.9),
}


class Inputs(NamedTuple):
    hidden: torch.Tensor
    lm_head: torch.Tensor
    labels: torch.Tensor
    teacher_hidden: torch.Tensor
    teacher_head: torch.Tensor
    weights: torch.Tensor


class Regime(NamedTuple):
    """Sizes and scale of one failure regime, and how close the two forms are then."""

    rows: int
    width: int
    vocab: int
    scale: float
    chunk: int
    dtype: torch.dtype
    atol: float
    rtol: float


F32, BF16 = torch.float32, torch.bfloat16
REGIMES = {
    "usual": Regime(40, 16, 200, 1.0, 16, F32, 1e-5, 1e-5),
    "saturated_float32": Regime(24, 16, 120, 30.0, 8, F32, 2e-4, 1e-4),
    "near_uniform": Regime(24, 16, 120, 1e-3, 8, F32, 1e-6, 1e-4),
    "odd_sizes": Regime(5, 123, 123, 1.0, 3, F32, 1e-5, 1e-5),
    "one_row": Regime(1, 7, 11, 1.0, 512, F32, 1e-5, 1e-5),
    "wide_vocabulary": Regime(6, 8, 50_021, 1.0, 4, F32, 1e-5, 1e-5),
    "bfloat16": Regime(40, 16, 200, 1.0, 16, BF16, 4e-3, 1.6e-2),
}


def _inputs(regime: Regime, converged: bool = False) -> Inputs:
    generator = torch.Generator().manual_seed(regime.rows * regime.vocab)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    hidden = draw(regime.rows, regime.width) * regime.scale
    lm_head = draw(regime.vocab, regime.width) * regime.width**-0.5
    teacher_hidden = draw(regime.rows, regime.width + 3) * regime.scale
    teacher_head = draw(regime.vocab, regime.width + 3) * regime.width**-0.5
    if converged:
        teacher_hidden = hidden + 1e-2 * draw(regime.rows, regime.width)
        teacher_head = lm_head
    weights = torch.rand(regime.rows, generator=generator) + 0.1
    weights[1::4] = 0.0
    return Inputs(
        hidden.to(regime.dtype).requires_grad_(),
        lm_head.to(regime.dtype).requires_grad_(),
        torch.randint(0, regime.vocab, (regime.rows,), generator=generator),
        teacher_hidden.to(regime.dtype),
        teacher_head.to(regime.dtype),
        weights,
    )


def _eager(inputs: Inputs, labels: torch.Tensor, mix: tuple[float, float, float]) -> torch.Tensor:
    logits = inputs.hidden.float() @ inputs.lm_head.float().T
    teacher = inputs.teacher_hidden.float() @ inputs.teacher_head.float().T
    rows = (
        mix[0] * cross_entropy_rows(logits, labels)
        + mix[1] * forward_kl_rows(logits, teacher)
        + mix[2] * tv_rows(logits, teacher)
    )
    return (inputs.weights * rows).sum()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", REGIMES)
def test_value_and_gradient_equal_the_eager_twin(name, mix):
    regime = REGIMES[name]
    inputs = _inputs(regime)
    out = linear_loss(*inputs, *MIXES[mix], regime.chunk)
    expected = _eager(inputs, inputs.labels, MIXES[mix])
    torch.testing.assert_close(out.loss_sum, expected, atol=1e-4, rtol=1e-5)
    leaves = (inputs.hidden, inputs.lm_head)
    grads = torch.autograd.grad(3.0 * out.loss_sum, leaves)
    expected_grads = torch.autograd.grad(3.0 * expected, leaves)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == regime.dtype
        torch.testing.assert_close(grad, expected_grad, atol=regime.atol, rtol=regime.rtol)


@pytest.mark.parametrize("mix", ["kl", "tv"])
def test_d30_bfloat16_gradients_are_right_near_convergence(mix):
    """In bfloat16 the difference of two near-equal distributions cancels."""
    inputs = _inputs(REGIMES["usual"], converged=True)
    half = Inputs(*(x.bfloat16() if x.is_floating_point() else x for x in inputs))
    half = half._replace(weights=inputs.weights, hidden=half.hidden.detach().requires_grad_())
    half = half._replace(lm_head=half.lm_head.detach().requires_grad_())
    exact = Inputs(*(x.float() if x.is_floating_point() else x for x in half))
    out = linear_loss(*half, *MIXES[mix], 16)
    (grad,) = torch.autograd.grad(out.loss_sum, half.hidden)
    (expected,) = torch.autograd.grad(_eager(exact, exact.labels, MIXES[mix]), half.hidden)
    error = (grad.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.01

    logits = half.hidden @ half.lm_head.T  # the loss in bfloat16 throughout
    teacher = (half.teacher_hidden @ half.teacher_head.T).softmax(-1)
    rows = (teacher * (teacher.log() - logits.log_softmax(-1))).sum(-1)
    if mix == "tv":
        rows = 0.5 * (teacher - logits.softmax(-1)).abs().sum(-1)
    (naive,) = torch.autograd.grad((half.weights.bfloat16() * rows).sum(), half.hidden)
    assert (naive.float() - expected.float()).norm() / expected.float().norm() > 0.03


def test_labels_are_the_teachers_argmax_when_none_are_given():
    inputs = _inputs(REGIMES["usual"])
    argmax = (inputs.teacher_hidden @ inputs.teacher_head.T).argmax(-1)
    got = linear_loss(*inputs._replace(labels=None), 1.0, 0.0, 0.0, 16)
    given = linear_loss(*inputs._replace(labels=argmax), 1.0, 0.0, 0.0, 16)
    assert torch.equal(got.loss_sum, given.loss_sum)
    assert torch.equal(got.correct_R, given.correct_R)


def test_correct_and_accept_are_reported_per_row_and_skipped_rows_are_empty():
    inputs = _inputs(REGIMES["usual"])
    logits = inputs.hidden @ inputs.lm_head.T
    teacher = inputs.teacher_hidden @ inputs.teacher_head.T
    labels = torch.where(torch.arange(40) % 2 == 0, logits.argmax(-1), inputs.labels)
    out = linear_loss(*inputs._replace(labels=labels), 1.0, 0.0, 0.0, 7)
    kept = inputs.weights > 0
    assert torch.equal(out.correct_R, kept & (logits.argmax(-1) == labels))
    assert out.correct_R.any() and not out.correct_R.all()
    expected = torch.minimum(logits.softmax(-1), teacher.softmax(-1)).sum(-1) * kept
    torch.testing.assert_close(out.accept_R, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(out.accept_R, (1.0 - tv_rows(logits, teacher)) * kept)
    assert not out.correct_R.requires_grad and not out.accept_R.requires_grad


def test_without_a_teacher_acceptance_is_zero():
    inputs = _inputs(REGIMES["usual"])
    alone = inputs._replace(teacher_hidden=None, teacher_head=None)
    out = linear_loss(*alone, 1.0, 0.0, 0.0, 16)
    assert not out.accept_R.any()
    expected = linear_loss(*inputs, 1.0, 0.0, 0.0, 16).loss_sum
    torch.testing.assert_close(out.loss_sum, expected)


def test_rows_of_weight_zero_are_never_read():
    inputs = _inputs(REGIMES["usual"])
    clean = linear_loss(*inputs, *MIXES["mix"], 16)
    hidden = inputs.hidden.detach().clone()
    hidden[1::4] = torch.nan
    labels = inputs.labels.clone()
    labels[1::4] = -100
    dirty = inputs._replace(hidden=hidden.requires_grad_(), labels=labels)
    out = linear_loss(*dirty, *MIXES["mix"], 16)
    assert torch.equal(out.loss_sum, clean.loss_sum)
    grad_hidden, grad_head = torch.autograd.grad(out.loss_sum, [dirty.hidden, dirty.lm_head])
    assert not grad_hidden[1::4].any() and grad_head.isfinite().all()


def test_no_weight_at_all_gives_zero_loss_and_gradient():
    inputs = _inputs(REGIMES["usual"])
    out = linear_loss(*inputs._replace(weights=torch.zeros(40)), *MIXES["mix"], 16)
    assert out.loss_sum == 0.0
    for grad in torch.autograd.grad(out.loss_sum, [inputs.hidden, inputs.lm_head]):
        assert not grad.any()


def test_the_teacher_gets_no_gradient_and_a_frozen_head_none_either():
    inputs = _inputs(REGIMES["usual"])
    trainable = inputs._replace(
        lm_head=inputs.lm_head.detach(),
        teacher_hidden=inputs.teacher_hidden.requires_grad_(),
        teacher_head=inputs.teacher_head.requires_grad_(),
    )
    linear_loss(*trainable, *MIXES["mix"], 16).loss_sum.backward()
    assert trainable.hidden.grad is not None and trainable.lm_head.grad is None
    assert trainable.teacher_hidden.grad is None and trainable.teacher_head.grad is None


def test_chunk_size_does_not_change_the_result():
    inputs = _inputs(REGIMES["usual"])
    sums = [linear_loss(*inputs, *MIXES["mix"], chunk).loss_sum for chunk in (1, 7, 30, 512)]
    for other in sums[1:]:
        torch.testing.assert_close(other, sums[0], atol=1e-4, rtol=1e-6)


class _LargestTensor(TorchDispatchMode):
    """Records the largest result of any operation, backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.num_elements = max(self.num_elements, x.numel())
        return result


@pytest.mark.parametrize("mix", MIXES)
def test_no_tensor_of_rows_times_vocabulary_is_made_or_kept(mix):
    rows, vocab, chunk = 256, 1000, 16
    inputs = _inputs(Regime(rows, 8, vocab, 1.0, chunk, F32, 0, 0))
    kept: list[torch.Tensor] = []
    with (
        _LargestTensor() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
    ):
        out = linear_loss(*inputs, *MIXES[mix], chunk)
        torch.autograd.grad(out.loss_sum, [inputs.hidden, inputs.lm_head])
    assert largest.num_elements <= chunk * vocab
    assert kept and max(x.numel() for x in kept) <= vocab * 8
    with _LargestTensor() as eager:  # the measure itself sees a [R, V] tensor where there is one
        _eager(inputs, inputs.labels, MIXES[mix])
    assert eager.num_elements == rows * vocab


def test_no_gradient_is_computed_without_grad():
    inputs = _inputs(REGIMES["usual"])
    with torch.no_grad():
        out = linear_loss(*inputs, *MIXES["mix"], 16)
    assert not out.loss_sum.requires_grad
    torch.testing.assert_close(out.loss_sum, linear_loss(*inputs, *MIXES["mix"], 16).loss_sum)


def test_bad_requests_are_named():
    inputs = _inputs(REGIMES["usual"])
    alone = inputs._replace(teacher_hidden=None, teacher_head=None)
    with pytest.raises(ValueError, match="need teacher_hidden and teacher_head"):
        linear_loss(*alone, 0.0, 1.0, 0.0, 16)
    with pytest.raises(ValueError, match="need teacher_hidden and teacher_head"):
        linear_loss(*alone._replace(labels=None), 1.0, 0.0, 0.0, 16)
    with pytest.raises(ValueError, match="chunk_rows=0"):
        linear_loss(*inputs, 1.0, 0.0, 0.0, 0)
    labels = inputs.labels.clone()
    labels[2] = 200
    with pytest.raises(ValueError, match="label 200 of row 2 is outside the draft vocabulary"):
        linear_loss(*inputs._replace(labels=labels), 1.0, 0.0, 0.0, 16)


def test_total_variation_is_the_expected_rejection_rate():
    logits, teacher = torch.randn(2, 9, 30, generator=torch.Generator().manual_seed(0))
    overlap = torch.minimum(logits.softmax(-1), teacher.softmax(-1)).sum(-1)
    torch.testing.assert_close(tv_rows(logits, teacher), 1.0 - overlap)
    torch.testing.assert_close(tv_rows(logits, logits), torch.zeros(9), atol=1e-7, rtol=0)
    assert forward_kl_rows(logits, logits).abs().max() < 1e-6
