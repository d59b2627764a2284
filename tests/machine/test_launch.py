import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_train.machine.compile_cache import with_compile_cache
from dflash_train.machine.devices import parse_devices
from dflash_train.machine.launch import ProcessGroup, last_lines, start_processes

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
    from dflash_train.machine.compile_cache import has_compiled_kernels
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
    from dflash_train.machine.devices import parse_devices
    from dflash_train.machine.launch import start_processes
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


def wait_for(group: ProcessGroup, count: int) -> list[tuple[int, Any]]:
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
        for number in (signal.SIGINT, signal.SIGTERM):  # both reach everyone of a process group; the parent decides
            os.kill(group.processes[0].pid, number)
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


def test_launch_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, dflash_train.machine.launch; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
