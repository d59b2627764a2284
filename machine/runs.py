"""Runs that outlive the terminal: what a run writes about itself, how it is started apart, and what became of it.

A run of extract or train-drafter keeps one small JSON file, replaced atomically at most once a second: `state.json` in
`<store>.logs/` or in the run folder. It names the process by host, boot, process namespace, id *and* start time, so
that a zombie or a reused id is never taken for the run. Who cannot see the process (another host, another container)
goes by the heartbeat. The file is a report, never a lock: locks are flocks, which the kernel drops with their process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.machine.launch import last_lines
from dflash_train.machine.torchrun import torchrun_place
from dflash_train.units import format_duration

STATE_NAME = "state.json"
WRITE_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
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


def _read_if_there(path: Path) -> RunState | None:
    try:
        return read_state(path)
    except InputError:
        return None


class Recorder:
    """Writes the state of this very process's run, from its first event to its end; never disturbs the run.

    Nothing is written before `begin`: a start that fails leaves another run's state, and the disk, as they were.
    """

    def __init__(self, folder: Path, command: str, worker_logs: Path | None = None) -> None:
        self.path = folder / STATE_NAME
        self.stop_asked = False
        now = time.time()
        log = _terminal_file()
        self._state = RunState(
            command=command,
            process=ProcessIdentity.of(os.getpid()),
            started_at=now,
            heartbeat_at=now,
            log=None if log is None else str(log),
            worker_logs=str(Path(os.path.abspath(worker_logs or folder))),  # noqa: PTH100
        )
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._changed = False
        self._written = 0.0

    @property
    def begun(self) -> bool:
        """Whether the run has said anything yet."""
        return self._thread is not None

    @property
    def taken(self) -> bool:
        """Whether the state file is that of another run, which lives."""
        there = _read_if_there(self.path)
        return there is not None and there.process != self._state.process and there.verdict()[0] == "running"

    @property
    def ended(self) -> bool:
        """Whether the end is written."""
        return self._ending.is_set()

    def begin(self) -> None:
        """Take the state file over; call once the run's own checks and locks have passed."""
        if not self.begun and not self.ended:
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._change()
            self._write()
            self._thread.start()

    def note(self, line: str) -> None:
        """The run's newest plain line."""
        self._change(message=line)
        self.begin()

    def progress(self, **values: Any) -> None:
        """How far the run is: unit, done, total, tokens_per_second, hours_left, line, and what else there is."""
        first = self._state.progress is None
        self._change(progress=values, progress_at=time.time())
        self.begin()
        if first:
            self._write()

    def end(self, outcome: str, message: str | None = None, error: str | None = None) -> None:
        """The last word; left out where another living run has taken the file."""
        assert outcome in ENDINGS, outcome
        if self.ended:
            return
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        if self.taken:
            return
        self._change(outcome=outcome, message=message or self._state.message, error=error)
        self._write()

    def _change(self, **values: Any) -> None:
        with self._lock:
            self._state = dataclasses.replace(self._state, **values)
            self._changed = True

    def _beat(self) -> None:
        while not self._ending.wait(WRITE_SECONDS):
            if self._changed or time.monotonic() - self._written >= HEARTBEAT_SECONDS:
                self._write()

    def _write(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # a full disk ends the run, if at all, with its own reason
            self._written, self._changed = time.monotonic(), False
            self._state = dataclasses.replace(self._state, heartbeat_at=time.time())
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_name(f".tmp-{STATE_NAME}-{secrets.token_hex(4)}")
            try:
                temporary.write_text(json.dumps(self._state.to_json(), indent=1) + "\n", encoding="utf-8")
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)


def _terminal_file() -> Path | None:
    """The file that stderr goes to, of --detach or of a shell's redirection; None for a terminal or a pipe."""
    try:
        if not stat.S_ISREG(os.fstat(2).st_mode):
            return None
        path = Path("/proc/self/fd/2").readlink()
    except OSError:
        return None
    return path if path.exists() else None


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Write how the body ends, if it does not say so itself; a SIGTERM that it does not handle ends it with status 0."""

    def stop(_number: int, _frame: Any) -> None:
        if not recorder.ended:
            recorder.stop_asked = True
            raise SystemExit(0)

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if main else None
    place = torchrun_place()
    # nobody may read its terminal: the state has to tell
    detached = os.getsid(0) == os.getpid() and (place is None or place.rank == 0)
    if detached and not recorder.taken:
        recorder.begin()
    try:
        yield
    except BaseException as error:
        if recorder.stop_asked or isinstance(error, KeyboardInterrupt):
            if recorder.begun or detached:
                recorder.end("stopped", "stopped at once; what was saved before is kept, run again to go on")
        elif isinstance(error, SystemExit) and not error.code:
            if recorder.begun:
                recorder.end("finished")
        elif recorder.begun or detached:
            recorder.end("failed", error=str(error) if isinstance(error, InputError) else f"{error!r}")
        raise
    else:
        if recorder.begun:
            recorder.end("finished")
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def start_detached(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start `dflash WORDS` in a session of its own, its log open before Python starts; no terminal ends it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-u", "-X", "faulthandler", "-m", "dflash_train.cli", *words]
    with log.open("xb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def await_first_progress(
    popen: subprocess.Popen[bytes], state: Path, waiting: Callable[[], None], poll_seconds: float = 0.1
) -> RunState | None:
    """Wait until a detached run has done its first batch or step, or has ended; its state, None if it wrote none.

    `waiting` is called now and then, to tell the user.
    """
    while True:
        code = popen.poll()
        found = _read_if_there(state)
        if found is not None and found.process.pid != popen.pid:
            found = None  # an earlier run's
        if code is not None or (found is not None and found.progress is not None):
            return found
        waiting()
        time.sleep(poll_seconds)


def ask_to_stop(state: RunState, timeout_seconds: float) -> bool:
    """Send SIGTERM to a running run's process and wait; whether it has ended. Raises InputError where it cannot be seen.

    A pidfd holds on to the very process that was checked, so that no other one can get the signal.
    """
    import select

    identity = state.process
    if not identity.visible:
        raise InputError(f"The run's process {identity.pid} is on {identity.host}. Run `dflash stop` there.")
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return True
    try:
        if identity.death() is not None:
            return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        return bool(select.select([descriptor], [], [], timeout_seconds)[0])
    except PermissionError as error:
        raise InputError(f"Process {identity.pid} belongs to another user. Ask them, or become them.") from error
    finally:
        os.close(descriptor)


def tail(state: RunState, count: int = 10) -> list[str]:
    """The last lines of the run's log, where it has one."""
    return [] if state.log is None else last_lines(Path(state.log), count)
