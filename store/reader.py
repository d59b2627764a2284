"""Reading a store: every sample by index, by `preadv` into the caller's arrays, each checked by its crc32c.

The table of all samples is in memory (92 bytes each); rows are read on demand, at the speed of raw `preadv` without and
0.6-0.8 of it with the check (docs/performance.md). zarr-python is the slow twin: tests compare every value with it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.arrays import read_array, read_group
from dflash_train.store.calibration import CALIBRATION, Calibration
from dflash_train.store.checksums import read_checksums, read_summed
from dflash_train.store.creation import EMBED_TOKENS, LM_HEAD, TARGET_FILES, calibration_shapes, manifest_encoding
from dflash_train.store.encoding import from_stored
from dflash_train.store.files import Files, StoreError
from dflash_train.store.index import (
    INDEX_NAME,
    MIN_SEGMENTS,
    SegmentEntry,
    is_current,
    make_entry,
    read_index,
    write_index,
)
from dflash_train.store.location import StoreLocation, StoreUrl
from dflash_train.store.manifest import FORMAT_NAME, Manifest, format_id
from dflash_train.store.opened import Segment, SegmentFiles
from dflash_train.store.opened import list_segments as list_local_segments
from dflash_train.store.remote import RemoteFiles, RemoteStore
from dflash_train.store.segment import SAMPLE_COLUMNS, SEGMENTS, row_arrays

if TYPE_CHECKING:
    import torch

Own = TypeVar("Own")
SAMPLE_DTYPE = np.dtype(
    [("segment", "i4"), ("id", "i8"), ("group", "i8"), ("first_row", "i8"), ("length", "i8"), ("supervised", "i8")]
    + [("crc32c", "u4")]
)
MAX_OPEN_SEGMENTS = 64  # four descriptors each, under the usual soft limit of 1,024


@dataclass(frozen=True)
class Sample:
    """One sample as stored: token_ids int32 [T], loss_mask uint8 [T], features [T, columns], scales float32 [T, G] or None."""

    id: int
    group: int
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    features: NDArray[Any]
    scales: NDArray[np.float32] | None


WAY_OUT = "Give the path that `dflash extract` wrote."


def open_manifest(path: StoreLocation) -> Manifest:
    """Read a store's manifest; a path that is no store, or one of a newer version, raises StoreError."""
    if isinstance(path, StoreUrl):
        return _read_manifest(RemoteStore(path).folder, path)
    if not path.is_dir():
        raise StoreError(f"{path} is {'a file' if path.exists() else 'not there'}, but a store is a folder. {WAY_OUT}")
    if not (path / "zarr.json").is_file():
        raise StoreError(f"{path} is not a store: it has no zarr.json. {WAY_OUT}")
    return _read_manifest(path, path)


def _read_manifest(folder: Path, path: StoreLocation) -> Manifest:
    """Read the manifest in a folder; path is what messages call it."""
    attributes = read_group(folder)
    if attributes.get("format") != FORMAT_NAME:
        raise StoreError(f"{path} is a zarr group but not a {FORMAT_NAME}. {WAY_OUT}")
    try:
        return Manifest.from_json(attributes)
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error


def list_segments(store: StoreLocation) -> list[str]:
    """Return the ids of the committed segments, oldest first."""
    return RemoteStore(store).list_segments() if isinstance(store, StoreUrl) else list_local_segments(store)


class StoreReader:
    """All committed samples of a store, or those of the given segments in the given order; threads may share it."""

    def __init__(
        self,
        path: StoreLocation,
        segments: Sequence[str] | None = None,
        verify: bool = True,
        direct_io: bool = False,
        files: Files | None = None,
    ) -> None:
        """Open a store; damage in its own files raises StoreError now, in rows when they are read (verify).

        Damage in a segment's small files raises now, too, or, in stores with an index (index.py), when the segment is
        first read. direct_io reads features past the page cache (direct.py). files writes the index.
        """
        self.path = path if isinstance(path, StoreUrl) else Path(path)
        self._remote = RemoteStore(path) if isinstance(path, StoreUrl) else None
        self.folder = self.path.mirror if isinstance(self.path, StoreUrl) else self.path
        self.manifest = open_manifest(self.folder) if self._remote is None else _read_manifest(self.folder, path)
        self._checksums = read_checksums(self.folder)
        read_summed(self.folder, "zarr.json", self._checksums)
        self.encoding = manifest_encoding(self.manifest)
        self.channel_scale: NDArray[np.float32] = self._calibration_array("channel_scale")
        self.segment_ids: list[str] = []
        self.samples: NDArray[Any] = np.empty(0, SAMPLE_DTYPE)
        self.num_duplicates = 0
        self._verify = verify
        self._direct_io = direct_io
        self._index_files = files
        self._entries: list[SegmentEntry] = []
        self._segments: dict[int, Segment] = {}
        self._open: OrderedDict[int, SegmentFiles | RemoteFiles] = OrderedDict()
        self._lock = threading.Lock()
        self.refresh(segments)

    def _calibration_array(self, name: str) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self._array(f"{CALIBRATION}/{name}")[0]
        shape = calibration_shapes(self.encoding)[name]
        if array.shape != shape or array.dtype != np.float32:
            raise StoreError(
                f"{self.path}/{CALIBRATION}/{name} is {array.dtype} of shape {list(array.shape)}, wanted float32 of shape "
                f"{list(shape)}. Restore it from a copy, or extract again."
            )
        return array

    def _array(self, name: str) -> tuple[NDArray[Any], str | None]:
        """An array of the store's own, with its dtype_view."""
        return self._read_own(name, lambda: read_array(self.folder, name, self._checksums))

    def _read_own(self, prefix: str, read: Callable[[], Own]) -> Own:
        """Read what lies below a folder of the store's own; a file that is damaged on this machine is fetched again."""
        if self._remote is None:
            return read()
        names = self._remote.names_below(prefix)
        self._remote.fetch(names)
        try:
            return read()
        except StoreError:
            self._remote.restore(names)
        return read()

    @cached_property
    def calibration(self) -> Calibration:
        """What encodes and decodes; the projection, where there is one, is read when this is first asked for."""
        names = list(calibration_shapes(self.encoding))[1:]
        return Calibration.from_arrays(self.channel_scale, **{name: self._calibration_array(name) for name in names})

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.samples["length"].sum())

    @property
    def num_bytes(self) -> int:
        """Bytes of all files that the checksums list: segments, calibration and frozen target."""
        own = sum(checksum.size for checksum in self._checksums.values())
        return own + sum(entry.num_bytes for entry in self._entries)

    def refresh(self, segments: Sequence[str] | None = None) -> int:
        """Add segments committed since (or those given) behind the known ones; return how many were added.

        Indices of known samples stay. Of equal ids the first is kept.
        """
        known = set(self.segment_ids)
        new = [name for name in (self._list_segments() if segments is None else segments) if name not in known]
        entries = self._read_entries(new, is_listing=segments is None)
        self._add_samples([entry.samples for entry in entries])
        self._entries += entries
        self.segment_ids += [entry.name for entry in entries]
        return len(entries)

    def drop(self, segments: Sequence[str]) -> None:
        """Let go of segments that will be removed: close their files, and forget their ids, so that a copy is no duplicate.

        Their lines stay in `samples`, with id -1.
        """
        numbers = [self.segment_ids.index(name) for name in segments]
        with self._lock:
            for number in numbers:
                self._open.pop(number, None)
                self._segments.pop(number, None)
        self.samples["id"][np.isin(self.samples["segment"], numbers)] = -1

    def _list_segments(self) -> list[str]:
        return list_local_segments(self.folder) if self._remote is None else self._remote.list_segments()

    def _read_entries(self, names: Sequence[str], is_listing: bool) -> list[SegmentEntry]:
        """Take the segments' entries from the index cache where they are current, else from the segments."""
        if self._remote is not None and not is_listing:
            self._remote.fetch_segments(names)
        cached = read_index(self.folder) if len(names) >= MIN_SEGMENTS else {}
        entries: list[SegmentEntry] = []
        num_opened = 0
        for name in names:
            entry = cached.get(name)
            if entry is None or not is_current(self.folder, entry):
                try:
                    segment = self._open_segment(name)
                except StoreError:
                    if is_listing and self._remote is None and not (self.folder / SEGMENTS / name).is_dir():
                        continue  # consumed since it was listed
                    raise
                self._segments[len(self._entries) + len(entries)] = segment
                entry, num_opened = make_entry(segment), num_opened + 1
            entries.append(entry)
        for entry in entries:
            self.manifest.check_origin(self.folder / SEGMENTS / entry.name, entry.source)
        if is_listing and len(names) >= MIN_SEGMENTS and (num_opened or len(cached) != len(names)):
            write_index(self.folder, [*self._entries, *entries], self._index_files)
        return entries

    def _open_segment(self, name: str) -> Segment:
        folder = self.folder / SEGMENTS / name
        if not folder.is_dir():
            raise StoreError(f"{self.path} has no segment {name}: it was removed, or the run began with another store.")
        try:
            return Segment(folder, self.encoding)
        except StoreError:
            if self._remote is None:
                raise
        self._remote.forget_segment(name)  # damaged on this machine, perhaps by a power cut
        self._remote.fetch_segments([name])
        return Segment(folder, self.encoding)

    def _add_samples(self, tables: list[NDArray[np.int64]]) -> None:
        """Append the samples of new segments, [N, 6] each, but for ids that are known."""
        if not tables:
            return
        rows, num_known = np.concatenate(tables), len(self.samples)
        added = np.empty(len(rows), SAMPLE_DTYPE)
        numbers = np.arange(len(self._entries), len(self._entries) + len(tables), dtype=np.int32)
        added["segment"] = np.repeat(numbers, [len(table) for table in tables])
        for column, name in enumerate(SAMPLE_COLUMNS):
            added[name] = rows[:, column]
        _, first = np.unique(np.concatenate([self.samples["id"], added["id"]]), return_index=True)
        kept = np.sort(first[first >= num_known]) - num_known
        self.num_duplicates += len(added) - len(kept)
        self.samples = np.concatenate([self.samples, added if len(kept) == len(added) else added[kept]])

    def stored_ids(self) -> set[int]:
        """Ids of all samples."""
        return set(self.samples["id"].tolist())

    def quarantined(self) -> list[dict[str, Any]]:
        """What could not be stored: {"id": hex or None, "row": int or None, "reason": str} each."""
        return [entry for segment in self._entries for entry in segment.quarantined]

    def entry(self, segment: str) -> SegmentEntry:
        """What a known segment says of itself: its table, its source, its quarantined samples."""
        return self._entries[self.segment_ids.index(segment)]

    def sources(self) -> list[dict[str, Any]]:
        """What every segment was made from, in the order of segment_ids."""
        return [entry.source for entry in self._entries]

    def read_into(
        self,
        index: int,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        features: NDArray[Any],
        scales: NDArray[np.float32] | None = None,
    ) -> None:
        """Read sample index into contiguous arrays of its length (features [T, columns], scales [T, G]); StoreError if damaged.

        features may be int16 where uint16 is stored: the bits are the same.
        """
        sample = self.samples[index]
        arrays: dict[str, NDArray[Any]] = {"features": features, "token_ids": token_ids, "loss_mask": loss_mask}
        if scales is not None:
            arrays["feature_scale"] = scales
        files = self._files(int(sample["segment"]))
        crc = self._read_rows(files, sample, arrays)
        if crc is not None and crc != sample["crc32c"] and files.forget(int(sample["first_row"]), len(token_ids)):
            crc = self._read_rows(files, sample, arrays)
        if crc is not None and crc != sample["crc32c"]:
            raise StoreError(
                f"Sample {format_id(int(sample['id']))} in segment {files.segment.folder.name} of {self.path} is damaged: "
                f"crc32c {crc:08x}, wanted {int(sample['crc32c']):08x}. Remove that segment folder and extract again."
            )

    def _read_rows(self, files: SegmentFiles | RemoteFiles, sample: Any, arrays: dict[str, NDArray[Any]]) -> int | None:
        """Read a sample's rows of every array; return their crc32c, None where nothing is checked."""
        crc = 0 if self._verify else None
        for name in row_arrays(self.encoding):
            assert len(arrays[name]) == sample["length"], f"{name} has {len(arrays[name])} rows for {sample['length']}"
            found = files.read_rows(name, int(sample["first_row"]), arrays[name], crc)
            crc = found if self._verify else None
        return crc

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Begin to fetch samples that will be read next, side by side; nothing to do for a local store."""
        for index in indices if self._remote is not None else ():
            sample = self.samples[index]
            self._files(int(sample["segment"])).read_ahead(int(sample["first_row"]), int(sample["length"]))

    def read(self, index: int) -> Sample:
        """Read sample index into new arrays."""
        sample = self.samples[index]
        arrays = {
            name: np.empty((int(sample["length"]), columns) if columns else int(sample["length"]), dtype)
            for name, (columns, dtype) in row_arrays(self.encoding).items()
        }
        scales = arrays.get("feature_scale")
        self.read_into(index, arrays["token_ids"], arrays["loss_mask"], arrays["features"], scales)
        identity, group = int(sample["id"]), int(sample["group"])
        return Sample(identity, group, arrays["token_ids"], arrays["loss_mask"], arrays["features"], scales)

    def _files(self, number: int) -> SegmentFiles | RemoteFiles:
        """Open files of a segment, the least recently used closed when the last reader lets go of them."""
        with self._lock:
            files = self._open.pop(number, None) or self._open_files(number)
            self._open[number] = files
            if len(self._open) > MAX_OPEN_SEGMENTS:
                self._open.popitem(last=False)
        return files

    def _open_files(self, number: int) -> SegmentFiles | RemoteFiles:
        segment = self._segments.get(number)
        if segment is None:  # its table came from the index
            segment = self._open_segment(self.segment_ids[number])
            if not np.array_equal(segment.samples, self._entries[number].samples):
                raise StoreError(
                    f"{segment.folder} has other samples than {self.folder / INDEX_NAME} says: it was replaced while open, "
                    f"or the index is wrong. Remove {self.folder / INDEX_NAME} and run this again."
                )
            self._segments[number] = segment
        files = RemoteFiles(segment, self._remote) if self._remote else SegmentFiles(segment, self._direct_io)
        files.check()
        return files

    def frozen_embed_tokens(self) -> torch.Tensor:
        """Return the target's embedding [V, H] in its stored dtype, on the CPU."""
        return from_stored(*self._array(EMBED_TOKENS))

    def frozen_lm_head(self) -> torch.Tensor:
        """Return the target's head [V, H]: the embedding where they are tied."""
        name = EMBED_TOKENS if self.manifest.tied_embeddings else LM_HEAD
        return from_stored(*self._array(name))

    def target_config(self) -> dict[str, Any]:
        """Return the target's config.json."""
        name = f"{TARGET_FILES}/config.json"
        text = self._read_own(TARGET_FILES, lambda: read_summed(self.folder, name, self._checksums))
        config: dict[str, Any] = json.loads(text)
        return config

    def tokenizer_path(self) -> Path:
        """Return the folder with the target's config.json and tokenizer files, for AutoTokenizer; StoreError if damaged."""
        names = [name for name in self._checksums if name.startswith(f"{TARGET_FILES}/")]
        self._read_own(TARGET_FILES, lambda: [read_summed(self.folder, name, self._checksums) for name in names])
        return self.folder / TARGET_FILES
