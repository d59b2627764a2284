"""Rates of commands that run beside others, taken from their logs, and the table of eight_gpus.py."""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dflash_train.benchmarks.eight_gpus_table import table
from dflash_train.benchmarks.running_command import Command, extract_rate, train_rate
from dflash_train.units import format_bytes


class Logged(Command):
    """One that was started before, of which its log and its metrics are left."""

    def __init__(self, folder: Path, output: str = "", steps: list[dict[str, Any]] | None = None) -> None:
        self.name, self.log, self.words = "logged", folder / "logged.log", ["--run", str(folder)]
        self._place, self._end = 0, None
        self.log.write_text(output)
        if steps is not None:
            (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"kind": "tr')


def progress(at: float, *workers: int) -> str:
    """A progress line of `extract --log-json`; workers: tokens of each."""
    values = {
        "time": datetime.fromtimestamp(at, UTC).isoformat(),
        "event": "progress",
        "num_tokens": sum(workers),
        "workers": [{"num_tokens": tokens} for tokens in workers],
    }
    return json.dumps(values) + "\n"


def test_extract_rate_counts_from_the_last_line_before_the_window(tmp_path: Path) -> None:
    lines = [progress(100, 0, 0), progress(110, 500, 100), "a line of text\n", progress(114, 900, 300)]
    command = Logged(tmp_path, "".join([*lines, progress(130, 2500, 1100), '{"event": "progress", "cut']))
    found = extract_rate(command, began=112)
    assert found == {"tokens_per_second": 3000 / 20, "by_worker": [100.0, 50.0], "seconds": 20.0}
    assert extract_rate(command, began=140)["tokens_per_second"] is None, "nothing came in the window"


def test_train_rate_counts_waits_and_leaves_the_first_steps_and_empty_ones_out(tmp_path: Path) -> None:
    slow = {"kind": "train", "tokens": 10, "tokens_per_second": 1.0, "wait_share": 1.0, "recompilations": 0}
    step = slow | {"tokens": 400, "tokens_per_second": 200.0, "wait_share": 0.25}
    evaluation: dict[str, Any] = {"kind": "evaluation"}
    steps = [slow, slow, evaluation, step, step | {"store_wait_seconds": 2.0}, step | {"tokens": 0}, step, step]
    found = train_rate(Logged(tmp_path, "compiled 3 graphs in 41 s\n", steps), rows_per_step=5, first=2)
    assert found["steps"] == 4 and found["step_seconds"] == 2.0
    assert found["rows_per_second"] == pytest.approx(4 * 5 / (4 * 2 + 2))
    assert found["tokens_per_second"] == pytest.approx(1600 / 10)
    assert found["wait_share"] == pytest.approx((4 * 0.5 + 2) / 10)
    assert found["store_wait_share"] == pytest.approx(0.2)
    assert found["compiled"] == "compiled 3 graphs in 41 s, 0 recompilations"
    assert train_rate(Logged(tmp_path, "", steps[:4]), rows_per_step=5, first=0)["steps"] == 3


def test_table_sets_rates_against_one_gpu_and_says_what_kills_proved() -> None:
    results = {
        "disk_bytes_per_second": 2e9,
        "one": {"tokens_per_second": 1000.0},
        "both": {
            "extract": {"tokens_per_second": 4500.0},
            "train": {"rows_per_second": 1.5, "wait_share": 0.125, "compiled": None},
            "store_bytes_per_second": 1e9,
            "samples": 1200,
            "lost": 0,
            "doubled": 3,
            "trainer_resumed": True,
            "extract_resumed": False,
            "steps_in_order": None,
        },
    }
    lines = table(results, argparse.Namespace(extract_gpus="0-4", train_gpus="5-7")).splitlines()
    assert "| extract, RAM disk | 0 | 1,000 tokens/s | – | – |" in lines
    assert "| both: extract | 0-4 | 4,500 tokens/s | 4.50x | – |" in lines
    assert "| both: train --follow | 5-7 | 1.50 rows/s | – | 12.5% |" in lines
    assert f"| both: written to the store | – | {format_bytes(1e9)}/s | 50% of the disk | – |" in lines
    assert "| both: samples stored, lost, doubled, problems | – | 1,200, 0, 3, not read | – | – |" in lines
    assert "| both: trainer resumed | – | yes | – | – |" in lines
    assert "| both: extract resumed | – | NO | – | – |" in lines
    assert "| both: steps in order | – | not reached | – | – |" in lines
