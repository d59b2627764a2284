"""Kill workers of a three-worker extract on the CPU, again and again, and verify the store after every kill.

    python benchmarks/soak.py --kills 200 --json soak.json
    python benchmarks/soak.py --kills 200 --json soak.json --seconds 1200      # a go of 20 minutes; again: it goes on

Each run of `extract` goes on with the store of the last one; a store that is full is compared whole and begun anew. Once
the run's first batch is through, a drawn worker gets SIGKILL at a drawn moment, or in the phase that had the fewest kills
so far. What a worker does stands in two bytes of a file that it maps into memory, one of its main thread and one of its
writer thread; they outlive it, so a kill counts for the phase in which it came, not for the one that was aimed at:

    commit    the writer makes a segment durable and renames it
    stream    the writer appends a sample (the target may run at the same time)
    forward   the target runs
    idle      both threads wait
    between   the main thread hands a batch over, or reads one

After each kill, while the other workers go on, and after each run every byte of the store is checked, every sample is
compared with that of an undisturbed extract by one worker, and nothing may be there twice, or gone that was there
before. Reference samples (one in five here, not in 500) must be sound; a kill may cost some, as it may by design, and how
many is printed. Only the worker's function is this script's own, to note the phases; the rest is what `dflash extract`
runs. A kill takes some three seconds on two cores.

The JSON file is written after every kill, and a later start with the same file adds to its numbers, with new stores.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from dflash_train.machine import launch
from dflash_train.stage1_target import extract as extract_module
from dflash_train.stage1_target.events import Progress
from dflash_train.stage1_target.extract import Event, ExtractConfig, extract
from dflash_train.stage1_target.samples import DataConfig
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.store.reader import Sample, StoreReader
from dflash_train.store.reference import open_references, read_references
from dflash_train.store.verify import verify_store

PHASES = ("commit", "stream", "forward", "idle")
FEW_SECONDS = 5.0  # how long a kill waits for the phase that it is aimed at
HIDDEN_SIZE, NUM_LAYERS = 256, 5
REFERENCE_ONE_IN = 5
COUNTED = ("runs", "stores", "verifications", "samples", "references", "references_wanted", "goes")
WAITING, RUNNING, APPENDING, COMMITTING = b"w"[0], b"r"[0], b"a"[0], b"c"[0]


class Phases:
    """Two bytes a worker, shared through a file: what its main thread and what its writer thread does; 0 before it can."""

    def __init__(self, path: Path, num_workers: int, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(2 * num_workers))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 2 * num_workers)

    def set_main(self, worker: int, state: int) -> None:
        self._map[2 * worker] = state

    def set_writer(self, worker: int, state: int) -> None:
        self._map[2 * worker + 1] = state

    def is_started(self, worker: int) -> bool:
        return self._map[2 * worker] != 0

    def name(self, worker: int) -> str:
        main, writer = self._map[2 * worker : 2 * worker + 2]
        if writer in (APPENDING, COMMITTING):
            return "stream" if writer == APPENDING else "commit"
        return {RUNNING: "forward", WAITING: "idle"}.get(main, "between")


def run_worker(connection: Any, phases: Path, worker: int, num_workers: int, **arguments: Any) -> None:
    """The worker of `dflash extract`, noting its phases."""
    from dflash_train.stage1_target.forward import Forwarder
    from dflash_train.stage1_target.worker import run_worker
    from dflash_train.store import reference
    from dflash_train.store.segment import SegmentWriter

    torch.set_num_threads(1)
    noted = Phases(phases, num_workers)
    run, append, commit = Forwarder._run, SegmentWriter.append, SegmentWriter.commit

    def running(*given: Any) -> Any:
        noted.set_main(worker, RUNNING)
        try:
            return run(*given)
        finally:
            noted.set_main(worker, ord("-"))

    def appending(*given: Any) -> Any:
        noted.set_writer(worker, APPENDING)
        try:
            return append(*given)
        finally:
            noted.set_writer(worker, WAITING)

    def committing(*given: Any) -> Any:
        noted.set_writer(worker, COMMITTING)
        try:
            return commit(*given)
        finally:
            noted.set_writer(worker, WAITING)

    class Pipe:
        """The connection, noting when the main thread waits for it after its first batch."""

        def poll(self, timeout: float) -> bool:
            has_run = timeout and noted.is_started(worker)
            if has_run:
                noted.set_main(worker, WAITING)
            try:
                return bool(connection.poll(timeout))
            finally:
                if has_run:
                    noted.set_main(worker, ord("-"))

        def __getattr__(self, name: str) -> Any:
            return getattr(connection, name)

    with (
        mock.patch.object(reference, "ONE_IN", REFERENCE_ONE_IN),
        mock.patch.object(Forwarder, "_run", running),
        mock.patch.object(SegmentWriter, "append", appending),
        mock.patch.object(SegmentWriter, "commit", committing),
    ):
        run_worker(Pipe(), **arguments)  # type: ignore[arg-type]


@dataclass
class Tally:
    """What has happened so far."""

    kills: Counter[str] = field(default_factory=Counter)
    num_runs: int = 0
    num_stores: int = 0
    num_verifications: int = 0
    num_samples: int = 0
    num_references: int = 0
    num_references_wanted: int = 0
    num_goes: int = 0
    seconds: float = 0.0

    @classmethod
    def read(cls, path: Path | None) -> Tally:
        """What the goes before this one left in the JSON file, if there is one."""
        if path is None or not path.exists():
            return cls()
        numbers = json.loads(path.read_text())
        if numbers["failure"] is not None:
            raise SystemExit(f"{path} is of a soak that failed: {numbers['failure']}. Look into it, then move it away.")
        values = {f"num_{name}": numbers[name] for name in COUNTED}
        return cls(kills=Counter(numbers["kills"]), seconds=numbers["seconds"], **values)

    def write(self, path: Path | None, failure: str | None = None) -> None:
        if path is None:
            return
        numbers = {
            "kills": dict(self.kills),
            **{name: getattr(self, f"num_{name}") for name in COUNTED},
            "seconds": self.seconds,
            "failure": failure,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.platform(),
            "cpus": os.cpu_count(),
        }
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(numbers, indent=2) + "\n")
        new.replace(path)

    @property
    def num_kills(self) -> int:
        return self.kills.total()

    def rarest(self) -> str:
        return min(PHASES, key=lambda phase: self.kills[phase])


class Soak:
    """One store after another, filled under kills."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self._folder = folder
        self._num_workers: int = arguments.workers
        self._wanted: int = arguments.kills
        self._least: int = arguments.least
        self._json: Path | None = arguments.json
        self.tally = Tally.read(self._json)
        self.tally.num_goes += 1
        self._began = time.monotonic() - self.tally.seconds
        self._deadline = time.monotonic() + arguments.seconds
        self._generator = np.random.default_rng((arguments.seed, self.tally.num_goes))
        self._config = make_inputs(folder, arguments.samples)
        self._truth: dict[int, Sample] = {}
        self._seen: set[int] = set()

    @property
    def done(self) -> bool:
        enough = self.tally.num_kills >= self._wanted and all(self.tally.kills[name] >= self._least for name in PHASES)
        return enough or self.tally.num_kills >= 2 * self._wanted or time.monotonic() > self._deadline

    def run(self) -> None:
        if self.done:  # by what the goes before have done
            return
        truth = replace(self._config, store=self._folder / "truth", devices="cpu:1")
        assert extract(truth).outcome == "finished"
        assert isinstance(truth.store, Path)
        self._truth = _samples(truth.store)
        print(f"undisturbed: {len(self._truth)} samples", flush=True)
        while not self.done:
            self._seen = set()
            store = self._folder / f"store-{self.tally.num_stores}"
            config = replace(self._config, store=store, devices=f"cpu:{self._num_workers}")
            while not self.done:
                self._extract(config)
                if self._verify(store) == len(self._truth):
                    break
            if not self.done:
                self._count_references(store)
                shutil.rmtree(store)
                self.tally.num_stores += 1
        if store.exists():  # whatever the last kill left: an undisturbed run fills it
            assert extract(replace(config, devices="cpu:1")).outcome in ("finished", "nothing to do")
            assert self._verify(store) == len(self._truth), "samples were lost"
            self._count_references(store)
            self.tally.num_stores += 1

    def _extract(self, config: ExtractConfig) -> None:
        """One run, of whose workers some or all are killed."""
        self.tally.num_runs += 1
        phases_path = self._folder / f"phases-{self.tally.num_runs}"
        phases = Phases(phases_path, self._num_workers, create=True)
        groups: list[launch.ProcessGroup] = []
        started = threading.Event()

        def start(_function: str, arguments: Any, devices: Any, logs: Path, name: str) -> launch.ProcessGroup:
            own = {"phases": phases_path, "num_workers": self._num_workers}
            noting = [{**given, **own, "worker": index} for index, given in enumerate(arguments)]
            groups.append(launch.start_processes("soak.run_worker", noting, devices, logs, name))
            return groups[0]

        def report(event: Event) -> None:
            if isinstance(event, Progress) and event.num_samples:
                started.set()

        failures: list[BaseException] = []
        ended = threading.Event()

        def kill_some() -> None:
            try:
                while not ended.is_set():
                    if started.wait(0.1):
                        assert isinstance(config.store, Path)
                        self._kill(config.store, phases, groups[0], ended)
                    if self.done:
                        return
            except BaseException as error:  # noqa: BLE001 - raised again below
                failures.append(error)

        killer = threading.Thread(target=kill_some, name="killer")
        killer.start()
        try:
            with mock.patch.object(extract_module, "start_processes", start):
                extract(config, report)
        finally:
            ended.set()
            killer.join()
        if failures:
            raise failures[0]

    def _kill(self, store: Path, phases: Phases, group: launch.ProcessGroup, ended: threading.Event) -> None:
        """Kill a worker that has run a batch, in the rarest phase or at a drawn moment, and verify the store."""
        aimed = self.tally.rarest() if self._generator.random() < 0.75 else None
        moment = time.monotonic() + (self._generator.exponential(0.3) if aimed is None else FEW_SECONDS)
        while not ended.is_set():
            alive = [each for each in group.processes if each.popen.poll() is None and phases.is_started(each.index)]
            if not alive:
                ended.wait(0.05)
                if time.monotonic() > moment:
                    return
                continue
            victim = alive[int(self._generator.integers(len(alive)))]
            look_until = time.monotonic() + 0.02
            while time.monotonic() < look_until and phases.name(victim.index) != aimed:
                pass
            if phases.name(victim.index) == aimed or time.monotonic() > moment:
                victim.popen.kill()  # nothing where it has just ended
                break
        else:
            return
        while victim.popen.poll() is None:
            time.sleep(0.005)
        if victim.popen.returncode != -signal.SIGKILL:  # it had just ended by itself
            return
        phase = phases.name(victim.index)
        self.tally.kills[phase] += 1
        num_stored = self._verify(store)
        print(
            f"kill {self.tally.num_kills}: worker {victim.index} in {phase}; run {self.tally.num_runs}, "
            f"store {self.tally.num_stores}, {num_stored} samples stored, all sound",
            flush=True,
        )
        self.note()

    def note(self, failure: str | None = None) -> None:
        """Write the numbers so far."""
        self.tally.seconds = time.monotonic() - self._began
        self.tally.write(self._json, failure)

    def _count_references(self, store: Path) -> None:
        """Read the reference samples of a full store and count those that a kill has cost."""
        found = {sample.id for sample in read_references(open_references(store, StoreReader(store).encoding))}
        wanted = {identity for identity in self._truth if identity % REFERENCE_ONE_IN == 0}
        assert found <= wanted, "reference samples that are none"
        self.tally.num_references += len(found)
        self.tally.num_references_wanted += len(wanted)

    def _verify(self, store: Path) -> int:
        """Check every byte and every sample of what is committed now; return how many there are."""
        if not store.exists():  # the run was killed while it created the store
            return 0
        report = verify_store(store)
        assert report.problems == [], report.problems
        reader = StoreReader(store)
        assert reader.num_duplicates == 0, "a sample is stored twice"
        found = _samples(store)
        assert found.keys() <= self._truth.keys(), "samples that the data do not have"
        assert self._seen <= found.keys(), "samples that were there are gone"
        for identity, sample in found.items():
            wanted = self._truth[identity]
            assert sample.group == wanted.group
            np.testing.assert_array_equal(sample.token_ids, wanted.token_ids)
            np.testing.assert_array_equal(sample.loss_mask, wanted.loss_mask)
            # another batch has another shape, and float32 sums of another order: an int8 may round to its neighbour
            assert sample.scales is not None and wanted.scales is not None
            steps = np.abs(sample.features.astype(np.int16) - wanted.features)
            assert steps.max() <= 1 and (steps > 0).mean() < 0.01, "features differ"
            np.testing.assert_allclose(sample.scales, wanted.scales, rtol=1e-4)
        self._seen = set(found)
        self.tally.num_verifications += 1
        self.tally.num_samples += len(found)
        return len(found)


def make_inputs(folder: Path, num_samples: int) -> ExtractConfig:
    """A small random target and conversations as token ids, of fixed seeds."""
    import tokenizers
    import transformers

    vocabulary = {f"token{number}": number for number in range(500)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="token0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="token1", pad_token="token0")
    tokenizer.save_pretrained(folder / "target")
    torch.manual_seed(0)
    target = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=500,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=4 * HIDDEN_SIZE,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    )
    target.save_pretrained(folder / "target")
    generator = np.random.default_rng(0)
    with (folder / "data.jsonl").open("w") as file:
        for length in generator.integers(40, 500, num_samples).tolist():
            mask = [0] * (length // 3) + [1] * (length - length // 3)
            row = {"input_ids": generator.integers(2, 500, length).tolist(), "loss_mask": mask}
            file.write(json.dumps(row) + "\n")
    return ExtractConfig(
        target=TargetConfig(name=str(folder / "target"), dtype="float32"),
        data=DataConfig(source=str(folder / "data.jsonl"), max_tokens=1000),
        store=folder / "unset",
        encoding="int8",
        num_taps=2,
        batch_tokens=1000,
        segment_bytes=1_000_000,
        calibration_tokens=2000,
        sample_cache=folder / "samples",
    )


def _samples(store: Path) -> dict[int, Sample]:
    reader = StoreReader(store)
    samples = [reader.read(index) for index in range(len(reader.samples))]
    return {sample.id: sample for sample in samples}


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill workers of an extract and verify the store after each kill.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--least", type=int, default=20, help="Go on, up to twice the kills, until each phase has these."
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument(
        "--seconds", type=float, default=36_000.0, help="No kill after these; the last store is filled."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="Where to work. Default: a temporary folder.")
    parser.add_argument("--json", type=Path, help="Also write the numbers here, added to those that are there.")
    arguments = parser.parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="dflash-soak-") as folder:
        soak = Soak(Path(folder), arguments)
        try:
            soak.run()
        except Exception as error:
            soak.note(f"{type(error).__name__}: {error}")
            raise
    soak.note()
    tally, minutes = soak.tally, soak.tally.seconds / 60
    print(f"\n{'phase':10} kills")
    for phase in (*PHASES, "between"):
        print(f"{phase:10} {tally.kills[phase]:5}")
    print(
        f"{'all':10} {tally.num_kills:5}\n\n"
        f"{arguments.workers} workers, {tally.num_runs} runs, {tally.num_stores} stores filled, "
        f"{tally.num_verifications} verifications of {tally.num_samples:,} samples in {minutes:.0f} minutes "
        f"and {tally.num_goes} goes: 0 lost, 0 doubled, 0 damaged; "
        f"{tally.num_references:,} of {tally.num_references_wanted:,} reference samples kept"
    )


if __name__ == "__main__":
    main()
