"""The writer threads of a worker: numpy and file writes only, so that the main thread alone uses torch.

Each thread has a segment of its own, takes the next waiting batch, appends it, and commits its segment when that is full
or old: while one waits for the disk's fsync, another writes, and a copy into the page cache, which the kernel does one at
a time for each file, runs in both. So that they do not commit at once, the first segment of each is cut short by its
share. What a kill can lose is bounded as with one thread: no open segment is older than `segment_seconds`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.stage1_target import messages
from dflash_train.stage1_target.extract_config import ExtractConfig
from dflash_train.stage1_target.forward import EncodedBatch, Unfit
from dflash_train.stage1_target.overlap import Overlap
from dflash_train.stage1_target.samples import SampleTable
from dflash_train.store.encoding import Encoding, unsound_state
from dflash_train.store.manifest import format_id
from dflash_train.store.reference import ReferenceWriter
from dflash_train.store.segment import SegmentWriter
from dflash_train.store.upload import open_segment_writer

logger = logging.getLogger(__name__)

WAITING_BATCHES = 2
POLL_SECONDS = 0.5
GPU_THREADS = 2
"""Writer threads of a worker on a GPU; one keeps up with a CPU."""

DRIFT = 1.5
"""How far above the first segment's error a segment's may be before the log warns; it moves by some percent otherwise."""


def num_writers(torch_device: str) -> int:
    """Writer threads of a worker on this device."""
    return 1 if torch_device == "cpu" else GPU_THREADS


Item = EncodedBatch | Unfit | messages.Quarantine


@dataclass
class _Open:
    """The open segment of one thread, and what of the parent's work it holds."""

    share: float
    """Of a full segment's size and age, at which this one is committed."""
    commits: int = 0
    """Of the commits that were asked for, how many this thread has seen to."""
    segment: SegmentWriter | None = None
    indices: list[int] = field(default_factory=list)
    num_entries: int = 0
    errors: list[NDArray[np.float32]] = field(default_factory=list)
    """Relative mean square error of each batch, [L]."""


class StoreWriter:
    """Appends encoded batches to open segments and commits them when they are full or old."""

    def __init__(
        self,
        config: ExtractConfig,
        encoding: Encoding,
        table: SampleTable,
        attributes: dict[str, Any],
        report: Callable[[messages.Committed], None],
        num_threads: int = 1,
        overlap: Overlap | None = None,
        reference: ReferenceWriter | None = None,
    ) -> None:
        self._config = config
        self._reference = reference
        self._encoding = encoding
        self._table = table
        self._attributes = attributes
        self._report = report
        self._overlap = overlap or Overlap()
        self._changed = threading.Condition()
        self._waiting: deque[Item] = deque()
        self._commits = 0  # asked for
        self._closed = False
        self._error: BaseException | None = None
        self._first_error: float | None = None
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(str(number), _Open((number + 1) / num_threads)),
                name=f"writer-{number}",
                daemon=True,
            )
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, item: Item | messages.Commit) -> None:
        """Hand over a batch whose copy is complete, or a command; waits while two are waiting. Raises what writing raised.

        A Commit commits everything that was put before it.
        """
        with self._changed, self._overlap.waiting("writer"):
            while len(self._waiting) >= WAITING_BATCHES and self._error is None:
                self._changed.wait()
            self.check()
            if isinstance(item, messages.Commit):
                self._commits += 1
            else:
                self._waiting.append(item)
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what a thread raised."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write what waits, commit the open segments and end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.check()

    def _run(self, name: str, opened: _Open) -> None:
        try:
            while True:
                item, commit, end = self._next(opened)
                if item is not None:
                    self._take(name, opened, item)
                if commit or end or self._is_due(opened):
                    self._commit(name, opened)
                if end:
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            with self._changed:
                self._error = self._error or error
                while self._waiting:  # never leave the main thread waiting for a buffer
                    _release(self._waiting.popleft())
                self._changed.notify_all()
            if opened.segment is not None:
                opened.segment.abandon()

    def _next(self, opened: _Open) -> tuple[Item | None, bool, bool]:
        """(what to write, whether to commit, whether to end): what waits goes first. Nothing at all after a while."""
        with self._changed:
            for attempt in range(2):
                if self._error is not None:
                    raise self._error
                if self._waiting:
                    item = self._waiting.popleft()
                    self._changed.notify_all()
                    return item, False, False
                if opened.commits < self._commits or self._closed:
                    opened.commits = self._commits
                    return None, True, self._closed
                if attempt == 0:
                    self._changed.wait(POLL_SECONDS)
        return None, False, False

    def _take(self, name: str, opened: _Open, item: Item) -> None:
        if isinstance(item, EncodedBatch):
            try:
                self._append(name, opened, item)
            finally:
                item.release()
        elif isinstance(item, Unfit):
            reason = f"{item.length} tokens do not fit into the device's memory, even alone"
            self._quarantine(opened, item.index, reason)
        else:
            for entry in item.entries:
                self._open(opened).quarantine(entry)
            opened.num_entries += len(item.entries)

    def _open(self, opened: _Open) -> SegmentWriter:
        if opened.segment is None:
            opened.segment = open_segment_writer(self._config.store, self._encoding, self._attributes)
        return opened.segment

    def _append(self, name: str, opened: _Open, batch: EncodedBatch) -> None:
        features = batch.features.numpy()
        scales = None if batch.scales is None else batch.scales.numpy()
        sound = batch.sound.numpy()
        if batch.errors is not None:
            opened.errors.append(batch.errors.numpy().copy())
        start = 0
        for index, length in zip(batch.indices, batch.lengths, strict=True):
            rows = slice(start, start + length)
            start += length
            if sound[rows].all():
                sample_id, group, token_ids, loss_mask = self._table.sample(index)
                sample_scales = None if scales is None else scales[rows]
                with self._overlap.busy(f"writer {name}"):
                    self._open(opened).append(sample_id, group, token_ids, loss_mask, features[rows], sample_scales)
                    if self._reference is not None and index in batch.reference:
                        states = batch.reference[index].numpy()
                        self._reference.append(sample_id, group, token_ids, loss_mask, states, thread=name)
                opened.indices.append(index)
                self._overlap.wrote(name, length * self._encoding.bytes_per_token)
            else:
                position, layer = (int(number) for number in np.argwhere(~sound[rows])[0])
                reason = unsound_state(self._layer_id(layer), position, length)
                self._quarantine(opened, index, reason)
            if self._is_due(opened):
                self._commit(name, opened)

    def _quarantine(self, opened: _Open, index: int, reason: str) -> None:
        sample_id = format_id(int(self._table.ids[index]))
        self._open(opened).quarantine({"id": sample_id, "row": None, "reason": reason})
        opened.indices.append(index)
        logger.warning("Sample %s: %s.", sample_id, reason)

    def _layer_id(self, position: int) -> int:
        ids = self._config.target_layer_ids
        assert ids is not None, "the parent fills in the layers"
        return ids[position]

    def _is_due(self, opened: _Open) -> bool:
        segment, share = opened.segment, opened.share
        return segment is not None and (
            segment.num_bytes >= share * self._config.segment_bytes
            or segment.age_seconds >= share * self._config.segment_seconds
        )

    def _commit(self, name: str, opened: _Open) -> None:
        segment, indices, num_entries = opened.segment, tuple(opened.indices), opened.num_entries
        if segment is None:
            return
        num_tokens, num_bytes = segment.num_tokens, segment.num_bytes
        error = self._record_error(segment, opened.errors)
        with self._overlap.busy(f"commit {name}"):
            segment_id = segment.commit()
            if self._reference is not None:  # afterwards: what a kill between the two loses is no training data
                self._reference.commit(name)
        opened.segment, opened.indices, opened.num_entries, opened.share = None, [], 0, 1.0
        opened.errors = []
        if segment_id is not None:
            logger.info(
                "Committed segment %s: %d samples, %d tokens%s.", segment_id, segment.num_samples, num_tokens, error
            )
            self._report(
                messages.Committed(segment_id, indices, segment.num_samples, num_tokens, num_bytes, num_entries)
            )

    def _record_error(self, segment: SegmentWriter, errors: list[NDArray[np.float32]]) -> str:
        """Record the segment's relative error of what is stored, for each tapped layer, and say what it is over all.

        Warns where it is far above that of the first segment: the data are unlike those of the calibration then.
        """
        if not errors:
            return ""
        layers = np.sqrt(np.mean(errors, axis=0))
        error = float(np.sqrt(np.mean(layers**2)))
        segment.measured["relative_error"] = [round(float(layer), 6) for layer in layers]
        if self._first_error is None:
            self._first_error = error
        elif error > DRIFT * self._first_error:
            logger.warning(
                "The error of what is stored has risen from %.2f%% to %.2f%%: these samples are unlike those that the "
                "calibration was measured on. A store of their own, or another encoding, would keep them better.",
                100 * self._first_error,
                100 * error,
            )
        return f", relative error {error:.2%}"


def _release(item: Item) -> None:
    if isinstance(item, EncodedBatch):
        item.release()
