"""`dflash check`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dflash_train.commands.options import (
    json_option,
    one_gpu_option,
    output_option,
    target_options,
    use_one_device,
)
from dflash_train.commands.preflight import print_checks
from dflash_train.commands.terminal import say, show, write_json


@click.command()
@click.argument("drafter", type=click.Path(path_type=Path))
@target_options(required=True)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=click.Choice(["sglang", "vllm", "z-lab"]),
    help="What will serve it; may be given several times. Default: all.",
)
@click.option("--parity/--no-parity", default=True, help="Load the target too, and compare training with drafting.")
@one_gpu_option
@json_option
@output_option
def check(
    drafter: Path,
    target: str,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    engines: tuple[str, ...],
    parity: bool,
    gpus: str | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Find what makes engines misread a drafter.

    DRAFTER is a drafter's folder or a run (its newest checkpoint). No server is needed. Prints the command lines to
    serve it with; or, with exit status 1, the errors that are in the way.
    """
    torch_device = use_one_device(gpus) if parity else "cpu"
    from dflash_train.machine.preflight import Check
    from dflash_train.speculate.check import CheckConfig, check_drafter
    from dflash_train.stage1_target.target_config import TargetConfig

    config = CheckConfig(
        target=TargetConfig(name=target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code),
        drafter=drafter,
        engines=engines,
        parity=parity,
        device=torch_device,
    )
    result = check_drafter(config, say)
    if as_json:
        show(result, "", True, output)
    else:
        print_checks([Check(**entry) for entry in result["checks"]], "in the way of serving")
        for engine, line in result["commands"].items() if result["ok"] else ():
            click.echo(f"\n{engine}:\n  {line}")
        if not result["ok"]:
            click.echo("The command lines to serve it with follow when the errors are mended.")
        write_json(result, output)
    sys.exit(not result["ok"])
