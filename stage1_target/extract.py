"""The parent of an extract: tokenise, forecast, start a worker a device, deal batches, survive what dies.

The parent holds the store's lock and never loads the target. It knows three states of a sample (schedule → worker's
open segment → committed) and believes only in committed segments: when a worker dies, what it had not committed goes to
the others; when the parent dies, its workers die with it, and the next run stores what is missing, with any number of
workers. A stop signal lets every worker commit its open segment and ends with status 0.
"""

from __future__ import annotations

import importlib.metadata
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.errors import InputError
from dflash_train.launch import Process, ProcessGroup, parse_devices, start_processes, user_cache_folder
from dflash_train.stage1_target import messages
from dflash_train.stage1_target.dealer import Dealer
from dflash_train.stage1_target.forecast import Forecast, make_forecast
from dflash_train.stage1_target.identity import known_without_weights
from dflash_train.stage1_target.samples import DataConfig, SampleTable, prepare_samples
from dflash_train.stage1_target.schedule import Batch, padding_share, plan_batches
from dflash_train.stage1_target.target import (
    TargetConfig,
    check_target_layer_ids,
    default_target_layer_ids,
    load_model_config,
    load_tokenizer,
    text_config,
)
from dflash_train.stage1_target.worker import refuse_differences
from dflash_train.store.creation import clean_staging, store_lock
from dflash_train.store.encoding import make_encoding
from dflash_train.store.manifest import format_id, hash_calibration
from dflash_train.store.reader import StoreReader

logger = logging.getLogger(__name__)

PACKAGES = ("dflash-train", "torch", "transformers", "tokenizers", "datasets")
REPORT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """One extract: which target over which data into which store."""

    target: TargetConfig
    """The frozen target."""
    data: DataConfig
    """The conversations."""
    store: Path
    """Folder of the store; made if it is missing, filled up if it is there."""
    devices: str | None = None
    """GPU numbers like 0-4 or 5,7, or cpu, or cpu:3; None is every GPU, or one CPU worker where there is none."""
    encoding: str = "bf16"
    """How features are stored: bf16 is exact, int8 takes half the bytes."""
    target_layer_ids: tuple[int, ...] | None = None
    """Decoder layers to tap, 0 is the first; None takes `num_taps` by z-lab's rule."""
    num_taps: int = 5
    """How many layers z-lab's rule taps; 5 in its released drafters."""
    batch_tokens: int = 16_384
    """Tokens of one forward, padding included; more saves little beyond this (30,000 tokens/s at 16 x 2048 and 8 x 2048
    alike on one H200)."""
    segment_bytes: int = 2_000_000_000
    """A segment is committed at this size; bytes."""
    segment_seconds: float = 300.0
    """… or at this age: what a killed worker loses at most."""
    calibration_tokens: int = 65_536
    """Tokens of the random draw that the channel scale is measured on; all, if there are fewer."""
    calibration_from: Path | None = None
    """Take the channel scale of this store instead, so that both can be trained on together."""
    seed: int = 0
    """Of the schedule's shuffle and the calibration draw."""
    sample_cache: Path | None = None
    """Where tokenised samples are kept; None is dflash-train/samples in the user's cache folder."""
    log_folder: Path | None = None
    """Where each run puts its workers' logs; None is `<store>.logs`."""
    dry_run: bool = False
    """Forecast only; nothing but the sample cache is written."""

    def __post_init__(self) -> None:
        for name in ("num_taps", "batch_tokens", "segment_bytes", "segment_seconds", "calibration_tokens"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} is {getattr(self, name)} but must be more than 0.")
        make_encoding(self.encoding, 1, 1)


@dataclass(frozen=True)
class Tokenising:
    """Event: rows of the data set that are tokenised."""

    num_done: int
    num_rows: int | None


@dataclass(frozen=True)
class Note:
    """Event: something the user should know."""

    text: str


@dataclass(frozen=True)
class Progress:
    """Event: how far the workers are."""

    num_samples: int
    """Samples run in this extract, of `num_pending`."""
    num_pending: int
    num_tokens: int
    num_pending_tokens: int
    num_committed: int
    """Of the samples run, those in committed segments."""
    num_committed_bytes: int
    tokens_per_second: float
    hours_left: float
    num_workers: int
    """Workers that are ready."""

    def line(self) -> str:
        """The progress as text."""
        return (
            f"{self.num_samples:,} of {self.num_pending:,} samples run ({self.num_committed:,} committed), "
            f"{self.num_tokens:,} tokens, {self.tokens_per_second:,.0f} tokens/s on {self.num_workers} workers, "
            f"{self.hours_left:.2f} h left"
        )


Event = Tokenising | Note | Forecast | Progress
Report = Callable[[Event], None]


@dataclass(kw_only=True)
class ExtractResult:
    """How an extract ended."""

    outcome: str
    """finished, stopped (by a signal), failed (no worker was left), nothing to do, or dry run."""
    forecast: Forecast
    num_samples: int
    """Samples of the data."""
    num_stored: int = 0
    """Of these, samples in the store (quarantined ones included)."""
    num_new_samples: int = 0
    """Stored by this run."""
    num_new_tokens: int = 0
    seconds: float = 0.0
    """From the start of the workers."""
    failures: list[str] = field(default_factory=list)
    """Workers that died, and batches given up."""

    @property
    def exit_status(self) -> int:
        """0, or 1 if a worker died, even if the others did its work."""
        return 1 if self.failures else 0

    @property
    def message(self) -> str:
        """The last line for the user."""
        if self.outcome == "nothing to do":
            return f"nothing to do: all {self.num_samples:,} samples are stored"
        if self.outcome == "dry run":
            return "dry run: nothing was stored"
        text = f"stored {self.num_stored:,} of {self.num_samples:,}"
        return text if self.num_stored == self.num_samples else f"{text}; run again to go on"


def extract(config: ExtractConfig, report: Report | None = None) -> ExtractResult:
    """Store the tapped states of all samples that are not in the store yet.

    Raises InputError (StoreError for what concerns the store) before any work where the input cannot do; a worker that
    dies does not raise but stands in the result's `failures`.
    """
    report = report or (lambda _event: None)
    if config.dry_run:
        prepared = _prepare(config, report)
        return ExtractResult(outcome="dry run", forecast=prepared.forecast, num_samples=len(prepared.table))
    devices = parse_devices(config.devices)
    with store_lock(config.store):
        prepared = _prepare(config, report)
        result = ExtractResult(
            outcome="nothing to do",
            forecast=prepared.forecast,
            num_samples=len(prepared.table),
            num_stored=len(prepared.table) - len(prepared.pending),
        )
        if not len(prepared.pending):
            return result
        clean_staging(config.store)
        started = time.monotonic()
        logs = (
            config.log_folder or config.store.with_name(config.store.name + ".logs")
        ) / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
        arguments = {
            "config": prepared.config,
            "table_path": prepared.table.path,
            "attributes": _segment_attributes(prepared),
        }
        report(Note(f"starting {len(devices)} workers; their logs are in {logs}"))
        with (
            _stop_signals() as stop,
            start_processes(
                "dflash_train.stage1_target.worker.run_worker",
                [{**arguments, "device": device.torch_device} for device in devices],
                devices,
                logs,
            ) as group,
        ):
            run = _Run(prepared, group, report, stop)
            run.run()
        done = _stored_indices(prepared.table, _open_if_there(config.store))
        result.num_stored = int(done.sum())
        result.outcome = "finished" if done.all() else "stopped" if stop.is_set() else "failed"
        result.num_new_samples, result.num_new_tokens = run.num_new_samples, run.num_new_tokens
        result.seconds = time.monotonic() - started
        result.failures = run.failures
        return result


@dataclass(frozen=True)
class _Prepared:
    """All that is known before a worker starts."""

    config: ExtractConfig
    table: SampleTable
    pending: NDArray[np.int64]
    batches: list[Batch]
    new_entries: list[dict[str, Any]]
    store_exists: bool
    forecast: Forecast


def _prepare(config: ExtractConfig, report: Report) -> _Prepared:
    """Tokenise, compare with an existing store as far as that goes without weights, and forecast."""
    model_config = load_model_config(config.target)
    text = text_config(model_config)
    num_target_layers = int(text.num_hidden_layers)
    layer_ids = (
        default_target_layer_ids(num_target_layers, config.num_taps)
        if config.target_layer_ids is None
        else check_target_layer_ids(config.target_layer_ids, num_target_layers)
    )
    data = config.data
    num_positions = getattr(text, "max_position_embeddings", None)
    if num_positions and data.max_tokens > num_positions:
        report(
            Note(f"max_tokens is lowered from {data.max_tokens:,} to {num_positions:,}, the positions of the target")
        )
        data = replace(data, max_tokens=int(num_positions))
    config = replace(config, data=data, target_layer_ids=layer_ids)
    tokenizer = load_tokenizer(config.target)
    reader = _open_if_there(config.store)
    if reader is not None:
        encoding = make_encoding(config.encoding, len(layer_ids), int(text.hidden_size))
        known = known_without_weights(config.target, model_config, tokenizer, layer_ids, encoding)
        if config.calibration_from is not None:
            known["calibration_hash"] = hash_calibration(
                StoreReader(config.calibration_from, segments=()).channel_scale
            )
        refuse_differences(config.store, reader.manifest.differences(replace(reader.manifest, **known)))
    cache = config.sample_cache or user_cache_folder() / "samples"
    table = prepare_samples(data, tokenizer, cache, lambda done, rows: report(Tokenising(done, rows)))
    pending = np.flatnonzero(~_stored_indices(table, reader))
    batches = plan_batches(table.lengths, pending, config.batch_tokens, config.seed)
    forecast = make_forecast(
        table,
        pending,
        padding_share(batches),
        encoding=config.encoding,
        num_layers=len(layer_ids),
        text_config=text,
        store=config.store,
    )
    report(forecast)
    for line in forecast.lines():
        logger.info("%s", line)
    forecast.refuse_if_too_large()
    known_entries = {_entry_key(entry) for entry in (reader.quarantined() if reader is not None else [])}
    data_name = f"{data.source} ({data.split})"
    entries = [{**entry, "data": data_name} for entry in table.quarantined]
    new_entries = [entry for entry in entries if _entry_key(entry) not in known_entries]
    return _Prepared(config, table, pending, batches, new_entries, reader is not None, forecast)


def _entry_key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry.get("data"), entry.get("row"), entry.get("id"), entry.get("reason")


def _open_if_there(store: Path) -> StoreReader | None:
    """The store, if there is one; StoreError if something else is there."""
    return StoreReader(store) if store.exists() else None


def _stored_indices(table: SampleTable, reader: StoreReader | None) -> NDArray[np.bool_]:
    """Which samples of the table need no work: stored, or quarantined with their id."""
    if reader is None:
        return np.zeros(len(table), dtype=bool)
    quarantined = {entry["id"] for entry in reader.quarantined() if entry.get("id")}
    stored = reader.stored_ids()
    return np.array(
        [identity in stored or format_id(identity) in quarantined for identity in map(int, table.ids)], bool
    )


def _segment_attributes(prepared: _Prepared) -> dict[str, Any]:
    """What a segment records about its making."""
    config = prepared.config
    return {
        "data": prepared.table.source,
        "settings": {
            "target": config.target.name,
            "max_tokens": config.data.max_tokens,
            "batch_tokens": config.batch_tokens,
            "seed": config.seed,
            "chat_template_arguments": config.data.chat_template_arguments,
        },
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    """Version of an installed distribution; None where the package is used from a folder."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; the second SIGINT interrupts at once. Outside the main thread never set."""
    stop = threading.Event()

    def handle(number: int, _frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Run:
    """The parent's loop over messages of its workers."""

    def __init__(self, prepared: _Prepared, group: ProcessGroup, report: Report, stop: threading.Event) -> None:
        self.failures: list[str] = []
        self.num_new_samples = self.num_new_tokens = 0
        self._prepared = prepared
        self._group = group
        self._report = report
        self._stop = stop
        self._dealer = Dealer(prepared.batches)
        self._batch_indices: dict[int, tuple[int, ...]] = {}
        self._ready: list[Process] = []
        self._loaded: list[Process] = []
        self._creator: Process | None = None
        self._store_exists = prepared.store_exists
        self._entries = prepared.new_entries
        self._entries_at: Process | None = None
        self._committing: set[int] = set()
        self._fatal: InputError | None = None
        self._ran: set[int] = set()
        self._num_ran_tokens = self._num_committed = self._num_bytes = 0
        self._started: float | None = None
        self._reported = time.monotonic()

    def run(self) -> None:
        """Until everything is committed, nobody is left, or somebody says stop. Raises InputError for a fatal reason."""
        while not (self._finished or self._stop.is_set() or self._fatal) and self._group.running:
            self._send()
            self._handle(self._group.wait(0.2))
        for process in self._group.running:
            process.send(messages.Finish())
        while self._group.running:
            self._handle(self._group.wait(1.0))
        for deal in self._dealer.given_up:
            self.failures.append(
                f"{len(deal.indices)} samples were given up, because {deal.num_deaths} workers died while running them"
            )
        if self._fatal is not None:
            raise self._fatal

    @property
    def _finished(self) -> bool:
        return self._dealer.done and not (self._entries and self._ready)

    def _send(self) -> None:
        """Give every worker what it can do now."""
        if self._store_exists:
            for process in self._loaded:
                process.send(messages.Go())
            self._loaded.clear()
        elif self._creator is None and self._loaded:
            self._creator = self._loaded.pop(0)
            self._creator.send(messages.Create())
        for process in self._ready:
            if self._entries and self._entries_at is None:
                self._entries_at = process
                process.send(messages.Quarantine(self._entries))
            while (deal := self._dealer.deal(process.index)) is not None:
                self._started = self._started or time.monotonic()
                self._batch_indices[deal.number] = deal.indices
                process.send(messages.Run(deal.number, deal.indices))
            wants = self._dealer.wants_commit(process.index) or (self._entries_at is process and self._dealer.done)
            if wants and process.index not in self._committing:
                self._committing.add(process.index)
                process.send(messages.Commit())

    def _handle(self, events: list[tuple[Process, Any]]) -> None:
        for process, message in events:
            match message:
                case None:
                    self._ended(process)
                case messages.Loaded():
                    self._loaded.append(process)
                case messages.Created():
                    self._store_exists = True
                case messages.Ready():
                    self._ready.append(process)
                case messages.Ran(number):
                    self._dealer.ran(process.index, number)
                    self._count_ran(number)
                case messages.Committed():
                    self._count_committed(process, message)
                case messages.Failed(error):
                    self._fatal = self._fatal or error
        if self._ran:
            progress = self._progress()
            if events:
                self._report(progress)
            if time.monotonic() - self._reported >= REPORT_SECONDS:
                self._reported = time.monotonic()
                logger.info("%s", progress.line())

    def _ended(self, process: Process) -> None:
        """A worker is gone; what it had not committed goes to the others."""
        self._ready = [other for other in self._ready if other is not process]
        self._loaded = [other for other in self._loaded if other is not process]
        self._committing.discard(process.index)
        if process is self._creator and not self._store_exists:
            self._creator = None
        if self._entries_at is process:
            self._entries_at = None
        if process.popen.returncode == 0 or self._fatal is not None:
            return
        reason = process.describe_end()
        logger.error("%s", reason)
        self._report(Note(reason))
        self.failures.append(reason)
        # a segment may have been renamed into place just before its message could be sent
        store = self._prepared.config.store
        table = self._prepared.table
        self._store_exists = store.exists()
        stored = np.flatnonzero(_stored_indices(table, _open_if_there(store)))
        count = self._dealer.lost(process.index, map(int, stored))
        if count and self._group.running:
            self._report(Note(f"its {count:,} uncommitted samples go to the other workers"))

    def _count_ran(self, number: int) -> None:
        new = set(self._batch_indices.pop(number)) - self._ran
        self._ran |= new
        self._num_ran_tokens += int(self._prepared.table.lengths[list(new)].sum())

    def _count_committed(self, process: Process, message: messages.Committed) -> None:
        self._dealer.committed(process.index, message.indices)
        self._committing.discard(process.index)
        if message.num_entries:
            self._entries, self._entries_at = [], None
        self._num_committed += len(message.indices)
        self._num_bytes += message.num_bytes
        self.num_new_samples += message.num_samples
        self.num_new_tokens += message.num_tokens

    def _progress(self) -> Progress:
        forecast = self._prepared.forecast
        assert self._started is not None, "no progress before a batch was dealt"
        speed = self._num_ran_tokens / max(time.monotonic() - self._started, 1e-3)
        left = forecast.num_pending_tokens - self._num_ran_tokens
        return Progress(
            num_samples=len(self._ran),
            num_pending=forecast.num_pending,
            num_tokens=self._num_ran_tokens,
            num_pending_tokens=forecast.num_pending_tokens,
            num_committed=self._num_committed,
            num_committed_bytes=self._num_bytes,
            tokens_per_second=speed,
            hours_left=left / speed / 3600,
            num_workers=len(self._ready),
        )
