"""`dflash logs`."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from dflash_train.commands.options import RunPath
from dflash_train.errors import InputError
from dflash_train.machine.run_state import RunState, find_state, read_state

POLL_SECONDS = 0.3


@click.command()
@click.argument("folder", type=RunPath())
@click.option("-f", "--follow", is_flag=True, help="Print what comes, until the run has ended.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="How many lines of each log."
)
@click.option("--workers", is_flag=True, help="The logs of its processes, one a GPU, instead of its own.")
def logs(folder: Path, follow: bool, lines: int, workers: bool) -> None:
    """Print the log of an extract or a training run.

    FOLDER is the --store of an extract or the --run of a train-drafter. A run whose lines went to a terminal has only
    the logs of its processes.
    """
    path = find_state(folder)
    state = read_state(path)
    own = None if state.log is None else Path(state.log)
    files = worker_logs(state) if workers or own is None or not own.is_file() else [own]
    if own is not None and not own.is_file() and not workers:
        click.echo(f"Its own log {own} is not there any more; these are its processes'.", err=True)
    if not files and state.verdict()[0] != "running" and (files := earlier_logs(state)):
        click.echo(
            f"The newest run has started no process; these are of the newest that has, {files[-1].parent}.", err=True
        )
    if not files:
        raise InputError(f"The run has left no log in {state.worker_logs}; its lines went to the terminal it runs in.")
    ends: dict[Path, int] = {}
    for file in files:
        if len(files) > 1 or file != own:
            click.echo(f"==> {file} <==", err=True)
        ends[file] = _print_last(file, lines)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(path, ends)


def _follow(state: Path, ends: dict[Path, int]) -> None:
    """Print what is written to the files beyond `ends`, until the run has ended and nothing new came."""
    while True:
        running = read_state(state).verdict()[0] == "running"
        news = False
        for file in ends:
            news |= _print_new(file, ends)
        if not running and not news:
            return
        time.sleep(POLL_SECONDS)


def worker_logs(state: RunState) -> list[Path]:
    """The logs that the processes of this run, not of an earlier one, have written."""
    return [path for path in _all_logs(state) if path.stat().st_mtime >= state.started_at]


def earlier_logs(state: RunState) -> list[Path]:
    """The logs of the newest run here whose processes have written some.

    Ranks under torchrun may have a folder each, begun some seconds apart: a log that was written to since the last of them
    was begun is of the same run, for one store has one run at a time.
    """
    found = _all_logs(state)
    if not found:
        return []
    newest = found[-1].parent
    try:
        begun = datetime.strptime(newest.name, "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    except ValueError:  # a folder without a time in its name
        begun = 0.0
    return [path for path in found if path.parent == newest or (begun and path.stat().st_mtime >= begun)]


def _all_logs(state: RunState) -> list[Path]:
    """The logs of processes of all runs, in the order of their folders, whose names are times."""
    if state.worker_logs is None:
        return []
    found = Path(state.worker_logs).rglob("*.log")
    return sorted(path for path in found if not path.name.startswith("console-"))


def _print_last(file: Path, count: int) -> int:
    """Print the last lines of a file, from its last MiB; returns how far it has been read."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 2**20))
        content = stream.read(min(size, 2**20))
    lines = content.decode(errors="replace").splitlines(keepends=True)
    if not lines:
        click.echo("(empty)", err=True)
    click.echo("".join(lines[-count:] if count > 0 else []), nl=False)
    return size


def _print_new(file: Path, ends: dict[Path, int]) -> bool:
    size = file.stat().st_size
    if size < ends[file]:
        ends[file] = 0  # begun anew
    if size <= ends[file]:
        return False
    with file.open("rb") as stream:
        stream.seek(ends[file])
        content = stream.read(size - ends[file])
    ends[file] += len(content)
    click.echo(content.decode(errors="replace"), nl=False)
    return True
