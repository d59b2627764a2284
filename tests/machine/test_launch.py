import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_train.errors import InputError
from dflash_train.machine import launch
from dflash_train.machine.launch import (
    TorchrunPlace,
    compile_cache_folder,
    group_devices,
    last_lines,
    parse_devices,
    rank_devices,
    start_processes,
    torchrun_place,
    with_compile_cache,
)

WORKER = """
import os, sys, time

def echo(connection, word):
    connection.send((word, os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpid()))
    print("said", word)
    while True:
        message = connection.recv()
        if message == "crash":
            raise RuntimeError("as told")
        if message == "end":
            return
        connection.send(message)

def tell_caches(connection):
    from dflash_train.machine.launch import has_compiled_kernels
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    connection.send(([os.environ[name] for name in names], has_compiled_kernels()))

def end_badly(connection):
    import atexit
    atexit.register(os.abort)
    print("work is done")

def sleep(connection):
    connection.send("asleep")
    time.sleep(60)

def start_another(connection, log_folder):
    from dflash_train.machine.launch import parse_devices, start_processes
    group = start_processes("launch_test_worker.sleep", [{}], parse_devices("cpu"), log_folder)
    group.wait(30)
    connection.send(group.processes[0].pid)
    time.sleep(60)
"""


@pytest.fixture
def worker_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "launch_test_worker.py").write_text(WORKER)
    (tmp_path / "launch_test_broken.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "launch_test_worker"


def wait_for(group: launch.ProcessGroup, count: int) -> list[tuple[int, Any]]:
    events: list[tuple[int, Any]] = []
    deadline = time.monotonic() + 30
    while len(events) < count and time.monotonic() < deadline:
        events += [(process.index, message) for process, message in group.wait(1.0)]
    return events


def test_processes_talk_log_and_see_their_own_environment(worker_module: str, tmp_path: Path) -> None:
    arguments = [{"word": "one"}, {"word": "two"}]
    with start_processes(
        f"{worker_module}.echo", arguments, parse_devices("cpu:2"), tmp_path / "logs", "rank"
    ) as group:
        events = sorted(wait_for(group, 2))
        assert [(index, message[:2]) for index, message in events] == [(0, ("one", "")), (1, ("two", ""))]
        assert [message[2] for _, message in events] == [process.pid for process in group.processes]
        assert group.processes[1].send([1, 2])
        assert wait_for(group, 1) == [(1, [1, 2])]
        for process in group.processes:
            process.send("end")
        assert sorted(wait_for(group, 2)) == [(0, None), (1, None)]
        assert [process.popen.returncode for process in group.processes] == [0, 0]
    assert last_lines(tmp_path / "logs" / "rank-1.log") == ["said two"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ or os.environ["CUDA_VISIBLE_DEVICES"] != ""


def test_every_process_has_a_compile_cache_of_its_own_whatever_the_environment_says(
    worker_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "somebody's"))
    cache = tmp_path / "cache"
    (cache / "rank-1" / "triton" / "hash").mkdir(parents=True)
    (cache / "rank-1" / "triton" / "hash" / "kernel.so").touch()
    (cache / "rank-0" / "triton").mkdir(parents=True)
    devices = [with_compile_cache(device, cache, rank) for rank, device in enumerate(parse_devices("cpu:2"))]
    assert [device.environment["CUDA_VISIBLE_DEVICES"] for device in devices] == ["", ""]
    with start_processes(f"{worker_module}.tell_caches", [{}, {}], devices, tmp_path / "logs") as group:
        told = sorted((index, message) for index, message in wait_for(group, 4) if message is not None)
    assert told == [
        (rank, ([str(cache / f"rank-{rank}"), str(cache / f"rank-{rank}" / "triton")], rank == 1)) for rank in (0, 1)
    ]
    assert not (tmp_path / "somebody's").exists()


def place_of(monkeypatch: pytest.MonkeyPatch, world: int, local_world: int) -> None:
    """Pretend that torchrun started `world` processes, `local_world` of them here."""
    values = {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_world, "GROUP_RANK": 0}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_kernels_are_compiled_into_the_run_folder_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in ("without torchrun", "with torchrun on one machine"):
        assert compile_cache_folder(Path("run"), None) == tmp_path / "run" / "compile-cache"
        assert compile_cache_folder(Path("run"), Path("fast")) == tmp_path / "fast"
        place_of(monkeypatch, world=4, local_world=4)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--compile-cache is file, a file, but must be a folder; name another path"):
        compile_cache_folder(Path("run"), Path("file"))


def test_kernels_of_several_machines_stay_on_each_under_a_name_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "link").symlink_to("run")
    place_of(monkeypatch, world=4, local_world=2)
    folder = compile_cache_folder(Path("run"), None)
    assert folder.parent == tmp_path / "user" / "dflash-train" / "compile" and folder.name.startswith("run-")
    assert compile_cache_folder(Path("link"), None) == compile_cache_folder(tmp_path / "run", None) == folder
    assert compile_cache_folder(Path("other") / "run", None) != folder
    assert compile_cache_folder(Path("run"), Path("fast")) == tmp_path / "fast"


def test_a_crash_is_told_with_the_last_lines_of_the_log(worker_module: str, tmp_path: Path) -> None:
    with start_processes(f"{worker_module}.echo", [{"word": "hello"}], parse_devices("cpu"), tmp_path) as group:
        group.processes[0].send("crash")
        assert wait_for(group, 2)[-1] == (0, None)
        assert "CPU worker 0" in (said := group.processes[0].describe_end())
        assert "ended with exit status 1" in said and "RuntimeError: as told" in said


def test_an_interpreter_that_cannot_be_taken_apart_does_not_spoil_work_that_is_done(
    worker_module: str, tmp_path: Path
) -> None:
    with start_processes(f"{worker_module}.end_badly", [{}], parse_devices("cpu"), tmp_path / "logs") as group:
        assert wait_for(group, 1) == [(0, None)]
        assert group.processes[0].popen.poll() == 0
    assert last_lines(tmp_path / "logs" / "worker-0.log") == ["work is done"]


def test_an_import_that_fails_leaves_its_line_in_the_log(worker_module: str, tmp_path: Path) -> None:
    assert worker_module
    with start_processes("launch_test_broken.f", [{}], parse_devices("cpu"), tmp_path) as group:
        assert wait_for(group, 1) == [(0, None)]
    assert last_lines(tmp_path / "worker-0.log", 1) == ["ModuleNotFoundError: No module named 'no_such_package'"]


def test_a_killed_process_is_an_end_with_its_signal_named(worker_module: str, tmp_path: Path) -> None:
    with start_processes(f"{worker_module}.sleep", [{}], parse_devices("cpu"), tmp_path) as group:
        assert wait_for(group, 1) == [(0, "asleep")]
        os.kill(group.processes[0].pid, signal.SIGINT)  # a Ctrl-C reaches everyone; the parent decides
        os.kill(group.processes[0].pid, signal.SIGKILL)
        assert wait_for(group, 1) == [(0, None)]
        assert (
            "was killed by SIGKILL (by hand, or by the system for want of memory)" in group.processes[0].describe_end()
        )
        assert not group.processes[0].send("anything")


def test_leaving_the_context_leaves_no_process(worker_module: str, tmp_path: Path) -> None:
    group = start_processes(f"{worker_module}.sleep", [{}], parse_devices("cpu"), tmp_path)
    wait_for(group, 1)
    group.stop(0.1)
    assert group.processes[0].popen.returncode == -signal.SIGKILL


def test_processes_die_with_a_killed_parent(worker_module: str, tmp_path: Path) -> None:
    arguments = [{"log_folder": tmp_path / "inner"}]
    with start_processes(f"{worker_module}.start_another", arguments, parse_devices("cpu"), tmp_path) as group:
        [(_, grandchild)] = wait_for(group, 1)
        os.kill(group.processes[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while is_alive(grandchild) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_alive(grandchild)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_last_lines_of_a_long_or_missing_log(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none.log") == []
    (tmp_path / "long.log").write_bytes(b"x" * 100_000 + b"\n\nline \xff one\n  \nline two\n\n")
    assert last_lines(tmp_path / "long.log", 2) == ["line \ufffd one", "line two"]


GPUS = ["GPU-aaaa1", "GPU-bbbb2", "GPU-cccc3", "GPU-dddd4"]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(launch, "_gpu_uuids", lambda: list(GPUS))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def visible(text: str | None) -> list[str]:
    return [device.environment["CUDA_VISIBLE_DEVICES"] for device in parse_devices(text)]


def test_gpu_numbers_become_one_uuid_a_process(four_gpus: pytest.MonkeyPatch) -> None:
    assert visible("0-2") == GPUS[:3]
    assert visible("3, 1") == [GPUS[3], GPUS[1]]
    assert visible("0,2-3") == [GPUS[0], *GPUS[2:]]
    assert visible(None) == GPUS
    device = parse_devices("1")[0]
    assert (device.label, device.torch_device) == ("GPU 1", "cuda:0")


def test_numbers_are_positions_in_cuda_visible_devices(four_gpus: pytest.MonkeyPatch) -> None:
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-aa")
    assert visible("0-1") == [GPUS[2], GPUS[0]] == visible(None)
    with pytest.raises(InputError, match="--gpus names GPU 2 but CUDA_VISIBLE_DEVICES has 0-1"):
        parse_devices("0-2")
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "")
    assert parse_devices(None)[0].torch_device == "cpu"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("2-5", "--gpus names GPU 4, 5 but this machine has 0-3; choose from these"),
        ("3-1", "--gpus is '3-1'; write GPU numbers like"),
        ("1,,2", "write GPU numbers like"),
        ("gpu", "write GPU numbers like"),
        ("1,0-2", "names a GPU twice"),
        ("cpu:0", "asks for no worker at all"),
    ],
)
def test_wrong_devices_are_refused(four_gpus: pytest.MonkeyPatch, text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        parse_devices(text)


def test_without_a_gpu_numbers_are_refused_and_the_default_is_one_cpu_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_gpu_uuids", list)
    assert [device.label for device in parse_devices(None)] == ["CPU worker 0"]
    assert [device.label for device in parse_devices("cpu:3")] == [f"CPU worker {i}" for i in range(3)]
    with pytest.raises(InputError, match="shows no NVIDIA GPU; use --gpus cpu"):
        parse_devices("0-3")


def test_gpus_are_grouped_with_their_neighbours(four_gpus: pytest.MonkeyPatch) -> None:
    devices = group_devices(parse_devices("0-3"), 2)
    assert [(device.label, device.torch_device) for device in devices] == [
        ("GPUs 0+1", "cuda:0"),
        ("GPUs 2+3", "cuda:0"),
    ]
    assert [device.environment["CUDA_VISIBLE_DEVICES"] for device in devices] == [
        ",".join(GPUS[:2]),
        ",".join(GPUS[2:]),
    ]
    assert group_devices(parse_devices("1,3"), 1) == parse_devices("1,3")
    with pytest.raises(InputError, match="--gpus-per-target 2 does not divide the 3 GPUs to be used; name a multiple"):
        group_devices(parse_devices("0-2"), 2)
    with pytest.raises(InputError, match="--gpus-per-target 2 needs GPUs, but the target is to run on the CPU"):
        group_devices(parse_devices("cpu:2"), 2)


def test_a_rank_takes_the_gpus_of_its_local_rank(four_gpus: pytest.MonkeyPatch) -> None:
    def labels(local_rank: int, text: str | None, size: int) -> list[str]:
        return [device.label for device in rank_devices(TorchrunPlace(6, 8, local_rank, 2, 3), text, size)]

    assert labels(1, None, 1) == labels(1, "0", 1) == ["GPU 1"]
    assert labels(1, None, 2) == ["GPU 2", "GPU 3"]
    assert labels(1, "cpu", 1) == ["CPU worker 1"]
    with pytest.raises(InputError, match="2 processes here, which need 6 GPUs, but this machine shows 4; start fewer"):
        labels(1, None, 3)
    four_gpus.setattr(launch, "_gpu_uuids", list)
    assert labels(1, None, 1) == ["CPU worker 1"]


def test_torchrun_tells_the_place_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert torchrun_place() == TorchrunPlace(5, 8, 1, 4, 1)


def test_cache_folder_respects_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert launch.user_cache_folder() == tmp_path / "dflash-train"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert launch.user_cache_folder() == Path("/home/somebody/.cache/dflash-train")


def test_launch_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, dflash_train.machine.launch; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
