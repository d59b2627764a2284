"""The parent's loop: who is ready, who creates the store, what is committed, and who has died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_train.errors import InputError
from dflash_train.machine.launch import Process, ProcessGroup
from dflash_train.stage1_target import messages
from dflash_train.stage1_target.calibration import draw_samples
from dflash_train.stage1_target.dealer import Dealer
from dflash_train.stage1_target.events import Note, Progress, Report, WorkerProgress
from dflash_train.stage1_target.preparation import Prepared, open_if_there, stored_indices
from dflash_train.stage1_target.room import Room
from dflash_train.stage1_target.slow_paths import SlowPath, refused
from dflash_train.stage1_target.speed import RecentSpeed
from dflash_train.stage1_target.writer import num_writers
from dflash_train.store.manifest import canonical_json
from dflash_train.store.upload import store_exists
from dflash_train.units import format_count


class Supervisor:
    """The parent's loop over messages of its workers."""

    def __init__(
        self,
        prepared: Prepared,
        group: ProcessGroup,
        report: Report,
        stop: threading.Event,
        created_elsewhere: Callable[[], bool] | None = None,
        reserve: Callable[[int], int] | None = None,
    ) -> None:
        """`created_elsewhere` says whether the store is there that another rank makes; None where a worker makes it.

        `reserve` tells other ranks how many bytes are being written here, and returns what all of them write.
        """
        self.failures: list[str] = []
        self.num_new_samples = self.num_new_tokens = 0
        self._prepared = prepared
        self._group = group
        self._report = report
        self._stop = stop
        self._dealer = Dealer(prepared.batches)
        self._room = Room(prepared.config.store, prepared.config.max_store_bytes, report, reserve)
        self._batch_indices: dict[int, tuple[int, ...]] = {}
        self._ready: list[Process] = []
        self._speeds: dict[int, RecentSpeed] = {}
        self._loaded: list[Process] = []
        self._creator: Process | None = None
        self._store_exists = prepared.store_exists
        self._created_elsewhere = created_elsewhere
        self._entries = prepared.new_entries
        self._entries_at: Process | None = None
        self._entries_bytes = len(canonical_json(self._entries)) * 2  # indented in the file
        self._committing: set[int] = set()
        self._fatal: InputError | None = None
        self._ran: set[int] = set()
        self._num_ran_tokens = self._num_committed = self._num_bytes = self._num_quarantined = 0
        self._said = {slow.name for slow in prepared.slow_paths}
        self._started: float | None = None
        self._last_ran = 0.0

    def run(self) -> None:
        """Until everything is committed, nobody is left, or somebody says stop. Raises InputError for a fatal reason."""
        while not (self._finished or self._stop.is_set() or self._fatal) and self._group.running:
            self._send()
            self._handle(self._group.wait(0.2))
            self._prepared.plan.beat()
        if self._stop.is_set():
            self._report(Note(self._describe_stop()))
        for process in self._group.running:
            process.send(messages.Finish())
        while self._group.running:
            self._handle(self._group.wait(1.0))
        self._room.close()
        if self._ran:
            self._report(self._progress())
        if self._num_quarantined:
            count = format_count(self._num_quarantined, "sample")
            self._report(Note(f"{count} put into quarantine: dflash inspect-store counts the reasons"))
        for deal in self._dealer.given_up:
            self.failures.append(
                f"{len(deal.indices)} samples were given up, because {deal.num_deaths} workers died while running them"
            )
        if self._fatal is not None:
            raise self._fatal

    def _describe_stop(self) -> str:
        if self._started is not None:
            return "stopping: what has run is committed first; Ctrl-C once more to drop it"
        if self._creator is not None:  # whether or not it has just ended: no batch was dealt yet
            return "stopping: the store is created first, no sample has run; Ctrl-C once more to drop it"
        return "stopping once the target is loaded, no sample has run; Ctrl-C once more to stop at once"

    def _describe_calibration(self) -> str:
        config, table = self._prepared.config, self._prepared.table
        if config.calibration_from is not None:
            return f"taking the channel scale of {config.calibration_from}"
        drawn = draw_samples(table.lengths, config.calibration_tokens, config.seed)
        return f"measuring the channel scale on {int(table.lengths[drawn].sum()):,} tokens"

    @property
    def _finished(self) -> bool:
        return self._dealer.done and not (self._entries and self._ready)

    def _send(self) -> None:
        """Give every worker what it can do now."""
        if not self._store_exists and self._created_elsewhere is not None:
            self._store_exists = self._created_elsewhere()
        if self._store_exists:
            for process in self._loaded:
                process.send(messages.Go())
            self._loaded.clear()
        elif self._created_elsewhere is None and self._creator is None and self._loaded:
            self._creator = self._loaded.pop(0)
            text = f"the target is loaded; {self._describe_calibration()}, creating the store, and comparing the first batch with "
            self._report(Note(f"{text}its samples run alone"))
            self._creator.send(messages.Create())
        for process in self._ready:
            if self._entries and self._entries_at is None:
                self._entries_at = process
                process.send(messages.Quarantine(self._entries))
            while self._has_room(process) and (deal := self._dealer.deal(process.index)) is not None:
                self._started = self._started or time.monotonic()
                self._speeds.setdefault(process.index, RecentSpeed())
                self._batch_indices[deal.number] = deal.indices
                process.send(messages.Run(deal.number, deal.indices))
            wants = self._dealer.wants_commit(process.index, self._room.is_full) or (
                self._entries_at is process and self._dealer.done
            )
            if wants and process.index not in self._committing:
                self._committing.add(process.index)
                process.send(messages.Commit())

    def _has_room(self, process: Process) -> bool:
        """Whether the next batch for a worker fits under --max-store-size."""
        if self._prepared.config.max_store_size is None or (deal := self._dealer.peek(process.index)) is None:
            return True
        sizes, writing = self._prepared.sizes, self._dealer.open_workers()
        open_bytes = sizes.with_segments(sizes.samples(self._dealer.open_samples()), self._num_segments(writing))
        open_bytes += self._entries_bytes if self._entries else 0
        batch_segments = 0 if process.index in writing else self._num_segments({process.index})
        return self._room.fits(sizes.with_segments(sizes.samples(deal.indices), batch_segments), open_bytes)

    def _num_segments(self, workers: set[int]) -> int:
        """How many segments workers may have open: one a writer thread."""
        devices = [process.device.torch_device for process in self._group.processes if process.index in workers]
        return sum(num_writers(device) for device in devices)

    def _handle(self, events: list[tuple[Process, Any]]) -> None:
        for process, message in events:
            match message:
                case None:
                    self._ended(process)
                case messages.Loaded(slow_paths):
                    self._loaded.append(process)
                    self._say_slow_paths(slow_paths)
                case messages.Created():
                    self._store_exists = True
                case messages.Ready():
                    self._ready.append(process)
                case messages.Ran(number):
                    self._dealer.ran(process.index, number)
                    self._count_ran(process, number)
                case messages.Committed():
                    self._count_committed(process, message)
                case messages.Failed(error):
                    self._fatal = self._fatal or error
        if self._ran and any(isinstance(message, messages.Ran | messages.Committed) for _process, message in events):
            self._report(self._progress())

    def _say_slow_paths(self, slow_paths: tuple[SlowPath, ...]) -> None:
        """One warning each, whatever the number of workers; fatal with --require-fast-kernels."""
        new = [slow for slow in slow_paths if slow.name not in self._said]
        self._said.update(slow.name for slow in new)
        if new and self._prepared.config.require_fast_kernels:
            self._fatal = self._fatal or refused(new)
            return
        for slow in new:
            self._report(Note(f"warning: {slow}"))

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
        self._report(Note(reason, failure=True))
        self.failures.append(reason)
        # a segment may have been renamed into place just before its message could be sent
        store = self._prepared.config.store
        table = self._prepared.table
        self._store_exists = store_exists(store)
        stored = np.flatnonzero(stored_indices(table, open_if_there(store)))
        count = self._dealer.lost(process.index, map(int, stored))
        if count and self._group.running:
            self._report(Note(f"its {count:,} uncommitted samples go to the other workers", failure=True))

    def _count_ran(self, process: Process, number: int) -> None:
        self._last_ran = time.monotonic()
        indices = self._batch_indices.pop(number)
        new = set(indices) - self._ran
        self._ran |= new
        self._num_ran_tokens += int(self._prepared.table.lengths[list(new)].sum())
        self._speeds[process.index].add(int(self._prepared.table.lengths[list(indices)].sum()))

    def _count_committed(self, process: Process, message: messages.Committed) -> None:
        self._dealer.committed(process.index, message.indices)
        self._committing.discard(process.index)
        if message.num_entries:
            self._entries, self._entries_at = [], None
        self._num_committed += len(message.indices)
        self._num_quarantined += len(message.indices) - message.num_samples
        self._num_bytes += message.num_bytes
        self.num_new_samples += message.num_samples
        self.num_new_tokens += message.num_tokens

    def _progress(self) -> Progress:
        forecast = self._prepared.forecast
        assert self._started is not None, "no progress before a batch was dealt"
        speed = self._num_ran_tokens / max(self._last_ran - self._started, 1e-3)
        left = forecast.num_pending_tokens - self._num_ran_tokens
        workers = tuple(map(self._worker_progress, self._group.processes))
        # what is left is run by those that still run: a dead worker's past says nothing of it
        running = sum(worker.tokens_per_second for worker in workers if worker.state == "running")
        if left and running:
            speed = running
        return Progress(
            num_samples=len(self._ran),
            num_pending=forecast.num_pending,
            num_tokens=self._num_ran_tokens,
            num_pending_tokens=forecast.num_pending_tokens,
            num_committed=self._num_committed,
            num_committed_bytes=self._num_bytes,
            tokens_per_second=speed,
            hours_left=left / speed / 3600,
            num_workers=sum(worker.state in ("running", "done") for worker in workers),
            workers=workers,
        )

    def _worker_progress(self, process: Process) -> WorkerProgress:
        if process.ended:
            state = "done" if process.popen.returncode == 0 else "died"
        else:
            state = "running" if process in self._ready else "loading"
        speed = self._speeds.get(process.index, RecentSpeed())
        return WorkerProgress(process.device.label, state, speed.num_counted, speed.per_second())
