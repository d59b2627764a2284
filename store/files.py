"""The only door to durable bytes: create, write, fsync, rename, and directories that appear whole or not at all.

Everything that must survive a power cut goes through `Files`, one method a system call, so that a test can stop the
work after any call, drop what was not fsynced, and look at what is left. A POSIX rename is the commit: before it
nothing is there, after it and an fsync of the parent everything is. The price is one fsync a file and a directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from dflash_train.errors import InputError
from dflash_train.units import format_bytes

Data = bytes | bytearray | memoryview


class StoreError(InputError):
    """Something on disk that the user has to settle: damaged, full, in use, or made for something else."""


class Files:
    """The system calls that make bytes durable; tests override single methods to count calls or to fail."""

    def open(self, path: Path) -> int:
        """Create a new file for writing and return its descriptor; an existing path raises FileExistsError."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some leading bytes of data and return how many."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """Make a file's contents durable (not its name: see sync_directory)."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls that wait for the disk at the same time; return when all have ended, or raise the first error.

        Every fsync waits for a flush of the disk (4 ms on a virtual one), and flushes that are asked for at once are one.
        """
        with ThreadPoolExecutor(max(1, len(calls)), thread_name_prefix="fsync") as pool:
            results = [pool.submit(call) for call in calls]
        for result in results:
            result.result()

    def make_directory(self, path: Path) -> None:
        """Create one directory; its parent must exist."""
        path.mkdir()

    def sync_directory(self, path: Path) -> None:
        """Make a directory's entries durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, destination: Path) -> None:
        """Rename a file or directory; a destination directory that holds something raises OSError."""
        source.rename(destination)

    def remove_tree(self, path: Path) -> None:
        """Remove a file, or a directory with everything in it; a path that is gone already is fine."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def create(self, path: Path) -> WritableFile:
        """Create a new file for writing (O_EXCL)."""
        return WritableFile(self, path)

    def write_file(self, path: Path, data: Data | Iterable[Data]) -> None:
        """Create a file, write it from one buffer or several, fsync and close it."""
        with self.create(path) as file:
            for part in (data,) if isinstance(data, Data) else data:
                file.write(part)
            file.fsync()

    def make_directories(self, path: Path) -> None:
        """Create a directory and its missing ancestors, each made durable in its parent."""
        if path.is_dir():
            return
        self.make_directories(path.parent)
        self.make_directory(path)
        self.sync_directory(path.parent)


class WritableFile:
    """A new file, written front to back; a context manager that closes, without fsync, on the way out."""

    def __init__(self, files: Files, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._files = files
        self._descriptor: int | None = None
        try:
            self._descriptor = files.open(path)
        except FileExistsError:
            raise
        except OSError as error:
            raise write_error(path, 0, error) from error

    def write(self, data: Data) -> None:
        """Write all of data; a full disk or another failure raises StoreError naming path and bytes."""
        assert self._descriptor is not None, f"{self.path} is closed"
        rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(rest):
            try:
                written = self._files.write(self._descriptor, rest)
            except OSError as error:
                raise write_error(self.path, self.num_bytes + len(rest), error) from error
            self.num_bytes += written
            rest = rest[written:]

    def fsync(self) -> None:
        """Make what was written durable; delayed allocation may find the disk full only here."""
        assert self._descriptor is not None, f"{self.path} is closed"
        try:
            self._files.fsync(self._descriptor)
        except OSError as error:
            raise write_error(self.path, self.num_bytes, error) from error

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self._files.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def write_error(path: Path, num_bytes: int, error: OSError) -> StoreError:
    """Put a failed write into one sentence: what, how many bytes, why, and the way out."""
    place = path.parent
    while not place.exists() and place != place.parent:
        place = place.parent
    free = format_bytes(shutil.disk_usage(place).free)
    reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return StoreError(
        f"Writing {path} failed at {num_bytes:,} bytes ({format_bytes(num_bytes)}): {reason}, with {free} free there. "
        f"Make room or choose another place, then run the same command again."
    )


def take_lock(descriptor: int, path: Path) -> str | None:
    """Lock the open file at path for this process, whose id is then in it; the kernel drops the lock with the process.

    Returns None, or the id that is in the file («unknown» where there is none) if another process has it. Raises
    StoreError where the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"{path} cannot be locked: {reason}. Choose a folder on a file system that has locks."
        ) from error
    os.ftruncate(descriptor, 0)
    with suppress(OSError):  # a full disk: the lock holds without a name in it
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return None


def replace_file(path: Path, text: str, files: Files) -> None:
    """Write a small file whole and durably, in place of an older one or of none."""
    temporary = path.with_name(f".tmp-{path.stem}")
    files.remove_tree(temporary)
    files.write_file(temporary, text.encode())
    files.rename(temporary, path)
    files.sync_directory(path.parent)


def write_directory(
    final: Path, contents: Mapping[str, Data | Iterable[Data]], files: Files | None = None, empty: Iterable[str] = ()
) -> None:
    """Write a directory tree that appears under its final name complete and durable, or not at all.

    contents maps relative posix paths to one buffer or several; empty names directories that get no file. All of it is
    written as `.tmp-<name>-<random>` beside final, fsynced, and renamed. Raises FileExistsError if final exists.
    """
    files = files or Files()
    if os.path.lexists(final):
        raise FileExistsError(f"{final} exists already.")
    files.make_directories(final.parent)
    temporary = final.parent / f"{_temporary_prefix(final)}{secrets.token_hex(4)}"
    names = [PurePosixPath(name) for name in contents]
    folders = {parent for name in names for parent in name.parents} | {PurePosixPath(".")}
    for folder in map(PurePosixPath, empty):
        folders |= {folder, *folder.parents}
    try:
        for folder in sorted(folders, key=lambda folder: (len(folder.parts), folder)):
            files.make_directory(temporary / folder)
        for name, data in contents.items():
            files.write_file(temporary / name, data)
        for folder in sorted(folders, key=lambda folder: (-len(folder.parts), folder)):
            files.sync_directory(temporary / folder)
        try:
            files.rename(temporary, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FileExistsError(f"{final} exists already: another process was faster.") from error
            raise
        files.sync_directory(final.parent)
    except Exception as error:
        files.remove_tree(temporary)
        if isinstance(error, OSError) and not isinstance(error, FileExistsError):
            raise write_error(final, 0, error) from error
        raise


def list_temporaries(final: Path) -> list[Path]:
    """List what dead runs of write_directory(final) left behind; the owner of final may remove_tree them."""
    return sorted(final.parent.glob(f"{_temporary_prefix(final)}*")) if final.parent.is_dir() else []


def _temporary_prefix(final: Path) -> str:
    return f".tmp-{final.name}-"
