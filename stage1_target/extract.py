"""The parent of an extract: tokenise, forecast, start a worker a device, deal batches, survive what dies.

The parent holds the store's lock and never loads the target. It knows three states of a sample (schedule → worker's
open segment → committed) and believes only in committed segments: when a worker dies, what it had not committed goes to
the others; when the parent dies, its workers die with it, and the next run stores what is missing, with any number of
workers. A stop signal lets every worker commit its open segment and ends with status 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from dflash_train.machine.devices import Device, group_devices, parse_devices
from dflash_train.machine.launch import start_processes, stop_signals
from dflash_train.machine.run_state import logs_folder
from dflash_train.machine.torchrun import TorchrunPlace, rank_devices, torchrun_place, torchrun_store
from dflash_train.stage1_target.events import Event, Note, Progress, Report, Tokenising
from dflash_train.stage1_target.extract_config import ExtractConfig
from dflash_train.stage1_target.forecast import Forecast, lacking_room, saying_what_lacks
from dflash_train.stage1_target.preparation import (
    Prepared,
    open_if_there,
    prepare,
    segment_attributes,
    stored_and_quarantined,
    stored_indices,
)
from dflash_train.stage1_target.ranks import RankEnd, Ranks
from dflash_train.stage1_target.supervisor import Supervisor
from dflash_train.stage1_target.writer import GPU_THREADS
from dflash_train.store.creation import clean_staging, store_lock
from dflash_train.store.location import StoreUrl, beside
from dflash_train.store.upload import check_spool, check_writable, store_exists
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
    num_quarantined: int = 0
    """Of these, samples in quarantine; known once a worker has run."""
    num_new_samples: int = 0
    """Stored by this run."""
    num_new_tokens: int = 0
    seconds: float = 0.0
    """From the start of the workers."""
    failures: list[str] = field(default_factory=list)
    """Workers that died, batches given up, and, where the disk is too small for what is left, by how much."""

    weights_note: str | None = None
    """Where there was nothing to do: why the weights were not compared with the store's, and what does it."""

    @property
    def exit_status(self) -> int:
        """0, or 1 if a worker died, even if the others did its work."""
        return 1 if self.failures else 0

    @property
    def message(self) -> str:
        """The last line for the user."""
        if self.outcome == "nothing to do":
            text = f"nothing to do: all {self.num_samples:,} samples are stored"
        elif self.outcome == "dry run":
            text = "dry run: nothing was stored"
        else:
            text = f"stored {self.num_stored - self.num_quarantined:,} of {self.num_samples:,}"
            text += f", {self.num_quarantined:,} are in quarantine" if self.num_quarantined else ""
            text += "" if self.num_stored == self.num_samples else "; run again to go on"
        return text if self.weights_note is None else f"{text}; {self.weights_note}"


def extract(config: ExtractConfig, report: Report | None = None) -> ExtractResult:
    """Store the tapped states of all samples that are not in the store yet.

    Under torchrun every process calls this and stores its share; rank 0's result is of all.

    Raises InputError (StoreError for what concerns the store) before any work where the input cannot do; a worker that
    dies does not raise but stands in the result's `failures`.
    """
    report = report or (lambda _event: None)
    place = torchrun_place()
    found = (
        parse_devices(config.devices) if place is None else rank_devices(place, config.devices, config.gpus_per_target)
    )
    devices = group_devices(found, config.gpus_per_target)
    if config.dry_run:
        if place is not None and place.rank != 0:
            report = _nothing
        prepared = prepare(config, report, place is None or place.rank == 0)
        _say_mask_token(prepared, report)
        return replace(_nothing_done(prepared), outcome="dry run", num_stored=0)
    if place is not None:
        return _extract_under_torchrun(config, devices, place, report)
    with store_lock(config.store):
        prepared = prepare(config, report)
        result = _nothing_done(prepared)
        clean_staging(config.store)
        if not len(prepared.pending):
            prepared.plan.beat("finished")
            _say_mask_token(prepared, report)
            return result
        _check_upload(prepared, len(devices))
        started = time.monotonic()
        with stop_signals() as stop:
            try:
                run = _run_workers(prepared, devices, report, stop)
            except BaseException:
                prepared.plan.beat("failed")
                raise
            stopped = stop.is_set()
        clean_staging(config.store)  # what killed workers left; nobody writes any more
        own = RankEnd(num_new_samples=run.num_new_samples, num_new_tokens=run.num_new_tokens, failures=run.failures)
        result = _sum_up(result, prepared, [own], stopped, started)
        prepared.plan.beat(result.outcome)
        _say_mask_token(prepared, report)
        return result


def _extract_under_torchrun(
    config: ExtractConfig, devices: list[Device], place: TorchrunPlace, report: Report
) -> ExtractResult:
    """Be one rank: prepare in turn, store every world-th batch, and, as rank 0, wait for the others.

    Other ranks report only what went wrong, and wait for rank 0 when they are through: all end with the same exit status,
    because torchrun ends everybody at once where a process fails.
    """
    if devices[0].torch_device != "cpu":
        config = replace(config, devices=None)  # torchrun's processes take GPUs by their rank
    ranks = Ranks(place, torchrun_store(place, "dflash-extract"))
    with ranks.beating():
        try:
            with store_lock(config.store) if ranks.first else nullcontext():
                return _extract_share(config, devices, ranks, report)
        except BaseException as error:
            ranks.fail(str(error))
            raise


def _extract_share(config: ExtractConfig, devices: list[Device], ranks: Ranks, report: Report) -> ExtractResult:
    whole = ranks.prepare_in_turn(lambda: prepare(config, report if ranks.first else _nothing, ranks.first))
    share = ranks.share(whole)
    result = _nothing_done(whole)
    if ranks.first:
        clean_staging(config.store)
        ranks.go()
    if not len(whole.pending):
        share.plan.beat("finished")
        _say_mask_token(whole, report if ranks.first else _nothing)
        return result
    _check_upload(share, len(devices))
    newest: Progress | None = None

    def report_share(event: Event) -> None:
        nonlocal newest
        if isinstance(event, Progress):
            newest = event
            if ranks.first:
                report_all()
            else:
                ranks.publish(event)
        elif ranks.first:
            report(event)
        elif isinstance(event, Note) and event.failure:
            report(replace(event, text=f"rank {ranks.place.rank}: {event.text}"))

    def report_all() -> None:
        merged = ranks.merge(newest, whole.forecast.num_pending, whole.forecast.num_pending_tokens)
        if merged is not None:
            report(merged)

    started = time.monotonic()
    with stop_signals() as stop:
        ranks.stop = stop
        elsewhere = None if ranks.first else (lambda: ranks.store_is_there(config.store))
        run = _run_workers(share, devices, report_share, stop, f"rank-{ranks.place.rank}", elsewhere, ranks.reserve)
        own = RankEnd(num_new_samples=run.num_new_samples, num_new_tokens=run.num_new_tokens, failures=run.failures)
        if newest is not None and run.failures:  # nothing runs here any more, but elsewhere
            newest = replace(newest, tokens_per_second=0.0, hours_left=0.0, num_workers=0)
        if newest is not None and not ranks.first:
            ranks.publish(newest, last=True)
        ranks.end(own)
        ends = [own]
        if ranks.first:
            ends += ranks.await_others(stop, report_all)
            if len(ends) == ranks.place.world and not any(end.failures for end in ends):
                clean_staging(config.store)  # otherwise the next start does, when nobody writes any more
        result = _sum_up(result, whole, ends, stop.is_set(), started)
        share.plan.beat(result.outcome)
        _say_mask_token(whole, report if ranks.first else _nothing)
        result.failures = ranks.leave_together(result.failures, stop)
        return result


def _check_upload(prepared: Prepared, num_workers: int) -> None:
    """Raise StoreError unless a store at a URL may be written, and what waits for its upload has room here."""
    config, forecast = prepared.config, prepared.forecast
    check_writable(config.store)
    waiting = min(forecast.needed_bytes, GPU_THREADS * num_workers * config.segment_bytes)
    check_spool(config.store, max(waiting, forecast.frozen_bytes))


def _say_mask_token(prepared: Prepared, report: Report) -> None:
    """Last, where it is read: what the next command will ask for."""
    if prepared.mask_token_note is not None:
        report(Note(prepared.mask_token_note))


def _nothing(_event: Event) -> None:
    """Report of a rank that leaves the telling to rank 0."""


def _nothing_done(prepared: Prepared) -> ExtractResult:
    return ExtractResult(
        outcome="nothing to do",
        forecast=prepared.forecast,
        num_samples=len(prepared.table),
        num_stored=len(prepared.table) - len(prepared.pending),
        weights_note=prepared.weights_note,
    )


def _run_workers(
    prepared: Prepared,
    devices: list[Device],
    report: Report,
    stop: threading.Event,
    name: str = "worker",
    created_elsewhere: Callable[[], bool] | None = None,
    reserve: Callable[[int], int] | None = None,
) -> Supervisor:
    """Start a worker a device, and follow them until their work is done or nobody is left."""
    config = prepared.config
    logs = (config.log_folder or logs_folder(beside(config.store))) / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    arguments = {
        "config": config,
        "table_path": prepared.table.path,
        "attributes": segment_attributes(prepared),
    }
    report(Note(f"{format_count(len(devices), 'worker')} will load the target; logs are in {logs}"))
    with start_processes(
        "dflash_train.stage1_target.worker.run_worker",
        [{**arguments, "device": device.torch_device} for device in devices],
        devices,
        logs,
        name,
    ) as group:
        run = Supervisor(prepared, group, report, stop, created_elsewhere, reserve)
        with saying_what_lacks(
            lambda: _lacking_room(prepared, stored_indices(prepared.table, open_if_there(config.store)))
        ):
            run.run()
    return run


def _sum_up(
    result: ExtractResult, prepared: Prepared, ends: Sequence[RankEnd], stopped: bool, started: float
) -> ExtractResult:
    stored, quarantined = stored_and_quarantined(prepared.table, open_if_there(prepared.config.store))
    done = stored | quarantined
    result.num_stored, result.num_quarantined = int(done.sum()), int(quarantined.sum())
    result.outcome = "finished" if done.all() else "stopped" if stopped else "failed"
    result.num_new_samples = sum(end.num_new_samples for end in ends)
    result.num_new_tokens = sum(end.num_new_tokens for end in ends)
    result.seconds = time.monotonic() - started
    result.failures = [failure for end in ends for failure in end.failures]
    if result.outcome == "failed" and (lack := _lacking_room(prepared, done)) is not None:
        result.failures.append(lack)
    return result


def _lacking_room(prepared: Prepared, done: NDArray[np.bool_]) -> str | None:
    """How much the disk lacks for what is left, by the forecast; None where it suffices, or for a store at a URL."""
    config, forecast = prepared.config, prepared.forecast
    if isinstance(config.store, StoreUrl):
        return None
    lengths = prepared.table.lengths
    share = int(lengths[~done].sum()) / max(int(lengths[prepared.pending].sum()), 1)
    needed = int((forecast.needed_bytes - forecast.frozen_bytes) * share)
    if not store_exists(config.store):
        needed += forecast.frozen_bytes
    return lacking_room(config.store, min(needed, config.max_store_bytes or needed))
