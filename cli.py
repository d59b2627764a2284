"""The command `dflash`: a group whose commands are loaded by name from `commands/`, so that --help is quick.

Bad input ends with one sentence and exit status 1, wrong usage with 2. A bug ends with one line too, and exit status 1;
`dflash --debug COMMAND …` shows the traceback of any of these. docs/errors.md lists them.
"""

from __future__ import annotations

import errno
import importlib
import traceback
from typing import Any

import click

from dflash_train.commands.recipe import with_recipe
from dflash_train.commands.terminal import Failure
from dflash_train.errors import InputError

COMMANDS = (
    *("preflight", "regenerate", "extract", "import-store", "inspect-store", "train-drafter", "evaluate", "check"),
    *("export", "report", "status", "stop", "logs"),
)


FILE_ERRORS = {
    errno.ENOSPC: "free some space there, or name another folder",
    errno.EDQUOT: "free some of your quota, or name another folder",
    errno.EACCES: "ask for access, or name another path",
    errno.EPERM: "ask for access, or name another path",
    errno.EROFS: "name a path on a disk that can be written",
    errno.ENOTDIR: "a file stands where a folder is wanted: name another path",
    errno.EISDIR: "a folder stands where a file is wanted: name another path",
    errno.EEXIST: "it is in the way: name another path, or remove it",
    errno.ELOOP: "its links lead in a circle: name another path",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ENOENT: "name a path that exists",
}
"""What the file system may refuse because of what the user named, and the way out."""


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
        except (click.ClickException, click.exceptions.Exit, click.Abort, EOFError, BrokenPipeError):
            raise  # click's own: wrong usage, the end, Ctrl-C, a closed pipe
        except Exception as error:
            if ctx.params.get("debug"):
                click.echo(traceback.format_exc(), err=True, nl=False)
            raise Failure(_describe(error, ctx)) from error


def _describe(error: Exception, ctx: click.Context) -> str:
    """One line for what ended a command: bad input, a refusal of the file system, or a bug."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None and error.errno in FILE_ERRORS:
        return f"{error.filename}: {error.strerror}; {FILE_ERRORS[error.errno]}."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}: {FILE_ERRORS[error.errno]}."
    text = " ".join(str(error).split())
    again = "" if ctx.params.get("debug") else f"; run again with `dflash --debug {ctx.invoked_subcommand} …` for the"
    again += " traceback, and please report it" if again else "; please report it with the traceback above"
    return f"internal error: {type(error).__name__}: {text[:500]}{again}."


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="dflash-train", prog_name="dflash")
@click.option("--debug", is_flag=True, help="Show the traceback of whatever ends a command.")
def main(debug: bool) -> None:
    """Train DFlash drafters for your own target, in two stages that share a store on disk."""


if __name__ == "__main__":
    main()
