from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_train.stage2_drafter.loss import (
    block_weights,
    describe_statistics,
    dpace_weights,
    draft_statistics,
    frozen_head_cross_entropy,
    weighted_loss,
)

# algorithm.md 5.5: K = 4; slot 0 is the anchor's, its cross-entropy must not matter.
CE = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 0.5, 7.0, 7.0]])
COUNTED = torch.tensor([[False, True, True, True], [False, True, False, False]])


def test_decay_gives_the_published_vector() -> None:
    weights = block_weights(COUNTED, gamma=2.0)
    assert weights[0].tolist() == pytest.approx([0, 1, 0.606531, 0.367879], abs=1e-6)
    numerator, denominator = (weights * CE).sum(), weights.sum()
    assert numerator.item() == pytest.approx(3.816700, abs=1e-6)
    assert denominator.item() == pytest.approx(2.974410, abs=1e-6)
    assert (numerator / denominator).item() == pytest.approx(1.283179, abs=1e-6)


def test_decay_of_the_paper_for_16_slots() -> None:
    weights = block_weights(torch.ones(1, 16, dtype=torch.bool), gamma=7.0)[0]
    assert weights[:5].tolist() == pytest.approx([0, 1, 0.8669, 0.7515, 0.6514], abs=5e-5)
    assert weights.sum().item() == pytest.approx(6.631, abs=5e-4)
    assert block_weights(torch.ones(1, 8, dtype=torch.bool), gamma=4.0).sum().item() == pytest.approx(3.735, abs=5e-4)
    assert block_weights(torch.ones(1, 8, dtype=torch.bool), gamma=None).tolist() == [[0.0] + [1.0] * 7]


def test_dpace_gives_the_published_vector() -> None:
    weights = dpace_weights(CE, COUNTED, alpha=0.5)
    assert weights[0].tolist() == pytest.approx([0, 1.275980, 0.592041, 0.203790], abs=1e-6)
    assert weights[1].tolist() == pytest.approx([0, 0.803265, 0, 0], abs=1e-6)
    assert (weights * CE).sum().item() == pytest.approx(3.473065, abs=1e-6)
    assert ((weights * CE).sum() / weights.sum()).item() == pytest.approx(1.207990, abs=1e-6)


def eager(hidden: Tensor, head: Tensor, labels: Tensor, multiplier: float, softcap: float | None) -> Tensor:
    logits = hidden @ head.T * multiplier
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("chunk", [1, 7, 64, 101, 1000])
@pytest.mark.parametrize("multiplier, softcap", [(1.0, None), (0.25, None), (1.0, 3.0), (1.7, 5.0)])
def test_loss_and_gradient_match_autograd(chunk: int, multiplier: float, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(101, 24, generator=generator)
    head, labels = torch.randn(507, 24, generator=generator), torch.randint(0, 507, (101,), generator=generator)
    weights = torch.rand(101, generator=generator)
    weights[::5] = 0.0

    twin: Any = hidden.double().requires_grad_()
    twin_ce = eager(twin, head.double(), labels, multiplier, softcap)
    torch.autograd.backward((twin_ce * weights.double()).sum())
    eager32: Any = hidden.clone().requires_grad_()
    torch.autograd.backward((eager(eager32, head, labels, multiplier, softcap) * weights).sum())

    leaf: Any = hidden.clone().requires_grad_()
    out = frozen_head_cross_entropy(leaf.detach(), head, labels, multiplier=multiplier, softcap=softcap, chunk=chunk)
    loss = weighted_loss(leaf, out.dhidden, out.ce, weights)
    torch.autograd.backward(loss)
    assert out.ce.dtype == torch.float32 and loss.dtype == torch.float32
    # As good as torch's own fp32 path, measured against float64.
    tolerance = 4 * (eager32.grad - twin.grad).abs().max() + 1e-6
    assert (leaf.grad - twin.grad).abs().max() <= tolerance
    torch.testing.assert_close(out.ce.double(), twin_ce.detach(), atol=1e-5, rtol=1e-5)
    logits = hidden @ head.T
    assert torch.equal(out.correct, logits.argmax(-1) == labels)


def test_bf16_rounds_the_logits_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(33, 64, generator=generator).bfloat16()
    head = (torch.randn(203, 64, generator=generator) / 8).bfloat16()
    labels = torch.randint(0, 203, (33,), generator=generator)
    out = frozen_head_cross_entropy(hidden, head, labels, chunk=10)
    assert out.ce.dtype == torch.float32 and out.dhidden.dtype == torch.bfloat16
    torch.testing.assert_close(out.ce, F.cross_entropy((hidden @ head.T).float(), labels, reduction="none"))
    twin: Any = hidden.double().requires_grad_()
    torch.autograd.backward(eager(twin, head.double(), labels, 1.0, None).sum())
    error = (out.dhidden.double() - twin.grad).norm() / twin.grad.norm()
    assert error < 8e-3  # two roundings of 2^-8 each: the logit gradient and the result


def test_bf16_gradients_are_weighted_in_fp32_and_rounded_once() -> None:
    """Weights rounded to bf16 first would keep 8 of their 24 bits."""
    generator = torch.Generator().manual_seed(3)
    hidden: Any = torch.randn(64, 16, generator=generator).bfloat16().requires_grad_()
    dhidden, weights = torch.randn(64, 16, generator=generator).bfloat16(), torch.rand(64, generator=generator)
    torch.autograd.backward(weighted_loss(hidden, dhidden, torch.ones(64), weights))
    expected = (dhidden.float() * weights[:, None]).bfloat16()
    assert hidden.grad.dtype == torch.bfloat16 and torch.equal(hidden.grad, expected)
    assert not torch.equal(dhidden * weights.bfloat16()[:, None], expected)


def test_the_gradient_scales_with_what_comes_after() -> None:
    hidden: Any = torch.randn(5, 8, requires_grad=True)
    out = frozen_head_cross_entropy(hidden.detach(), torch.randn(11, 8), torch.arange(5))
    torch.autograd.backward(weighted_loss(hidden, out.dhidden, out.ce, torch.ones(5)) / 4.0)
    torch.testing.assert_close(hidden.grad, out.dhidden / 4.0)


def test_the_head_gets_no_gradient() -> None:
    head = torch.randn(11, 8, requires_grad=True)
    hidden: Any = torch.randn(5, 8, requires_grad=True)
    out = frozen_head_cross_entropy(hidden, head, torch.arange(5))
    torch.autograd.backward(weighted_loss(hidden, out.dhidden, out.ce, torch.ones(5)))
    assert head.grad is None and hidden.grad is not None


def test_loss_of_rows_does_not_depend_on_how_they_are_split() -> None:
    generator = torch.Generator().manual_seed(2)
    head = torch.randn(97, 16, generator=generator)
    hidden = torch.randn(4 * 21, 16, generator=generator)
    labels = torch.randint(0, 97, (84,), generator=generator)
    weights = torch.rand(84, generator=generator)

    def run(parts: int) -> Any:
        leaf: Any = hidden.clone().requires_grad_()
        total = torch.zeros(())
        for piece in torch.arange(84).chunk(parts):
            out = frozen_head_cross_entropy(leaf[piece].detach(), head, labels[piece], chunk=32)
            loss = weighted_loss(leaf[piece], out.dhidden, out.ce, weights[piece])
            torch.autograd.backward(loss)
            total += loss.detach()
        return total / weights.sum(), leaf.grad / weights.sum()

    whole_loss, whole_gradient = run(1)
    for parts in (2, 3, 4):
        loss, gradient = run(parts)
        torch.testing.assert_close(loss, whole_loss, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(gradient, whole_gradient, atol=1e-7, rtol=1e-5)


def test_no_rows_and_no_weights_are_finite() -> None:
    out = frozen_head_cross_entropy(torch.zeros(0, 8), torch.randn(5, 8), torch.zeros(0, dtype=torch.int64))
    assert out.ce.shape == (0,)
    hidden: Any = torch.randn(3, 8, requires_grad=True)
    out = frozen_head_cross_entropy(hidden.detach(), torch.randn(5, 8), torch.zeros(3, dtype=torch.int64))
    weights = block_weights(torch.zeros(1, 3, dtype=torch.bool), 7.0).flatten()
    loss = weighted_loss(hidden, out.dhidden, out.ce, weights)
    torch.autograd.backward(loss)
    assert loss.item() == 0.0 and not hidden.grad.any()


def test_rows_with_a_negative_label_count_nowhere() -> None:
    hidden, head = torch.randn(6, 8), torch.randn(11, 8)
    labels = torch.tensor([-100, 2, 3, -1, 4, 5])
    out = frozen_head_cross_entropy(hidden, head, labels, chunk=4)
    counted = labels >= 0
    alone = frozen_head_cross_entropy(hidden[counted], head, labels[counted])
    torch.testing.assert_close(out.ce[counted], alone.ce)
    torch.testing.assert_close(out.dhidden[counted], alone.dhidden)
    assert not out.ce[~counted].any() and not out.correct[~counted].any() and not out.dhidden[~counted].any()


def test_evaluation_leaves_the_second_product_out() -> None:
    hidden, head, labels = torch.randn(6, 8), torch.randn(11, 8), torch.arange(6)
    whole, without = (frozen_head_cross_entropy(hidden, head, labels, with_gradient=given) for given in (True, False))
    assert torch.equal(whole.ce, without.ce) and torch.equal(whole.correct, without.correct)
    assert without.dhidden.shape == (0, 8)


def test_gradient_reaches_the_counted_slots_alone() -> None:
    hidden: Any = torch.randn(9, 8, requires_grad=True)
    head, slots, weights = torch.randn(11, 8), torch.tensor([1, 2, 5, 8]), torch.rand(4)
    out = frozen_head_cross_entropy(hidden.detach().index_select(0, slots), head, slots)
    torch.autograd.backward(weighted_loss(hidden, out.dhidden, out.ce, weights, slots))
    expected = torch.zeros(9, 8)
    expected[slots] = weights[:, None] * out.dhidden
    assert torch.equal(hidden.grad, expected)


def test_extreme_logits_stay_finite() -> None:
    hidden, head = torch.full((2, 4), 1e4), torch.tensor([[1.0] * 4, [-1.0] * 4, [0.0] * 4])
    out = frozen_head_cross_entropy(hidden, head, torch.tensor([0, 1]))
    assert out.ce.isfinite().all() and out.dhidden.isfinite().all()
    assert out.ce.tolist() == [0.0, 8e4]


def test_mixed_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden is torch.bfloat16 but the head is torch.float32"):
        frozen_head_cross_entropy(torch.zeros(2, 4).bfloat16(), torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))


def test_statistics_count_leading_runs_and_add_over_rows() -> None:
    correct = torch.tensor([[True, True, True, False], [True, False, True, True], [True, True, True, True]])
    counted = torch.tensor([[False, True, True, True], [False, True, True, True], [False, True, False, False]])
    sums = draft_statistics(correct, counted)
    described = describe_statistics(sums)
    assert described.accuracy == pytest.approx(5 / 7)
    assert described.accuracy_by_slot == pytest.approx([2 / 3, 1.0, 0.5])
    assert described.estimated_acceptance == pytest.approx((2 + 0 + 1) / 3 + 1)
    parts = draft_statistics(correct[:1], counted[:1]) + draft_statistics(correct[1:], counted[1:])
    assert torch.equal(parts, sums)


def test_statistics_of_dummies_are_not_a_number() -> None:
    described = describe_statistics(draft_statistics(torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3).bool()))
    assert described.accuracy != described.accuracy and described.estimated_acceptance != described.estimated_acceptance
