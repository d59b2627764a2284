"""Reading past the page cache: O_DIRECT straight into the caller's rows, or through one aligned bounce buffer.

It costs 0.05-0.06 CPU seconds a GB, 0.10 through the bounce buffer, where buffered cold reads cost 0.14 and more, and
leaves the page cache to others; one thread may read slower with it, for want of read-ahead (docs/performance.md). The kernel wants offset, length and memory aligned to the disk's
sectors, 512 bytes or 4 KiB: rows that are, go straight to their place; all others are read in aligned pieces and copied.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

SECTOR_BYTES = 512
BOUNCE_ALIGN = 4096  # a page and the largest sector
BOUNCE_BYTES = 4 << 20

_local = threading.local()


class DirectFile:
    """A file opened with O_DIRECT. `usable` turns False for good where the file system refuses such reads."""

    def __init__(self, path: Path, straight: bool) -> None:
        """Open the file; straight allows reads into the caller's memory (rows of whole sectors). OSError if it fails."""
        self._descriptor = -1
        self.usable = hasattr(os, "O_DIRECT")
        self._straight = straight
        if self.usable:
            try:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.usable = False

    def read(self, buffer: memoryview, address: int, offset: int) -> int | None:
        """Read some bytes from offset on into buffer, whose memory begins at address; None: read without O_DIRECT.

        Returns how many were read, 0 at the end of the file.
        """
        whole = len(buffer) - len(buffer) % SECTOR_BYTES
        if self._straight and whole and (address | offset) % SECTOR_BYTES == 0:
            try:
                return os.preadv(self._descriptor, [buffer[:whole]], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._straight = False  # sectors of 4 KiB, or memory that the disk cannot reach
        bounce, skip = _bounce(), offset % BOUNCE_ALIGN
        wanted = min(BOUNCE_BYTES, -(-(skip + len(buffer)) // BOUNCE_ALIGN) * BOUNCE_ALIGN)
        try:
            num_read = os.preadv(self._descriptor, [bounce[:wanted]], offset - skip)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.usable = False
            return None
        if 0 < num_read <= skip:
            return None  # interrupted before what was wanted, or the file ends there
        num_copied = max(0, min(num_read - skip, len(buffer)))
        buffer[:num_copied] = bounce[skip : skip + num_copied]
        return num_copied

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _bounce() -> memoryview:
    """The bounce buffer of this thread, page aligned, made when it is first needed."""
    if not hasattr(_local, "bounce"):
        _local.bounce = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
    bounce: memoryview = _local.bounce
    return bounce
