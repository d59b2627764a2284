"""`dflash status`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from dflash_train.commands.options import RunPath, json_option
from dflash_train.machine.run_state import RunState, find_state, read_state
from dflash_train.machine.runs import tail
from dflash_train.units import format_duration

EXIT_STATUS = {"finished": 0, "failed": 1, "died": 1, "running": 3, "stopped": 4}
STALL_SECONDS = 600.0


@click.command()
@click.argument("folder", type=RunPath())
@json_option
def status(folder: Path, as_json: bool) -> None:
    """Tell how an extract or a training run fares.

    FOLDER is the --store of an extract or the --run of a train-drafter. Exit status: 0 finished, 1 failed or died,
    3 running, 4 stopped.
    """
    state = read_state(find_state(folder))
    now = time.time()
    verdict, reason = state.verdict(now)
    if as_json:
        ages = {"heartbeat_age_seconds": now - state.heartbeat_at, "started_seconds_ago": now - state.started_at}
        click.echo(json.dumps({"status": verdict, "reason": reason, **ages, **state.to_json()}, indent=2))
    else:
        for label, text in describe(state, verdict, reason, now):
            click.echo(f"{label:10} {text}")
    sys.exit(EXIT_STATUS[verdict])


def describe(state: RunState, verdict: str, reason: str, now: float) -> list[tuple[str, str]]:
    """Lines of (label, text) for a person."""
    process = state.process
    started = f"process {process.pid} on {process.host}, started {format_duration(now - state.started_at)} ago"
    lines = [(verdict, f"{state.command}, {started}")]
    if state.progress is not None:
        lines.append(("progress", _progress(state.progress, running=verdict == "running")))
    elif verdict == "running":
        lines.append(("progress", "starting: no batch or step is done yet"))
    heartbeat = f"{format_duration(now - state.heartbeat_at)} ago"
    if state.progress_at is not None and verdict == "running":
        heartbeat += f"; last progress {format_duration(now - state.progress_at)} ago"
        if now - state.progress_at > STALL_SECONDS:
            heartbeat += ": it may hang, look at the logs"
    lines.append(("heartbeat" if verdict in ("running", "died") else "ended", heartbeat))
    if verdict == "died":
        lines.append(("reason", reason))
    if state.error is not None:
        lines.append(("error", state.error))
    if state.message is not None:
        lines.append(("said", state.message))
    lines.append(("log", state.log or f"went to its terminal; its processes' logs are in {state.worker_logs}"))
    if verdict in ("failed", "died"):
        lines += [("", line) for line in tail(state, 3)]
    return lines


def _progress(progress: dict[str, Any], running: bool) -> str:
    share = progress["done"] / progress["total"] if progress["total"] else 1.0
    text = f"{progress['done']:,} of {progress['total']:,} {progress['unit']} ({share:.1%})"
    text += f", {progress['tokens_per_second']:,.0f} tokens/s"
    return text + (f", {format_duration(3600 * progress['hours_left'])} left" if running else "")
