"""The benchmark of int8's error: its figures from the definition, and its bars."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_train.benchmarks.int8_error import measure, table
from dflash_train.stage1_target.calibration import calibrate_states
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import make_encoding

NUM_LAYERS, HIDDEN_SIZE = 2, 16


def test_figures_are_those_of_the_definition() -> None:
    """Over ordinary tokens by channel, over sinks by token and layer; a token of 15 medians is no sink, one of 25 is."""
    states = torch.randn(1500, NUM_LAYERS * HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    states[:, 3] *= 8
    size = states.square().mean(1, keepdim=True).sqrt()
    factors = torch.ones(1500, 1)
    factors[7], factors[1200:1202] = 15.0, 25.0
    states = states / size * factors
    found = measure(list(torch.split(states, 700)), NUM_LAYERS, HIDDEN_SIZE)
    encoding = make_encoding("int8", NUM_LAYERS, HIDDEN_SIZE)
    scale = calibrate_states([states], NUM_LAYERS, encoding.num_states, states.device)
    assert scale is not None
    calibration = Calibration.from_arrays(scale)
    decoded = encoding.decode(*encoding.encode(states, calibration), calibration, torch.float32).double()
    wanted = states.double() / calibration.channel_scale
    ordinary = torch.ones(1500, dtype=torch.bool)
    ordinary[1200:1202] = False
    lost = (decoded - wanted)[ordinary].square().mean(0).sqrt() / wanted[ordinary].square().mean(0).sqrt()
    sinks = (decoded - wanted)[~ordinary].view(2, NUM_LAYERS, HIDDEN_SIZE).norm(dim=2)
    sinks = sinks / wanted[~ordinary].view(2, NUM_LAYERS, HIDDEN_SIZE).norm(dim=2)
    assert (found["tokens"], found["sink_tokens"], found["clipped"]) == (1500, 2, 0)
    assert found["median"] == pytest.approx(float(lost.median()), rel=1e-2)  # D is measured in other pieces
    assert found["largest"] == pytest.approx(float(lost.max()), rel=1e-2)
    assert found["sinks"] == pytest.approx(float(sinks.max()), rel=1e-2)
    assert found["bytes"] == (32 + 2 * 4) / 64
    for layer, row in enumerate(found["layers"]):
        channels = lost.view(NUM_LAYERS, HIDDEN_SIZE)[layer]
        assert row["largest"] == pytest.approx(float(channels.max()), rel=1e-2)
        assert row["sinks"] == pytest.approx(float(sinks[:, layer].max()), rel=1e-2)


def figures(**changed: Any) -> dict[str, Any]:
    """Figures that just meet every bar."""
    bars = {"median": 0.009, "largest": 0.016, "sinks": 0.045}
    others = {"tokens": 9, "sink_tokens": 1, "clipped": 0.0, "kernels": False, "device": "the CPU", "layers": [bars]}
    return {**bars, "bytes": 0.51, **others, **changed}


@pytest.mark.parametrize(
    ("name", "missed", "text"),
    [
        ("median", 0.00901, "≤ 0.9%: missed |"),
        ("largest", 0.01601, "≤ 1.6%: missed |"),
        ("sinks", 0.04501, "≤ 4.5%: missed |"),
        ("bytes", 0.5101, "(≤ 0.51: missed)"),
    ],
)
def test_bars_are_met_at_their_value_and_missed_beyond(name: str, missed: float, text: str) -> None:
    met = table(figures(), (3,))
    assert "| bar | ≤ 0.9%: met | ≤ 1.6%: met | ≤ 4.5%: met |" in met and "(≤ 0.51: met)" in met
    found = table(figures(**{name: missed}), (3,))
    assert text in found and found.count("missed") == 1


def test_data_without_a_sink_judge_none() -> None:
    row = {"median": 0.009, "largest": 0.016, "sinks": None}
    found = table(figures(sinks=None, sink_tokens=0, layers=[row]), (3,))
    assert "| 3 | 0.90% | 1.60% | none |" in found and "| ≤ 1.6%: met | no sink |" in found
