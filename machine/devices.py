"""Devices: what --gpus names, and the environment that makes one of them the only one that a process sees.

Numbers are nvidia-smi's and become UUIDs, so that they mean the same GPU whatever order CUDA counts in. Nothing here
imports torch: a process's environment must be complete before torch reads it.

Environment variables that torch or CUDA read are set here and in compile_cache.py and nowhere else in the package: a Device
carries those of its process, and launch.py starts the process with them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflash_train.errors import InputError


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
        return cpu_devices(int(cpu[1] or 1))
    gpus = visible_gpus()
    if text is None:
        return [gpu_device(index, gpus[index]) for index in range(len(gpus))] or cpu_devices(1)
    indices = _parse_indices(text)
    if not gpus:
        raise InputError(f"--gpus names {text} but this machine shows no NVIDIA GPU; use --gpus cpu to run without.")
    missing = [index for index in indices if index >= len(gpus)]
    if missing:
        where = "CUDA_VISIBLE_DEVICES" if os.environ.get("CUDA_VISIBLE_DEVICES") else "this machine"
        there = "0" if len(gpus) == 1 else f"0-{len(gpus) - 1}"
        raise InputError(f"--gpus names GPU {', '.join(map(str, missing))} but {where} has {there}; choose from these.")
    return [gpu_device(index, gpus[index]) for index in indices]


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that --gpus may name, in its numbering; empty without a driver."""
    uuids = _gpu_uuids()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not uuids:
        return uuids
    chosen: list[str] = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        if entry.isdecimal():
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


def gpu_device(index: int, uuid: str) -> Device:
    """One GPU by its number and UUID."""
    return Device(f"GPU {index}", "cuda:0", {"CUDA_VISIBLE_DEVICES": uuid})


def cpu_devices(count: int) -> list[Device]:
    """`count` CPU workers that share the cores. Raises InputError where it is 0."""
    if count < 1:
        raise InputError("--gpus cpu:0 asks for no worker at all; cpu:1 is the least.")
    # threads that together exceed the cores wait on each other
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return [Device(f"CPU worker {index}", "cpu", environment) for index in range(count)]


def use_device(device: Device) -> str:
    """Make `device` the only one that this very process sees, before torch is imported; returns its torch name."""
    if device.torch_device != "cpu":
        assert "torch" not in sys.modules, "torch has read the environment already"
        os.environ.update(device.environment)
    return device.torch_device


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
