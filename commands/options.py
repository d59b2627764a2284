"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dflash_train.errors import InputError
from dflash_train.store.location import CACHE_BYTES, StoreUrl, beside, parse_store

if TYPE_CHECKING:
    from dflash_train.machine.devices import Device

Command = TypeVar("Command", bound=Callable[..., Any])


class StorePath(click.Path):
    """A folder, or the URL of a store in an object store; `url=False` refuses the latter by name."""

    def __init__(self, url: bool = True) -> None:
        super().__init__(path_type=Path)
        self._url = url

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            store = parse_store(value)
        except InputError as error:
            self.fail(str(error), param, ctx)
        if isinstance(store, StoreUrl) and not self._url:
            self.fail(f"{store} is a URL, but this command takes a store in a folder. Give its path.", param, ctx)
        return store if isinstance(store, StoreUrl) else super().convert(str(store), param, ctx)


class RunPath(StorePath):
    """The folder of a run, or the store of an extract, whose logs lie beside it or beside a URL's name here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return beside(super().convert(value, param, ctx))


cache_folder_option = click.option(
    "--cache-folder",
    type=click.Path(path_type=Path),
    help="What is kept here of a store at a URL. Default: user cache.",
)
cache_bytes_option = click.option(
    "--cache-bytes",
    default=CACHE_BYTES,
    show_default=True,
    help="Most bytes of sample rows kept there; 0 keeps none.",
)


compile_cache_option = click.option(
    "--compile-cache",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Compiled kernels, in a folder for each process; best on a local disk. Default: RUN/compile-cache; under "
    "torchrun on several machines, the user cache.",
)


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


template_option = click.option(
    "--chat-template-arguments",
    default="{}",
    metavar="JSON",
    help="""Passed to the chat template, such as '{"enable_thinking": false}'.""",
)


def data_options(command: Command) -> Command:
    """Which conversations, and how the chat template renders them."""
    return options(
        click.option(
            "--data", required=True, help="Local json, jsonl, parquet, arrow, a folder of these, or a hub name."
        ),
        click.option("--split", default="train", show_default=True, help="Split of the data set."),
        template_option,
    )(command)


def sampling_options(command: Command) -> Command:
    """How a token is chosen."""
    return options(
        click.option(
            "--temperature",
            default=0.0,
            show_default=True,
            help="0 is greedy; above, rejection sampling keeps the target's own distribution.",
        ),
        click.option(
            "--top-p", default=1.0, show_default=True, help="Only the likeliest tokens up to this probability."
        ),
        click.option("--top-k", default=0, show_default=True, help="Only so many of the likeliest tokens; 0 is all."),
        click.option("--seed", default=0, show_default=True, help="Of what is drawn at a temperature above 0."),
    )(command)


def segment_options(command: Command) -> Command:
    """When an open segment of a store is committed."""
    return options(
        click.option(
            "--segment-bytes", default=2_000_000_000, show_default=True, help="A segment is committed at this size …"
        ),
        click.option(
            "--segment-seconds", default=300.0, show_default=True, help="… or at this age: the most a kill can lose."
        ),
    )(command)


calibration_tokens_option = click.option(
    "--calibration-tokens",
    default=65_536,
    show_default=True,
    help="Tokens that channel scale and projection are measured on.",
)
gpus_option = click.option(
    "--gpus",
    metavar="LIST",
    help="GPUs as nvidia-smi numbers them, such as 0-4 or 5,7; or cpu, or cpu:3. Default: all.",
)
gpus_per_target_option = click.option(
    "--gpus-per-target",
    default=1,
    show_default=True,
    help="GPUs that hold one copy of the target, where it does not fit one.",
)
one_gpu_option = click.option(
    "--gpus", metavar="LIST", help="One GPU as nvidia-smi numbers them, such as 0; or cpu. Default: the first."
)
allow_busy_gpus_option = click.option(
    "--allow-busy-gpus", is_flag=True, help="Start on GPUs that other processes hold memory of, instead of stopping."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")


def check_name(_context: click.Context, _parameter: click.Parameter, path: Any) -> Any:
    """Refuse a path such as «» or «..», beside which nothing can stand."""
    if not path.name or path.name == "..":
        raise click.BadParameter(f"{str(path)!r} has no name of its own; name the folder to make.")
    return path


def check_output(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that could not be written, before the work whose result it is for."""
    place = None if path is None else next(parent for parent in path.absolute().parents if parent.exists())
    if place is not None and not place.is_dir():
        raise click.BadParameter(f"{str(path)!r} lies under the file {str(place)!r}; name another path.")
    if place is not None and not os.access(place, os.W_OK):
        raise click.BadParameter(f"{str(place)!r} cannot be written; name another path.")
    return path


def check_picture(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that could not be written, or whose name promises another format."""
    if path is not None and path.suffix.lower() != ".png":
        raise click.BadParameter(f"{str(path)!r} must end in .png; name another file.")
    return check_output(context, parameter, path)


output_option = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=check_output,
    help="Also write the JSON here.",
)


def use_devices(gpus: str | None) -> list[Device]:
    """The devices given, by default the first; a single one is made the only one that this process sees.

    Call it before torch is imported. Of several, each is for a process of its own.
    """
    from dflash_train.machine.devices import parse_devices, use_device

    devices = parse_devices(gpus)
    if gpus is None:
        devices = devices[:1]
    if len(devices) == 1:
        use_device(devices[0])
    return devices


def use_one_device(gpus: str | None) -> str:
    """Make the first of the given devices the only one that this process sees; call before torch is imported."""
    from dflash_train.machine.devices import parse_devices, use_device

    devices = parse_devices(gpus)
    if gpus is not None and len(devices) > 1:
        raise InputError(f"--gpus {gpus} names {len(devices)} devices, but this command runs on one: name one.")
    return use_device(devices[0])


def layer_ids_of(text: str | None, option: str = "--target-layers") -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.UsageError(f"{option} is {text!r}; write layer numbers like 1,9,17,25,33.") from error


def chat_template_arguments_of(text: str) -> dict[str, Any]:
    wanted = """Write an object, such as '{"enable_thinking": false}'."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested without end
        raise click.UsageError(f"--chat-template-arguments is no JSON ({error}): {text[:80]!r}. {wanted}") from error
    if not isinstance(value, dict):
        raise click.UsageError(f"--chat-template-arguments is {text[:80]!r}, no JSON object. {wanted}")
    return value
