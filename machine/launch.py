"""Devices and processes: one process per device, started clean, logged from its first instant, gone with its parent.

A process is a new interpreter (no fork, no re-import of the caller's script) whose stdout and stderr are a log file
before Python starts, so that even an import that crashes leaves its line. It talks over one duplex pipe of its own: no
shared queue, no shared lock that a killed process could keep. It dies with its parent (PR_SET_PDEATHSIG) and does not
react to Ctrl-C, which the terminal sends to everyone: the parent decides, and says so over the pipe.

Environment variables are set here and nowhere else in the package.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from dflash_train.errors import InputError

STORE_SECONDS = 60.0
"""For torchrun's store to answer."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STARTUP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from dflash_train.machine.launch import _run_process; _run_process(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Device:
    """One place to run a process, and the environment that makes it the only one the process sees."""

    label: str
    """What to call it: «GPU 5» or «CPU worker 0»."""
    torch_device: str
    """cuda:0 (the only one visible) or cpu."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables set for the process."""


def parse_devices(text: str | None = None) -> list[Device]:
    """Read «0-4», «5,7», «cpu» or «cpu:3»; None is every GPU of the machine, or one CPU worker where there is none.

    Numbers are nvidia-smi's indices, or positions in CUDA_VISIBLE_DEVICES where that is set. Raises InputError.
    """
    text = None if text is None else text.strip().lower()
    if text is not None and (cpu := re.fullmatch(r"cpu(?::(\d+))?", text)):
        return _cpu_devices(int(cpu[1] or 1))
    gpus = visible_gpus()
    if text is None:
        return [_gpu_device(index, gpus[index]) for index in range(len(gpus))] or _cpu_devices(1)
    indices = _parse_indices(text)
    if not gpus:
        raise InputError(f"--gpus names {text} but this machine shows no NVIDIA GPU; use --gpus cpu to run without.")
    missing = [index for index in indices if index >= len(gpus)]
    if missing:
        where = "CUDA_VISIBLE_DEVICES" if os.environ.get("CUDA_VISIBLE_DEVICES") else "this machine"
        there = "0" if len(gpus) == 1 else f"0-{len(gpus) - 1}"
        raise InputError(f"--gpus names GPU {', '.join(map(str, missing))} but {where} has {there}; choose from these.")
    return [_gpu_device(index, gpus[index]) for index in indices]


def user_cache_folder() -> Path:
    """The folder for what can be made again: $XDG_CACHE_HOME/dflash-train, by default ~/.cache/dflash-train."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dflash-train"


def remote_stores_folder(given: Path | None) -> Path:
    """The folder for what is kept here of stores at URLs: --cache-folder, else one in the user's cache folder.

    Raises InputError where the given one is a file.
    """
    if given is not None and given.exists() and not given.is_dir():
        raise InputError(f"--cache-folder is {given}, a file, but must be a folder; name another path.")
    return given or user_cache_folder() / "stores"


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that --gpus may name, in its numbering; empty without a driver."""
    uuids = _gpu_uuids()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not uuids:
        return uuids
    chosen: list[str] = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        if entry.isdigit():
            if int(entry) >= len(uuids):
                break  # CUDA ignores an entry that does not exist, and all after it
            chosen.append(uuids[int(entry)])
        elif entry.startswith("MIG-"):
            chosen.append(entry)
        else:
            matches = [uuid for uuid in uuids if uuid.startswith(entry)]
            if len(matches) != 1:
                break
            chosen.append(matches[0])
    return chosen


def _gpu_uuids() -> list[str]:
    """UUIDs of all GPUs in nvidia-smi's order."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            uuid if isinstance(uuid := pynvml.nvmlDeviceGetUUID(handle), str) else uuid.decode() for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def _gpu_device(index: int, uuid: str) -> Device:
    return Device(f"GPU {index}", "cuda:0", {"CUDA_VISIBLE_DEVICES": uuid})


def _cpu_devices(count: int) -> list[Device]:
    if count < 1:
        raise InputError("--gpus cpu:0 asks for no worker at all; cpu:1 is the least.")
    # threads that together exceed the cores wait on each other
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return [Device(f"CPU worker {index}", "cpu", environment) for index in range(count)]


def compile_cache_folder(run: Path, given: Path | None) -> Path:
    """Where a training run's processes keep compiled kernels, each in `rank-N`: --compile-cache, else RUN/compile-cache.

    The run folder that several machines of torchrun share lies mostly on a network: there it is a folder in the user's
    cache folder, named after the run's path, on each machine. Raises InputError where the given one is a file.
    """
    if given is not None and given.exists() and not given.is_dir():
        raise InputError(f"--compile-cache is {given}, a file, but must be a folder; name another path.")
    if given is not None:
        return given.resolve()
    place, run = torchrun_place(), run.resolve()
    if place is None or place.local_world == place.world:
        return run / "compile-cache"
    digest = hashlib.blake2b(str(run).encode(), digest_size=4).hexdigest()
    return user_cache_folder().absolute() / "compile" / f"{run.name}-{digest}"


def with_compile_cache(device: Device, folder: Path, rank: int) -> Device:
    """The device with torch.compile's and Triton's caches in a folder of its own process.

    Own folders keep entries of one run from being deleted under another; a resumed run finds the same kernels again.
    """
    return Device(device.label, device.torch_device, {**device.environment, **_cache_environment(folder, rank)})


def use_compile_cache(folder: Path, rank: int) -> None:
    """The same caches for this very process, before torch is imported: under torchrun the command itself is a rank."""
    assert "torch" not in sys.modules, "torch may have read the environment already"
    os.environ.update(_cache_environment(folder, rank))


def has_compiled_kernels() -> bool:
    """Whether the compile cache of this process holds any file; ask before anything is compiled."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return folder is not None and any(path.is_file() for path in Path(folder).rglob("*"))


def _cache_environment(folder: Path, rank: int) -> dict[str, str]:
    own = folder / f"rank-{rank}"
    return {"TORCHINDUCTOR_CACHE_DIR": str(own), "TRITON_CACHE_DIR": str(own / "triton")}


def use_device(device: Device) -> str:
    """Make `device` the only one that this very process sees, before torch is imported; returns its torch name."""
    if device.torch_device != "cpu":
        assert "torch" not in sys.modules, "torch has read the environment already"
        os.environ.update(device.environment)
    return device.torch_device


@dataclass(frozen=True)
class TorchrunPlace:
    """This process's place among those that torchrun started."""

    rank: int
    world: int
    local_rank: int
    """Number on its machine."""
    local_world: int = 1
    """Processes of its machine."""
    group_rank: int = 0
    """Number of its machine."""


def torchrun_place() -> TorchrunPlace | None:
    """The place that torchrun gave this process in its environment; None where it was started in another way."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, world, local_rank, machine = (
        int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    )
    return TorchrunPlace(rank, world, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), machine)


class KeyValueStore(Protocol):
    """What torch's distributed stores have in common, as far as it is used here."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""

    def get(self, key: str) -> bytes:
        """The value of a key; waits for one that is not set."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""


def torchrun_store(place: TorchrunPlace, name: str) -> KeyValueStore:
    """The key-value store that torchrun keeps for its processes, with keys of our own under `name`."""
    from torch import distributed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    tcp_store: Any = distributed.TCPStore  # type: ignore[attr-defined]
    prefix_store: Any = distributed.PrefixStore  # type: ignore[attr-defined]
    timeout = timedelta(seconds=STORE_SECONDS)
    try:
        store = tcp_store(host, port, place.world, is_master, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise InputError(
            f"torchrun's store at {host}:{port} does not answer ({str(error).splitlines()[0]})."
        ) from error
    prefixed: KeyValueStore = prefix_store(f"{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return prefixed


def rank_devices(place: TorchrunPlace, text: str | None, gpus_per_process: int = 1) -> list[Device]:
    """The devices of one of torchrun's processes: by its local rank; a CPU where `text` says so or no GPU is there.

    Raises InputError where the machine has fewer GPUs than its processes need.
    """
    gpus = visible_gpus()
    if (text is not None and text.strip().lower().startswith("cpu")) or (text is None and not gpus):
        return [_cpu_devices(place.local_world)[place.local_rank]]
    first = place.local_rank * gpus_per_process
    if first + gpus_per_process > len(gpus):
        raise InputError(
            f"torchrun started {place.local_world} processes here, which need {place.local_world * gpus_per_process} GPUs, "
            f"but this machine shows {len(gpus)}; start fewer with --nproc-per-node."
        )
    return [_gpu_device(index, gpus[index]) for index in range(first, first + gpus_per_process)]


def group_devices(devices: Sequence[Device], size: int) -> list[Device]:
    """Devices for processes that see `size` GPUs each, neighbours of the list together. Raises InputError."""
    if size <= 1:
        return list(devices)
    if any(device.torch_device == "cpu" for device in devices):
        raise InputError(f"--gpus-per-target {size} needs GPUs, but the target is to run on the CPU; leave it out.")
    if len(devices) % size:
        raise InputError(
            f"--gpus-per-target {size} does not divide the {len(devices)} GPUs to be used; name a multiple of {size} with "
            "--gpus."
        )
    groups = [devices[first : first + size] for first in range(0, len(devices), size)]
    return [
        Device(
            f"GPUs {'+'.join(device.label.removeprefix('GPU ') for device in group)}",
            "cuda:0",
            {"CUDA_VISIBLE_DEVICES": ",".join(device.environment["CUDA_VISIBLE_DEVICES"] for device in group)},
        )
        for group in groups
    ]


def _parse_indices(text: str) -> list[int]:
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"--gpus is {text!r}; write GPU numbers like 0-4 or 5,7, or cpu, or cpu:3.")
        indices += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(indices)) != len(indices):
        raise InputError(f"--gpus {text} names a GPU twice; name each once.")
    return indices


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
    sys.stdout.flush()
    sys.stderr.flush()
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
