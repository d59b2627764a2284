"""Triton kernels of the int8 and bf16 encodings, each equal bit for bit to its torch twin in encoding.py.

Encoding reads the output of one tapped layer where it lies, [B, T, H] with padding, and writes what is stored: gather of
the real tokens, D^-1, absmax, quantisation and the flag of what is sound (encoding.are_sound) in one pass, so one byte a
value is left to copy and no float32 array as large as the states is made. Decoding turns bytes and scales into what `fc` reads in one pass.

What keeps them equal to torch: quotients by `div_rn` (Triton's own `/` is approximate in float32), rounding to nearest
even by adding and taking away 1.5 * 2^23, absmax, which no order of reduction changes. One program a token (decoding: a
token and layer) holds its H values in registers; fixed configurations, so that nothing is tuned and nothing moves.

The only module of the store that imports torch and triton at its head; encoding.py imports it inside functions, and
only for CUDA tensors. Under TRITON_INTERPRET=1 the kernels run on a CPU (tests).

Shapes: N tokens without padding, M rows with it, H hidden size, L tapped target layers, D channel scale.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dflash_train.store.encoding import LARGEST_STATE

INT8_LIMIT = tl.constexpr(127.0)
ROUND_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: float32 has no fraction bits up there
LARGEST = tl.constexpr(LARGEST_STATE)


@triton.jit
def _rounded(values, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values in dtype, to nearest even; to bfloat16 in integers, since Triton's interpreter would truncate."""
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = values.to(dtype)
    return result


@triton.jit
def _encode_int8(  # type: ignore[no-untyped-def]
    states,
    rows,
    channel_scale,
    features,
    scales,
    sound,
    state_stride,
    feature_stride,
    scale_stride,
    hidden_size,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    values = tl.load(states + row * state_stride + column, mask=inside, other=0.0).to(tl.float32)
    divisors = tl.load(channel_scale + column, mask=inside, other=1.0)
    num_bad = tl.sum((tl.abs(values) <= LARGEST).to(tl.int32) ^ 1, axis=0)
    scaled = tl.div_rn(values, divisors)
    scale = tl.div_rn(tl.max(tl.abs(scaled), axis=0), INT8_LIMIT)
    step = tl.where(scale > 0.0, scale, 1.0)
    quotients = tl.div_rn(scaled, step)
    quotients = tl.minimum(tl.maximum(quotients, -INT8_LIMIT), INT8_LIMIT)
    quantised = (quotients + ROUND_TO_EVEN) - ROUND_TO_EVEN
    tl.store(features + token * feature_stride + column, quantised.to(tl.int8), mask=inside)
    tl.store(scales + token * scale_stride, scale)
    tl.store(sound + token * scale_stride, (num_bad == 0).to(tl.uint8))


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    states,
    rows,
    out,
    sound,
    state_stride,
    out_stride,
    sound_stride,
    hidden_size,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    values = tl.load(states + row * state_stride + column, mask=inside, other=0.0).to(tl.float32)
    num_bad = tl.sum((tl.abs(values) <= LARGEST).to(tl.int32) ^ 1, axis=0)
    tl.store(out + token * out_stride + column, _rounded(values, out.dtype.element_ty), mask=inside)
    tl.store(sound + token * sound_stride, (num_bad == 0).to(tl.uint8))


@triton.jit
def _decode_int8(features, scales, out, num_layers, hidden_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(0).to(tl.int64) * num_layers + tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    values = tl.load(features + group * hidden_size + column, mask=inside, other=0).to(tl.float32)
    values = values * tl.load(scales + group)
    tl.store(out + group * hidden_size + column, _rounded(values, out.dtype.element_ty), mask=inside)


def _configuration(hidden_size: int) -> dict[str, int]:
    block = triton.next_power_of_2(hidden_size)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def encode_int8(
    states: torch.Tensor,
    rows: torch.Tensor,
    channel_scale: torch.Tensor,
    features: torch.Tensor,
    scales: torch.Tensor,
    sound: torch.Tensor,
) -> None:
    """Encode rows [N] (int64) of one layer's states [M, H] into views of its columns: features int8 [N, H] of
    [N, L * H], scales float32 [N] and sound bool [N] of [N, L]."""
    assert states.stride(-1) == channel_scale.stride(-1) == features.stride(-1) == 1
    assert scales.stride(0) == sound.stride(0)
    if not len(rows):
        return
    with _device_of(states):
        _encode_int8[(len(rows),)](
            *(states, rows, channel_scale, features, scales, sound.view(torch.uint8)),
            *(states.stride(0), features.stride(0), scales.stride(0), states.shape[1]),
            **_configuration(states.shape[1]),
        )


def gather(states: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, sound: torch.Tensor) -> None:
    """Copy rows [N] (int64) of one layer's states [M, H] into out [N, H], a view of its columns of [N, L * H], rounded
    to out's dtype, and say in sound, bool [N] of [N, L], whether they are."""
    assert states.stride(-1) == out.stride(-1) == 1
    if not len(rows):
        return
    with _device_of(states):
        _gather[(len(rows),)](
            *(states, rows, out, sound.view(torch.uint8)),
            *(states.stride(0), out.stride(0), sound.stride(0), states.shape[1]),
            **_configuration(states.shape[1]),
        )


def decode_int8(features: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write features int8 [..., L * H] times scales float32 [..., L] to out [..., L * H], rounded once to its dtype.

    All are contiguous.
    """
    assert features.is_contiguous() and scales.is_contiguous() and out.is_contiguous()
    if not out.numel():
        return
    num_layers = scales.shape[-1]
    hidden_size = features.shape[-1] // num_layers
    with _device_of(out):
        _decode_int8[(scales.numel() // num_layers, num_layers)](
            features, scales, out, num_layers, hidden_size, **_configuration(hidden_size)
        )


def _device_of(tensor: torch.Tensor) -> Any:
    """Kernels are launched on the current device, which need not be the tensor's where a target has several."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
