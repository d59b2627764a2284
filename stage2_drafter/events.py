"""What training tells its caller while it runs, beside its plain lines."""

from collections.abc import Callable, Mapping
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


def describe_waiting(values: Mapping[str, Any]) -> str:
    """«2% of the time waiting for data and 12 s for the store to grow», of a step's values."""
    waited = values.get("store_wait_seconds", 0.0)
    for_store = f" and {waited:.0f} s for the store to grow" if waited >= 0.5 else ""
    return f"{values['wait_share']:.0%} of the time waiting for data{for_store}"


Progress = Callable[[StepDone], None]
Report = Callable[[str], None]  # of one plain line
