"""`dflash preflight`, and the same checks at the start of the commands that load a model."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_train.commands.options import StorePath, allow_busy_gpus_option, gpus_option, json_option
from dflash_train.commands.terminal import say, show

if TYPE_CHECKING:
    from dflash_train.machine.preflight import Check

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command()
@click.option("--target", help="Hub name, folder or .gguf file of a target: are its fast kernels here?")
@click.option("--revision", help="Commit, branch or tag of the target on the hub.")
@click.option("--store", type=StorePath(url=False), help="Where a store will be written.")
@click.option("--run", type=click.Path(path_type=Path), help="Where a training run will be written.")
@gpus_option
@allow_busy_gpus_option
@json_option
def preflight(as_json: bool, **fields: Any) -> None:
    """Check the machine before a run: GPUs, versions, disks.

    It only looks: nothing is loaded, ended or changed. `extract` and `train-drafter` make the same checks when they
    start, without measuring the disk. Exit status 1 if there is an error.
    """
    from dataclasses import asdict

    from dflash_train.machine.preflight import Plan, check_machine

    checks = check_machine(Plan(**fields), thorough=True)
    failed = any(check.status == "error" for check in checks)
    if as_json:
        show({"ok": not failed, "checks": [asdict(check) for check in checks]}, "", True, None)
    else:
        print_checks(checks, "in the way of a run")
    sys.exit(failed)


def print_checks(checks: Sequence[Check], blocked: str) -> None:
    """One line a check, its way out below it, and the counts; `blocked` says what errors stand in the way of."""
    for check in checks:
        click.echo(f"{click.style(f'{check.status:<7}', fg=COLOURS[check.status])}  {check.name}: {check.text}")
        if check.way_out:
            click.echo(f"         → {check.way_out}")
    count = Counter(check.status for check in checks)
    click.echo(f"\n{count['ok']} ok, {count['warning']} to look at, {count['error']} {blocked}")


def check_start(**fields: Any) -> None:
    """The cheap checks of a Plan, before anything heavy is imported: says each warning, raises InputError for errors."""
    from dflash_train.machine.launch import torchrun_place
    from dflash_train.machine.preflight import Plan, check_machine, stop_on_errors

    checks = check_machine(Plan(**fields))
    place = torchrun_place()
    for check in checks:
        if check.status == "warning" and (place is None or place.local_rank == 0):
            say(f"warning: {check}")
    stop_on_errors(checks)
