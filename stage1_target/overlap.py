"""What limits a worker: how long its main thread waited for what, how busy GPU and writers were, all over one window.

The window opens when the second batch has run (compilers, allocators and caches are warm then) and closes with the last
one, so loading, calibration and warm-up are left out; the last commit is counted apart. GPU time is taken between two
events around each batch; the rest of the window the GPU was idle. The worker logs one line at its end, which
benchmarks/extract.py reads.
"""

from __future__ import annotations

import json
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LINE = "Overlap: "
WARM_BATCHES = 2


class Overlap:
    """Clocks of one worker; each key is written by one thread alone."""

    def __init__(self) -> None:
        self.num_tokens = self.num_padded_tokens = 0
        self.gpu_seconds = 0.0
        self.num_ring_bytes = 0
        self._num_batches = 0
        self._waited: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self._written: dict[str, int] = {}
        self._began = self._ended = self._closed = 0.0
        self._clear()

    def _clear(self) -> None:
        self.num_tokens = self.num_padded_tokens = 0
        self.gpu_seconds = 0.0
        self._waited = defaultdict(float)
        self._busy = defaultdict(float)
        self._written = defaultdict(int)
        self._began = self._ended = self._closed = time.perf_counter()

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Count the time that the main thread waits for `reason`: gpu, writer or parent."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited[reason] += time.perf_counter() - began

    @contextmanager
    def busy(self, thread: str) -> Iterator[None]:
        """Count the time that a writer writes, or commits."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._busy[thread] += time.perf_counter() - began

    def wrote(self, thread: str, num_bytes: int) -> None:
        """Count bytes that a writer has written."""
        self._written[thread] += num_bytes

    def batch_ran(self, num_tokens: int, num_padded_tokens: int, gpu_seconds: float) -> None:
        """A batch has run and its copy is complete; opens the window after the second one."""
        self._num_batches += 1
        if self._num_batches == WARM_BATCHES:
            self._clear()
            return
        self.num_tokens += num_tokens
        self.num_padded_tokens += num_padded_tokens
        self.gpu_seconds += gpu_seconds
        self._ended = self._closed = time.perf_counter()

    def closed(self) -> None:
        """Everything is committed."""
        self._closed = time.perf_counter()

    def summary(self) -> dict[str, Any]:
        """Shares of the window, rates, and what limits; JSON-able."""
        seconds = max(self._ended - self._began, 1e-9)
        writing = {name: busy for name, busy in sorted(self._busy.items()) if name.startswith("writer")}
        committing = sum(busy for name, busy in self._busy.items() if name.startswith("commit"))
        written = sum(self._written.values())
        gpu, writers = self.gpu_seconds / seconds, sum(writing.values()) / seconds
        waited_writer = self._waited["writer"] / seconds
        return {
            "seconds": round(seconds, 3),
            "tokens": self.num_tokens,
            "tokens_per_second": round(self.num_tokens / seconds),
            "tokens_per_second_with_last_commit": round(self.num_tokens / max(self._closed - self._began, 1e-9)),
            "padding": round(1 - self.num_tokens / max(1, self.num_padded_tokens), 4),
            "gpu_busy": round(gpu, 3),
            "waited_for_gpu": round(self._waited["gpu"] / seconds, 3),
            "waited_for_writers": round(waited_writer, 3),
            "waited_for_parent": round(self._waited["parent"] / seconds, 3),
            "writers_busy": [round(busy / seconds, 3) for busy in writing.values()],
            "written_gb_per_second": round(written / max(sum(writing.values()), 1e-9) / 1e9, 3),
            "commit_seconds": round(committing, 3),
            "written_gb": round(written / 1e9, 3),
            "host_buffers_gb": round(self.num_ring_bytes / 1e9, 3),
            "peak_host_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
            "peak_gpu_gb": round(_peak_gpu_bytes() / 1e9, 2),
            "writers_load": round(writers / max(1, len(writing)), 3),
            "limit": "writers" if waited_writer > 0.05 else "gpu" if gpu > 0.9 else "main thread",
        }

    def line(self) -> str:
        """The summary as one line of the log."""
        return LINE + json.dumps(self.summary())


def _peak_gpu_bytes() -> int:
    """Most that torch had allocated at once, summed over this process's GPUs; calibration and self-checks included."""
    import torch

    return sum(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))


def parse_overlap(log: str) -> dict[str, Any] | None:
    """The last summary in a worker's log; None without one."""
    lines = [line for line in log.splitlines() if LINE in line]
    return json.loads(lines[-1].split(LINE, 1)[1]) if lines else None
