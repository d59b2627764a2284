"""One machine, both stages: extract on some GPUs fills a store while train-drafter on the others trains from it.

    python benchmarks/eight_gpus.py --folder /scratch/eight --json eight.json                                # 0-4 and 5-7
    python benchmarks/eight_gpus.py --extract-gpus 0 --train-gpus 1 --folder /scratch/two --json two.json    # 1 + 1
    python benchmarks/eight_gpus.py --extract-gpus cpu:5 --train-gpus cpu:3 --geometry tiny --folder /tmp/e  # no GPU

The target has random weights (random_target.py) unless --target names one. Phases, which --phases chooses from:

    one       extract on the first GPU alone, RAM disk                                          tokens/s of one
    all       extract on all of its GPUs, RAM disk; beside it one trainer on its first GPU,      tokens/s of all, rows/s
              on the store of `one`                                                              of one
    trainers  train on all of its GPUs, on the store of `one`                                    rows/s of all
    both      extract to --folder, the trainers follow; a worker of either is killed with -9     waits, rates, memory
              in the middle, the trainer is started again
    swapped   the same with the two sets of GPUs swapped, without kills

Rates are taken in windows of --window seconds after the first batches or steps of all processes. The trainer's rows/s count
the seconds of its steps, waits for the store included, from the sixth step on. Everything is torn down with SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dflash_train.benchmarks.random_target import GEOMETRIES, draw_lengths, make_samples
from dflash_train.machine.launch import parse_devices
from dflash_train.store.reader import StoreReader
from dflash_train.units import format_bytes

PHASES = ("one", "all", "trainers", "both", "swapped")
SKIPPED_STEPS = 5
LEAST_RAM_BYTES = 120 << 30
SMALL = {
    "row_tokens": 512,
    "anchors": 64,
    "batch_tokens": 4096,
    "num_samples": 20_000,
    "longest": 512,
    "calibration": 2000,
}
LARGE = {"row_tokens": 8192, "anchors": 1024, "batch_tokens": 16_384, "num_samples": 24_000, "longest": 4096}


class Command:
    """A running `dflash` command and its log."""

    def __init__(self, name: str, log: Path, words: Sequence[object]) -> None:
        self.name, self.log, self.words = name, log, list(map(str, words))
        self.began = time.time()
        self._output = log.open("ab")
        command = [sys.executable, "-m", "dflash_train.cli", *self.words]
        self.popen = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The JSON lines of one kind, with their time in seconds since the epoch."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("{") and f'"event": "{kind}"' in line:
                values = json.loads(line)
                found.append(values | {"at": datetime.fromisoformat(values["time"]).timestamp()})
        return [values for values in found if values["at"] >= self.began]

    def children(self) -> list[int]:
        """Process ids of its workers or ranks."""
        path = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
        return [int(word) for word in path.read_text().split()]

    def check(self) -> None:
        if self.popen.poll() not in (None, 0):
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise SystemExit(f"{self.name} ended with status {self.popen.returncode}:\n{tail}")

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._output.close()


class Benchmark:
    """Options, places, and what was measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder, self.ram = options.folder, (options.ram or ram_disk(options.folder)) / f"eight-gpus-{os.getpid()}"
        sizes = SMALL if options.geometry == "tiny" else LARGE
        self.sizes = sizes | ({"num_samples": options.samples} if options.samples else {})
        self.started = time.monotonic()
        self.commands: list[Command] = []
        self.results: dict[str, Any] = {}
        for path in (self.folder, self.ram):
            path.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.0f} s  {text}", flush=True)

    def prepare(self) -> None:
        """The target and the conversations."""
        geometry, device = self.options.geometry, "cpu"
        if not self.options.extract_gpus.startswith("cpu"):
            device = "cuda"
        self.target = self.options.target
        if self.target is None:
            self.target = str(self.ram / "target")
            dtype = "float32" if geometry == "tiny" else "bfloat16"
            script = Path(__file__).with_name("random_target.py")  # its own process: this one must hold no GPU
            words = [self.target, "--geometry", geometry, "--device", device, "--dtype", dtype]
            subprocess.run([sys.executable, str(script), *words], check=True, stdout=subprocess.DEVNULL)
        self.data = self.folder / "samples.parquet"
        if not self.data.exists():
            num_samples, longest = self.sizes["num_samples"], self.sizes["longest"]
            make_samples(self.data, draw_lengths(num_samples, longest=longest, median_tokens=longest // 4))
        self.say(f"target {self.target}, {self.sizes['num_samples']:,} conversations, in memory: {self.ram}")

    def start(self, name: str, *words: object) -> Command:
        command = Command(name, self.folder / f"{name}.log", words)
        self.commands.append(command)
        return command

    def extract(self, name: str, gpus: str, store: Path, *more: object) -> Command:
        words: list[object] = [
            "extract",
            "--target",
            self.target,
            "--data",
            self.data,
            "--store",
            store,
            "--gpus",
            gpus,
        ]
        words += ["--sample-cache", self.folder / "cache", "--encoding", self.options.encoding, "--log-json"]
        words += ["--batch-tokens", self.sizes["batch_tokens"], "--segment-seconds", self.options.segment_seconds]
        words += ["--calibration-tokens", self.sizes.get("calibration", 65_536), *self._allow_busy(gpus), *more]
        first = self.ram / "one.zarr"
        if store != first and first.exists():
            words += ["--calibration-from", first]
        return self.start(name, *words)

    def train(self, name: str, gpus: str, store: Path, *more: object) -> Command:
        run = self.ram / f"run-{name}"
        cache = next(iter(sorted(self.ram.glob("run-*/compile-cache/rank-0"))), None)
        if cache is not None and not run.exists():  # the kernels that another run has compiled
            for rank in range(_count(gpus)):
                shutil.copytree(cache, run / "compile-cache" / f"rank-{rank}")
        words: list[object] = ["train-drafter", "--store", store, "--run", run, "--gpus", gpus, "--steps", 100_000]
        words += ["--row-tokens", self.sizes["row_tokens"], "--anchors", self.sizes["anchors"], "--log-every", 5]
        words += ["--rows-per-step", self.options.rows_per_step, "--evaluate-every", 100_000, "--holdout", 0.01]
        words += ["--keep", 1, "--log-json", *self._allow_busy(gpus)]
        if self.options.geometry == "tiny":
            words += ["--num-layers", 1, "--block-size", 4]
        return self.start(name, *words, *more)

    def _allow_busy(self, gpus: str) -> list[str]:
        # what the last phase held may take a moment to go
        return [] if gpus.startswith("cpu") else ["--allow-busy-gpus"]

    def wait(self, what: str, done: Callable[[], bool], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            for command in self.commands:
                command.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"no {what} within {seconds:.0f} s; logs are in {self.folder}")
            time.sleep(0.2)
        self.say(what)

    def end(self, command: Command, wait: bool = False) -> None:
        """Kill a command, or wait until it ends by itself, and forget it."""
        if wait:
            command.popen.wait()
        command.kill()
        self.commands.remove(command)

    def clear(self) -> None:
        for command in self.commands:
            command.kill()
        self.commands.clear()
        time.sleep(1.0)

    # -- what is measured ----------------------------------------------------------------------------------------------

    def all_run(self, command: Command) -> bool:
        """Whether every worker of an extract is past its first batches, which are slow."""
        events, least = command.events("progress"), 2 * self.sizes["batch_tokens"]
        return bool(events) and all(worker["num_tokens"] >= least for worker in events[-1]["workers"])

    def extract_rate(self, command: Command, began: float) -> dict[str, Any]:
        """Tokens/s between the first and the last progress line since `began`, in all and by worker."""
        events = command.events("progress")
        before = [values for values in events if values["at"] < began and values["workers"]]
        events = before[-1:] + [values for values in events if values["at"] >= began]
        if len(events) < 2:
            return {"tokens_per_second": None, "by_worker": []}
        first, last = events[0], events[-1]
        seconds = last["at"] - first["at"]
        pairs = zip(first["workers"], last["workers"], strict=True)
        return {
            "tokens_per_second": (last["num_tokens"] - first["num_tokens"]) / seconds,
            "by_worker": [(b["num_tokens"] - a["num_tokens"]) / seconds for a, b in pairs],
            "seconds": seconds,
        }

    def steps(self, command: Command) -> list[dict[str, Any]]:
        """Training steps of a run so far, from its metrics."""
        run = Path(command.words[command.words.index("--run") + 1])
        path = run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        values = [json.loads(line) for line in lines if line.endswith("}")]
        return [line for line in values if line["kind"] == "train"]

    def train_rate(self, command: Command) -> dict[str, Any]:
        """Rows/s and shares of waiting over the steps after the first few."""
        steps = self.steps(command)[SKIPPED_STEPS:]
        if len(steps) < 3:
            return {"rows_per_second": None, "wait_share": None, "steps": len(steps)}
        seconds = [line["tokens"] / line["tokens_per_second"] for line in steps if line["tokens"]]
        reading = sum(line["wait_share"] * one for line, one in zip(steps, seconds, strict=False))
        store = sum(line.get("store_wait_seconds", 0.0) for line in steps)
        whole = sum(seconds) + store
        compiled = re.findall(
            r"compiled \d+ graphs in \d+ s, \d+ recompilations", command.log.read_text(errors="replace")
        )
        return {
            "rows_per_second": len(steps) * self.options.rows_per_step / whole,
            "tokens_per_second": sum(line["tokens"] for line in steps) / whole,
            "wait_share": (reading + store) / whole,
            "store_wait_share": store / whole,
            "step_seconds": statistics.median(seconds),
            "steps": len(steps),
            "compiled": compiled[-1] if compiled else None,
        }

    # -- phases --------------------------------------------------------------------------------------------------------

    def one(self) -> None:
        first = _first(self.options.extract_gpus)
        command = self.extract("one", first, self.ram / "one.zarr", "--segment-bytes", self.options.segment_bytes)
        self.wait("one GPU extracts", lambda: self.all_run(command))
        began = time.time()
        time.sleep(self.options.window)
        self.results["one"] = self.extract_rate(command, began)
        self.wait("its store has segments", lambda: len(_segments(self.ram / "one.zarr")) >= 2)
        self.clear()

    def all(self) -> None:
        trainer = self.train("train-one", _first(self.options.train_gpus), self.ram / "one.zarr")
        command = self.extract("all", self.options.extract_gpus, self.ram / "all.zarr")
        self.wait("all GPUs extract", lambda: self.all_run(command))
        began = time.time()
        time.sleep(self.options.window)
        self.results["all"] = self.extract_rate(command, began)
        self.end(command)
        self.wait("one GPU trains", lambda: len(self.steps(trainer)) >= SKIPPED_STEPS + 6)
        self.results["train_one"] = self.train_rate(trainer)
        self.clear()
        shutil.rmtree(self.ram / "all.zarr", ignore_errors=True)

    def trainers(self) -> None:
        trainer = self.train("train-all", self.options.train_gpus, self.ram / "one.zarr")
        self.wait("all trainers train", lambda: len(self.steps(trainer)) >= SKIPPED_STEPS + 1)
        time.sleep(self.options.window)
        self.wait("enough steps", lambda: len(self.steps(trainer)) >= SKIPPED_STEPS + 6)
        self.results["train_all"] = self.train_rate(trainer)
        self.clear()

    def both(self) -> None:
        self.results["both"] = self._both("both", self.options.extract_gpus, self.options.train_gpus, kills=True)

    def swapped(self) -> None:
        self.results["swapped"] = self._both("swapped", self.options.train_gpus, self.options.extract_gpus, kills=False)

    def _both(self, name: str, extract_gpus: str, train_gpus: str, kills: bool) -> dict[str, Any]:
        store = self.folder / f"{name}.zarr"
        words = ["--follow", "--save-every", self.options.save_every]
        extract = self.extract(f"{name}-extract", extract_gpus, store, "--segment-bytes", self.options.segment_bytes)
        self.wait("the extract runs", lambda: self.all_run(extract))
        ahead = time.monotonic() + self.options.ahead
        self.wait("the store has segments", lambda: bool(_segments(store)))
        time.sleep(max(0.0, ahead - time.monotonic()))
        trainer = self.train(f"{name}-train", train_gpus, store, *words)
        self.wait("the trainers follow", lambda: len(self.steps(trainer)) >= SKIPPED_STEPS + 1)
        watch = Watch(store)
        began = time.time()
        time.sleep(self.options.window)
        self.wait("enough steps", lambda: len(self.steps(trainer)) >= SKIPPED_STEPS + 6)
        result = {
            "extract": self.extract_rate(extract, began),
            "train": self.train_rate(trainer),
            **watch.stop(),
        }
        if kills:
            result |= self._kill_both(extract, trainer, f"{name}-train", train_gpus, store, words)
        self.clear()
        reader = StoreReader(store)
        result |= {"samples": len(reader.samples), "doubled": reader.num_duplicates}
        del reader
        shutil.rmtree(store, ignore_errors=True)
        return result

    def _kill_both(
        self, extract: Command, trainer: Command, name: str, gpus: str, store: Path, words: Sequence[object]
    ) -> dict[str, Any]:
        """Kill a rank and a worker with -9: the other stage runs on, and what is started again goes on."""
        run = self.ram / f"run-{name}" / "checkpoints"
        self.wait("a checkpoint", lambda: any(run.glob("step-*")))
        os.kill(trainer.children()[-1], signal.SIGKILL)
        self.end(trainer, wait=True)
        before = extract.events("progress")[-1]["num_tokens"]
        died_at = len(self.steps(trainer))
        again = self.train(name, gpus, store, *words)
        self.wait("a rank was killed, the trainer goes on", lambda: len(self.steps(again)) > died_at, 300)
        extract_went_on = extract.events("progress")[-1]["num_tokens"] > before
        resumed = "going on from" in again.log.read_text(errors="replace")
        num_steps = len(self.steps(again))
        workers = extract.children()
        killed_at = time.time()
        os.kill(workers[-1], signal.SIGKILL)
        self.wait("a worker was killed, the trainer goes on", lambda: len(self.steps(again)) > num_steps + 3)
        others = True
        if len(workers) > 1:
            later = killed_at + 6
            self.wait("the other workers go on", lambda: extract.events("progress")[-1]["at"] > later)
            others = extract.popen.poll() is None
        else:  # its only worker: the command ends, and starting it again goes on
            self.end(extract, wait=True)
            again_extract = self.start("again-extract", *extract.words)
            self.wait("the extract goes on", lambda: self.all_run(again_extract))
        return {
            "extract_went_on_without_trainer": extract_went_on,
            "trainer_resumed": resumed,
            "extract_went_on_without_worker": others,
        }


class Watch:
    """GPU memory, and bytes that reach the store, from its start to `stop`."""

    def __init__(self, store: Path) -> None:
        self._store, self._began = store, time.monotonic()
        self._bytes = _size(store)
        self._memory: dict[int, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        while not self._done.wait(0.5):
            for index, handle in enumerate(handles):
                used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
                self._memory[index] = max(used, self._memory.get(index, 0))

    def stop(self) -> dict[str, Any]:
        self._done.set()
        self._thread.join()
        seconds = time.monotonic() - self._began
        return {
            "gpu_memory_bytes": {str(index): used for index, used in sorted(self._memory.items())},
            "store_bytes_per_second": (_size(self._store) - self._bytes) / seconds,
        }


def _first(gpus: str) -> str:
    return "cpu:1" if gpus.startswith("cpu") else re.split("[-,]", gpus)[0]


def _count(gpus: str) -> int:
    return len(parse_devices(gpus))


def _segments(store: Path) -> list[Path]:
    folder = store / "segments"
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _size(store: Path) -> int:
    """Bytes of a store, its open segments included."""
    total = 0
    for path in store.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def ram_disk(folder: Path) -> Path:
    """The RAM disk where it has room for target, checkpoints and a store, else `folder`."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > LEAST_RAM_BYTES
    return memory if has_room else folder


def disk_rate(folder: Path, num_bytes: int) -> float:
    """Bytes/s of one file written with fsync: what the disk can do alone."""
    path, block = folder / "disk-rate", os.urandom(8 << 20)
    began = time.monotonic()
    with path.open("wb") as file:
        for _ in range(max(1, num_bytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.monotonic() - began
    path.unlink()
    return max(1, num_bytes // len(block)) * len(block) / seconds


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}x" if value and base else "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def table(results: dict[str, Any], options: argparse.Namespace) -> str:
    """The results as a Markdown table."""
    one, every = results.get("one", {}), results.get("all", {})
    train_one, train_all = results.get("train_one", {}), results.get("train_all", {})
    lines = ["| what | GPUs | rate | against one | waiting |", "|---|---|---|---|---|"]

    def add(what: str, gpus: str, rate: float | None, unit: str, base: float | None, waiting: float | None) -> None:
        share = "–" if waiting is None else f"{waiting:.1%}"
        lines.append(f"| {what} | {gpus} | {_number(rate)} {unit} | {_ratio(rate, base)} | {share} |")

    extract_one, rows_one = one.get("tokens_per_second"), train_one.get("rows_per_second")
    add("extract, RAM disk", _first(options.extract_gpus), extract_one, "tokens/s", None, None)
    add("extract, RAM disk", options.extract_gpus, every.get("tokens_per_second"), "tokens/s", extract_one, None)
    add("train", _first(options.train_gpus), rows_one, "rows/s", None, train_one.get("wait_share"))
    rows_all = train_all.get("rows_per_second")
    add("train", options.train_gpus, rows_all, "rows/s", rows_one, train_all.get("wait_share"))
    sets = [("both", options.extract_gpus, options.train_gpus), ("swapped", options.train_gpus, options.extract_gpus)]
    for name, extract_gpus, train_gpus in sets:
        if (found := results.get(name)) is None:
            continue
        extract, train = found["extract"], found["train"]
        add(f"{name}: extract", extract_gpus, extract["tokens_per_second"], "tokens/s", extract_one, None)
        add(f"{name}: train --follow", train_gpus, train["rows_per_second"], "rows/s", rows_one, train["wait_share"])
        rate, disk = found["store_bytes_per_second"], results["disk_bytes_per_second"]
        lines.append(
            f"| {name}: written to the store | – | {format_bytes(rate)}/s | {rate / disk:.0%} of the disk | – |"
        )
        memory = found["gpu_memory_bytes"]
        if memory:
            used = ", ".join(f"{index}: {format_bytes(size)}" for index, size in memory.items())
            lines.append(f"| {name}: GPU memory | {used} | – | – | – |")
        lines.append(f"| {name}: compiled | {train.get('compiled') or 'nothing: CPU'} | – | – | – |")
        lines.append(f"| {name}: samples stored, doubled | – | {found['samples']:,}, {found['doubled']} | – | – |")
        kills = [key for key in found if "went_on" in key or "resumed" in key]
        lines += [f"| {name}: {key.replace('_', ' ')} | – | {'yes' if found[key] else 'NO'} | – | – |" for key in kills]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--extract-gpus", default="0-4")
    parser.add_argument("--train-gpus", default="5-7")
    parser.add_argument("--folder", type=Path, required=True, help="on local disk: logs, data, the store of `both`")
    parser.add_argument(
        "--ram", type=Path, help="target, run folders, other stores; by default /dev/shm if large enough"
    )
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-8b")
    parser.add_argument("--target", help="a real target instead of random weights")
    parser.add_argument("--encoding", default="projected-int8")
    parser.add_argument("--rows-per-step", type=int, default=6)
    parser.add_argument("--samples", type=int, help="conversations; must last for all windows")
    parser.add_argument("--window", type=float, default=25.0, help="seconds")
    parser.add_argument("--ahead", type=float, default=30.0, help="seconds that the extract is ahead of its trainer")
    parser.add_argument("--segment-seconds", type=float, default=10.0)
    parser.add_argument("--segment-bytes", type=int, default=500_000_000)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints of `both`")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="leave what was written; logs always stay")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"stopped by signal {number}"))  # and clean up
    benchmark = Benchmark(options)
    results = benchmark.results
    num_bytes = 64 << 20 if options.geometry == "tiny" else 4 << 30
    results["disk_bytes_per_second"] = disk_rate(options.folder, num_bytes)
    results["machine"] = {"python": platform.python_version(), "cpus": os.cpu_count()}
    results["gpus"] = {"extract": _count(options.extract_gpus), "train": _count(options.train_gpus)}
    results["options"] = {name: str(value) for name, value in vars(options).items()}
    try:
        benchmark.prepare()
        for phase in options.phases.split(","):
            benchmark.say(f"phase {phase}")
            getattr(benchmark, phase)()
            results["seconds"] = time.monotonic() - benchmark.started
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=2) + "\n")
    finally:
        benchmark.clear()
        if not options.keep:
            shutil.rmtree(benchmark.ram, ignore_errors=True)
    print(table(results, options))


if __name__ == "__main__":
    main()
