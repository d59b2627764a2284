"""What an extract or a regenerate tells its caller while it runs, for a terminal to draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_train.stage1_target.forecast import Forecast
from dflash_train.units import format_bytes, format_count, format_duration


@dataclass(frozen=True)
class Tokenising:
    """Event: rows of the data set that are tokenised."""

    num_done: int
    num_rows: int | None


@dataclass(frozen=True)
class Note:
    """Event: something the user should know."""

    text: str
    failure: bool = False
    """Whether something went wrong."""


@dataclass(frozen=True)
class WorkerProgress:
    """How far one worker is."""

    label: str
    """«GPU 5» or «CPU worker 0»."""
    state: str
    """loading, running, done or died."""
    num_tokens: int
    tokens_per_second: float
    """Over the last minute."""


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
    """Of the workers that run, over the last minute; at the end over the whole run."""
    hours_left: float
    num_workers: int
    """Workers that run batches, or have ended after their last one."""
    workers: tuple[WorkerProgress, ...] = ()
    """All workers, in the order of --gpus."""

    def line(self) -> str:
        """The progress as text."""
        left = f", {format_duration(self.hours_left * 3600)} left" if self.num_samples < self.num_pending else ""
        committed = f"{self.num_committed:,} committed, {format_bytes(self.num_committed_bytes)}"
        each = f" ({self.tokens_per_second / self.num_workers:,.0f} each)" if self.num_workers > 1 else ""
        return (
            f"{self.num_samples:,} of {self.num_pending:,} samples run ({committed}), "
            f"{self.num_tokens:,} tokens, {self.tokens_per_second:,.0f} tokens/s on "
            f"{format_count(self.num_workers, 'worker')}{each}{left}"
        )


@dataclass(frozen=True)
class Answering:
    """Event: how far a regenerate is."""

    num_done: int
    """Conversations answered or left out, those of earlier runs included."""
    num_rows: int | None
    """Rows of the data, where that is cheap to know."""
    num_left_out: int
    num_failed: int
    num_tokens: int
    """New tokens of this run."""
    tokens_per_second: float

    def line(self) -> str:
        """The progress as text."""
        rows = "" if self.num_rows is None else f" of {self.num_rows:,}"
        return (
            f"{self.num_done:,}{rows} conversations done ({self.num_left_out:,} left out, {self.num_failed:,} failed), "
            f"{self.num_tokens:,} tokens, {self.tokens_per_second:,.0f} tokens/s"
        )


Event = Tokenising | Note | Forecast | Progress
Report = Callable[[Event], None]
