"""The parent's loop without processes: who creates the store, how fast they are that are left, what is quarantined."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_train.stage1_target import messages, supervisor
from dflash_train.stage1_target.events import Event, Note, Progress
from dflash_train.stage1_target.schedule import Batch
from dflash_train.stage1_target.speed import RecentSpeed
from dflash_train.stage1_target.supervisor import Supervisor

TOKENS, SAMPLES = 100, 40


@dataclass(eq=False)
class FakeProcess:
    index: int
    ended: bool = False
    sent: list[Any] = field(default_factory=list)
    popen: Any = field(default_factory=lambda: SimpleNamespace(returncode=None))

    @property
    def device(self) -> Any:
        return SimpleNamespace(label=f"GPU {self.index}")

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def die(self) -> tuple[FakeProcess, None]:
        self.ended, self.popen.returncode = True, -9
        return self, None

    def describe_end(self) -> str:
        return f"GPU {self.index} was killed by SIGKILL"


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def processes() -> list[FakeProcess]:
    return [FakeProcess(0), FakeProcess(1)]


@pytest.fixture
def run(
    processes: list[FakeProcess], events: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Supervisor:
    """Of 40 samples of 100 tokens, two a batch, for a store that is not there yet."""
    monkeypatch.setattr(supervisor, "stored_indices", lambda table, _store: np.zeros(SAMPLES, bool))
    limits: dict[str, Any] = {"max_store_size": None, "max_store_bytes": None, "require_fast_kernels": False}
    prepared: Any = SimpleNamespace(
        config=SimpleNamespace(store=tmp_path / "store", calibration_from=tmp_path / "other", **limits),
        table=SimpleNamespace(lengths=np.full(SAMPLES, TOKENS)),
        batches=[Batch((first, first + 1), 2 * TOKENS, 2 * TOKENS) for first in range(0, SAMPLES, 2)],
        forecast=SimpleNamespace(
            store_bytes_per_token=1, num_pending=SAMPLES, num_pending_tokens=SAMPLES * TOKENS, num_samples=SAMPLES
        ),
        store_exists=False,
        new_entries=[],
        slow_paths=[],
        plan=SimpleNamespace(beat=lambda: None),
    )

    class Group:
        def __init__(self) -> None:
            self.processes = processes

        @property
        def running(self) -> list[FakeProcess]:
            return [process for process in processes if not process.ended]

    group: Any = Group()
    return Supervisor(prepared, group, events.append, threading.Event())


def handle(run: Supervisor, *happened: tuple[FakeProcess, Any]) -> None:
    run._handle(list(happened))  # type: ignore[arg-type]
    run._send()


def test_another_worker_creates_the_store_where_the_first_dies_of_it(
    run: Supervisor, processes: list[FakeProcess], events: list[Event]
) -> None:
    first, second = processes
    handle(run, (first, messages.Loaded()), (second, messages.Loaded()))
    assert [type(message) for message in first.sent] == [messages.Create] and second.sent == []
    handle(run, first.die())
    assert [type(message) for message in second.sent] == [messages.Create]
    assert run.failures == ["GPU 0 was killed by SIGKILL"]
    assert Note("GPU 0 was killed by SIGKILL", failure=True) in events, "at once"
    handle(run, (second, messages.Created()), (second, messages.Ready()))
    assert [type(message) for message in second.sent[1:]] == [messages.Run] * 2


def start(run: Supervisor, processes: list[FakeProcess]) -> list[int]:
    """All workers run; the numbers of the batches that they were given first."""
    first, second = processes
    loaded = [(process, messages.Loaded()) for process in processes]
    handle(run, *loaded)
    handle(run, (first, messages.Created()), (first, messages.Ready()), (second, messages.Ready()))
    return [next(each for each in process.sent if isinstance(each, messages.Run)).number for process in processes]


def test_the_time_left_after_a_death_is_that_of_the_workers_that_are_left(
    run: Supervisor, processes: list[FakeProcess], events: list[Event]
) -> None:
    first, second = processes
    numbers = start(run, processes)
    now = time.monotonic()
    run._started = now - 3600  # an hour at the speed of both
    run._speeds = {0: RecentSpeed(now - 10), 1: RecentSpeed(now - 10)}
    handle(run, (first, messages.Ran(numbers[0])), (second, messages.Ran(numbers[1])))
    both = events[-1]
    assert isinstance(both, Progress) and both.num_workers == 2
    assert both.tokens_per_second == pytest.approx(40, rel=0.05)
    assert both.hours_left == pytest.approx((SAMPLES * TOKENS - 400) / 40 / 3600, rel=0.05)
    handle(run, second.die())
    left = run._progress()
    assert left.num_workers == 1 and left.tokens_per_second == pytest.approx(20, rel=0.05)
    assert left.hours_left == pytest.approx(2 * both.hours_left, rel=0.05)


def test_samples_put_into_quarantine_are_told_of_at_the_end(
    run: Supervisor, processes: list[FakeProcess], events: list[Event]
) -> None:
    first, second = processes
    numbers = start(run, processes)
    committed = messages.Committed("s", (0, 1), num_samples=1, num_tokens=100, num_bytes=100, num_entries=0)
    handle(run, (first, messages.Ran(numbers[0])), (first, committed))
    first.ended = second.ended = True
    run.run()
    assert events[-1] == Note("1 sample put into quarantine: dflash inspect-store counts the reasons")
    assert run.num_new_samples == 1
