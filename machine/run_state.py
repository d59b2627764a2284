"""What a run says about itself, and whether that is still true: one small JSON file.

`state.json` lies in `<store>.logs/` or in the run folder. It names the process by host, boot, process namespace, id *and*
start time, so that a zombie or a reused id is never taken for the run. Who cannot see the process (another host, another
container) goes by the heartbeat.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.units import format_duration

STATE_NAME = "state.json"
SILENCE_SECONDS = 90.0  # of a heartbeat, before a process that cannot be seen counts as dead
ENDINGS = ("finished", "stopped", "failed")


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """One process, never to be confused with another one that has its id."""

    host: str
    boot_id: str
    """The kernel's, new at each start of the machine."""
    pid_namespace: str
    """Process ids mean something only within it; containers have their own."""
    pid: int
    start_ticks: int
    """Clock ticks from the machine's start to the process's, field 22 of /proc/PID/stat."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The identity of a process of this machine; raises ProcessLookupError where there is none."""
        found = _stat(pid)
        if found is None:
            raise ProcessLookupError(f"there is no process {pid}")
        host, boot_id, namespace = _place()
        return cls(host=host, boot_id=boot_id, pid_namespace=namespace, pid=pid, start_ticks=found[1])

    def death(self) -> str | None:
        """Why the process counts as dead; None while it lives, or where it cannot be seen from here."""
        host, boot_id, _namespace = _place()
        if host == self.host and boot_id != self.boot_id:
            return f"{host} has been restarted since"
        if not self.visible:
            return None
        found = _stat(self.pid)
        if found is None:
            return f"process {self.pid} is gone without a last word: killed, by hand or for want of memory"
        if found[1] != self.start_ticks:
            return f"process {self.pid} is gone, and its id belongs to another process now"
        return f"process {self.pid} has ended and waits as a zombie for its parent" if found[0] in "ZX" else None

    @property
    def visible(self) -> bool:
        """Whether the process's id means something here, and /proc shows it (hidepid hides other users')."""
        if (self.host, self.boot_id, self.pid_namespace) != _place():
            return False
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            return _stat(self.pid) is not None
        except ProcessLookupError:
            pass
        return True


def _place() -> tuple[str, str, str]:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename, boot_id, str(Path("/proc/self/ns/pid").readlink())


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start ticks of a process; its name, in parentheses, may hold anything."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a run says about itself; times are seconds since 1970."""

    command: str
    """extract or train-drafter."""
    process: ProcessIdentity
    started_at: float
    heartbeat_at: float
    outcome: str = "running"
    """running, finished, stopped (by a signal) or failed, by its own account."""
    progress: dict[str, Any] | None = None
    """unit, done, total, tokens_per_second, hours_left, line; None before the first batch or step."""
    progress_at: float | None = None
    message: str | None = None
    """Its last plain line."""
    error: str | None = None
    log: str | None = None
    """Where its terminal lines go, where that is a file."""
    worker_logs: str | None = None
    """Folder of its processes' logs."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> RunState:
        """Raises TypeError, KeyError or AttributeError for anything that is no state."""
        if not isinstance(document, dict):
            raise TypeError(f"found a JSON {type(document).__name__}")
        for name, kinds in {"started_at": int | float, "heartbeat_at": int | float, "progress": dict | None}.items():
            if not isinstance(document.get(name), kinds):
                raise TypeError(f"{name} is {document.get(name)!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in document.items() if name in known}
        return cls(**values | {"process": ProcessIdentity(**document["process"])})

    def verdict(self, now: float | None = None) -> tuple[str, str]:
        """(running, finished, stopped, failed or died; why). Never trusts «running» without a sign of life."""
        if self.outcome != "running":
            return self.outcome, self.error or self.message or ""
        if (death := self.process.death()) is not None:
            return "died", death
        silence = (time.time() if now is None else now) - self.heartbeat_at
        if not self.process.visible and silence > SILENCE_SECONDS:
            where = f"its process {self.process.pid} on {self.process.host} cannot be seen from here"
            return "died", f"no heartbeat for {format_duration(silence)}, and {where}"
        return "running", ""


def logs_folder(store: Path) -> Path:
    """Where an extract keeps its logs and its state: beside the store, which may not exist yet."""
    return store.with_name(f"{store.name}.logs")


def find_state(folder: Path) -> Path:
    """The state file of a store, a run folder, or a store's logs folder; raises InputError where there is none."""
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 — resolve() would follow a store's symlink away from its logs
    for path in (folder / STATE_NAME, logs_folder(folder) / STATE_NAME):
        if path.is_file():
            return path
    what = "is there, but no run is recorded for it" if folder.exists() else "is not there"
    raise InputError(f"{folder} {what}. Give the --store of an extract or the --run of a train-drafter.")


def read_state(path: Path) -> RunState:
    """Read a state file; raises InputError for one that cannot be read."""
    try:
        return RunState.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Look at its permissions.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is no state of a run ({error}). Remove it; the next run writes it anew.") from error
