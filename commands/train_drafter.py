"""`dflash train-drafter`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dflash_train.commands.detach import current_recorder, detachable, recorded_training
from dflash_train.commands.options import (
    StorePath,
    allow_busy_gpus_option,
    cache_bytes_option,
    cache_folder_option,
    compile_cache_option,
    gpus_option,
)
from dflash_train.commands.preflight import check_start
from dflash_train.commands.recipe import write_recipe
from dflash_train.commands.terminal import Terminal, progress_options


@click.command("train-drafter")
@click.option(
    "--store",
    "stores",
    required=True,
    multiple=True,
    type=StorePath(),
    help="Folder of the store, or its URL; again for other folders with an equal manifest.",
)
@click.option(
    "--run", required=True, type=click.Path(path_type=Path), help="Folder of this run; the same again goes on."
)
@gpus_option
@allow_busy_gpus_option
@click.option("--num-layers", default=5, show_default=True, help="Decoder layers of the drafter.")
@click.option("--block-size", default=16, show_default=True, help="Tokens of a block, anchor included.")
@click.option(
    "--drafter-config", type=click.Path(path_type=Path), help="A drafter's config.json, used instead of the above."
)
@click.option(
    "--init-from",
    type=click.Path(path_type=Path),
    help="Start a new run from this drafter: a folder in z-lab's format or a run; its config.json holds.",
)
@click.option(
    "--mask-token", help="Id or text of the token in a block's open slots. Default: the tokenizer's, or a free row."
)
@click.option("--row-tokens", default=8192, show_default=True, help="Samples are packed into rows of so many tokens.")
@click.option("--anchors", default=1024, show_default=True, help="Blocks of a row.")
@click.option(
    "--anchors-by",
    type=click.Choice(["token", "conversation"]),
    default="token",
    show_default=True,
    help="Draw them so that each supervised token is as likely, or that each conversation gets as many.",
)
@click.option(
    "--rows-per-step",
    default=6,
    show_default=True,
    help="Rows of an optimizer step, over all GPUs; each accumulates the gradient of its share.",
)
@click.option(
    "--activation-checkpointing",
    is_flag=True,
    help="Keep only the layers' inputs for the backward pass: less memory, slower.",
)
@click.option("--crop", is_flag=True, help="Cut samples longer than a row instead of refusing them.")
@click.option("--steps", type=int, help="Optimizer steps of the whole run; 0 writes the untrained drafter.")
@click.option("--epochs", type=int, help="Passes over the store. Default: 6, where --steps is not given.")
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "muon"]),
    default="adamw",
    show_default=True,
    help="muon: for the layers' matrices; fc and norms stay with AdamW. The same --lr serves both.",
)
@click.option("--follow", is_flag=True, help="Train while an extract fills the store; wait where the data is behind.")
@click.option("--consume", type=int, help="Remove data from the store after so many passes. Needs --follow.")
@click.option(
    "--fraction", default=1.0, show_default=True, help="Share of the samples to train on, chosen by their ids."
)
@click.option("--lr", default=6e-4, show_default=True, help="Peak learning rate.")
@click.option("--betas", nargs=2, type=float, default=(0.9, 0.95), show_default=True, help="AdamW's moments.")
@click.option("--weight-decay", default=0.0, show_default=True, help="Decay of the weights, on matrices only.")
@click.option("--clip", default=1.0, show_default=True, help="Largest gradient norm.")
@click.option("--warmup-ratio", default=0.04, show_default=True, help="Share of the steps that warm up.")
@click.option(
    "--schedule",
    type=click.Choice(["cosine", "wsd", "constant"]),
    default="cosine",
    show_default=True,
    help="Course of the learning rate after the warm-up; wsd: constant, then falling.",
)
@click.option("--decay-ratio", default=0.2, show_default=True, help="Share of the steps that fall, under wsd.")
@click.option("--min-lr-ratio", default=0.1, show_default=True, help="Last learning rate over the peak.")
@click.option(
    "--loss",
    type=click.Choice(["dpace", "decay"]),
    default="dpace",
    show_default=True,
    help="Weights by slot: D-PACE's, or the paper's decay.",
)
@click.option("--gamma", type=float, help="Slots over which decay falls by e. Default: the paper's, by block size.")
@click.option("--dpace-alpha", default=0.5, show_default=True, help="Smoothing of D-PACE.")
@click.option("--seed", default=0, show_default=True, help="Of the first weights, the rows and the anchors.")
@click.option("--holdout", default=0.02, show_default=True, help="Share of the conversations kept for evaluation.")
@click.option("--evaluate-every", default=500, show_default=True, help="Steps between held-out evaluations.")
@click.option("--evaluate-rows", default=32, show_default=True, help="Most rows of one evaluation.")
@click.option(
    "--evaluate-target",
    metavar="TARGET",
    help="Also measure the real acceptance length at every evaluation, with this target on the first GPU.",
)
@click.option("--evaluate-prompts", metavar="DATA", help="Prompts for that, as in `dflash evaluate --data`.")
@click.option("--evaluate-prompts-limit", default=8, show_default=True, help="Prompts of these: a sample.")
@click.option("--evaluate-new-tokens", default=128, show_default=True, help="Tokens decoded for each of them.")
@click.option("--save-every", default=1000, show_default=True, help="Steps between checkpoints.")
@click.option("--keep", default=3, show_default=True, help="Newest checkpoints that stay, beside the best.")
@click.option("--log-every", default=10, show_default=True, help="Steps between lines on the terminal.")
@click.option("--read-ahead", default=3, show_default=True, help="Rows read ahead by each process.")
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp8"]),
    default="bf16",
    show_default=True,
    help="Of the products on a GPU; fp8 is experimental and needs Hopper or later.",
)
@click.option("--direct-io", is_flag=True, help="Read features past the page cache, where the file system can.")
@compile_cache_option
@cache_folder_option
@cache_bytes_option
@click.option("--bad-step-limit", default=10, show_default=True, help="Non-finite steps in a row that end the run.")
@progress_options
@detachable(lambda given: (given["run"], given["run"] / "logs"))
def train_drafter(gpus: str | None, allow_busy_gpus: bool, stores: tuple[Path, ...], **fields: Any) -> None:
    """Train a drafter from a store.

    Run the same command again to go on from the newest checkpoint. Each folder RUN/checkpoints/step-… is a drafter in
    z-lab's format that SGLang, vLLM and z-lab's package load.
    """
    from dflash_train.machine.compile_cache import compile_cache_folder, use_compile_cache
    from dflash_train.machine.launch import leave_process
    from dflash_train.machine.torchrun import torchrun_place
    from dflash_train.stage2_drafter.config import TrainConfig

    first, *others = stores
    context = click.get_current_context()
    for other in ("init_from", "drafter_config"):
        _refuse_beside(context, other, fields)
    config = TrainConfig(store=first, more_stores=tuple(others), devices=gpus, **fields)
    check_start(gpus=gpus, run=config.run, compile_cache=config.compile_cache, allow_busy_gpus=allow_busy_gpus)
    place = torchrun_place()
    if place is not None:  # this process is a rank, and what follows imports torch
        use_compile_cache(compile_cache_folder(config.run, config.compile_cache), place.rank)
    from dflash_train.commands.display import TrainView
    from dflash_train.stage2_drafter.train import train

    with Terminal(TrainView()) as terminal:

        def report(line: str) -> None:
            if not (config.run / "recipe.toml").exists():  # the checks have passed: the run has begun
                write_recipe(context, config.run / "recipe.toml")
            terminal.report(line)

        measurement = None
        if config.evaluate_target is not None:
            from dflash_train.speculate.training import RealAcceptance

            measurement = RealAcceptance()
        result = train(config, *recorded_training(report, terminal.report), measurement)
    if place is not None:
        context.find_root().call_on_close(lambda: leave_process(0))  # as the ranks do that we start
        if place.rank != 0:  # one of torchrun's ranks speaks for all
            return
    message = f"step {result.step:,} of {result.total_steps:,}: {result.checkpoint}"
    if result.checkpoint is None:  # --follow, stopped before there was a store
        message = "no step was run: the store was not there yet"
    current_recorder().end("stopped" if result.stopped else "finished", message)
    click.echo(message)


def _refuse_beside(context: click.Context, source: str, fields: Mapping[str, Any]) -> None:
    """Refuse options on the command line that the drafter of `source` (init_from, drafter_config) has already decided."""
    typed = click.core.ParameterSource.COMMANDLINE
    given = [name for name in ("num_layers", "block_size") if context.get_parameter_source(name) is typed]
    if fields[source] is not None and given:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(
            f"{options} cannot be chosen beside --{source.replace('_', '-')}, whose drafter has them already: leave "
            f"{'it' if len(given) == 1 else 'them'} out."
        )
