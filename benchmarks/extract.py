"""`dflash extract` against bare forwards of the same batches: tokens per second, and what limits.

    python benchmarks/extract.py --geometry qwen3-8b --json extract.json

Makes a target of a named geometry with random weights in --ram, and samples of random tokens with the lengths that
conversations of ShareGPT have (random_target.py: nothing is downloaded). Then, on the same batches:

- in one process: the forward with a padding mask and output_hidden_states (all layers, final norm, no head), the forward
  that stops after the last tap, and the same compiled;
- the command itself, in each encoding, to --ram and to --folder: schedule, forward, encoding, copy, write, commit.

All rates count real tokens, not padding. A command's rate is that of its worker from its second batch to its last, as
its log has it: without imports, loading, calibration and compilation, which «whole» includes; «with last commit» adds the
time from the last batch to the end of the last commit. There are as many samples as the bare forward runs in --seconds;
a command on several GPUs gets three times as many each. The default keeps what is measured of each variant on one GPU
within 20 s, and the last bar says whether it did; two GPUs take twice --seconds, so give 8: 16 s measured. Stores are
deleted after each variant. The whole table takes ten minutes on an H200; what has not begun within --budget seconds is
left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.benchmarks.random_target import (
    FIRST_PLAIN_TOKEN,
    GEOMETRIES,
    NUM_TOKENS,
    draw_chat_lengths,
    make_samples,
    make_target,
)
from dflash_train.stage1_target.overlap import parse_overlap
from dflash_train.stage1_target.schedule import Batch, padding_share, plan_batches

NUM_TAPS = 5
ENCODINGS = ("int8", "bf16", "projected-int8")
LABELS = {"projected-int8": "projected-int8, r = H"}  # --rank auto
PADDED, BARE, COMPILED = "forward, mask and output_hidden_states", "forward to the last tap", "the same, compiled"
INT8_RAM = "dflash extract int8, RAM disk"
MOST_SECONDS = 20
"""No variant is to be measured for longer."""


def lengths_of(num_tokens: int, longest: int, seed: int) -> NDArray[np.int64]:
    """Lengths of chat conversations, at most `longest`, that sum up to at least num_tokens."""
    lengths = draw_chat_lengths(num_tokens // 30 + 8, seed, longest)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]


def measure_forwards(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make and save the target; rates of the three forwards over the same batches, in real tokens per second."""
    import torch

    from dflash_train.stage1_target.compiled_target import compile_layers
    from dflash_train.stage1_target.forward import pad_right
    from dflash_train.stage1_target.target import load_target
    from dflash_train.stage1_target.target_config import TargetConfig, default_target_layer_ids

    began = time.perf_counter()
    name = str(make_target(folder / "target", given.geometry, given.device))
    made = time.perf_counter() - began
    layer_ids = default_target_layer_ids(GEOMETRIES[given.geometry]["num_hidden_layers"], NUM_TAPS)
    target = load_target(TargetConfig(name=name), layer_ids, given.device)
    model, device = target.model, torch.device(given.device)
    rng = np.random.default_rng(given.seed)

    def prepare(num_tokens: int) -> tuple[list[Batch], list[Any], list[Any]]:
        lengths = lengths_of(num_tokens, given.max_tokens, given.seed)
        batches = plan_batches(lengths, np.arange(len(lengths)), given.batch_tokens, given.seed)
        drawn = [lengths[list(batch.indices)] for batch in batches]
        inputs = [
            pad_right([rng.integers(FIRST_PLAIN_TOKEN, NUM_TOKENS, size, dtype=np.int32) for size in sizes])
            for sizes in drawn
        ]
        masks = [
            torch.arange(ids.shape[1])[None, :] < torch.from_numpy(sizes)[:, None]
            for ids, sizes in zip(inputs, drawn, strict=True)
        ]
        return batches, [ids.to(device) for ids in inputs], [mask.to(device) for mask in masks]

    def padded(token_ids: Any, mask: Any) -> None:
        with torch.no_grad():
            states = model.model(
                input_ids=token_ids, attention_mask=mask, output_hidden_states=True, use_cache=False
            ).hidden_states
        assert len(states) == len(model.model.layers) + 1

    def bare(token_ids: Any, _mask: Any) -> None:
        target.run_taps(token_ids, lambda _layer, _states: None)

    few = prepare(200_000 if given.device == "cuda" else 2_000)
    num_tokens = int(rate(bare, *few, given.device) * given.seconds)
    batches, inputs, masks = prepare(num_tokens)
    result: dict[str, Any] = {
        "seconds_to_make_target": round(made, 1),
        "num_tokens": num_tokens,
        "num_batches": len(batches),
        "padding": round(padding_share(batches), 4),
        "padding_of_full_windows": round(full_windows_padding(given), 4),
        BARE: rate(bare, batches, inputs, masks, given.device),
    }
    if given.compile:
        began = time.perf_counter()
        result["graphs"] = compile_layers(target, given.batch_tokens, given.max_tokens)
        result["seconds_to_compile"] = round(time.perf_counter() - began, 1)
        if result["graphs"]:
            result[COMPILED] = rate(bare, batches, inputs, masks, given.device)
            torch.compiler.set_stance("default")
        for layer in target.layers:
            vars(layer).pop("forward", None)
    # Last: output_hidden_states leaves wrappers on the layers that torch's compiler does not trace (transformers 5.17).
    result[PADDED] = rate(padded, batches, inputs, masks, given.device)
    return result


def full_windows_padding(given: argparse.Namespace) -> float:
    """Padding of the same lengths where there are many: a few hundred samples cannot be sorted into even batches."""
    lengths = lengths_of(10_000_000, given.max_tokens, given.seed)
    return padding_share(plan_batches(lengths, np.arange(len(lengths)), given.batch_tokens, given.seed))


def rate(
    run: Callable[[Any, Any], None], batches: Sequence[Batch], inputs: list[Any], masks: list[Any], device: str
) -> float:
    """Real tokens per second over all batches, after two of them to warm up."""
    import torch

    synchronise: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for token_ids, mask in list(zip(inputs, masks, strict=True))[:2]:
        run(token_ids, mask)
    synchronise()
    began = time.perf_counter()
    for token_ids, mask in zip(inputs, masks, strict=True):
        run(token_ids, mask)
    synchronise()
    return round(sum(batch.num_tokens for batch in batches) / (time.perf_counter() - began))


def run_extract(
    given: argparse.Namespace,
    work: Path,
    samples: Path,
    encoding: str,
    store: Path,
    calibration: Path | None,
    gpus: str = "0",
    gpus_per_target: int = 1,
) -> dict[str, Any]:
    """Run the command and read its workers' logs; of several, rates are added and the rest is the first one's."""
    logs = work / f"logs-{store.name}-{gpus}-{gpus_per_target}"
    devices = gpus if given.device == "cuda" else f"cpu:{len(gpus.split(','))}"
    command = [
        *(sys.executable, "-m", "dflash_train.cli", "extract", "--target", str(work / "target")),
        *("--data", str(samples), "--sample-cache", str(work / "samples"), "--store", str(store)),
        *("--encoding", encoding, "--gpus", devices, "--log-folder", str(logs)),
        *("--batch-tokens", str(given.batch_tokens), "--max-tokens", str(given.max_tokens), "--seed", str(given.seed)),
        *("--calibration-tokens", str(given.calibration_tokens), "--allow-busy-gpus"),
        *("--compile-target",) * given.compile,
        *("--gpus-per-target", str(gpus_per_target)) * (gpus_per_target > 1),
    ]
    if calibration is not None:
        command += ["--calibration-from", str(calibration)]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    whole = time.perf_counter() - began
    texts = [path.read_text() for path in sorted(logs.rglob("*.log"))]
    log = "\n".join(texts)
    workers = [found for found in map(parse_overlap, texts) if found is not None]
    if done.returncode or len(workers) != len(gpus.split(",")) // gpus_per_target:
        tail = "\n".join([*done.stdout.splitlines()[-5:], *done.stderr.splitlines()[-15:], *log.splitlines()[-15:]])
        return {"failed": tail}
    rates = ("tokens", "tokens_per_second", "tokens_per_second_with_last_commit", "written_gb")
    overlap = workers[0] | {key: sum(worker[key] for worker in workers) for key in rates}
    lines = [line for line in log.splitlines() if "INFO" in line]
    return {**overlap, "whole_seconds": round(whole, 1), "workers": workers, "lines": lines}


def show(result: dict[str, Any]) -> None:
    """Print the tables in Markdown."""
    forwards, extracts = result["forwards"], result["extracts"]
    best = max(value for name, value in forwards.items() if name in (BARE, COMPILED))
    print(
        "\n| variant | tokens/s | to the padded forward | to the best bare one | with last commit | padding | measured, s | whole, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in (PADDED, BARE, COMPILED):
        if name in forwards:
            value, seconds = forwards[name], forwards["num_tokens"] / forwards[name]
            print(
                f"| {name} | {value:,} | {value / forwards[PADDED]:.2f} | {value / best:.2f} | | {forwards['padding']:.1%} "
                f"| {seconds:.1f} | |"
            )
    for name, found in extracts.items():
        if "tokens_per_second" in found:
            value = found["tokens_per_second"]
            ratios = f"{value / forwards[PADDED]:.2f} | {value / best:.2f}"
            print(
                f"| {name} | {value:,} | {ratios} | {found['tokens_per_second_with_last_commit']:,} | {found['padding']:.1%} "
                f"| {found['seconds']:.1f} | {found['whole_seconds']:.0f} |"
            )
        else:
            print(f"| {name} | {found.get('skipped') or 'failed'} | | | | | | |")
    print(f"\nPadding of 10 million tokens of such lengths: {forwards['padding_of_full_windows']:.1%}.")
    if "graphs" in forwards:
        print(f"Graphs of the compiled target: {forwards['graphs']}, made in {forwards['seconds_to_compile']:.0f} s.")
    print("\n| what the time went to | GPU busy | main thread waits for GPU | for writers | for batches ", end="")
    print(
        "| writers busy | GB/s while writing | in commits, s | host buffers, GB | peak host memory, GB "
        "| peak GPU memory, GB | limit |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for name, found in extracts.items():
        if "tokens_per_second" in found:
            shares = " | ".join(
                f"{found[key]:.0%}" for key in ("gpu_busy", "waited_for_gpu", "waited_for_writers", "waited_for_parent")
            )
            writers = ", ".join(f"{share:.0%}" for share in found["writers_busy"])
            print(
                f"| {name} | {shares} | {writers} | {found['written_gb_per_second']:.2f} | {found['commit_seconds']:.1f} "
                f"| {found['host_buffers_gb']:.2f} | {found['peak_host_gb']:.1f} | {found['peak_gpu_gb']:.1f} | {found['limit']} |"
            )
    bars: list[tuple[str, float, str, float]] = []
    if "tokens_per_second" in extracts.get(INT8_RAM, {}):
        value = extracts[INT8_RAM]["tokens_per_second"]
        bars += [
            ("extract int8 / padded forward", value / forwards[PADDED], ">=", 1.25),
            ("extract int8 / best bare forward", value / best, ">=", 0.93),
        ]
        for name, several in extracts.items():
            if "GPUs" in name and "tokens_per_second" in several:
                number = len(several["workers"])
                bars.append((f"{number} GPUs / one", several["tokens_per_second"] / value, ">=", 0.95 * number))
    windows = [forwards["num_tokens"] / forwards[name] for name in (PADDED, BARE, COMPILED) if name in forwards]
    windows += [found["seconds"] for found in extracts.values() if "seconds" in found]
    bars.append(("longest variant, s measured", max(windows), "<=", MOST_SECONDS))
    print("\n| bar | found | wanted | |\n|---|---|---|---|")
    for text, reached, sign, wanted in bars:
        met = reached >= wanted if sign == ">=" else reached <= wanted
        print(f"| {text} | {reached:.2f} | {sign} {wanted:g} | {'met' if met else 'missed'} |")
    for name, found in extracts.items():
        if "failed" in found:
            print(f"\n{name} failed:\n{found['failed']}")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release(), "cpus": str(os.cpu_count())}
    for package in ("torch", "triton", "transformers", "accelerate", "zarr", "google-crc32c"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def target_bytes(geometry: str) -> float:
    """About the size of a target's weights in bfloat16."""
    shape = GEOMETRIES[geometry]
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] + shape["num_key_value_heads"]
    layer = hidden * (2 * heads * shape["head_dim"] + 3 * shape["intermediate_size"])
    return float(2 * (2 * shape["vocab_size"] * hidden + shape["num_hidden_layers"] * layer))


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def measure(given: argparse.Namespace, work: Path, ram: Path) -> dict[str, Any]:
    """All variants; `work` holds target, samples and logs, `ram` the stores on the RAM disk."""
    began = time.perf_counter()
    result: dict[str, Any] = {
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()},
        "versions": versions(),
    }
    child = [sys.executable, __file__, "--forwards", str(work), *sys.argv[1:]]
    subprocess.run(child, check=True)
    forwards = result["forwards"] = json.loads((work / "forwards.json").read_text())
    print(json.dumps(forwards), flush=True)
    lengths = lengths_of(forwards["num_tokens"], given.max_tokens, given.seed)
    samples = work / "samples.parquet"
    make_samples(samples, lengths, given.seed)
    result["samples"], result["tokens"] = len(lengths), int(lengths.sum())
    extracts: dict[str, Any] = {}
    result["extracts"] = extracts
    states = NUM_TAPS * GEOMETRIES[given.geometry]["hidden_size"]
    calibration: Path | None = None
    places = [("RAM disk", ram), ("disk", given.folder)]
    variants = [(encoding, place, folder, "0", 1) for encoding in ENCODINGS for place, folder in places]
    if given.spread:
        variants.insert(1, ("int8", *places[0], given.spread, len(given.spread.split(","))))
    if given.more_gpus:
        variants.insert(1, ("int8", *places[0], given.more_gpus, 1))
        # Workers do not begin at the same moment: with three times the samples each, most of their time is common.
        num_tokens = 3 * len(given.more_gpus.split(",")) * forwards["num_tokens"]
        more_lengths = lengths_of(num_tokens, given.max_tokens, given.seed)
        many = work / "more-samples.parquet"
        make_samples(many, more_lengths, given.seed)
    for encoding, place, folder, gpus, gpus_per_target in variants:
        name = f"dflash extract {LABELS.get(encoding, encoding)}, {place}"
        if gpus_per_target > 1:
            name += f", one target over {gpus}"
        elif gpus != "0":
            name += f", GPUs {gpus}"
        if given.only and not any(part in name for part in given.only):
            continue
        takes_more = gpus != "0" and gpus_per_target == 1
        data, num_tokens = (many, int(more_lengths.sum())) if takes_more else (samples, int(lengths.sum()))
        needed = num_tokens * states * {"bf16": 2, "int8": 1}.get(encoding, 0.25) + 4e9 * (states > 1e4)
        if time.perf_counter() - began > given.budget:
            extracts[name] = {"skipped": "left out: the time is up"}
            continue
        if free_bytes(folder) < needed:
            extracts[name] = {"skipped": f"left out: {folder} has {free_bytes(folder) / 1e9:.1f} GB free"}
            continue
        store = folder / f"extract-benchmark-{os.getpid()}-{encoding}-{place.split()[0].lower()}.zarr"
        try:
            extracts[name] = run_extract(
                given,
                work,
                data,
                encoding,
                store,
                calibration if "projected" in encoding else None,
                gpus,
                gpus_per_target,
            )
        finally:
            keep = "projected" in encoding and place == "RAM disk" and store.is_dir()  # the projection takes longest
            shutil.rmtree(store / "segments" if keep else store, ignore_errors=True)
            calibration = store if keep else calibration
            for left in folder.glob(f"{store.name}.*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        print(
            name,
            json.dumps({key: value for key, value in extracts[name].items() if key not in ("lines", "workers")}),
            flush=True,
        )
    result["seconds"] = round(time.perf_counter() - began, 1)
    return result


def main() -> None:
    """Measure, print the tables, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="qwen3-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="A RAM disk, for target and stores.")
    parser.add_argument("--folder", type=Path, default=Path(), help="A folder on the disk that is measured.")
    parser.add_argument("--seconds", type=float, default=10.0, help="Of the bare forward: how many samples there are.")
    parser.add_argument("--budget", type=float, default=800.0, help="No variant begins after so many seconds.")
    parser.add_argument("--more-gpus", help="The int8 command to the RAM disk on these GPUs, too, such as 0,1.")
    parser.add_argument("--spread", help="The same with one target over these GPUs (--gpus-per-target), such as 0,1.")
    parser.add_argument(
        "--only",
        action="append",
        help="Only commands whose name contains this: extract int8, RAM disk, …; again for more.",
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="Compile the target.")
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--calibration-tokens", type=int, default=16_384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="Write everything here, too.")
    parser.add_argument("--forwards", type=Path, help=argparse.SUPPRESS)  # the process that measures bare forwards
    given = parser.parse_args()
    if given.forwards is not None:
        (given.forwards / "forwards.json").write_text(json.dumps(measure_forwards(given, given.forwards)))
        return
    given.folder = given.folder.resolve()
    home = given.ram if free_bytes(given.ram) > 1.1 * target_bytes(given.geometry) + 1e9 else given.folder
    free = [f"{free_bytes(folder) / 1e9:.0f} GB" for folder in (given.ram, given.folder)]
    print(f"target in {home}; free: RAM disk {free[0]}, disk {free[1]}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="extract-benchmark-", dir=home) as work,
        tempfile.TemporaryDirectory(prefix="extract-benchmark-", dir=given.ram) as ram,
    ):
        result = measure(given, Path(work), Path(ram))
    print(
        f"{result['samples']:,} samples, {result['tokens']:,} tokens, {result['seconds']:.0f} s; {result['versions']}"
    )
    show(result)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
