"""Load a drafter for decoding, and refuse one that was made for another target.

A drafter with the wrong vocabulary, layers or width would at best decode at acceptance length 1, so every mismatch is
named before the target's weights are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target.target import Target
from dflash_train.stage1_target.target_config import text_config
from dflash_train.stage2_drafter.checkpoint import CONFIG_FILE, WEIGHTS_FILE, read_groups
from dflash_train.stage2_drafter.drafter import Drafter, DrafterConfig
from dflash_train.stage2_drafter.drafter import load_drafter as load_checkpoint
from dflash_train.stage2_drafter.run_checkpoints import find_drafter, load_drafter_config, worse_than_best

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "check_drafter_fits",
    "check_drafter_fits_target",
    "find_drafter",
    "load_drafter",
    "load_drafter_config",
    "trained_groups",
    "worse_than_best",
]


def load_drafter(path: Path, device: torch.device | str, dtype: torch.dtype) -> Drafter:
    """Load a drafter from a folder in z-lab's format or from a run's newest checkpoint, ready for decoding.

    Its `fc` takes raw hidden states: an exported drafter has the store's channel scale folded in. Raises InputError,
    listing tensors that are missing, too many or of another shape, and for weights that are no finite numbers.
    """
    drafter = load_checkpoint(find_drafter(path), dtype)
    wrong = [name for name, weight in drafter.named_parameters() if not bool(torch.isfinite(weight).all())]
    if wrong:
        raise InputError(
            f"{path} has weights that are not finite in {dtype}: {', '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}; take an earlier checkpoint, or export it again."
        )
    return drafter.to(device).requires_grad_(False).eval()


def trained_groups(folder: Path) -> frozenset[int] | None:
    """Groups of the conversations that the drafter in `folder` was trained on; None where its folder does not say."""
    groups = read_groups(folder)
    return None if groups is None else frozenset(groups.tolist())


def check_drafter_fits(config: DrafterConfig, model_config: Any) -> None:
    """Raise InputError, naming both values, where the drafter was made for another target than `model_config`'s."""
    text = text_config(model_config)
    _check_values(config, int(text.hidden_size), int(text.vocab_size), int(text.num_hidden_layers))


def check_drafter_fits_target(config: DrafterConfig, target: Target) -> None:
    """The same against a loaded target, whose embedding table has the last word on its size."""
    _check_values(config, target.hidden_size, target.vocab_size, len(target.layers))


def _check_values(config: DrafterConfig, hidden_size: int, vocab_size: int, num_target_layers: int) -> None:
    facts = [
        ("hidden_size", config.hidden_size, hidden_size),
        ("vocab_size", config.vocab_size, vocab_size),
        ("num_target_layers", config.num_target_layers, num_target_layers),
    ]
    differences = [f"{name} {drafter}, the target has {target}" for name, drafter, target in facts if drafter != target]
    if max(config.target_layer_ids) > num_target_layers - 2:
        differences.append(
            f"target_layer_ids up to {max(config.target_layer_ids)}, the target allows at most {num_target_layers - 2}"
        )
    if not 0 <= config.mask_token_id < vocab_size:
        differences.append(f"mask_token_id {config.mask_token_id}, the target's table has {vocab_size} rows")
    if differences:
        raise InputError(
            f"The drafter does not fit the target: it has {'; '.join(differences)}. "
            "Give the target that the drafter was trained for."
        )
