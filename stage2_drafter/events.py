"""What training tells its caller while it runs, beside its plain lines."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepDone:
    """Event: an optimizer step is done; from the first rank alone, one a step."""

    step: int
    """Optimizer steps since the run folder was new."""
    total_steps: int
    seconds: float
    """Duration of this step."""
    values: dict[str, Any]
    """What metrics.jsonl got: loss, acceptance_length, tokens_per_second, lr, …"""
    evaluation: tuple[int, dict[str, Any]] | None = None
    """Step and numbers of the newest evaluation of this process."""


Progress = Callable[[StepDone], None]
