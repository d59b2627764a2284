"""The checks before a run, against a driver, disks and scripts made for the purpose."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dflash_train.cli import main
from dflash_train.commands.preflight import check_start
from dflash_train.errors import InputError
from dflash_train.machine import gpus, preflight
from dflash_train.machine.disks import disk_speed, existing_parent, file_system, is_remote
from dflash_train.machine.gpus import Driver
from dflash_train.stage1_target.slow_paths import check_target
from dflash_train.stage1_target.target_files import TargetFiles, read_target_files

GIB = 2**30
MODULES = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d", "mamba-ssm": "mamba_ssm"}


class NVMLError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


class Nvml(types.ModuleType):
    """A fake pynvml: GPUs of 80 GiB, with processes as (GPU, pid, bytes)."""

    NVMLError = NVMLError
    NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND = 9, 12
    NVML_COMPUTEMODE_PROHIBITED = 2
    nvmlMemory_v2 = 0x02000028

    def __init__(self, num_gpus: int = 2) -> None:
        super().__init__("pynvml")
        self.num_gpus = num_gpus
        self.used = [0] * num_gpus
        self.processes: list[tuple[int, int, int | None]] = []
        self.failure: NVMLError | None = None
        self.has_second_memory = True
        self.compute_mode = 0
        self.lost: set[int] = set()
        self.cuda = 13000
        self.open = 0

    def nvmlInit(self) -> None:
        if self.failure:
            raise self.failure
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle:04d}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        handle = int(uuid.removeprefix("GPU-"))
        if handle in self.lost:
            raise NVMLError(15, "GPU is lost")
        return handle

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        if version is not None and not self.has_second_memory:
            raise NVMLError(13, "Function Not Found")
        used = self.used[handle]
        return types.SimpleNamespace(total=80 * GIB, used=used, free=79 * GIB - used)

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return self.compute_mode

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [types.SimpleNamespace(pid=p, usedGpuMemory=b) for gpu, p, b in self.processes if gpu == handle]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        raise NVMLError(3, "Not Supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    for name in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.fixture
def cuda_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`cuda_torch(cuda, triton)` pretends that a CUDA build of torch is installed, which asks for triton 3.7.0."""
    installed_version = metadata.version

    def install(cuda: str | None = "13.0", triton: str | None = "3.7.0") -> None:
        packages = tmp_path / "packages"
        (packages / "torch").mkdir(parents=True, exist_ok=True)
        text = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
        (packages / "torch" / "version.py").write_text(text)
        info = packages / "torch-2.13.0.dist-info"
        info.mkdir(exist_ok=True)
        asks = 'Requires-Dist: triton==3.7.0; platform_system == "Linux"'
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n{asks}\n")
        monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(info))

        def version(name: str) -> str:
            if "triton" not in name:
                return installed_version(name)
            if triton is None:
                raise metadata.PackageNotFoundError(name)
            return triton

        monkeypatch.setattr(metadata, "version", version)

    install()
    return install


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def found(result: Result) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


@pytest.fixture(autouse=True)
def no_cache_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor sets its variable in the environment of whoever compiles, such as this process's earlier tests."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_a_free_machine_is_ok(nvml: Nvml, cuda_torch: Any, tmp_path: Path) -> None:
    result = run("preflight", "--run", tmp_path / "run", "--store", tmp_path / "new" / "s.zarr", "--json")
    checks = found(result)
    assert checks["GPU 0"]["text"] == "NVIDIA H100, 79.0 GiB of 80.0 GiB free."
    assert checks["versions"]["text"] == "driver 580.65.06 for CUDA 13.0, torch 2.13.0 for CUDA 13.0, triton 3.7.0."
    assert {checks[name]["status"] for name in ("GPU 0", "GPU 1", "versions", "compile cache")} == {"ok"}
    assert not list(tmp_path.glob("new")) and not list(tmp_path.glob("run")), "it only looks"
    assert nvml.open == 0
    plain = run("preflight", "--run", tmp_path / "run")
    assert "ok       GPU 1: NVIDIA H100" in plain.output
    assert "0 in the way of a run" in plain.output


def test_a_busy_gpu_is_an_error_that_names_who_holds_it(
    nvml: Nvml, cuda_torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.used[1] = 30 * GIB
    nvml.processes = [(1, os.getpid(), 20 * GIB), (1, 2**22 + 7, 10 * GIB)]
    monkeypatch.setattr(gpus, "_may_use_a_gpu", lambda folder: True)
    result = run("preflight", "--json")
    assert result.exit_code == 1
    check = found(result)["GPU 1"]
    assert check["status"] == "error"
    assert f"30.0 GiB are held by process {os.getpid()} (" in check["text"]
    assert "pytest" in check["text"] and "20.0 GiB)" in check["text"]
    assert f"process {2**22 + 7} (not visible from here, 10.0 GiB)" in check["text"]
    assert "--allow-busy-gpus" in check["way_out"]
    assert run("preflight", "--gpus", "0").exit_code == 0, "the other GPU is free"
    allowed = run("preflight", "--allow-busy-gpus", "--json")
    assert (allowed.exit_code, found(allowed)["GPU 1"]["status"]) == (0, "warning")


def test_a_process_without_a_gpu_device_is_another_namespaces(nvml: Nvml) -> None:
    """NVML may give the host's process ids inside a container, where the same id is somebody else."""
    assert str(gpus._describe(os.getpid(), GIB)) == f"process {os.getpid()} (not visible from here, 1.0 GiB)"


def test_control_characters_of_a_command_line_are_not_printed(tmp_path: Path) -> None:
    folder = tmp_path / "41"
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"python\0-c\0\x1b[31mred\n\0" + b"x" * 300)
    holder = gpus._describe(41, None, tmp_path)
    assert holder.command is not None
    assert holder.command.startswith("python -c  [31mred ") and len(holder.command) == 100
    assert holder.command.isprintable()


def test_memory_held_by_nobody_visible_is_busy_too(nvml: Nvml, cuda_torch: Any) -> None:
    nvml.used[0], nvml.has_second_memory = 2 * GIB, False
    assert "held by processes that cannot be seen from here" in found(run("preflight", "--json"))["GPU 0"]["text"]


@pytest.mark.parametrize(
    ("total", "used", "busy"), [(80, 1.0, False), (80, 1.01, True), (8, 0.39, False), (8, 0.41, True)]
)
def test_busy_is_one_gibibyte_or_a_twentieth(total: float, used: float, busy: bool) -> None:
    state = gpus.GpuState("GPU 0", "", "", int(total * GIB), 0, int(used * GIB), False, ())
    assert state.is_busy is busy


@pytest.mark.parametrize("command", ["extract", "train-drafter"])
def test_a_busy_gpu_stops_a_run_before_anything_is_loaded(
    command: str, nvml: Nvml, cuda_torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nvml.used[0] = 5 * GIB
    words = {
        "extract": ["--target", "t", "--data", "d", "--store", "s"],
        "train-drafter": ["--store", "s", "--run", "r"],
    }
    for module in ("extract", "samples"):
        monkeypatch.setitem(sys.modules, f"dflash_train.stage1_target.{module}", None)
    monkeypatch.setitem(sys.modules, "dflash_train.stage2_drafter.train", None)
    result = run(command, *words[command])
    assert result.exit_code == 1
    assert "Error: GPU 0: NVIDIA H100" in result.output and "5.0 GiB are held" in result.output
    assert "Nothing was started." in result.output and "--allow-busy-gpus" in result.output
    assert isinstance(run(command, *words[command], "--gpus", "1").exception, SystemExit)
    assert "are held" not in run(command, *words[command], "--gpus", "1").output
    assert "warning: GPU 0" in run(command, *words[command], "--allow-busy-gpus").output
    assert [path.name for path in tmp_path.iterdir()] == ["packages"], "nothing is left behind"


def test_the_start_of_a_run_says_warnings_only(nvml: Nvml, cuda_torch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cuda_torch(triton="3.6.0")
    check_start(gpus="0")
    said = capsys.readouterr()
    assert said.out == ""
    assert "warning: versions: " in said.err and "torch asks for triton==3.7.0. pip install triton==3.7.0" in said.err
    assert "GPU" not in said.err and "MB/s" not in said.err


def test_torchrun_checks_only_its_own_gpu(nvml: Nvml, cuda_torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.used[0] = 5 * GIB  # the rank of that GPU has begun already
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    check_start(gpus=None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(InputError, match="GPU 0: .* 5.0 GiB are held"):
        check_start(gpus=None)


def cache_of(**fields: Any) -> preflight.Check:
    """The check of the compile cache in a plan."""
    checks = preflight.check_machine(preflight.Plan(**fields))
    return next(check for check in checks if check.name == "compile cache")


def test_the_compile_cache_that_a_run_will_use_is_checked(
    nvml: Nvml, cuda_torch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run's own, the one given, and under torchrun on several machines the one in the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    run_folder, given = tmp_path / "run", tmp_path / "given"
    monkeypatch.setattr(preflight, "file_system", lambda path: "nfs4")
    for fields, folder in (
        ({"run": run_folder}, run_folder / "compile-cache"),
        ({"run": run_folder, "compile_cache": given}, given),
        ({"compile_cache": given}, given),
    ):
        check = cache_of(**fields)
        assert (check.status, check.text.split(" lies on nfs4")[0]) == ("warning", str(folder))
        assert "--compile-cache" in check.way_out and "XDG_CACHE_HOME" not in check.way_out
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cache_of(run=run_folder).text.startswith(f"{tmp_path / 'user' / 'dflash-train' / 'compile' / 'run-'}")
    assert cache_of(run=run_folder, compile_cache=given).text.startswith(f"{given} lies on nfs4")


def test_a_cache_for_compiled_kernels_that_cannot_be_used_names_the_option(
    nvml: Nvml, cuda_torch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "dflash_train.stage2_drafter.train", None)  # where it would go on
    words = ["train-drafter", "--store", "s", "--run", "r", "--gpus", "cpu"]
    result = run(*words, "--compile-cache", "/proc/self/cache")
    assert (result.exit_code, "compile cache: /proc/self" in result.output.replace(str(os.getpid()), "self")) == (
        1,
        True,
    )
    assert "name a folder there with --compile-cache" in result.output and "Nothing was started." in result.output
    assert "/proc" not in run(*words).output, "the run's own is used"
    result = run("preflight", "--gpus", "cpu", "--json", "--run", "r", "--compile-cache", "elsewhere")
    assert found(result)["compile cache"]["text"].startswith(f"{tmp_path / 'elsewhere'} can be written")
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_flag=os.ST_NOEXEC))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(total=0, used=0, free=100 * GIB))
    monkeypatch.setattr(preflight, "check_shared_memory", lambda number: preflight.Check("shared memory", "ok", ""))
    assert cache_of(run=tmp_path / "r").way_out.endswith("name a folder there with --compile-cache.")


def test_the_users_own_compile_cache_is_left_alone_and_that_is_said(
    nvml: Nvml, cuda_torch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/fast/inductor")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    check_start(gpus="0", run=tmp_path / "run")
    warning = (
        "warning: compile cache: TORCHINDUCTOR_CACHE_DIR=/fast/inductor will not be used: each process has a cache of"
    )
    said = " ".join(capsys.readouterr().err.split())
    assert f"{warning} its own in {tmp_path / 'run' / 'compile-cache'}." in said and "--compile-cache" in said
    for fields in ({"run": tmp_path / "run", "compile_cache": tmp_path / "given"}, {"store": tmp_path / "store"}):
        check_start(gpus="0", **fields)
        assert "TORCHINDUCTOR_CACHE_DIR" not in capsys.readouterr().err


def test_a_driver_that_does_not_answer_is_no_machine_without_gpu(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.failure = NVMLError(18, "Driver/library version mismatch")
    result = run("preflight", "--json")
    assert result.exit_code == 1
    assert "does not answer: Driver/library version mismatch" in found(result)["GPU"]["text"]
    assert run("preflight", "--gpus", "cpu").exit_code == 0
    nvml.failure = NVMLError(12, "NVML Shared Library Not Found")
    monkeypatch.setattr(gpus, "Path", lambda path: Path("/nowhere"))
    result = run("preflight", "--json")
    assert (result.exit_code, found(result)["GPU"]["status"]) == (0, "warning")
    assert found(run("preflight", "--json", "--gpus", "cpu"))["GPU"]["status"] == "ok"


def test_a_lost_or_prohibited_gpu_is_an_error(nvml: Nvml, cuda_torch: Any) -> None:
    nvml.lost = {0}
    nvml.compute_mode = 2
    checks = found(run("preflight", "--json"))
    assert "GPU 0 does not answer: GPU is lost" in checks["GPU"]["text"]
    assert "«prohibited»" in checks["GPU 1"]["text"]


@pytest.mark.parametrize(
    ("cuda", "triton", "driver", "status", "text"),
    [
        ("12.8", "3.7.0", (13, 0), "ok", "torch 2.13.0 for CUDA 12.8"),
        ("12.8", "3.7.0", (12, 2), "ok", "driver 550 for CUDA 12.2"),
        ("13.0", "3.7.0", (12, 8), "error", "the driver is too old for this torch"),
        (None, "3.7.0", (13, 0), "error", "torch cannot use a GPU"),
        ("13.0", None, (13, 0), "error", "the compiled kernels need it"),
        ("13.0", "3.6.0", (13, 0), "warning", "torch asks for triton==3.7.0"),
        ("13.0", "3.7.0+git1", (13, 0), "ok", "triton 3.7.0+git1"),
    ],
)
def test_driver_torch_and_triton_must_fit(
    cuda: str | None, triton: str | None, driver: tuple[int, int], status: str, text: str, cuda_torch: Any
) -> None:
    cuda_torch(cuda, triton)
    check = preflight.check_versions(Driver("550", driver), 1)
    assert (check.status, text in check.text) == (status, True), check
    assert preflight.check_versions(Driver(), 0).status == "ok", "a CPU needs none of it"


def test_the_disk_probe_leaves_nothing(tmp_path: Path) -> None:
    write, read = disk_speed(tmp_path)
    assert write > 0 and read > 0
    assert not list(tmp_path.iterdir())


def test_little_space_and_a_slow_disk_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "disk_speed", lambda folder: (50e6, 900e6))
    usage = types.SimpleNamespace(total=0, used=0, free=100 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert [check.status for check in preflight.check_disk(tmp_path / "new", measure=True)] == ["ok", "warning"]
    assert [check.name for check in preflight.check_disk(tmp_path, measure=False)] == ["disk"]
    usage.free = 10 * GIB
    assert preflight.check_disk(tmp_path, measure=False)[0].status == "warning"
    usage.free = GIB // 2
    [check] = preflight.check_disk(tmp_path, measure=True)
    assert (check.status, "0.5 GiB free" in check.text) == ("error", True)
    [check] = preflight.check_disk(tmp_path, measure=False)
    assert check.status == "warning", "a start has its own forecast"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/proc/self")  # read-only for root as well
    assert preflight.check_disk(folder / "task" / "store", measure=True)[0].status == "error"
    assert "cannot be written" in preflight.check_cache(folder / "compile-cache", "").text
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert existing_parent(tmp_path / "loop" / "store") == tmp_path
    assert existing_parent(tmp_path / ("x" * 300) / "store") == tmp_path
    flags = types.SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda path: flags)
    assert "noexec" in preflight.check_cache(tmp_path, "").text


def test_the_innermost_mount_names_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "22 21 0:5 / /data\\040sets rw - nfs4 server:/data rw,vers=4.2\n"
        "23 22 0:6 / /data\\040sets/local rw shared:9 master:2 - xfs /dev/sdb rw\n"
    )
    kinds = {
        path: file_system(Path(path), mounts) for path in ("/home/a", "/data sets/b", "/data sets/local/c", "/data")
    }
    assert list(kinds.values()) == ["ext4", "nfs4", "xfs", "ext4"]
    assert [is_remote(kind) for kind in ("nfs4", "fuse.sshfs", "lustre", "xfs", "overlay")] == [True] * 3 + [False] * 2
    monkeypatch.setattr(preflight, "file_system", lambda path: "nfs4")
    assert preflight.check_cache(tmp_path, "").status == "warning"


def test_shared_memory_matters_to_several_gpus_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: (64 * 2**20, 0, 64 * 2**20))
    assert [preflight.check_shared_memory(number, tmp_path).status for number in (0, 1, 2)] == ["ok", "ok", "warning"]
    assert preflight.check_shared_memory(2, tmp_path / "none").status == "warning"


def test_a_low_limit_of_open_files_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for limits, way_out in {(256, 4096): "ulimit -n 1024", (256, 256): "Ask an administrator"}.items():
        monkeypatch.setattr(resource, "getrlimit", lambda which, limits=limits: limits)
        check = preflight.check_open_files()
        assert (check.status, check.way_out.startswith(way_out)) == ("warning", True)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert preflight.check_open_files().status == "ok"


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"model_type": "qwen3"}, []),
        ({"layer_types": ["linear_attention", "full_attention"]}, ["flash-linear-attention", "causal-conv1d"]),
        ({"text_config": {"linear_num_key_heads": 16}}, ["flash-linear-attention", "causal-conv1d"]),
        ({"model_type": "mamba2"}, ["mamba-ssm", "causal-conv1d"]),
        ({"layers_block_type": ["mamba", "attention"]}, ["mamba-ssm", "causal-conv1d"]),
        ({"layer_types": ["conv", "full_attention"]}, ["causal-conv1d"]),
        ({"layer_types": ["sliding_attention"], "text_config": None}, []),
    ],
)
def test_missing_fast_kernels_are_named(config: dict[str, Any], missing: list[str]) -> None:
    files = TargetFiles(name="t", config=config, has_fast_tokenizer=True)
    kernels, tokenizer = check_target(files, 1, has_module=lambda module: False)
    assert (kernels.status, tokenizer.status) == ("warning" if missing else "ok", "ok")
    assert kernels.way_out == (f"pip install {' '.join(missing)}" if missing else "")
    assert check_target(files, 1, has_module=lambda module: module in MODULES.values())[0].status == "ok"
    assert check_target(files, 0, has_module=lambda module: False)[0].status == "ok", "CPUs have none"


def test_a_local_target_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"layer_types": ["linear_attention"]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    files = read_target_files(str(tmp_path))
    assert (files.layers_with_kernels(), files.has_fast_tokenizer) == ("linear-attention", True)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").unlink()
    slow = check_target(read_target_files(str(tmp_path)), 1)[1]
    assert (slow.status, "no tokenizer.json" in slow.text) == ("warning", True)
    for text in ("[1]", "{", ""):
        (tmp_path / "config.json").write_text(text)
        assert read_target_files(str(tmp_path)).severity == "error"
    result = run("preflight", "--gpus", "cpu", "--target", tmp_path / "none.gguf", "--json")
    assert (result.exit_code, found(result)["target"]["status"]) == (1, "error")


def test_the_hub_is_asked_only_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def model_info(self: Any, name: str, revision: str | None, timeout: float) -> Any:
        if name == "org/none":
            raise OSError("404: no such model\nmore")
        names = ["config.json", "tokenizer.model"]
        return types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename=file) for file in names])

    config = tmp_path / "config.json"
    config.write_text('{"layer_types": ["linear_attention"]}')
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *words, **keywords: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, revision: str(config))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    assert read_target_files("org/model").severity == "ok"
    assert read_target_files("org/model").config == {}
    asked = read_target_files("org/model", ask_hub=True)
    assert (asked.layers_with_kernels(), asked.has_fast_tokenizer) == ("linear-attention", False)
    wrong = read_target_files("org/none", ask_hub=True)
    assert (wrong.severity, wrong.problem) == (
        "error",
        "'org/none' is no folder here and could not be read from the hub (404: no such model)",
    )
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda name, file, **k: str(config) if file == config.name else None
    )
    assert read_target_files("org/model").has_fast_tokenizer is None, "the cache may hold a part only"


def test_a_name_beside_local_models_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """org/name where a folder org holds models here: a misspelt folder, or a target of the hub."""
    import huggingface_hub

    asked: list[str] = []

    def model_info(self: Any, name: str, revision: str | None, timeout: float) -> Any:
        asked.append(name)
        if name != "models/On-The-Hub":
            raise OSError("Name or service not known")
        return types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename="config.json")])

    monkeypatch.chdir(tmp_path)
    for name in ("Tiny-4B", "Tiny-8B"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    (tmp_path / "models" / "tiny-8").mkdir()  # no model
    (tmp_path / "data" / "rows").mkdir(parents=True)
    config = str(tmp_path / "models" / "Tiny-4B" / "config.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *words, **keywords: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, revision: config)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    wrong = read_target_files("models/tiny-8")
    assert (wrong.severity, wrong.problem) == ("error", "'models/tiny-8' has no config.json")
    wrong = read_target_files("models/tiny8B")
    assert (wrong.severity, wrong.way_out.split(" Check")[0]) == ("error", "The nearest folder is 'models/Tiny-8B'.")
    assert read_target_files("models/On-The-Hub").problem is None
    assert asked == ["models/tiny8B", "models/On-The-Hub"]
    for name in ("data/row", "other/tiny8B", "tiny8B"):
        assert read_target_files(name).severity == "ok", name
    assert len(asked) == 2, "the rest is left to the hub's client"
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda name, file, **k: config if file == "config.json" else None
    )
    assert read_target_files("models/tiny8B").problem is None and len(asked) == 2, "downloaded before"


def test_another_packages_script_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "dflash"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.check_script().text == "no dflash is on the PATH."
    for line, status in {
        "from dflash_train.cli import main": "ok",
        "from dflash.cli import main": "warning",
        "import dflash": "warning",
        "print('my own')": "ok",
    }.items():
        script.write_text(f"#!/usr/bin/python3\nimport sys\n{line}\n")
        script.chmod(0o755)
        assert preflight.check_script().status == status, line
    script.write_bytes(b"\x7fELF\x00\xff")
    assert preflight.check_script().status == "ok"


def test_a_missing_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert preflight.check_compiler().status == "warning"
    monkeypatch.setenv("CC", "/opt/cc")
    assert preflight.check_compiler().text == "/opt/cc."


def test_the_checks_import_nothing_heavy() -> None:
    code = (
        "import sys; from dflash_train.commands.preflight import check_plan; check_plan('no/such', gpus='cpu'); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'zarr', 'datasets') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
