"""Rows of a remote store on this machine's disk, never more than a given number of bytes, shared by all its processes.

One file a range of bytes: what is read again is always the same, whole samples. Training reads every sample once an
epoch in a new order, which is the worst case of a cache that evicts what was used longest ago: with room for half of
the store it would find 15 % again (c + (1 - c) ln(1 - c) for a share c), and a cache that keeps what it has, 50 %. So
what this run has used stays; only what earlier runs left is removed, the longest unused first, and when all of it is
used, nothing more is stored. A file that is damaged here is found by its samples' crc32c and fetched again.

The number of bytes stands in `usage`, under an flock. It may be too large, where two processes fetched one range at once,
or a range was dropped or not written whole; so it is counted anew when it reaches the limit, and when a process opens the
cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from dflash_train.store.files import Data, write_error

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
DEAD_SECONDS = 600.0
"""Age of a half-written file after which nobody is writing it any more."""
CLOCK_SECONDS = 0.1
"""By which a file's time may lie before the time that its writer read."""


class RangeCache:
    """Byte ranges by name (`segment/array-start-length`). Threads and processes may share a folder."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Open a cache, making its folder where it is missing; StoreError where that fails."""
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.full = limit_bytes <= 0
        """Whether this process stores no more: all of the cache is in use, or the disk is full."""
        self._began = time.time() - CLOCK_SECONDS
        if self.full:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._usage() as usage:
                usage.num_bytes = sum(size for _path, _time, size in self._entries())
        except OSError as error:
            raise write_error(folder, 0, error) from error

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> bool:
        """Fill buffer from a stored range, from offset on; False where the range is not stored whole."""
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            position = 0
            while position < len(buffer):
                num_read = os.preadv(descriptor, [buffer[position:]], offset + position)
                if num_read == 0:
                    return False
                position += num_read
            with contextlib.suppress(OSError):
                os.utime(descriptor)
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def has(self, name: str) -> bool:
        """Whether a range is stored."""
        return (self.folder / name).exists()

    def store(self, name: str, data: Data) -> bool:
        """Keep a range if there is room; False where there is none. A disk that is full is no error."""
        if self.full:
            return False
        size, path = len(data), self.folder / name
        temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(6)}")
        try:
            with self._usage() as usage:
                if path.exists():
                    return True
                if usage.num_bytes + size > self.limit_bytes:
                    usage.num_bytes = self._evict(self.limit_bytes - size)
                if usage.num_bytes + size > self.limit_bytes:
                    self.full = True
                    return False
                path.parent.mkdir(exist_ok=True)
                with temporary.open("xb") as file:  # its size counts from now on, whoever counts
                    file.truncate(size)
                usage.num_bytes += size
            with temporary.open("r+b", buffering=0) as file:
                rest = memoryview(data)
                while len(rest):
                    rest = rest[file.write(rest) :]
            with self._usage():  # a count that goes on meanwhile might see neither name
                temporary.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not self.full:
                logger.warning("No more rows are kept in %s: %s.", self.folder, error.strerror or error)
            self.full = True
            return False
        return True

    def drop(self, name: str) -> bool:
        """Forget a range; whether there was one."""
        try:
            (self.folder / name).unlink()
        except OSError:
            return False
        return True

    def _evict(self, most_bytes: int) -> int:
        """Remove what was unused since before this process began, the oldest first, until at most so many bytes are left.

        Returns how many are left, counted anew. What another process is writing stays.
        """
        entries = sorted(self._entries(), key=lambda entry: entry[1])
        num_bytes = sum(size for _path, _time, size in entries)
        for path, used_at, size in entries:
            if num_bytes <= most_bytes or used_at >= self._began:
                break
            if not path.name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    path.unlink()
                    num_bytes -= size
        return num_bytes

    def _entries(self) -> Iterator[tuple[Path, float, int]]:
        """Path, time of last use and bytes of every range; what dead processes left half-written is removed."""
        for folder in self.folder.iterdir():
            if not folder.is_dir():
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat()
                        if entry.name.startswith(TEMPORARY) and time.time() - found.st_mtime > DEAD_SECONDS:
                            Path(entry.path).unlink()
                        else:
                            yield Path(entry.path), found.st_mtime, found.st_size

    @contextlib.contextmanager
    def _usage(self) -> Iterator[_Usage]:
        """The shared count of bytes, locked while it is changed."""
        descriptor = os.open(self.folder / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            usage = _Usage(int.from_bytes(os.pread(descriptor, 8, 0), "little"))
            try:
                yield usage
            finally:
                os.pwrite(descriptor, max(0, usage.num_bytes).to_bytes(8, "little"), 0)
        finally:
            os.close(descriptor)


class _Usage:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
