"""Pictures of a store, `dflash inspect-store --plot`: lengths, supervised share, features by channel, quantisation error.

Figures are drawn with matplotlib's objects on its Agg canvas, never through pyplot, so nothing global is touched and no
display is needed. Lengths and shares come from the tables in memory; features from the draw of store/report.py, so four
pictures of a store of any size take seconds.
Symbols: N drawn tokens, L tapped layers, H hidden size, s the step of a token (int8: and layer), D the channel scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.errors import InputError
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import make_encoding
from dflash_train.store.location import StoreLocation
from dflash_train.store.reader import StoreReader
from dflash_train.store.report import OUTLIER_FACTOR, DrawnFeatures, draw_features

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#2a6fbb", "#c8501e", "#8a8f98"
LABELLED_CHANNELS = 3
LONG_TAIL = 20  # longest sample over the median from which lengths are shown on a log axis


def plot_store(path: StoreLocation, folder: Path, seed: int = 0) -> list[Path]:
    """Write the pictures of a store as PNG files into a folder, made if need be; returns their paths.

    Raises StoreError for a damaged store and InputError for one without samples.
    """
    reader = StoreReader(path)
    if not len(reader.samples):
        raise InputError(f"{path} holds no samples, so there is nothing to draw. Run `dflash extract` first.")
    drawn = draw_features(reader, seed)
    layer_ids = reader.manifest.target_layer_ids
    figures = {
        "lengths.png": _plot_lengths(reader.samples["length"]),
        "supervised.png": _plot_supervised(reader.samples["length"], reader.samples["supervised"]),
        "features.png": _plot_features(drawn, layer_ids),
        "quantization.png": _plot_quantization(measure_rounding_error(drawn), layer_ids, reader.encoding.name),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / name)
    return [folder / name for name in figures]


@dataclass(frozen=True)
class RoundingError:
    """Root mean square errors of quantisation over the drawn tokens, relative to what is stored."""

    by_channel: NDArray[np.float64]
    """[L, H]; infinite where a channel's stored values are all 0 and its error is not."""
    by_layer: NDArray[np.float64]
    """[L]; the layer's error over the layer's rms."""


def measure_rounding_error(drawn: DrawnFeatures) -> RoundingError:
    """The error of int8, measured by encoding the features, where the store holds bf16; else what its rounding must cost.

    A quantised store no longer has what was rounded away (`Encoding.rounding_error`); the tests hold the expected error
    against the measured one of the same states, and only channels that set the step themselves err less. What a
    projection leaves out is not in it.
    """
    import torch

    scaled = drawn.scaled
    if drawn.rounding is not None:
        squares = drawn.rounding
    else:
        encoding = make_encoding("int8", *scaled.shape[1:])
        ones = Calibration(torch.ones(encoding.num_features))
        features, steps = encoding.encode(scaled.flatten(1), ones)
        again = encoding.decode(features, steps, ones, torch.float32).view_as(scaled)
        squares = (again.double() - scaled.double()).square().mean(0)
    power = scaled.double().square().mean(0)  # [L, H]
    with np.errstate(divide="ignore", invalid="ignore"):
        by_channel = np.sqrt(squares.numpy() / power.numpy())
        by_layer = np.sqrt(squares.mean(1).numpy() / power.mean(1).numpy())
    return RoundingError(np.nan_to_num(by_channel, posinf=math.inf), np.nan_to_num(by_layer, posinf=math.inf))


def _plot_lengths(lengths: NDArray[Any]) -> Figure:
    figure, axes = _figure()
    median, p95, longest = np.percentile(lengths, (50, 95, 100), method="nearest")
    if longest > LONG_TAIL * median:
        edges = np.geomspace(lengths.min(), longest + 1, 60)
        axes.set_xscale("log")
    else:
        edges = np.linspace(lengths.min(), longest + 1, min(60, int(longest - lengths.min()) + 1) + 1)
    axes.hist(lengths, bins=edges.tolist(), color=BLUE)
    for name, value, style in (("median", median, "-"), ("95 %", p95, "--"), ("longest", longest, ":")):
        axes.axvline(value, color=ORANGE, linewidth=1.2, linestyle=style, label=f"{name}: {value:,}")
    axes.legend(frameon=False)
    label_axes(axes, f"Length of {len(lengths):,} samples, {lengths.sum():,} tokens", "tokens", "samples")
    return figure


def _plot_supervised(lengths: NDArray[Any], supervised: NDArray[Any]) -> Figure:
    figure, axes = _figure()
    overall = supervised.sum() / lengths.sum()
    axes.hist(100 * supervised / lengths, bins=np.linspace(0, 100, 51).tolist(), color=BLUE)
    axes.axvline(100 * overall, color=ORANGE, linewidth=1, label=f"of all tokens: {overall:.1%}")
    axes.legend(frameon=False)
    axes.set_xlim(0, 100)
    label_axes(axes, "Share of a sample's tokens that count in the loss", "supervised, %", "samples")
    return figure


def _plot_features(drawn: DrawnFeatures, layer_ids: tuple[int, ...]) -> Figure:
    """One panel a layer: rms of every channel, raw and divided by D, with the channels that stand out."""
    scaled = drawn.scaled.square().mean(0).sqrt().numpy()  # [L, H]
    raw = scaled * drawn.channel_scale.numpy()
    figure, panels = _panels(len(layer_ids))
    for number, (layer, axes) in enumerate(zip(layer_ids, panels, strict=True)):
        median = float(np.median(raw[number]))
        outliers = np.flatnonzero(raw[number] > OUTLIER_FACTOR * median)
        if raw[number].any():
            axes.set_yscale("log", nonpositive="mask")
        axes.plot(raw[number], ".", color=GREY, markersize=2.5, label="h")
        axes.plot(scaled[number], ".", color=BLUE, markersize=2.5, label="h / D, what the drafter sees")
        axes.plot(outliers, raw[number, outliers], "o", color=ORANGE, markersize=4,
                  label=f"h above {OUTLIER_FACTOR} x median")  # fmt: skip
        for channel in outliers[np.argsort(-raw[number, outliers])][:LABELLED_CHANNELS].tolist():
            axes.annotate(str(channel), (channel, raw[number, channel]), textcoords="offset points", xytext=(4, 2),
                          fontsize=8, color=ORANGE)  # fmt: skip
        count = "no outlier channel" if not len(outliers) else f"{len(outliers):,} outlier channels"
        count = count.removesuffix("s") if len(outliers) == 1 else count
        label_axes(axes, f"layer {layer}: {count}", "channel", "rms")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, markerscale=2, fontsize=9)
    figure.suptitle(f"Features over {len(drawn.scaled):,} drawn tokens", x=0.01, ha="left", fontsize=11)
    return figure


def _plot_quantization(error: RoundingError, layer_ids: tuple[int, ...], encoding: str) -> Figure:
    """A line a layer: channels in the order of their error."""
    from matplotlib import colormaps
    from matplotlib.ticker import PercentFormatter

    figure, axes = _figure()
    colours = colormaps["viridis"](np.linspace(0, 0.85, len(layer_ids)))
    for number, layer in enumerate(layer_ids):
        channels = np.sort(error.by_channel[number])
        lost = int(np.isinf(channels).sum())
        note = f", {lost:,} channels all 0" if lost else ""
        share = np.linspace(0, 100, len(channels))
        shown = np.isfinite(channels) & (channels > 0)
        axes.plot(share[shown], channels[shown], color=colours[number], linewidth=1.6,
                  label=f"layer {layer}: {error.by_layer[number]:.2%} of the layer's rms{note}")  # fmt: skip
    if (error.by_channel[np.isfinite(error.by_channel)] > 0).any():
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False, fontsize=9)
    measured = encoding == "bf16"
    kind = (
        "measured by encoding the bf16 features" if measured else "of rounding alone, expected from the stored steps s"
    )
    label_axes(
        axes,
        f"Error of {'int8' if measured else encoding}, {kind}",
        "channels, % (in the order of their error)",
        "rms error / rms of the channel",
    )
    return figure


def _figure() -> tuple[Figure, Axes]:
    figure, panels = _panels(1)
    return figure, panels[0]


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, two in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(count, 2)
    rows = math.ceil(count / columns)
    size = (8, 4.2) if count == 1 else (6 * columns, 0.6 + 2.6 * rows)
    figure = Figure(figsize=size, dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def label_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, axis labels, grid and frame as every picture of this package has them."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, color="#e4e6ea", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
