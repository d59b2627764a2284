"""The writer thread of a worker: numpy and file writes only, so that the main thread alone uses torch."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_train.stage1_target import messages
from dflash_train.stage1_target.extract_config import ExtractConfig
from dflash_train.stage1_target.forward import EncodedBatch
from dflash_train.stage1_target.samples import SampleTable
from dflash_train.store.encoding import Encoding
from dflash_train.store.manifest import format_id
from dflash_train.store.segment import SegmentWriter

logger = logging.getLogger(__name__)

WAITING_BATCHES = 2
POLL_SECONDS = 0.5


class StoreWriter:
    """The writer thread: appends encoded batches to the open segment and commits it when it is full or old."""

    def __init__(
        self,
        config: ExtractConfig,
        encoding: Encoding,
        table: SampleTable,
        attributes: dict[str, Any],
        report: Callable[[messages.Committed], None],
    ) -> None:
        self._config = config
        self._encoding = encoding
        self._table = table
        self._attributes = attributes
        self._report = report
        self._queue: queue.Queue[EncodedBatch | messages.Quarantine | messages.Commit | None] = queue.Queue(
            WAITING_BATCHES
        )
        self._segment: SegmentWriter | None = None
        self._indices: list[int] = []
        self._num_entries = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, item: EncodedBatch | messages.Quarantine | messages.Commit) -> None:
        """Hand over a batch whose copy is complete, or a command; waits while two are waiting. Raises what writing raised."""
        self.check()
        self._queue.put(item)

    def check(self) -> None:
        """Raise what the thread raised."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write what waits, commit the open segment and end the thread."""
        self.check()
        self._queue.put(None)
        self._thread.join()
        self.check()

    def _run(self) -> None:
        try:
            while True:
                try:
                    item = self._queue.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    self._commit_if_due()
                    continue
                if isinstance(item, EncodedBatch):
                    self._append(item)
                elif isinstance(item, messages.Quarantine):
                    for entry in item.entries:
                        self._open().quarantine(entry)
                    self._num_entries += len(item.entries)
                else:
                    self._commit()
                    if item is None:
                        return
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._error = error
            while self._queue.get() is not None:  # never leave the main thread waiting
                pass

    def _open(self) -> SegmentWriter:
        if self._segment is None:
            self._segment = SegmentWriter(self._config.store, self._encoding, self._attributes)
        return self._segment

    def _append(self, batch: EncodedBatch) -> None:
        features = batch.features.numpy()
        scales = None if batch.scales is None else batch.scales.numpy()
        finite = batch.finite.numpy()
        start = 0
        for index, length in zip(batch.indices, batch.lengths, strict=True):
            rows = slice(start, start + length)
            start += length
            sample_id, group, token_ids, loss_mask = self._table.sample(index)
            segment = self._open()
            if finite[rows].all():
                segment.append(
                    sample_id, group, token_ids, loss_mask, features[rows], None if scales is None else scales[rows]
                )
            else:
                position, layer = (int(number) for number in np.argwhere(~finite[rows])[0])
                layer_id = self._layer_id(layer)
                reason = f"hidden state of layer {layer_id} is not finite at token {position} of {length}"
                segment.quarantine({"id": format_id(sample_id), "row": None, "reason": reason})
                logger.warning("Sample %s: %s.", format_id(sample_id), reason)
            self._indices.append(index)
            self._commit_if_due()

    def _layer_id(self, position: int) -> int:
        ids = self._config.target_layer_ids
        assert ids is not None, "the parent fills in the layers"
        return ids[position]

    def _commit_if_due(self) -> None:
        segment = self._segment
        if segment is not None and (
            segment.num_bytes >= self._config.segment_bytes or segment.age_seconds >= self._config.segment_seconds
        ):
            self._commit()

    def _commit(self) -> None:
        segment, indices, num_entries = self._segment, tuple(self._indices), self._num_entries
        if segment is None:
            return
        num_tokens, num_bytes = segment.num_tokens, segment.num_bytes
        segment_id = segment.commit()
        self._segment, self._indices, self._num_entries = None, [], 0
        if segment_id is not None:
            logger.info("Committed segment %s: %d samples, %d tokens.", segment_id, segment.num_samples, num_tokens)
            self._report(
                messages.Committed(segment_id, indices, segment.num_samples, num_tokens, num_bytes, num_entries)
            )
