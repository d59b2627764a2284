"""The benchmark of the store: every way to move the bytes runs, and the bars are judged by the right figures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_train.benchmarks import store_io
from dflash_train.benchmarks.store_io import OURS, OURS_DIRECT, OURS_VERIFIED, OURS_WRITE


def test_a_tiny_run_measures_every_variant_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sync", lambda: None)
    (tmp_path / "work").mkdir()
    words = f"store_io.py --folder {tmp_path / 'work'} --json {tmp_path / 'found.json'} --megabytes 1 --rounds 2"
    words += " --encoding int8 --layers 2 --hidden 256 --row-tokens 1024 --segments 3 --samples-each 2"
    monkeypatch.setattr(sys, "argv", words.split())
    store_io.main()
    assert list((tmp_path / "work").iterdir()) == []
    found = json.loads((tmp_path / "found.json").read_text())
    hot = {line["variant"]: line for line in found["read_hot"]}
    assert {OURS, OURS_VERIFIED, OURS_DIRECT, "zarr-python, default", store_io.SAFETENSORS} <= hot.keys()
    assert hot[store_io.RAW]["ratio"] == 1 and all(line["gb_per_second"] > 0 for line in hot.values())
    assert {store_io.RAW_WRITE, OURS_WRITE, store_io.TORCH} <= {line["variant"] for line in found["write"]}
    assert [(line["segments"], line["samples"]) for line in found["open"]] == [(3, 6)]
    printed = capsys.readouterr().out
    assert "| Read, hot | GB/s |" in printed and "| 3 segments | 6 |" in printed
    assert all(f"| {bar['bar']} |" in printed for bar in found["bars"])


def result(**changed: float) -> dict[str, Any]:
    """A run in which every bar is just met."""
    figures = {
        "hot": 0.9,
        "zarr": 0.29,
        "verified": 0.5,
        "cold": 0.8,
        "direct": 0.1,
        "write": 0.8,
        "writer": 64.0,
        "reader": 8.0,
        "thousand": 0.5,
        "ten_thousand": 2.0,
    } | changed
    others = {"cpu_seconds_per_gb": 9.0, "peak_mib": 999.0, "ratio": 0.0}
    return {
        "read_hot": [
            {**others, "variant": "zarr-python, default", "ratio": figures["zarr"]},
            {**others, "variant": OURS, "ratio": figures["hot"]},
            {**others, "variant": OURS_VERIFIED, "ratio": figures["verified"], "peak_mib": figures["reader"]},
            {**others, "variant": OURS_DIRECT},
        ],
        "read_cold": [
            {**others, "variant": OURS, "ratio": figures["cold"]},
            {**others, "variant": OURS_DIRECT, "cpu_seconds_per_gb": figures["direct"]},
        ],
        "write": [{**others, "variant": OURS_WRITE, "ratio": figures["write"], "peak_mib": figures["writer"]}],
        "open": [
            {"segments": 1000, "seconds_without_index": figures["thousand"], "seconds_with_index": 9.0},
            {"segments": 10_000, "seconds_without_index": 9.0, "seconds_with_index": figures["ten_thousand"]},
        ],
    }


@pytest.mark.parametrize(
    ("figure", "missed", "bar"),
    [
        ("hot", 0.899, "packed read, hot / raw"),
        ("cold", 0.799, "packed read, cold / raw"),
        ("verified", 0.499, "packed read, verified, hot / raw"),
        ("zarr", 0.301, "packed read, hot / zarr-python"),
        ("direct", 0.101, "--direct-io, CPU s/GB"),
        ("write", 0.799, "segment write with commit / raw"),
        ("writer", 64.1, "writer memory, MiB"),
        ("reader", 8.1, "reader memory, MiB"),
        ("thousand", 0.51, "open 1,000 segments, no index, s"),
        ("ten_thousand", 2.01, "open 10,000 segments, s"),
    ],
)
def test_bars_are_met_at_their_value_and_missed_beyond(figure: str, missed: float, bar: str) -> None:
    assert [line["bar"] for line in store_io.bars(result()) if not line["met"]] == []
    assert [line["bar"] for line in store_io.bars(result(**{figure: missed})) if not line["met"]] == [bar]


def test_without_cold_reads_their_bars_are_left_out() -> None:
    found = result()
    del found["read_cold"]
    names = {line["bar"] for line in store_io.bars(found)}
    assert len(names) == 8 and not any("cold" in name or "direct" in name for name in names)
