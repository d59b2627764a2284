"""`dflash export`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_train.commands.options import StorePath, check_name, json_option, target_options
from dflash_train.commands.terminal import show


@click.command()
@click.argument("drafter", type=click.Path(path_type=Path))
@click.argument("folder", metavar="OUT", type=click.Path(path_type=Path), callback=check_name)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["z-lab", "speculators"]),
    default="z-lab",
    show_default=True,
    help="z-lab: SGLang, vLLM, transformers. speculators: vLLM's other format.",
)
@click.option(
    "--store",
    type=StorePath(url=False),
    help="Store that it was trained on: speculators takes embedding and head from it.",
)
@target_options(required=False)
@json_option
def export(
    drafter: Path,
    folder: Path,
    format_name: str,
    store: Path | None,
    target: str | None,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Write a drafter to a folder of its own.

    DRAFTER is a drafter's folder or a run (its newest checkpoint). Nothing of the trainer goes with it. The speculators
    format carries the target's embedding and head: give --store or --target.
    """
    if store is not None and target is not None:
        raise click.UsageError("--store and --target both name embedding and head: give one.")
    from dflash_train.speculate.export import export_drafter, format_export
    from dflash_train.speculate.loading import worse_than_best
    from dflash_train.stage1_target.target_config import TargetConfig

    config = None
    if target is not None:
        config = TargetConfig(name=target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code)
    if (worse := worse_than_best(drafter)) is not None:
        click.echo(f"warning: {worse}", err=True)
    result = export_drafter(drafter, folder, format_name=format_name, store=store, target=config)
    show(result, format_export(result), as_json, None)
