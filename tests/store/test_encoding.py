"""Encodings against their numpy twins."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.store.encoding import from_stored, make_encoding, to_stored

L, H = 3, 8
LENGTHS = [1, 7, 31, 32, 33, 100, 507]


def random_states(length: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(length, L * H, generator=generator) * torch.exp(3 * torch.randn(L * H, generator=generator))
    channel_scale = torch.exp(torch.randn(L * H, generator=generator))
    return states, channel_scale


def numpy_bf16(states: Any) -> Any:
    """Round float32 to bfloat16 bits, to nearest even."""
    bits = states.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def numpy_int8(states: Any, channel_scale: Any) -> Any:
    scaled = (states / channel_scale).reshape(len(states), L, H)
    scales = np.abs(scaled).max(-1) / np.float32(127)
    steps = np.where(scales > 0, scales, np.float32(1))
    return np.clip(np.rint(scaled / steps[..., None]), -127, 127).astype(np.int8).reshape(len(states), L * H), scales


@pytest.mark.parametrize("length", LENGTHS)
def test_bf16_matches_numpy_twin_and_decodes_exactly(length: int) -> None:
    states, channel_scale = random_states(length)
    encoding = make_encoding("bf16", L, H)
    features, scales = encoding.encode(states, channel_scale)
    assert scales is None and features.dtype == torch.int16
    bits = numpy_bf16(states.numpy())
    np.testing.assert_array_equal(features.numpy().view(np.uint16), bits)
    raw = (bits.astype(np.uint32) << 16).view(np.float32)
    decoded = encoding.decode(features, None, channel_scale, torch.float32)
    np.testing.assert_array_equal(decoded.numpy(), raw / channel_scale.numpy())
    in_bf16 = encoding.decode(features, None, channel_scale, torch.bfloat16)
    torch.testing.assert_close(in_bf16, decoded.bfloat16(), rtol=0, atol=0)  # rounded once


@pytest.mark.parametrize("length", LENGTHS)
def test_int8_matches_numpy_twin(length: int) -> None:
    states, channel_scale = random_states(length)
    encoding = make_encoding("int8", L, H)
    features, scales = encoding.encode(states, channel_scale)
    assert scales is not None
    wanted_features, wanted_scales = numpy_int8(states.numpy(), channel_scale.numpy())
    np.testing.assert_array_equal(features.numpy(), wanted_features)
    np.testing.assert_array_equal(scales.numpy(), wanted_scales)
    decoded = encoding.decode(features, scales, channel_scale, torch.float32).numpy()
    twin = (wanted_features.reshape(length, L, H) * wanted_scales[..., None]).reshape(length, L * H)
    np.testing.assert_array_equal(decoded, twin)


def test_int8_error_is_at_most_half_a_step() -> None:
    states, channel_scale = random_states(507)
    encoding = make_encoding("int8", L, H)
    features, scales = encoding.encode(states, channel_scale)
    assert scales is not None
    decoded = encoding.decode(features, scales, channel_scale, torch.float64)
    error = (decoded - states.double() / channel_scale.double()).abs().view(-1, L, H)
    assert (error <= scales.double()[..., None] * (0.5 + 127 * 2**-22)).all()  # and fp32 rounding of the quotients


def test_int8_keeps_zero_tokens_and_padding_zero() -> None:
    encoding = make_encoding("int8", L, H)
    features, scales = encoding.encode(torch.zeros(2, L * H), torch.ones(L * H))
    assert scales is not None
    assert not features.any() and not scales.any()
    assert not encoding.decode(features, scales, torch.ones(L * H), torch.float32).any()


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_rows_decode_like_samples(name: str) -> None:
    states, channel_scale = random_states(12)
    encoding = make_encoding(name, L, H)
    features, scales = encoding.encode(states, channel_scale)
    flat = encoding.decode(features, scales, channel_scale, torch.float32)
    scales = None if scales is None else scales.view(2, 6, L)
    rows = encoding.decode(features.view(2, 6, L * H), scales, channel_scale, torch.float32)
    torch.testing.assert_close(rows, flat.view(2, 6, L * H), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_folded_weight_gives_the_same_projection_and_unfolds_back(name: str) -> None:
    encoding = make_encoding(name, L, H)
    states, channel_scale = random_states(33)
    weight = torch.randn(5, L * H, generator=torch.Generator().manual_seed(1))
    folded = encoding.fold(weight, channel_scale)
    assert folded.dtype == torch.float64
    wanted = (states.double() / channel_scale.double()) @ weight.double().T
    torch.testing.assert_close(states.double() @ folded.T, wanted, rtol=1e-12, atol=1e-12 * float(wanted.abs().max()))
    torch.testing.assert_close(encoding.unfold(folded, channel_scale), weight.double(), rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("name", "num_layers", "hidden_size", "bytes_per_token", "align_tokens"),
    [("bf16", 5, 4096, 40_965, 1), ("int8", 5, 4096, 20_505, 1), ("bf16", 5, 2880, 28_805, 4), ("int8", 3, 8, 41, 64)],
)
def test_sizes(name: str, num_layers: int, hidden_size: int, bytes_per_token: int, align_tokens: int) -> None:
    encoding = make_encoding(name, num_layers, hidden_size)
    assert (encoding.bytes_per_token, encoding.align_tokens) == (bytes_per_token, align_tokens)
    row_bytes = encoding.num_features * encoding.storage_dtype.itemsize
    assert align_tokens * row_bytes % 512 == 0 and math.lcm(row_bytes, 512) == align_tokens * row_bytes


def test_unknown_encoding_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="'fp4' is unknown. Choose one of: bf16, int8"):
        make_encoding("fp4", 1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_stored_tensor_shares_memory_and_comes_back_bit_equal(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 3).to(dtype)
    array, dtype_view = to_stored(tensor)
    assert dtype_view == ("bfloat16" if dtype == torch.bfloat16 else None)
    back = from_stored(array, dtype_view)
    assert back.dtype == dtype and torch.equal(back, tensor) and back.data_ptr() == tensor.data_ptr()
