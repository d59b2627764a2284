"""Where the processes of a run meet: a file on this machine's own disk, which no killed run leaves behind for long.

On the machine's own disk because a run folder may be on a network file system, where file locks are unreliable. Each
file lies in a folder of its own that its maker holds locked (flock on the folder, which the kernel lets go of however the
maker ends); the next start removes the folders of this user that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "dflash-rendezvous-"


@contextmanager
def rendezvous_file() -> Iterator[Path]:
    """A path in a new folder that is gone afterwards; what killed runs of this user left is removed first."""
    _remove_stale()
    folder, held = _make_folder()
    try:
        yield folder / "file"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _make_folder() -> tuple[Path, int]:
    """A new folder and the descriptor that holds it; another start may remove it before it is held, then once more."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(BlockingIOError, FileNotFoundError):
            held = _hold(folder)
            if folder.exists():
                return folder, held
            os.close(held)


def _hold(folder: Path) -> int:
    """Lock a folder of this user for as long as the descriptor is open; OSError where it is another's, or held."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_stale() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # held, or gone meanwhile
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            held = _hold(folder)
            try:
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)
