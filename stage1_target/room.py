"""What an extract tells a trainer that follows it, and when it must wait for one: the plan, and --max-store-size.

The limit counts all that is in the store, and what runs or waits to be committed at its stored size, reference samples and
empty rows included; a batch is dealt only where it fits, so the store never exceeds the limit. Whoever removes segments makes room: the trainer
with `--consume`, or a user who moves them away. Copies of held-out samples, which the trainer leaves there for good, do
not count: a store full of them would never have room again.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_train.stage1_target.events import Note, Report
from dflash_train.stage1_target.schedule import Batch
from dflash_train.store.arrays import INNER_ROWS, read_group
from dflash_train.store.consumed import CONSUMED, CONSUMER, COPY_SOURCE, TRASH, read_consumed
from dflash_train.store.encoding import Encoding
from dflash_train.store.files import StoreError
from dflash_train.store.location import StoreLocation, StoreUrl, beside
from dflash_train.store.opened import list_segments
from dflash_train.store.plan import BEAT_SECONDS, Plan, new_run, write_plan
from dflash_train.store.reader import StoreReader
from dflash_train.store.reference import reference_encoding
from dflash_train.store.segment import REFERENCE, SAMPLE_COLUMNS, SEGMENTS, STAGING
from dflash_train.units import format_bytes

LOOK_SECONDS = 1.0
TABLE_BYTES = 8 * len(SAMPLE_COLUMNS)
"""Of a sample's line in the table of its segment."""
METADATA_BYTES = 10_000
"""Of a segment, about; nothing beside 2 GB, but tests have segments of 20 kB."""
ROOM_SHARE = 0.05
"""Of the limit, what must be free before a pause ends: no pause for every batch."""


class PlanKeeper:
    """Writes the store's plan: at once where the store is there, again while the extract lives, and when it ends."""

    def __init__(self, store: StoreLocation, reader: StoreReader | None, pending_lengths: NDArray[np.integer]) -> None:
        """pending_lengths: tokens of each sample that is to be stored. A store at a URL has no plan."""
        self._store = None if isinstance(store, StoreUrl) else store
        longest = int(reader.samples["length"].max(initial=0)) if reader is not None else 0
        num_samples, num_tokens = (len(reader.samples), reader.num_tokens) if reader is not None else (0, 0)
        if reader is not None:
            consumed, stored = read_consumed(store), reader.samples
            again = np.isin(stored["id"], np.fromiter(consumed.ids, np.int64))  # copies of held-out samples
            num_samples += len(consumed.ids) - int(again.sum())
            num_tokens += consumed.num_tokens - int(stored["length"][again].sum())
        self._samples = num_samples + len(pending_lengths)
        self._tokens = num_tokens + int(pending_lengths.sum())
        self._longest = max(longest, int(pending_lengths.max(initial=0)))
        self._run, self._beat, self._written = new_run(), 0, 0.0

    def silent(self) -> PlanKeeper:
        """One that writes nothing: for ranks beside the first."""
        other = copy(self)
        other._store = None
        return other

    def beat(self, state: str = "running") -> None:
        """Say that the extract lives, every few seconds, or how it has ended; a store that is not there yet is no error."""
        now = time.monotonic()
        if self._store is None:
            return
        if (state == "running" and now - self._written < BEAT_SECONDS) or not (self._store / "zarr.json").exists():
            return
        self._written, self._beat = now, self._beat + 1
        plan = Plan(
            samples=self._samples,
            tokens=self._tokens,
            longest=self._longest,
            state=state,
            beat=self._beat,
            run=self._run,
        )
        write_plan(self._store, plan)


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredSizes:
    """What samples of a table will take in the store: exactly, but for metadata, which is at most what is said here."""

    encoding: Encoding
    lengths: NDArray[np.integer]
    """Tokens of each sample."""
    ids: NDArray[np.integer]
    reference_one_in: int
    """Samples whose id this divides are kept in bfloat16, too; 0: none (reference.one_in)."""
    segment_bytes: int
    """Size at which a segment is committed."""

    def samples(self, indices: Sequence[int] | NDArray[np.integer]) -> int:
        """Bytes of samples: their rows, empty rows before some of them, their lines of the tables, their reference rows."""
        chosen = np.asarray(indices, np.int64)
        size = self._rows(self.encoding, self.lengths[chosen])
        if self.reference_one_in:
            kept = chosen[self.ids[chosen] % self.reference_one_in == 0]
            encoding = reference_encoding(self.encoding)
            size += self._rows(encoding, self.lengths[kept]) + len(kept) * _end_bytes(encoding)
        return size

    def with_segments(self, sample_bytes: int, num_open: int) -> int:
        """Bytes of samples in so many open segments, or in more where they are full."""
        return sample_bytes + (num_open + sample_bytes // self.segment_bytes) * _end_bytes(self.encoding)

    @staticmethod
    def _rows(encoding: Encoding, lengths: NDArray[np.integer]) -> int:
        align = encoding.align_tokens
        num_rows = int((-(-lengths.astype(np.int64) // align) * align).sum())
        return num_rows * encoding.bytes_per_token + num_rows // 2 + len(lengths) * TABLE_BYTES


def _end_bytes(encoding: Encoding) -> int:
    """What each segment takes beside its samples: metadata, and its features fill their last chunk."""
    return METADATA_BYTES + INNER_ROWS * encoding.num_columns * encoding.storage_dtype.itemsize


class StoreSize:
    """Bytes of a store as the limit counts them; what is written once is measured once."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._fixed: int | None = None
        self._sizes: dict[Path, int] = {}
        self.num_bytes = 0
        """When it was last measured."""
        self.lasting = 0
        """Of them, what stays when all segments are gone."""

    def measure(self) -> int:
        """Bytes of the store now; 0 where it is not there yet."""
        store = self._store
        if not (store / "zarr.json").exists():
            return 0
        if self._fixed is None:
            apart = (SEGMENTS, REFERENCE, CONSUMED, CONSUMER, STAGING)
            self._fixed = sum(_size_of(path) for path in store.iterdir() if path.name not in apart)
        segments = [store / SEGMENTS / name for name in list_segments(store)]
        records = [path for name in (REFERENCE, CONSUMED) for path in _entries(store / name)]
        known = self._sizes
        self._sizes = {path: known[path] if path in known else _counted_size(path) for path in segments}
        num_bytes = sum(self._sizes.values())
        self._sizes |= {path: known[path] if path in known else _size_of(path) for path in records}
        self.lasting = self._fixed + sum(self._sizes.values()) - num_bytes
        self.num_bytes = self.lasting + num_bytes + sum(map(_size_of, _entries(store / TRASH)))
        return self.num_bytes


class Room:
    """Whether a batch fits under --max-store-size; says when it waits and when it goes on."""

    def __init__(
        self,
        store: StoreLocation,
        limit: int | None,
        report: Report,
        reserve: Callable[[int], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """reserve tells other ranks how many bytes are being written here, and returns what all of them write."""
        self._store, self._limit = beside(store), limit
        self._report, self._clock, self._reserve = report, clock, reserve or (lambda num_bytes: num_bytes)
        self._size = StoreSize(self._store)
        self._stored, self._looked, self._open = 0, -LOOK_SECONDS, 0
        self.is_full = False

    def fits(self, batch_bytes: int, open_bytes: int) -> bool:
        """Whether a batch fits beside what is stored and what is run but not committed, all with their metadata."""
        if self._limit is None:
            return True
        committed, self._open = open_bytes < self._open, open_bytes
        if self.is_full and not committed and self._clock() - self._looked < LOOK_SECONDS:
            return False
        # first what is written, then what is stored: what is committed meanwhile counts twice, never not at all
        written = self._reserve(open_bytes + batch_bytes)
        self._stored, self._looked = self._size.measure(), self._clock()
        limit = self._limit * (1 - ROOM_SHARE) if self.is_full else self._limit
        is_full = self._stored + written > limit
        if is_full:
            self._reserve(open_bytes)
            refuse_limit(self._limit, self._size.lasting, batch_bytes)
        if is_full != self.is_full:
            self.is_full = is_full
            self._report(Note(self._describe(written - batch_bytes)))
        return not self.is_full

    def close(self) -> None:
        """Nothing is being written here any more."""
        if self._limit is not None:
            self._reserve(0)

    def _describe(self, open_bytes: int) -> str:
        written = f" and {format_bytes(open_bytes)} are being written" if open_bytes else ""
        held = f"the store holds {format_bytes(self._stored)}{written}, of --max-store-size {format_bytes(self._limit or 0)}"
        if not self.is_full:
            return f"there is room again: {held}; going on"
        return (
            f"paused: {held}. It goes on when `dflash train-drafter --store {self._store} --follow --consume N` or you "
            "remove segments; or stop this, and run it again with more"
        )


def check_limit(limit: int, size: StoreSize, frozen_bytes: int, sizes: StoredSizes, batches: Sequence[Batch]) -> None:
    """Raise StoreError where it is known before anything is loaded that the limit cannot do.

    size is that of the store, measured; frozen_bytes what embedding, head, tokenizer and calibration of a new one will take.
    """
    if not batches:
        return
    each = [sizes.samples(batch.indices) for batch in batches]
    frozen_bytes += METADATA_BYTES if frozen_bytes else 0
    if size.num_bytes + frozen_bytes + sizes.with_segments(sum(each), 1) > limit:  # else there is no pause
        refuse_limit(limit, size.lasting + frozen_bytes, sizes.with_segments(max(each), 1))


def refuse_limit(limit: int, lasting_bytes: int, batch_bytes: int) -> None:
    """Raise StoreError where a pause could never end, whatever is removed: one batch would not fit."""
    needed = math.ceil((lasting_bytes + batch_bytes) / (1 - ROOM_SHARE))
    if limit >= needed:
        return
    found, wanted = format_bytes(limit), format_bytes(needed)
    if found == wanted:
        found, wanted = f"{limit:,} bytes", f"{needed:,} bytes"
    raise StoreError(
        f"--max-store-size is {found}, but at least {wanted} are needed: {format_bytes(lasting_bytes)} for what stays "
        f"(embedding, head, calibration, reference samples), {format_bytes(batch_bytes)} for one batch, and "
        f"{ROOM_SHARE:.0%} that are free when a pause ends. Give more, or lower --batch-tokens."
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # none, or going meanwhile
        return []


def _counted_size(segment: Path) -> int:
    """Bytes of a segment as the limit counts them: none of copies of held-out samples."""
    try:
        source = read_group(segment).get("source")
    except StoreError:  # damaged, or going meanwhile
        source = None
    is_copy = isinstance(source, dict) and source.get("copied") == COPY_SOURCE
    return 0 if is_copy else _size_of(segment)


def _size_of(path: Path) -> int:
    """Bytes of a file or of all files in a folder; 0 for one that goes meanwhile."""
    total = 0
    walked = [(root, name) for root, _folders, names in os.walk(path) for name in names]
    for one in [Path(root) / name for root, name in walked] or [path]:
        with contextlib.suppress(OSError):
            total += one.stat().st_size if one.is_file() else 0
    return total
