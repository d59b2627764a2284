"""What an extract tells its caller while it runs, for a terminal to draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_train.stage1_target.forecast import Forecast


@dataclass(frozen=True)
class Tokenising:
    """Event: rows of the data set that are tokenised."""

    num_done: int
    num_rows: int | None


@dataclass(frozen=True)
class Note:
    """Event: something the user should know."""

    text: str


@dataclass(frozen=True)
class Progress:
    """Event: how far the workers are."""

    num_samples: int
    """Samples run in this extract, of `num_pending`."""
    num_pending: int
    num_tokens: int
    num_pending_tokens: int
    num_committed: int
    """Of the samples run, those in committed segments."""
    num_committed_bytes: int
    tokens_per_second: float
    hours_left: float
    num_workers: int
    """Workers that are ready."""

    def line(self) -> str:
        """The progress as text."""
        return (
            f"{self.num_samples:,} of {self.num_pending:,} samples run ({self.num_committed:,} committed), "
            f"{self.num_tokens:,} tokens, {self.tokens_per_second:,.0f} tokens/s on {self.num_workers} workers, "
            f"{self.hours_left:.2f} h left"
        )


Event = Tokenising | Note | Forecast | Progress
Report = Callable[[Event], None]
