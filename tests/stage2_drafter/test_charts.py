"""Charts: thinned and smoothed curves against slow twins, ticks that fit, SVG that is well formed whatever the values."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from dflash_train.stage2_drafter.charts import (
    MOST_POINTS,
    Chart,
    Series,
    draw_chart,
    format_value,
    linear_ticks,
    log_ticks,
    smooth,
    thin,
)


def chart(values: Any, **changes: Any) -> Chart:
    series = Series(name="a", x=list(range(1, len(values) + 1)), y=values, style=changes.pop("style", "smooth"))
    return Chart(title="t", note="n", series=[series], **changes)


def svg(text: str) -> ElementTree.Element:
    """Parse a chart, which must be well formed and free of nan."""
    assert "nan" not in text and "inf" not in text
    return ElementTree.fromstring(text)


@pytest.mark.parametrize("count", [1, 7, 299, 300, 301, 1507])
def test_thinned_buckets_hold_mean_and_extremes(count: int) -> None:
    x, y = np.arange(count, dtype=float), np.random.default_rng(0).standard_normal(count)
    y[::5] = np.nan
    curve = thin(x, y)
    assert len(curve.x) == min(count, MOST_POINTS)
    parts = np.split(np.arange(count), np.linspace(0, count, len(curve.x) + 1).round().astype(int)[1:-1])
    for bucket, part in enumerate(parts):
        known = [value for value in y[part].tolist() if not math.isnan(value)]
        found = (curve.low[bucket], curve.mean[bucket], curve.high[bucket])
        wanted = (min(known), sum(known) / len(known), max(known)) if known else (math.nan,) * 3
        assert found == pytest.approx(wanted, nan_ok=True)
        assert curve.x[bucket] == pytest.approx(part.mean())


def test_smoothing_keeps_constants_the_first_value_and_gaps() -> None:
    assert (smooth(np.full(200, 3.0)) == 3).all()
    values = np.random.default_rng(0).standard_normal(101)
    values[40] = np.nan
    result = smooth(values)
    assert result[0] == values[0]
    assert np.flatnonzero(np.isnan(result)).tolist() == [40]
    assert result[50] == pytest.approx(values[46:55].mean())
    assert np.nanstd(result) < 0.6 * np.nanstd(values)


@pytest.mark.parametrize("low, high", [(0, 1), (0, 0.0507), (1, 13.4), (-3, 1e6), (0.9999, 1.0001), (0, 120), (1, 7)])
@pytest.mark.parametrize("most", [5, 6])
def test_linear_ticks_are_round_and_few(low: float, high: float, most: int) -> None:
    ticks = linear_ticks(low, high, most)
    assert 2 <= len(ticks) <= most + 1
    assert all(low <= tick <= high * (1 + 1e-9) for tick in ticks)
    assert np.ptp(np.diff(ticks)) <= 1e-9 * high


@pytest.mark.parametrize("low, high", [(0.9, 25), (2.1, 88), (1e-6, 1e6), (3e-4, 99), (1.1, 30)])
def test_log_ticks_are_few(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert all(low <= tick <= high for tick in ticks)


@pytest.mark.parametrize("style", ["smooth", "trend", "plain", "dots"])
@pytest.mark.parametrize(
    "values",
    [
        [5.0],
        [0.0, 0.0, 0.0],
        [1.0, math.nan, 3.0, math.inf, -math.inf, 2.0],
        [math.nan, 4.0, math.nan],
        [88.0, 3.0, 0.0, 1e-9],
        [1e300, -1e300],
        [7.0] * 1000,
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_any_values_make_a_whole_chart(style: str, values: list[float], log: bool) -> None:
    root = svg(draw_chart(chart(values, style=style, log=log)))
    assert len(root.findall(".//path")) >= 1
    known = [value for value in values if math.isfinite(value)]
    if style == "dots" and not log:
        assert len(root.findall(".//circle")) == min(len(known), MOST_POINTS)


def test_no_value_makes_no_chart() -> None:
    assert draw_chart(chart([])) == ""
    assert draw_chart(chart([math.nan, math.inf])) == ""


def test_a_wide_range_of_loss_has_a_log_axis() -> None:
    labels = [text.text for text in svg(draw_chart(chart([100.0, 10.0, 1.0], log=True))).findall(".//text")]
    assert labels[:3] == ["1", "10", "100"]


def test_a_gap_breaks_the_line_and_a_lone_point_is_seen() -> None:
    root = svg(draw_chart(chart([1.0, 2.0, math.nan, 4.0], style="plain")))
    path = next(path.get("d") or "" for path in root.findall(".//path") if path.get("class") == "line")
    assert path.count("M") == 2 and path.count("L") == 1 and path.endswith("h0")


def test_text_is_escaped() -> None:
    series = Series(name="<script>", x=[1.0], y=[2.0], style="dots")
    text = draw_chart(Chart(title="<u>&", note='"x"', series=[series, series], x_name="<i>"))
    assert "<script>" not in text and "<u>" not in text and "<i>" not in text
    svg(text)


@pytest.mark.parametrize(
    "value, form, text",
    [
        (0.25, "percent", "25 %"),
        (12_500, "short", "12.5k"),
        (3.19e6, "short", "3.19M"),
        (6e-4, "science", "6e-4"),
        (0, "science", "0"),
        (12_345, "number", "12,345"),
        (1.5, "number", "1.5"),
    ],
)
def test_values_are_written_short(value: float, form: str, text: str) -> None:
    assert format_value(value, form) == text
