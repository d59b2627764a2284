"""What NVML says about the GPUs: how much memory is free, who holds the rest, and what the driver can run.

Only asks, never changes anything. Process ids are NVML's; inside a container they may belong to another namespace, so an
id is named only where the process of that id here has an NVIDIA device open, or where that cannot be looked up.
"""

from __future__ import annotations

import contextlib
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.machine.devices import Device

BUSY_BYTES = 2**30
BUSY_SHARE = 0.05  # of a GPU so small that 1 GiB would be most of it
_COMMAND_CHARACTERS = 100


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: int
    """Process id."""
    user: str | None
    """Who owns it; None where it cannot be seen from here."""
    command: str | None
    """Its command line, cut to 100 characters; None where it cannot be seen from here."""
    memory_bytes: int | None
    """What it holds; None where the driver does not say."""

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {gibibytes(self.memory_bytes)}"
        if self.command is None:
            return f"process {self.pid} (not visible from here{memory})"
        return f"process {self.pid} ({self.user or 'unknown user'}: {self.command}{memory})"


@dataclass(frozen=True)
class GpuState:
    """One GPU at one instant."""

    label: str
    """What to call it: «GPU 5»."""
    uuid: str
    """NVML's identifier."""
    name: str
    """Model."""
    total_bytes: int
    """Its memory."""
    free_bytes: int
    """What is free of it."""
    used_bytes: int
    """What processes hold; the driver's own reserve is not counted where the driver tells it apart."""
    compute_prohibited: bool
    """Whether the administrator forbids compute on it."""
    holders: tuple[Holder, ...]
    """Processes on it, largest first."""

    @property
    def is_busy(self) -> bool:
        """Whether others hold more than 1 GiB or 5 % of it."""
        return self.used_bytes > min(BUSY_BYTES, BUSY_SHARE * self.total_bytes)


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver, or why there is none."""

    version: str | None = None
    """Such as 580.65.06."""
    cuda: tuple[int, int] | None = None
    """Newest CUDA version that it runs, (13, 0) for 13.0."""
    problem: str | None = None
    """Why it does not answer, where it is installed; None where it works or there is none."""


def read_driver() -> Driver:
    """Ask the driver for its versions; a machine without one gives an empty Driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return Driver() if absent and not Path("/dev/nvidiactl").exists() else Driver(problem=str(error))
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return Driver(_text(pynvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10))
    except pynvml.NVMLError as error:
        return Driver(problem=str(error))
    finally:
        pynvml.nvmlShutdown()


def read_gpus(devices: Sequence[Device]) -> list[GpuState | str]:
    """The state of each of these GPUs, or the sentence with which the driver refuses to tell it; CPU workers are left out."""
    import pynvml

    gpus = [device for device in devices if device.torch_device != "cpu"]
    if not gpus:
        return []
    pynvml.nvmlInit()
    try:
        states: list[GpuState | str] = []
        for device in gpus:
            try:
                states.append(_read_gpu(device.label, device.environment["CUDA_VISIBLE_DEVICES"]))
            except pynvml.NVMLError as error:
                states.append(f"{device.label} does not answer: {error}")
        return states
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(label: str, uuid: str) -> GpuState:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    try:  # the second version does not count the driver's own reserve (hundreds of MiB) as used
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        prohibited = pynvml.nvmlDeviceGetComputeMode(handle) == pynvml.NVML_COMPUTEMODE_PROHIBITED
    except pynvml.NVMLError:  # not supported on a MIG slice
        prohibited = False
    return GpuState(
        label,
        uuid,
        _text(pynvml.nvmlDeviceGetName(handle)),
        int(memory.total),
        int(memory.free),
        int(memory.used),
        prohibited,
        _read_holders(handle),
    )


def _read_holders(handle: Any) -> tuple[Holder, ...]:
    import pynvml

    held: dict[int, int | None] = {}
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            processes = ask(handle)
        except pynvml.NVMLError:  # not supported, or not permitted to see
            continue
        for process in processes:
            memory = process.usedGpuMemory
            held[process.pid] = memory if held.get(process.pid) is None else max(held[process.pid] or 0, memory or 0)
    holders = [_describe(pid, memory) for pid, memory in held.items()]
    return tuple(sorted(holders, key=lambda holder: -(holder.memory_bytes or 0)))


def _describe(pid: int, memory_bytes: int | None, proc: Path = Path("/proc")) -> Holder:
    folder = proc / str(pid)
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        owner = folder.stat().st_uid
        command = " ".join(filter(None, words)) or (folder / "comm").read_text(errors="replace").strip()
        if not _may_use_a_gpu(folder):
            return Holder(pid, None, None, memory_bytes)
    except OSError:
        return Holder(pid, None, None, memory_bytes)
    command = "".join(character if character.isprintable() else " " for character in command)
    if len(command) > _COMMAND_CHARACTERS:
        command = command[: _COMMAND_CHARACTERS - 1] + "…"
    try:
        user: str | None = pwd.getpwuid(owner).pw_name
    except KeyError:
        user = f"user {owner}"
    return Holder(pid, user, command, memory_bytes)


def _may_use_a_gpu(folder: Path) -> bool:
    """Whether a process has an NVIDIA device open; true as well where we may not look."""
    try:
        descriptors = list((folder / "fd").iterdir())
    except OSError:
        return True
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(descriptor.readlink()).startswith(("/dev/nvidia", "/dev/dxg")):  # dxg: Linux under Windows
                return True
    return False


def _text(value: Any) -> str:
    """Older NVML bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def gibibytes(count: float) -> str:
    """A size in GiB, as nvidia-smi's MiB would be read by a person."""
    return f"{count / 2**30:.1f} GiB"
