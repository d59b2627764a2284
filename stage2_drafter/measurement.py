"""How training is told the real acceptance length: a callback, because nothing of this stage may import the target.

What measures is made by the caller, pickled into the first rank's process, and asked there after every held-out
evaluation. speculate/training.py has the one that decodes with the real target.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_train.stage2_drafter.preparation import PreparedRun


class Measurement(Protocol):
    """Measures a drafter under training; can be pickled until its first measurement."""

    def check(self, run: PreparedRun) -> list[str]:
        """Refuse, before anything is started, what cannot be measured (InputError); lines for the log."""

    def measure(
        self,
        run: PreparedRun,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        estimate: float | None,
        report: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> dict[str, Any]:
        """What is added to the evaluation, JSON-able: `real_acceptance_length` and more under names that begin with `real`.

        tensors: the drafter as a checkpoint holds it, bf16 under z-lab's names. estimate: the held-out acceptance length
        at this step. Nothing may be compiled. Empty where `stop` asked to end it.
        """
