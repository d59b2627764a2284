"""`dflash regenerate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dflash_train.commands.options import (
    allow_busy_gpus_option,
    chat_template_arguments_of,
    data_options,
    gpus_option,
    target_options,
)
from dflash_train.commands.preflight import check_start
from dflash_train.commands.recipe import write_recipe
from dflash_train.commands.terminal import Terminal, fail, progress_options
from dflash_train.units import format_duration


@click.command()
@target_options(required=True)
@data_options
@click.option("--output", required=True, type=click.Path(path_type=Path), help="The .jsonl of answers; filled up.")
@click.option("--temperature", default=0.7, show_default=True, help="0 is greedy. Give what you will serve with.")
@click.option("--top-p", default=1.0, show_default=True, help="Sample from the likeliest tokens of this probability.")
@click.option("--top-k", default=0, show_default=True, help="Sample from this many likeliest tokens; 0 from all.")
@click.option("--max-new-tokens", default=2048, show_default=True, help="Limit of one answer.")
@click.option(
    "--keep-unfinished",
    is_flag=True,
    help="Keep answers that had not ended at the limit. A drafter would learn that they end there.",
)
@click.option("--seed", default=0, show_default=True, help="Of the draws.")
@click.option("--max-conversations", type=int, help="Take only the first conversations of the data.")
@gpus_option
@allow_busy_gpus_option
@click.option("--batch-size", default=32, show_default=True, help="Conversations generated together on one GPU.")
@click.option("--server", metavar="URL", help="OpenAI-compatible server of the target, instead of loading it here.")
@click.option("--server-model", help="What the server calls the target. Default: the only model it lists.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="File with the server's key.")
@click.option("--requests", default=64, show_default=True, help="Requests in flight at a time.")
@click.option("--request-seconds", default=600.0, show_default=True, help="How long to wait for an answer.")
@click.option("--retries", default=6, show_default=True, help="Further tries of a request that failed in passing.")
@click.option("--log-folder", type=click.Path(path_type=Path), help="Where workers log. Default: OUTPUT.logs.")
@progress_options
def regenerate(
    target: str,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    data: str,
    chat_template_arguments: str,
    gpus: str | None,
    allow_busy_gpus: bool,
    **fields: Any,
) -> None:
    """Let the target answer the questions of a data set itself.

    Answers in the data are dropped; each conversation is answered turn by turn. Run the same command again to go on
    after a stop or a kill: it asks only what is not answered yet. `dflash extract` takes the output as it is. With
    --server, --target only names what runs there.
    """
    template_arguments = chat_template_arguments_of(chat_template_arguments)
    if fields["server"] is None:
        check_start(gpus=gpus, target=target, revision=revision, allow_busy_gpus=allow_busy_gpus)
    from dflash_train.commands.display import RegenerateView
    from dflash_train.stage1_target.regenerate import RegenerateConfig
    from dflash_train.stage1_target.regenerate import regenerate as run
    from dflash_train.stage1_target.target_config import TargetConfig

    config = RegenerateConfig(
        target=TargetConfig(name=target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code),
        source=data,
        chat_template_arguments=template_arguments,
        devices=gpus,
        **fields,
    )
    with Terminal(RegenerateView()) as terminal:
        result = run(config, terminal.report)
    for failure in result.failures:
        fail(failure)
    *lines, last = result.lines()
    for line in lines:
        click.echo(line)
    done = f" ({result.num_new:,} done in this run, {result.num_tokens:,} tokens in {format_duration(result.seconds)})"
    click.echo(f"{last}{done if result.num_new else ''}")
    if result.num_new:
        write_recipe(click.get_current_context(), config.output.with_name(f"{config.output.name}.recipe.toml"))
    sys.exit(result.exit_status)
