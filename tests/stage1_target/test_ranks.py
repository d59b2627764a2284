"""Extract under torchrun: shares, turns, ends, and two agents on this machine."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from dflash_train.cli import main
from dflash_train.errors import InputError
from dflash_train.machine.torchrun import TorchrunPlace
from dflash_train.stage1_target import ranks as ranks_module
from dflash_train.stage1_target.events import Progress, WorkerProgress
from dflash_train.stage1_target.extract import ExtractConfig
from dflash_train.stage1_target.preparation import Prepared, prepare
from dflash_train.stage1_target.ranks import RankEnd, Ranks
from dflash_train.stage1_target.samples import DataConfig
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.store.reader import StoreReader
from dflash_train.store.verify import verify_store

torch.set_num_threads(1)
NUM_SAMPLES = 60


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 conversations and one that cannot be used."""
    rng = np.random.default_rng(0)
    turns: list[Any] = [
        [
            {"role": "user", "content": f"Question {row}: " + "one two " * int(rng.integers(1, 20))},
            {"role": "assistant", "content": f"Answer {row}. " + "Paris " * int(rng.integers(1, 20))},
        ]
        for row in range(NUM_SAMPLES)
    ]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    turns.append([{"role": "user", "content": "nobody answers"}])
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    return path


@pytest.fixture(scope="module")
def prepared(tiny_target: Callable[..., Path], rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("prepared")
    config = ExtractConfig(
        target=TargetConfig(name=str(tiny_target("llama"))),
        data=DataConfig(source=str(rows)),
        store=folder / "store",
        devices="cpu",
        num_taps=2,
        batch_tokens=150,
        sample_cache=folder / "cache",
    )
    return prepare(config, lambda _event: None)


def all_ranks(world: int, machines: int = 1) -> list[Ranks]:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    size = world // machines
    return [Ranks(TorchrunPlace(rank, world, rank % size, size, rank // size), store) for rank in range(world)]


def progress(rank: int, **changes: Any) -> Progress:
    values: dict[str, Any] = {"num_samples": 3, "num_pending": 30, "num_tokens": 100, "num_pending_tokens": 1000}
    values |= {"num_committed": 1, "num_committed_bytes": 64, "tokens_per_second": 10.0, "hours_left": 1.0 + rank}
    worker = WorkerProgress(f"GPU {rank}", "running", 100, 10.0)
    return Progress(**{**values, "num_workers": 1, "workers": (worker,), **changes})


def test_shares_are_all_batches_once_and_rank_0_records_the_quarantined_rows(prepared: Prepared) -> None:
    shares = [ranks.share(prepared) for ranks in all_ranks(3)]
    indices = [index for share in shares for batch in share.batches for index in batch.indices]
    assert sorted(indices) == list(range(NUM_SAMPLES))
    assert [len(share.new_entries) for share in shares] == [1, 0, 0]
    sums = [sum(getattr(share.forecast, name) for share in shares) for name in ("num_pending", "num_pending_tokens")]
    assert sums == [prepared.forecast.num_pending, prepared.forecast.num_pending_tokens]


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(functions)

    def call(position: int) -> None:
        try:
            results[position] = functions[position]()
        except InputError as error:
            results[position] = error

    threads = [threading.Thread(target=call, args=(position,)) for position in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_prepare_in_turn(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "POLL_SECONDS", 0.01)
    order: list[int] = []

    def turn(ranks: Ranks) -> Prepared:
        def work() -> Prepared:
            time.sleep(0.05)
            order.append(ranks.place.rank)
            return prepared

        whole = ranks.prepare_in_turn(work)
        if ranks.first:
            assert sorted(order) == [0, 1, 2, 3], "nobody reads the store any more"
            ranks.go()
        return whole

    results = in_threads([lambda ranks=ranks: turn(ranks) for ranks in all_ranks(4, machines=2)])  # type: ignore[misc]
    assert results == [prepared] * 4
    assert order[0] == 0 and order.index(2) < order.index(3)


def test_a_rank_that_sees_other_samples_is_refused(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr(ranks_module, "POLL_SECONDS", 0.01)
    first, second = all_ranks(2)
    other = replace(prepared, pending=prepared.pending[1:])

    def lead() -> Prepared:
        try:
            return first.prepare_in_turn(lambda: prepared)
        except InputError as error:
            first.end(RankEnd(failures=[str(error)]))
            raise

    refused, left = in_threads([lead, lambda: second.prepare_in_turn(lambda: other)])
    assert "Rank 1 sees other samples, or another state of the store, than rank 0" in str(refused)
    assert "Rank 0 has ended; its own message says why" in str(left)


def test_the_progress_of_all_ranks_is_one() -> None:
    first, second, third = all_ranks(3)
    assert first.merge(None, 90, 3000) is None
    second.publish(progress(1, num_samples=0))
    second.publish(progress(1, num_samples=1))  # too soon after the first
    second.publish(progress(1), last=True)
    third.publish(progress(2, num_samples=0, num_tokens=0))
    merged = first.merge(progress(0), 90, 3000)
    assert merged is not None
    assert (merged.num_samples, merged.num_pending, merged.num_tokens) == (6, 90, 200)
    assert (merged.tokens_per_second, merged.hours_left, merged.num_workers) == (30.0, 3.0, 3)
    assert [worker.label for worker in merged.workers] == ["rank 0: GPU 0", "rank 1: GPU 1", "rank 2: GPU 2"]


def test_rank_0_hears_how_the_others_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(ranks_module, "LOST_SECONDS", 0.1)
    first, second, _lost = all_ranks(3)
    second.end(RankEnd(num_new_samples=7, failures=["it died"]))
    ticks: list[int] = []
    ends = first.await_others(threading.Event(), lambda: ticks.append(1))
    assert [end.num_new_samples for end in ends] == [7, 0] and len(ticks) == 2
    assert [end.failures for end in ends] == [["it died"], ["rank 2 has said nothing for 0 s"]]


def test_a_beating_rank_is_waited_for_until_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"POLL_SECONDS": 0.01, "LOST_SECONDS": 0.1, "BEAT_SECONDS": 0.01, "STOP_SECONDS": 0.1}.items():
        monkeypatch.setattr(ranks_module, name, seconds)
    first, second = all_ranks(2)
    stop, second.stop = threading.Event(), threading.Event()
    timer = threading.Timer(0.4, stop.set)
    with second.beating():
        timer.start()
        began = time.monotonic()
        assert first.await_others(stop, lambda: None) == []
        assert second.stop.wait(5), "the stop reaches the other rank"
    assert time.monotonic() - began >= 0.5


def test_all_ranks_leave_with_the_same_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"POLL_SECONDS": 0.01, "LOST_SECONDS": 0.1, "LEAVE_SECONDS": 0.3}.items():
        monkeypatch.setattr(ranks_module, name, seconds)
    stop = threading.Event()
    first, second, _third = all_ranks(3)
    leave = [lambda: first.leave_together(["it died"], stop), lambda: second.leave_together([], stop)]
    assert in_threads(leave) == [["it died"], ["it died"]], "the third is not waited for beyond some time"
    _, second, _ = all_ranks(3)
    assert second.leave_together(["own"], stop) == ["own", "rank 0 has not said how it ended"]


def test_an_error_of_rank_0_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "BEAT_SECONDS", 0.01)
    first, second = all_ranks(2)
    second.stop = threading.Event()
    with second.beating():
        first.fail("wrong states")
        assert second.stop.wait(5)
    assert second.leave_together([], second.stop) == ["rank 0: wrong states"]


def test_waiting_for_a_store_ends_with_rank_0(tmp_path: Path) -> None:
    first, second = all_ranks(2)
    store = tmp_path / "store"
    assert not second.store_is_there(store)
    first.end(RankEnd(failures=["no memory"]))
    with pytest.raises(InputError, match="Rank 0 ended before .* was created"):
        second.store_is_there(store)
    store.mkdir()  # stores come with one rename
    assert second.store_is_there(store)


def test_a_store_that_is_gone_leaves_the_ranks_alone() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise torch.distributed.DistNetworkError("gone")  # type: ignore[attr-defined]

        def get(self, key: str) -> bytes:
            raise AssertionError

        def set(self, key: str, value: str) -> None:
            raise torch.distributed.DistNetworkError("gone")  # type: ignore[attr-defined]

        def add(self, key: str, amount: int) -> int:
            raise torch.distributed.DistNetworkError("gone")  # type: ignore[attr-defined]

    ranks = Ranks(TorchrunPlace(1, 2, 1), Gone())
    assert ranks.reserve(7) == 7
    ranks.end(RankEnd())
    ranks.publish(progress(1))
    assert ranks.merge(None, 1, 1) is None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_agents(words: list[str], tmp_path: Path) -> list[subprocess.Popen[str]]:
    """Two agents of torchrun, as on two machines, with one process each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--rdzv-id", "extract", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command = [*launcher, "-m", "--", "dflash_train.cli", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
    return [subprocess.Popen(command, **pipes) for _ in range(2)]


def extract_words(target: Path, rows: Path, store: Path) -> list[str]:
    words = ["extract", "--target", str(target), "--data", str(rows), "--store", str(store)]
    words += ["--gpus", "cpu", "--num-taps", "2", "--batch-tokens", "150", "--encoding", "bf16"]
    return [*words, "--calibration-tokens", "300", "--sample-cache", str(store.with_name("cache"))]


def process_that_logs_to(path: Path) -> int | None:
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "fd" / "1").readlink() == path:
                return int(folder.name)
        except OSError:
            continue
    return None


def kill_worker_of(rank: int, logs: Path, agents: list[subprocess.Popen[str]]) -> None:
    """Kill the worker of a rank once it has written into its log."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert all(agent.poll() is None for agent in agents)
        for log in logs.glob(f"*/rank-{rank}-0.log"):
            pid = process_that_logs_to(log)
            if pid is not None and "Loading" in log.read_text():
                os.kill(pid, 9)
                return
        time.sleep(0.02)
    raise AssertionError("no worker was started")


@pytest.mark.slow
def test_two_agents_share_the_work_and_the_next_start_fills_gaps(
    tiny_target: Callable[..., Path], rows: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    words = extract_words(tiny_target("llama"), rows, store)
    agents = start_agents(words, tmp_path)
    try:
        kill_worker_of(1, tmp_path / "store.logs", agents)
        output = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    text = "\n".join(output)
    assert [agent.returncode for agent in agents] == [1, 1], text
    assert text.count("run again to go on") == 1, text
    assert "rank 1: CPU worker 0 (process" in text and "was killed by SIGKILL" in text, text
    assert "Error: CPU worker 0" in text, "rank 0 tells the failure of another"
    stored = len(StoreReader(store).samples)
    assert 0 < stored < NUM_SAMPLES
    assert f"stored {stored} of {NUM_SAMPLES}; run again to go on" in text
    assert "rank 0: CPU worker 0 (" not in text and text.count(" samples of ") == 1, "one rank speaks for all"

    again = CliRunner().invoke(main, words)
    assert again.exit_code == 0 and f"stored {NUM_SAMPLES} of {NUM_SAMPLES}" in again.output, again.output
    report = verify_store(store)
    reader = StoreReader(store)
    assert report.problems == [] and len(reader.samples) == NUM_SAMPLES and reader.num_duplicates == 0
    assert [entry["row"] for entry in reader.quarantined()] == [NUM_SAMPLES]
    assert list((store / ".staging").iterdir()) == []


def num_commits(rank: int, logs: Path) -> int:
    return sum(log.read_text().count("Committed segment") for log in logs.glob(f"*/rank-{rank}-0.log"))


@pytest.mark.slow
def test_a_sigterm_to_both_agents_commits_what_has_run(tiny_target: Callable[..., Path], tmp_path: Path) -> None:
    store, rows, num_rows = tmp_path / "store", tmp_path / "rows.jsonl", 4000
    text = "Paris " * 20
    turns = [
        [{"role": "user", "content": f"Question {row}"}, {"role": "assistant", "content": text}]
        for row in range(num_rows)
    ]
    rows.write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    agents = start_agents([*extract_words(tiny_target("llama"), rows, store), "--segment-bytes", "20000"], tmp_path)
    try:
        deadline = time.monotonic() + 120
        while min(num_commits(rank, tmp_path / "store.logs") for rank in (0, 1)) < 2 and time.monotonic() < deadline:
            assert all(agent.poll() is None for agent in agents)
            time.sleep(0.02)
        for agent in agents:
            agent.terminate()
        output = "\n".join(agent.communicate(timeout=120)[0] for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    stored = len(StoreReader(store).samples)
    assert 0 < stored < num_rows and verify_store(store).problems == []
    assert output.count(f"stored {stored:,} of 4,000; run again to go on") == 1, output
    assert " tokens/s on 2 workers (" in output, "one display for both ranks"
    *_, last = re.findall(r"of 4,000 samples run \(([\d,]+) committed", output)
    assert int(last.replace(",", "")) == stored, output
    assert all("SignalException" in output and agent.returncode == 1 for agent in agents), "torchrun's own end"
    assert list((store / ".staging").iterdir()) == [], output
