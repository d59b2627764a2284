"""Weighted cross-entropy under the frozen head of the target, and what is logged about the drafts.

The head is frozen, so the gradient with respect to the hidden states is known as soon as the logits are: one pass over
chunks of noise tokens leaves the cross-entropy and its unweighted gradient, and the full logits (5 GB for Qwen3-8B at
1,024 anchors, bf16) never exist. A chunk is two products and one kernel between them, which turns the logits into their
gradient where they lie (`loss_kernel`; plain torch on the CPU); all chunks share one buffer. Row weights are applied
afterwards in fp32, so decays that need the cross-entropy first (D-PACE) cost nothing extra. Cross-entropy is fp32 over
the full vocabulary.

The loss is Σ w·CE / Σ w over a whole optimizer step and all ranks: `weighted_loss` gives the numerator of one row, the
trainer divides. So it does not depend on how rows are split over micro-batches.

Shapes: N noise tokens, H hidden size, V vocabulary, A anchors, K block size.
Source: DFlash, arXiv 2602.06036, section 4.2 (decay); D-PACE, arXiv 2605.18810.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_train.stage2_drafter.fp8 import E4M3, E4M3_MAX, Fp8Head, QuantisedSoftmax

_ROW_ALIGNMENT = 64  # logits of a buffer's row, so that every row starts on a cache line whatever V is


class HeadLoss(NamedTuple):
    """One pass through the frozen head."""

    ce: Tensor
    """fp32 [N], cross-entropy of each row, unweighted."""
    correct: Tensor
    """bool [N], whether the largest logit is the label's."""
    dhidden: Tensor
    """[N,H] in the type of hidden: d ce / d hidden, unweighted; [0,H] where it was not asked for."""


@torch.no_grad()
def frozen_head_cross_entropy(
    hidden: Tensor,
    head: Tensor | Fp8Head,
    labels: Tensor,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    with_gradient: bool = True,
) -> HeadLoss:
    """Cross-entropy of hidden [N,H] under head [V,H] against labels int64 [N], with its gradient, in one pass.

    Logits are (hidden · headᵀ) · multiplier, then softcap · tanh(logits / softcap) if set, as the target does. A row with
    a negative label counts nowhere: cross-entropy, hit and gradient are 0. hidden and head must have one dtype, in which
    both products and the logits' gradient are; statistics are fp32. `chunk` rows at a time (None: `chunk_rows`) share one
    buffer of chunk · V logits, which stays allocated for the next call. Without gradient (evaluation) the second product
    is left out. Under an Fp8Head both products are in e4m3, and the label's part of the gradient in fp32 beside them.
    """
    if isinstance(head, Fp8Head):
        dtype, vocabulary = hidden.dtype, head.rows.shape[0]
    elif hidden.dtype != head.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} but the head is {head.dtype}; convert the head once, before training."
        )
    else:
        dtype, vocabulary = head.dtype, head.shape[0]
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1.")
    if multiplier <= 0:
        raise ValueError(f"multiplier is {multiplier}; it must be above 0, or the largest logit would be the smallest.")
    num_rows = hidden.shape[0]
    chunk = chunk or chunk_rows(hidden.shape[1])
    ce = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    correct = torch.empty(num_rows, dtype=torch.bool, device=hidden.device)
    dhidden = torch.empty_like(hidden) if with_gradient else hidden.new_empty(0, hidden.shape[1])
    softmax_minus_onehot_ = _row_operation(hidden.device)
    width = -(-vocabulary // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    buffer = _logits_buffer(chunk, width, dtype, hidden.device)
    options: dict[str, Any] = {"multiplier": multiplier, "softcap": softcap, "with_gradient": with_gradient}
    if isinstance(head, Fp8Head) and with_gradient:
        softmax = _logits_buffer(chunk, width, E4M3, hidden.device)
        scales, label_slopes = torch.empty(2, num_rows, dtype=torch.float32, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for first in range(0, num_rows, chunk):
            rows = slice(first, min(first + chunk, num_rows))
            logits = buffer[: rows.stop - first, :vocabulary]
            if not isinstance(head, Fp8Head):
                torch.mm(hidden[rows], head.T, out=logits)
                softmax_minus_onehot_(logits, labels, ce, correct, first, **options)
                if with_gradient:
                    torch.mm(logits, head, out=dhidden[rows])
                continue
            head.logits(hidden[rows], out=logits)
            if with_gradient:
                part = softmax[: rows.stop - first, :vocabulary]
                options["quantised"] = QuantisedSoftmax(part, scales, label_slopes)
            softmax_minus_onehot_(logits, labels, ce, correct, first, **options)
            if with_gradient:
                dhidden[rows] = head.input_gradient(part, scales[rows], label_slopes[rows], labels[rows])
    return HeadLoss(ce, correct, dhidden)


def chunk_rows(hidden_size: int) -> int:
    """Rows of one chunk: enough that rows · H keeps a large GPU's product dlogits · W busy (2,048 x 4,096: 256 tiles)."""
    return 2048 if hidden_size >= 4096 else 4096


def _row_operation(device: torch.device) -> Callable[..., None]:
    """softmax − onehot in place: the Triton kernel on CUDA, plain torch elsewhere."""
    if device.type != "cuda":
        return eager_softmax_minus_onehot_
    from dflash_train.stage2_drafter.loss_kernel import softmax_minus_onehot_

    return softmax_minus_onehot_


@functools.lru_cache(maxsize=2)
def _logits_buffer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The one buffer for logits of a type: at the same address for the whole run, whatever the number of counted rows."""
    return torch.empty(rows, columns, dtype=dtype, device=device)


def eager_softmax_minus_onehot_(
    logits: Tensor,
    labels: Tensor,
    ce: Tensor,
    correct: Tensor,
    first: int,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    with_gradient: bool = True,
    quantised: QuantisedSoftmax | None = None,
) -> None:
    """The twin of `loss_kernel.softmax_minus_onehot_` in plain torch: for the CPU, and its oracle."""
    rows = slice(first, first + logits.shape[0])
    counted = labels[rows, None] >= 0
    label = labels[rows, None].clamp_min(0)
    values = logits.float()
    if multiplier != 1.0:
        values = values * multiplier
    slope = None
    if softcap:
        capped = torch.tanh(values / softcap)
        slope = 1.0 - capped * capped
        values = capped * softcap
    largest = values.argmax(-1, keepdim=True)
    correct[rows] = ((largest == label) & counted)[:, 0]
    normaliser = values.logsumexp(-1, keepdim=True)
    ce[rows] = torch.where(counted, normaliser - values.gather(-1, label), 0.0)[:, 0]
    if not with_gradient:
        return
    if quantised is not None:
        share = (values - values.gather(-1, largest)).exp_()
        if slope is not None:
            share *= slope
        quantised.softmax.copy_((share * counted * E4M3_MAX).to(E4M3))
        scales = (values.gather(-1, largest) - normaliser).exp() * (multiplier / E4M3_MAX)
        quantised.scales[rows] = torch.where(counted, scales, 1.0)[:, 0]
        label_slope = torch.ones_like(normaliser) if slope is None else slope.gather(-1, label)
        quantised.label_slopes[rows] = (label_slope * multiplier * counted)[:, 0]
        return
    gradient = values.sub_(normaliser).exp_()
    gradient.scatter_add_(-1, label, torch.full_like(normaliser, -1.0))
    if slope is not None:
        gradient *= slope
    if multiplier != 1.0:
        gradient *= multiplier
    gradient.masked_fill_(~counted, 0.0)
    if gradient.data_ptr() != logits.data_ptr():
        logits.copy_(gradient)


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, dhidden: Tensor, ce: Tensor, weights: Tensor, slots: Tensor | None) -> Tensor:
        ctx.save_for_backward(dhidden, weights, slots)
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        return (weights * ce).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        dhidden, weights, slots = ctx.saved_tensors
        scaled = torch.empty(dhidden.shape, dtype=ctx.dtype, device=dhidden.device)
        # In fp32 by type promotion, rounded once on the way out: no fp32 copy of dhidden.
        torch.mul(dhidden, (weights * grads[0].float())[:, None], out=scaled)
        if slots is None:
            return scaled, None, None, None, None
        # Each slot is there once, so this is a plain copy; index_select's own backward would add with atomics.
        whole = torch.zeros(ctx.shape, dtype=ctx.dtype, device=dhidden.device).index_copy_(0, slots, scaled)
        return whole, None, None, None, None


def weighted_loss(hidden: Tensor, dhidden: Tensor, ce: Tensor, weights: Tensor, slots: Tensor | None = None) -> Tensor:
    """Σ w·CE, fp32 scalar; its gradient flows through hidden as w · dhidden [N,H]. ce and weights fp32 [N], constant.

    hidden is [N,H], or has more rows, of which those at `slots`, int64 [N] without repeats, were counted.
    """
    loss: Tensor = _WeightedLoss.apply(hidden, dhidden, ce, weights, slots)  # type: ignore[no-untyped-call]
    return loss


def block_weights(label_mask: Tensor, gamma: float | None) -> Tensor:
    """exp(-(k-1)/γ) at slots k >= 1 that count, else 0: label_mask bool [A,K] -> fp32 [A,K]. None: no decay.

    The paper's γ: 7 for K = 16, 5 for K = 10, 4 for K = 8.
    """
    slot = torch.arange(label_mask.shape[1], device=label_mask.device, dtype=torch.float32)
    decay = torch.ones_like(slot) if gamma is None else torch.exp(-(slot - 1.0) / gamma)
    decay[0] = 0.0
    return decay * label_mask.float()


def dpace_weights(ce: Tensor, label_mask: Tensor, alpha: float = 0.5) -> Tensor:
    """D-PACE: the derivative of the expected run of accepted tokens. ce fp32 [A,K], label_mask bool [A,K] -> fp32 [A,K].

    q̃ = (1-α)·exp(-CE) + α, w_j = Σ_{m>=j} Π_{i<=m} q̃_i; slots that do not count are 1 in the products and left out
    of the sums. Slot 0 never counts. Not differentiated.
    """
    counted = label_mask.clone()
    counted[:, 0] = False
    smoothed = (1.0 - alpha) * torch.exp(-ce.detach().float()) + alpha
    products = torch.where(counted, smoothed, torch.ones_like(smoothed)).cumprod(-1) * counted
    return products.flip(-1).cumsum(-1).flip(-1) * counted


def draft_statistics(correct: Tensor, label_mask: Tensor) -> Tensor:
    """What is logged about a row's drafts, as sums that ranks and rows may add: fp64 [2·K + 2].

    correct, label_mask bool [A,K]. Correct drafts of each slot [K], counted drafts of each slot [K], summed length of
    the leading correct runs, number of blocks with a label. Read with `describe_statistics`.
    """
    right = correct & label_mask
    # A run also ends where labels do: the block's first uncounted slot is never correct.
    run = right[:, 1:].to(torch.int64).cumprod(-1).sum()
    blocks = label_mask.any(-1).sum()
    return torch.cat((right.sum(0), label_mask.sum(0), run[None], blocks[None])).double()


class DraftStatistics(NamedTuple):
    """Teacher-forced on the data: an offline proxy of the acceptance length, not the served one."""

    accuracy: float
    """Share of correct drafts over all counted slots; nan without any."""
    accuracy_by_slot: list[float]
    """For slots 1 to K - 1; nan where no draft counted."""
    estimated_acceptance: float
    """Mean leading correct run + 1 (the bonus token); nan without a block."""


def describe_statistics(sums: Tensor) -> DraftStatistics:
    """Ratios of the sums of `draft_statistics`."""
    values = sums.tolist()
    block_size = (len(values) - 2) // 2
    correct, counted, run, blocks = values[:block_size], values[block_size:-2], values[-2], values[-1]

    def ratio(part: float, whole: float) -> float:
        return part / whole if whole else float("nan")

    return DraftStatistics(
        accuracy=ratio(sum(correct), sum(counted)),
        accuracy_by_slot=[ratio(c, n) for c, n in zip(correct[1:], counted[1:], strict=True)],
        estimated_acceptance=ratio(run, blocks) + 1.0,
    )
