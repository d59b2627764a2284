"""How answers were generated: FILE.generation.json beside every file that `dflash regenerate` writes.

A file holds answers of one target under one set of settings: a resumed run is compared field by field and refused where
one differs. `extract` and `evaluate` compare what changes the text that the target sees: its name, revision, chat template
and the arguments of that.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.stage1_target.sources import SETTINGS_SUFFIX
from dflash_train.stage1_target.target_config import TargetConfig

NOT_COMPARED = ("made_from", "packages")
ADDED_LATER = ("chat_template_hash",)
"""Fields that files of earlier versions lack; they are read with the default."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """What the answers of a file depend on."""

    target: str
    """Name on the hub, or absolute path."""
    revision: str | None
    """Commit, branch or tag, as it was given; None is the newest, compared by extract and evaluate with nothing."""
    chat_template_arguments: dict[str, Any]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    seed: int
    keep_unfinished: bool
    server_model: str | None = None
    """What the server calls the target; None where it ran in process."""
    chat_template_hash: str | None = None
    """As the manifest of a store has it. With a server that of the local folder that --target names, although the server
    may render by another; None where --target names no tokenizer here, or by an earlier version: compared with nothing."""
    made_from: dict[str, Any] = field(default_factory=dict)
    """Data and server; not compared, for a file may be filled up from more data or by another server."""
    packages: dict[str, str | None] = field(default_factory=dict)
    """Versions; not compared."""

    def differences(self, other: GenerationSettings) -> list[str]:
        """«field: found A, wanted B», where this is what was found; who answered in words, server or process."""
        names = [one.name for one in fields(self) if one.name not in NOT_COMPARED]
        if self.chat_template_hash is None or other.chat_template_hash is None:  # not known
            names.remove("chat_template_hash")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        ways = []
        if (self.server_model is None) != (other.server_model is None):
            pairs = [pair for pair in pairs if pair[0] != "server_model"]
            ways = [f"found answers {self._way()}, wanted answers {other._way()}"]
        return ways + [
            f"{name}: found {found!r}, wanted {wanted!r}" for name, found, wanted in pairs if found != wanted
        ]

    def _way(self) -> str:
        return "in process" if self.server_model is None else f"of --server (model {self.server_model!r})"


def settings_path(output: Path) -> Path:
    """The file beside `output` that says how it was made."""
    return output.with_name(output.name + SETTINGS_SUFFIX)


def absolute_target(name: str) -> str:
    """The target's name; of a local folder or file the absolute path, so that it means the same elsewhere."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def write_settings(path: Path, settings: GenerationSettings) -> None:
    """Write under a temporary name, sync, rename."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(settings), indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def read_settings(path: Path) -> GenerationSettings | None:
    """The settings; None where there is no such file. Raises InputError for one that cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        names = [one.name for one in fields(GenerationSettings) if one.name in value or one.name not in ADDED_LATER]
        return GenerationSettings(**{name: value[name] for name in names})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise InputError(
            f"{path} cannot be read ({reason}); it says how the answers beside it were made. Restore it, or remove it."
        ) from error


def settings_of(source: str) -> dict[Path, GenerationSettings]:
    """Settings that lie beside the file `source` or, where it is a folder, beside files in it."""
    path = Path(source).expanduser()
    paths = (
        sorted(path.rglob(f"*{SETTINGS_SUFFIX}")) if path.is_dir() else [settings_path(path)] if path.is_file() else []
    )
    return {one: found for one in paths if (found := read_settings(one)) is not None}


def generation_mismatches(
    source: str, target: TargetConfig, chat_template_arguments: dict[str, Any], chat_template_hash: str
) -> list[str]:
    """Warnings where regenerated answers are read for another target, or with another template or arguments of it."""
    warnings = []
    for path, made in settings_of(source).items():
        name = path.name.removesuffix(SETTINGS_SUFFIX)
        if made.target != absolute_target(target.name):
            warnings.append(
                f"warning: the answers in {name} were regenerated by the target {made.target!r}, not by {target.name!r}: a "
                f"drafter learns to guess the target that gave them"
            )
        elif None not in (made.revision, target.revision) and made.revision != target.revision:
            warnings.append(
                f"warning: the answers in {name} were regenerated by revision {made.revision!r} of the target, not by "
                f"{target.revision!r}: a drafter learns to guess the weights that gave them; give the same --revision"
            )
        if made.chat_template_hash not in (None, chat_template_hash):
            warnings.append(
                f"warning: the answers in {name} were regenerated with another chat template than this target's (hash "
                f"{made.chat_template_hash}, here {chat_template_hash}): the target sees another text than it answered; "
                f"restore that template, or regenerate with this one"
            )
        if made.chat_template_arguments != chat_template_arguments:
            arguments = json.dumps(made.chat_template_arguments)
            warnings.append(
                f"warning: the answers in {name} were regenerated with --chat-template-arguments '{arguments}', not "
                f"'{json.dumps(chat_template_arguments)}': give the same, or the target sees another text than it answered"
            )
    return warnings
