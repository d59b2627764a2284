"""The drafter's training step beside other trainers': milliseconds, TFLOP/s of model work, peak memory.

    python benchmarks/drafter_step.py --peer specforge --peer speculators --json drafter_step.json
    python benchmarks/drafter_step.py --geometry qwen3-0.6b --peer speculators

Forward and backward of one row with bf16 weights and random inputs, no optimizer: every variant gets the same context
(4 documents of 2,048 tokens, 1,024 anchors) and runs in turn, round by round, in one process; times are medians of the
rounds, each step timed on the host between two synchronisations, so what the host does between kernels counts. Model
work counts the products alone, of all noise tokens, for every variant alike (skipping some is what a variant may win
by): noise · (layers · 6 + head · 4) + context · (fc · 4 + k and v · 6) FLOP per weight. Peak memory is the variant's own
weights and gradients and what the step allocates above them, and the shared inputs and frozen tables.

--mask times the block mask alone, here and at 65,536 tokens with 8,192 anchors. --profile FILE writes our kernels.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash_train.benchmarks import random_target
from dflash_train.benchmarks.peers import StepInputs, StepShape, specforge_step, speculators_step
from dflash_train.stage2_drafter.blocks import make_blocks, sample_anchors
from dflash_train.stage2_drafter.compiled import CompiledDrafter
from dflash_train.stage2_drafter.drafter import Drafter, DrafterConfig
from dflash_train.stage2_drafter.fp8 import Fp8Head
from dflash_train.stage2_drafter.loss import (
    _logits_buffer,
    block_weights,
    frozen_head_cross_entropy,
    weighted_loss,
)
from dflash_train.stage2_drafter.mask_kernel import fused_block_mask

_SHARED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
GEOMETRIES = {
    name: StepShape(**{field: target[field] for field in _SHARED})
    for name, target in random_target.GEOMETRIES.items()
    if name != "tiny"
}
OURS, OURS_FP8 = "dflash-train", "dflash-train, fp8"
NUM_DRAWS = 4
"""Draws of anchors that our steps cycle through; the peers draw their own."""


@dataclass
class Variant:
    """One trainer's step, and what was measured of it."""

    name: str
    module: nn.Module
    step: Callable[[], Tensor]
    resident_bytes: int
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    note: str = ""


def model_flops(shape: StepShape) -> float:
    """Forward and backward of one row, products of all noise tokens; attention is not counted."""
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    key_values = shape.hidden_size * 2 * keys
    layer = shape.hidden_size * 2 * queries + key_values + 3 * shape.hidden_size * shape.intermediate_size
    noise = shape.num_anchors * shape.block_size
    fc, head = shape.num_features * shape.hidden_size, shape.vocab_size * shape.hidden_size
    context = fc * 4 + shape.num_layers * key_values * 6
    return float(noise * (shape.num_layers * layer * 6 + head * 4) + shape.row_tokens * context)


def random_inputs(shape: StepShape, device: torch.device, seed: int = 0) -> StepInputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=generator, device=device) * scale).to(torch.bfloat16)

    return StepInputs(
        features=normal(shape.row_tokens, shape.num_features),
        token_ids=torch.randint(0, shape.vocab_size - 1, (shape.row_tokens,), generator=generator, device=device),
        embed_tokens=normal(shape.vocab_size, shape.hidden_size, scale=0.02),
        lm_head=normal(shape.vocab_size, shape.hidden_size, scale=0.02),
    )


def drafter_config(shape: StepShape) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        rope_theta=1e6,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        target_layer_ids=tuple(range(shape.num_taps)),
        num_target_layers=36,
    )


def our_step(
    shape: StepShape, inputs: StepInputs, precision: str, activation_checkpointing: bool = False
) -> tuple[nn.Module, Callable[[], Tensor], CompiledDrafter]:
    """The trainer's forward on a row that is on the device: mask, drafter, frozen head, weights."""
    device = inputs.features.device
    drafter = Drafter(drafter_config(shape), seed=None).to(device, torch.bfloat16)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    compiled = CompiledDrafter(
        drafter,
        device=device,
        row_tokens=shape.row_tokens,
        num_anchors=shape.num_anchors,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
    )
    lm_head = Fp8Head.quantise(inputs.lm_head) if precision == "fp8" else inputs.lm_head
    documents = np.arange(shape.num_documents, dtype=np.int32).repeat(shape.document_tokens)
    positions = torch.arange(shape.document_tokens, device=device).repeat(shape.num_documents)
    token_ids, loss_mask = inputs.token_ids.cpu().numpy(), np.ones(shape.row_tokens, np.uint8)
    draws = []
    for seed in range(NUM_DRAWS):
        drawn = sample_anchors(loss_mask, documents, shape.num_anchors, np.random.default_rng(seed))
        blocks = make_blocks(token_ids, loss_mask, documents, *drawn, shape.block_size, shape.mask_token_id)
        slots = np.flatnonzero(blocks.label_mask)
        arrays = (blocks.noise_ids, blocks.noise_positions, blocks.start, blocks.anchor, blocks.label_mask, slots)
        tensors = [torch.from_numpy(array).to(device) for array in arrays]
        draws.append((*tensors, torch.from_numpy(blocks.labels.reshape(-1)[slots]).to(device)))
    turn = 0

    def step() -> Tensor:
        nonlocal turn
        noise_ids, noise_positions, start, anchor, label_mask, slots, labels = draws[turn % NUM_DRAWS]
        turn += 1
        noise = inputs.embed_tokens[noise_ids.reshape(-1)]
        hidden = compiled(inputs.features, positions, noise, noise_positions, start, anchor)
        loss = frozen_head_cross_entropy(hidden.detach().index_select(0, slots), lm_head, labels)
        weights = block_weights(label_mask, 7.0).reshape(-1)[slots]
        return weighted_loss(hidden, loss.dhidden, loss.ce, weights, slots) / weights.sum()

    return drafter, step, compiled


def _backward(variant: Variant) -> None:
    torch.autograd.backward(variant.step())


def timed(variant: Variant) -> float:
    """Seconds of one forward and backward on the host, between synchronisations."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    _backward(variant)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    for parameter in variant.module.parameters():
        parameter.grad = None
    return seconds


def measure(variants: list[Variant], rounds: int, shared_bytes: int, ours: dict[str, CompiledDrafter]) -> None:
    """Run every variant once a round, in turn; the first two rounds warm up and the third measures memory."""
    for number in range(rounds + 3):
        for variant in list(variants):
            torch.compiler.set_stance("fail_on_recompile" if variant.name in ours and number else "default")
            try:
                if number == 2:
                    _logits_buffer.cache_clear()  # it stays from step to step, and so would not count as this step's
                resident = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                if variant.name in ours and number == 0:
                    ours[variant.name].warm_up(partial(_backward, variant))
                seconds = timed(variant)
            except Exception as error:  # noqa: BLE001 - a peer that fails is a row of the table, not the end
                variant.note = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                variants.remove(variant)
                for parameter in variant.module.parameters():
                    parameter.grad = None
                print(f"{variant.name}: {variant.note}", flush=True)
                continue
            if number >= 2:
                variant.peak_bytes = max(
                    variant.peak_bytes,
                    torch.cuda.max_memory_allocated() - resident + variant.resident_bytes + shared_bytes,
                )
            if number >= 3:
                variant.seconds.append(seconds)
            elif number == 0:
                print(f"{variant.name}: first step {seconds:.1f} s", flush=True)


def matmul_rate(size: int = 8192, repeats: int = 20) -> float:
    """bf16 FLOP/s of one large product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        a @ b
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / (time.perf_counter() - began)


def mask_milliseconds(row_tokens: int, num_anchors: int, block_size: int, repeats: int = 20) -> float:
    """Median time of one block mask."""
    anchor = torch.randperm(row_tokens - 1)[:num_anchors].sort().values.to("cuda", torch.int32)
    start = (anchor // 2048) * 2048
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        fused_block_mask(start, anchor, row_tokens, block_size)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def run_geometry(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All variants of one geometry; prints the table and returns it."""
    shape = replace(GEOMETRIES[name], num_layers=arguments.layers)
    device = torch.device("cuda")
    inputs = random_inputs(shape, device)
    shared_bytes = sum(t.numel() * t.element_size() for t in vars(inputs).values())
    variants: list[Variant] = []
    ours: dict[str, CompiledDrafter] = {}

    def add(label: str, build: Callable[[], tuple[Any, ...]]) -> None:
        before = torch.cuda.memory_allocated()
        try:
            module, step, *rest = build()
        except Exception as error:  # noqa: BLE001 - as above
            print(f"{label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            return
        variants.append(Variant(label, module, step, torch.cuda.memory_allocated() - before))
        if rest:
            ours[label] = rest[0]

    for precision in arguments.precision or ["bf16"]:
        label = OURS if precision == "bf16" else OURS_FP8
        label += ", activation checkpointing" if arguments.checkpointing else ""
        add(label, partial(our_step, shape, inputs, precision, arguments.checkpointing))
    if "specforge" in arguments.peer:
        add("SpecForge 0.2.0, as shipped", lambda: specforge_step(shape, inputs))
        add("SpecForge 0.2.0, inside torch.compile", lambda: specforge_step(shape, inputs, compiled=True))
    if "speculators" in arguments.peer:
        add("speculators 0.9.0, compiled as shipped", lambda: speculators_step(shape, inputs))
    everything = list(variants)
    rate = matmul_rate()
    measure(variants, arguments.rounds, shared_bytes, ours)
    rate = statistics.median([rate, matmul_rate(), matmul_rate()])
    flops = model_flops(shape)
    rows: list[dict[str, Any]] = []
    for variant in everything:
        if not variant.seconds:
            rows.append({"variant": variant.name, "failed": variant.note})
            continue
        median = statistics.median(variant.seconds)
        rows.append(
            {
                "variant": variant.name,
                "ms": median * 1e3,
                "ms_range": [min(variant.seconds) * 1e3, max(variant.seconds) * 1e3],
                "tflops": flops / median / 1e12,
                "of_matmul": flops / median / rate,
                "peak_gib": variant.peak_bytes / 2**30,
            }
        )
    print(f"\n{name}: {shape.row_tokens:,} context tokens, {shape.num_anchors:,} anchors, block {shape.block_size}, ")
    print(f"{flops / 1e12:.0f} TFLOP of model work; 8192^3 bf16 product {rate / 1e12:.0f} TFLOP/s")
    print("| | ms | TFLOP/s | of the product's rate | peak GiB |\n|---|---|---|---|---|")
    for row in rows:
        if "failed" in row:
            print(f"| {row['variant']} | failed: {row['failed']} | | | |")
        else:
            low, high = row["ms_range"]
            print(
                f"| {row['variant']} | {row['ms']:.1f} ({low:.0f}-{high:.0f}) | {row['tflops']:.0f} | "
                f"{row['of_matmul']:.2f} | {row['peak_gib']:.1f} |"
            )
    for label, compiled in ours.items():
        print(f"{label}: {compiled.summary().split(',')[0]}", flush=True)
    if arguments.profile and everything[0].seconds:
        _profile(everything[0], arguments.profile)
    return {"geometry": name, "shape": asdict(shape), "matmul_tflops": rate / 1e12, "rows": rows}


def _profile(variant: Variant, path: Path) -> None:
    """The kernels of three steps, longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            timed(variant)
    path.write_text(
        profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=100)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, action="append", help="default: qwen3-8b")
    parser.add_argument("--peer", choices=("specforge", "speculators"), action="append", default=[])
    parser.add_argument("--precision", choices=("bf16", "fp8"), action="append", help="ours; default: bf16")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true", help="ours computes activations again")
    parser.add_argument("--mask", action="store_true")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible, and the step is compiled for one; run this where there is a GPU.")
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "geometries": [],
    }
    for name in arguments.geometry or ["qwen3-8b"]:
        results["geometries"].append(run_geometry(name, arguments))
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    if arguments.mask:
        results["mask_ms"] = {
            f"{tokens:,} tokens, {anchors:,} anchors": mask_milliseconds(tokens, anchors, 16)
            for tokens, anchors in ((8192, 1024), (65536, 8192))
        }
        for size, milliseconds in results["mask_ms"].items():
            print(f"block mask, {size}: {milliseconds:.2f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
