"""Every Triton kernel compiles for a Hopper GPU, on a machine that has none: the interpreter accepts what the compiler refuses."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dflash_train.stage2_drafter import loss_kernel, mask_kernel
from dflash_train.store import kernels


def compile_for_hopper(kernel, types, num_warps=4, **constants):
    names = kernel.arg_names
    assert set(types) | set(constants) == set(names), (kernel.__name__, set(names) ^ (set(types) | set(constants)))
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    assert done.asm["cubin"]
    print(kernel.__name__)


tables = {"start_pointer": "*i32", "anchor_pointer": "*i32", "state_pointer": "*i8"}
sizes = {"num_anchors": "i32", "num_tokens": "i32", "num_tiles": "i32"}
for block_size, window, causal in ((16, 0, False), (10, 40, True)):
    compile_for_hopper(
        mask_kernel._classify,
        tables | sizes,
        block_size=block_size,
        window=window,
        causal=causal,
        TILE_SIZE=128,
        TILES=64,
    )
lines = {"num_lines": "i32", "length": "i32", "line_stride": "i32", "stride": "i32"}
pointers = {"state_pointer": "*i8", "count_pointer": "*i32", "index_pointer": "*i32"}
compile_for_hopper(mask_kernel._order, pointers | lines, WIDTH=256)

strides = {"state_stride": "i64", "hidden_size": "i32"}
tokens = {"states": "*bf16", "rows": "*i64", "sound": "*u8"}
encoded = {"channel_scale": "*fp32", "features": "*i8", "scales": "*fp32", "feature_stride": "i64", "scale_stride": "i64"}
compile_for_hopper(kernels._encode_int8, tokens | strides | encoded, num_warps=8, BLOCK=4096)
for out in ("bf16", "fp32"):
    gathered = {"out": f"*{out}", "out_stride": "i64", "sound_stride": "i64"}
    compile_for_hopper(kernels._gather, tokens | strides | gathered, num_warps=8, BLOCK=4096)
    decoded = {"features": "*i8", "scales": "*fp32", "out": f"*{out}", "num_layers": "i32", "hidden_size": "i32"}
    compile_for_hopper(kernels._decode_int8, decoded, num_warps=8, BLOCK=4096)

rows = {"labels": "*i64", "ce": "*fp32", "correct": "*u8", "scales": "*fp32", "label_slopes": "*fp32", "first": "i32"}
for logits, quantised, softcap in (("bf16", "bf16", 0.0), ("fp32", "fp32", 5.0), ("bf16", "fp8e4nv", 0.0)):
    compile_for_hopper(
        loss_kernel._row_kernel,
        rows | {"logits": f"*{logits}", "quantised": f"*{quantised}"},
        num_warps=loss_kernel.NUM_WARPS,
        stride=1024,
        vocabulary=1007,
        multiplier=1.5,
        softcap=softcap,
        block=512 if logits == "bf16" else 256,
        with_gradient=True,
        in_e4m3=quantised == "fp8e4nv",
    )
"""


def test_the_kernels_compile_for_a_hopper_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {"_classify", "_order", "_row_kernel", "_encode_int8", "_gather", "_decode_int8"}
    assert kernels == set(done.stdout.split())
