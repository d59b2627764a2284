"""`dflash stop`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_train.commands.options import RunPath
from dflash_train.commands.terminal import Failure
from dflash_train.machine.run_state import find_state, read_state
from dflash_train.machine.runs import ask_to_stop, tail


@click.command()
@click.argument("folder", type=RunPath())
@click.option(
    "--timeout", type=click.FloatRange(min=0), default=600.0, show_default=True, help="Seconds to wait for the end."
)
def stop(folder: Path, timeout: float) -> None:
    """Ask a run to save and end, and wait until it has.

    FOLDER is the --store of an extract or the --run of a train-drafter. Run their command again to go on.
    """
    path = find_state(folder)
    state = read_state(path)
    verdict, reason = state.verdict()
    if verdict != "running":
        click.echo(
            f"nothing to stop: the run has {verdict}{f' ({reason})' if reason else ''}".replace("has died", "died")
        )
        return
    if not ask_to_stop(state, timeout):
        raise Failure(
            f"Process {state.process.pid} has been asked to stop but still runs after {timeout:.0f} s. Wait for it with "
            f"`dflash status`, or kill it (kill -9 {state.process.pid}): that loses what is not saved yet."
        )
    state = read_state(path)
    verdict, reason = state.verdict()
    if verdict in ("failed", "died"):
        lines = "".join(f"\n  {line}" for line in tail(state))
        raise Failure(f"The run {verdict} while it stopped: {reason}{lines}")
    click.echo(f"{verdict}: {state.message}")
