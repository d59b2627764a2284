"""Folders and the disks below them: which are for caches, writable, how fast; nothing is left behind."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

from dflash_train.errors import InputError

REMOTE_FILE_SYSTEMS = (
    *("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "gluster", "afs", "9p"),
    "fuse.",  # sshfs, s3fs, rclone …
)
PROBE_BYTES = 64 * 2**20
PROBE_SECONDS = 4.0


def user_cache_folder() -> Path:
    """The folder for what can be made again: $XDG_CACHE_HOME/dflash-train, by default ~/.cache/dflash-train."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dflash-train"


def remote_stores_folder(given: Path | None) -> Path:
    """The folder for what is kept here of stores at URLs: --cache-folder, else one in the user's cache folder.

    Raises InputError where the given one is a file.
    """
    if given is not None and given.exists() and not given.is_dir():
        raise InputError(f"--cache-folder is {given}, a file, but must be a folder; name another path.")
    return given or user_cache_folder() / "stores"


def disk_speed(folder: Path) -> tuple[float, float]:
    """Bytes a second written (and synced) and read back, over at most 64 MiB and some seconds; leaves no file.

    The file has no name, so that even a kill leaves none. Pages are dropped before they are read, where the kernel obeys.
    """
    block = os.urandom(4 * 2**20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        descriptor, written, start = file.fileno(), 0, time.perf_counter()
        while written < PROBE_BYTES and time.perf_counter() - start < PROBE_SECONDS:
            written += os.pwrite(descriptor, block, written)
            os.fdatasync(descriptor)
        write = written / (time.perf_counter() - start)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        count, start = 0, time.perf_counter()
        while count < written and time.perf_counter() - start < PROBE_SECONDS:
            count += len(os.pread(descriptor, len(block), count))
        return write, count / (time.perf_counter() - start)


def existing_parent(folder: Path) -> Path:
    """The folder itself, or the nearest folder above it that is there."""
    try:
        folder = folder.resolve()
    except (OSError, RuntimeError):  # links in a circle: what opens it says so
        folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if _is_folder(path)), Path("/"))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name too long, or a parent that may not be entered
        return False


def why_unwritable(place: Path) -> str | None:
    """Why no file can be made in a folder; None where one can."""
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        return f"{place} cannot be written: {error.strerror}"
    return None


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Type of the file system that holds an absolute path, such as ext4 or nfs4."""
    best, kind = -1, "unknown file system"
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split(" ")[4])
        if path.is_relative_to(point) and len(point) >= best:  # of equal points the later mount covers the earlier
            best, kind = len(point), after.split(" ")[0]
    return kind


def is_remote(kind: str) -> bool:
    """Whether a file system of this type is reached over a network."""
    return kind.startswith(REMOTE_FILE_SYSTEMS) and kind not in ("fuse.fuse-overlayfs", "fuse.lxcfs")
