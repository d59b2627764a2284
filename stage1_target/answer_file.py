"""The output of a regenerate: an append-only jsonl that is whole after a kill at any point.

Conversations are appended as whole lines and fsynced a batch at a time; a torn last line is cut off at the next start,
and what is there is done. Conversations without any answer to keep stand in FILE.left-out with their reason, so that they
are not asked again. One process at a time (flock).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.stage1_target.dialogue import UNFINISHED_END, Outcome
from dflash_train.stage1_target.generation import GenerationSettings, read_settings, settings_path, write_settings
from dflash_train.store.files import write_error


class AnswerFile:
    """Answers that are there, and the only way to add some; nothing is created before the first is added."""

    def __init__(self, path: Path, settings: GenerationSettings) -> None:
        """Raises InputError for a file that was made otherwise, that another process writes, or that is damaged."""
        self.path = path
        self.done: set[str] = set()
        """Keys of all conversations that are answered or left out."""
        self.num_answered = self.num_cut = self.num_unfinished = 0
        """Conversations in the file; of these, those that lack turns, and those that only end with an unfinished answer."""
        self.left_out: Counter[str] = Counter()
        """Why conversations are not in it."""
        self._settings = settings
        self._answers, self._left_out = _Lines(path), _Lines(path.with_name(path.name + ".left-out"))
        made = read_settings(settings_path(path))
        if made is None and path.exists():
            raise InputError(
                f"{path} is there, but no {settings_path(path).name} that says how it was made; name another --output."
            )
        differences = [] if made is None else made.differences(settings)
        if differences:
            raise InputError(
                f"{path} was made with other settings ({'; '.join(differences)}); give the same, or another --output."
            )
        for row in self._answers.read():
            self._count(str(row["id"]), row.get("cut"), None)
        for row in self._left_out.read():
            self._count(str(row["id"]), None, str(row["reason"]))

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Make outcomes durable; those that failed are not recorded. Raises StoreError if the disk refuses."""
        kept = [outcome for outcome in outcomes if not outcome.failed]
        if not kept:
            return
        assert not self.done & {outcome.key for outcome in kept}, "answered twice"
        if not settings_path(self.path).exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_settings(settings_path(self.path), self._settings)
        self._answers.append(outcome.row() for outcome in kept if outcome.messages)
        self._left_out.append({"id": outcome.key, "reason": outcome.reason} for outcome in kept if not outcome.messages)
        for outcome in kept:
            self._count(outcome.key, outcome.reason, None if outcome.messages else str(outcome.reason))

    def close(self) -> None:
        """Let others write."""
        self._answers.close()
        self._left_out.close()

    def _count(self, key: str, cut: str | None, left_out: str | None) -> None:
        self.done.add(key)
        if left_out is None:
            self.num_answered += 1
            self.num_cut += cut not in (None, UNFINISHED_END)
            self.num_unfinished += cut == UNFINISHED_END
        else:
            self.left_out[left_out] += 1


class _Lines:
    """One append-only file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def read(self) -> Iterable[dict[str, Any]]:
        """All rows; a torn last line is cut off."""
        if not self._path.exists():
            return
        descriptor = self._open(0)
        end = 0
        with os.fdopen(os.dup(descriptor), "rb") as file:
            size = os.fstat(descriptor).st_size
            for number, line in enumerate(file, start=1):
                row = _row(line)
                if row is None and end + len(line) < size:
                    raise InputError(
                        f"{self._path}, line {number}, is not one that regenerate wrote. Remove the line, or name another "
                        f"--output."
                    )
                if row is not None:
                    end += len(line)
                    yield row
        if end < size:  # a process was killed while it wrote
            os.ftruncate(descriptor, end)
            os.fsync(descriptor)

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows as lines and sync them."""
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(errors="replace")
        if not data:
            return
        descriptor = self._open(os.O_CREAT)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError as error:
            raise write_error(self._path, len(data), error) from error

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self, flags: int) -> int:
        if self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                raise InputError(
                    f"{self._path} is being written by another process; wait for its end, or name another --output."
                ) from error
            if flags and os.fstat(descriptor).st_size:
                os.close(descriptor)
                raise InputError(f"{self._path} was written by another process meanwhile; run the same command again.")
            self._descriptor = descriptor
        return self._descriptor


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a whole line of ours; None for anything else."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and "id" in row else None
