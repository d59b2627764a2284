"""A drafter's folder as it lies on the disk, read without judging it: `dflash check` must see what a loader would refuse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.speculate.loading import CONFIG_FILE, WEIGHTS_FILE, find_drafter
from dflash_train.stage2_drafter.checkpoint import Checkpoint, TrainerState, check_file
from dflash_train.stage2_drafter.run_checkpoints import refuse_speculators

STATE_FILE = "trainer/state.json"


@dataclass(frozen=True, kw_only=True)
class DrafterFolder:
    """config.json and the header of model.safetensors, and what the trainer recorded beside them."""

    path: Path
    config: Mapping[str, Any]
    """config.json as it is."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor of model.safetensors."""
    dtypes: Mapping[str, str]
    """Type of every tensor, as safetensors names it: BF16, F32 …"""
    trained_config: Mapping[str, Any] | None
    """config.json as it was when the trainer wrote this checkpoint; None for a drafter without that record."""
    damage: str | None
    """Why a file is not as this package wrote it; None where all is well, or nothing is known."""

    @property
    def nested(self) -> Mapping[str, Any]:
        """The table dflash_config."""
        table = self.config.get("dflash_config")
        return table if isinstance(table, Mapping) else {}

    def value(self, name: str) -> Any:
        """A key of dflash_config or, where it is not there, of the top; None where it is nowhere."""
        found = self.nested.get(name)
        return self.config.get(name) if found is None else found

    def integer(self, name: str) -> int | None:
        """The same where it is a whole number, else None."""
        found = self.value(name)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def target_layer_ids(self) -> list[int] | None:
        """The tapped layers where they are a list of whole numbers, else None."""
        found = self.value("target_layer_ids")
        whole = isinstance(found, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in found)
        return found if whole else None

    def layer_types(self) -> list[str]:
        """One type a layer; full attention where the config does not say."""
        found = self.config.get("layer_types")
        if isinstance(found, list) and found:
            return [str(kind) for kind in found]
        return ["full_attention"] * (self.integer("num_hidden_layers") or 0)


def read_drafter_folder(path: Path) -> DrafterFolder:
    """Read the drafter at `path`, or the newest checkpoint of the run there. Raises InputError where there is nothing to read."""
    from safetensors import SafetensorError, safe_open

    folder = find_drafter(path)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{folder / CONFIG_FILE} is no JSON ({error}); give a drafter's folder.") from error
    if not isinstance(config, dict):
        raise InputError(f"{folder / CONFIG_FILE} holds no JSON object; give a drafter's folder.")
    refuse_speculators(folder, config)
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {name: str(part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / WEIGHTS_FILE} cannot be read ({error}); copy or export it again.") from error
    return DrafterFolder(
        path=folder,
        config=config,
        shapes=shapes,
        dtypes=dtypes,
        trained_config=None if (state := read_state(folder)) is None else state.drafter,
        damage=_damage(folder),
    )


def read_state(folder: Path) -> TrainerState | None:
    """What the trainer wrote beside a drafter; None for an export, another trainer's drafter, or a damaged record."""
    if not (folder / STATE_FILE).is_file():
        return None
    try:
        return Checkpoint(path=folder, step=0).state()
    except InputError:
        return None


def _damage(folder: Path) -> str | None:
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            check_file(folder, name)
    except InputError as found:
        return str(found).rstrip(".")
    return None
