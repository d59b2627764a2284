"""One machine, both stages: extract on some GPUs fills a store while train-drafter on the others trains from it.

    python benchmarks/eight_gpus.py --folder /scratch/eight --json eight.json                                # 0-4 and 5-7
    python benchmarks/eight_gpus.py --extract-gpus 0 --train-gpus 1 --folder /scratch/two --json two.json    # 1 + 1
    python benchmarks/eight_gpus.py --extract-gpus cpu:5 --train-gpus cpu:3 --geometry tiny --folder /tmp/e  # no GPU

The target has random weights (random_target.py) unless --target names one. Phases, which --phases chooses from (1 + 1 has
the last two by default, which also measure each stage alone):

    one       extract on the first GPU alone, RAM disk                                          tokens/s of one
    all       extract on all of its GPUs, RAM disk; beside it one trainer on its first GPU,      tokens/s of all, rows/s
              on the store of `one`                                                              of one
    trainers  train on all of its GPUs, on the store of `one`                                    rows/s of all
    both      extract to --folder, the trainers follow; a process of each is killed with -9,     waits, rates, memory
              and what it ended is started again
    swapped   the same with the two sets of GPUs swapped, without kills

Rates are taken in windows of --window seconds after the first batches or steps of all processes. The trainer's rows/s count
the seconds of its steps, waits for the store included. `both` and `swapped` read every byte of their store at the end and
compare it with what the extract said it had committed; --finish lets the extract store all samples first.

A phase that fails, or has no more time (--seconds), prints the last lines of its logs; what was measured until then is in
the table and in the JSON file. Everything is torn down with SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_train.benchmarks.eight_gpus_table import PROOFS, first_gpu, table
from dflash_train.benchmarks.random_target import GEOMETRIES, draw_lengths, make_samples
from dflash_train.benchmarks.running_command import (
    END_SECONDS,
    SKIPPED_STEPS,
    Command,
    extract_rate,
    train_rate,
    training_steps,
)
from dflash_train.machine.devices import parse_devices
from dflash_train.store.reader import StoreReader
from dflash_train.store.verify import verify_store

PHASES = ("one", "all", "trainers", "both", "swapped")
WINDOW_STEPS = 6  # a window has at least these
VERIFY_SECONDS = 15.0  # of the time left, for reading a store once more
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


class Failed(Exception):
    """A phase cannot go on."""


class OutOfTime(Failed):
    """--seconds are over."""


class Benchmark:
    """Options, places, and what was measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder, self.ram = options.folder, (options.ram or ram_disk(options.folder)) / f"eight-gpus-{os.getpid()}"
        sizes = SMALL if options.geometry == "tiny" else LARGE
        self.sizes = sizes | ({"num_samples": options.samples} if options.samples else {})
        self.started = time.monotonic()
        self.deadline = self.started + options.seconds
        self.commands: list[Command] = []
        self.results: dict[str, Any] = {"failures": []}
        self._calibrated: Path | None = None
        for path in (self.folder, self.ram):
            path.mkdir(parents=True, exist_ok=True)

    def run(self, phase: str) -> None:
        """One phase; what keeps it from going on is noted, and raised only where no time is left for others."""
        self.say(f"phase {phase}")
        self._of_phase: dict[str, Command] = {}
        try:
            getattr(self, phase)()
        except Failed as failure:
            self.results["failures"].append(f"{phase}: {failure}")
            self.say(f"phase {phase} failed: {failure}")
            print("\n".join(command.tail() for command in self._of_phase.values()), flush=True)
            if isinstance(failure, OutOfTime):
                raise
        finally:
            self.clear()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.0f} s  {text}", flush=True)

    def prepare(self) -> None:
        """The target and the conversations."""
        geometry, device, maker = self.options.geometry, "cpu", None
        if not self.options.extract_gpus.startswith("cpu"):
            device = "cuda"
        self.target = self.options.target
        if self.target is None:
            self.target = str(self.ram / "target")
            dtype = "float32" if geometry == "tiny" else "bfloat16"
            script = Path(__file__).with_name("random_target.py")  # its own process: this one must hold no GPU
            words = [self.target, "--geometry", geometry, "--device", device, "--dtype", dtype]
            maker = subprocess.Popen([sys.executable, str(script), *words], stdout=subprocess.DEVNULL)
        num_samples, longest = self.sizes["num_samples"], self.sizes["longest"]
        self.data = self.folder / f"samples-{num_samples}-{longest}.parquet"
        if not self.data.exists():
            make_samples(self.data, draw_lengths(num_samples, longest=longest, median_tokens=longest // 4))
        if maker is not None and maker.wait() != 0:
            raise SystemExit("the target could not be made")
        self.say(f"target {self.target}, {self.sizes['num_samples']:,} conversations, in memory: {self.ram}")

    def start(self, name: str, *words: object) -> Command:
        command = Command(name, self.folder / f"{name}.log", words)
        self.commands.append(command)
        self._of_phase[name] = command
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
        if self._calibrated is not None and store != self._calibrated:
            words += ["--calibration-from", self._calibrated]
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
        words += ["--evaluate-rows", 6, "--keep", 1, "--log-json", *self._allow_busy(gpus)]
        if self.options.geometry == "tiny":
            words += ["--num-layers", 1, "--block-size", 4]
        return self.start(name, *words, *more)

    def _allow_busy(self, gpus: str) -> list[str]:
        # what the last phase held may take a moment to go
        return [] if gpus.startswith("cpu") else ["--allow-busy-gpus"]

    def check(self) -> None:
        """Raise Failed where a command has ended: none does by itself."""
        for command in self.commands:
            if (status := command.popen.poll()) is not None:
                why = "give more --samples" if status == 0 else "see its log"
                raise Failed(f"{command.name} ended with status {status}: {why}")

    def wait(self, what: str, done: Callable[[], bool], seconds: float = 240) -> None:
        """Until something is so; Failed where a command ends first, or it takes too long."""
        deadline = time.monotonic() + seconds
        while not done():
            self.check()
            if time.monotonic() > self.deadline:
                raise OutOfTime(f"the time is up, waiting for: {what}")
            if time.monotonic() > deadline:
                raise Failed(f"not within {seconds:.0f} s: {what}")
            time.sleep(0.2)
        self.say(what)

    def pause(self, seconds: float) -> None:
        """Let the commands run so long."""
        until = time.monotonic() + seconds
        self.wait(f"{seconds:.0f} s are over", lambda: time.monotonic() >= until, seconds + 1)

    def end(self, command: Command, wait: bool = False) -> None:
        """Kill a command, or wait until it ends by itself, and forget it."""
        self.commands.remove(command)
        try:
            if wait:
                self.wait(f"{command.name} has ended", lambda: command.popen.poll() is not None, END_SECONDS)
        finally:
            command.kill()

    def clear(self) -> None:
        for command in self.commands:
            command.kill()
        self.commands.clear()

    # -- what is measured ----------------------------------------------------------------------------------------------

    def all_run(self, command: Command) -> bool:
        """Whether every worker of an extract is past its first batches, which are slow."""
        events, least = command.events("progress"), 2 * self.sizes["batch_tokens"]
        return bool(events) and all(worker["num_tokens"] >= least for worker in events[-1]["workers"])

    # -- phases --------------------------------------------------------------------------------------------------------

    def one(self) -> None:
        first = first_gpu(self.options.extract_gpus)
        command = self.extract("one", first, self.ram / "one.zarr", "--segment-bytes", self.options.segment_bytes)
        self.wait("one GPU extracts", lambda: self.all_run(command))
        self._calibrated = self.ram / "one.zarr"
        began = time.time()
        self.pause(self.options.window)
        self.results["one"] = extract_rate(command, began)
        self.wait("its store has segments", lambda: len(_segments(self.ram / "one.zarr")) >= 2)

    def all(self) -> None:
        self._need_one()
        trainer = self.train("train-one", first_gpu(self.options.train_gpus), self.ram / "one.zarr")
        command = self.extract("all", self.options.extract_gpus, self.ram / "all.zarr")
        self.wait("all GPUs extract", lambda: self.all_run(command))
        began = time.time()
        self.pause(self.options.window)
        self.results["all"] = extract_rate(command, began)
        self.end(command)
        self.wait("one GPU trains", lambda: len(training_steps(trainer)) >= SKIPPED_STEPS + WINDOW_STEPS)
        self.results["train_one"] = train_rate(trainer, self.options.rows_per_step)
        self.clear()
        shutil.rmtree(self.ram / "all.zarr", ignore_errors=True)

    def trainers(self) -> None:
        self._need_one()
        trainer = self.train("train-all", self.options.train_gpus, self.ram / "one.zarr")
        self.wait("all trainers train", lambda: len(training_steps(trainer)) > SKIPPED_STEPS)
        self.pause(self.options.window)
        self.wait("enough steps", lambda: len(training_steps(trainer)) >= SKIPPED_STEPS + WINDOW_STEPS)
        self.results["train_all"] = train_rate(trainer, self.options.rows_per_step)

    def _need_one(self) -> None:
        if not _segments(self.ram / "one.zarr"):
            raise Failed("there is no store of phase `one`")

    def both(self) -> None:
        self._both("both", self.options.extract_gpus, self.options.train_gpus, kills=True)

    def swapped(self) -> None:
        self._both("swapped", self.options.train_gpus, self.options.extract_gpus, kills=False)

    def _both(self, name: str, extract_gpus: str, train_gpus: str, kills: bool) -> None:
        result = self.results[name] = {}
        store = self.folder / f"{name}.zarr"
        starts: list[Command] = []  # of the extract
        watch = Watch()
        try:
            self._run_both(result, name, extract_gpus, train_gpus, store, starts, kills)
        finally:
            result["gpu_memory_bytes"] = watch.stop()
            self._compare(result, starts, store)
            if store == self._calibrated:  # whose calibration the next phase takes
                for segment in _segments(store):
                    shutil.rmtree(segment)
            else:
                shutil.rmtree(store, ignore_errors=True)

    def _run_both(
        self,
        result: dict[str, Any],
        name: str,
        extract_gpus: str,
        train_gpus: str,
        store: Path,
        starts: list[Command],
        kills: bool,
    ) -> None:
        began = time.time()
        extract = self.extract(f"{name}-extract", extract_gpus, store, "--segment-bytes", self.options.segment_bytes)
        starts.append(extract)
        words = (f"{name}-train", train_gpus, store, "--follow", "--save-every", self.options.save_every)
        if not self.options.ahead:
            trainer = self.train(*words)  # it waits for the store
        self.wait("the extract runs", lambda: self.all_run(extract))
        self._calibrated = self._calibrated or store
        runs = time.time()
        result["extract_start_seconds"] = runs - began
        if self.options.ahead:
            self.pause(self.options.ahead)
            self.wait("the store has segments", lambda: bool(_segments(store)))
            trainer = self.train(*words)
        self.wait("the trainers follow", lambda: len(training_steps(trainer)) >= 1)
        result["ahead_seconds"] = time.time() - runs
        result["extract_before"] = extract_rate(extract, runs)
        self.wait("their first steps are done", lambda: len(training_steps(trainer)) > SKIPPED_STEPS)
        began, num_steps, num_bytes = time.time(), len(training_steps(trainer)), _size(store)
        self.pause(self.options.window)
        self.wait("enough steps", lambda: len(training_steps(trainer)) >= num_steps + WINDOW_STEPS)
        result["extract"] = extract_rate(extract, began)
        result["train"] = train_rate(trainer, self.options.rows_per_step, num_steps)
        result["store_bytes_per_second"] = (_size(store) - num_bytes) / (time.time() - began)
        if kills:
            extract, trainer = self._kill_both(result, extract, trainer, words, starts)
        if self.options.finish:
            self.end(trainer)
            self.commands.remove(extract)
            self.wait("the extract has ended", lambda: extract.popen.poll() is not None, math.inf)
            result["finished"] = extract.popen.returncode == 0
            extract.kill()

    def _kill_both(
        self,
        result: dict[str, Any],
        extract: Command,
        trainer: Command,
        words: tuple[Any, ...],
        starts: list[Command],
    ) -> tuple[Command, Command]:
        """Kill a process of each stage with -9: the other stage runs on, and what is started again goes on."""
        self.wait("there is a checkpoint", lambda: any((trainer.option("--run") / "checkpoints").glob("step-*")))
        result |= dict.fromkeys(PROOFS[:3])  # None: not reached
        os.kill(trainer.children()[-1], signal.SIGKILL)
        self.end(trainer, wait=True)  # one rank's death ends the run
        num_tokens, num_steps = extract.events("progress")[-1]["num_tokens"], len(training_steps(trainer))
        trainer = self.train(*words)
        self.wait(
            "a rank was killed, the extract goes on", lambda: extract.events("progress")[-1]["num_tokens"] > num_tokens
        )
        result["extract_went_on_without_trainer"] = True
        self.wait("the trainer, started again, goes on", lambda: len(training_steps(trainer)) > num_steps)
        result["trainer_resumed"] = "going on from" in trainer.output()
        num_steps, workers = len(training_steps(trainer)), extract.children()
        os.kill(workers[-1], signal.SIGKILL)
        if len(workers) == 1:
            self.end(extract, wait=True)
        else:
            result["other_workers_went_on"] = None
            after = [_tokens(extract, index) for index in range(len(workers) - 1)]
            self.wait(
                "a worker was killed, the others go on",
                lambda: all(_tokens(extract, index) > tokens for index, tokens in enumerate(after)),
            )
            result["other_workers_went_on"] = True
            self.end(extract)
        extract = self.start(extract.name, *extract.words)
        starts.append(extract)
        self.wait("no extract runs, the trainer goes on", lambda: len(training_steps(trainer)) > num_steps + 3)
        result["trainer_went_on_without_extract"] = not extract.events("progress")
        self.wait("the extract, started again, goes on", lambda: self.all_run(extract))
        result["extract_resumed"] = True
        result["train_beside_start"] = train_rate(trainer, self.options.rows_per_step, num_steps)
        result["steps_in_order"] = self._in_order(trainer)
        return extract, trainer

    def _in_order(self, trainer: Command) -> bool:
        """Whether metrics.jsonl has every step once."""
        steps = [line["step"] for line in training_steps(trainer)]
        return steps == list(range(1, len(steps) + 1))

    def _compare(self, result: dict[str, Any], starts: Sequence[Command], store: Path) -> None:
        """Kill what still writes, and hold the store against what its extracts said they had committed."""
        self.commands = [command for command in self.commands if command not in starts]
        for command in starts:
            command.kill()
        if not _segments(store):
            return
        progress = [command.events("progress")[-1:] for command in starts]
        committed = sum(values["num_committed"] for found in progress for values in found)
        reader = StoreReader(store)
        result["samples"], result["doubled"] = len(reader.samples), reader.num_duplicates
        wanted = self.sizes["num_samples"] if result.get("finished") else committed
        result["lost"] = max(0, wanted - len(reader.samples))
        if time.monotonic() + VERIFY_SECONDS < self.deadline:
            result["damaged"] = len(verify_store(store).problems)
            self.say(f"{len(reader.samples):,} samples stored, {committed:,} were reported, every byte is checked")


class Watch:
    """The most memory that each GPU had in use, from now to `stop`."""

    def __init__(self) -> None:
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

    def stop(self) -> dict[str, int]:
        self._done.set()
        self._thread.join()
        return {str(index): used for index, used in sorted(self._memory.items())}


def _tokens(extract: Command, worker: int) -> int:
    return int(extract.events("progress")[-1]["workers"][worker]["num_tokens"])


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
    parser.add_argument("--seconds", type=float, default=math.inf, help="end then, with what was measured")
    parser.add_argument(
        "--ahead",
        type=float,
        default=30.0,
        help="seconds that the extract runs before its trainer is started; 0: both are started at once",
    )
    parser.add_argument("--segment-seconds", type=float, default=10.0)
    parser.add_argument("--segment-bytes", type=int, default=500_000_000)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints of `both`")
    parser.add_argument("--phases", help=f"default: {','.join(PHASES)}; of one GPU and one: {','.join(PHASES[3:])}")
    parser.add_argument("--finish", action="store_true", help="let the extract of `both` and `swapped` end")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="leave what was written; logs always stay")
    options = parser.parse_args()
    num_gpus = {"extract": _count(options.extract_gpus), "train": _count(options.train_gpus)}
    phases = options.phases.split(",") if options.phases else PHASES if max(num_gpus.values()) > 1 else PHASES[3:]
    if not set(phases) <= set(PHASES):
        parser.error(f"--phases are {', '.join(PHASES)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"stopped by signal {number}"))  # and clean up
    benchmark = Benchmark(options)
    results = benchmark.results
    results["machine"] = {"python": platform.python_version(), "cpus": os.cpu_count()}
    results["gpus"] = num_gpus
    results["options"] = {name: str(value) for name, value in vars(options).items()}
    try:
        results["disk_bytes_per_second"] = disk_rate(
            options.folder, 64 << 20 if options.geometry == "tiny" else 2 << 30
        )
        benchmark.prepare()
        for phase in phases:
            benchmark.run(phase)
            write(results, benchmark)
    except OutOfTime:
        pass  # noted
    finally:
        benchmark.clear()
        write(results, benchmark)
        if not options.keep:
            shutil.rmtree(benchmark.ram, ignore_errors=True)
        print(table(results, options), flush=True)
    if results["failures"]:
        raise SystemExit("\n".join(results["failures"]))


def write(results: dict[str, Any], benchmark: Benchmark) -> None:
    """The numbers so far, where they were asked for."""
    results["seconds"] = time.monotonic() - benchmark.started
    if benchmark.options.json is not None:
        benchmark.options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
