"""What the parent of an extract and its workers say to each other, one duplex pipe a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_train.errors import InputError
from dflash_train.stage1_target.slow_paths import SlowPath


@dataclass(frozen=True)
class Create:
    """Parent: calibrate and create the store; the others wait."""


@dataclass(frozen=True)
class Go:
    """Parent: the store is there."""


@dataclass(frozen=True)
class Run:
    """Parent: run these samples (positions in the sample table)."""

    number: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Quarantine:
    """Parent: record these rows, which never became samples, in the open segment."""

    entries: list[dict[str, Any]]


@dataclass(frozen=True)
class Commit:
    """Parent: commit the open segment, nothing is left to run."""


@dataclass(frozen=True)
class Finish:
    """Parent: commit the open segment and end."""


@dataclass(frozen=True)
class Loaded:
    """Worker: the target is in memory."""

    slow_paths: tuple[SlowPath, ...] = ()
    """What of it is slow."""


@dataclass(frozen=True)
class Created:
    """Worker: the store is there."""


@dataclass(frozen=True)
class Ready:
    """Worker: the store fits the target; send batches."""


@dataclass(frozen=True)
class Ran:
    """Worker: a batch has run and is being written."""

    number: int


@dataclass(frozen=True)
class Committed:
    """Worker: a segment is in the store."""

    segment_id: str
    indices: tuple[int, ...]
    """Samples it holds, quarantined ones included."""
    num_samples: int
    num_tokens: int
    num_bytes: int
    num_entries: int
    """Rows recorded because the parent said so."""


@dataclass(frozen=True)
class Failed:
    """Worker: it cannot go on, for a reason that the user has to settle."""

    error: InputError
