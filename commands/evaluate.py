"""`dflash evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dflash_train.commands.options import (
    chat_template_arguments_of,
    data_options,
    json_option,
    one_gpu_option,
    output_option,
    target_options,
    use_one_device,
)
from dflash_train.commands.recipe import write_recipe
from dflash_train.commands.terminal import Terminal, progress_options, show


@click.command()
@target_options(required=True)
@click.option(
    "--drafter", required=True, type=click.Path(path_type=Path), help="Drafter folder, or a run (its newest)."
)
@data_options
@one_gpu_option
@click.option("--max-prompts", default=32, show_default=True, help="Prompts from the start of the data; 0 for all.")
@click.option("--max-new-tokens", default=256, show_default=True, help="Tokens to decode for each prompt.")
@click.option("--block-size", type=int, help="Block size, anchor included. Default: the drafter's.")
@click.option("--plain/--no-plain", "compare_plain", default=True, help="Decode without the drafter too, and compare.")
@json_option
@output_option
@progress_options
def evaluate(
    target: str,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    data: str,
    split: str,
    chat_template_arguments: str,
    gpus: str | None,
    max_prompts: int,
    as_json: bool,
    output: Path | None,
    **fields: Any,
) -> None:
    """Measure acceptance length by real speculative decoding.

    Decoding is greedy. Each prompt is the first user turn of a row of --data, with what stands before it. Use prompts that were not trained
    on. Exit status 1 if the output differs from plain greedy decoding by more than rounding explains.
    """
    torch_device = use_one_device(gpus)
    from dflash_train.commands.display import EvaluateView
    from dflash_train.speculate.evaluate import EvaluateConfig, format_evaluation
    from dflash_train.speculate.evaluate import evaluate as run
    from dflash_train.stage1_target.generation import generation_mismatches
    from dflash_train.stage1_target.target import TargetConfig

    config = EvaluateConfig(
        target=TargetConfig(name=target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code),
        prompts=data,
        split=split,
        chat_template_arguments=chat_template_arguments_of(chat_template_arguments),
        max_prompts=max_prompts or None,
        device=torch_device,
        **fields,
    )
    with Terminal(EvaluateView()) as terminal:
        for warning in generation_mismatches(data, target, config.chat_template_arguments):
            terminal.report(warning)
        terminal.report(f"loading {target}")
        result = run(config, terminal.report)
    show(result, format_evaluation(result), as_json, output)
    if output is not None:
        write_recipe(click.get_current_context(), output.with_suffix(".recipe.toml"))
    sys.exit(result["lossless"] is False)
