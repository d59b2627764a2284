"""The parent of an extract: tokenise, forecast, start a worker a device, deal batches, survive what dies.

The parent holds the store's lock and never loads the target. It knows three states of a sample (schedule → worker's
open segment → committed) and believes only in committed segments: when a worker dies, what it had not committed goes to
the others; when the parent dies, its workers die with it, and the next run stores what is missing, with any number of
workers. A stop signal lets every worker commit its open segment and ends with status 0.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from dflash_train.machine.launch import parse_devices, start_processes, stop_signals
from dflash_train.stage1_target.events import Event, Note, Progress, Report, Tokenising
from dflash_train.stage1_target.extract_config import ExtractConfig
from dflash_train.stage1_target.forecast import Forecast
from dflash_train.stage1_target.preparation import open_if_there, prepare, segment_attributes, stored_indices
from dflash_train.stage1_target.supervisor import Supervisor
from dflash_train.store.creation import clean_staging, store_lock
from dflash_train.units import format_count

__all__ = ["Event", "ExtractConfig", "ExtractResult", "Forecast", "Note", "Progress", "Tokenising", "extract"]


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
        prepared = prepare(config, report)
        return ExtractResult(outcome="dry run", forecast=prepared.forecast, num_samples=len(prepared.table))
    devices = parse_devices(config.devices)
    with store_lock(config.store):
        prepared = prepare(config, report)
        result = ExtractResult(
            outcome="nothing to do",
            forecast=prepared.forecast,
            num_samples=len(prepared.table),
            num_stored=len(prepared.table) - len(prepared.pending),
        )
        clean_staging(config.store)
        if not len(prepared.pending):
            return result
        started = time.monotonic()
        logs = (
            config.log_folder or config.store.with_name(config.store.name + ".logs")
        ) / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
        arguments = {
            "config": prepared.config,
            "table_path": prepared.table.path,
            "attributes": segment_attributes(prepared),
        }
        report(Note(f"{format_count(len(devices), 'worker')} will load the target; logs are in {logs}"))
        with (
            stop_signals() as stop,
            start_processes(
                "dflash_train.stage1_target.worker.run_worker",
                [{**arguments, "device": device.torch_device} for device in devices],
                devices,
                logs,
            ) as group,
        ):
            run = Supervisor(prepared, group, report, stop)
            run.run()
        clean_staging(config.store)  # what killed workers left; nobody writes any more
        done = stored_indices(prepared.table, open_if_there(config.store))
        result.num_stored = int(done.sum())
        result.outcome = "finished" if done.all() else "stopped" if stop.is_set() else "failed"
        result.num_new_samples, result.num_new_tokens = run.num_new_samples, run.num_new_tokens
        result.seconds = time.monotonic() - started
        result.failures = run.failures
        return result
