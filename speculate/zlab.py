"""z-lab's own inference package (PyPI `dflash`), as the reference of `dflash evaluate --reference`.

It is asked for tokens alone, through its public `spec_generate`; its code is never copied, and it must be installed
beside this package, because in the same environment its script `dflash` would replace ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target.target import Target


def check_reference() -> None:
    """Raise InputError where z-lab's package cannot be imported."""
    if importlib.util.find_spec("dflash") is None:
        raise InputError(
            "--reference needs z-lab's package, which is not installed: pip install --no-deps --target zlab dflash==0.1.0, "
            "then set PYTHONPATH=zlab (in this environment it would replace the command `dflash`)."
        )


class ZlabDrafter:
    """A drafter loaded by z-lab's package."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Load a folder in z-lab's format. Raises InputError where their package cannot be used or refuses it."""
        check_reference()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = importlib.import_module("dflash.model")
                self._drafter = model.DFlashDraftModel.from_pretrained(folder, dtype=dtype).to(device).eval()
        except Exception as error:  # whatever a foreign package raises is the result of this comparison
            raise InputError(
                f"z-lab's package could not load {folder} ({type(error).__name__}: {str(error).strip().rstrip('.')}); "
                "`dflash check` may say why, or leave --reference out."
            ) from error

    def decode(
        self,
        target: Target,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        stop_ids: Collection[int],
        block_size: int,
    ) -> list[int]:
        """New tokens, greedily."""
        drafter: Any = self._drafter
        drafter.block_size = block_size
        row = torch.tensor([list(prompt_ids)], dtype=torch.long, device=target.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # their call of transformers is an old one
            output = drafter.spec_generate(target.model, row, max_new_tokens, list(stop_ids) or None)
        tokens: list[int] = output[0, len(prompt_ids) :].tolist()
        return tokens
