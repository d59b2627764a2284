"""`dflash import-store`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_train.commands.options import (
    StorePath,
    calibration_tokens_option,
    check_name,
    layer_ids_of,
    one_gpu_option,
    segment_options,
    use_one_device,
)
from dflash_train.commands.recipe import write_recipe
from dflash_train.commands.terminal import Terminal, progress_options
from dflash_train.units import format_duration


@click.command("import-store")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--store",
    required=True,
    type=StorePath(url=False),
    callback=check_name,
    help="Folder of the store; filled up if it is there.",
)
@click.option("--target", required=True, help="Hub name or local folder of the target that made the states.")
@click.option("--revision", help="Commit, branch or tag of the target on the hub.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="Of the target; auto is that of the states in the files.",
)
@click.option("--trust-remote-code", is_flag=True, help="Let model code from the hub run.")
@click.option(
    "--layers",
    required=True,
    metavar="IDS",
    help="Layers in the files, in their order, as the program that wrote them was told, without the extra last one: "
    "speculators' --target-layer-ids 2,10,18 or SpecForge's --aux-hidden-states-layers 1,9,17.",
)
@click.option(
    "--layout",
    type=click.Choice(["speculators", "specforge"]),
    help="Who wrote the files. Default: told from their names.",
)
@click.option(
    "--hidden-states",
    type=click.Path(path_type=Path),
    help="Where speculators' hs_….safetensors lie. Default: hidden_states in SOURCE.",
)
@one_gpu_option
@click.option(
    "--encoding",
    type=click.Choice(["bf16", "int8", "projected-int8", "projected-int4"]),
    default="int8",
    show_default=True,
    help="As in dflash extract.",
)
@click.option("--rank", default="auto", show_default=True, help="Features a token of a projected encoding.")
@segment_options
@calibration_tokens_option
@click.option(
    "--calibration-from",
    type=StorePath(url=False),
    help="Take channel scale and projection of this store, to train on both.",
)
@click.option(
    "--check-samples",
    default=2,
    show_default=True,
    help="Files to run again before anything is stored, to prove that they hold these layers of this target; 0 trusts them.",
)
@click.option("--seed", default=0, show_default=True, help="Of the order of the files and the calibration draw.")
@progress_options
def import_store(
    source: Path,
    target: str,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    layers: str,
    gpus: str | None,
    **fields: Any,
) -> None:
    """Make a store of the states that other trainers wrote.

    SOURCE is the folder that speculators' prepare-data wrote, with the safetensors files of hidden states in it, or
    SpecForge's folder of .ckpt files. Files that cannot be used are left out by name, with the reason. Run the same command
    again to go on after a stop or a kill. The target is loaded for its embedding, head and tokenizer, and to check the
    layers.
    """
    layer_ids = layer_ids_of(layers, "--layers")
    assert layer_ids is not None
    device = use_one_device(gpus)
    from dflash_train.commands.display import CountView
    from dflash_train.stage1_target.import_config import ImportConfig
    from dflash_train.stage1_target.importing import import_store as run
    from dflash_train.stage1_target.target_config import TargetConfig

    config = ImportConfig(
        source=source,
        target=TargetConfig(name=target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code),
        layers=layer_ids,
        device=device,
        **fields,
    )
    with Terminal(CountView("files")) as terminal:
        result = run(config, terminal.report)
    write_recipe(click.get_current_context(), config.store.with_name(f"{config.store.name}.recipe.toml"))
    *lines, last = result.lines()
    for line in lines:
        click.echo(line)
    click.echo(f"{last} ({format_duration(result.seconds)})" if result.num_new else last)
