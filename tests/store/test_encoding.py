"""Encodings against their numpy twins."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import Encoding, from_stored, make_encoding, resolve_rank, to_stored

L, H = 3, 8
NAMES = ["bf16", "int8", "projected-int8", "projected-int4"]
LENGTHS = [1, 7, 31, 32, 33, 100, 507]


def random_states(length: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(length, L * H, generator=generator) * torch.exp(3 * torch.randn(L * H, generator=generator))
    channel_scale = torch.exp(torch.randn(L * H, generator=generator))
    return states, channel_scale


def make(name: str, rank: int = 7) -> tuple[Encoding, Any, Calibration]:
    """An encoding, 507 tokens of random states and a calibration."""
    states, channel_scale = random_states(507)
    if not name.startswith("projected"):
        return make_encoding(name, L, H), states, Calibration(channel_scale)
    generator = torch.Generator().manual_seed(3)
    rows = torch.linalg.qr(torch.randn(L * H, rank, generator=generator, dtype=torch.float64)).Q.T.float().contiguous()
    calibration = Calibration(channel_scale, projection=rows, eigenvalues=torch.logspace(1, -2, rank))
    return make_encoding(name, L, H, rank), states, calibration


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
    features, scales = encoding.encode(states, Calibration(channel_scale))
    assert scales is None and features.dtype == torch.int16
    bits = numpy_bf16(states.numpy())
    np.testing.assert_array_equal(features.numpy().view(np.uint16), bits)
    raw = (bits.astype(np.uint32) << 16).view(np.float32)
    decoded = encoding.decode(features, None, Calibration(channel_scale), torch.float32)
    np.testing.assert_array_equal(decoded.numpy(), raw / channel_scale.numpy())
    in_bf16 = encoding.decode(features, None, Calibration(channel_scale), torch.bfloat16)
    torch.testing.assert_close(in_bf16, decoded.bfloat16(), rtol=0, atol=0)  # rounded once


@pytest.mark.parametrize("length", LENGTHS)
def test_int8_matches_numpy_twin(length: int) -> None:
    states, channel_scale = random_states(length)
    encoding = make_encoding("int8", L, H)
    features, scales = encoding.encode(states, Calibration(channel_scale))
    assert scales is not None
    wanted_features, wanted_scales = numpy_int8(states.numpy(), channel_scale.numpy())
    np.testing.assert_array_equal(features.numpy(), wanted_features)
    np.testing.assert_array_equal(scales.numpy(), wanted_scales)
    decoded = encoding.decode(features, scales, Calibration(channel_scale), torch.float32).numpy()
    twin = (wanted_features.reshape(length, L, H) * wanted_scales[..., None]).reshape(length, L * H)
    np.testing.assert_array_equal(decoded, twin)


def test_int8_error_is_at_most_half_a_step() -> None:
    states, channel_scale = random_states(507)
    encoding = make_encoding("int8", L, H)
    features, scales = encoding.encode(states, Calibration(channel_scale))
    assert scales is not None
    decoded = encoding.decode(features, scales, Calibration(channel_scale), torch.float64)
    error = (decoded - states.double() / channel_scale.double()).abs().view(-1, L, H)
    assert (error <= scales.double()[..., None] * (0.5 + 127 * 2**-22)).all()  # and fp32 rounding of the quotients


def test_int8_keeps_zero_tokens_and_padding_zero() -> None:
    encoding = make_encoding("int8", L, H)
    features, scales = encoding.encode(torch.zeros(2, L * H), Calibration(torch.ones(L * H)))
    assert scales is not None
    assert not features.any() and not scales.any()
    assert not encoding.decode(features, scales, Calibration(torch.ones(L * H)), torch.float32).any()


@pytest.mark.parametrize("name", NAMES)
def test_rows_decode_like_samples(name: str) -> None:
    encoding, states, calibration = make(name)
    features, scales = encoding.encode(states[:12], calibration)
    assert features.shape == (12, encoding.num_columns)
    flat = encoding.decode(features, scales, calibration, torch.float32)
    scales = None if scales is None else scales.view(2, 6, encoding.num_scales)
    rows = encoding.decode(features.view(2, 6, encoding.num_columns), scales, calibration, torch.float32)
    torch.testing.assert_close(rows, flat.view(2, 6, encoding.num_features), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_folded_weight_gives_the_same_projection_and_unfolds_back(name: str) -> None:
    encoding, states, calibration = make(name)
    weight = torch.randn(5, encoding.num_features, generator=torch.Generator().manual_seed(1))
    folded = encoding.fold(weight, calibration)
    assert folded.dtype == torch.float64 and folded.shape == (5, L * H)
    features = states.double() / calibration.channel_scale.double()
    if calibration.projection is not None:
        features = features @ calibration.projection.double().T
    wanted = features @ weight.double().T
    atol = 1e-12 * float(wanted.abs().max())
    torch.testing.assert_close(states.double() @ folded.T, wanted, rtol=1e-12, atol=atol)
    tolerance = 1e-6 if encoding.is_projected else 1e-15  # float32 rows are orthonormal to 7 digits
    torch.testing.assert_close(encoding.unfold(folded, calibration), weight.double(), rtol=tolerance, atol=tolerance)


def numpy_pack(values: Any) -> Any:
    """int4, two a byte, one value at a time."""
    packed = np.zeros((len(values), (values.shape[1] + 1) // 2), np.uint8)
    for token, component in np.ndindex(*values.shape):
        packed[token, component // 2] |= (int(values[token, component]) % 16) << (4 * (component % 2))
    return packed


@pytest.mark.parametrize("rank", [1, 2, 7, 16, 23])
@pytest.mark.parametrize(("name", "limit"), [("projected-int8", 127), ("projected-int4", 7)])
def test_projected_matches_numpy_twin(name: str, limit: int, rank: int) -> None:
    encoding, states, calibration = make(name, rank)
    assert calibration.projection is not None and calibration.eigenvalues is not None
    features, scales = encoding.encode(states, calibration)
    assert scales is not None and scales.shape == (507, 1)
    roots = np.sqrt(calibration.eigenvalues.numpy())
    y = (states @ (calibration.projection / calibration.channel_scale).T).numpy()  # a product has no bitwise twin
    exact = (
        states.double().numpy() / calibration.channel_scale.double().numpy() @ calibration.projection.double().numpy().T
    )
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5 * np.abs(exact).max())
    wanted_scales = np.abs(y / roots).max(1, keepdims=True) / np.float32(limit)
    quantised = np.clip(np.rint(y / roots / wanted_scales), -limit, limit).astype(np.int8)
    wanted = numpy_pack(quantised) if limit == 7 else quantised
    assert features.dtype == (torch.uint8 if limit == 7 else torch.int8)
    np.testing.assert_array_equal(scales.numpy(), wanted_scales)
    np.testing.assert_array_equal(features.numpy(), wanted)
    assert np.abs(quantised).max() == limit and features.numpy().dtype == encoding.storage_dtype
    decoded = encoding.decode(features, scales, calibration, torch.float32)
    np.testing.assert_array_equal(decoded.numpy(), quantised * wanted_scales * roots)
    viewed = encoding.decode(features.view(torch.int8), scales, calibration.for_decoding(), torch.bfloat16)
    torch.testing.assert_close(viewed, decoded.bfloat16(), rtol=0, atol=0)  # rounded once
    steps = scales.double().numpy() * roots
    assert (np.abs(decoded.double().numpy() - y) <= steps * (0.5 + limit * 2**-21)).all()


@pytest.mark.parametrize("name", ["projected-int8", "projected-int4"])
def test_projected_keeps_zero_tokens_and_padding_zero(name: str) -> None:
    encoding, states, calibration = make(name)
    features, scales = encoding.encode(torch.zeros_like(states[:2]), calibration)
    assert scales is not None and not features.any() and not scales.any()
    assert not encoding.decode(features, scales, calibration, torch.float32).any()
    empty, scales = encoding.encode(states[:0], calibration)
    assert encoding.decode(empty, scales, calibration, torch.float32).shape == (0, 7)


@pytest.mark.parametrize("name", ["int8", "projected-int8"])
def test_expected_rounding_error_is_the_measured_one(name: str) -> None:
    encoding, states, calibration = make(name, 23)
    states = torch.randn(states.shape, generator=torch.Generator().manual_seed(4)) * calibration.channel_scale
    calibration = replace(calibration, eigenvalues=torch.ones(23))  # or a few components would set every step
    features, scales = encoding.encode(states, calibration)
    assert scales is not None
    found = encoding.scaled_states(encoding.decode(features, scales, calibration, torch.float32), calibration)
    wanted = encoding.scaled_states(encoding.fc_input(states, calibration), calibration)
    measured = float((found - wanted).square().sum(1).mean())
    assert float(encoding.rounding_error(scales, calibration).sum()) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("text", "rank"), [("auto", 64), ("H", 64), ("2H", 128), ("0.5H", 32), (".5H", 32), ("100", 100), ("1.01H", 65)]
)
def test_rank_is_a_number_or_a_multiple_of_the_hidden_size(text: str, rank: int) -> None:
    assert resolve_rank(text, 64) == rank


@pytest.mark.parametrize("text", ["", "h", "2h", "-1", "1e3", ".H", "2.5", "H2"])
def test_other_ranks_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"--rank is '{text}'. Give a number of features, a multiple"):
        resolve_rank(text, 64)


@pytest.mark.parametrize(
    ("name", "rank", "match"),
    [
        ("projected-int8", None, "The rank of projected-int8 is None, but must be from 1 to 24"),
        ("projected-int4", 0, "is 0, but must be from 1 to 24"),
        ("projected-int4", 25, "is 25, but must be from 1 to 24, the channels of 3 tapped layers"),
        ("int8", 7, "A rank of 7 was given, but only the projected encodings have one, not int8"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(name: str, rank: int | None, match: str) -> None:
    with pytest.raises(InputError, match=match):
        make_encoding(name, L, H, rank)


@pytest.mark.parametrize(
    ("name", "num_layers", "hidden_size", "rank", "bytes_per_token", "align_tokens"),
    [
        ("bf16", 5, 4096, None, 40_965, 1),
        ("int8", 5, 4096, None, 20_505, 1),
        ("bf16", 5, 2880, None, 28_805, 4),
        ("int8", 3, 8, None, 41, 64),
        ("projected-int8", 5, 4096, 4096, 4_105, 1),
        ("projected-int4", 5, 4096, 4096, 2_057, 1),
        ("projected-int8", 3, 8, 7, 16, 512),
        ("projected-int4", 3, 8, 7, 13, 128),
    ],
)
def test_sizes(
    name: str, num_layers: int, hidden_size: int, rank: int | None, bytes_per_token: int, align_tokens: int
) -> None:
    encoding = make_encoding(name, num_layers, hidden_size, rank)
    assert (encoding.bytes_per_token, encoding.align_tokens) == (bytes_per_token, align_tokens)
    row_bytes = encoding.num_columns * encoding.storage_dtype.itemsize
    assert align_tokens * row_bytes % 512 == 0 and math.lcm(row_bytes, 512) == align_tokens * row_bytes


def test_unknown_encoding_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="'fp4' is unknown. Choose one of: bf16, int8, projected-int8, projected-int4"):
        make_encoding("fp4", 1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_stored_tensor_shares_memory_and_comes_back_bit_equal(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 3).to(dtype)
    array, dtype_view = to_stored(tensor)
    assert dtype_view == ("bfloat16" if dtype == torch.bfloat16 else None)
    back = from_stored(array, dtype_view)
    assert back.dtype == dtype and torch.equal(back, tensor) and back.data_ptr() == tensor.data_ptr()
