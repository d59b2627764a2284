"""The run folder: who may write to it, which segments the run trains on, and its metrics after a resume.

run/lock            held by the first rank while it trains; a second trainer is refused
run/ledger.jsonl    the segment ids that the rows are planned from, in order; decided by the first rank, once, or under
                    --follow in rounds, one a line
run/metrics.jsonl   one line a step and a held-out evaluation
run/checkpoints/, run/tensorboard/, run/logs/
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.store.files import Files, replace_file, take_lock
from dflash_train.store.manifest import format_id
from dflash_train.units import format_bytes

_BYTES_PER_PARAMETER = 2 + 4 + 8  # bf16 export, fp32 master, two fp32 moments


@contextlib.contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold the run folder for this process; raises InputError naming the holder if another one has it.

    The kernel drops the lock with the process, however it ends, so a killed trainer leaves nothing to clean up.
    """
    run.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if (holder := take_lock(descriptor, run / "lock")) is not None:
            raise InputError(
                f"{run} is in use by process {holder}, which trains there. End it with `dflash stop {run}`, or give "
                "another --run folder."
            )
        yield
    finally:
        os.close(descriptor)


def read_ledger(run: Path) -> list[str] | None:
    """The segment ids that this run trains on, None before its first start. An unfinished last line is ignored."""
    entries = _read_lines(run / "ledger.jsonl", _is_ledger_entry)
    if entries == []:
        raise InputError(
            f"{run / 'ledger.jsonl'} lists no segments, but the run trains on those it lists. Delete the file to take "
            "the list of the newest checkpoint."
        )
    return None if entries is None else list(entries[-1]["segments"])


def _is_ledger_entry(entry: Any) -> bool:
    segments = entry.get("segments") if isinstance(entry, dict) else None
    return isinstance(segments, list) and all(isinstance(segment, str) for segment in segments)


def _is_metrics_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("step")) is int and "kind" in entry


def _read_lines(path: Path, fits: Callable[[Any], bool]) -> list[dict[str, Any]] | None:
    """The JSON lines of a file without an unfinished last one, None without the file; raises InputError for others."""
    try:
        *lines, _unfinished = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Make it a readable file, or remove it.") from error
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not fits(entry):
            raise InputError(
                f"{path}, line {number}, is damaged: found {line[:60].decode(errors='replace')!r}, wanted a line that "
                "the trainer wrote. Restore the file, or move it away to go on without it."
            )
        entries.append(entry)
    return entries


@dataclass(frozen=True, kw_only=True)
class Round:
    """A line of the ledger of a run that follows a growing store: some segments, each trained on once more."""

    step: int
    """The optimizer step, counted from 0, before which it was decided; from it on, its other fields hold."""
    segments: tuple[str, ...]
    """None in a last line that only says that nothing follows."""
    rows: int
    tokens: int
    """Of its rows."""
    total_steps: int
    """Length of the run as known then: the learning rate follows from it."""
    held_out: tuple[int, ...]
    """Ids of the samples that come to the held-out rows."""
    last: bool
    """Whether no round follows."""

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {
            "segments": list(self.segments),
            "held_out": [format_id(identity) for identity in self.held_out],
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Round":
        held_out = tuple(int(identity, 16) for identity in values["held_out"])
        changed = {"segments": tuple(values["segments"]), "held_out": held_out}
        return Round(**{name: changed.get(name, values[name]) for name in Round.__dataclass_fields__})


def read_rounds(run: Path) -> list[Round]:
    """The ledger of a run that follows a growing store; empty before its first round. An unfinished last line is ignored."""
    entries = _read_lines(run / "ledger.jsonl", _is_ledger_entry) or []
    if entries and not all(Round.__dataclass_fields__.keys() <= entry.keys() for entry in entries):
        raise InputError(
            f"The run {run} began without --follow, and trains on the segments that the store had then. Go on without "
            "--follow, or give another --run folder."
        )
    return [Round.from_json(entry) for entry in entries]


def append_rounds(run: Path, rounds: Sequence[Round], files: Files | None = None) -> None:
    """Write rounds behind the others, durable before anything of theirs is trained on."""
    path = run / "ledger.jsonl"
    lines = "".join(json.dumps(entry.to_json()) + "\n" for entry in rounds)
    if not path.exists():
        replace_file(path, lines, files or Files())
        return
    with path.open("r+b") as file:
        before = file.read()
        file.truncate(before.rfind(b"\n") + 1)  # a line that a kill cut short was never trained on
        file.seek(0, os.SEEK_END)
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def start_ledger(run: Path, segments: Sequence[str], files: Files | None = None) -> None:
    """Write the ledger of a new run, durable before anything is trained on."""
    entry = {"step": 0, "segments": list(segments)}
    replace_file(run / "ledger.jsonl", json.dumps(entry) + "\n", files or Files())


def rewind_metrics(run: Path, step: int, evaluated: bool) -> None:
    """Drop the metrics that a run resumed at `step` writes again, and an unfinished last line.

    Those are all after `step`, and its evaluation where the checkpoint has none. Damaged lines raise InputError: what
    cannot be read must not be thrown away.
    """
    path = run / "metrics.jsonl"
    entries = _read_lines(path, _is_metrics_entry)
    if entries is None:
        return
    kept = [
        entry
        for entry in entries
        if entry["step"] < step or (entry["step"] == step and (evaluated or entry["kind"] != "evaluation"))
    ]
    replace_file(path, "".join(f"{json.dumps(entry)}\n" for entry in kept), Files())


def read_metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of run/metrics.jsonl of one kind, `train` or `evaluation`."""
    entries = _read_lines(run / "metrics.jsonl", _is_metrics_entry) or []
    return [entry for entry in entries if entry["kind"] == kind]


def check_disk_space(run: Path, num_parameters: int, keep: int) -> None:
    """Refuse a run whose checkpoints do not fit: `keep`, the best, and the one being written beside them."""
    wanted = num_parameters * _BYTES_PER_PARAMETER * (keep + 2)
    present = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file())
    place = run
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free + present < wanted:
        raise InputError(
            f"{run} has {format_bytes(free)} free, but {keep + 2} checkpoints of this drafter take "
            f"{format_bytes(wanted)}. Free space, lower --keep, or give another --run folder."
        )
