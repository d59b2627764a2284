"""Runs apart from the terminal: real processes, killed, reaped, mistaken for others, stopped and followed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dflash_train.cli import main
from dflash_train.errors import InputError
from dflash_train.machine import runs
from dflash_train.machine.run_state import ProcessIdentity, RunState, find_state, read_state
from dflash_train.machine.runs import Recorder, ask_to_stop, recording

RUN = """
import sys, time
from pathlib import Path
from dflash_train.errors import InputError
from dflash_train.machine.runs import Recorder, recording

recorder = Recorder(Path(sys.argv[1]), "train-drafter")
with recording(recorder):
    recorder.progress(unit="steps", done=3, total=10, tokens_per_second=5.0, hours_left=0.5, line="step 3 of 10")
    print("begun", flush=True)
    if len(sys.argv) > 2:
        raise InputError(sys.argv[2])
    for second in range(600):
        print("at", second, file=sys.stderr, flush=True)
        time.sleep(0.1)
"""
STEP = {"unit": "steps", "tokens_per_second": 5.0, "hours_left": 0.5}
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": f"answer {n} is long"},
        ]
    }
    for n in range(12)
]


def dflash(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def dflash_process(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_train.cli", *map(str, words)]
    return subprocess.run(command, check=False, cwd=cwd, capture_output=True, text=True, timeout=120)


@contextlib.contextmanager
def started(folder: Path, *words: str, log: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A run of seconds that has begun."""
    with contextlib.ExitStack() as stack:
        errors = subprocess.DEVNULL if log is None else stack.enter_context(log.open("w"))
        command = [sys.executable, "-c", RUN, str(folder), *words]
        popen = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True))
        try:
            assert popen.stdout is not None and popen.stdout.readline() == "begun\n"
            yield popen
        finally:
            popen.kill()


def test_a_killed_run_has_died_as_a_zombie_and_after_it(tmp_path: Path) -> None:
    with started(tmp_path) as popen:
        status = dflash("status", tmp_path)
        assert (status.exit_code, status.output.split()[0]) == (3, "running")
        assert "3 of 10 steps (30.0%), 5 tokens/s, 30 min left" in status.output
        popen.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is not reaped
        status = dflash("status", tmp_path)
        assert (status.exit_code, status.output.split()[0]) == (1, "died")
        assert "zombie" in status.output
        popen.wait()
        report = json.loads(dflash("status", tmp_path, "--json").output)
        assert (report["status"], report["outcome"]) == ("died", "running")
        assert "is gone without a last word" in report["reason"]
        assert "nothing to stop: the run died" in dflash("stop", tmp_path).output


def test_stop_ends_a_run_and_status_tells(tmp_path: Path) -> None:
    with started(tmp_path) as popen:
        stopped = dflash("stop", tmp_path)
        assert (stopped.exit_code, stopped.output.split()[0]) == (0, "stopped:")
        assert popen.wait() == 0
    status = dflash("status", tmp_path)
    assert (status.exit_code, status.output.split()[0]) == (4, "stopped")


def test_a_run_that_fails_tells_its_reason(tmp_path: Path) -> None:
    with started(tmp_path, "the store is damaged") as popen:
        assert popen.wait() == 1
    status = dflash("status", tmp_path)
    assert (status.exit_code, status.output.split()[0]) == (1, "failed")
    assert "error      the store is damaged" in status.output


def test_workers_logs_are_found_after_a_run_that_had_nothing_to_do(tmp_path: Path) -> None:
    """The newest that has left some, of all its ranks; not where a run is only about to start its processes."""
    logs = tmp_path / "s.zarr.logs"
    old, newest = (f"{datetime.fromtimestamp(time.time() - age, UTC):%Y%m%d-%H%M%S}" for age in (7200, 3600))
    beside = f"{datetime.fromtimestamp(time.time() - 3602, UTC):%Y%m%d-%H%M%S}"
    for name, folder, age in (("worker-0", old, 7000), ("rank-0-0", newest, 3000), ("rank-1-0", beside, 3000)):
        (logs / folder).mkdir(parents=True)
        file = logs / folder / f"{name}.log"
        file.write_text(f"of {name}\n")
        os.utime(file, (time.time() - age,) * 2)
    recorder = Recorder(logs, "extract")
    recorder.begin()
    assert dflash("logs", tmp_path / "s.zarr", "--workers").exit_code == 1
    recorder.end("finished", "nothing to do: all 20 samples are stored")
    result = dflash("logs", tmp_path / "s.zarr", "--workers")
    assert result.exit_code == 0 and "of worker-0" not in result.output
    assert "of rank-0-0" in result.output and "of rank-1-0" in result.output
    assert f"The newest run has started no process; these are of the newest that has, {logs / newest}." in result.output


def test_logs_follow_until_the_end(tmp_path: Path) -> None:
    log = tmp_path / "some.log"
    with started(tmp_path, log=log) as popen:
        command = [sys.executable, "-m", "dflash_train.cli", "logs", "-f", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None
            assert follower.stdout.readline().startswith("at ")
            popen.send_signal(signal.SIGTERM)
            popen.wait()
            rest = follower.stdout.read()
            assert follower.wait() == 0
    lines = log.read_text().splitlines(keepends=True)
    assert rest == "".join(lines[1:]), "every line once"
    assert dflash("logs", tmp_path, "-n", 2).output == "".join(lines[-2:])
    log.write_text("")
    assert dflash("logs", tmp_path).output == "(empty)\n"
    log.unlink()
    assert f"Its own log {log} is not there any more" in dflash("logs", tmp_path).output


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as popen:
        yield popen
        popen.kill()


def state_of(identity: ProcessIdentity, heartbeat_age: float = 0.0) -> RunState:
    at = time.time() - heartbeat_age
    return RunState(command="extract", process=identity, started_at=at, heartbeat_at=at)


def test_a_reused_id_counts_as_dead_and_is_never_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    identity = ProcessIdentity.of(sleeper.pid)
    assert state_of(identity, heartbeat_age=1e6).verdict() == ("running", ""), (
        "what can be seen alive needs no heartbeat"
    )
    other = dataclasses.replace(identity, start_ticks=identity.start_ticks - 1)
    verdict, reason = state_of(other).verdict()
    assert (verdict, "belongs to another process now" in reason) == ("died", True)
    assert ask_to_stop(state_of(other), timeout_seconds=0)
    assert sleeper.poll() is None and identity.death() is None


def test_a_name_with_parentheses_does_not_confuse(tmp_path: Path) -> None:
    program = tmp_path / "a) Z 1 ("
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as popen:
        assert ProcessIdentity.of(popen.pid).death() is None
        popen.kill()


def test_a_process_elsewhere_is_judged_by_its_heartbeat(sleeper: subprocess.Popen[bytes]) -> None:
    identity = ProcessIdentity.of(sleeper.pid)
    for elsewhere in (
        dataclasses.replace(identity, host="node-7"),
        dataclasses.replace(identity, pid_namespace="pid:[1]"),
    ):
        state = state_of(elsewhere, heartbeat_age=20)
        assert state.verdict()[0] == "running"
        assert state.verdict(time.time() + 600)[0] == "died"
        with pytest.raises(InputError, match="Run `dflash stop` there"):
            ask_to_stop(state, timeout_seconds=0)
    verdict = state_of(dataclasses.replace(identity, boot_id="before")).verdict()
    assert verdict == ("died", f"{identity.host} has been restarted since")


def test_the_state_is_written_at_once_then_at_most_once_a_second(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "new", "extract")
    assert not (tmp_path / "new").exists(), "nothing before the run begins"
    inodes: set[int] = set()
    began = time.monotonic()
    while time.monotonic() - began < 0.5:
        recorder.progress(**STEP, done=len(inodes) + 1, total=9, line="…")
        inodes.add(recorder.path.stat().st_ino)
    assert len(inodes) <= 3
    recorder.end("finished", "all done")
    state = read_state(recorder.path)
    assert (state.outcome, state.message, state.verdict()[0]) == ("finished", "all done", "finished")
    assert [path.name for path in recorder.path.parent.iterdir()] == ["state.json"]


def test_the_heart_beats_without_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "WRITE_SECONDS", 0.02)
    monkeypatch.setattr(runs, "HEARTBEAT_SECONDS", 0.1)
    recorder = Recorder(tmp_path, "extract")
    recorder.begin()
    first = read_state(recorder.path).heartbeat_at
    deadline = time.monotonic() + 10
    while read_state(recorder.path).heartbeat_at == first and time.monotonic() < deadline:
        time.sleep(0.02)
    assert read_state(recorder.path).heartbeat_at > first
    recorder.end("finished")


def test_a_start_that_fails_leaves_a_living_runs_state_alone(tmp_path: Path) -> None:
    with started(tmp_path) as popen:
        second = Recorder(tmp_path, "train-drafter")
        assert second.taken
        second.end("failed", error="in use")
        assert read_state(find_state(tmp_path)).process.pid == popen.pid
        assert dflash("status", tmp_path).exit_code == 3


def test_a_state_that_cannot_be_written_disturbs_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / "file" / "run", "extract")
    with recording(recorder):
        recorder.progress(**STEP, done=1, total=2, line="…")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"process": 1}', '{"process": {"pid": 1}}', "\x00"])
def test_a_damaged_state_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    for command in ("status", "stop", "logs"):
        result = dflash(command, tmp_path)
        assert (result.exit_code, "is no state of a run" in result.output) == (1, True), result.output


def test_folders_without_a_run_are_told_apart(tmp_path: Path) -> None:
    assert "no run is recorded" in dflash("status", tmp_path).output
    assert f"{tmp_path / 'no'} is not there" in dflash("status", tmp_path / "no").output


def test_detach_and_dry_run_exclude_each_other(tmp_path: Path) -> None:
    result = dflash("extract", "--target", "t", "--data", "d", "--store", tmp_path / "s", "--dry-run", "--detach")
    assert (result.exit_code, "leave --detach out" in result.output) == (2, True)
    assert not list(tmp_path.iterdir())


def test_a_detached_start_that_fails_is_told_at_once(tmp_path: Path) -> None:
    result = dflash_process(
        "train-drafter", "--store", "nowhere.zarr", "--run", "a run", "--gpus", "cpu", "--detach", cwd=tmp_path
    )
    assert result.returncode == 1
    assert "nowhere.zarr is not there" in result.stderr and "Traceback" not in result.stderr
    assert (
        "before any batch or step was done (exit status 1)" in result.stderr and "a run/logs/console-" in result.stderr
    )
    status = dflash("status", tmp_path / "a run")
    assert (status.exit_code, status.output.split()[0]) == (1, "failed")
    assert "nowhere.zarr is not there" in status.output


@pytest.mark.slow
def test_detached_runs_from_start_to_stop(tmp_path: Path, tiny_target: Callable[..., Path]) -> None:
    """An extract that finishes, and a training that is stopped, each in its own session."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    extract: list[Any] = ["extract", "--target", tiny_target("llama"), "--data", "rows.jsonl", "--store", "s.zarr"]
    extract += ["--gpus", "cpu", "--num-taps", 2, "--sample-cache", "cache", "--detach"]
    result = dflash_process(*extract, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "12 of 12 samples" in result.stdout and "dflash stop s.zarr" in result.stdout
    assert "starting, until the first batch or step is done; it logs to s.zarr.logs" in result.stderr
    state = wait_for_end(tmp_path / "s.zarr")
    assert (state.outcome, state.message) == ("finished", "stored 12 of 12")
    assert dflash("status", tmp_path / "s.zarr").exit_code == 0
    assert "stored 12 of 12" in dflash("logs", tmp_path / "s.zarr").output

    train: list[Any] = ["train-drafter", "--store", "s.zarr", "--run", "run", "--gpus", "cpu", "--num-layers", 1]
    train += ["--block-size", 4, "--row-tokens", 64, "--anchors", 8, "--rows-per-step", 1, "--mask-token", "<|mask|>"]
    result = dflash_process(*train, "--steps", 1_000_000, "--detach", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    run = tmp_path / "run"
    state = read_state(find_state(run))
    assert os.getsid(state.process.pid) == state.process.pid != os.getsid(0)
    assert dflash("status", run).exit_code == 3
    stopped = dflash("stop", run)
    assert (stopped.exit_code, stopped.output.split()[0]) == (0, "stopped:"), stopped.output
    step = read_state(find_state(run)).progress["done"]  # type: ignore[index]
    assert (run / "checkpoints" / f"step-{step:08}" / "model.safetensors").exists()
    assert dflash("status", run).exit_code == 4


def wait_for_end(folder: Path) -> RunState:
    deadline = time.monotonic() + 60
    while (state := read_state(find_state(folder))).verdict()[0] == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    return state
