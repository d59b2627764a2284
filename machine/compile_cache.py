"""Where the processes of a training run keep what torch.compile and Triton have compiled: a folder each, nobody else's.

torch reads these variables at import, so they are set before it: here for torchrun's ranks, for the others with their
device.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from dflash_train.errors import InputError
from dflash_train.machine.devices import Device
from dflash_train.machine.disks import user_cache_folder
from dflash_train.machine.torchrun import torchrun_place


def compile_cache_folder(run: Path, given: Path | None) -> Path:
    """Where a training run's processes keep compiled kernels, each in `rank-N`: --compile-cache, else RUN/compile-cache.

    The run folder that several machines of torchrun share lies mostly on a network: there it is a folder in the user's
    cache folder, named after the run's path, on each machine. Raises InputError where the given one is a file.
    """
    if given is not None and given.exists() and not given.is_dir():
        raise InputError(f"--compile-cache is {given}, a file, but must be a folder; name another path.")
    if given is not None:
        return given.resolve()
    place, run = torchrun_place(), Path(os.path.realpath(run))  # which a link in a circle does not stop
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
