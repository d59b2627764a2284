"""Writing a segment: one process streams samples into a staging folder, one rename commits them.

`features` is a flat shard (arrays.py) streamed row by row, so memory does not grow with the segment; the other arrays
are streamed too, being one plain chunk each. Speed against raw writes with fsync: docs/performance.md; starting the disk
every 16 or 64 MiB while samples come in was tried and made the commit no quicker. Segments of 2-4 GB keep a store of
30 TB at some 10,000 folders; a crash loses the open one at most.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.arrays import INNER_ROWS, array_contents, array_text, chunk_name, group_text, shard_index
from dflash_train.store.checksums import (
    CHECKSUMS_NAME,
    Checksum,
    SummedFile,
    extend_crc,
    format_checksums,
    sum_contents,
)
from dflash_train.store.encoding import Encoding
from dflash_train.store.files import Files, WritableFile, write_error
from dflash_train.store.manifest import FORMAT_VERSION

STAGING = ".staging"
SEGMENTS = "segments"
REFERENCE = "reference"
SAMPLE_COLUMNS = ("id", "group", "first_row", "length", "supervised", "crc32c")


class SegmentWriter:
    """One segment being written; open a new one after `commit`.

    attributes describes the run (data source, settings, package versions) and is stored as the segment's attribute
    `source`. Any failed write removes the staging folder and raises; nothing is committed then. parent is where it
    goes below the store: `segments`, or `reference` (reference.py).
    """

    def __init__(
        self,
        store: Path,
        encoding: Encoding,
        attributes: dict[str, Any],
        files: Files | None = None,
        parent: str = SEGMENTS,
        staging: str = STAGING,
    ) -> None:
        """parent and staging: the folders of the store that the segment goes to, and that it lies in while it is open."""
        self.store = store
        self.encoding = encoding
        self.segment_id = f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{secrets.token_hex(4)}"
        self.num_samples = 0
        self.num_tokens = 0
        self.measured: dict[str, Any] = {}
        """More attributes of the segment, set before `commit`: what was measured of its states."""
        self._attributes = attributes
        self._files = files or Files()
        self._staging = store / staging / self.segment_id
        self._final = store / parent / self.segment_id
        self._rows: dict[str, _Rows] = {}
        self._num_rows = 0
        self._samples: list[tuple[int, ...]] = []
        self._quarantined: list[dict[str, Any]] = []
        self._started: float | None = None
        self._has_staging = False
        self._finished = False

    @property
    def num_bytes(self) -> int:
        """Bytes of rows written so far."""
        return sum(rows.file.num_bytes for rows in self._rows.values())

    @property
    def age_seconds(self) -> float:
        """Seconds since the first sample, 0 before it."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    def append(
        self,
        sample_id: int,
        group: int,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        features: NDArray[Any],
        scales: NDArray[np.float32] | None = None,
    ) -> None:
        """Write one sample: token_ids int32 [T], loss_mask uint8 [T], features [T, columns] as stored, scales [T, G]."""
        with self._abandon_on_failure():
            arrays = self._check(token_ids, loss_mask, features, scales)
            if not self._rows:
                self._open()
            num_pad = -self._num_rows % self.encoding.align_tokens
            crc = 0
            for name, array in arrays.items():
                self._rows[name].skip(num_pad)
                array_crc = self._rows[name].write(array)
                crc = extend_crc(crc, array) if name != "features" else array_crc  # features come first
            first_row, length = self._num_rows + num_pad, len(token_ids)
            supervised = int(np.count_nonzero(loss_mask))
            self._samples.append((sample_id, group, first_row, length, supervised, crc))
            self._num_rows = first_row + length
            self.num_samples += 1
            self.num_tokens += length

    def quarantine(self, entry: dict[str, Any]) -> None:
        """Record a sample that could not be stored: {"id": hex or None, "row": int or None, "reason": str}."""
        assert not self._finished, "the segment is committed or abandoned"
        self._started = self._started or time.monotonic()
        self._quarantined.append(entry)

    def commit(self) -> str | None:
        """Make the segment durable and visible; return its id, or None (and leave nothing) if there is no content."""
        if self._started is None:
            self.abandon()
            return None
        with self._abandon_on_failure():
            if not self._rows:  # only quarantined samples: arrays of no rows
                self._make_staging()
                for name in row_arrays(self.encoding):
                    self._files.make_directory(self._staging / name)
            self._finish()
            self._files.make_directories(self._final.parent)  # stores of before have no folder for reference samples
            self._files.rename(self._staging, self._final)
            self._finished = True
            self._files.sync_directory(self._final.parent)
            self._files.sync_directory(self._staging.parent)
        return self.segment_id

    def abandon(self) -> None:
        """Drop everything that was appended; calling it twice, or after commit, is fine."""
        for rows in self._rows.values():
            rows.file.close()
        if not self._finished and self._has_staging:  # never another writer's of the same id
            self._files.remove_tree(self._staging)
        self._finished = True

    @contextmanager
    def _abandon_on_failure(self) -> Iterator[None]:
        assert not self._finished, "the segment is committed or abandoned"
        self._started = self._started or time.monotonic()
        try:
            yield
        except OSError as error:
            self.abandon()
            raise write_error(self._staging, self.num_bytes, error) from error
        except Exception:
            self.abandon()
            raise

    def _check(
        self,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        features: NDArray[Any],
        scales: NDArray[np.float32] | None,
    ) -> dict[str, NDArray[Any]]:
        """Return the arrays in the order of the sample's crc32c; a wrong shape or dtype is a bug of the caller."""
        encoding, length = self.encoding, len(token_ids)
        if (
            encoding.dtype_view == "bfloat16" and features.dtype == np.int16
        ):  # torch's bit view: it has no uint16 kernels
            features = features.view(np.uint16)
        arrays: dict[str, NDArray[Any]] = {"features": features}
        if encoding.num_scales:
            assert scales is not None, f"encoding {encoding.name} stores scales"
            arrays["feature_scale"] = scales
        arrays |= {"token_ids": token_ids, "loss_mask": loss_mask}
        assert length, "a sample has at least one token"
        for name, (columns, dtype) in row_arrays(encoding).items():
            shape = (length, columns) if columns else (length,)
            found = (arrays[name].shape, arrays[name].dtype)
            assert found == (shape, dtype), f"{name} is {found}, wanted {(shape, dtype)}"
            arrays[name] = np.ascontiguousarray(arrays[name])
        return arrays

    def _open(self) -> None:
        """Create the staging folder and one file for each array of rows."""
        files, staging = self._files, self._staging
        self._make_staging()
        for name, (columns, dtype) in row_arrays(self.encoding).items():
            path = staging / name / chunk_name(2 if columns else 1)
            for folder in reversed(path.relative_to(staging).parents[:-1]):
                files.make_directory(staging / folder)
            self._rows[name] = _Rows(files, path, max(1, columns) * dtype.itemsize)

    def _make_staging(self) -> None:
        self._files.make_directories(self._staging.parent)  # a copied store may have lost its empty folder
        self._files.make_directory(self._staging)
        self._has_staging = True

    def _finish(self) -> None:
        """Write what was missing until the rows were known, and fsync everything below the staging folder."""
        files, staging, num_rows = self._files, self._staging, self._num_rows
        checksums: dict[str, Checksum] = {}
        written: list[WritableFile] = []
        contents: dict[str, Any] = {"zarr.json": group_text(self._group_attributes())}
        for name, (columns, dtype) in row_arrays(self.encoding).items():
            sharded = name == "features"
            if rows := self._rows.get(name):
                if sharded:
                    rows.skip(-num_rows % INNER_ROWS)
                    rows.file.write(shard_index(num_rows, rows.row_bytes))
                written.append(rows.file)
                checksums[rows.file.path.relative_to(staging).as_posix()] = rows.file.checksum
            shape = (num_rows, columns) if columns else (num_rows,)
            dtype_view = self.encoding.dtype_view if sharded else None
            contents[f"{name}/zarr.json"] = array_text(shape, dtype, dtype_view, sharded)
        samples = np.array(self._samples, np.int64).reshape(-1, len(SAMPLE_COLUMNS))
        files.make_directory(staging / "samples")
        if len(samples):
            files.make_directory(staging / "samples" / "c")
            files.make_directory(staging / "samples" / "c" / "0")
        contents |= array_contents("samples", samples)
        checksums |= {name: sum_contents([data]) for name, data in contents.items()}
        contents[CHECKSUMS_NAME] = format_checksums(checksums)
        folders = {staging / parent for name in checksums for parent in Path(name).parents}
        with ExitStack() as opened:
            for name, data in contents.items():
                written.append(opened.enter_context(files.create(staging / name)))
                written[-1].write(data)
            files.together(
                [file.fsync for file in written] + [partial(files.sync_directory, folder) for folder in sorted(folders)]
            )
        for rows in self._rows.values():
            rows.file.close()

    def _group_attributes(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "num_rows": self._num_rows,
            "align_tokens": self.encoding.align_tokens,
            "sample_columns": list(SAMPLE_COLUMNS),
            "source": self._attributes,
            "quarantined": self._quarantined,
            **self.measured,
        }


class _Rows:
    """The file of one array, written row by row."""

    def __init__(self, files: Files, path: Path, row_bytes: int) -> None:
        self.file = SummedFile(files, path)
        self.row_bytes = row_bytes

    def write(self, array: NDArray[Any]) -> int:
        """Write rows and return their crc32c."""
        return self.file.write_summed(array.data.cast("B"))

    def skip(self, num_rows: int) -> None:
        """Write zero rows."""
        if num_rows:
            self.file.write(bytes(num_rows * self.row_bytes))


def is_row_file(name: str) -> bool:
    """Whether a segment's file holds rows of samples: it is large, and read in parts."""
    return name.split("/")[0] in ("features", "feature_scale", "token_ids", "loss_mask") and "/c/" in name


def row_arrays(encoding: Encoding) -> dict[str, tuple[int, np.dtype[Any]]]:
    """Columns (0: one axis only) and dtype of every array with one row per token, in the order of the crc32c."""
    arrays = {"features": (encoding.num_columns, encoding.storage_dtype)}
    if encoding.num_scales:
        arrays["feature_scale"] = (encoding.num_scales, np.dtype("<f4"))
    return arrays | {"token_ids": (0, np.dtype("<i4")), "loss_mask": (0, np.dtype("u1"))}
