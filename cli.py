"""The command `dflash`: a group whose commands are loaded by name from `commands/`, so that --help is quick.

Bad input ends with one sentence and exit status 1, wrong usage with 2; only bugs show a traceback.
"""

from __future__ import annotations

import errno
import importlib
from typing import Any

import click

from dflash_train.commands.recipe import with_recipe
from dflash_train.errors import InputError

COMMANDS = ("extract", "inspect-store", "train-drafter", "evaluate")


class Group(click.Group):
    """A group that finds `some-command` in commands/some_command.py and turns expected errors into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command = getattr(importlib.import_module(f"dflash_train.commands.{name}"), name)
        assert isinstance(command, click.Command)
        return with_recipe(command, COMMANDS)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
                raise
            raise click.ClickException(f"{error.strerror}: {error.filename or 'the disk'}.") from error


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="dflash-train", prog_name="dflash")
def main() -> None:
    """Train DFlash drafters for your own target, in two stages that share a store on disk."""


if __name__ == "__main__":
    main()
