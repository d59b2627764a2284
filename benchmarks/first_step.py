"""A start of `dflash train-drafter` up to the first row in memory: seconds of each phase, for a store of any size.

    python benchmarks/first_step.py --folder /data --samples 1000000
    python benchmarks/first_step.py --folder /data --samples 1000000 --device cuda

A store of that many samples of 9 tokens on average is written, in segments of 100 and with rows of 128 tokens, so that 14
are packed into a row; what a start does depends on the number of samples and segments alone, and features are tiny. The
phases are the calls that the command makes, in one process: its parent's, then a rank's, with a drafter of the geometry's
size on the device. What follows them in a start is not here: the target's embedding and head, and compilation. A store
that is in the folder already is used again. CPU seconds tell what a busy machine takes away.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dflash_train.benchmarks.drafter_step import GEOMETRIES, drafter_config
from dflash_train.benchmarks.store_io import make_store
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.drafter import Drafter, DrafterConfig
from dflash_train.stage2_drafter.preparation import PreparedRun, prepare_ahead
from dflash_train.stage2_drafter.row_loader import RowBuffer, RowBuilder
from dflash_train.store.encoding import make_encoding
from dflash_train.store.index import INDEX_NAME
from dflash_train.store.segment import SegmentWriter
from dflash_train.store.upload import SpoolFiles

ROW_TOKENS, SEGMENT_SAMPLES, HIDDEN_SIZE = 128, 100, 32
IMPORT = "import dflash_train.stage2_drafter.trainer"
Result = TypeVar("Result")
NO_INDEX = "parent: open the store without its index, check, count the rows"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a start, and how long it took."""

    name: str
    seconds: float
    cpu_seconds: float


def write_store(path: Path, num_samples: int, seed: int = 0) -> None:
    """A store of num_samples samples of a target with two tokens."""
    rng = np.random.default_rng(seed)
    encoding = make_encoding("bf16", 1, HIDDEN_SIZE)
    make_store(path, encoding)
    lengths = np.clip(rng.lognormal(2.0, 0.6, num_samples), 2, ROW_TOKENS).astype(int).tolist()
    groups = rng.integers(-(2**63), 2**63 - 1, num_samples).tolist()
    token_ids, loss_mask = np.zeros(ROW_TOKENS, np.int32), np.ones(ROW_TOKENS, np.uint8)
    features = np.zeros((ROW_TOKENS, encoding.num_columns), encoding.storage_dtype)
    for first in range(0, num_samples, SEGMENT_SAMPLES):
        writer = SegmentWriter(path, encoding, {}, SpoolFiles())
        for sample in range(first, min(first + SEGMENT_SAMPLES, num_samples)):
            length = lengths[sample]
            writer.append(sample, groups[sample], token_ids[:length], loss_mask[:length], features[:length])
        writer.commit()


def make_config(folder: Path, store: Path) -> TrainConfig:
    """Options of a new run over the store; rows are counted for the default number of epochs."""
    fields: dict[str, Any] = {"hidden_size": HIDDEN_SIZE, "intermediate_size": 48, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 2, "block_size": 4}
    fields |= {"mask_token_id": 1, "target_layer_ids": (0,), "num_target_layers": 1}
    path = folder / "drafter.json"
    path.write_text(json.dumps(DrafterConfig(**fields).to_json()))
    return TrainConfig(
        store=store, run=folder / "run", drafter_config=path, row_tokens=ROW_TOKENS, anchors=16, devices="cpu"
    )


def measure(config: TrainConfig, drafter: DrafterConfig, device: torch.device) -> list[Phase]:
    """The phases of a start, in their order."""
    phases: list[Phase] = []

    def timed(name: str, call: Callable[[], Result]) -> Result:
        began, cpu_began = time.perf_counter(), time.process_time()
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        phases.append(
            Phase(name=name, seconds=time.perf_counter() - began, cpu_seconds=time.process_time() - cpu_began)
        )
        return result

    torch.zeros(1, device=device)  # a CUDA context is not what is measured
    (config.store_folder / INDEX_NAME).unlink(missing_ok=True)
    timed(NO_INDEX, lambda: prepare_ahead(config))
    counted = timed("parent: the same with the index", lambda: prepare_ahead(config)).counted()
    run = timed("rank: the same with the parent's count", lambda: prepare_ahead(config, counted))
    timed("rank: first weights", lambda: Drafter(drafter, seed=0, device=device))
    timed("rank: weights left unset, for a checkpoint", lambda: Drafter(drafter, seed=None, device=device))
    timed("rank: first row", lambda: read_first_row(run))
    return phases


def read_first_row(run: PreparedRun) -> None:
    """Plan the first epoch and read its first row."""
    config = run.config
    builder = RowBuilder(
        reader=run.reader,
        row_tokens=config.row_tokens,
        num_anchors=config.anchors,
        block_size=run.drafter_config.block_size,
        mask_token_id=run.drafter_config.mask_token_id,
        seed=config.seed,
        sources=(run.schedule, run.holdout),
    )
    row = builder.build(run.schedule.key(0), RowBuffer.allocate(run.reader, config.row_tokens, pinned=False))
    assert row.num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the store goes, 1.7 GB a million samples")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-8b", help="of the drafter")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    store = arguments.folder / f"first-step-{arguments.samples}.zarr"
    if not store.exists():
        began = time.perf_counter()
        write_store(store, arguments.samples)
        print(f"{arguments.samples:,} samples written in {time.perf_counter() - began:.0f} s", flush=True)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORT], check=True)
    print(f"a process with the trainer imported: {time.perf_counter() - began:.1f} s, twice in a start", flush=True)
    device = torch.device(arguments.device)
    phases = measure(make_config(arguments.folder, store), drafter_config(GEOMETRIES[arguments.geometry]), device)
    print("| phase | s | CPU s |\n|---|---|---|")
    for phase in phases:
        print(f"| {phase.name} | {phase.seconds:.2f} | {phase.cpu_seconds:.2f} |")
    if arguments.json:
        rows = [vars(phase) for phase in phases]
        arguments.json.write_text(json.dumps({"samples": arguments.samples, "phases": rows}, indent=1))


if __name__ == "__main__":
    main()
