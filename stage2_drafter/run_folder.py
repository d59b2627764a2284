"""The run folder: who may write to it, which segments the run trains on, and its metrics after a resume.

run/lock            held by the first rank while it trains; a second trainer is refused
run/ledger.jsonl    the segment ids that the rows are planned from, in order; decided once, by the first rank
run/metrics.jsonl   one line a step and a held-out evaluation
run/checkpoints/, run/tensorboard/, run/logs/
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.store.files import Files, format_bytes

_BYTES_PER_PARAMETER = 2 + 4 + 8  # bf16 export, fp32 master, two fp32 moments


@contextlib.contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold the run folder for this process; raises InputError naming the holder if another one has it.

    The kernel drops the lock with the process, however it ends, so a killed trainer leaves nothing to clean up.
    """
    run.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise InputError(
                f"{run} is in use by process {holder}, which trains there. Stop it, or give another --run folder."
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def read_ledger(run: Path) -> list[str] | None:
    """The segment ids that this run trains on, None before its first start. An unfinished last line is ignored."""
    path = run / "ledger.jsonl"
    if not path.exists():
        return None
    segments: list[str] | None = None
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            segments = [str(segment) for segment in json.loads(line)["segments"]]
    return segments


def start_ledger(run: Path, segments: Sequence[str], files: Files | None = None) -> None:
    """Write the ledger of a new run, durable before anything is trained on."""
    files = files or Files()
    temporary = run / ".tmp-ledger"
    files.remove_tree(temporary)
    files.write_file(temporary, (json.dumps({"step": 0, "segments": list(segments)}) + "\n").encode())
    files.rename(temporary, run / "ledger.jsonl")
    files.sync_directory(run)


def rewind_metrics(run: Path, step: int) -> None:
    """Drop the metrics of steps after `step`, which a resumed run takes again, and an unfinished last line."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    temporary = run / ".tmp-metrics"
    temporary.write_text("".join(f"{line}\n" for line in kept))
    temporary.replace(path)


def read_metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of run/metrics.jsonl of one kind, `train` or `evaluation`."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


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
