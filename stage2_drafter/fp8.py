"""Products in e4m3, an option for GPUs that have it (Hopper and later): `--precision fp8`.

A factor is scaled row by row to the range of e4m3 along the axis that is summed, and the product is torch's own scaled
matmul. Two of the three products of a trained weight are done so, the output and the gradient of the input; the gradient
of the weight stays in the type of the input: it sums over tokens, where a scale a row would not come out of the sum, and it
goes into moments that live for thousands of steps. The frozen head is converted once, in both layouts.

Shapes: N tokens, I input and O output width, V vocabulary, H hidden size.
Source: row-wise scales with a high-precision weight gradient is the recipe that torchao calls rowwise_with_gw_hp.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_train.errors import InputError

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MULTIPLE = 16
"""torch's scaled matmul wants both widths of a weight divisible by this."""
MIN_CAPABILITY = (8, 9)
"""First compute capability with e4m3 products."""


def check_fp8(device: torch.device, weights: Iterable[Tensor]) -> None:
    """Raise InputError where the device has no e4m3 products, or a weight's shape does not suit them."""
    if device.type != "cuda":
        raise InputError(f"--precision fp8 needs a GPU of the Hopper class or later, not {device.type}; leave it out.")
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        raise InputError(
            f"--precision fp8 needs compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or higher; "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, torch.cuda.get_device_capability(device)))}. "
            "Leave it out."
        )
    for weight in weights:
        if any(width % MULTIPLE for width in weight.shape):
            raise InputError(
                f"--precision fp8 needs widths that {MULTIPLE} divides; the drafter has a matrix of "
                f"{' x '.join(map(str, weight.shape))}. Use bf16."
            )


def quantise_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [N,I] as e4m3 [N,I], contiguous, and fp32 scales [N,1]: values ≈ e4m3 · scale; a row of zeros has scale 1."""
    wide = values.float()
    scales = wide.abs().amax(dim=-1, keepdim=True) / E4M3_MAX
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (wide / scales).to(E4M3).contiguous(), scales


def scaled_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N,I] · weightᵀ of weight [O,I], both quantised row by row; the result [N,O] has the type of x."""
    x8, x_scales = quantise_rows(x)
    weight8, weight_scales = quantise_rows(weight)
    return quantised_product(x8, x_scales, weight8, weight_scales, x.dtype)


def quantised_product(
    x8: Tensor, x_scales: Tensor, weight8: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """x8 [N,I] · weight8ᵀ of weight8 [O,I] with scales [N,1] and [O,1] -> [N,O]."""
    out: Tensor = torch._scaled_mm(
        x8, weight8.t(), scale_a=x_scales, scale_b=weight_scales.t(), out_dtype=dtype, use_fast_accum=True
    )
    return out


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scaled_product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = grads[0]
        return scaled_product(gradient, weight.t()), (gradient.t() @ x).to(weight.dtype)


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear(x [...,I], weight [O,I]) with both products of x in e4m3; compiled, the scaling fuses into its neighbours."""
    out: Tensor = _Fp8Product.apply(x.flatten(0, -2), weight)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], weight.shape[0])


class QuantisedSoftmax(NamedTuple):
    """Where the gradient of logits [N,V] goes in e4m3; scales and slopes are whole vectors, as labels are."""

    softmax: Tensor
    """e4m3 [N,V]."""
    scales: Tensor
    """fp32, one a row."""
    label_slopes: Tensor
    """fp32, one a row."""


class Fp8Head(NamedTuple):
    """A frozen head [V,H] in e4m3, for the product to logits and for the product back to hidden states."""

    rows: Tensor
    """e4m3 [V,H]."""
    row_scales: Tensor
    """fp32 [V,1]."""
    columns: Tensor
    """e4m3 [H,V]."""
    column_scales: Tensor
    """fp32 [H,1]."""

    @classmethod
    def quantise(cls, head: Tensor) -> Fp8Head:
        """Both layouts of head [V,H]; made once, together as large as the head in bf16."""
        return cls(*quantise_rows(head), *quantise_rows(head.t()))

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """hidden [N,H] · headᵀ into out [N,V]."""
        hidden8, scales = quantise_rows(hidden)
        torch._scaled_mm(
            *(hidden8, self.rows.t(), scales, self.row_scales.t()), out_dtype=out.dtype, use_fast_accum=True, out=out
        )

    def input_gradient(self, softmax: Tensor, scales: Tensor, label_slopes: Tensor, labels: Tensor) -> Tensor:
        """(softmax · scales) · head − label_slopes · head[labels], fp32 [N,H]: parts of a QuantisedSoftmax of N rows."""
        product = quantised_product(softmax, scales[:, None], self.columns, self.column_scales, torch.bfloat16)
        rows = labels.clamp_min(0)
        of_label = self.rows[rows].float() * (self.row_scales[rows, 0] * label_slopes)[:, None]
        return product.float() - of_label
