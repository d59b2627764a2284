"""The Triton kernel of the loss: cross-entropy, hit or miss, and softmax − onehot in place of the logits, row by row.

One program a row reads its logits twice: first for the maximum, the sum and the ties, then to overwrite them with the
gradient. No fp32 copy of the logits and no argmax pass exist; statistics are fp32 in registers. A thread keeps a maximum
and a sum of its own for every 8 columns side by side, so the loops need no exchange between threads and each logit costs
1.1 exponentials in the first pass and 1 in the second; what sets the pace is memory, 2 reads and 1 write of each logit. Everything but the address of the rows is a constant of the run: one compilation, nothing is tuned.

`loss.eager_softmax_minus_onehot_` is the same function in plain torch, for the CPU and as the oracle.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_train.stage2_drafter.fp8 import E4M3_MAX, QuantisedSoftmax

BLOCK_BYTES = 32 * 1024
"""What a program reads at once: two loads of 16 bytes for each thread, and the block after it is on its way."""
NUM_WARPS = 32
"""One program fills a multiprocessor, so that few rows are under way and the second pass may still find some in the
level-2 cache (H200: 132 rows of 0.3 MB in 50 MB)."""
_GROUP = tl.constexpr(8)  # neighbouring columns of one thread: 16 bytes of bf16
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_LOWEST = tl.constexpr(-1e30)  # below every logit, and finite: lowest − lowest is a number


@triton.jit
def _scaled(x, multiplier: tl.constexpr, softcap: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits as the target has them, in units of ln 2, and tanh of the soft-cap."""
    if softcap == 0.0:
        capped = x
        scaled = x * (multiplier * _LOG2E)
    else:
        # The exponential saturates at 0 and infinity, which give the right limits.
        capped = 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2E * multiplier / softcap)) + 1.0)
        scaled = capped * (softcap * _LOG2E)
    return scaled, capped


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    x,
    inside,
    start,
    label,
    peak,
    sums,
    before,
    multiplier: tl.constexpr,
    softcap: tl.constexpr,
    masked: tl.constexpr,
):
    """Take x fp32 [G, 8], columns from `start` on, into each group's maximum, sum and maximum before the label [G]."""
    highest = tl.max(x, axis=1)
    before_label = start + tl.arange(0, x.shape[0]) * _GROUP + (_GROUP - 1) < label
    before = tl.maximum(before, tl.where(before_label, highest, float("-inf")))
    higher = tl.maximum(peak, highest)
    reference, _ = _scaled(higher, multiplier, softcap)
    last_reference, _ = _scaled(peak, multiplier, softcap)
    scaled, _ = _scaled(x, multiplier, softcap)
    terms = tl.exp2(scaled - reference[:, None])
    if masked:
        terms = tl.where(inside, terms, 0.0)
    return higher, sums * tl.exp2(last_reference - reference) + tl.sum(terms, axis=1), before


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    x, columns, label, normaliser, multiplier: tl.constexpr, softcap: tl.constexpr
):
    """d cross-entropy / d x of the raw logits x."""
    scaled, capped = _scaled(x, multiplier, softcap)
    gradient = tl.exp2(scaled - normaliser) - tl.where(columns == label, 1.0, 0.0)
    if softcap != 0.0:
        gradient *= 1.0 - capped * capped
    if multiplier != 1.0:
        gradient *= multiplier
    return gradient


@triton.jit
def _share(x, reference, multiplier: tl.constexpr, softcap: tl.constexpr):  # type: ignore[no-untyped-def]
    """d normaliser / d x of the raw logits x, over its row's largest possible value, in the range of e4m3."""
    scaled, capped = _scaled(x, multiplier, softcap)
    share = tl.exp2(scaled - reference) * _E4M3_MAX
    if softcap != 0.0:
        share *= 1.0 - capped * capped
    return share


@triton.jit(
    do_not_specialize=["first"], do_not_specialize_on_alignment=["labels", "ce", "correct", "scales", "label_slopes"]
)
def _row_kernel(  # type: ignore[no-untyped-def]
    logits,
    labels,
    ce,
    correct,
    quantised,
    scales,
    label_slopes,
    first,
    stride: tl.constexpr,
    vocabulary: tl.constexpr,
    multiplier: tl.constexpr,
    softcap: tl.constexpr,
    block: tl.constexpr,
    with_gradient: tl.constexpr,
    in_e4m3: tl.constexpr,
):
    groups: tl.constexpr = block // _GROUP
    whole: tl.constexpr = vocabulary // block * block  # columns in full blocks
    padded: tl.constexpr = (vocabulary + _GROUP - 1) // _GROUP * _GROUP
    # Readable columns: a whole number of groups where rows are padded, so that loads stay 16 bytes wide for any V.
    width: tl.constexpr = padded if padded <= stride else vocabulary
    row = first + tl.program_id(0)
    label = tl.load(labels + row)
    at = logits + tl.program_id(0).to(tl.int64) * stride
    to = quantised + tl.program_id(0).to(tl.int64) * stride if in_e4m3 else at
    columns = tl.arange(0, groups)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    tail = whole + columns
    inside = tail < vocabulary
    if label < 0:
        if with_gradient:
            zeros = tl.zeros([groups, _GROUP], to.dtype.element_ty)
            for start in range(0, whole, block):
                tl.store(to + start + columns, zeros)
            if whole < vocabulary:
                tl.store(to + tail, zeros, mask=inside)
        if in_e4m3:
            tl.store(scales + row, 1.0)
            tl.store(label_slopes + row, 0.0)
        tl.store(ce + row, 0.0)
        tl.store(correct + row, 0)
    else:
        # A label beyond the vocabulary has no logit: its cross-entropy is not a number, which the trainer reports.
        x_label = tl.load(at + label, mask=label < vocabulary, other=float("nan")).to(tl.float32)
        beside = label // _GROUP * _GROUP + tl.arange(0, _GROUP)
        rival = tl.load(at + beside, mask=(beside < label) & (label < vocabulary), other=float("-inf")).to(tl.float32)

        peak = tl.full([groups], _LOWEST, tl.float32)
        sums = tl.zeros([groups], tl.float32)
        before = tl.full([groups], float("-inf"), tl.float32)
        x = tl.load(at + columns, mask=columns < width, other=0.0, eviction_policy="evict_last")
        for start in range(0, whole, block):
            ahead = start + block + columns  # loaded while the block before it is computed
            following = tl.load(at + ahead, mask=ahead < width, other=0.0, eviction_policy="evict_last")
            wide = x.to(tl.float32)
            peak, sums, before = _gather(wide, inside, start, label, peak, sums, before, multiplier, softcap, False)
            x = following
        if whole < vocabulary:
            wide = tl.where(inside, x.to(tl.float32), float("-inf"))
            peak, sums, before = _gather(wide, inside, whole, label, peak, sums, before, multiplier, softcap, True)
        if with_gradient:
            x = tl.load(at + columns, mask=columns < width, other=0.0, eviction_policy="evict_first")

        references, _ = _scaled(peak, multiplier, softcap)
        reference = tl.max(references, axis=0)
        normaliser = reference + tl.log2(tl.sum(sums * tl.exp2(references - reference), axis=0))
        scaled_label, capped_label = _scaled(x_label, multiplier, softcap)
        first_largest = (x_label >= tl.max(peak, axis=0)) & (x_label > tl.max(before, axis=0))
        first_largest = first_largest & (x_label > tl.max(rival, axis=0))
        tl.store(ce + row, (normaliser - scaled_label) * _LN2)
        tl.store(correct + row, first_largest.to(tl.uint8))

        if in_e4m3:
            slope = multiplier if softcap == 0.0 else multiplier * (1.0 - capped_label * capped_label)
            tl.store(label_slopes + row, slope)
            tl.store(scales + row, tl.exp2(reference - normaliser) * (multiplier / _E4M3_MAX))
            for start in range(0, whole, block):
                ahead = start + block + columns
                following = tl.load(at + ahead, mask=ahead < width, other=0.0, eviction_policy="evict_first")
                share = _share(x.to(tl.float32), reference, multiplier, softcap)
                tl.store(to + start + columns, share.to(to.dtype.element_ty), eviction_policy="evict_first")
                x = following
            if whole < vocabulary:
                share = _share(x.to(tl.float32), reference, multiplier, softcap)
                tl.store(to + tail, share.to(to.dtype.element_ty), mask=inside, eviction_policy="evict_first")
        elif with_gradient:
            tl.debug_barrier()  # no thread overwrites the label's logit before every thread has read it
            for start in range(0, whole, block):
                ahead = start + block + columns
                following = tl.load(at + ahead, mask=ahead < width, other=0.0, eviction_policy="evict_first")
                gradient = _gradient(x.to(tl.float32), start + columns, label, normaliser, multiplier, softcap)
                tl.store(at + start + columns, gradient.to(logits.dtype.element_ty), eviction_policy="evict_first")
                x = following
            if whole < vocabulary:
                gradient = _gradient(x.to(tl.float32), tail, label, normaliser, multiplier, softcap)
                tl.store(at + tail, gradient.to(logits.dtype.element_ty), mask=inside, eviction_policy="evict_first")


def softmax_minus_onehot_(
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
    block: int | None = None,
    num_warps: int = NUM_WARPS,
) -> None:
    """Overwrite raw logits [N,V] by the gradient of each row's cross-entropy with respect to them.

    logits bf16 or fp32, rows of any stride, columns side by side. labels int64, ce fp32 and correct bool are whole
    vectors; the rows' entries begin at `first`, and ce and correct are written there. A negative label gives 0 and
    False and a row of zeros. Of equal logits the first is the largest. Without gradient the logits stay.

    With `quantised` they stay, too: its softmax [N,V], of the same strides, gets d normaliser / d logits in e4m3, a row's
    times 1 / its scale, and its label_slopes what belongs to the label: d cross-entropy / d logits is softmax · scale −
    label_slope · onehot. So 1 − p of the label, which is nearly 1, does not set the scale of the small probabilities.
    """
    num_rows, vocabulary = logits.shape
    if num_rows == 0:
        return
    assert quantised is None or quantised.softmax.stride() == logits.stride()
    assert logits.stride(1) == 1 and labels.is_contiguous() and ce.is_contiguous() and correct.is_contiguous()
    _row_kernel[(num_rows,)](
        logits,
        labels,
        ce,
        correct.view(torch.uint8),
        *((logits, ce, ce) if quantised is None else quantised),
        first,
        logits.stride(0),
        vocabulary,
        float(multiplier),
        float(softcap or 0.0),
        block or BLOCK_BYTES // logits.element_size(),
        with_gradient,
        quantised is not None,
        num_warps=num_warps,
    )
