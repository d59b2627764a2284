"""Checks of the machine before anything costly is loaded: each is ok, a warning or an error, with the way out.

They only look. Versions come from the packages' metadata, so that nothing here imports torch, and the cheap ones take
some 0.1 s together; the speed of the disk is measured only on request. What a target needs is checked with the targets
(stage1_target/slow_paths.py), and commands/preflight.py puts both together.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from dflash_train.errors import InputError
from dflash_train.machine.compile_cache import compile_cache_folder
from dflash_train.machine.devices import Device, group_devices, parse_devices
from dflash_train.machine.disks import (
    PROBE_BYTES,
    disk_speed,
    existing_parent,
    file_system,
    is_remote,
    user_cache_folder,
    why_unwritable,
)
from dflash_train.machine.gpus import Driver, GpuState, gibibytes, read_driver, read_gpus
from dflash_train.machine.torchrun import rank_devices, torchrun_place

LEAST_FREE_BYTES = 2**30  # a checkpoint of a small drafter, or a segment's half
FEW_FREE_BYTES = 20 * 2**30
SLOW_BYTES_PER_SECOND = 300e6  # int8 states of an 8B target at half of one H200's 33,000 tokens/s
LEAST_SHARED_BYTES = 2**30  # NCCL's transport between GPUs; containers start with 64 MiB
LEAST_OPEN_FILES = 1024  # the reader keeps up to 256 open, the compiler's workers and pipes come on top


@dataclass(frozen=True)
class Check:
    """What one check found."""

    name: str
    """What was looked at: «GPU 0», «versions», «disk» …"""
    status: Literal["ok", "warning", "error"]
    """Whether a run can start (ok), will suffer (warning) or cannot start (error)."""
    text: str
    """What was found, in a sentence."""
    way_out: str = ""
    """What to do about it; empty where all is well."""

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" + (f" {self.way_out}" if self.way_out else "")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run is going to use."""

    gpus: str | None = None
    """The list as given to --gpus; None is every GPU."""
    gpus_per_target: int = 1
    """GPUs of one process."""
    store: Path | None = None
    """Folder that a store is or will be written to."""
    run: Path | None = None
    """Folder of a training run."""
    compile_cache: Path | None = None
    """Folder given to --compile-cache; None is the run's own."""
    allow_busy_gpus: bool = False
    """Whether a GPU that others use is only a warning."""


def check_machine(plan: Plan, thorough: bool = False) -> list[Check]:
    """All checks of a plan; `thorough` also measures the disk. Raises InputError for a wrong --gpus or --compile-cache."""
    driver = read_driver()
    devices = _planned_devices(plan, driver)
    num_gpus = _num_gpus(devices)
    checks = check_gpus(driver, devices, plan.gpus, plan.allow_busy_gpus)
    checks.append(check_versions(driver, num_gpus))
    if num_gpus:
        checks.append(check_compiler())
    if plan.run is None and plan.compile_cache is None:
        checks.append(check_cache(user_cache_folder(), "set XDG_CACHE_HOME to a folder there"))
    else:
        cache = compile_cache_folder(plan.run or Path.cwd(), plan.compile_cache)
        checks.append(check_cache(cache, "name a folder there with --compile-cache"))
        if num_gpus and plan.compile_cache is None:
            checks += check_unused_caches(cache)
    for folder in (plan.store, plan.run) if plan.store or plan.run else (Path.cwd(),):
        if folder is not None:
            checks += check_disk(folder, thorough)
    checks += [check_shared_memory(num_gpus), check_open_files(), check_script()]
    return checks


def count_gpus(plan: Plan) -> int:
    """The GPUs that this process of the plan would use; none is a run on the CPU. Raises InputError for a wrong --gpus."""
    return _num_gpus(_planned_devices(plan, read_driver()))


def _planned_devices(plan: Plan, driver: Driver) -> list[Device]:
    """The devices of this process: under torchrun those of its rank, else those of the list."""
    if driver.problem is not None:
        return []
    place = torchrun_place()
    devices = parse_devices(plan.gpus) if place is None else rank_devices(place, plan.gpus, plan.gpus_per_target)
    group_devices(devices, plan.gpus_per_target)  # refuses what does not divide
    return devices


def _num_gpus(devices: Sequence[Device]) -> int:
    return sum(device.torch_device != "cpu" for device in devices)


def check_gpus(driver: Driver, devices: Sequence[Device], gpus: str | None, allow_busy: bool) -> list[Check]:
    """One check a GPU: is it there, may it compute, is it free?"""
    if driver.problem is not None:
        if gpus is not None and gpus.strip().lower().startswith("cpu"):
            return [Check("GPU", "ok", "none is asked for.")]
        return [
            Check(
                "GPU",
                "error",
                f"the NVIDIA driver is installed but does not answer: {driver.problem}.",
                "Run nvidia-smi; after an update of the driver, reboot or load its module again; or use --gpus cpu.",
            )
        ]
    if all(device.torch_device == "cpu" for device in devices):
        if gpus is not None:
            return [Check("GPU", "ok", "none is asked for.")]
        return [
            Check(
                "GPU",
                "warning",
                "no NVIDIA GPU is visible, so the CPU is used, which is for tests and the demo.",
                "Install the driver, give the container its GPUs, or say --gpus cpu to mean it.",
            )
        ]
    return [_check_gpu(state, allow_busy) for state in read_gpus(devices)]


def _check_gpu(state: GpuState | str, allow_busy: bool) -> Check:
    if isinstance(state, str):
        return Check("GPU", "error", f"{state}.", "Leave it out of --gpus, or have it reset by an administrator.")
    memory = f"{state.name}, {gibibytes(state.free_bytes)} of {gibibytes(state.total_bytes)} free"
    if state.compute_prohibited:
        return Check(
            state.label, "error", f"{memory}, but its compute mode is «prohibited».", "Choose others with --gpus."
        )
    if not state.is_busy:
        return Check(state.label, "ok", f"{memory}.")
    holders = (
        ", ".join(map(str, state.holders)) or "processes that cannot be seen from here, such as another container's"
    )
    return Check(
        state.label,
        "warning" if allow_busy else "error",
        f"{memory}; {gibibytes(state.used_bytes)} are held by {holders}.",
        "Wait for them, end what you started, choose other GPUs with --gpus, or share it with --allow-busy-gpus.",
    )


def check_versions(driver: Driver, num_gpus: int) -> Check:
    """Do the driver, torch's CUDA build and Triton fit each other?"""
    name = "versions"
    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return Check(
            name, "error", "torch is not installed.", "Install this package with its dependencies: pip install ."
        )
    cuda = torch_cuda_version(torch)
    triton, wanted = _installed("triton", "pytorch-triton"), _wanted_triton(torch.requires or [])
    found = f"torch {torch.version} for {'CUDA ' + '.'.join(map(str, cuda)) if cuda else 'CPU'}"
    found += f", triton {triton}" if triton else ", no triton"
    if driver.version is not None and driver.cuda is not None:
        found = f"driver {driver.version} for CUDA {driver.cuda[0]}.{driver.cuda[1]}, {found}"
    if num_gpus == 0:
        return Check(name, "ok", f"{found}.")
    if cuda is None:
        return Check(
            name, "error", f"{found}: torch cannot use a GPU.", "Install a CUDA build of torch, or use --gpus cpu."
        )
    if driver.cuda is not None and driver.cuda[0] < cuda[0]:
        return Check(
            name,
            "error",
            f"{found}: the driver is too old for this torch.",
            f"Update the driver to one for CUDA {cuda[0]}, or install a torch built for CUDA {driver.cuda[0]}.",
        )
    if triton is None:
        return Check(name, "error", f"{found}: the compiled kernels need it.", f"pip install triton{wanted or ''}")
    if wanted is not None and wanted.startswith("==") and wanted[2:].split("+")[0] != triton.split("+")[0]:
        return Check(name, "warning", f"{found}, but torch asks for triton{wanted}.", f"pip install triton{wanted}")
    return Check(name, "ok", f"{found}.")


def torch_cuda_version(torch: metadata.Distribution) -> tuple[int, ...] | None:
    """The CUDA version that torch is built for, from its version.py; None for a CPU build."""
    try:
        text = Path(str(torch.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return tuple(int(part) for part in match[1].split(".")[:2]) if match else None


def _installed(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _wanted_triton(requirements: Iterable[str]) -> str | None:
    """The version that torch asks for, such as «==3.7.0»; None where it asks for none."""
    for requirement in requirements:
        if match := re.match(r"(?:pytorch-)?triton\s*\(?\s*([=<>!~]=?[^;\s)]*)", requirement):
            return match[1]
    return None


def check_compiler() -> Check:
    """Triton builds its launcher with a C compiler on first use."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        way_out = "Install gcc (on Debian and Ubuntu: apt install gcc), or name a compiler in CC."
        return Check("compiler", "warning", "no C compiler is found, which Triton needs for its first kernel.", way_out)
    return Check("compiler", "ok", f"{compiler}.")


def check_cache(folder: Path, way_out: str) -> Check:
    """Can compiled kernels be written, run from and locked where they will lie? `way_out` says how to put them elsewhere."""
    name, place = "compile cache", existing_parent(folder)
    if (problem := why_unwritable(place)) is not None:
        return Check(name, "error", f"{problem}.", f"Choose a disk that can be written: {way_out}.")
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        text = f"{place} is mounted noexec, so compiled kernels cannot be loaded."
        return Check(name, "error", text, f"Choose another disk: {way_out}.")
    if is_remote(kind := file_system(place)):
        text = f"{folder} lies on {kind}, a file system shared over a network."
        return Check(name, "warning", text, f"Compiling is faster and safer on a local disk: {way_out}.")
    return Check(name, "ok", f"{folder} can be written ({kind}).")


def check_unused_caches(folder: Path) -> list[Check]:
    """A warning where the user's environment names a compile cache, which training leaves alone; else nothing."""
    names = [name for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if os.environ.get(name)]
    if not names:
        return []
    found = " and ".join(f"{name}={os.environ[name]}" for name in names)
    text = f"{found} will not be used: each process has a cache of its own in {folder}."
    return [Check("compile cache", "warning", text, "Choose another folder for them with --compile-cache.")]


def check_disk(folder: Path, measure: bool) -> list[Check]:
    """Can the folder be written, how much is free, and how fast is it?"""
    name, place = "disk", existing_parent(folder)
    if (problem := why_unwritable(place)) is not None:
        return [Check(name, "error", f"{problem}.", f"Make {place} writable, or choose another folder.")]
    free = shutil.disk_usage(place).free
    space = f"{gibibytes(free)} free for {folder} ({file_system(place)})."
    if free < FEW_FREE_BYTES:
        # a start is not stopped here: extract and train-drafter forecast what they need, and refuse by that
        status: Literal["warning", "error"] = "error" if measure and free < LEAST_FREE_BYTES else "warning"
        sizes = "a store takes 5 to 50 kB a token, a checkpoint 14 bytes a parameter"
        return [Check(name, status, space, f"Free some, or choose another disk: {sizes}.")]
    if not measure:
        return [Check(name, "ok", space)]
    try:
        write, read = disk_speed(place)
    except OSError as error:
        return [Check(name, "ok", space), Check(name, "warning", f"its speed could not be measured: {error.strerror}.")]
    speed = f"{write / 1e6:,.0f} MB/s written, {read / 1e6:,.0f} MB/s read, over at most {PROBE_BYTES // 2**20} MiB."
    if min(write, read) < SLOW_BYTES_PER_SECOND:
        way_out = "GPUs will wait for it; a local NVMe disk writes 1,000 MB/s and more."
        return [Check(name, "ok", space), Check("disk speed", "warning", speed, way_out)]
    return [Check(name, "ok", space), Check("disk speed", "ok", speed)]


def check_shared_memory(num_gpus: int, folder: Path = Path("/dev/shm")) -> Check:
    """Is there room for what processes of several GPUs exchange?"""
    if not folder.is_dir():
        size = free = 0
    else:
        size, _, free = shutil.disk_usage(folder)
    text = f"{gibibytes(free)} of {gibibytes(size)} free in {folder}."
    if num_gpus > 1 and free < LEAST_SHARED_BYTES:
        way_out = "NCCL needs it between GPUs; start the container with --shm-size=16g or --ipc=host."
        return Check("shared memory", "warning", text, way_out)
    return Check("shared memory", "ok", text)


def check_open_files() -> Check:
    """May a process open as many files as a store has?"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        allowed = LEAST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, LEAST_OPEN_FILES)
        text = f"a process may open {soft} files, of {LEAST_OPEN_FILES:,} wanted."
        way_out = f"ulimit -n {allowed}" if allowed > soft else "Ask an administrator to raise the hard limit (nofile)."
        return Check("open files", "warning", text, way_out)
    return Check("open files", "ok", f"a process may open {'any number' if soft == resource.RLIM_INFINITY else soft}.")


def check_script(command: str = "dflash") -> Check:
    """Is the script that the shell starts as `dflash` ours, or that of z-lab's inference package?"""
    path = shutil.which(command)
    if path is None:
        return Check("command", "ok", f"no {command} is on the PATH.")
    try:
        with Path(path).open("rb") as file:
            text = file.read(8192)
    except OSError:
        text = b""
    imported = re.search(rb"^\s*(?:from|import)\s+(dflash[\w.]*)", text, re.MULTILINE)
    if imported is None or imported[1].startswith(b"dflash_train"):
        return Check("command", "ok", f"{path}.")
    return Check(
        "command",
        "warning",
        f"{path} is the script of another package ({imported[1].decode()}), z-lab's inference package by its name.",
        f"Use dflash-train instead of {command}, and give their package an environment of its own.",
    )


def stop_on_errors(checks: Sequence[Check]) -> None:
    """Raise InputError with every error among the checks."""
    errors = [str(check) for check in checks if check.status == "error"]
    if errors:
        raise InputError("\n".join([*errors, "Nothing was started. `dflash preflight` shows all checks."]))
