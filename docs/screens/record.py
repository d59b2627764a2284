"""Record what a command shows on a terminal as an SVG: its screen just before it ends, or at a given second.

    pip install pyte
    python docs/screens/record.py docs/screens/extract.svg --at 40 -- dflash extract --target … --store …

The command runs in a pseudo-terminal; pyte interprets what it writes, rich draws the screen.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.text import Text


def run(command: list[str], columns: int, rows: int, at: float | None) -> Any:
    """The pyte screen at second `at`, or, without it, the last one that still had a display on it."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    began = time.monotonic()
    while True:
        ready, _, _ = select.select([terminal], [], [], 0.05)
        if not ready:  # between two frames, not within one
            if at is not None and time.monotonic() - began > at:
                break
            continue
        try:
            stream.feed(os.read(terminal, 65536))
        except OSError:  # the command has ended
            break
    return screen


def to_text(screen: Any) -> Text:
    """The screen's characters with their colours, without the empty lines below."""
    lines = [line.rstrip() for line in screen.display]
    height = max((number for number, line in enumerate(lines) if line), default=0) + 1
    text = Text()
    for number in range(height):
        for column in range(screen.columns):
            cell = screen.buffer[number][column]
            colour = cell.fg if cell.fg != "default" else ""
            colour = f"#{colour}" if len(colour) == 6 and all(c in "0123456789abcdef" for c in colour) else colour
            colour = {"brown": "yellow"}.get(colour, colour)
            text.append(cell.data, " ".join(filter(None, ("bold" if cell.bold else "", colour))))
        text.rstrip()
        text.append("\n")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--at", type=float, help="seconds after the start (default: the end)")
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--title", help="default: the command's first two words")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    given, command = parser.parse_args(words[:at]), words[at + 1 :]
    if not command:
        parser.error("give a command behind --")
    screen = run(command, given.columns, given.rows, given.at)
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=given.columns, file=nowhere, force_terminal=True)
        console.print(to_text(screen), end="")
        given.svg.write_text(console.export_svg(title=given.title or " ".join(command[:2])))
    sys.stdout.write(f"{given.svg}\n")


if __name__ == "__main__":
    main()
