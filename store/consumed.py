"""Consuming a store: segments that were trained on often enough make room for others, and nothing is stored twice.

    <store>/consumed/<segment id>.json   ids, quarantined samples and counts of a removed segment
    <store>/.consumer/                   the consumer's lock, and segments on their way in and out

A record is durable before its segment goes, and the segment leaves `segments/` by one rename. So at every moment a sample
is in a segment, in a record, or in both; `finish_removals` repeats what a kill interrupted. Extracts count recorded ids
as done. A record takes 20 bytes a sample.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.checksums import seal, unseal
from dflash_train.store.files import Files, StoreError, take_lock, write_error
from dflash_train.store.location import StoreLocation, StoreUrl
from dflash_train.store.manifest import format_id
from dflash_train.store.opened import list_segments
from dflash_train.store.segment import SEGMENTS

CONSUMED = "consumed"
CONSUMER = ".consumer"
CONSUMER_STAGING = f"{CONSUMER}/staging"
"""Where a consumer writes segments; an extract empties its own staging folder, never this."""
TRASH = f"{CONSUMER}/trash"
COPY_SOURCE = "held-out samples of consumed segments"
"""What a segment's `source` calls `copied` where a consumer wrote it for evaluations: it stays, however full the store."""


@dataclass(kw_only=True)
class Consumed:
    """All that was removed from a store."""

    segments: set[str] = field(default_factory=set)
    ids: set[int] = field(default_factory=set)
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0


@contextlib.contextmanager
def consumer_lock(store: Path) -> Iterator[None]:
    """Be the one who removes segments of a store; raises StoreError naming the holder if there is another.

    What a killed consumer left half-done is done before the body begins.
    """
    folder = store / CONSUMER
    try:
        Files().make_directories(folder)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise write_error(folder / "lock", 0, error) from error
    try:
        if (holder := take_lock(descriptor, folder / "lock")) is not None:
            raise StoreError(f"{store} is consumed by process {holder} already. Stop it, or train without --consume.")
        finish_removals(store)
        yield
    finally:
        os.close(descriptor)


def remove_segments(
    store: Path, tables: Mapping[str, tuple[NDArray[np.int64], Sequence[dict[str, Any]]]], files: Files | None = None
) -> None:
    """Record segments as consumed, then remove them; call it under `consumer_lock`.

    tables: by segment, its `samples` [N, 6] and its quarantined samples.
    """
    files = files or Files()
    files.make_directories(store / CONSUMED)
    for name, (samples, quarantined) in tables.items():
        body = {
            "ids": [format_id(identity) for identity in samples[:, 0].tolist()],
            "num_tokens": int(samples[:, 3].sum()),
            "quarantined": list(quarantined),
        }
        temporary, final = store / CONSUMED / f".tmp-{name}", store / CONSUMED / f"{name}.json"
        files.remove_tree(temporary)
        files.write_file(temporary, seal("consumed", body))
        files.rename(temporary, final)
    files.sync_directory(store / CONSUMED)
    _remove(store, tables, files)


def finish_removals(store: Path, files: Files | None = None) -> int:
    """Remove what a killed consumer recorded and did not remove, and its leftovers; return how many segments."""
    files = files or Files()
    for folder in (store / CONSUMER_STAGING, store / TRASH):
        for path in folder.iterdir() if folder.is_dir() else ():
            files.remove_tree(path)
    recorded = consumed_segments(store)
    left = [name for name in list_segments(store) if name in recorded]
    _remove(store, left, files)
    return len(left)


def _remove(store: Path, names: Iterable[str], files: Files) -> None:
    trash = store / TRASH
    files.make_directories(trash)
    gone = []
    for name in names:
        files.rename(store / SEGMENTS / name, trash / name)
        gone.append(trash / name)
    files.sync_directory(store / SEGMENTS)
    for path in gone:
        files.remove_tree(path)


def consumed_segments(store: Path) -> set[str]:
    """Ids of the segments that have a record."""
    folder = store / CONSUMED
    if not folder.is_dir():
        return set()
    return {path.stem for path in folder.iterdir() if path.suffix == ".json"}


def read_consumed(store: StoreLocation) -> Consumed:
    """All records of a store; a damaged one raises StoreError.

    Read it after the segments: a segment that goes in between is then in its record.
    """
    if isinstance(store, StoreUrl):
        return Consumed()  # only local stores are consumed
    consumed = Consumed(segments=consumed_segments(store))
    for name in sorted(consumed.segments):
        ids, body = read_record(store / CONSUMED / f"{name}.json")
        consumed.ids |= ids
        consumed.quarantined += body["quarantined"]
        consumed.num_tokens += body["num_tokens"]
    return consumed


def read_record(path: Path) -> tuple[set[int], dict[str, Any]]:
    """The ids of one record, and all of it; a file that was changed in any byte raises StoreError."""
    try:
        body = unseal("consumed", path.read_bytes())
        return {int(identity, 16) for identity in body["ids"]}, {**body, "num_tokens": int(body["num_tokens"])}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{path} is damaged ({error}): it lists samples that were trained on and removed. Restore it from a copy, "
            "or remove it to have those samples stored again."
        ) from error
