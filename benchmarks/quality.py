"""Acceptance length by encoding, precision, recipe and trainer: the same training runs over several seeds, on one GPU.

    python benchmarks/quality_data.py SHAREGPT --tokenizer T --out .                     # or any conversations
    dflash regenerate --target T --data prompts_train.jsonl --output answers.jsonl --temperature 0 --batch-size 512 \\
        --max-new-tokens 224 --keep-unfinished
    python benchmarks/quality.py --target T --data answers.jsonl --original prompts_train.jsonl --held-out prompts_held.jsonl \\
        --folder /scratch/quality --plan encodings --plan recipe --seeds 0,1,2 --results results.jsonl --seconds 540
    python benchmarks/quality.py --table results.jsonl

A run is `dflash train-drafter` and then `dflash evaluate`; one JSON line of each that is finished goes to --results.
The same command again runs what is missing there. --parallel runs share the GPU, so their seconds say nothing; the
order is all variants of the first seed, then of the second, so that a cut leaves whole seeds. Runs under way at
--seconds are stopped with a checkpoint, and go on from it next time if --folder is still there.

All variants differ in one thing from int8 (5 layers, block 16, decay, bf16 products). Rows follow from the set of samples
and the run's seed, whatever the order in which a store has them. Each line has a hash of the sample ids of every row of
the run, planned from the segments that its checkpoint lists, and whether the steps in its metrics have these rows' tokens.

bf16-as-tapped is the bf16 store with a channel scale of ones: the same segments, and `fc` is trained on h itself, as
other trainers do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from dflash_train.benchmarks.quality_facts import (
    compile_facts,
    hash_file,
    hash_json,
    planned_rows,
    questions,
    read_run,
    store_bytes,
)
from dflash_train.benchmarks.quality_plan import PLANS, STORES, Variant, expand, missing
from dflash_train.benchmarks.quality_table import append_result, format_tables, read_results
from dflash_train.machine.devices import parse_devices
from dflash_train.stage2_drafter.run_checkpoints import newest_checkpoint
from dflash_train.store.calibration import Calibration
from dflash_train.store.creation import TARGET_FILES, FrozenTarget, create_store, store_lock
from dflash_train.store.encoding import to_stored
from dflash_train.store.files import take_lock
from dflash_train.store.manifest import Manifest
from dflash_train.store.reader import StoreReader

GRACE_SECONDS = 15.0
"""For a stopped run to save."""
PEER_SCRIPT = Path(__file__).with_name("peer_training.py")


def copy_as_tapped(source: Path, copy: Path) -> None:
    """Make a store of a bf16 store's segments, which are linked, with a channel scale of ones."""
    import torch

    reader = StoreReader(source)
    assert reader.encoding.name == "bf16", "only raw states mean the same under another channel scale"
    ones = Calibration(torch.ones_like(reader.calibration.channel_scale))
    embedding, dtype_view = to_stored(reader.frozen_embed_tokens())
    head = None if reader.manifest.tied_embeddings else to_stored(reader.frozen_lm_head())[0]
    folder = source / TARGET_FILES
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("config.json", "zarr.json")}
    frozen = FrozenTarget(
        embed_tokens=embedding, lm_head=head, dtype_view=dtype_view, config=reader.target_config(), files=files
    )
    manifest = Manifest.from_json(reader.manifest.to_json() | {"calibration_hash": ones.hash})
    with store_lock(copy):
        create_store(copy, manifest, ones, frozen)
    for segment in reader.segment_ids:
        shutil.copytree(source / "segments" / segment, copy / "segments" / segment, copy_function=os.link)


class OutOfTime(Exception):
    """The run was stopped, or not begun, because the seconds are over."""


class Failed(Exception):
    """A command ended with a failure."""


class Benchmark:
    """Options, the processes under way, and the clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.folder
        self.began = time.monotonic()
        self.lines = read_results(options.results)
        self.failures: list[str] = []
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock, self._over = threading.Lock(), threading.Event()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._held: IO[bytes] | None = None
        self.on_cpu = options.gpus.startswith("cpu")
        self.revision = options.revision or _revision()
        self.settings = {
            "row_tokens": options.row_tokens,
            "anchors": options.anchors,
            "rows_per_step": options.rows_per_step,
            "lr": options.lr,
            "holdout": options.holdout,
            "mask_token": options.mask_token,
            "taps": options.target_layers or options.num_taps,
            "data": hash_file(options.data),
            "held_out_prompts": hash_file(options.held_out),
            "max_prompts": options.max_prompts,
            "max_new_tokens": options.max_new_tokens,
            "measured_by": "decoding" if options.decode else "replay",
        } | ({"train_options": options.train_options} if options.train_options else {})

    def say(self, text: str) -> None:
        print(f"{self.seconds:6.0f} s  {text}", flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    # -- processes -----------------------------------------------------------------------------------------------------

    def call(self, log: Path, words: Sequence[object], environment: dict[str, str] | None = None) -> int:
        """Run a command to its end, its output in `log`; raises OutOfTime where it was stopped. Returns its exit status."""
        threads = str(max(1, (os.cpu_count() or 1) // self.options.parallel))
        own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": threads}
        own |= {"TOKENIZERS_PARALLELISM": "false"} | (environment or {})
        with log.open("ab") as output:
            with self._lock:
                if self._over.is_set():
                    raise OutOfTime
                process = subprocess.Popen(
                    [sys.executable, *map(str, words)],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | own,
                    start_new_session=True,
                    pass_fds=(self._held.fileno(),) if self._held else (),
                )
                self._processes.add(process)
            status = process.wait()
        with self._lock:
            self._processes.discard(process)
        if self._over.is_set():
            raise OutOfTime
        return status

    def dflash(self, log: Path, *words: object) -> None:
        """Run a `dflash` command; raises Failed with its last lines."""
        gpus: list[object] = ["--gpus", self.options.gpus]
        if not self.on_cpu and words[0] != "evaluate":
            gpus.append("--allow-busy-gpus")
        self.check(log, self.call(log, ["-m", "dflash_train.cli", *words, *gpus]))

    def check(self, log: Path, status: int) -> None:
        if status:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            raise Failed(f"exit status {status}, {log}:\n{tail}")

    def stop(self) -> None:
        """End all commands: first so that they may save, then at once."""
        with self._lock:
            self._over.set()
            processes = list(self._processes)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            deadline = time.monotonic() + GRACE_SECONDS
            while number == signal.SIGTERM and time.monotonic() < deadline and any(p.poll() is None for p in processes):
                time.sleep(0.1)

    # -- stores --------------------------------------------------------------------------------------------------------

    def path(self, store: str) -> Path:
        path: Path = self.folder / "stores" / f"{store}.zarr"
        return path

    def make_stores(self, names: Sequence[str]) -> None:
        """Extract what is not there yet: the first store of each data alone, which tokenises, then the others together."""
        needed = list(dict.fromkeys(STORES[name].copy_of or name for name in names))
        (self.folder / "stores").mkdir(exist_ok=True)
        first = list({STORES[name].original: name for name in reversed(needed)}.values())
        self.together([lambda name=name: self._extract(name) for name in first])  # type: ignore[misc]
        self.together([lambda name=name: self._extract(name) for name in needed if name not in first])  # type: ignore[misc]
        for name in names:
            source = STORES[name].copy_of
            if source is not None and self._is_made(source) and not self._is_made(name):
                self.together([lambda name=name, source=source: self._copy(name, source)])  # type: ignore[misc]

    def _copy(self, name: str, source: str) -> None:
        shutil.rmtree(self.path(name), ignore_errors=True)
        copy_as_tapped(self.path(source), self.path(name))
        self._note_made(name)

    def _extract(self, name: str) -> None:
        if self._is_made(name):
            return
        options, store = self.options, STORES[name]
        if self.path(name).exists():  # of a stopped extract, or of other data
            shutil.rmtree(self.path(name))
        layers = (
            ["--target-layers", options.target_layers] if options.target_layers else ["--num-taps", options.num_taps]
        )
        data = options.original if store.original else options.data
        words: list[object] = ["extract", "--target", options.target, "--data", data, "--store", self.path(name)]
        words += [*store.words, *layers, "--sample-cache", self.folder / "samples", "--segment-seconds", 100_000]
        words += ["--calibration-tokens", options.calibration_tokens, "--log-json"]
        self.dflash(self.folder / "stores" / f"{name}.log", *words)
        self._note_made(name)
        self.say(f"store {name}")

    def _is_made(self, name: str) -> bool:
        note = self.folder / "stores" / f"{name}.made"
        text = note.read_text() if note.exists() else None
        return text == self._data_hash(name)

    def _note_made(self, name: str) -> None:
        (self.folder / "stores" / f"{name}.made").write_text(self._data_hash(name))

    def _data_hash(self, name: str) -> str:
        data = self.options.original if STORES[name].original else self.options.data
        return f"{hash_file(data)} {self.settings['taps']} {self.options.calibration_tokens}"

    # -- runs ----------------------------------------------------------------------------------------------------------

    def run(self, variant: Variant, seed: int) -> None:
        """Train, evaluate, and append the line."""
        options, began = self.options, time.monotonic()
        run = self.folder / "runs" / f"{variant.name}-seed-{seed}-steps-{options.steps}-{hash_json(self.settings)}"
        run.parent.mkdir(exist_ok=True)
        log = run.with_suffix(run.suffix + ".log")
        cache = self._compile_cache(variant)
        own = run / "compile-cache" / "rank-0"
        if cache.exists() and not run.exists():  # a copy: caches that several processes write lose entries
            shutil.copytree(cache, own)
        report = run.with_name(run.name + ".evaluation.json")
        train = self._train_peer if variant.peer else self._train
        train(variant, seed, run, log)
        if own.exists() and not cache.exists():
            self._keep_cache(own, cache)
        trained = time.monotonic() - began
        words: list[object] = ["evaluate", "--target", options.target, "--drafter", run, "--data", options.held_out]
        words += ["--max-prompts", options.max_prompts, "--max-new-tokens", options.max_new_tokens, "--output", report]
        words += ["--no-plain"] if options.decode else ["--replay", "--batch-size", options.evaluate_batch]
        self.dflash(log, *words, "--json", "--quiet")
        line = self._line(variant, seed, run, log, json.loads(report.read_text()))
        if line["acceptance_length"] is None:
            raise Failed(f"{variant.name}, seed {seed}: no round was measured, all answers have a single token")
        line |= {"train_seconds": trained, "seconds": time.monotonic() - began}
        with self._lock:
            self.lines.append(line)
            append_result(options.results, line)
        self.say(
            f"{variant.name}, seed {seed}: acceptance length {line['acceptance_length']:.3f}, {line['seconds']:.0f} s "
            f"({trained:.0f} s of training)"
        )
        if not options.keep_runs:
            shutil.rmtree(run)

    def _train(self, variant: Variant, seed: int, run: Path, log: Path) -> None:
        options = self.options
        checkpoint = newest_checkpoint(run) if run.exists() else None
        if checkpoint is not None and checkpoint.step >= options.steps:
            return
        words = ["train-drafter", *self._shared_words(variant, seed, run), "--evaluate-every", options.steps]
        words += ["--save-every", options.steps, "--keep", 1, "--log-every", 100, "--log-json"]
        self.dflash(log, *words, "--loss", "decay", *options.train_options, *variant.words)  # the last one holds

    def _train_peer(self, variant: Variant, seed: int, run: Path, log: Path) -> None:
        if (run / "model.safetensors").exists():
            return
        if not PEER_SCRIPT.exists():
            raise Failed(f"{PEER_SCRIPT} is not there")
        shutil.rmtree(run, ignore_errors=True)  # it does not resume
        caches = self.folder / "peer-caches" / run.name
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TRITON_CACHE_DIR": str(caches / "triton")}
        words = [PEER_SCRIPT, "--target", self.options.target, *self._shared_words(variant, seed, run)]
        words += [*self.options.train_options, *variant.words]
        if self.on_cpu:
            words += ["--device", "cpu"]
        else:  # it takes the first GPU that it sees, where `dflash` is told by --gpus
            environment |= parse_devices(self.options.gpus)[0].environment
        self.check(log, self.call(log, words, environment))

    def _shared_words(self, variant: Variant, seed: int, run: Path) -> list[object]:
        """Options that train-drafter and the peer's script have alike."""
        options = self.options
        words: list[object] = ["--store", self.path(variant.store), "--run", run, "--steps", options.steps]
        words += ["--seed", seed, "--row-tokens", options.row_tokens, "--anchors", options.anchors, "--lr", options.lr]
        words += ["--rows-per-step", options.rows_per_step, "--holdout", options.holdout]
        return [*words, *(["--mask-token", options.mask_token] if options.mask_token else [])]

    def _compile_cache(self, variant: Variant) -> Path:
        """Where the kernels of runs of one shape are kept."""
        options = self.options
        encoding = "peer" if variant.peer else str(StoreReader(self.path(variant.store)).encoding.num_features)
        shape = [encoding, options.row_tokens, options.anchors, *options.train_options, *variant.words]
        path: Path = self.folder / "compile-caches" / hash_json(shape)
        return path

    def _keep_cache(self, own: Path, cache: Path) -> None:
        cache.parent.mkdir(exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{cache.name}-", dir=cache.parent))
        shutil.copytree(own, temporary, dirs_exist_ok=True)
        try:
            temporary.rename(cache)
        except OSError:  # another run of this shape was first
            shutil.rmtree(temporary)

    def _line(self, variant: Variant, seed: int, run: Path, log: Path, report: dict[str, Any]) -> dict[str, Any]:
        options = self.options
        words = [*options.train_options, *variant.words]
        fraction = float(words[words.index("--fraction") + 1]) if "--fraction" in words else 1.0
        checkpoint = newest_checkpoint(run) if (run / "checkpoints").exists() else None
        state = None if checkpoint is None else checkpoint.state()
        segments = None if state is None else state.segments
        rows, tokens = planned_rows(self.path(variant.store), segments, seed, options.steps, options, fraction)
        read = read_run(run)
        step_tokens = read.pop("step_tokens")
        return {
            "variant": variant.name,
            "seed": seed,
            "steps": options.steps,
            "settings": self.settings,
            "options": list(words),
            "store": variant.store,
            "bytes": store_bytes(self.path(variant.store)),
            "rows": rows | {"as_planned": step_tokens == tokens if step_tokens else None},
            **read,
            "acceptance_length": report["acceptance_length"],
            "acceptance_length_per_prompt": report["acceptance_length_per_prompt"],
            "acceptance_length_over_anchors": report["acceptance_length_over_anchors"],
            "num_prompts": report["num_prompts"],
            "num_rounds": report["num_rounds"],
            "histogram": report["histogram"],
            "positions": [entry["cumulative"] for entry in report["positions"]],
            "trained_prompts": report["trained_prompts"],
            **compile_facts(log.read_text(errors="replace")),
            "versions": (report.get("versions") or {}) | ({} if state is None else state.versions),
            "device": report["device"],
            "revision": self.revision,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    # -- the schedule --------------------------------------------------------------------------------------------------

    def together(self, tasks: Sequence[Callable[[], None]], may_start: Callable[[], bool] = lambda: True) -> None:
        """Run tasks in this order, --parallel at a time, as long as each may start; what fails is noted."""
        queue, lock = list(tasks), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not queue or not may_start():
                        return
                    task = queue.pop(0)
                try:
                    task()
                except OutOfTime:
                    return
                except Exception as error:  # noqa: BLE001 - one run's failure is not the others'
                    self.failures.append(f"{type(error).__name__}: {error}")
                    self.say(self.failures[-1])

        threads = [threading.Thread(target=work) for _ in range(min(self.options.parallel, len(tasks)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def may_start(self) -> bool:
        """Whether a run as long as the longest so far would end in time, or may go on another time."""
        if self.options.start_late:
            return not self._over.is_set()
        longest = max(
            (line["seconds"] for line in self.lines if line["steps"] == self.options.steps and not self._is_old(line)),
            default=0.0,
        )
        return self.seconds + float(longest) <= float(self.options.seconds)

    def _is_old(self, line: dict[str, Any]) -> bool:
        return bool(line["settings"] != self.settings)

    def hold_folder(self) -> None:
        """Lock the folder for this process and its commands, which live on where it is killed."""
        path = self.folder / "lock"
        held = path.open("a+b")
        if take_lock(held.fileno(), path) is not None:
            held.close()
            raise SystemExit(f"{self.folder} is in use by another run, or by a command that a killed one left.")
        self._held = held

    def execute(self) -> int:
        """Everything; returns the exit status."""
        options = self.options
        self.hold_folder()
        held_out = questions(options.held_out)  # `evaluate` would leave them out of some variants' prompts alone
        for data in (options.data, options.original):
            shared = held_out & questions(data) if data is not None else ()
            if shared:
                raise SystemExit(f"{len(shared)} questions of {options.held_out} are in {data} too: leave them out.")
        runs = expand(options.plan, options.seeds, options.variant)
        if options.original is None:
            runs = [(variant, seed) for variant, seed in runs if not STORES[variant.store].original]
        left = missing(runs, self.lines, options.steps, self.settings)
        self.say(f"{len(left)} of {len(runs)} runs to do, {options.parallel} at a time")
        watch = threading.Timer(options.seconds, self.stop)
        watch.daemon = True
        watch.start()
        try:
            self.make_stores(list(dict.fromkeys(variant.store for variant, _ in left)))
            if not self._over.is_set():
                tasks = [lambda variant=variant, seed=seed: self.run(variant, seed) for variant, seed in left]
                self.together(tasks, self.may_start)  # type: ignore[arg-type]
        except BaseException:
            self.stop()
            raise
        finally:
            watch.cancel()
        left = missing(runs, self.lines, options.steps, self.settings)
        self.say(f"{len(left)} of {len(runs)} runs are left, {len(self.failures)} failures")
        return 1 if self.failures else 0


def _revision() -> str | None:
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="Only print the tables of these lines.")
    parser.add_argument("--target", help="Folder of the target.")
    parser.add_argument("--data", type=Path, help="Conversations that the target answered (jsonl).")
    parser.add_argument("--original", type=Path, help="The same with the data set's own answers; left out without.")
    parser.add_argument("--held-out", type=Path, help="Prompts to evaluate on, none of them in --data.")
    parser.add_argument("--folder", type=Path, help="Stores, runs and caches; kept for the next time.")
    parser.add_argument("--results", type=Path, help="A line a finished run is appended here.")
    parser.add_argument("--plan", action="append", choices=PLANS, help="Which comparisons; again for more.")
    parser.add_argument("--variant", action="append", default=[], help="Only these of the plans; again for more.")
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--parallel", type=int, default=6, help="Runs that share the GPU.")
    parser.add_argument("--seconds", type=float, default=540.0, help="Stop then.")
    parser.add_argument("--start-late", action="store_true", help="Also start runs that will not end by then.")
    parser.add_argument("--gpus", default="0", help="The GPU, or cpu.")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--rows-per-step", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--holdout", type=float, default=0.03)
    parser.add_argument("--mask-token", default="<empty_output>", help="Empty: what train-drafter takes by itself.")
    parser.add_argument("--target-layers", default="1,8,14,20,27", help="Empty: --num-taps by z-lab's rule.")
    parser.add_argument("--num-taps", type=int, default=5)
    parser.add_argument("--calibration-tokens", type=int, default=65_536)
    parser.add_argument("--train-options", type=str.split, default=[], metavar="WORDS", help="More for every run.")
    parser.add_argument("--max-prompts", type=int, default=300)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--evaluate-batch", type=int, default=300, help="Prompts that the target answers at once.")
    parser.add_argument("--decode", action="store_true", help="Evaluate by decoding for real, not by --replay.")
    parser.add_argument("--keep-runs", action="store_true", help="Keep the folders of finished runs.")
    parser.add_argument("--revision", help="Of the code, where it is no git checkout.")
    return parser


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if options.table is not None:
        print(format_tables(read_results(options.table)))
        return
    for name in ("target", "data", "held_out", "folder", "results", "plan"):
        if not getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} is needed")
    sys.exit(Benchmark(options).execute())


if __name__ == "__main__":
    main()
