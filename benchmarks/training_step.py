"""The whole training step of `dflash train-drafter`, from a store on disk: seconds a step, waiting share, memory.

    python benchmarks/training_step.py --folder /data --json training_step.json
    python benchmarks/training_step.py --folder /data --gpus 0 --gpus 0,1 --rows-per-step 2

A store of random int8 features of a geometry of `drafter_step.py` is written, with 2,048-token samples, and the real command
trains from it: reading, decoding, copying, drafter, loss, gradient norm, clipping, AdamW on fp32 masters, metrics. Steps
after the first ten rows, or the first three, count; the run is killed when it has made them, so no checkpoint is written. Seconds are medians over
steps as metrics.jsonl has them; "waiting" is the share of them that the ranks waited for rows. Compare with the same
geometry's row of drafter_step.py, which has neither data nor optimizer nor fp32 masters: run both in one session.

"First step" is the time from the command to the first step in metrics.jsonl, looked for twice a second: imports, store, target's tables,
weights, compilation, and the step. --again starts the first run once more, in its folder, where its kernels are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dflash_train.benchmarks.drafter_step import GEOMETRIES, model_flops
from dflash_train.benchmarks.peers import StepShape
from dflash_train.stage2_drafter.run_folder import read_metrics
from dflash_train.store.calibration import Calibration
from dflash_train.store.creation import FrozenTarget, create_store
from dflash_train.store.encoding import make_encoding
from dflash_train.store.manifest import Manifest
from dflash_train.store.segment import SegmentWriter

SETTLING_ROWS, SETTLING_STEPS = 10, 3
LIMIT_SECONDS = 300


def make_store(path: Path, shape: StepShape, num_rows: int, seed: int = 0) -> None:
    """A store of num_rows · num_documents samples of random int8 features, token ids and tables."""
    rng = np.random.default_rng(seed)
    encoding = make_encoding("int8", shape.num_taps, shape.hidden_size)
    calibration = Calibration.from_arrays(np.ones(encoding.num_features, np.float32))
    names = ("target_config_hash", "weights_fingerprint", "tokenizer_hash", "chat_template_hash")
    fields: dict[str, Any] = dict.fromkeys(names, "0" * 16)
    fields |= {"target_name": "benchmark", "target_revision": None, "target_dtype": "bfloat16", "quantization": None}
    fields |= {"target_layer_ids": tuple(range(shape.num_taps)), "num_target_layers": 36}
    fields |= {"hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size, "tied_embeddings": False}
    fields |= {"embedding_scale": 1.0, "logit_scale": 1.0, "logit_softcap": None, "encoding": "int8", "rank": None}
    # Random bits with an exponent that makes values of about 0.01 to 0.03, as bfloat16.
    bits = rng.integers(0, 2**16, (shape.vocab_size, shape.hidden_size), dtype=np.uint16)
    table = (bits & 0x80FF) | 0x3C00
    config = {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
    }
    create_store(
        path,
        Manifest(**fields, calibration_hash=calibration.hash),
        calibration,
        FrozenTarget(embed_tokens=table, lm_head=table, dtype_view="bfloat16", config=config),
    )
    pool = rng.integers(-127, 128, (4 * shape.document_tokens, encoding.num_columns), dtype=np.int8)
    scales = np.full((shape.document_tokens, encoding.num_scales), 0.01, np.float32)
    writer = SegmentWriter(path, encoding, {})
    for sample in range(num_rows * shape.num_documents):
        first = int(rng.integers(0, len(pool) - shape.document_tokens))
        writer.append(
            sample_id=sample,
            group=sample,
            token_ids=rng.integers(0, shape.vocab_size - 1, shape.document_tokens, dtype=np.int32),
            loss_mask=np.ones(shape.document_tokens, np.uint8),
            features=pool[first : first + shape.document_tokens],
            scales=scales,
        )
        if writer.num_bytes > 2e9:
            writer.commit()
            writer = SegmentWriter(path, encoding, {})
    writer.commit()


def train(
    store: Path, run: Path, shape: StepShape, gpus: str, arguments: argparse.Namespace, again: bool = False
) -> dict[str, Any]:
    """Run the command until it has made its steps; returns what its metrics say.

    `again`: after an earlier call with the same run, which had no checkpoint to go on from.
    """
    command = [sys.executable, "-m", "dflash_train.cli", "train-drafter", "--store", str(store), "--run", str(run)]
    command += ["--gpus", gpus, "--mask-token", str(shape.mask_token_id), "--row-tokens", str(shape.row_tokens)]
    command += ["--anchors", str(shape.num_anchors), "--rows-per-step", str(arguments.rows_per_step), "--holdout", "0"]
    command += ["--steps", "100000", "--log-every", "10", "--keep", "1", "--allow-busy-gpus", *arguments.option]
    settling = max(SETTLING_STEPS, SETTLING_ROWS // arguments.rows_per_step)
    began = time.monotonic()
    log = run.with_name(f"{run.name}{'-again' * again}.log")
    (run / "metrics.jsonl").unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    steps: list[dict[str, Any]] = []
    first_step = 0.0
    try:
        while len(steps) < settling + arguments.steps:
            if process.poll() is not None or time.monotonic() - began > LIMIT_SECONDS:
                raise SystemExit(f"The run made {len(steps)} steps and ended; its log says:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
            steps = read_metrics(run) if (run / "metrics.jsonl").exists() else []
            first_step = first_step or (time.monotonic() - began if steps else 0.0)
        whole = time.monotonic() - began
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    compiled = [line for line in log.read_text(errors="replace").splitlines() if "compiled" in line]
    found = re.search(r"compiled \d+ graphs? in ([\d.]+) s", compiled[-1]) if compiled else None
    counted = steps[settling:]
    seconds = statistics.median(step["tokens"] / step["tokens_per_second"] for step in counted)
    return {
        "gpus": f"{gpus}, again" if again else gpus,
        "rows_per_step": arguments.rows_per_step,
        "ms_per_step": seconds * 1e3,
        "tflops": model_flops(shape) * arguments.rows_per_step / seconds / 1e12,
        "rows_per_second": arguments.rows_per_step / seconds,
        "wait_share": statistics.median(step["wait_share"] for step in counted),
        "steps": len(counted),
        "seconds_to_first_step": first_step,
        "seconds_to_compile": float(found[1]) if found else None,
        "seconds_in_all": whole,
        "compiled": compiled[-1] if compiled else None,
        "recompilations": steps[-1]["recompilations"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-8b")
    parser.add_argument("--folder", type=Path, help="where store and runs go (default: a temporary folder)")
    parser.add_argument("--gpus", action="append", help="as train-drafter's; several times to compare (default: 0)")
    parser.add_argument("--rows", type=int, default=64, help="rows of the store, 168 MB each for qwen3-8b")
    parser.add_argument("--rows-per-step", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--again", action="store_true", help="start the first run once more at the end")
    parser.add_argument("--option", action="append", default=[], help="passed on, such as --option=--precision=fp8")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shape = GEOMETRIES[arguments.geometry]
    folder = Path(tempfile.mkdtemp(prefix="training-step-", dir=arguments.folder))
    results = []
    try:
        began = time.monotonic()
        make_store(folder / "store.zarr", shape, arguments.rows)
        print(f"{arguments.rows} rows written in {time.monotonic() - began:.0f} s", flush=True)
        print(
            "| GPUs | rows a step | ms a step | rows/s | TFLOP/s of model work | waiting | first step, s | compiling, s | in all, s |"
            "\n|---|---|---|---|---|---|---|---|---|"
        )
        starts = [(number, gpus, False) for number, gpus in enumerate(arguments.gpus or ["0"])]
        for number, gpus, again in [*starts, *((0, starts[0][1], True),) * arguments.again]:
            row = train(folder / "store.zarr", folder / f"run-{number}", shape, gpus, arguments, again)
            results.append(row)
            print(
                f"| {row['gpus']} | {row['rows_per_step']} | {row['ms_per_step']:.1f} | {row['rows_per_second']:.2f} | "
                f"{row['tflops']:.0f} | {row['wait_share']:.1%} | {row['seconds_to_first_step']:.1f} | "
                f"{row['seconds_to_compile'] or 0:.0f} | {row['seconds_in_all']:.0f} |",
                flush=True,
            )
        print("\n".join(f"{row['compiled']}, {row['recompilations']} recompilations" for row in results))
    finally:
        shutil.rmtree(folder)
    if arguments.json:
        arguments.json.write_text(json.dumps({"geometry": arguments.geometry, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
