"""Runs that outlive the terminal: how a run is started apart, writes down its state, and is stopped and read.

A run of extract or train-drafter keeps one small JSON file (run_state.py), replaced atomically at most once a second. The
file is a report, never a lock: locks are flocks, which the kernel drops with their process.
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
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.machine.launch import last_lines
from dflash_train.machine.run_state import ENDINGS, STATE_NAME, ProcessIdentity, RunState, read_state
from dflash_train.machine.torchrun import torchrun_place

WRITE_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0


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


def _leads_session() -> bool:
    """Whether this process was started apart, as by --detach or as a container's first: nobody may read its terminal, so
    the state has to tell."""
    return os.getsid(0) == os.getpid()


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
    detached = _leads_session() and (place is None or place.rank == 0)
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
