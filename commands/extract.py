"""`dflash extract`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dflash_train.commands.detach import current_recorder, detachable, recorded_extract
from dflash_train.commands.options import (
    StorePath,
    allow_busy_gpus_option,
    cache_folder_option,
    calibration_tokens_option,
    chat_template_arguments_of,
    check_name,
    data_options,
    gpus_option,
    gpus_per_target_option,
    layer_ids_of,
    segment_options,
    target_options,
)
from dflash_train.commands.preflight import check_start
from dflash_train.commands.recipe import write_recipe
from dflash_train.commands.terminal import Terminal, fail, progress_options
from dflash_train.machine.disks import user_cache_folder
from dflash_train.machine.run_state import logs_folder
from dflash_train.store.location import StoreLocation, beside
from dflash_train.units import format_duration


def _logs(store: StoreLocation) -> Path:
    return logs_folder(beside(store))


def _disk_of(fields: Mapping[str, Any]) -> Path:
    """Where bytes are written on this machine: the store, or what waits for the upload to its URL."""
    store = fields["store"]
    return store if isinstance(store, Path) else fields["cache_folder"] or user_cache_folder()


@click.command()
@target_options(required=True)
@data_options
@click.option(
    "--store",
    required=True,
    type=StorePath(),
    callback=check_name,
    help="Folder of the store, or a URL such as s3://bucket/name; filled up if it is there.",
)
@gpus_option
@gpus_per_target_option
@allow_busy_gpus_option
@click.option(
    "--encoding",
    type=click.Choice(["bf16", "int8", "projected-int8", "projected-int4"]),
    default="int8",
    show_default=True,
    help="bf16 is exact; int8 takes half the bytes; projected-… far fewer, and loses what the projection leaves out.",
)
@click.option(
    "--rank",
    default="auto",
    show_default=True,
    help="Features a token of a projected encoding: a number, a multiple of the hidden size such as 2H, or auto: the "
    "store's own, else H.",
)
@click.option(
    "--target-layers", metavar="IDS", help="Decoder layers to tap, 0 is the first: 1,9,17,25,33. Default: z-lab's rule."
)
@click.option("--num-taps", default=5, show_default=True, help="How many layers z-lab's rule taps.")
@click.option("--max-tokens", default=4096, show_default=True, help="Longer samples are cut at the tail, and counted.")
@click.option("--max-samples", type=int, help="Take only the first rows of the data set.")
@click.option("--batch-tokens", default=16_384, show_default=True, help="Tokens of one forward, padding included.")
@click.option(
    "--compile-target/--no-compile-target",
    default=False,
    show_default=True,
    help="Compile the target's layers: batches 1.4 times as quick (Qwen3-8B, H200), 10 to 20 s more at a worker's start.",
)
@segment_options
@click.option(
    "--max-store-size",
    metavar="SIZE",
    help="Pause while the store would be larger, such as 2TB; train-drafter --consume makes room.",
)
@calibration_tokens_option
@click.option(
    "--calibration-from",
    type=StorePath(),
    help="Take channel scale and projection of this store, to train on both.",
)
@click.option(
    "--projection-from",
    metavar="DRAFTER",
    type=click.Path(path_type=Path),
    help="Begin the projection of a new store with the row space of this drafter's fc: nothing that it looks at is lost.",
)
@click.option("--seed", default=0, show_default=True, help="Of the order of samples and the calibration draw.")
@click.option(
    "--sample-cache", type=click.Path(path_type=Path), help="Where tokenised samples are kept. Default: user cache."
)
@click.option("--log-folder", type=click.Path(path_type=Path), help="Where workers log. Default: STORE.logs.")
@cache_folder_option
@click.option(
    "--require-fast-kernels",
    is_flag=True,
    help="Stop where a fast path is missing (kernels of linear attention, sdpa, bf16 weights, tokenizer), not only warn.",
)
@click.option(
    "--dry-run", is_flag=True, help="Forecast samples, tokens and size, and stop before the target is loaded."
)
@progress_options
@detachable(lambda given: (_logs(given["store"]), given["log_folder"] or _logs(given["store"])))
def extract(
    target: str,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    data: str,
    split: str,
    chat_template_arguments: str,
    gpus: str | None,
    allow_busy_gpus: bool,
    target_layers: str | None,
    max_tokens: int,
    max_samples: int | None,
    **fields: Any,
) -> None:
    """Store the hidden states of the target over conversations.

    Run the same command again, with any number of GPUs, to go on after a stop or a kill: it stores what is missing.
    """
    target_layer_ids = layer_ids_of(target_layers)
    template_arguments = chat_template_arguments_of(chat_template_arguments)
    if not fields["dry_run"]:
        check_start(
            gpus=gpus,
            gpus_per_target=fields["gpus_per_target"],
            store=_disk_of(fields),
            target=target,
            revision=revision,
            allow_busy_gpus=allow_busy_gpus,
            slow_paths=False,
        )
    from dflash_train.commands.display import ExtractView
    from dflash_train.machine.torchrun import torchrun_place
    from dflash_train.stage1_target.events import Event
    from dflash_train.stage1_target.extract import ExtractConfig
    from dflash_train.stage1_target.extract import extract as run
    from dflash_train.stage1_target.forecast import Forecast
    from dflash_train.stage1_target.samples import DataConfig
    from dflash_train.stage1_target.target_config import TargetConfig

    config = ExtractConfig(
        target=TargetConfig(name=target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code),
        data=DataConfig(
            source=data,
            split=split,
            max_tokens=max_tokens,
            max_samples=max_samples,
            chat_template_arguments=template_arguments,
        ),
        devices=gpus,
        target_layer_ids=target_layer_ids,
        **fields,
    )
    context, view, place = click.get_current_context(), ExtractView(), torchrun_place()
    speaks = place is None or place.rank == 0  # one of torchrun's ranks speaks for all

    with Terminal(view) as terminal:

        def report(event: Event) -> None:
            if isinstance(event, Forecast) and not config.dry_run:
                folder = beside(config.store)
                write_recipe(context, folder.with_name(f"{folder.name}.recipe.toml"))
            terminal.report(event)

        result = run(config, recorded_extract(report) if speaks and not config.dry_run else report)
    if not speaks:
        sys.exit(result.exit_status)
    for failure in result.failures:
        fail(failure)
    speed = f" ({result.num_new_tokens:,} tokens in {format_duration(result.seconds)})" if result.num_new_tokens else ""
    click.echo(f"{result.message}{speed}")
    if not config.dry_run:
        outcome = "finished" if result.outcome == "nothing to do" else result.outcome
        current_recorder().end(outcome, result.message, error="; ".join(result.failures) or None)
    sys.exit(result.exit_status)
