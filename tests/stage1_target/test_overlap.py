from pathlib import Path

import pytest
import torch

from dflash_train.stage1_target.overlap import Overlap, parse_overlap


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until it is set: clock[0]."""
    now = [100.0]
    monkeypatch.setattr("dflash_train.stage1_target.overlap.time.perf_counter", lambda: now[0])
    return now


def test_the_window_opens_with_the_second_batch_and_shares_are_of_it(clock: list[float]) -> None:
    overlap = Overlap()
    for _ in range(2):
        clock[0] += 10  # warm-up
        overlap.batch_ran(100, 110, 9.0)
    for _ in range(4):
        with overlap.waiting("gpu"):
            clock[0] += 1.5
        with overlap.waiting("writer"):
            clock[0] += 0.5
        with overlap.busy("writer 0"):
            overlap.wrote("0", 1_000_000_000)
            clock[0] += 0.5
        overlap.batch_ran(1000, 1010, 2.0)
    with overlap.busy("commit 0"):
        clock[0] += 2
    overlap.closed()
    summary = overlap.summary()
    assert (summary["seconds"], summary["tokens"], summary["tokens_per_second"]) == (10.0, 4000, 400)
    assert summary["tokens_per_second_with_last_commit"] == 333
    assert (summary["gpu_busy"], summary["waited_for_gpu"], summary["waited_for_writers"]) == (0.8, 0.6, 0.2)
    assert (summary["writers_busy"], summary["written_gb_per_second"], summary["commit_seconds"]) == ([0.2], 2.0, 2.0)
    assert summary["padding"] == pytest.approx(0.0099, abs=1e-4) and summary["limit"] == "writers"


@pytest.mark.parametrize(("gpu_seconds", "limit"), [(0.95, "gpu"), (0.5, "main thread")])
def test_a_busy_gpu_limits_and_an_idle_one_waits_for_the_main_thread(
    clock: list[float], gpu_seconds: float, limit: str
) -> None:
    overlap = Overlap()
    for _ in range(3):
        clock[0] += 1
        overlap.batch_ran(100, 110, gpu_seconds)
    assert overlap.summary()["limit"] == limit


def test_the_log_line_is_found_again_and_a_log_without_one_gives_none() -> None:
    overlap = Overlap()
    log = f"2026-01-01 INFO Loading.\n2026-01-01 INFO {overlap.line()}\n"
    found = parse_overlap(log)
    assert found is not None and found == overlap.summary() | {"peak_host_gb": found["peak_host_gb"]}
    assert parse_overlap("2026-01-01 INFO Loading.\n") is None


def test_a_run_of_two_batches_has_an_empty_window() -> None:
    overlap = Overlap()
    overlap.batch_ran(100, 110, 1.0)
    overlap.batch_ran(100, 110, 1.0)
    assert overlap.summary()["tokens"] == 0 and overlap.summary()["writers_busy"] == []


def test_the_peak_of_host_memory_is_that_of_the_process() -> None:
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9
    assert Overlap().summary()["peak_host_gb"] == pytest.approx(resident, rel=0.05)
    assert Overlap().summary()["peak_gpu_gb"] == 0 or torch.cuda.is_available()
