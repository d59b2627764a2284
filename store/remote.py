"""Reading a store in an object store: its small files mirrored on this machine, its rows by range and a bounded cache.

The mirror is a folder like a local store without the row files, so that everything but rows is read by the code for
local stores. A segment is committed when its group's zarr.json is there; it never changes, so its small files are
fetched once, each checked against checksums.json. Rows come by range requests of whole samples, each checked by its
crc32c like local ones, and stay in a RangeCache; `read_ahead` fetches samples that a row will need side by side, since
a request waits 10-100 ms whatever its size. Opening a store fetches some eight small objects a new segment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dflash_train.store.arrays import stored_bytes
from dflash_train.store.cache import RangeCache
from dflash_train.store.checksums import CHECKSUMS_NAME, Checksum, check_sum, extend_crc, parse_checksums, sum_file
from dflash_train.store.files import StoreError, write_error
from dflash_train.store.location import StoreUrl
from dflash_train.store.objects import PARALLEL_CALLS, MissingBucket, MissingObject, Objects
from dflash_train.store.opened import Segment
from dflash_train.store.segment import SEGMENTS, is_row_file

WHOLE_BYTES = 16 << 20
"""Files of rows up to this size, but for features, are fetched whole: a request for a sample's part takes as long."""
WAY_OUT = "Give the URL that `dflash extract` wrote to."
AHEAD_BYTES = 2 << 30
"""Most bytes of samples that were fetched ahead and not read yet."""


class RemoteStore:
    """A store in an object store, for reading. Threads may share it."""

    def __init__(self, location: StoreUrl) -> None:
        """Connect and bring the mirror up to date; what is no store raises StoreError."""
        self.location = location
        self.folder = location.mirror
        self.objects = Objects(location)
        self._checksums: dict[str, Checksum] = {}
        self._refresh_root()
        self.rows = RangeCache(location.row_cache, location.cache_bytes)
        self.ahead = ReadAhead()

    def fetch(self, names: Iterable[str]) -> None:
        """Bring files of the store's own, such as an array of frozen/, into the mirror; StoreError if damaged."""
        with self._locked():
            for name in names:
                self._fetch_file("", name, self._checksums)

    def restore(self, names: Iterable[str]) -> None:
        """Fetch those of the store's own files again that are damaged on this machine, perhaps by a power cut."""
        with self._locked():
            for name in names:
                path = self.folder / name
                with contextlib.suppress(StoreError):  # it cannot be read
                    if sum_file(path, lambda _bytes: None) == self._checksums[name]:
                        continue
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise write_error(path, 0, error) from error
                self._fetch_file("", name, self._checksums)

    def names_below(self, prefix: str) -> list[str]:
        """Names of the store's own files below a folder, as checksums.json lists them."""
        return [name for name in self._checksums if name.startswith(f"{prefix}/")]

    def list_segments(self) -> list[str]:
        """Ids of the committed segments, ascending; their small files are in the mirror then."""
        names = self.objects.folders(SEGMENTS)
        committed = self.fetch_segments(names)
        with self._locked():
            for entry in self._mirrored():
                if entry.name not in committed:
                    shutil.rmtree(entry, ignore_errors=True)
        return [name for name in names if name in committed]

    def fetch_segments(self, names: Sequence[str]) -> set[str]:
        """Bring the small files of segments into the mirror; returns which of them are committed."""
        with self._locked():
            known = {entry.name for entry in self._mirrored()}
            new = [name for name in names if name not in known]
            found = self.objects.together(self._fetch_segment, new)
            return (known & set(names)) | {name for name, committed in zip(new, found, strict=True) if committed}

    def forget_segment(self, name: str) -> None:
        """Drop a segment's small files, to fetch them again."""
        with self._locked():
            shutil.rmtree(self.folder / SEGMENTS / name, ignore_errors=True)

    def _mirrored(self) -> list[Path]:
        folder = self.folder / SEGMENTS
        return [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]

    def _fetch_segment(self, name: str) -> bool:
        """Mirror one segment whole or not at all; False where it is not committed."""
        prefix, final = f"{SEGMENTS}/{name}", self.folder / SEGMENTS / name
        try:
            self.objects.read(f"{prefix}/zarr.json")
        except MissingObject:
            return False
        checksums = self._parse(f"{prefix}/{CHECKSUMS_NAME}", text := self.objects.read(f"{prefix}/{CHECKSUMS_NAME}"))
        temporary = final.with_name(f".tmp-{name}-{secrets.token_hex(4)}")
        try:
            for file in checksums:
                if not is_row_file(file):
                    self._fetch_file(f"{prefix}/", file, checksums, temporary)
            _install(temporary / CHECKSUMS_NAME, text)
            if not final.exists():
                temporary.rename(final)
        except OSError as error:
            raise write_error(final, 0, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return True

    def _refresh_root(self) -> None:
        """Fetch the root's zarr.json and checksums.json; a mirror of another store is removed."""
        url = self.location
        try:
            manifest = self.objects.read("zarr.json")
        except MissingBucket:
            raise
        except MissingObject as error:
            if self.objects.sizes():
                raise StoreError(f"{url} is not a store: it has no zarr.json. {WAY_OUT}") from error
            raise MissingObject(f"{url} is not there, or has no zarr.json. {WAY_OUT}") from error
        text = self.objects.read(CHECKSUMS_NAME)
        self._checksums = self._parse(CHECKSUMS_NAME, text)
        with self._locked():
            known = self.folder / CHECKSUMS_NAME
            if known.exists() and known.read_bytes() != text:
                shutil.rmtree(self.folder)
            (self.folder / SEGMENTS).mkdir(parents=True, exist_ok=True)
            for name, data in {"zarr.json": manifest, CHECKSUMS_NAME: text}.items():
                _install(self.folder / name, data)

    def _fetch_file(
        self, prefix: str, name: str, checksums: Mapping[str, Checksum], folder: Path | None = None
    ) -> None:
        """Bring one file into a folder (the mirror), unless it is there with its size."""
        folder, wanted = folder or self.folder, checksums.get(name)
        path = folder / name
        if wanted is None:
            raise StoreError(f"{self.objects.url(prefix + name)} is not listed in {CHECKSUMS_NAME}.")
        if path.exists() and path.stat().st_size == wanted.size:
            return
        temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.objects.download(prefix + name, temporary, wanted.size)
            found = sum_file(temporary, lambda _bytes: None)
            check_sum(self.objects.url(prefix.rstrip("/")), name, found, checksums)
            temporary.rename(path)
        except OSError as error:
            raise write_error(path, 0, error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _parse(self, name: str, text: bytes) -> dict[str, Checksum]:
        return parse_checksums(text, self.objects.url(name))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process at a time change the mirror."""
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder.with_name("mirror.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise write_error(self.folder, 0, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _install(path: Path, data: bytes) -> None:
    """Replace a small file of the mirror."""
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise write_error(path, len(data), error) from error


class ReadAhead:
    """Samples that are being fetched before they are read."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(PARALLEL_CALLS, thread_name_prefix="read-ahead")
        self._lock = threading.Lock()
        self._pieces: dict[tuple[str, int], tuple[Future[bytes], int]] = {}
        self._num_bytes = 0

    def start(self, files: RemoteFiles, array: str, start: int, length: int) -> None:
        """Begin to fetch a range, unless that has begun or much waits to be read already."""
        key = (files.range_name(array, start, length), start)
        with self._lock:
            if key in self._pieces or self._num_bytes + length > AHEAD_BYTES:
                return
            self._num_bytes += length
            self._pieces[key] = (self._pool.submit(files.fetch, array, start, length), length)

    def take(self, name: str, start: int) -> bytes | None:
        """What was fetched ahead; None where that had not begun. Raises what fetching raised."""
        with self._lock:
            piece = self._pieces.pop((name, start), None)
            if piece is None:
                return None
            self._num_bytes -= piece[1]
        return piece[0].result()


class RemoteFiles:
    """The row files of a remote segment, with the methods of opened.SegmentFiles. Threads may share it."""

    def __init__(self, segment: Segment, remote: RemoteStore) -> None:
        self.segment = segment
        self._remote = remote
        self._prefix = f"{SEGMENTS}/{segment.folder.name}"
        self._whole = {name: threading.Lock() for name in segment.arrays}

    def check(self) -> None:
        """Raise StoreError unless every file has its size, as far as checksums.json says it; nothing is fetched."""
        for name, info in self.segment.arrays.items() if self.segment.num_rows else ():
            wanted = self.segment.checksums.get(self._file(name))
            if wanted is None or wanted.size != stored_bytes(info):
                raise StoreError(f"{self._url(name)} has not the size that its shape asks for; it is damaged.")

    def read_rows(self, name: str, first_row: int, rows: NDArray[Any], crc: int | None = None) -> int:
        """Read rows from first_row on into a contiguous array; as SegmentFiles.read_rows."""
        row_bytes = self.segment.arrays[name].row_bytes
        assert rows.flags.c_contiguous and rows.nbytes == len(rows) * row_bytes, f"{name} rows of {rows.shape}"
        buffer, start = rows.data.cast("B"), first_row * row_bytes
        data = self._remote.ahead.take(self.range_name(name, start, len(buffer)), start)
        if data is None and not self._read_cached(name, start, buffer):
            data = self.fetch(name, start, len(buffer))
        if data is not None:
            buffer[:] = data
        return 0 if crc is None else extend_crc(crc, buffer)

    def read_ahead(self, first_row: int, num_rows: int) -> None:
        """Begin to fetch a sample's rows that are not in the cache."""
        for name, info in self.segment.arrays.items():
            start, length = first_row * info.row_bytes, num_rows * info.row_bytes
            if not self._remote.rows.has(self.range_name(name, start, length)):
                self._remote.ahead.start(self, name, start, length)

    def fetch(self, name: str, start: int, length: int) -> bytes:
        """Fetch a range and keep it in the cache; of a small file, all of it."""
        rows, cached = self._remote.rows, self.range_name(name, start, length)
        if self._is_whole(name):
            with self._whole[name]:  # the others wait for the first and find it
                found = bytearray(length)
                if rows.read_into(cached, memoryview(found), start):
                    return bytes(found)
                if not rows.full:
                    whole = self._read_range(name, 0, self._size(name))
                    rows.store(cached, whole)
                    return whole[start : start + length]
            return self._read_range(name, start, length)
        data = self._read_range(name, start, length)
        rows.store(cached, data)
        return data

    def forget(self, first_row: int, num_rows: int) -> bool:
        """Drop what the cache has of a sample; whether that was anything, so that reading again may help."""
        names = [
            self.range_name(name, first_row * info.row_bytes, num_rows * info.row_bytes)
            for name, info in self.segment.arrays.items()
        ]
        return sum(self._remote.rows.drop(name) for name in names) > 0  # all of them

    def range_name(self, name: str, start: int, length: int) -> str:
        """What the cache calls a range: that of the whole file where the file is small."""
        if self._is_whole(name):
            start, length = 0, self._size(name)
        return f"{self.segment.folder.name}/{name}-{start}-{length}"

    def _read_cached(self, name: str, start: int, buffer: memoryview) -> bool:
        offset = start if self._is_whole(name) else 0
        return self._remote.rows.read_into(self.range_name(name, start, len(buffer)), buffer, offset)

    def _read_range(self, name: str, start: int, length: int) -> bytes:
        return self._remote.objects.read_range(f"{self._prefix}/{self._file(name)}", start, length)

    def _is_whole(self, name: str) -> bool:
        return name != "features" and self._size(name) <= WHOLE_BYTES

    def _size(self, name: str) -> int:
        return stored_bytes(self.segment.arrays[name])

    def _file(self, name: str) -> str:
        return f"{name}/{self.segment.arrays[name].chunk_name}"

    def _url(self, name: str) -> str:
        return self._remote.objects.url(f"{self._prefix}/{self._file(name)}")
