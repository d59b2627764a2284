"""Processes that torchrun started: their place, the store in which they agree, and the devices that are theirs.

torchrun tells a process its place in environment variables, which are read here and never set. torch is not imported
before the store is asked for: until then the process may still choose its devices.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from dflash_train.errors import InputError
from dflash_train.machine.devices import Device, cpu_devices, gpu_device, visible_gpus

STORE_SECONDS = 60.0
"""For torchrun's store to answer."""


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

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, at once for all; the sum."""


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
        return [cpu_devices(place.local_world)[place.local_rank]]
    first = place.local_rank * gpus_per_process
    if first + gpus_per_process > len(gpus):
        raise InputError(
            f"torchrun started {place.local_world} processes here, which need {place.local_world * gpus_per_process} GPUs, "
            f"but this machine shows {len(gpus)}; start fewer with --nproc-per-node."
        )
    return [gpu_device(index, gpus[index]) for index in range(first, first + gpus_per_process)]
