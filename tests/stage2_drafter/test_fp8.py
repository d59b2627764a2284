"""Products in e4m3: their error is that of the format, and the gradient of the weight is exact."""

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.fp8 import E4M3_MAX, Fp8Head, check_fp8, fp8_linear, quantise_rows, scaled_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    """Rows whose sizes differ by six orders of magnitude: one scale for all would lose most of them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.linspace(-3, 3, size[0])[:, None]
    return (torch.randn(size, generator=generator) * sizes).to(DEVICE)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = found.detach().double() - expected.detach().double()
    return float(difference.norm() / expected.detach().double().norm())


def test_rows_keep_their_own_scale_and_the_whole_range_is_used() -> None:
    values = draw(24, 48)
    values[3] = 0
    quantised, scales = quantise_rows(values)
    assert quantised.is_contiguous() and scales.shape == (24, 1) and scales[3] == 1
    assert torch.equal(quantised.float().abs().amax(-1)[scales[:, 0] != 1], torch.full((23,), E4M3_MAX, device=DEVICE))
    error = (quantised.float() * scales - values).abs()
    assert bool((error <= values.abs() / 16 + scales * 2.0**-10 * 1.001).all()), "half a step of 3 bits of mantissa"


def test_a_product_and_its_input_gradient_have_the_formats_error_and_the_weight_gradient_has_none() -> None:
    x, weight = draw(40, 64, seed=1).requires_grad_(), (draw(32, 64, seed=2)).requires_grad_()
    out = fp8_linear(x.view(2, 20, 64), weight)
    expected = F.linear(x.view(2, 20, 64), weight)
    assert out.shape == (2, 20, 32)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    found = torch.autograd.grad(out, (x, weight), gradient)
    wanted = torch.autograd.grad(expected, (x, weight), gradient)
    assert 1e-3 < relative(out, expected) < 0.04
    assert 1e-3 < relative(found[0], wanted[0]) < 0.04
    torch.testing.assert_close(found[1], wanted[1])


def test_a_product_is_that_of_the_dequantised_factors() -> None:
    x, weight = draw(20, 64, seed=4), draw(16, 64, seed=5)
    (x8, x_scales), (weight8, weight_scales) = quantise_rows(x), quantise_rows(weight)
    twin = (x8.double() * x_scales) @ (weight8.double() * weight_scales).t()
    torch.testing.assert_close(scaled_product(x, weight).double(), twin, rtol=1e-3, atol=1e-4 * float(twin.abs().max()))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of torch's own tracing
def test_compiled_it_is_one_graph_under_autocast_from_fp32_weights() -> None:
    """As the compiled layer calls it: the weight is an fp32 master, x bf16, and the gradient of the master is fp32."""
    x = draw(32, 64, seed=1).to(torch.bfloat16).requires_grad_()
    weight = draw(32, 64, seed=2).requires_grad_()
    graphs = []

    def run(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = product(x, torch.cat((weight, weight)))
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), (x, weight))

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = run(torch.compile(fp8_linear, backend=aot_autograd(fw_compiler=count), fullgraph=True, dynamic=False))
    torch._dynamo.reset()
    assert len(graphs) == 2, "one forward, one backward"
    assert compiled[2].dtype == torch.float32 and compiled[0].dtype == torch.bfloat16
    for found, wanted in zip(compiled, run(fp8_linear), strict=True):
        assert relative(found, wanted) < 0.02, "a few values of e4m3 rounded the other way"


def test_both_layouts_of_a_head_are_that_head() -> None:
    head = draw(48, 32, seed=6)
    both = Fp8Head.quantise(head)
    assert relative(both.rows.float() * both.row_scales, head) < 0.04
    assert relative((both.columns.float() * both.column_scales).t(), head) < 0.04


def test_devices_and_widths_without_e4m3_products_are_refused() -> None:
    with pytest.raises(InputError, match="needs a GPU of the Hopper class"):
        check_fp8(torch.device("cpu"), [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_width_that_16_does_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="a matrix of 24 x 40"):
        check_fp8(torch.device("cuda"), [torch.zeros(24, 40)])
