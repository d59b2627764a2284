"""`dflash inspect-store`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dflash_train.commands.options import (
    StorePath,
    cache_bytes_option,
    cache_folder_option,
    json_option,
    one_gpu_option,
    output_option,
    target_options,
    use_one_device,
)
from dflash_train.commands.terminal import Terminal, progress_options, say, show
from dflash_train.errors import InputError
from dflash_train.machine.disks import remote_stores_folder
from dflash_train.store.location import StoreLocation, located


@click.command("inspect-store")
@click.argument("store", type=StorePath())
@click.option(
    "--verify",
    type=click.Choice(["checksums", "recompute"]),
    help="checksums reads every byte; recompute runs the target again on a few samples.",
)
@target_options(required=False)
@one_gpu_option
@click.option("--num-samples", default=4, show_default=True, help="Samples to recompute.")
@click.option(
    "--tolerance",
    default=0.05,
    show_default=True,
    help="Largest relative difference beyond the encoding's rounding that recompute accepts.",
)
@click.option("--sample", "sample_id", metavar="ID", help="Decode one sample, by the first digits of its id.")
@click.option(
    "--plot",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also draw lengths, supervised share, features and quantisation error, as PNG files in this folder.",
)
@cache_folder_option
@cache_bytes_option
@json_option
@output_option
@progress_options
def inspect_store(
    store: StoreLocation,
    verify: str | None,
    target: str | None,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    gpus: str | None,
    num_samples: int,
    tolerance: float,
    sample_id: str | None,
    plot: Path | None,
    cache_folder: Path | None,
    cache_bytes: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Show what is in a store and whether it is whole.

    Exit status 1 if it is not.
    """
    if cache_bytes < 0:
        raise InputError(f"--cache-bytes is {cache_bytes}, but at least 0 is needed.")
    store = located(store, remote_stores_folder(cache_folder), cache_bytes)
    if plot is not None and (verify is not None or sample_id is not None):
        raise click.UsageError("--plot draws the whole store: give neither --verify nor --sample with it.")
    if verify == "recompute":
        if target is None:
            raise click.UsageError("--verify recompute runs the target again: give --target.")
        if not 0 <= tolerance < float("inf"):
            raise InputError(f"--tolerance is {tolerance}, but a difference is at least 0 and finite.")
        torch_device = use_one_device(gpus)
        from dataclasses import asdict

        from dflash_train.commands.display import CountView
        from dflash_train.stage1_target.recompute import recompute_samples
        from dflash_train.stage1_target.target_config import TargetConfig

        config = TargetConfig(name=target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code)
        with Terminal(CountView("samples")) as terminal:
            terminal.report(f"loading {target}")
            again = recompute_samples(
                store, config, num_samples, torch_device, progress=lambda *count: terminal.report(count)
            )
        limit = tolerance + again.rounding
        wrong = [name for name, difference in again.largest.items() if not difference <= limit]
        lines = [f"{len(again.samples)} samples, {again.num_tokens:,} tokens run again; largest relative difference:"]
        lines += [f"  {name}: {difference:.3%}" for name, difference in again.largest.items()]
        lines.append(f"more than {limit:.1%} in {', '.join(wrong)}" if wrong else "equal within rounding")
        show({**asdict(again), "ok": not wrong}, "\n".join(lines), as_json, output)
        sys.exit(bool(wrong))
    if verify == "checksums":
        from dataclasses import asdict

        from dflash_train.commands.display import CountView
        from dflash_train.store.verify import format_verification, verify_store

        with Terminal(CountView.of_bytes()) as terminal:
            found = verify_store(store, lambda *count: terminal.report(count))
        show(asdict(found), format_verification(found), as_json, output)
        sys.exit(bool(found.problems))
    if sample_id is not None:
        from dflash_train.stage1_target.target_config import TargetConfig, load_tokenizer
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
    if plot is not None:
        from dflash_train.store.plots import plot_store

        report["plots"] = [str(path) for path in plot_store(store, plot)]
        say(f"drawn: {', '.join(report['plots'])}")
    show(report, format_report(report), as_json, output)
