"""The benchmark of extract measures every variant in one run, and leaves nothing behind."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_train.benchmarks import extract as benchmark
from dflash_train.benchmarks.extract import BARE, COMPILED, INT8_RAM, PADDED
from dflash_train.benchmarks.random_target import make_samples
from dflash_train.stage1_target.extract_config import ExtractConfig
from dflash_train.stage1_target.overlap import Overlap
from dflash_train.stage1_target.preparation import prepare
from dflash_train.stage1_target.samples import DataConfig
from dflash_train.stage1_target.schedule import padding_share
from dflash_train.stage1_target.target_config import TargetConfig

FORWARDS = {
    "num_tokens": 5000,
    "padding": 0.02,
    "padding_of_full_windows": 0.01,
    BARE: 1000,
    COMPILED: 1400,
    PADDED: 800,
    "graphs": 2,
    "seconds_to_compile": 17.4,
}
COMMANDS = [f"dflash extract {name}, {place}" for name in ("int8", "bf16") for place in ("RAM disk", "disk")]
COMMANDS += [f"dflash extract projected-int8, r = H, {place}" for place in ("RAM disk", "disk")]


def run_without_a_target(command: list[str], **_keywords: Any) -> Any:
    """In the place of subprocess.run: leave what the forwards or an extract would."""
    if "--forwards" in command:
        folder = Path(command[command.index("--forwards") + 1])
        (folder / "forwards.json").write_text(json.dumps(FORWARDS))
        return None
    option = {name: command[command.index(name) + 1] for name in ("--store", "--log-folder", "--gpus", "--encoding")}
    store, logs = Path(option["--store"]), Path(option["--log-folder"])
    assert not store.exists() and not list(store.parent.glob("*.zarr/segments")), "the one before is gone"
    for folder in (store / "segments", store.with_name(f"{store.name}.logs"), logs):
        folder.mkdir(parents=True)
    store.with_name(f"{store.name}.lock").touch()
    together = int(command[command.index("--gpus-per-target") + 1]) if "--gpus-per-target" in command else 1
    for number in range((int(option["--gpus"].split(":")[-1]) if ":" in option["--gpus"] else 1) // together):
        overlap = Overlap()
        for _ in range(3):
            overlap.batch_ran(1000, 1010, 0.0)
        (logs / f"worker-{number}.log").write_text(f"2026 INFO {overlap.line()}\n")
    return SimpleNamespace(returncode=0, stdout="", stderr="")


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    disk, ram = folder / "disk", folder / "ram"
    for place in (disk, ram):
        place.mkdir()
    result = folder / "result.json"
    words = ("--geometry", "tiny", "--device", "cpu", "--folder", str(disk), "--ram", str(ram), *words)
    monkeypatch.setattr(sys, "argv", ["extract.py", *words, "--json", str(result)])
    monkeypatch.setattr(subprocess, "run", run_without_a_target)
    benchmark.main()
    assert list(disk.iterdir()) == [] and list(ram.iterdir()) == [], "stores, logs and locks are deleted"
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_one_run_prints_every_variant_its_graphs_and_its_padding_and_deletes_each_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extracts = run(tmp_path, monkeypatch)["extracts"]
    assert list(extracts) == COMMANDS
    assert all("tokens_per_second" in each for each in extracts.values())
    text = capsys.readouterr().out
    assert all(f"\n| {name} | " in text for name in (PADDED, BARE, COMPILED, *COMMANDS))
    assert "Padding of 10 million tokens of such lengths: 1.0%." in text
    assert "Graphs of the compiled target: 2, made in 17 s." in text
    assert "| forward to the last tap | 1,000 | 1.25 | 0.71 | | 2.0% | 5.0 | |" in text
    assert "\n| extract int8 / padded forward | " in text and "\n| extract int8 / best bare forward | " in text


def test_several_gpus_are_measured_with_a_target_each_and_with_one_over_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--only", "int8, RAM", "--more-gpus", "0,1", "--spread", "0,1"]
    extracts = run(tmp_path, monkeypatch, *words)["extracts"]
    name = "dflash extract int8, RAM disk"
    assert [each for each in extracts if each.startswith(name)] == [
        name,
        f"{name}, GPUs 0,1",
        f"{name}, one target over 0,1",
    ]
    assert [len(each["workers"]) for each in extracts.values()] == [1, 2, 1]


def test_a_variant_that_has_no_room_or_no_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extracts = run(tmp_path, monkeypatch, "--budget", "-1")["extracts"]
    assert {each["skipped"] for each in extracts.values()} == {"left out: the time is up"}
    assert f"| {COMMANDS[0]} | left out: the time is up | | | | | | |" in capsys.readouterr().out


BARS = {
    "as good as wanted": (
        {"one": 1302, "several": 2474, "seconds": 20.0},
        """\
| extract int8 / padded forward | 1.63 | >= 1.25 | met |
| extract int8 / best bare forward | 0.93 | >= 0.93 | met |
| 2 GPUs / one | 1.90 | >= 1.9 | met |
| longest variant, s measured | 20.00 | <= 20 | met |
""",
    ),
    "a little worse": (
        {"one": 999, "several": 1897, "seconds": 20.004},
        """\
| extract int8 / padded forward | 1.25 | >= 1.25 | missed |
| extract int8 / best bare forward | 0.71 | >= 0.93 | missed |
| 2 GPUs / one | 1.90 | >= 1.9 | missed |
| longest variant, s measured | 20.00 | <= 20 | missed |
""",
    ),
}


@pytest.mark.parametrize("case", BARS)
def test_every_bar_is_printed_with_what_was_found_and_whether_it_is_met(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, bars = BARS[case]
    worker = Overlap().summary()
    one = worker | {"tokens_per_second": found["one"], "seconds": found["seconds"], "whole_seconds": 30.0}
    several = one | {"tokens_per_second": found["several"], "seconds": 16.0, "workers": [worker, worker]}
    extracts = {INT8_RAM: one, f"{INT8_RAM}, GPUs 0,1": several, COMMANDS[1]: {"skipped": "left out: the time is up"}}
    benchmark.show({"forwards": FORWARDS, "extracts": extracts})
    assert f"\n| bar | found | wanted | |\n|---|---|---|---|\n{bars}" in capsys.readouterr().out


def test_a_forward_that_was_measured_for_too_long_misses_the_bar_too(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.show({"forwards": FORWARDS | {"num_tokens": 20_000}, "extracts": {}})
    assert "| longest variant, s measured | 25.00 | <= 20 | missed |" in capsys.readouterr().out


def test_the_forwards_run_the_batches_that_extract_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[Any, float]] = []
    rate = benchmark.rate

    def rate_as_on_any_machine(run: Any, batches: Any, *arguments: Any) -> float:
        measured.append((batches, rate(run, batches, *arguments)))
        return 20_000.0

    monkeypatch.setattr(benchmark, "rate", rate_as_on_any_machine)
    given = argparse.Namespace(
        geometry="tiny",
        device="cpu",
        seconds=1.0,
        compile=False,
        batch_tokens=2048,
        max_tokens=1024,
        seed=0,
    )
    forwards = benchmark.measure_forwards(given, tmp_path)
    lengths = benchmark.lengths_of(forwards["num_tokens"], given.max_tokens, given.seed)
    config = ExtractConfig(
        target=TargetConfig(name=str(tmp_path / "target")),
        data=DataConfig(source=str(make_samples(tmp_path / "samples.parquet", lengths)), max_tokens=given.max_tokens),
        store=tmp_path / "store",
        devices="cpu",
        batch_tokens=given.batch_tokens,
        seed=given.seed,
        sample_cache=tmp_path / "cache",
    )
    planned = prepare(config, lambda _event: None).batches
    assert len(planned) == forwards["num_batches"] > 9
    assert forwards["padding"] == round(padding_share(planned), 4) > forwards["padding_of_full_windows"] > 0
    _few, bare, padded = measured
    assert bare[0] == padded[0] == planned and min(bare[1], padded[1]) > 0
    assert {PADDED, BARE} < set(forwards) and COMPILED not in forwards


def test_padding_is_below_three_percent_where_windows_are_full() -> None:
    settings = {each.name: each.default for each in fields(ExtractConfig)}
    given = argparse.Namespace(batch_tokens=settings["batch_tokens"], max_tokens=4096, seed=settings["seed"])
    assert 0 < benchmark.full_windows_padding(given) < 0.03


def test_lengths_are_ragged_and_sum_up() -> None:
    lengths = benchmark.lengths_of(100_000, 4096, seed=0)
    assert 100_000 <= lengths.sum() < 105_000 and lengths.min() >= 32 and lengths.max() <= 4096
    assert 0.4 < float(np.std(lengths) / np.mean(lengths)) < 1
    many = benchmark.lengths_of(10_000_000, 4096, seed=0)
    assert np.percentile(many, (25, 50, 75)) == pytest.approx([790, 1903, 2316], rel=0.05)
