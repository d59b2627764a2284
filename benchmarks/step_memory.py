"""Peak device memory of the training step: precision, anchors, activation checkpointing, optimizer; a Markdown table.

    python benchmarks/step_memory.py --json step_memory.json

One row of 8,192 context tokens of a geometry of `drafter_step.py`, random inputs. «Bare step» is what drafter_step.py
times: bf16 weights, forward, backward, no optimizer. The training step is what `train-drafter` holds on a GPU: fp32
masters and gradients, moments of AdamW or Muon, gradient norm, clipping and the update; its rows from disk take 0.2 GB
more. Everything the process has allocated counts, the features, frozen embedding and head with it; CUDA's own context
(0.5 GB) and what the allocator keeps in reserve do not. Nothing is timed, so four processes share the GPU, each with a
quarter of the variants, and compile at the same time; together they stay below 120 GB for qwen3-8b (`--processes`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflash_train.benchmarks.drafter_step import GEOMETRIES, our_step, random_inputs
from dflash_train.benchmarks.peers import StepShape
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.loss import _logits_buffer
from dflash_train.stage2_drafter.optimizer import gradient_norm, make_optimizer, scale_and_clip

NUM_STEPS = 3
"""The moments are there from the first step on; the others show that nothing grows."""


@dataclass(frozen=True)
class Variant:
    """A graph to compile, and what runs it."""

    anchors: int
    precision: str
    checkpointing: bool
    with_masters: bool
    """Whether weights are fp32 and an optimizer updates them: both optimizers are measured then."""


def all_variants(anchors: Sequence[int]) -> list[Variant]:
    """In this order each of four processes gets one number of anchors, with masters or without."""
    return [
        Variant(number, precision, checkpointing, with_masters)
        for precision in ("bf16", "fp8")
        for checkpointing in (False, True)
        for number in anchors
        for with_masters in (False, True)
    ]


def measure(shape: StepShape, variant: Variant) -> dict[str, float]:
    """Peak bytes by column: «bare», or «adamw» and «muon»."""
    device = torch.device("cuda")
    torch._dynamo.reset()
    inputs = random_inputs(shape, device)
    drafter, step, compiled = our_step(shape, inputs, variant.precision, variant.checkpointing)
    if variant.with_masters:
        drafter.float()
    parameters = list(drafter.parameters())
    # the trainer lets go of the head in bf16 once it has it in e4m3
    unused = inputs.lm_head.nbytes if variant.precision == "fp8" else 0
    peaks: dict[str, float] = {}
    compiled.warm_up(lambda: torch.autograd.backward(step()))
    for name in ("adamw", "muon") if variant.with_masters else ("bare",):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        optimizer = None
        if variant.with_masters:
            config = TrainConfig(store=Path("store"), run=Path("run"), optimizer=name)
            optimizer = make_optimizer(compiled.drafter.named_parameters(), config)
        for _ in range(NUM_STEPS):
            torch.autograd.backward(step())
            if optimizer is not None:
                scale_and_clip(parameters, float(gradient_norm(parameters)), 1.0, 1.0)
                optimizer.step()
            for parameter in parameters:
                parameter.grad = None
        torch.cuda.synchronize()
        peaks[name] = float(torch.cuda.max_memory_allocated() - unused)
        del optimizer
    compiled.close()
    return peaks


def run_share(geometry: str, layers: int, variants: Sequence[Variant]) -> None:
    """Body of a process: one JSON line a variant."""
    for variant in variants:
        began = time.monotonic()
        shape = replace(GEOMETRIES[geometry], num_layers=layers, num_anchors=variant.anchors)
        try:
            result: dict[str, Any] = {"peaks": measure(shape, variant)}
        except Exception as error:  # noqa: BLE001 - a variant that fails is a gap in the table, not its end
            result = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        gc.collect()
        _logits_buffer.cache_clear()
        torch.cuda.empty_cache()
        result |= {**asdict(variant), "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(result), flush=True)


def run_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All variants over several processes."""
    variants = all_variants(arguments.anchors)
    shares = [variants[first :: arguments.processes] for first in range(arguments.processes)]

    def run(share: list[Variant]) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "dflash_train.benchmarks.step_memory", "--geometry", arguments.geometry]
        command += ["--layers", str(arguments.layers), "--share", json.dumps([asdict(variant) for variant in share])]
        threads = str(max(1, len(os.sched_getaffinity(0)) // arguments.processes))
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": threads}
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
        lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        for variant in share[len(lines) :]:
            lines.append({"failed": f"its process ended with {ended.returncode}", **asdict(variant)})
        return lines

    with ThreadPoolExecutor(len(shares)) as pool:
        return [line for lines in pool.map(run, filter(None, shares)) for line in lines]


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Peaks in GiB, one row for each precision, number of anchors and whether layers are checkpointed."""
    rows: dict[tuple[str, int, bool], dict[str, str]] = {}
    for line in lines:
        row = rows.setdefault((line["precision"], -line["anchors"], line["checkpointing"]), {})
        columns = ("adamw", "muon") if line["with_masters"] else ("bare",)
        row.update({name: f"{line['peaks'][name] / 2**30:.1f}" if "peaks" in line else "failed" for name in columns})
    text = "| precision | anchors | activation checkpointing | bare step, GiB | training step, AdamW | training step, Muon |\n"
    text += "|---|---|---|---|---|---|\n"
    for (precision, anchors, checkpointing), row in sorted(rows.items()):
        values = " | ".join(row.get(name, "") for name in ("bare", "adamw", "muon"))
        text += f"| {precision} | {-anchors:,} | {'yes' if checkpointing else 'no'} | {values} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--anchors", type=int, action="append", help="several times; default: 1024 and 512")
    parser.add_argument("--processes", type=int, default=4, help="fewer where the GPU has less memory")
    parser.add_argument("--share", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.share is not None:
        run_share(arguments.geometry, arguments.layers, [Variant(**values) for values in arguments.share])
        return
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible, and the step is compiled for one; run this where there is a GPU.")
    arguments.anchors = arguments.anchors or [1024, 512]
    began = time.monotonic()
    lines = run_all(arguments)
    print(f"{arguments.geometry}, {arguments.layers} layers, one row, on {torch.cuda.get_device_name()}, ", end="")
    print(f"torch {torch.__version__}; peak of what is allocated\n\n{table(lines)}")
    for line in lines:
        if "failed" in line:
            print(f"{line['precision']}, {line['anchors']} anchors: {line['failed']}")
    print(f"{time.monotonic() - began:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
