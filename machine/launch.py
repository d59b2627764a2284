"""Processes: one per device, started clean, logged from its first instant, gone with its parent.

A process is a new interpreter (no fork, no re-import of the caller's script) whose stdout and stderr are a log file
before Python starts, so that even an import that crashes leaves its line. It talks over one duplex pipe of its own: no
shared queue, no shared lock that a killed process could keep. It dies with its parent (PR_SET_PDEATHSIG) and does not
react to Ctrl-C, which the terminal sends to everyone: the parent decides, and says so over the pipe.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from dflash_train.machine.devices import Device

PR_SET_PDEATHSIG = 1  # linux/prctl.h
STARTUP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from dflash_train.machine.launch import _run_process; _run_process(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(eq=False)
class Process:
    """One started process, seen from its parent."""

    index: int
    """Position among the processes started together."""
    device: Device
    """Where it runs."""
    log: Path
    """Its stdout and stderr."""
    connection: Connection
    """The parent's end of its pipe."""
    popen: subprocess.Popen[bytes]
    """The operating system's handle."""
    ended: bool = False
    """Whether ProcessGroup.wait has reported its end."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self.popen.pid

    def send(self, message: Any) -> bool:
        """Send a message; False if the process is gone (its end is reported by ProcessGroup.wait)."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def describe_end(self) -> str:
        """Why an ended process ended, in one sentence with the last lines of its log."""
        code = self.popen.poll()
        if code is None:
            reason = "still runs"
        elif code < 0:
            reason = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                reason += " (by hand, or by the system for want of memory)"
        else:
            reason = f"ended with exit status {code}"
        lines = last_lines(self.log)
        said = f"; its last lines: {' | '.join(lines)}" if lines else "; it left no line"
        return f"{self.device.label} (process {self.pid}) {reason}{said} ({self.log})"


@dataclass(eq=False)
class ProcessGroup:
    """Processes started together; as a context manager it leaves none behind."""

    processes: list[Process]

    @property
    def running(self) -> list[Process]:
        """Those whose end has not been reported yet."""
        return [process for process in self.processes if not process.ended]

    def wait(self, timeout: float) -> list[tuple[Process, Any]]:
        """Messages that arrive within `timeout` seconds, as (process, message); (process, None) once for each end.

        A process's messages all come before its end.
        """
        running = {process.connection: process for process in self.running}
        events: list[tuple[Process, Any]] = []
        for ready in wait(list(running), timeout):
            process = running[ready]  # type: ignore[index]
            try:
                while process.connection.poll():
                    events.append((process, process.connection.recv()))
            except (EOFError, OSError):
                process.popen.wait()  # its pipe closed because it ended
                process.ended = True
                events.append((process, None))
        return events

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Close all pipes, wait `grace_seconds` for the processes to end by themselves, kill the rest."""
        for process in self.processes:
            process.connection.close()
        deadline = time.monotonic() + grace_seconds
        for process in self.processes:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
            process.ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop(0.0 if kind is not None else 10.0)


def start_processes(
    function: str,
    arguments: Sequence[Mapping[str, Any]],
    devices: Sequence[Device],
    log_folder: Path,
    name: str = "worker",
) -> ProcessGroup:
    """Start one process per device that calls `function` (dotted: package.module.name) with its arguments.

    The function also gets `connection`, its end of the pipe. Arguments are pickled. Process i logs to
    `<log_folder>/<name>-<i>.log`. Call from the main thread: Linux ties «dies with its parent» to the calling thread.
    """
    assert len(arguments) == len(devices), "one set of arguments a device"
    log_folder.mkdir(parents=True, exist_ok=True)
    group = ProcessGroup([])
    try:
        for index, (device, keywords) in enumerate(zip(devices, arguments, strict=True)):
            ours, theirs = Pipe(duplex=True)
            log = log_folder / f"{name}-{index}.log"
            command = [
                sys.executable,
                "-P",
                "-c",
                STARTUP,
                str(theirs.fileno()),
                str(os.getpid()),
                json.dumps(sys.path),
            ]
            with log.open("wb") as output:
                popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **device.environment},
                )
            theirs.close()
            group.processes.append(Process(index, device, log, ours, popen))
            group.processes[-1].send((function, dict(keywords)))
    except BaseException:
        group.stop(0.0)
        raise
    return group


def _run_process(descriptor: int, parent: int) -> None:
    """Body of a started process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os._exit(1)
    connection = Connection(descriptor)
    status = 1
    try:
        function, keywords = connection.recv()
        module, _, name = function.rpartition(".")
        getattr(importlib.import_module(module), name)(connection=connection, **keywords)
        status = 0
    except BaseException:  # noqa: BLE001 - for the log; the parent sees the status
        traceback.print_exc()
    leave_process(status)


def leave_process(status: int) -> NoReturn:
    """End this process at once, as the system would: nothing of it is needed any more.

    The interpreter's own way out takes torch apart under threads that still run: one end in some 75 of a gloo group was
    an abort, «terminate called without an active exception», with torch 2.13, and others hung.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more, or its disk is full
            stream.flush()
    os._exit(status)


def last_lines(log: Path, count: int = 3) -> list[str]:
    """The last non-empty lines of a log file; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-count:]


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; the second SIGINT interrupts at once. Outside the main thread never set."""
    stop = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
