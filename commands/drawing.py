"""Parts of the displays: a table of bars, curves as sparklines, and the text of durations and speeds."""

from __future__ import annotations

import itertools
import time

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.,-=+*#"


class Curve:
    """Values of a whole run in bounded memory, drawn as a sparkline as wide as there is room.

    Where it is full, neighbours are averaged, so that every entry stands for equally many values.
    """

    def __init__(self, size: int = 256) -> None:
        self._size, self._per_entry = size, 1
        self._entries: list[float] = []
        self._open: list[float] = []

    def add(self, value: float | None) -> None:
        """The next value; None is left out."""
        if value is None:
            return
        self._open.append(value)
        if len(self._open) == self._per_entry:
            self._entries.append(sum(self._open) / len(self._open))
            self._open = []
        if len(self._entries) == self._size:
            self._entries = [(a + b) / 2 for a, b in zip(self._entries[::2], self._entries[1::2], strict=True)]
            self._per_entry *= 2

    def values(self, width: int) -> list[float]:
        """At most `width` means, oldest first."""
        count = len(self._entries)
        borders = [count * n // width for n in range(width + 1)] if count > width else list(range(count + 1))
        parts = [self._entries[a:b] for a, b in itertools.pairwise(borders)]
        return [sum(part) / len(part) for part in parts]

    def text(self, width: int, blocks: str = BLOCKS) -> str:
        """The sparkline, from the smallest value to the largest."""
        values = self.values(width)
        if not values:
            return ""
        least, most = min(values), max(values)
        scale = (len(blocks) - 1) / (most - least) if most > least else 0.0
        return "".join(blocks[round((value - least) * scale)] for value in values)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.text(options.max_width, ASCII_BLOCKS if options.ascii_only else BLOCKS), style="cyan")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, options.max_width)


class Clock:
    """Time since the start, and time left if the rest goes as the part since `begin`."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._begin: tuple[float, float] | None = None

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def begin(self, done: float) -> None:
        """Work begins, with `done` of it done already; later calls change nothing."""
        self._begin = self._begin or (time.monotonic(), done)

    def left(self, done: float, total: float) -> float | None:
        """Seconds left; None where nothing tells."""
        if self._begin is None or done <= self._begin[1]:
            return None
        return (total - done) * (time.monotonic() - self._begin[0]) / (done - self._begin[1])

    def per_second(self, done: float) -> float | None:
        """The mean speed since `begin`."""
        return None if self._begin is None else (done - self._begin[1]) / max(time.monotonic() - self._begin[0], 1e-3)


class Lines:
    """A display: one line a thing, `name  bar or curve  value  rest`, with dim lines at the end."""

    def __init__(self) -> None:
        self.table = Table.grid(padding=(0, 2), expand=True)
        self.table.add_column(no_wrap=True)
        self.table.add_column(ratio=1, no_wrap=True, min_width=8)
        self.table.add_column(justify="right", no_wrap=True)
        self.table.add_column(no_wrap=True, overflow="ellipsis")
        self._ends: list[Text] = []

    def bar(
        self, name: str, done: float, total: float | None, value: str, rest: str = "", full_style: str = "green"
    ) -> None:
        """A progress bar; it pulses where the total is not known, and is drawn in another colour where it is full."""
        bar = ProgressBar(
            total=total if total else None,
            completed=min(done, total or done),
            pulse=total is None,
            complete_style="cyan",
            finished_style=full_style,
        )
        self.table.add_row(name, bar, value, Text(rest, style="dim"))

    def curve(self, name: str, curve: Curve, value: str, rest: str = "") -> None:
        self.table.add_row(name, curve, value, Text(rest, style="dim"))

    def end(self, *texts: str | None) -> None:
        """One line below: time since the start, time left."""
        text = " · ".join(text for text in texts if text)
        self._ends.append(Text(text, style="dim", no_wrap=True, overflow="ellipsis"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.table.rows:
            yield self.table
        yield from self._ends
