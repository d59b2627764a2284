"""A `dflash` command that runs beside others: its log, its processes, its rates, and its end."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from dflash_train.machine.launch import last_lines
from dflash_train.machine.run_state import logs_folder

SKIPPED_STEPS = 5
"""Of a training run, before its rate counts."""
END_SECONDS = 60.0
"""For a command whose process was killed, or for the processes of a killed command."""


class Command:
    """A running `dflash` command, a session of its own, and its log."""

    def __init__(self, name: str, log: Path, words: Sequence[object]) -> None:
        self.name, self.log, self.words = name, log, list(map(str, words))
        self._output = log.open("ab")
        self._place = log.stat().st_size  # another start may have the same log
        self._end: int | None = None
        command = [sys.executable, "-m", "dflash_train.cli", *self.words]
        self.popen = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True)

    def output(self) -> str:
        """What it has said so far."""
        return self.log.read_bytes()[self._place : self._end].decode(errors="replace")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The JSON lines of one kind, with their time in seconds since the epoch."""
        found = []
        for line in self.output().splitlines():
            if line.startswith("{") and line.endswith("}") and f'"event": "{kind}"' in line:
                values = json.loads(line)
                found.append(values | {"at": datetime.fromisoformat(values["time"]).timestamp()})
        return found

    def option(self, name: str) -> Path:
        return Path(self.words[self.words.index(name) + 1])

    def children(self) -> list[int]:
        """Process ids of its workers or ranks."""
        path = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
        return [int(word) for word in path.read_text().split()]

    def tail(self) -> str:
        """The last lines of its log and of those of its processes."""
        folder = self.option("--run") / "logs" if "--run" in self.words else logs_folder(self.option("--store"))
        logs = [self.log, *sorted(folder.rglob("*.log"), key=lambda path: path.stat().st_mtime)[-8:]]
        lines = [f"  {path}: {line[:300]}" for path in logs for line in last_lines(path, 12 if path == self.log else 4)]
        return "\n".join([f"{self.name}: {' '.join(self.words)}", *lines])

    def kill(self) -> None:
        """End it with all of its processes, and wait until they are gone."""
        deadline = time.monotonic() + END_SECONDS
        while _group_runs(self.popen.pid) and time.monotonic() < deadline:
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            time.sleep(0.05)
        self.popen.wait()
        self._output.close()
        self._end = self._end or self.log.stat().st_size


def extract_rate(command: Command, began: float) -> dict[str, Any]:
    """Tokens/s between the last progress line before `began` and the newest one, in all and by worker."""
    events = command.events("progress")
    before = [values for values in events if values["at"] < began and values["workers"]]
    events = before[-1:] + [values for values in events if values["at"] >= began]
    if len(events) < 2:
        return {"tokens_per_second": None, "by_worker": []}
    first, last = events[0], events[-1]
    seconds = last["at"] - first["at"]
    pairs = zip(first["workers"], last["workers"], strict=True)
    return {
        "tokens_per_second": (last["num_tokens"] - first["num_tokens"]) / seconds,
        "by_worker": [(b["num_tokens"] - a["num_tokens"]) / seconds for a, b in pairs],
        "seconds": seconds,
    }


def training_steps(command: Command) -> list[dict[str, Any]]:
    """Training steps of a run so far, from its metrics."""
    path = command.option("--run") / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    values = [json.loads(line) for line in lines if line.endswith("}")]
    return [line for line in values if line["kind"] == "train"]


def train_rate(command: Command, rows_per_step: int, first: int = SKIPPED_STEPS) -> dict[str, Any]:
    """Rows/s and shares of waiting over the steps after the first few, or those given."""
    steps = [line for line in training_steps(command)[first:] if line["tokens"]]
    if len(steps) < 3:
        return {"rows_per_second": None, "wait_share": None, "steps": len(steps)}
    seconds = [line["tokens"] / line["tokens_per_second"] for line in steps]
    reading = sum(line["wait_share"] * one for line, one in zip(steps, seconds, strict=True))
    store = sum(line.get("store_wait_seconds", 0.0) for line in steps)
    whole = sum(seconds) + store
    compiled = re.findall(r"compiled \d+ graphs in \d+ s", command.output())
    return {
        "rows_per_second": len(steps) * rows_per_step / whole,
        "tokens_per_second": sum(line["tokens"] for line in steps) / whole,
        "wait_share": (reading + store) / whole,
        "store_wait_share": store / whole,
        "step_seconds": statistics.median(seconds),
        "steps": len(steps),
        "compiled": f"{compiled[-1]}, {steps[-1]['recompilations']} recompilations" if compiled else None,
    }


def _group_runs(group: int) -> bool:
    """Whether a process of a session that we started is left."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _parent, number = path.read_text().rpartition(")")[2].split()[:3]
            if int(number) == group and state != "Z":
                return True
    return False
