"""What an extract tells a trainer that follows it, and when it must wait for one: the plan, and --max-store-size.

The limit counts what is in `segments/` and the frozen tables, and what runs or waits to be committed at its stored size;
a batch is dealt only where it fits, so the store never exceeds the limit. Whoever removes segments makes room: the trainer
with `--consume`, or a user who moves them away. Copies of held-out samples, which the trainer leaves there for good, do
not count: a store full of them would never have room again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_train.stage1_target.events import Note, Report
from dflash_train.store.arrays import read_group
from dflash_train.store.consumed import COPY_SOURCE, read_consumed
from dflash_train.store.files import StoreError
from dflash_train.store.location import StoreLocation, StoreUrl, beside
from dflash_train.store.opened import list_segments
from dflash_train.store.plan import BEAT_SECONDS, Plan, new_run, write_plan
from dflash_train.store.reader import StoreReader
from dflash_train.store.segment import SEGMENTS
from dflash_train.units import format_bytes

LOOK_SECONDS = 1.0
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
            consumed = read_consumed(store)
            num_samples += len(consumed.ids - reader.stored_ids())
            num_tokens += consumed.num_tokens
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


class Room:
    """Whether a batch fits under --max-store-size; says when it waits and when it goes on."""

    def __init__(
        self,
        store: StoreLocation,
        limit: int | None,
        bytes_per_token: int,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if limit is not None and isinstance(store, StoreUrl):
            raise StoreError(f"--max-store-size is for local folders, and {store} is a URL. Leave it out.")
        self._store, self._limit, self._bytes_per_token = beside(store), limit, bytes_per_token
        self._report, self._clock = report, clock
        self._sizes: dict[str, int] = {}
        self._fixed: int | None = None
        self._stored, self._looked = 0, -LOOK_SECONDS
        self.is_full = False

    def fits(self, num_tokens: int, num_open_tokens: int) -> bool:
        """Whether a batch fits beside what is stored and what is run but not committed; num_…: tokens."""
        if self._limit is None:
            return True
        if not self.is_full or self._clock() - self._looked >= LOOK_SECONDS:
            self._stored, self._looked = self._measure(), self._clock()
        open_bytes, batch_bytes = (count * self._bytes_per_token for count in (num_open_tokens, num_tokens))
        limit = self._limit * (1 - ROOM_SHARE) if self.is_full else self._limit
        is_full = self._stored + open_bytes + batch_bytes + METADATA_BYTES > limit
        if is_full and (self._fixed or 0) + batch_bytes + METADATA_BYTES > self._limit * (1 - ROOM_SHARE):
            raise StoreError(
                f"--max-store-size is {format_bytes(self._limit)}, but embedding, head, calibration and one batch take "
                f"{format_bytes((self._fixed or 0) + batch_bytes)}. Give more, or lower --batch-tokens."
            )
        if is_full != self.is_full:
            self.is_full = is_full
            self._report(Note(self._describe(open_bytes)))
        return not self.is_full

    def _describe(self, open_bytes: int) -> str:
        written = f" and {format_bytes(open_bytes)} are being written" if open_bytes else ""
        held = f"the store holds {format_bytes(self._stored)}{written}, of --max-store-size {format_bytes(self._limit or 0)}"
        if not self.is_full:
            return f"there is room again: {held}; going on"
        return (
            f"paused: {held}. It goes on when `dflash train-drafter --store {self._store} --follow --consume N` or you "
            "remove segments; or stop this, and run it again with more"
        )

    def _measure(self) -> int:
        """Bytes of the store; a segment is measured once."""
        if self._fixed is None:
            if not (self._store / "zarr.json").exists():
                return 0
            parts = [path for path in self._store.iterdir() if path.name in ("calibration", "frozen", "zarr.json")]
            self._fixed = sum(map(_size_of, parts))
        names = list_segments(self._store)
        sizes, folder = self._sizes, self._store / SEGMENTS
        self._sizes = {name: sizes[name] if name in sizes else _counted_size(folder / name) for name in names}
        return self._fixed + sum(self._sizes.values())


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
    for one in [path, *path.rglob("*")]:
        try:
            total += one.stat().st_size if one.is_file() else 0
        except OSError:
            continue
    return total
