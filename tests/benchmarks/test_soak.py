"""The soak: in which phase a kill counts, what its judge finds, and the numbers that several goes add up."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_train.benchmarks import soak
from dflash_train.benchmarks.soak import APPENDING, COMMITTING, RUNNING, WAITING, Phases, Soak, Tally
from dflash_train.store.reader import Sample


@pytest.mark.parametrize(
    ("main", "writer", "phase"),
    [
        (RUNNING, WAITING, "forward"),
        (RUNNING, APPENDING, "stream"),
        (WAITING, APPENDING, "stream"),
        (WAITING, COMMITTING, "commit"),
        (WAITING, WAITING, "idle"),
        (ord("-"), WAITING, "between"),
    ],
)
def test_a_kill_counts_for_what_both_threads_did(tmp_path: Path, main: int, writer: int, phase: str) -> None:
    phases = Phases(tmp_path / "phases", 3, create=True)
    own = Phases(tmp_path / "phases", 3)  # as the worker maps it
    own.set_writer(1, writer)
    assert not phases.is_started(1)
    own.set_main(1, main)
    assert [phases.is_started(worker) for worker in range(3)] == [False, True, False]
    assert phases.name(1) == phase


def sample(identity: int) -> Sample:
    features = np.arange(300).astype(np.int8)[:, None]
    return Sample(
        identity, 7, np.arange(300, dtype=np.int32), np.ones(300, np.uint8), features, np.ones((300, 1), np.float32)
    )


def neighbours(found: Sample, number: int, step: int = 1) -> Sample:
    """Some values rounded to another step."""
    features = found.features.copy()
    features[:number] += np.int8(step)
    return replace(found, features=features)


@pytest.mark.parametrize(
    ("stored", "num_duplicates", "problems", "wanted"),
    [
        ({1: sample(1), 2: neighbours(sample(2), 2)}, 0, [], None),
        ({1: sample(1)}, 0, [], None),
        ({2: sample(2)}, 0, [], "samples that were there are gone"),
        ({1: sample(1), 3: sample(3)}, 0, [], "samples that the data do not have"),
        ({1: sample(1)}, 1, [], "a sample is stored twice"),
        ({1: sample(1)}, 0, ["flipped"], "flipped"),
        ({1: neighbours(sample(1), 1, 2)}, 0, [], "features differ"),
        ({1: neighbours(sample(1), 3)}, 0, [], "features differ"),
        ({1: replace(sample(1), token_ids=np.zeros(300, np.int32))}, 0, [], "Arrays are not equal"),
        ({1: replace(sample(1), loss_mask=np.zeros(300, np.uint8))}, 0, [], "Arrays are not equal"),
        ({1: replace(sample(1), scales=np.full((300, 1), 1.001, "f4"))}, 0, [], "Not equal to tolerance"),
        ({1: replace(sample(1), group=8)}, 0, [], "^$"),
    ],
)
def test_the_judge_finds_what_is_lost_doubled_or_changed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: dict[int, Sample],
    num_duplicates: int,
    problems: list[str],
    wanted: str | None,
) -> None:
    monkeypatch.setattr(soak, "verify_store", lambda _store: SimpleNamespace(problems=problems))
    monkeypatch.setattr(soak, "StoreReader", lambda _store: SimpleNamespace(num_duplicates=num_duplicates))
    monkeypatch.setattr(soak, "_samples", lambda _store: stored)
    judge = object.__new__(Soak)
    judge._truth, judge._seen, judge.tally = {1: sample(1), 2: sample(2)}, {1}, Tally()
    if wanted is None:
        assert judge._verify(tmp_path) == len(stored) and judge._seen == set(stored)
        assert (judge.tally.num_verifications, judge.tally.num_samples) == (1, len(stored))
    else:
        with pytest.raises(AssertionError, match=wanted):
            judge._verify(tmp_path)
    assert judge._verify(tmp_path / "not made yet") == 0


def test_goes_add_up_and_one_that_failed_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    tally = Tally.read(path)
    tally.kills, tally.num_runs, tally.num_samples, tally.seconds = Counter(commit=3, idle=1), 2, 70, 12.5
    tally.write(path)
    again = Tally.read(path)
    assert again == tally and (again.num_kills, again.rarest()) == (4, "stream")
    tally.write(path, "AssertionError: samples were lost")
    with pytest.raises(SystemExit, match="soak that failed: AssertionError: samples were lost"):
        Tally.read(path)


def test_enough_is_the_kills_asked_for_with_the_least_of_each_phase() -> None:
    one = object.__new__(Soak)
    one._wanted, one._least, one._deadline, one.tally = 20, 3, float("inf"), Tally()
    for kills, done in (((3, 3, 3, 3), False), ((17, 3, 3, 2), False), ((11, 3, 3, 3), True), ((40, 0, 0, 0), True)):
        one.tally.kills = Counter(dict(zip(soak.PHASES, kills, strict=True)))
        assert one.done is done, kills
    one.tally.kills, one._deadline = Counter(), 0.0
    assert one.done


def test_a_go_without_time_prints_the_numbers_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "make_inputs", lambda _folder, _num_samples: argparse.Namespace())
    words = f"soak.py --seconds 0 --folder {tmp_path} --json {tmp_path / 'soak.json'}"
    monkeypatch.setattr(sys, "argv", words.split())
    for _ in range(2):
        soak.main()
    assert json.loads((tmp_path / "soak.json").read_text())["goes"] == 2
    assert "and 2 goes: 0 lost, 0 doubled, 0 damaged" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [tmp_path / "soak.json"]
