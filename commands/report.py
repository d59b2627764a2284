"""`dflash report`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Where the page goes. Default: RUN/report.html."
)
@click.option(
    "--evaluation",
    "evaluations",
    multiple=True,
    type=click.Path(path_type=Path),
    help="What `dflash evaluate --output` wrote for a checkpoint of RUN; may be given several times.",
)
def report(run: Path, output: Path | None, evaluations: tuple[Path, ...]) -> None:
    """Show a training run as one HTML page.

    RUN is the --run folder of train-drafter; it may still be training. The page opens without network and holds no
    scripts: curves, checkpoints, configuration, the store's manifest, and versions.
    """
    from dflash_train.stage2_drafter.report import write_report

    click.echo(write_report(run, output, evaluations))
