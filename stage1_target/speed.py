"""How fast something was lately: a mean over a sliding window, which follows a change within a minute."""

from __future__ import annotations

import time
from collections import deque

WINDOW_SECONDS = 60.0


class RecentSpeed:
    """Counts per second over the last WINDOW_SECONDS; each count is taken to have grown since the one before it."""

    def __init__(self, now: float | None = None) -> None:
        self.num_counted = 0
        self._counts: deque[tuple[float, int]] = deque([(time.monotonic() if now is None else now, 0)])

    def add(self, count: int, now: float | None = None) -> None:
        """Something was counted, just now."""
        now = time.monotonic() if now is None else now
        self.num_counted += count
        self._counts.append((now, count))
        while len(self._counts) > 2 and self._counts[1][0] < now - WINDOW_SECONDS:
            self._counts.popleft()

    def per_second(self) -> float:
        """The mean between the window's first and last count; 0 before there is one."""
        (first, _), (last, _) = self._counts[0], self._counts[-1]
        counted = sum(count for _, count in self._counts) - self._counts[0][1]
        return counted / max(last - first, 1e-3) if len(self._counts) > 1 else 0.0
