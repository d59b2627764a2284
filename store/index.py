"""The index cache: what opening a large store needs of its segments, in one file that may be lost at any time.

Opening a segment costs seven small files and 0.3 ms, so 10,000 of them would take seconds at every start. `.index` in
the store repeats their tables and attributes. It is never trusted over the segments: an entry counts only while the
segment's checksums.json, which guards all its files, is the one that it was made from; rows are read only after the
segment itself was opened and found to have the same table. All of it takes 0.4 to 0.7 s for
10,000 segments and 1,000,000 samples (docs/performance.md).
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.checksums import CHECKSUMS_NAME, Checksum, extend_crc, format_checksums, sum_contents
from dflash_train.store.files import Files, StoreError
from dflash_train.store.manifest import canonical_json
from dflash_train.store.opened import Segment
from dflash_train.store.segment import SAMPLE_COLUMNS, SEGMENTS, STAGING

INDEX_NAME = ".index"
MIN_SEGMENTS = 128
"""Stores below this open in under 50 ms without, and then every small file is checked at the start."""
MAGIC = b"DFLASHI1"
HEADER_START = len(MAGIC) + 8
CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """What a reader keeps of a segment whether it was opened or found in the index."""

    name: str
    stamp: Checksum
    """Of its checksums.json, which holds the checksums of all its other files."""
    num_bytes: int
    """Of all files that checksums.json lists."""
    source: dict[str, Any]
    quarantined: list[dict[str, Any]]
    samples: NDArray[np.int64]
    """[N, 6], `SAMPLE_COLUMNS`."""


def make_entry(segment: Segment) -> SegmentEntry:
    """Return the entry of an opened segment."""
    return SegmentEntry(
        name=segment.folder.name,
        stamp=sum_contents([format_checksums(segment.checksums)]),
        num_bytes=sum(checksum.size for checksum in segment.checksums.values()),
        source=segment.source,
        quarantined=segment.quarantined,
        samples=segment.samples,
    )


def is_current(store: Path, entry: SegmentEntry) -> bool:
    """Whether a segment is still there and still the one that its entry was made from."""
    try:
        with open(f"{store}/{SEGMENTS}/{entry.name}/{CHECKSUMS_NAME}", "rb", buffering=0) as file:  # noqa: PTH123 - speed
            return sum_contents([file.read()]) == entry.stamp
    except OSError:
        return False


def read_index(store: Path) -> dict[str, SegmentEntry]:
    """Return the entries of a store's index by segment; empty where there is none or where it is damaged."""
    try:
        return check_index(store)
    except ValueError:
        return {}


def check_index(store: Path) -> dict[str, SegmentEntry]:
    """The same; one that is damaged, or cannot be read, raises ValueError."""
    try:
        return {entry.name: entry for entry in _parse(np.fromfile(store / INDEX_NAME, np.uint8))}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the cache of the table of samples is damaged ({error}); remove it") from error


def _parse(data: NDArray[np.uint8]) -> list[SegmentEntry]:
    body, crc = data[:-CRC_BYTES], data[-CRC_BYTES:].tobytes()
    if body[: len(MAGIC)].tobytes() != MAGIC or extend_crc(0, body) != int.from_bytes(crc, "little"):
        raise ValueError("it is damaged, or of another version")
    table_start = HEADER_START + int.from_bytes(body[len(MAGIC) : HEADER_START].tobytes(), "little")
    header = json.loads(body[HEADER_START:table_start].tobytes())
    table = body[table_start:].view("<i8").reshape(-1, len(SAMPLE_COLUMNS))
    entries: list[SegmentEntry] = []
    first = 0
    for name, size, crc32c, num_bytes, source, quarantined, num_samples in header["segments"]:
        samples = table[first : first + num_samples]
        entries.append(
            SegmentEntry(name, Checksum(size, crc32c), num_bytes, header["sources"][source], quarantined, samples)
        )
        first += num_samples
    if first != len(table):
        raise ValueError("its table does not fit its header")
    return entries


def write_index(store: Path, entries: Sequence[SegmentEntry], files: Files | None = None) -> bool:
    """Replace a store's index in one rename; False where that fails, as on a disk that is full or read-only."""
    files, temporary = files or Files(), store / STAGING / f"index-{secrets.token_hex(4)}"
    texts = [canonical_json(entry.source) for entry in entries]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    lines = [
        [entry.name, *_stamp(entry), entry.num_bytes, numbers[text], entry.quarantined, len(entry.samples)]
        for entry, text in zip(entries, texts, strict=True)
    ]
    header = canonical_json({"segments": lines, "sources": [json.loads(text) for text in numbers]})
    header += b" " * (-len(header) % 8)
    tables = [np.ascontiguousarray(entry.samples, "<i8").data.cast("B") for entry in entries if len(entry.samples)]
    head = MAGIC + len(header).to_bytes(8, "little") + header
    crc = extend_crc(0, head)
    for table in tables:
        crc = extend_crc(crc, table)
    try:
        files.make_directories(temporary.parent)
        files.write_file(temporary, [head, b"".join(tables), crc.to_bytes(CRC_BYTES, "little")])
        files.rename(temporary, store / INDEX_NAME)
        files.sync_directory(store)
    except (OSError, StoreError):
        with contextlib.suppress(OSError):
            files.remove_tree(temporary)
        return False
    return True


def _stamp(entry: SegmentEntry) -> tuple[int, int]:
    return entry.stamp.size, entry.stamp.crc32c
