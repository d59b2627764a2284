"""`dflash preflight`, and the same checks at the start of the commands that load a model."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_train.commands.options import (
    StorePath,
    allow_busy_gpus_option,
    compile_cache_option,
    gpus_option,
    json_option,
)
from dflash_train.commands.terminal import say, show

if TYPE_CHECKING:
    from dflash_train.machine.preflight import Check

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command()
@click.option("--target", help="Hub name, folder or .gguf file of a target: are its fast kernels here?")
@click.option("--revision", help="Commit, branch or tag of the target on the hub.")
@click.option("--store", type=StorePath(url=False), help="Where a store will be written.")
@click.option("--run", type=click.Path(path_type=Path), help="Where a training run will be written.")
@compile_cache_option
@gpus_option
@allow_busy_gpus_option
@json_option
def preflight(target: str | None, revision: str | None, as_json: bool, **fields: Any) -> None:
    """Check the machine before a run: GPUs, versions, disks.

    It only looks: nothing is loaded, ended or changed. `extract` and `train-drafter` make the same checks when they
    start, without measuring the disk. Exit status 1 if there is an error.
    """
    from dataclasses import asdict

    checks = check_plan(target, revision, thorough=True, **fields)
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


def check_plan(
    target: str | None = None,
    revision: str | None = None,
    slow_paths: bool = True,
    thorough: bool = False,
    **fields: Any,
) -> list[Check]:
    """The checks of a Plan with these fields, and of a target: a hub name, a folder or a .gguf file.

    `thorough` also measures the disk and asks the hub. Without `slow_paths` only a target that cannot be read is told:
    extract looks for fast paths itself, of what it loads.
    """
    from dflash_train.machine.preflight import Plan, check_machine, count_gpus

    plan = Plan(**fields)
    checks = check_machine(plan, thorough)
    if target is not None:
        from dflash_train.stage1_target.slow_paths import check_target
        from dflash_train.stage1_target.target_files import read_target_files

        found = check_target(read_target_files(target, revision, ask_hub=thorough), count_gpus(plan))
        checks += [check for check in found if slow_paths or check.name == "target"]
    return checks


def check_start(**fields: Any) -> None:
    """The cheap checks of check_plan, before anything heavy is imported: says warnings, raises InputError for errors."""
    from dflash_train.machine.preflight import stop_on_errors
    from dflash_train.machine.torchrun import torchrun_place

    checks = check_plan(**fields)
    place = torchrun_place()
    for check in checks:
        if check.status == "warning" and (place is None or place.local_rank == 0):
            say(f"warning: {check}")
    stop_on_errors(checks)
