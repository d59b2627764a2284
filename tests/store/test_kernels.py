"""The Triton kernels against their torch twins, bit for bit: in Triton's interpreter, or on a GPU where there is one."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dflash_train.store import encoding as encoding_module
from dflash_train.store import tap_encoder
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import make_encoding
from dflash_train.store.tap_encoder import TapEncoder

pytest.importorskip("triton")


in_interpreter = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the GPU tests show the same")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from dflash_train.store import kernels

pointers = {"states": "*bf16", "rows": "*i64", "channel_scale": "*fp32", "features": "*i8", "scales": "*fp32"}
sizes = dict.fromkeys(("state_stride", "feature_stride", "scale_stride", "hidden_size"), "i32")
signature = {**pointers, "sound": "*u8", **sizes, "BLOCK": "constexpr"}
source = triton.compiler.ASTSource(kernels._encode_int8, signature, constexprs={"BLOCK": 128})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"])
"""


def test_encoding_compiles_without_a_gpu_to_ieee_division_and_keeps_its_rounding() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ptx = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "div.rn.f32" in ptx and ".ftz" not in ptx and "div.full" not in ptx
    assert len(re.findall(r"(add|sub)(\.rn)?\.f32", ptx)) >= 8, "4 values a thread, each rounded by two sums"


def random_taps(shape: tuple[int, ...], num_layers: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Outputs of tapped layers whose channels span orders of magnitude, with a massive token and a token of zeros."""
    generator = torch.Generator().manual_seed(seed)
    taps = []
    for _ in range(num_layers):
        channels = torch.exp(2 * torch.randn(shape[-1], generator=generator))
        states = torch.randn(shape, generator=generator) * channels
        states[0, 1] *= 100
        states[-1, 0] = 0
        taps.append(states.clamp(-60_000, 60_000).to(dtype))  # float16 ends at 65,504
    return taps


def compare(
    name: str, taps: list[torch.Tensor], rows: torch.Tensor, calibration: Calibration, device: str, on: Any
) -> tuple[Any, Any]:
    """(with kernels, without), of the same batch, on the CPU; on(bool) switches between the two."""
    results = []
    encoding = make_encoding(name, len(taps), taps[0].shape[-1], 5 if name.startswith("projected") else None)
    for with_kernels in (True, False):
        on(with_kernels)
        encoder = TapEncoder(encoding, calibration.to(torch.device(device)), rows.to(device))
        for layer, states in enumerate(taps):
            encoder.add(layer, states.to(device))
        results.append(tuple(None if part is None else part.cpu() for part in encoder.finish()))
    return results[0], results[1]


def calibration_of(num_states: int) -> Calibration:
    generator = torch.Generator().manual_seed(1)
    rows = torch.linalg.qr(torch.randn(num_states, 5, generator=generator)).Q.T.contiguous()
    scale = torch.exp(torch.randn(num_states, generator=generator))
    return Calibration(scale, projection=rows, eigenvalues=torch.logspace(1, -2, 5))


def switch(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def on(with_kernels: bool) -> None:
        for module in (encoding_module, tap_encoder):
            monkeypatch.setattr(module, "has_kernels", lambda _tensor: with_kernels)

    return on


def check_taps(name: str, dtype: torch.dtype, size: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taps = random_taps((3, 7, size), 2, dtype)
    valid = torch.arange(7)[None, :] < torch.tensor([7, 5, 1])[:, None]
    rows = valid.flatten().nonzero()[:, 0]
    taps[1][1, 4, size - 1] = float("nan")
    taps[0][0, 2, 0] = float("-inf")
    taps[0][1, 6, 0] = float("nan")  # padding
    found, wanted = compare(name, taps, rows, calibration_of(2 * size), device, switch(monkeypatch))
    assert torch.equal(found[2], wanted[2]) and found[2].sum() == 13 * 2 - 2
    sound = found[2].all(dim=1)
    assert sound.sum() == 11, "both broken states belong to tokens of their own"
    assert torch.equal(found[0][sound], wanted[0][sound])
    if wanted[1] is not None:
        assert torch.equal(found[1][sound], wanted[1][sound])


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [7, 100])
@pytest.mark.parametrize("name", ["bf16", "int8", "projected-int8"])
@pytest.mark.filterwarnings("ignore:invalid value encountered|overflow encountered:RuntimeWarning")
def test_interpreted_kernels_store_what_torch_stores(
    name: str, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_taps(name, dtype, size, "cpu", monkeypatch)


def check_rows(shape: tuple[int, ...], num_layers: int, device: str, on: Callable[[bool], None]) -> None:
    """encode and decode of packed states, as calibration, reports and stage 2 call them."""
    size = shape[-1]
    encoding = make_encoding("int8", num_layers, size)
    calibration = calibration_of(num_layers * size).to(torch.device(device))
    states = torch.cat(random_taps(shape, num_layers, torch.float32), dim=-1).to(device)
    on(True)
    features, scales = encoding.encode(states, calibration)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    decoded = [encoding.decode(features, scales, calibration, dtype) for dtype in dtypes]
    on(False)
    wanted, wanted_scales = encoding.encode(states, calibration)
    assert scales is not None and wanted_scales is not None
    assert torch.equal(features, wanted) and torch.equal(scales, wanted_scales)
    assert features.abs().max() == 127
    for dtype, found in zip(dtypes, decoded, strict=True):
        assert torch.equal(found, encoding.decode(features, scales, calibration, dtype)), dtype


@in_interpreter
@pytest.mark.parametrize("shape", [(2, 33, 8), (1, 31, 100), (3, 2, 7)])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_interpreted_kernels_encode_and_decode_packed_states_as_torch_does(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rows(shape, 3, "cpu", switch(monkeypatch))


@in_interpreter
def test_empty_batches_need_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch)(True)
    encoding = make_encoding("int8", 2, 8)
    features, scales = encoding.encode(torch.zeros(0, 16), Calibration(torch.ones(16)))
    assert features.shape == (0, 16) and scales is not None and scales.shape == (0, 2)
    assert encoding.decode(features, scales, Calibration(torch.ones(16)), torch.bfloat16).shape == (0, 16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [7, 576, 2880, 4096])
@pytest.mark.parametrize("name", ["bf16", "int8", "projected-int8"])
def test_kernels_on_a_gpu_store_what_torch_stores(
    name: str, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_taps(name, dtype, size, "cuda", monkeypatch)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(2, 507, 576), (1, 2048, 4096), (3, 7, 100)])
def test_kernels_on_a_gpu_encode_and_decode_packed_states_as_torch_does(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rows(shape, 5, "cuda", switch(monkeypatch))


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_stores_what_a_cpu_stores() -> None:
    states = torch.cat(random_taps((2, 507, 576), 3, torch.float32), dim=-1)
    encoding, calibration = make_encoding("int8", 3, 576), calibration_of(3 * 576)
    found, found_scales = encoding.encode(states.cuda(), calibration.to(torch.device("cuda")))
    wanted, wanted_scales = encoding.encode(states, calibration)
    assert found_scales is not None and wanted_scales is not None
    assert torch.equal(found.cpu(), wanted) and torch.equal(found_scales.cpu(), wanted_scales)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_projects_as_float64_does_but_for_a_tenth_of_a_rounding_step() -> None:
    encoding = make_encoding("projected-int8", 5, 512, rank=512)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.linspace(1, -2, 5 * 512).exp()  # of the components: the last has a twentieth of the first
    basis = torch.linalg.qr(torch.randn(5 * 512, 5 * 512, generator=generator))[0].T
    channel_scale = torch.randn(5 * 512, generator=generator).exp()
    calibration = Calibration(channel_scale, basis[:512].contiguous(), sizes[:512].square())
    states = ((torch.randn(2048, 5 * 512, generator=generator) * sizes) @ basis * channel_scale).bfloat16()
    wanted = states.double() / channel_scale.double() @ calibration.projection.double().T  # type: ignore[union-attr]
    on_gpu = calibration.to(torch.device("cuda"))
    found = encoding.fc_input(states.cuda(), on_gpu)
    step = wanted.div(sizes[:512]).abs().amax(-1, keepdim=True) / 127 * sizes[:512]
    assert found.cpu().double().sub(wanted).div(step).square().mean().sqrt() < 0.1 / 12**0.5
    assert torch.get_float32_matmul_precision() == "highest"
    features, scales = encoding.encode(states.cuda(), on_gpu)
    decoded = encoding.decode(features, scales, on_gpu, torch.float32).cpu().double()
    assert decoded.sub(wanted).div(step).square().mean().sqrt() < 1.01 / 12**0.5  # rounding alone makes 1 / √12
