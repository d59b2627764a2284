"""Whatever else prints while a display is up: caught at the file descriptors and given back line by line.

Warnings, progress bars of libraries and C code write to descriptors 1 and 2, each in the middle of a drawn frame or of
a JSON line. Both are pointed at a pipe that one thread reads; the true standard error is kept aside. What a process
writes just before it is killed from within (abort in C code) is lost in the pipe, therefore plain output is not
captured, and a fatal signal's Python stack goes to the true standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

_BAR = re.compile(r"\d+%\|")


class CapturedOutput:
    """As a context manager: `take` gets each foreign line, and `stderr` is the true standard error."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._saved: list[tuple[int, int]] = []

    @staticmethod
    def possible() -> bool:
        """Whether sys.stdout and sys.stderr are descriptors 1 and 2 (under a test runner they are not)."""
        try:
            return (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
        except (AttributeError, ValueError, io.UnsupportedOperation):
            return False

    def __enter__(self) -> Self:
        _flush()
        self._saved = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
        self.stderr: TextIO = os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="replace")
        self._had_faulthandler = faulthandler.is_enabled()
        faulthandler.enable(self.stderr)
        self._reading, self._writing = os.pipe()
        for descriptor in (1, 2):
            os.dup2(self._writing, descriptor)
        self._closing = False
        self._thread = threading.Thread(target=self._pump, name="captured output", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _flush()
        for descriptor, saved in self._saved:
            os.dup2(saved, descriptor)
            os.close(saved)
        self._closing = True
        os.write(self._writing, b"\n")  # wakes the thread: other processes may hold the pipe open
        self._thread.join(5.0)
        os.close(self._writing)
        os.close(self._reading)
        if self._had_faulthandler:
            faulthandler.enable()
        else:
            faulthandler.disable()
        self.stderr.close()

    def _pump(self) -> None:
        rest = b""
        while True:
            data = os.read(self._reading, 65536)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace").split("\r")[-1].rstrip()
                if text and not _BAR.search(text):
                    self._take(text)
            if self._closing and data.endswith(b"\n"):
                return


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
