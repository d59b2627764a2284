"""Charts as inline SVG, without scripts: lines that stretch with the window under text that does not.

A chart is an `<svg>` of fixed height and full width. Grid, labels and dots are placed in percent, so text keeps its size
at any width; lines live in an inner `<svg>` of 1000 x 1000 units that is stretched over it, with strokes that are not.
Colours are CSS variables, so the page decides on light and dark. A curve of any number of steps is thinned to at most
300 points: the mean of each bucket, and a band from its smallest to its largest value.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MOST_POINTS = 300
SMOOTHED_SHARE = 0.04  # of a curve's points, on either side
LOG_FROM = 20.0  # an axis that may be logarithmic is, where the largest value is so many times the smallest
NUM_COLOURS = 6  # --c1 … in the page's style sheet


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart; x and y are as long, values that are not finite leave gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 1
    """1 to NUM_COLOURS."""
    style: Literal["smooth", "trend", "plain", "dots"] = "smooth"
    """A running mean over the faint values; the running mean alone; the values; values as dots with their numbers."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What one figure of the page shows."""

    title: str
    note: str
    series: Sequence[Series]
    form: str = "number"
    """How values are written: number, percent, short (12k) or science (6e-4)."""
    x_name: str = "step"
    y_from: float | None = None
    """Where the axis begins, None for the smallest value."""
    y_to: float | None = None
    """Where the axis ends at least."""
    log: bool = False
    """Whether the axis may be logarithmic."""


@dataclass(frozen=True)
class Thinned:
    """A curve of at most MOST_POINTS buckets: centre, mean, smallest and largest value of each."""

    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def draw_chart(chart: Chart) -> str:
    """HTML of a chart; an empty string where no series has a finite value. All text is escaped."""
    curves = [
        (series, thin(np.asarray(series.x, np.float64), np.asarray(series.y, np.float64)))
        for series in chart.series
        if np.isfinite(np.asarray(series.y, np.float64)).any()
    ]
    if not curves:
        return ""
    x_axis = _x_axis(curves)
    y_axis = _y_axis(chart, curves)
    lines: list[str] = []
    dots: list[str] = []
    for series, curve in curves:
        x, colour = x_axis.place(curve.x), f"var(--c{series.colour})"
        if series.style == "dots":
            lines.append(_line(x, y_axis.place(curve.mean), f'class="link" stroke="{colour}"'))
            dots.extend(_dots(chart, series, curve, x_axis, y_axis))
            continue
        if series.style == "smooth":
            lines.append(_band(x, y_axis.place(curve.low), y_axis.place(curve.high), f'fill="{colour}"'))
            lines.append(_line(x, y_axis.place(curve.mean), f'class="raw" stroke="{colour}"'))
        values = curve.mean if series.style == "plain" else smooth(curve.mean)
        lines.append(_line(x, y_axis.place(values), f'class="line" stroke="{colour}"'))
    grid = []
    for value in y_axis.ticks:
        y = _percent(1000 - y_axis.place(value))
        grid.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        label = html.escape(format_value(value, chart.form))
        grid.append(f'<text x="-8" y="{y}" dy="0.32em" text-anchor="end">{label}</text>')
    for value in x_axis.ticks:
        label = format_value(value, "short" if x_axis.high >= 10_000 else "number")
        grid.append(
            f'<text x="{_percent(x_axis.place(value))}" y="100%" dy="1.5em" text-anchor="middle">{label}</text>'
        )
    legend = "".join(
        f'<li class="{series.style}" style="--c:var(--c{series.colour})">{html.escape(series.name)}</li>'
        for series, _ in curves
        if len(curves) > 1
    )
    title, note = html.escape(chart.title), html.escape(chart.note)
    return (
        f'<figure class="chart"><figcaption><b>{title}</b><span>{note}</span></figcaption><ul class="legend">{legend}</ul>'
        f'<div class="plot"><svg role="img" aria-label="{title}: {note}">{"".join(grid)}'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">{"".join(lines)}</svg>'
        f'{"".join(dots)}<text class="name" x="100%" y="100%" dy="2.8em" text-anchor="end">{html.escape(chart.x_name)}'
        "</text></svg></div></figure>\n"
    )


def thin(x: NDArray[np.float64], y: NDArray[np.float64], most: int = MOST_POINTS) -> Thinned:
    """Gather a curve into at most `most` buckets of neighbours; values that are not finite count as absent."""
    y = np.where(np.isfinite(y), y, np.nan)
    edges = np.linspace(0, len(x), min(most, len(x)) + 1).round().astype(int)
    rows = []
    for begin, end in itertools.pairwise(edges.tolist()):
        known = y[begin:end][~np.isnan(y[begin:end])]
        low, mean, high = (known.min(), known.mean(), known.max()) if len(known) else (np.nan,) * 3
        rows.append((x[begin:end].mean(), mean, low, high))
    columns = np.array(rows, np.float64).reshape(-1, 4).T
    return Thinned(*columns)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Running mean over 4 % of the points on either side; fewer at the start, where curves fall steeply. Gaps stay."""
    half = round(len(values) * SMOOTHED_SHARE)
    result = np.full_like(values, np.nan)
    for index in np.flatnonzero(~np.isnan(values)).tolist():
        window = values[index - min(half, index) : index + min(half, index) + 1]
        result[index] = np.nanmean(window)
    return result


def format_value(value: float, form: str, exact: bool = False) -> str:
    """Write a value as its axis does, or with two digits more."""
    if form == "percent":
        return f"{value:.2%}" if exact else f"{100 * value:.3g} %"
    if form == "science":
        mantissa, exponent = f"{value:.{3 if exact else 1}e}".split("e")
        return "0" if value == 0 else f"{float(mantissa):g}e{int(exponent)}"
    if form == "short" and abs(value) >= 1000:
        for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:.{4 if exact else 3}g}{letter}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{5 if exact else 3}g}"


@dataclass(frozen=True)
class Axis:
    """A range of values and its ticks; `place` maps it to 0 … 1000."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def place(self, value: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Values outside (not positive, on a logarithmic axis) become nan or stand at the edge."""
        numbers = np.asarray(value, np.float64)
        if self.log:
            numbers = np.where(numbers > 0, numbers, np.nan)
            share = np.log(numbers / self.low) / math.log(self.high / self.low)
        else:
            share = (numbers - self.low) / (self.high - self.low)
        return 1000 * np.clip(share, 0, 1)


def _x_axis(curves: list[tuple[Series, Thinned]]) -> Axis:
    values = np.concatenate([curve.x for _, curve in curves])
    low, high = float(values.min()), float(values.max())
    low = 0.0 if low <= 0.1 * high else low
    if high <= low:
        low, high = low - 0.5, low + 0.5
    ticks = [tick for tick in linear_ticks(low, high, 6) if tick == round(tick)]
    return Axis(low, high, ticks)


def _y_axis(chart: Chart, curves: list[tuple[Series, Thinned]]) -> Axis:
    values = np.concatenate([array for _, curve in curves for array in (curve.low, curve.high)])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    positive = values[values > 0]
    if chart.log and len(positive) and positive.max() > LOG_FROM * positive.min():
        low, high = float(positive.min()) / 1.15, float(positive.max()) * 1.15
        return Axis(low, high, log_ticks(low, high), log=True)
    low = low if chart.y_from is None else min(chart.y_from, low)
    high = high if chart.y_to is None else max(chart.y_to, high)
    spread = (high - low) or abs(high) or 1.0
    margin = 0.06 * spread
    low, high = low if chart.y_from is not None else low - margin, high + margin
    return Axis(low, high, linear_ticks(low, high, 5))


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` multiples of 1, 2, 2.5 or 5 times a power of ten within a range."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10, 20) if (high - low) / (size * factor) < most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within a range, with 2 and 5 between them where these are few, every other one where many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**exponent for exponent in exponents if low <= 10.0**exponent <= high]
    if len(powers) < 3:
        steps = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
        return [tick for tick in steps if low <= tick <= high]
    return powers[:: math.ceil(len(powers) / 6)]


def _dots(chart: Chart, series: Series, curve: Thinned, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    for x, y in zip(curve.x, curve.mean, strict=True):
        if np.isfinite(y_axis.place(y)):
            place = f'cx="{_percent(x_axis.place(x))}" cy="{_percent(1000 - y_axis.place(y))}"'
            text = f"{series.name}, {chart.x_name} {x:,.0f}: {format_value(y, chart.form, exact=True)}"
            yield f'<circle {place} r="3.5" fill="var(--c{series.colour})"><title>{html.escape(text)}</title></circle>'


def _line(x: NDArray[np.float64], y: NDArray[np.float64], attributes: str) -> str:
    """A path through the points, broken where y is nan; a lone point is a stroke of no length, shown by its round cap."""
    parts, pen_down = [], False
    for index, (across, up) in enumerate(zip(x, y, strict=True)):
        if np.isnan(up):
            pen_down = False
            continue
        alone = not pen_down and (index + 1 == len(y) or np.isnan(y[index + 1]))
        parts.append(f"{'L' if pen_down else 'M'}{_unit(across)} {_unit(1000 - up)}{'h0' if alone else ''}")
        pen_down = True
    return f'<path {attributes} d="{"".join(parts)}"/>'


def _band(x: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64], attributes: str) -> str:
    known = ~(np.isnan(low) | np.isnan(high))
    if not known.any() or np.array_equal(low[known], high[known]):
        return ""
    forth = [f"{_unit(a)} {_unit(1000 - b)}" for a, b in zip(x[known], high[known], strict=True)]
    back = [f"{_unit(a)} {_unit(1000 - b)}" for a, b in zip(x[known][::-1], low[known][::-1], strict=True)]
    return f'<path class="band" {attributes} d="M{"L".join(forth + back)}Z"/>'


def _unit(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _percent(place: NDArray[np.float64] | float) -> str:
    return f"{float(place) / 10:.2f}%"
