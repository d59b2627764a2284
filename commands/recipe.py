"""Recipes: options of a command in a TOML file, and the complete one that every run leaves beside its output.

A recipe has one table a command, with the options' own names, so that one file can describe a whole pipeline:

    [extract]
    target = "Qwen/Qwen3-8B"
    data = "conversations.jsonl"
    store = "qwen3-8b.zarr"

    [train-drafter]
    store = "qwen3-8b.zarr"
    run = "runs/qwen3-8b"
    betas = [0.9, 0.95]

Flags on the command line win over the recipe, the recipe over the defaults.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dflash_train.errors import InputError
from dflash_train.store.location import StoreUrl

NAMES_OR_PATHS = ("target", "data", "evaluate-target", "evaluate-prompts")
"""Options that name something on the hub, or a path."""
NOT_IN_RECIPES = ("recipe", "help", "detach")


def with_recipe(command: click.Command, commands: tuple[str, ...]) -> click.Command:
    """The command with `--recipe FILE.toml`; `commands` are the tables that a recipe may have."""
    if any(parameter.name == "recipe" for parameter in command.params):
        return command

    def load(context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
        if value is not None:
            context.default_map = read_recipe(value, command, commands)
        return value

    command.params.append(
        click.Option(
            ["--recipe"],
            type=click.Path(path_type=Path),
            is_eager=True,
            callback=load,
            expose_value=False,
            help=f"Take options from the table [{command.name}] of this TOML file; flags win.",
        )
    )
    return command


def read_recipe(path: Path, command: click.Command, commands: tuple[str, ...]) -> dict[str, Any]:
    """The options of a command in a recipe, by parameter name.

    Raises InputError for a file that cannot be read, and for tables and keys that are unknown, with the nearest known.
    """
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"The recipe {path} cannot be read: {error.strerror}. Give the path of a TOML file."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"The recipe {path} is not TOML: {error}. See the example in docs/recipes.md.") from error
    for name, table in recipe.items():
        if not isinstance(table, dict) or name not in commands:
            raise InputError(
                f"The recipe {path} has {name!r} at its top; put options into a table named after their command"
                f"{_nearest(name, commands)}."
            )
    known = _option_names(command)
    values = {}
    for key, value in recipe.get(command.name or "", {}).items():
        if key not in known:
            raise InputError(
                f"The recipe {path} has an unknown option {key!r} in [{command.name}]{_nearest(key, known)}."
            )
        parameter = next(one for one in command.params if one.name == known[key])
        values[known[key]] = _checked(f"The recipe {path} has {key} = ", value, parameter)
    return values


def _checked(start: str, value: Any, parameter: click.Parameter) -> Any:
    """The value as click takes it; raises InputError for a TOML type that the option cannot be made from."""
    if isinstance(value, dict):
        return json.dumps(value)
    scalar = (str, int, float)  # bool is an int
    if parameter.nargs == 1:
        is_text = isinstance(parameter.type, click.Path)
        values = value if parameter.multiple and isinstance(value, list) else [value]
        if not all(isinstance(item, str if is_text else scalar) for item in values):
            raise InputError(f"{start}{value!r}; write {'text in quotes' if is_text else 'one number or text'}.")
        return values if parameter.multiple else value
    if not isinstance(value, list) or not all(isinstance(item, scalar) for item in value):
        raise InputError(f"{start}{value!r}; write a list of {parameter.nargs} values.")
    return value


def format_recipe(command: click.Command, values: Mapping[str, Any]) -> str:
    """A recipe with every option that has a value; paths are made absolute, so that it works from anywhere."""
    lines = [f"[{command.name}]"]
    for key, name in _option_names(command).items():
        value = values.get(name)
        if key in NAMES_OR_PATHS and value is not None:
            value = [_path_or_name(item) for item in value] if isinstance(value, tuple) else _path_or_name(value)
        if value is not None:
            lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _path_or_name(text: str) -> Path | str:
    name, equals, path = text.partition("=")
    if equals and Path(path).exists():  # gsm8k=FILE
        return f"{name}={Path(path).absolute()}"
    return Path(text) if Path(text).exists() else text


def write_recipe(context: click.Context, path: Path) -> None:
    """Write the complete recipe of the running command, so that `--recipe` repeats the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_recipe(context.command, context.params), encoding="utf-8")


def _option_names(command: click.Command) -> dict[str, str]:
    """Name in a recipe (the long flag, or the argument) → parameter name."""
    names = {}
    for parameter in command.params:
        if parameter.name is None or parameter.name in NOT_IN_RECIPES:
            continue
        longest = max((flag for flag in parameter.opts), key=len)
        names[longest.lstrip("-")] = parameter.name
    return names


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest known name is {close[0]!r}" if close else f"; known are {', '.join(known)}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Path):
        return json.dumps(str(value.absolute()), ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, StoreUrl):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
