"""The commands: each parses, calls one function and prints. Heavy packages are imported inside, so --help is quick.

Results go to stdout, progress and notes to stderr, so `--json` can be piped. Bad input ends with one sentence and exit
status 1, wrong usage with 2; only bugs show a traceback.
"""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dflash_train.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

Command = TypeVar("Command", bound=Callable[..., Any])


class Group(click.Group):
    """A group whose commands turn expected errors into one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
                raise
            raise click.ClickException(f"{error.strerror}: {error.filename or 'the disk'}.") from error


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator, in the order given."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def target_options(required: bool) -> Callable[[Command], Command]:
    """Which target, and how to load it."""
    return options(
        click.option("--target", required=required, help="Hub name, local folder, or local .gguf file of the target."),
        click.option("--revision", help="Commit, branch or tag of the target on the hub."),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
            default="auto",
            show_default=True,
            help="auto is bfloat16 on a GPU and float32 on a CPU.",
        ),
        click.option("--trust-remote-code", is_flag=True, help="Let model code from the hub run."),
    )


def data_options(command: Command) -> Command:
    """Which conversations, and how the chat template renders them."""
    return options(
        click.option(
            "--data", required=True, help="Local json, jsonl, parquet, arrow, a folder of these, or a hub name."
        ),
        click.option("--split", default="train", show_default=True, help="Split of the data set."),
        click.option(
            "--chat-template-arguments",
            default="{}",
            metavar="JSON",
            help="""Passed to the chat template, such as '{"enable_thinking": false}'.""",
        ),
    )(command)


gpus_option = click.option(
    "--gpus",
    metavar="LIST",
    help="GPUs as nvidia-smi numbers them, such as 0-4 or 5,7; or cpu, or cpu:3. Default: all.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
output_option = click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON here."
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="dflash-train", prog_name="dflash")
def main() -> None:
    """Train DFlash drafters for your own target, in two stages that share a store on disk.

    \b
    1. dflash extract         run the frozen target, write its hidden states to a store
    2. dflash inspect-store   look at a store, verify it
    3. dflash train-drafter   train a drafter from the store
    4. dflash evaluate        measure its acceptance length by speculative decoding
    """


@main.command()
@target_options(required=True)
@data_options
@click.option(
    "--store", required=True, type=click.Path(path_type=Path), help="Folder of the store; filled up if it is there."
)
@gpus_option
@click.option(
    "--encoding",
    type=click.Choice(["bf16", "int8"]),
    default="int8",
    show_default=True,
    help="bf16 is exact; int8 takes half the bytes.",
)
@click.option(
    "--target-layers", metavar="IDS", help="Decoder layers to tap, 0 is the first: 1,9,17,25,33. Default: z-lab's rule."
)
@click.option("--num-taps", default=5, show_default=True, help="How many layers z-lab's rule taps.")
@click.option("--max-tokens", default=4096, show_default=True, help="Longer samples are cut at the tail, and counted.")
@click.option("--max-samples", type=int, help="Take only the first rows of the data set.")
@click.option("--batch-tokens", default=16_384, show_default=True, help="Tokens of one forward, padding included.")
@click.option("--segment-bytes", default=2_000_000_000, show_default=True, help="A segment is committed at this size …")
@click.option("--segment-seconds", default=300.0, show_default=True, help="… or at this age: the most a kill can lose.")
@click.option(
    "--calibration-tokens", default=65_536, show_default=True, help="Tokens that the channel scale is measured on."
)
@click.option(
    "--calibration-from",
    type=click.Path(path_type=Path),
    help="Take the channel scale of this store, to train on both.",
)
@click.option("--seed", default=0, show_default=True, help="Of the order of samples and the calibration draw.")
@click.option(
    "--sample-cache", type=click.Path(path_type=Path), help="Where tokenised samples are kept. Default: user cache."
)
@click.option("--log-folder", type=click.Path(path_type=Path), help="Where workers log. Default: STORE.logs.")
@click.option(
    "--dry-run", is_flag=True, help="Forecast samples, tokens and size, and stop before the target is loaded."
)
def extract(
    target: str,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    data: str,
    split: str,
    chat_template_arguments: str,
    gpus: str | None,
    target_layers: str | None,
    max_tokens: int,
    max_samples: int | None,
    **fields: Any,
) -> None:
    """Store the hidden states of the target over conversations.

    Run the same command again, with any number of GPUs, to go on after a stop or a kill: it stores what is missing.
    """
    from dflash_train.stage1_target.extract import ExtractConfig, Progress, Tokenising
    from dflash_train.stage1_target.extract import extract as run
    from dflash_train.stage1_target.forecast import Forecast
    from dflash_train.stage1_target.samples import DataConfig
    from dflash_train.stage1_target.target import TargetConfig

    config = ExtractConfig(
        target=TargetConfig(name=target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code),
        data=DataConfig(
            source=data,
            split=split,
            max_tokens=max_tokens,
            max_samples=max_samples,
            chat_template_arguments=_json_object(chat_template_arguments),
        ),
        devices=gpus,
        target_layer_ids=_layer_ids(target_layers),
        **fields,
    )
    paced = Paced()

    def report(event: Any) -> None:
        if isinstance(event, Tokenising):
            paced(f"tokenising: {event.num_done:,} of {event.num_rows or '?':,} rows", event.num_done == event.num_rows)
        elif isinstance(event, Forecast):
            for line in event.lines():
                say(line)
        elif isinstance(event, Progress):
            paced(event.line(), event.num_committed == event.num_pending)
        else:
            say(event.text)

    result = run(config, report)
    for failure in result.failures:
        click.echo(f"Error: {failure}", err=True)
    speed = f" ({result.num_new_tokens:,} tokens in {result.seconds:.0f} s)" if result.num_new_tokens else ""
    click.echo(f"{result.message}{speed}")
    sys.exit(result.exit_status)


@main.command("inspect-store")
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--verify",
    type=click.Choice(["checksums", "recompute"]),
    help="checksums reads every byte; recompute runs the target again on a few samples.",
)
@target_options(required=False)
@gpus_option
@click.option("--num-samples", default=4, show_default=True, help="Samples to recompute.")
@click.option(
    "--tolerance", default=0.05, show_default=True, help="Largest relative difference that recompute accepts."
)
@click.option("--sample", "sample_id", metavar="ID", help="Decode one sample, by the first digits of its id.")
@json_option
@output_option
def inspect_store(
    store: Path,
    verify: str | None,
    target: str | None,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    gpus: str | None,
    num_samples: int,
    tolerance: float,
    sample_id: str | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Show what is in a store, and whether it is whole; exit status 1 if it is not."""
    if verify == "recompute":
        if target is None:
            raise click.UsageError("--verify recompute runs the target again: give --target.")
        torch_device = _use_one_device(gpus)
        from dataclasses import asdict

        from dflash_train.stage1_target.recompute import recompute_samples
        from dflash_train.stage1_target.target import TargetConfig

        config = TargetConfig(name=target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code)
        again = recompute_samples(store, config, num_samples, torch_device)
        wrong = [layer for layer, difference in again.largest.items() if not difference <= tolerance]
        lines = [f"{len(again.samples)} samples, {again.num_tokens:,} tokens run again; largest relative difference:"]
        lines += [f"  layer {layer}: {difference:.3%}" for layer, difference in again.largest.items()]
        lines.append(f"more than {tolerance:.1%} in layers {wrong}" if wrong else "equal within rounding")
        show({**asdict(again), "ok": not wrong}, "\n".join(lines), as_json, output)
        sys.exit(bool(wrong))
    if verify == "checksums":
        from dataclasses import asdict

        from dflash_train.store.verify import format_verification, verify_store

        paced = Paced()
        found = verify_store(store, lambda done, total: paced(f"{done / max(total, 1):.0%} read", done == total))
        show(asdict(found), format_verification(found), as_json, output)
        sys.exit(bool(found.problems))
    if sample_id is not None:
        from dflash_train.stage1_target.target import TargetConfig, load_tokenizer
        from dflash_train.stage1_target.tokenization import mark_supervised
        from dflash_train.store.reader import StoreReader
        from dflash_train.store.report import sample_report

        reader = StoreReader(store)
        sample = sample_report(reader, sample_id)
        tokenizer = load_tokenizer(TargetConfig(name=str(reader.tokenizer_path())))
        text = mark_supervised(tokenizer, sample["token_ids"], sample["loss_mask"])
        head = "sample {id}, group {group}, segment {segment}: {length} tokens, {supervised} supervised".format(
            **sample
        )
        show({**sample, "text": text}, f"{head}\n\n{text}", as_json, output)
        return
    from dflash_train.store.report import format_report, store_report

    report = store_report(store)
    show(report, format_report(report), as_json, output)


@main.command("train-drafter")
@click.option("--store", required=True, type=click.Path(path_type=Path), help="Folder of the store.")
@click.option(
    "--run", required=True, type=click.Path(path_type=Path), help="Folder of this run; the same again goes on."
)
@gpus_option
@click.option("--num-layers", default=5, show_default=True, help="Decoder layers of the drafter.")
@click.option("--block-size", default=16, show_default=True, help="Tokens of a block, anchor included.")
@click.option(
    "--drafter-config", type=click.Path(path_type=Path), help="A drafter's config.json, used instead of the above."
)
@click.option(
    "--mask-token", help="Id or text of the token in a block's open slots. Default: the tokenizer's, or a free row."
)
@click.option("--row-tokens", default=8192, show_default=True, help="Samples are packed into rows of so many tokens.")
@click.option("--anchors", default=1024, show_default=True, help="Blocks of a row.")
@click.option("--rows-per-step", default=6, show_default=True, help="Rows of an optimizer step, over all GPUs.")
@click.option("--crop", is_flag=True, help="Cut samples longer than a row instead of refusing them.")
@click.option("--steps", type=int, help="Optimizer steps of the whole run; 0 writes the untrained drafter.")
@click.option("--epochs", type=int, help="Passes over the store. Default: 6, where --steps is not given.")
@click.option("--lr", default=6e-4, show_default=True, help="Peak learning rate.")
@click.option("--betas", nargs=2, type=float, default=(0.9, 0.95), show_default=True, help="AdamW's moments.")
@click.option("--weight-decay", default=0.0, show_default=True, help="AdamW's decay, on matrices only.")
@click.option("--clip", default=1.0, show_default=True, help="Largest gradient norm.")
@click.option("--warmup-ratio", default=0.04, show_default=True, help="Share of the steps that warm up.")
@click.option("--schedule", type=click.Choice(["cosine", "wsd", "constant"]), default="cosine", show_default=True)
@click.option("--decay-ratio", default=0.2, show_default=True, help="Share of the steps that fall, under wsd.")
@click.option("--min-lr-ratio", default=0.1, show_default=True, help="Last learning rate over the peak.")
@click.option(
    "--loss", type=click.Choice(["decay", "dpace"]), default="decay", show_default=True, help="Weights by slot."
)
@click.option("--gamma", type=float, help="Slots over which decay falls by e. Default: the paper's, by block size.")
@click.option("--dpace-alpha", default=0.5, show_default=True, help="Smoothing of D-PACE.")
@click.option("--seed", default=0, show_default=True, help="Of the first weights, the rows and the anchors.")
@click.option("--holdout", default=0.02, show_default=True, help="Share of the conversations kept for evaluation.")
@click.option("--evaluate-every", default=500, show_default=True, help="Steps between held-out evaluations.")
@click.option("--evaluate-rows", default=32, show_default=True, help="Most rows of one evaluation.")
@click.option("--save-every", default=1000, show_default=True, help="Steps between checkpoints.")
@click.option("--keep", default=3, show_default=True, help="Newest checkpoints that stay, beside the best.")
@click.option("--log-every", default=10, show_default=True, help="Steps between lines on the terminal.")
@click.option("--read-ahead", default=3, show_default=True, help="Rows read ahead by each process.")
@click.option("--bad-step-limit", default=10, show_default=True, help="Non-finite steps in a row that end the run.")
def train_drafter(gpus: str | None, **fields: Any) -> None:
    """Train a drafter from a store.

    Run the same command again to go on from the newest checkpoint. Each folder RUN/checkpoints/step-… is a drafter in
    z-lab's format that SGLang, vLLM and z-lab's package load.
    """
    from dflash_train.stage2_drafter.config import TrainConfig
    from dflash_train.stage2_drafter.train import train

    result = train(TrainConfig(devices=gpus, **fields), say)
    click.echo(f"step {result.step:,} of {result.total_steps:,}: {result.checkpoint}")


@main.command()
@target_options(required=True)
@click.option(
    "--drafter", required=True, type=click.Path(path_type=Path), help="Drafter folder, or a run (its newest)."
)
@data_options
@gpus_option
@click.option("--max-prompts", default=32, show_default=True, help="Prompts from the start of the data; 0 for all.")
@click.option("--max-new-tokens", default=256, show_default=True, help="Tokens to decode for each prompt.")
@click.option("--block-size", type=int, help="Block size, anchor included. Default: the drafter's.")
@click.option("--plain/--no-plain", "compare_plain", default=True, help="Decode without the drafter too, and compare.")
@json_option
@output_option
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
    """Measure the acceptance length of a drafter by real speculative decoding, greedily.

    Each prompt is the first user turn of a row of --data, with what stands before it. Use prompts that were not trained
    on. Exit status 1 if the output differs from plain greedy decoding by more than rounding explains.
    """
    torch_device = _use_one_device(gpus)
    from dflash_train.speculate.evaluate import EvaluateConfig, format_evaluation
    from dflash_train.speculate.evaluate import evaluate as run
    from dflash_train.stage1_target.target import TargetConfig

    config = EvaluateConfig(
        target=TargetConfig(name=target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code),
        prompts=data,
        split=split,
        chat_template_arguments=_json_object(chat_template_arguments),
        max_prompts=max_prompts or None,
        device=torch_device,
        **fields,
    )
    paced = Paced()
    result = run(config, lambda done, total: paced(f"{done:,} of {total:,} prompts decoded", done == total))
    show(result, format_evaluation(result), as_json, output)
    sys.exit(result["lossless"] is False)


def say(line: str) -> None:
    """One line of progress, with the time of day, on stderr."""
    click.echo(f"{time.strftime('%H:%M:%S')}  {line}", err=True)


class Paced:
    """`say`, but at most once in some seconds, so that a progress callback may call it as often as it likes."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._next = 0.0
        self._last = ""

    def __call__(self, line: str, last: bool = False) -> None:
        now = time.monotonic()
        if (now >= self._next or last) and line != self._last:
            say(line)
            self._next, self._last = now + self._seconds, line


def show(report: dict[str, Any], text: RenderableType, as_json: bool, output: Path | None) -> None:
    """Print a report as text or JSON on stdout, and write the JSON to `output` where that is given."""
    document = json.dumps(report, indent=2, ensure_ascii=False)
    if output is not None:
        output.write_text(document + "\n", encoding="utf-8")
    if as_json:
        click.echo(document)
    else:
        from rich.console import Console

        Console(highlight=False, soft_wrap=isinstance(text, str)).print(text, markup=not isinstance(text, str))


def _use_one_device(gpus: str | None) -> str:
    """Make the first of the given devices the only one that this process sees; call before torch is imported."""
    from dflash_train.launch import parse_devices, use_device

    devices = parse_devices(gpus)
    if gpus is not None and len(devices) > 1:
        raise InputError(f"--gpus {gpus} names {len(devices)} devices, but this command runs on one: name one.")
    return use_device(devices[0])


def _layer_ids(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.UsageError(f"--target-layers is {text!r}; write layer numbers like 1,9,17,25,33.") from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise click.UsageError(f"--chat-template-arguments is no JSON ({error}): {text!r}.") from error
    if not isinstance(value, dict):
        raise click.UsageError(f"--chat-template-arguments must be a JSON object, found {text!r}.")
    return value


if __name__ == "__main__":
    main()
