"""The store against raw files and against what peers do: reading packed rows, writing a segment, opening many segments.

    python benchmarks/store_io.py --json store_io.json

All variants move the same bytes and are interleaved round by round in random order, each right beside a pass of its raw
twin (before it in even rounds, behind it in odd ones); a ratio is the median over the rounds of the twin's seconds over
the variant's, so what else the machine does cancels to first order. "hot" is the page cache; "cold" drops the files
from it (posix_fadvise, no root needed) before each pass, and is skipped where the file system keeps them, as tmpfs
does. A cold read that is not counted goes before each that is: a virtual machine gives free pages back, and taking
them anew costs up to four times the CPU time of a cold read, whichever variant it falls upon. Memory is the peak of the
process above its start, mapped file pages included; CPU is of all threads, kernel time included. zarrs, safetensors
and torch are measured where they are installed, zarr's fused pipeline where zarr has it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.calibration import Calibration
from dflash_train.store.creation import FrozenTarget, create_store
from dflash_train.store.encoding import Encoding, make_encoding
from dflash_train.store.index import INDEX_NAME
from dflash_train.store.manifest import Manifest
from dflash_train.store.opened import list_segments
from dflash_train.store.reader import StoreReader
from dflash_train.store.segment import SEGMENTS, SegmentWriter

PIPELINES = {
    "zarr-python, default": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    "zarr-python, fused": "zarr.core.codec_pipeline.FusedCodecPipeline",
    "zarrs": "zarrs.ZarrsCodecPipeline",
}
RAW, RAW_DIRECT, OURS, OURS_VERIFIED = "raw preadv", "raw preadv, O_DIRECT", "store", "store, every crc32c verified"
OURS_DIRECT, OURS_DIRECT_VERIFIED = "store, --direct-io", "store, --direct-io, verified"
RAW_WRITE, OURS_WRITE = "raw write + fsync", "store, segment with commit"
SAFETENSORS, TORCH = "safetensors, a file per sample", "torch.save, a file per sample"


@dataclass
class Variant:
    """One way to move the bytes; `twin` is the name of what its ratio is taken to."""

    name: str
    twin: str
    run: Callable[[], None]
    files: list[Path] = field(default_factory=list)
    """What to drop from the page cache before a cold pass."""


@dataclass
class Pass:
    """One timed run."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


class Data:
    """Samples of random bytes: features [tokens, F] of one buffer, cut by seeded lengths with a mean of 1,000 tokens."""

    def __init__(self, encoding: Encoding, num_bytes: int, row_tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.encoding = encoding
        self.row_bytes = encoding.num_columns * encoding.storage_dtype.itemsize
        lengths: list[int] = []
        while sum(lengths) * self.row_bytes < num_bytes:
            lengths.append(int(np.clip(rng.lognormal(6.7, 0.7), 32, row_tokens)))
        self.lengths, self.starts = lengths, np.concatenate([[0], np.cumsum(lengths)]).tolist()
        shape = (sum(lengths), encoding.num_columns)
        random = np.frombuffer(bytearray(rng.bytes(shape[0] * self.row_bytes)), encoding.storage_dtype)
        self.features = random.reshape(shape)
        self.token_ids = rng.integers(0, 100, shape[0], dtype=np.int32)
        self.loss_mask = rng.integers(0, 2, shape[0], dtype=np.uint8)
        self.scales = rng.random((shape[0], encoding.num_scales), dtype=np.float32) if encoding.num_scales else None
        self.places = self._pack(rng.permutation(len(lengths)).tolist(), row_tokens)
        buffer = np.frombuffer(mmap.mmap(-1, row_tokens * self.row_bytes), encoding.storage_dtype)
        self.row = buffer.reshape(row_tokens, -1)  # page aligned, as pinned memory is
        self.row[:] = 1
        self.row_ids, self.row_mask = np.ones(row_tokens, np.int32), np.ones(row_tokens, np.uint8)
        self.row_scales = np.ones((row_tokens, encoding.num_scales), np.float32) if encoding.num_scales else None

    def _pack(self, order: Sequence[int], row_tokens: int) -> list[tuple[int, int]]:
        places, first = [], 0
        for sample in order:
            first = 0 if first + self.lengths[sample] > row_tokens else first
            places.append((sample, first))
            first += self.lengths[sample]
        return places

    def rows(self, sample: int) -> slice:
        return slice(self.starts[sample], self.starts[sample] + self.lengths[sample])

    def arguments(self, sample: int) -> dict[str, Any]:
        rows = self.rows(sample)
        return {
            "sample_id": sample,
            "group": sample,
            "token_ids": self.token_ids[rows],
            "loss_mask": self.loss_mask[rows],
            "features": self.features[rows],
            "scales": None if self.scales is None else self.scales[rows],
        }

    def peer_arrays(self, sample: int) -> dict[str, NDArray[Any]]:
        """What a file per sample holds; int16 bits, which every tensor library can view."""
        rows = self.rows(sample)
        arrays = {"features": self.features[rows], "token_ids": self.token_ids[rows], "loss_mask": self.loss_mask[rows]}
        arrays["features"] = arrays["features"].view(f"i{self.encoding.storage_dtype.itemsize}")
        return arrays if self.scales is None else arrays | {"scales": self.scales[rows]}


def make_store(path: Path, encoding: Encoding) -> Path:
    """An empty store of a target that does not exist."""
    calibration = Calibration.from_arrays(np.ones(encoding.num_features, np.float32))
    names = ("target_config_hash", "weights_fingerprint", "tokenizer_hash", "chat_template_hash")
    fields: dict[str, Any] = dict.fromkeys(names, "0" * 16)
    fields |= {"target_name": "benchmark", "target_revision": None, "target_dtype": "bfloat16", "quantization": None}
    fields |= {"target_layer_ids": tuple(range(encoding.num_layers)), "num_target_layers": encoding.num_layers}
    fields |= {"hidden_size": encoding.hidden_size, "vocab_size": 2, "tied_embeddings": True, "embedding_scale": 1.0}
    fields |= {"logit_scale": 1.0, "logit_softcap": None, "encoding": encoding.name, "rank": None}
    manifest = Manifest(**fields, calibration_hash=calibration.hash)
    table = np.zeros((2, encoding.hidden_size), np.float32)
    create_store(
        path, manifest, calibration, FrozenTarget(embed_tokens=table, lm_head=None, dtype_view=None, config={})
    )
    return path


def write_segment(store: Path, data: Data, samples: Sequence[int]) -> None:
    writer = SegmentWriter(store, data.encoding, {})
    for sample in samples:
        writer.append(**data.arguments(sample))
    writer.commit()


def has(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def pipelines() -> dict[str, str]:
    """The zarr codec pipelines that are installed here."""
    found = {}
    for name, path in PIPELINES.items():
        module, _, attribute = path.rpartition(".")
        if has(module) and hasattr(import_module(module), attribute):
            found[name] = path
    return found


def save_samples(folder: Path, data: Data, kind: str) -> list[Path]:
    """Write one file per sample as peers do; return the paths."""
    folder.mkdir()
    paths = []
    for sample in range(len(data.lengths)):
        paths.append(folder / f"{sample}.{kind}")
        if kind == "safetensors":
            from safetensors.numpy import save_file

            save_file(data.peer_arrays(sample), paths[-1])
        else:
            import torch

            torch.save({name: torch.from_numpy(array) for name, array in data.peer_arrays(sample).items()}, paths[-1])
    return paths


def sync(paths: Sequence[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def read_variants(folder: Path, data: Data) -> list[Variant]:
    """Write the data in every form and return the ways to read it into packed rows."""
    raw = folder / "raw.bin"
    raw.write_bytes(data.features.data.cast("B"))
    store = make_store(folder / "read.zarr", data.encoding)
    for part in np.array_split(np.arange(len(data.lengths)), 4):
        write_segment(store, data, part.tolist())
    files = [path for path in (store / SEGMENTS).rglob("*") if path.is_file()]
    variants = [Variant(RAW, RAW, lambda: read_raw(raw, data, 0), [raw])]
    direct = getattr(os, "O_DIRECT", 0)
    with suppress(OSError):
        read_raw(raw, data, direct)
        variants.append(Variant(RAW_DIRECT, RAW_DIRECT, lambda: read_raw(raw, data, direct), [raw]))
    direct_twin = variants[-1].name
    for name, verify, direct_io in (
        (OURS, False, False),
        (OURS_VERIFIED, True, False),
        (OURS_DIRECT, False, True),
        (OURS_DIRECT_VERIFIED, True, True),
    ):
        reader = StoreReader(store, verify=verify, direct_io=direct_io)
        twin = direct_twin if direct_io else RAW
        variants.append(Variant(name, twin, lambda reader=reader: read_store(reader, data), files))  # type: ignore[misc]
    for name, path in pipelines().items():
        variants.append(Variant(name, RAW, lambda path=path: read_zarr(store, data, path), files))  # type: ignore[misc]
    if has("safetensors"):
        safetensors = save_samples(folder / "safetensors", data, "safetensors")
        variants.append(Variant(SAFETENSORS, RAW, lambda: read_safetensors(safetensors, data), safetensors))
    if has("torch"):
        saved = save_samples(folder / "torch", data, "pt")
        variants.append(Variant(TORCH, RAW, lambda: read_torch(saved, data), saved))
    for variant in variants:
        sync(variant.files)
        data.row[:] = 0
        variant.run()
        sample, first = data.places[-1]
        same = np.array_equal(data.row[first : first + data.lengths[sample]], data.features[data.rows(sample)])
        assert same, f"{variant.name} reads other values"
    return variants


def read_raw(path: Path, data: Data, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        for sample, first in data.places:
            place = data.row[first : first + data.lengths[sample]].data.cast("B")
            offset = data.starts[sample] * data.row_bytes
            while len(place):
                num_read = os.preadv(descriptor, [place], offset)
                place, offset = place[num_read:], offset + num_read
    finally:
        os.close(descriptor)


def read_store(reader: StoreReader, data: Data) -> None:
    for sample, first in data.places:
        rows = slice(first, first + data.lengths[sample])
        scales = None if data.row_scales is None else data.row_scales[rows]
        reader.read_into(sample, data.row_ids[rows], data.row_mask[rows], data.row[rows], scales)


def read_zarr(store: Path, data: Data, pipeline: str) -> None:
    import zarr

    with zarr.config.set({"codec_pipeline.path": pipeline}):
        segments = [zarr.open_array(store / SEGMENTS / name / "features", mode="r") for name in list_segments(store)]
        table = StoreReader(store).samples
        for sample, first in data.places:
            entry = table[sample]
            start = int(entry["first_row"])
            data.row[first : first + data.lengths[sample]] = segments[entry["segment"]][
                start : start + data.lengths[sample]
            ]


def read_safetensors(paths: list[Path], data: Data) -> None:
    from safetensors import safe_open

    for sample, first in data.places:
        with safe_open(paths[sample], framework="numpy") as file:
            data.row.view(f"i{data.row.itemsize}")[first : first + data.lengths[sample]] = file.get_tensor("features")


def read_torch(paths: list[Path], data: Data) -> None:
    import torch

    for sample, first in data.places:
        features = torch.load(paths[sample], weights_only=True)["features"].numpy()
        data.row.view(f"i{data.row.itemsize}")[first : first + data.lengths[sample]] = features


def write_variants(folder: Path, data: Data) -> list[Variant]:
    """Ways to write all samples durably, each into `folder / "new"`, which `run` finds missing."""
    new = folder / "new"

    def raw() -> None:
        with new.open("wb", buffering=0) as file:
            for sample in range(len(data.lengths)):
                rest = data.features[data.rows(sample)].data.cast("B")
                while len(rest):
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    store = make_store(folder / "write.zarr", data.encoding)

    def ours() -> None:
        write_segment(store, data, range(len(data.lengths)))

    def peers(kind: str) -> Callable[[], None]:
        return lambda: sync(save_samples(new, data, kind))

    def generic(pipeline: str) -> Callable[[], None]:
        def run() -> None:
            import zarr

            rows = -(-len(data.features) // 32) * 32
            shape, chunk = data.features.shape, (32, data.features.shape[1])
            with zarr.config.set({"codec_pipeline.path": pipeline}):
                array = zarr.create_array(
                    new, shape=shape, dtype=data.features.dtype, chunks=chunk, shards=(rows, shape[1]), compressors=None
                )
                array[:] = data.features
            sync([path for path in new.rglob("*") if path.is_file()])

        return run

    variants = [Variant(RAW_WRITE, RAW_WRITE, raw), Variant(OURS_WRITE, RAW_WRITE, ours)]
    variants += [Variant(f"{name}, one shard", RAW_WRITE, generic(path)) for name, path in pipelines().items()]
    for module, kind, name in (("safetensors", "safetensors", SAFETENSORS), ("torch", "pt", TORCH)):
        if has(module):
            variants.append(Variant(name, RAW_WRITE, peers(kind)))
    return variants


def clear_written(folder: Path) -> None:
    """Remove what a write variant left, so that the next one finds the same free disk."""
    new = folder / "new"
    if new.is_dir():
        shutil.rmtree(new)
    new.unlink(missing_ok=True)
    for segment in (folder / "write.zarr" / SEGMENTS).iterdir():
        if segment.is_dir():
            shutil.rmtree(segment)
    os.sync()


def drop(files: Sequence[Path]) -> bool:
    """Drop files from the page cache; False if the largest one is still there."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    largest = max(files, key=lambda path: path.stat().st_size)
    descriptor = os.open(largest, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(4096)], largest.stat().st_size // 2 // 4096 * 4096, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return False


def read_cold_and_drop(variant: Variant) -> None:
    """Read from the disk: the next cold read takes the memory that this one leaves, none that the host has to give."""
    drop(variant.files)
    variant.run()
    drop(variant.files)


def status_bytes(name: str) -> int:
    """A line of this process's memory in the kernel's books: VmRSS now, VmHWM the peak since it was cleared."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def timed(run: Callable[[], None]) -> Pass:
    Path("/proc/self/clear_refs").write_text("5")
    resident, cpu, began = status_bytes("VmRSS"), time.process_time(), time.perf_counter()
    run()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return Pass(seconds, cpu_seconds, status_bytes("VmHWM") - resident)


def measure(
    variants: list[Variant], num_rounds: int, seed: int, before: Callable[[Variant], Any], num_bytes: int
) -> list[dict[str, Any]]:
    """Run every variant in every round, in random order, each right beside a pass of its twin; one line each."""
    rng, named = np.random.default_rng(seed), {variant.name: variant for variant in variants}
    passes: dict[str, list[tuple[Pass, Pass]]] = {name: [] for name in named}

    def one_pass(variant: Variant) -> Pass:
        before(variant)
        return timed(variant.run)

    for round_number in range(num_rounds):
        for number in rng.permutation(len(variants)).tolist():
            own, twin = variants[number], named[variants[number].twin]
            if own is twin:
                found = one_pass(own)
                passes[own.name].append((found, found))
            elif round_number % 2:
                passes[own.name].append((one_pass(own), one_pass(twin)))
            else:
                passes[own.name].append((one_pass(twin), one_pass(own))[::-1])
    lines = []
    for variant in variants:
        mine = [pair[0] for pair in passes[variant.name]]
        ratios = [twin.seconds / own.seconds for own, twin in passes[variant.name]]
        lines.append(
            {
                "variant": variant.name,
                "twin": variant.twin,
                "gb_per_second": num_bytes / 1e9 / statistics.median(run.seconds for run in mine),
                "ratio": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
                "cpu_seconds_per_gb": statistics.median(run.cpu_seconds for run in mine) / (num_bytes / 1e9),
                "peak_mib": max(run.peak_bytes for run in mine) / (1 << 20),
            }
        )
    return lines


def measure_opening(folder: Path, num_segments: int, samples_each: int) -> dict[str, Any]:
    """Seconds to open a store of many small segments: without an index, with one, medians of three."""
    encoding = make_encoding("bf16", 1, 4)
    store = make_store(folder / f"open-{num_segments}.zarr", encoding)
    features = np.zeros((1, 4), encoding.storage_dtype)
    token_ids, loss_mask = np.zeros(1, np.int32), np.ones(1, np.uint8)
    with mock.patch("os.fsync"):  # it is the opening that is measured
        for segment in range(num_segments):
            writer = SegmentWriter(store, encoding, {"data": "benchmark"})
            for sample in range(samples_each):
                writer.append(segment * samples_each + sample, sample, token_ids, loss_mask, features)
            writer.commit()

    def opened() -> float:
        began = time.perf_counter()
        num_samples = len(StoreReader(store).samples)
        seconds = time.perf_counter() - began
        assert num_samples == num_segments * samples_each
        return seconds

    without = []
    for _ in range(3):
        (store / INDEX_NAME).unlink(missing_ok=True)
        without.append(opened())
    with_index = [opened() for _ in range(3)]
    return {
        "segments": num_segments,
        "samples": num_segments * samples_each,
        "seconds_without_index": statistics.median(without),
        "seconds_with_index": statistics.median(with_index),
    }


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every bar of the store that this run can judge."""

    def value(table: str, name: str, key: str) -> float | None:
        return next((float(line[key]) for line in result.get(table, []) if line["variant"] == name), None)

    default = value("read_hot", "zarr-python, default", "ratio")
    hot = value("read_hot", OURS, "ratio")
    wanted: list[tuple[str, float | None, str, float]] = [
        ("packed read, hot / raw", hot, ">=", 0.90),
        ("packed read, cold / raw", value("read_cold", OURS, "ratio"), ">=", 0.80),
        ("packed read, verified, hot / raw", value("read_hot", OURS_VERIFIED, "ratio"), ">=", 0.50),
        ("packed read, hot / zarr-python", hot / default if hot and default else None, ">=", 3.0),
        ("--direct-io, CPU s/GB", value("read_cold", OURS_DIRECT, "cpu_seconds_per_gb"), "<=", 0.10),
        ("segment write with commit / raw", value("write", OURS_WRITE, "ratio"), ">=", 0.80),
        ("writer memory, MiB", value("write", OURS_WRITE, "peak_mib"), "<=", 64),
        ("reader memory, MiB", value("read_hot", OURS_VERIFIED, "peak_mib"), "<=", 8),
    ]
    for line in result["open"]:
        if line["segments"] <= 1000:
            wanted.append(
                (f"open {line['segments']:,} segments, no index, s", line["seconds_without_index"], "<=", 0.5)
            )
        else:
            wanted.append((f"open {line['segments']:,} segments, s", line["seconds_with_index"], "<=", 2.0))
    return [
        {
            "bar": name,
            "value": found,
            "wanted": f"{sign} {bar:g}",
            "met": found >= bar if sign == ">=" else found <= bar,
        }
        for name, found, sign, bar in wanted
        if found is not None
    ]


def show(result: dict[str, Any]) -> None:
    """Print the tables in Markdown."""
    for title, key in (("Read, hot", "read_hot"), ("Read, cold", "read_cold"), ("Write", "write")):
        if key not in result:
            continue
        print(f"\n| {title} | GB/s | ratio to raw (range) | CPU s/GB | peak MiB |\n|---|---|---|---|---|")
        for line in result[key]:
            low, high = line["ratio_range"]
            print(
                f"| {line['variant']} | {line['gb_per_second']:.2f} | {line['ratio']:.2f} ({low:.2f}-{high:.2f}) "
                f"| {line['cpu_seconds_per_gb']:.2f} | {line['peak_mib']:.0f} |"
            )
    print("\n| Open | samples | s without index | s with index |\n|---|---|---|---|")
    for line in result["open"]:
        times = f"{line['seconds_without_index']:.2f} | {line['seconds_with_index']:.2f}"
        print(f"| {line['segments']:,} segments | {line['samples']:,} | {times} |")
    print("\n| bar | found | wanted | |\n|---|---|---|---|")
    for line in result["bars"]:
        print(f"| {line['bar']} | {line['value']:.2f} | {line['wanted']} | {'met' if line['met'] else 'missed'} |")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release(), "cpus": str(os.cpu_count())}
    for package in ("numpy", "zarr", "zarrs", "safetensors", "torch", "google-crc32c"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def main() -> None:
    """Measure, print the tables, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--folder", type=Path, help="Where to write; the file system measured. Default: a temporary one."
    )
    parser.add_argument("--megabytes", type=int, default=512, help="Bytes of features that every pass moves.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--encoding", choices=["bf16", "int8"], default="bf16")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--row-tokens", type=int, default=8192)
    parser.add_argument("--segments", type=int, nargs="*", default=[1000], help="Sizes of the stores that are opened.")
    parser.add_argument("--samples-each", type=int, default=100, help="Samples of a segment of those.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="Write everything here, too.")
    given = parser.parse_args()
    encoding = make_encoding(given.encoding, given.layers, given.hidden)
    data = Data(encoding, given.megabytes * 1_000_000, given.row_tokens, given.seed)
    result: dict[str, Any] = {
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()},
        "versions": versions(),
        "bytes": data.features.nbytes,
        "samples": len(data.lengths),
    }
    with tempfile.TemporaryDirectory(prefix="store-io-", dir=given.folder) as name:
        folder = Path(name)
        variants = read_variants(folder, data)
        can_drop = drop(variants[0].files)
        result["read_hot"] = measure(
            variants, given.rounds, given.seed, lambda variant: variant.run(), data.features.nbytes
        )
        if can_drop:
            result["read_cold"] = measure(variants, given.rounds, given.seed, read_cold_and_drop, data.features.nbytes)
        else:
            print("This file system keeps its files in memory: no cold reads.")
        writers = write_variants(folder, data)
        result["write"] = measure(
            writers, given.rounds, given.seed, lambda variant: clear_written(folder), data.features.nbytes
        )
        result["open"] = [measure_opening(folder, count, given.samples_each) for count in given.segments]
        result["bars"] = bars(result)
        print(f"{len(data.lengths)} samples, {data.features.nbytes / 1e6:,.0f} MB; {result['versions']}")
        show(result)
        if given.json:
            given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
