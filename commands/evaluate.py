"""`dflash evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dflash_train.commands.options import (
    chat_template_arguments_of,
    check_picture,
    json_option,
    output_option,
    sampling_options,
    target_options,
    template_option,
    use_devices,
)
from dflash_train.commands.recipe import write_recipe
from dflash_train.commands.terminal import Terminal, fail, progress_options, say, show

INTERRUPTED = 130
"""Exit status of a shell's command that Ctrl-C ended."""


@click.command()
@target_options(required=True)
@click.option(
    "--drafter", required=True, type=click.Path(path_type=Path), help="Drafter folder, or a run (its newest)."
)
@click.option(
    "--data",
    required=True,
    multiple=True,
    help="gsm8k, math500, humaneval, mbpp or mt-bench from the hub (gsm8k=FILE: a copy of it); or a file, folder or hub "
    "name, as in extract. May be given several times.",
)
@click.option("--split", default="train", show_default=True, help="Split of data that is no such name.")
@template_option
@click.option(
    "--gpus",
    metavar="LIST",
    help="GPUs that share the prompts, as nvidia-smi numbers them: 0 or 0-3; or cpu, or cpu:2. Default: the first.",
)
@click.option("--max-prompts", default=32, show_default=True, help="Prompts of each data set, a sample; 0 for all.")
@click.option(
    "--max-turns", default=2, show_default=True, help="Turns of each prompt, the target's own answers between them."
)
@click.option("--max-new-tokens", default=256, show_default=True, help="Tokens to decode for each turn.")
@click.option("--block-size", type=int, help="Block size, anchor included. Default: the drafter's.")
@sampling_options
@click.option(
    "--plain/--no-plain",
    "compare_plain",
    default=True,
    show_default=True,
    help="Decode without the drafter too, and compare.",
)
@click.option(
    "--replay",
    is_flag=True,
    help="Temperature 0: the acceptance length alone, in seconds, from the target's own greedy answers of all turns. In "
    "float32 the rounds are those of decoding; in bfloat16 up to rounding.",
)
@click.option(
    "--batch-size", default=64, show_default=True, help="Answers that the target decodes at once, with --replay."
)
@click.option(
    "--reference", is_flag=True, help="Decode with z-lab's package (PyPI dflash) too, and compare the tokens."
)
@click.option(
    "--allow-trained-prompts",
    is_flag=True,
    help="Measure on prompts of the drafter's training data as well, instead of leaving them out.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=check_picture,
    metavar="FILE.png",
    help="Draw acceptance by block position.",
)
@json_option
@output_option
@progress_options
def evaluate(
    target: str,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    data: tuple[str, ...],
    chat_template_arguments: str,
    gpus: str | None,
    max_prompts: int,
    plot: Path | None,
    as_json: bool,
    output: Path | None,
    **fields: Any,
) -> None:
    """Measure acceptance length by real speculative decoding.

    Each prompt is the questions of a row of --data; the target gives the answers. Prompts that the drafter was trained on
    are left out. At temperature 0 the output is compared with plain decoding; exit status 1 if it differs by more than
    rounding explains. With --replay the target decodes alone, many prompts at once, and the rounds are worked out from its
    answers: no speeds, nothing to compare. Ctrl-C ends it with the result of the prompts that are finished.
    """
    devices = use_devices(gpus)
    from dflash_train.commands.display import EvaluateView
    from dflash_train.speculate.evaluate import EvaluateConfig
    from dflash_train.speculate.evaluate import evaluate as run
    from dflash_train.speculate.evaluation_tables import format_evaluation
    from dflash_train.stage1_target.target_config import TargetConfig

    config = EvaluateConfig(
        target=TargetConfig(name=target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code),
        prompts=data,
        chat_template_arguments=chat_template_arguments_of(chat_template_arguments),
        max_prompts=max_prompts or None,
        device=devices[0].torch_device,
        **fields,
    )
    with Terminal(EvaluateView()) as terminal:
        result = run(config, terminal.report, devices if len(devices) > 1 else ())
    show(result, format_evaluation(result), as_json, output)
    if output is not None:
        write_recipe(click.get_current_context(), output.with_suffix(".recipe.toml"))
    if plot is not None:
        from dflash_train.speculate.plots import plot_acceptance

        plot_acceptance(result, plot)
        say(f"wrote {plot}")
    for failure in result["failures"]:
        fail(failure)
    if result["interrupted"]:
        sys.exit(INTERRUPTED)
    wrong = result["lossless"] is False or (result["reference"] or {}).get("same") is False
    sys.exit(wrong or bool(result["failures"]))
