"""What a drafter was trained on, as its checkpoint and its store say, against what it is measured with.

Another chat template, another mode of thinking or another tokenizer gives the target other text than the drafter learned
to continue, and halves acceptance without an error (z-lab #133: 25 % for 60 %).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.speculate.drafter_folder import read_state
from dflash_train.stage1_target.identity import config_hash
from dflash_train.stage1_target.tokenization import hash_chat_template, hash_tokenizer
from dflash_train.stage2_drafter.checkpoint import TrainerState
from dflash_train.store.manifest import Manifest
from dflash_train.store.reader import StoreReader, list_segments


def training_mismatches(
    folder: Path, model_config: Any, tokenizer: Any, chat_template_arguments: dict[str, Any]
) -> list[str]:
    """Warnings where the drafter in `folder` was trained on another target's text than this target gets.

    An export, or another trainer's drafter, has no record and gives none; template arguments are compared where the store
    is still a folder here.
    """
    state = read_state(folder)
    if state is None:
        return []
    try:
        manifest = Manifest.from_json(state.store)
    except (InputError, AttributeError):
        return []
    facts = {
        "config": (manifest.target_config_hash, config_hash(model_config)),
        "tokenizer": (manifest.tokenizer_hash, hash_tokenizer(tokenizer)),
        "chat template": (manifest.chat_template_hash, hash_chat_template(tokenizer)),
    }
    warnings = [
        f"warning: the drafter was trained on a target with another {name} than this one's (hash {trained}, here {found}): "
        f"it learned to continue other text; give the target that the store was extracted from"
        for name, (trained, found) in facts.items()
        if trained != found
    ]
    trained_with = _template_arguments(folder, state, manifest)
    if trained_with is not None and trained_with != chat_template_arguments:
        warnings.append(
            f"warning: the drafter's store was extracted with --chat-template-arguments '{json.dumps(trained_with)}', not "
            f"'{json.dumps(chat_template_arguments)}': give the same, for another mode of thinking halves acceptance"
        )
    return warnings


def _template_arguments(folder: Path, state: TrainerState, manifest: Manifest) -> dict[str, Any] | None:
    """Those of the newest segment trained on that is still there; None where no store of this manifest is found."""
    known = set(state.segments)
    for path in _stores(folder, state):
        try:
            segments = [name for name in list_segments(path) if name in known][-1:]
            if segments and (reader := StoreReader(path, segments)).manifest == manifest:
                arguments = reader.sources()[0].get("settings", {}).get("chat_template_arguments")
                return arguments if isinstance(arguments, dict) else None
        except (InputError, OSError):
            continue
    return None


def _stores(folder: Path, state: TrainerState) -> Iterator[Path]:
    """Folders that the run read: as it was given them, and from the root on, as its recipe has them. No URL is asked."""
    recipe: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        recipe = tomllib.loads((folder.parent.parent / "recipe.toml").read_text(encoding="utf-8"))
    for values in (state.config, recipe.get("train-drafter") or {}):
        for entry in (values.get("store"), values.get("more_stores")):
            for name in entry if isinstance(entry, list) else [entry]:
                if isinstance(name, str) and "://" not in name and Path(name).is_dir():
                    yield Path(name)
