"""How commands speak: progress and notes to stderr, results to stdout, so `--json` can be piped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType


def say(line: str) -> None:
    """One line of progress, with the time of day, on stderr."""
    click.echo(f"{time.strftime('%H:%M:%S')}  {line}", err=True)


class Paced:
    """`say`, but at most once in some seconds, so that a progress callback may call it as often as it likes."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._next = 0.0
        self._last = ""

    def __call__(self, line: str, last: bool = False) -> None:
        now = time.monotonic()
        if (now >= self._next or last) and line != self._last:
            say(line)
            self._next, self._last = now + self._seconds, line


def show(report: dict[str, Any], text: RenderableType, as_json: bool, output: Path | None) -> None:
    """Print a report as text or JSON on stdout, and write the JSON to `output` where that is given."""
    document = json.dumps(report, indent=2, ensure_ascii=False)
    if as_json:
        click.echo(document)
    else:
        from rich.console import Console

        Console(highlight=False, soft_wrap=isinstance(text, str)).print(text, markup=not isinstance(text, str))
    if output is not None:  # last, so that a result of hours is on the terminal even where this fails
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(document + "\n", encoding="utf-8")
