"""The loss kernel against its eager twin: through Triton's interpreter where there is no GPU, on CUDA as it runs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_train.stage2_drafter.fp8 import Fp8Head, QuantisedSoftmax
from dflash_train.stage2_drafter.loss import (
    chunk_rows,
    eager_softmax_minus_onehot_,
    frozen_head_cross_entropy,
    weighted_loss,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]


def make_logits(
    num_rows: int, vocabulary: int, dtype: torch.dtype, device: str, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """Raw logits with rows `padding` columns apart from each other, and labels, every fifth of them ignored."""
    generator = torch.Generator().manual_seed(num_rows * vocabulary)
    wide = 3.0 * torch.randn(num_rows, vocabulary + padding, generator=generator)
    labels = torch.randint(0, vocabulary, (num_rows,), generator=generator)
    wide[torch.arange(1, num_rows, 3), labels[1::3]] = 20.0  # some rows are right
    labels[::5] = -100
    return wide.to(device, dtype)[:, :vocabulary], labels.to(device)


def run_both(logits: Tensor, labels: Tensor, first: int = 0, **options: Any) -> tuple[tuple[Tensor, ...], ...]:
    """(kernel's, twin's) gradient, cross-entropy and hits; the rows' entries begin at `first`."""
    from dflash_train.stage2_drafter.loss_kernel import softmax_minus_onehot_

    results = []
    shift = labels.new_full((first,), -7)
    for function, extra in ((softmax_minus_onehot_, {}), (eager_softmax_minus_onehot_, {"block", "num_warps"})):
        work = torch.full_like(logits.as_strided((logits.shape[0], logits.stride(0)), logits.stride()), 5.0)
        inside = work[:, : logits.shape[1]]
        inside.copy_(logits)
        ce = torch.full((first + len(labels),), -1.0, device=logits.device)
        correct = torch.ones(first + len(labels), dtype=torch.bool, device=logits.device)
        given = {name: value for name, value in options.items() if name not in extra}
        function(inside, torch.cat((shift, labels)), ce, correct, first, **given)
        assert (work[:, logits.shape[1] :] == 5.0).all(), "a column outside the vocabulary was written"
        assert (ce[:first] == -1.0).all() and correct[:first].all()
        results.append((inside, ce[first:], correct[first:]))
    return tuple(results)


def check(results: tuple[tuple[Tensor, ...], ...], step: float, noise: float = 2e-6) -> None:
    """Equal up to fp32 noise and, for the gradient, one rounding of relative size `step` either way."""
    (gradient, ce, correct), (twin, twin_ce, twin_correct) = results
    torch.testing.assert_close(ce, twin_ce, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.float(), twin.float(), atol=noise, rtol=step)
    assert torch.equal(correct, twin_correct)


DTYPES = [pytest.param(torch.float32, 2e-5, id="fp32"), pytest.param(torch.bfloat16, 2.0**-7, id="bf16")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, step", DTYPES)
@pytest.mark.parametrize("multiplier, softcap", [(1.0, None), (0.25, None), (1.0, 30.0), (1.7, 5.0)])
@pytest.mark.parametrize("vocabulary, block, padding", [(1007, 256, 17), (1007, 8192, 0), (1024, 512, 64), (5, 16, 0)])
def test_kernel_is_its_twin(
    device: str,
    dtype: torch.dtype,
    step: float,
    multiplier: float,
    softcap: float | None,
    vocabulary: int,
    block: int,
    padding: int,
) -> None:
    logits, labels = make_logits(11, vocabulary, dtype, device, padding)
    results = run_both(logits, labels, 3, multiplier=multiplier, softcap=softcap, block=block, num_warps=4)
    check(results, step)
    gradient, ce, correct = results[0]
    assert not gradient[labels < 0].any() and not ce[labels < 0].any() and not correct[labels < 0].any()
    if softcap is None or softcap > 20:
        assert correct.any() and not correct.all()


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_logits_the_first_is_the_largest(device: str) -> None:
    """Ties at every distance from the label: before it, beside it, after it, in another block."""
    vocabulary, label = 100, 45
    rivals = [0, 15, 16, 39, 40, 44, 45, 46, 47, 48, 63, 64, 95, 96, 99]
    logits = torch.zeros(len(rivals), vocabulary)
    logits[:, label] = 2.0
    logits[torch.arange(len(rivals)), rivals] = 2.0
    labels = torch.full((len(rivals),), label)
    (_, _, correct), (_, _, twin) = run_both(logits.to(device), labels.to(device), block=16, num_warps=1)
    assert correct.tolist() == twin.tolist() == [rival >= label for rival in rivals]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_stays_so(device: str) -> None:
    logits = torch.zeros(5, 40)
    logits[0, 7], logits[1, 33], logits[2, :] = float("nan"), float("inf"), float("-inf")
    logits[3] = torch.linspace(-3e4, 3e4, 40)
    labels = torch.tensor([3, 3, 3, 3, 40]).to(device)  # the last is beyond the vocabulary
    from dflash_train.stage2_drafter.loss_kernel import softmax_minus_onehot_

    ce, correct = torch.zeros(5, device=device), torch.zeros(5, dtype=torch.bool, device=device)
    softmax_minus_onehot_(logits.to(device), labels, ce, correct, 0, block=16, num_warps=1)
    assert ce.isfinite().tolist() == [False, False, False, True, False]
    assert not correct.any()


@pytest.mark.parametrize("device", DEVICES)
def test_without_gradient_the_logits_stay(device: str) -> None:
    logits, labels = make_logits(11, 507, torch.bfloat16, device)
    (kept, ce, correct), (_, twin_ce, twin_correct) = run_both(
        logits, labels, block=128, num_warps=1, with_gradient=False
    )
    assert torch.equal(kept, logits) and torch.equal(correct, twin_correct)
    torch.testing.assert_close(ce, twin_ce, atol=2e-5, rtol=1e-5)


# -- on a GPU alone ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype, step", DTYPES)
def test_vocabulary_of_qwen3(dtype: torch.dtype, step: float) -> None:
    """The launch that training uses, at its size."""
    logits, labels = make_logits(24, 151_936, dtype, "cuda")
    check(run_both(logits, labels), step, noise=1e-5)  # 1 - p of a sure label: what fp32 leaves of a sum of 151,936


@pytest.mark.gpu
@gpu
def test_rows_beyond_the_reach_of_32_bits() -> None:
    vocabulary, num_rows = 151_936, 14_200
    logits = torch.zeros(num_rows, vocabulary, dtype=torch.bfloat16, device="cuda")  # 4.3 GB
    labels = torch.full((num_rows,), -100, device="cuda")
    labels[-1] = vocabulary - 1
    ce, correct = torch.ones(num_rows, device="cuda"), torch.ones(num_rows, dtype=torch.bool, device="cuda")
    from dflash_train.stage2_drafter.loss_kernel import softmax_minus_onehot_

    assert (num_rows - 1) * vocabulary > 2**31
    softmax_minus_onehot_(logits, labels, ce, correct, 0)
    assert ce[-1].item() == pytest.approx(11.9312, abs=1e-3) and not ce[:-1].any()
    assert logits[-1, -1].item() == pytest.approx(-1.0, abs=1e-2) and not logits[:-1].any()


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("vocabulary", [1007, 50_257])
@pytest.mark.parametrize("chunk", [1, 33, 100, 101, 4096])
def test_chunks_share_a_buffer_and_leave_no_border(vocabulary: int, chunk: int) -> None:
    if chunk == 1 and vocabulary > 1007:
        pytest.skip("slow")
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(101, 64, generator=generator, device="cuda").bfloat16()
    head = (torch.randn(vocabulary, 64, generator=generator, device="cuda") / 4).bfloat16()
    logits = hidden.double() @ head.double().T
    labels = torch.randint(0, vocabulary, (101,), generator=generator, device="cuda")
    labels[::2] = logits.argmax(-1)[::2]
    labels[7] = -100
    out = frozen_head_cross_entropy(hidden, head, labels, chunk=chunk)
    whole: Any = hidden.double().requires_grad_()
    twin = F.cross_entropy(whole @ head.double().T, labels, reduction="none")  # ignores -100
    torch.autograd.backward(twin.sum())
    counted = labels >= 0
    # Logits up to 8 are rounded to bf16, by at most 2⁻⁷ · 2.
    torch.testing.assert_close(out.ce[counted].double(), twin[counted].detach(), atol=6e-2, rtol=0)
    assert (out.dhidden.double() - whole.grad).norm() / whole.grad.norm() < 1.5e-2
    assert not out.dhidden[7].any() and not out.ce[7] and not out.correct[7]
    best = logits.topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > 0.1
    assert torch.equal(out.correct[clear], (best.indices[:, 0] == labels)[clear]) and out.correct.any()


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Types of the matrix products, and the largest fp32 tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: set[tuple[torch.dtype, ...]] = set()
        self.largest_fp32 = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [value for value in (*args, out) if isinstance(value, Tensor)]
        if function.overloadpacket is torch.ops.aten.mm:
            self.products.add(tuple(tensor.dtype for tensor in tensors))
        for tensor in tensors:
            if tensor.dtype == torch.float32:
                self.largest_fp32 = max(self.largest_fp32, tensor.numel())
        return out


@pytest.mark.gpu
@gpu
@pytest.mark.filterwarnings("ignore")  # torch calls its check of synchronisations a prototype
def test_products_are_in_bf16_and_nothing_is_compiled_again() -> None:
    """Counted rows vary from step to step; the kernel and the buffer do not, and nothing waits for the device."""
    from dflash_train.stage2_drafter import loss_kernel

    generator = torch.Generator("cuda").manual_seed(0)
    head = torch.randn(1007, 128, generator=generator, device="cuda").bfloat16()

    def step(num_rows: int) -> None:
        hidden: Any = torch.randn(64, 128, generator=generator, device="cuda").bfloat16().requires_grad_()
        slots = torch.arange(num_rows, device="cuda")
        out = frozen_head_cross_entropy(hidden.detach().index_select(0, slots), head, slots % 1007, chunk=16)
        weights = torch.ones(num_rows, device="cuda")
        torch.autograd.backward(weighted_loss(hidden, out.dhidden, out.ce, weights, slots))

    def variants() -> int:
        return sum(len(cache[0]) for cache in loss_kernel._row_kernel.device_caches.values())

    step(64)
    torch.cuda.synchronize()
    compiled, allocated = variants(), torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Recorded() as recorded:
            for num_rows in (1, 15, 16, 17, 48, 63):
                step(num_rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled > 0 and variants() == compiled
    assert torch.cuda.memory_allocated() <= allocated + 64 * 1024
    assert recorded.products == {(torch.bfloat16,) * 3}
    assert recorded.largest_fp32 <= 64 * 128  # less than one chunk of logits: statistics, weights, random numbers


@pytest.mark.gpu
@gpu
def test_no_copy_of_the_logits_is_made() -> None:
    hidden = torch.randn(4096, 256, device="cuda").bfloat16()
    head, labels = (
        torch.randn(50_257, 256, device="cuda").bfloat16(),
        torch.zeros(4096, dtype=torch.int64, device="cuda"),
    )
    frozen_head_cross_entropy(hidden, head, labels)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = torch.cuda.memory_allocated()
    frozen_head_cross_entropy(hidden, head, labels)
    buffer = chunk_rows(256) * 50_257 * 2
    assert torch.cuda.max_memory_allocated() - begin < buffer / 4  # dhidden and statistics alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("multiplier, softcap", [(1.0, None), (0.5, None), (1.5, 5.0)])
def test_in_e4m3_the_softmax_and_the_labels_part_are_the_twins(
    device: str, multiplier: float, softcap: float | None
) -> None:
    from dflash_train.stage2_drafter.loss_kernel import softmax_minus_onehot_

    logits, labels = make_logits(13, 1008, torch.bfloat16, device, padding=16)
    results = []
    for function in (softmax_minus_onehot_, eager_softmax_minus_onehot_):
        work = torch.empty(13, 1024, dtype=torch.float8_e4m3fn, device=device)
        into = QuantisedSoftmax(work[:, :1008], *torch.full((2, 13), -3.0, device=device))
        ce, correct = torch.empty(13, device=device), torch.empty(13, dtype=torch.bool, device=device)
        before = logits.clone()
        spread = torch.empty(13, 1024, dtype=torch.bfloat16, device=device)[:, :1008].copy_(logits)
        function(spread, labels, ce, correct, 0, multiplier=multiplier, softcap=softcap, quantised=into)
        assert torch.equal(spread, before), "the logits stay"
        results.append((into, ce, correct))
    (found, ce, correct), (twin, twin_ce, twin_correct) = results
    torch.testing.assert_close((ce, *found[1:]), (twin_ce, *twin[1:]), atol=2e-5, rtol=2e-5)
    assert torch.equal(correct, twin_correct)
    share, wanted = found.softmax.float(), twin.softmax.float()
    close = (share - wanted).abs() <= 0.13 * wanted + 2.0**-9
    if device == "cpu":  # Triton 3.6's interpreter loses the carry when rounding up to a power of two
        close |= (share == wanted / 2) & (wanted.log2() % 1 == 0)
    assert close.all() and (share == wanted).float().mean() > 0.9
    counted = (share * found.scales[:, None]).double()
    assert not share[labels < 0].any() and not found.label_slopes[labels < 0].any()
    if softcap is None:
        assert (counted.sum(-1)[labels >= 0] - multiplier).abs().max() < 0.08, "probabilities sum to one, but for e4m3"


def test_a_head_in_e4m3_gives_the_loss_and_gradient_of_the_head_within_its_format() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(37, 64, generator=generator).to(device, torch.bfloat16)
    head = (0.3 * torch.randn(1008, 64, generator=generator)).to(device, torch.bfloat16)
    labels = torch.randint(0, 1008, (37,), generator=generator).to(device)
    labels[::7] = -1
    exact = frozen_head_cross_entropy(hidden.float(), head.float(), labels, multiplier=1.5, softcap=8.0)
    found = frozen_head_cross_entropy(hidden, Fp8Head.quantise(head), labels, multiplier=1.5, softcap=8.0, chunk=16)
    assert (found.ce - exact.ce).norm() / exact.ce.norm() < 0.02
    error = (found.dhidden.float() - exact.dhidden).norm() / exact.dhidden.norm()
    assert 1e-3 < error < 0.06
    assert not found.dhidden[labels < 0].any()
    without = frozen_head_cross_entropy(hidden, Fp8Head.quantise(head), labels, chunk=16, with_gradient=False)
    assert without.dhidden.shape == (0, 64)
