"""How commands speak: progress and notes to stderr, results to stdout, so `--json` can be piped.

One way of speaking a run: a drawn display where stderr is a terminal, lines with the time of day where it is not, one
JSON object a line with --log-json, nothing with --quiet. A view (display.py) turns events into lines and draws itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO, TypeVar

import click

from dflash_train.commands.capture import CapturedOutput

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

Command = TypeVar("Command", bound=Callable[..., Any])

_QUIET, _LOG_JSON = f"{__name__}.quiet", f"{__name__}.log_json"
_PACE = (5.0, 60.0)
"""Seconds between lines of progress: at first, and at most, after twenty times as long."""


def progress_options(command: Command) -> Command:
    """--quiet and --log-json, for commands that take long; read by Terminal, not passed to the command."""

    def remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            context.meta[f"{__name__}.{parameter.name}"] = True
        if context.meta.get(_QUIET) and context.meta.get(_LOG_JSON):
            raise click.UsageError("--quiet and --log-json exclude each other: give one.")

    settings: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": remember}
    command = click.option("--log-json", help="Progress as one JSON object a line, on stderr.", **settings)(command)
    return click.option("--quiet", help="Only results and errors.", **settings)(command)


def _chosen(name: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(name))


@dataclass(frozen=True)
class Line:
    """What an event means as one line of text."""

    text: str
    event: str = "note"
    values: Mapping[str, Any] = field(default_factory=dict)
    """Its numbers, for --log-json."""
    drawn: bool = False
    """The display shows it, so it is not printed above it."""
    paced: bool = False
    """May be left out if one was printed just before; the newest is printed at the end."""


class View(Protocol):
    """The state of one command's display."""

    ended: bool
    """Whether the frame drawn next is the last one."""

    def take(self, event: Any) -> Sequence[Line]:
        """Take in an event."""

    def __rich__(self) -> RenderableType: ...


def say(line: str) -> None:
    """One line of progress, with the time of day, on stderr."""
    if not _chosen(_QUIET):
        _write(sys.stderr, Line(line), _chosen(_LOG_JSON))


def fail(text: str, as_json: bool | None = None) -> None:
    """One error on stderr, in every way of speaking."""
    if _chosen(_LOG_JSON) if as_json is None else as_json:
        _write(sys.stderr, Line(text, "error"), as_json=True)
    else:
        click.echo(f"Error: {text}", err=True)


class Failure(click.ClickException):
    """An expected error: one sentence and exit status 1. Make it inside the command: it is shown after its end."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._as_json = _chosen(_LOG_JSON)

    def show(self, file: Any = None) -> None:
        fail(self.message, self._as_json)


def _write(stream: TextIO, line: Line, as_json: bool) -> None:
    if as_json:
        document = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": line.event,
            "text": line.text,
            **line.values,
        }
        text = json.dumps(document, ensure_ascii=False, default=str)
    else:
        text = f"{time.strftime('%H:%M:%S')}  {line.text}"
    click.echo(text, file=stream)


class Terminal:
    """Where one command's progress goes, inside a `with` block; results are printed after it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._stream: TextIO = sys.stderr
        self._live: Live | None = None
        self._quiet, self._as_json = _chosen(_QUIET), _chosen(_LOG_JSON)
        self._began = time.monotonic()
        self._next = 0.0
        self._held: Line | None = None
        self._last = ""

    def __enter__(self) -> Self:
        draws = not self._quiet and not self._as_json and _can_draw()
        if (draws or self._quiet or self._as_json) and CapturedOutput.possible() and not _under_torchrun():
            captured = CapturedOutput(lambda text: self._put(Line(text, "output")))
            self._stream = self._stack.enter_context(captured).stderr
        if draws:
            self._stack.enter_context(_kept_terminal())
            self._live = self._stack.enter_context(self._draw())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._view.ended = True
        if self._held is not None:
            self._write(self._held)
        self._stack.close()

    def report(self, event: Any) -> None:
        """Take an event of the run."""
        with self._lock:
            lines = self._view.take(event)
        for line in lines:
            self._put(line)

    def _put(self, line: Line) -> None:
        if self._quiet:
            return
        if self._live is not None:
            if not line.drawn:
                self._live.console.print(_stamped(line))
            return
        now = time.monotonic()
        if line.paced and now < self._next:
            self._held = line
            return
        if line.paced:
            least, most = _PACE
            self._next = now + min(max((now - self._began) / 20, least), most)
        self._write(line)

    def _write(self, line: Line) -> None:
        if line.drawn:  # what was held back is older, and the same thing twice is none the better
            if self._last == line.text:
                return
            self._held, self._last = None, line.text
        _write(self._stream, line, self._as_json)

    def _draw(self) -> Live:
        from rich.console import Console, ConsoleDimensions
        from rich.live import Live

        stream = self._stream

        class Screen(Console):
            @property  # type: ignore[misc]
            def size(self) -> ConsoleDimensions:  # rich asks descriptors 0 to 2, which are captured here
                with suppress(OSError):
                    return ConsoleDimensions(*os.get_terminal_size(stream.fileno()))
                return ConsoleDimensions(80, 25)

        def frame() -> RenderableType:
            with self._lock:  # never held while the console's own lock is wanted
                return self._view.__rich__()

        console = Screen(file=stream, force_terminal=True, highlight=False, emoji=False)
        settings: dict[str, Any] = {"refresh_per_second": 4, "redirect_stdout": False, "redirect_stderr": False}
        return Live(get_renderable=frame, console=console, **settings)


def _stamped(line: Line) -> RenderableType:
    """A line for the terminal, whose wrapped parts stand below its beginning."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    text = Text(line.text, style="dim" if line.event == "output" else "", overflow="fold")
    table.add_row(Text(time.strftime("%H:%M:%S"), style="dim"), text)
    return table


def _under_torchrun() -> bool:
    from dflash_train.machine.torchrun import torchrun_place

    return torchrun_place() is not None


def _can_draw() -> bool:
    """Whether stderr is a terminal that this process alone writes to, in the foreground."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown") or _under_torchrun():
        return False
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:  # not the controlling terminal of this process
        return True


@contextmanager
def _kept_terminal() -> Iterator[None]:
    """Typed keys are not echoed into the display, and SIGTERM ends the command in order; both as before afterwards."""

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    import termios

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, end)
            stack.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        with suppress(termios.error, OSError, ValueError):
            descriptor = sys.stdin.fileno()
            before = termios.tcgetattr(descriptor)
            silent = [*before]
            silent[3] &= ~termios.ECHO
            _set_terminal(descriptor, silent)
            stack.callback(_set_terminal, descriptor, before)
        yield


def _set_terminal(descriptor: int, attributes: list[Any]) -> None:
    import termios

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # or a command moved to the background stops
    try:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def show(report: dict[str, Any], text: RenderableType, as_json: bool, output: Path | None) -> None:
    """Print a report as text or JSON on stdout, and write the JSON to `output` where that is given."""
    document = json.dumps(report, indent=2, ensure_ascii=False)
    if as_json:
        click.echo(document)
    else:
        from rich.console import Console

        Console(highlight=False, soft_wrap=isinstance(text, str)).print(text, markup=not isinstance(text, str))
    write_json(report, output)  # last, so that a result of hours is on the terminal even where this fails


def write_json(report: dict[str, Any], output: Path | None) -> None:
    """Write a report to the file of --output, where that is given."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        say(f"wrote {output}")
