"""A committed segment as the reader sees it: its table in memory, its rows by `preadv` straight into the caller's arrays.

Small files are checked against checksums.json when the segment is opened, the shard index when its files are; what is
not as this package writes it raises StoreError, so a torn or rewritten segment is never read.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.arrays import INNER_ROWS, ArrayInfo, read_array, read_array_info, read_group, shard_index
from dflash_train.store.checksums import CACHED_BYTES, extend_crc, read_checksums
from dflash_train.store.direct import DirectFile
from dflash_train.store.encoding import ALIGN_BYTES, Encoding
from dflash_train.store.files import StoreError
from dflash_train.store.segment import SAMPLE_COLUMNS, row_arrays

COUNTS = ("num_samples", "num_tokens", "num_rows")


class Segment:
    """One committed segment: counts, quarantined samples, and the table `samples` [N, 6]; it holds no open file."""

    def __init__(self, folder: Path, encoding: Encoding) -> None:
        """Read and check everything but the rows; damage raises StoreError."""
        self.folder = folder
        self.encoding = encoding
        self.checksums = read_checksums(folder)
        attributes = read_group(folder, checksums=self.checksums)
        counts = [attributes.get(name, "") for name in COUNTS]
        quarantined, columns = attributes.get("quarantined"), attributes.get("sample_columns")
        if not all(isinstance(count, int) for count in counts) or not isinstance(quarantined, list):
            raise StoreError(f"{folder / 'zarr.json'} is damaged: it lacks counts or the quarantined samples.")
        self.num_samples, self.num_tokens, self.num_rows = map(int, counts)
        self.quarantined: list[dict[str, Any]] = quarantined
        self.source: dict[str, Any] = attributes.get("source", {})
        if columns != list(SAMPLE_COLUMNS):
            raise StoreError(f"{folder} has sample columns {columns}, not {list(SAMPLE_COLUMNS)}.")
        self.samples, _ = read_array(folder, "samples", self.checksums)
        self.arrays = {name: self._array(name) for name in row_arrays(encoding)}
        self._check_samples()

    def _array(self, name: str) -> ArrayInfo:
        info = read_array_info(self.folder, name, self.checksums)
        columns, dtype = row_arrays(self.encoding)[name]
        shape = (self.num_rows, columns) if columns else (self.num_rows,)
        dtype_view = self.encoding.dtype_view if name == "features" else None
        wanted = (shape, dtype, dtype_view, name == "features")
        found = (info.shape, info.dtype, info.dtype_view, info.sharded)
        if found != wanted:
            raise StoreError(f"{self.folder / name} is {found} (shape, dtype, view, sharded), wanted {wanted}.")
        return info

    def _check_samples(self) -> None:
        samples, align_tokens = self.samples, self.encoding.align_tokens
        if samples.shape != (self.num_samples, len(SAMPLE_COLUMNS)) or samples.dtype != np.int64:
            raise StoreError(f"{self.folder / 'samples'} has shape {samples.shape} for {self.num_samples} samples.")
        first, length, supervised = samples[:, 2], samples[:, 3], samples[:, 4]
        ends = np.concatenate([[0], first + length])
        whole = (length > 0).all() and (first >= ends[:-1]).all() and (first % align_tokens == 0).all()
        if not whole or ends[-1] != self.num_rows or int(length.sum()) != self.num_tokens:
            raise StoreError(f"{self.folder / 'samples'} does not fit the counts in {self.folder / 'zarr.json'}.")
        if (supervised < 0).any() or (supervised > length).any():
            raise StoreError(f"{self.folder / 'samples'} has more supervised tokens than tokens.")

    def path(self, name: str) -> Path:
        """Path of the file with an array's rows."""
        return self.folder / name / self.arrays[name].chunk_name


class SegmentFiles:
    """The open row files of a segment; they close when the last user lets go of the object. Threads may share it."""

    def __init__(self, segment: Segment, direct_io: bool = False) -> None:
        """Open the files; a missing one raises StoreError. Call `check` before reading samples.

        direct_io reads `features` past the page cache where the file system can; the other arrays are small.
        """
        self.segment = segment
        self._descriptors: dict[str, int] = {}
        self._direct: DirectFile | None = None
        for name in segment.arrays if segment.num_rows else ():  # no rows, no chunk
            path = segment.path(name)
            try:
                self._descriptors[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if direct_io and name == "features":
                    self._direct = DirectFile(path, straight=segment.arrays[name].row_bytes % ALIGN_BYTES == 0)
            except OSError as error:
                raise StoreError(f"{path} could not be opened: {error.strerror}.") from error

    def check(self) -> None:
        """Raise StoreError unless every file has its size and the shard is flat."""
        for name, descriptor in self._descriptors.items():
            path, info = self.segment.path(name), self.segment.arrays[name]
            index = shard_index(info.shape[0], info.row_bytes) if info.sharded else b""
            stored_rows = math.ceil(info.shape[0] / INNER_ROWS) * INNER_ROWS if info.sharded else info.shape[0]
            data_bytes, num_bytes = stored_rows * info.row_bytes, os.fstat(descriptor).st_size
            if num_bytes != data_bytes + len(index):
                raise StoreError(f"{path} has {num_bytes:,} bytes, wanted {data_bytes + len(index):,}; it is damaged.")
            if index and os.pread(descriptor, len(index), data_bytes) != index:
                raise StoreError(
                    f"{path} is no flat shard (its index must list chunk i at offset i x size): it is damaged, or "
                    f"another program rewrote it. Extract it again."
                )

    def read_rows(self, name: str, first_row: int, rows: NDArray[Any], crc: int | None = None) -> int:
        """Read rows from first_row on into a contiguous array of the stored dtype; short reads are continued.

        Returns crc, the crc32c so far, continued over the rows; None counts none and returns 0.
        """
        row_bytes = self.segment.arrays[name].row_bytes
        assert rows.flags.c_contiguous and rows.nbytes == len(rows) * row_bytes, f"{name} rows of {rows.shape}"
        buffer, address, offset = rows.data.cast("B"), rows.__array_interface__["data"][0], first_row * row_bytes
        direct = self._direct if name == "features" else None
        position, end = 0, rows.nbytes
        while position < end:
            is_direct = direct is not None and direct.usable
            stop = end if crc is None or is_direct else min(end, position + CACHED_BYTES)
            piece = buffer[position:stop]
            try:
                num_read = direct.read(piece, address + position, offset + position) if direct and is_direct else None
                if num_read is None:
                    num_read = os.preadv(self._descriptors[name], [piece], offset + position)
            except OSError as error:
                raise StoreError(f"{self.segment.path(name)} could not be read: {error.strerror}.") from error
            if num_read == 0:
                raise StoreError(
                    f"{self.segment.path(name)} ends at byte {offset + position:,}: it was cut short while open."
                )
            if crc is not None:
                crc = extend_crc(crc, piece[:num_read])
            position += num_read
        return crc or 0

    def read_ahead(self, first_row: int, num_rows: int) -> None:
        """Nothing: the kernel reads ahead."""

    def forget(self, first_row: int, num_rows: int) -> bool:
        """Whether reading a sample again may help: never here, since no copy is between the caller and the disk."""
        return False

    def new_rows(self, name: str, first_row: int, num_rows: int) -> NDArray[Any]:
        """Read rows into a new array."""
        info = self.segment.arrays[name]
        rows = np.empty((num_rows, *info.shape[1:]), info.dtype)
        self.read_rows(name, first_row, rows)
        return rows

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def list_segments(store: Path) -> list[str]:
    """Return the ids of the committed segments, oldest first."""
    try:
        names = [entry.name for entry in os.scandir(store / "segments") if entry.is_dir()]
    except OSError as error:
        raise StoreError(f"{store / 'segments'} could not be listed: {error.strerror}.") from error
    return sorted(names)
