"""The picture of an evaluation, `dflash evaluate --plot FILE.png`: acceptance by block position, one curve a data set.

Drawn with matplotlib's objects on its Agg canvas, never through pyplot, as the pictures of a store are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_train.speculate.prompts import source_labels
from dflash_train.store.plots import BLUE, ORANGE, label_axes

MOST_CURVES = 6
"""Data sets that get a curve of their own; all together always has one."""


def plot_acceptance(result: dict[str, Any], path: Path) -> None:
    """Write the picture of `evaluate`'s report: rounds that accept up to each position, and lengths of rounds."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    accepted, lengths = (figure.add_subplot(1, 2, number) for number in (1, 2))
    labels = source_labels([entry["source"] for entry in result["data_sets"]])
    data_sets = result["data_sets"][:MOST_CURVES] if len(result["data_sets"]) > 1 else []
    for number, (entry, name) in enumerate(zip(data_sets, labels, strict=False)):
        colour = colormaps["viridis"](0.85 * number / max(1, len(data_sets) - 1))
        label = f"{name}: {_length(entry)}"
        accepted.plot(*_cumulative(entry), "o-", color=colour, markersize=3, linewidth=1.2, label=label)
    label = f"{'all' if data_sets else labels[0]}: {_length(result)}"
    accepted.plot(*_cumulative(result), "o-", color=BLUE, markersize=4, linewidth=2.2, label=label)
    accepted.set_ylim(0, 1.02)
    accepted.yaxis.set_major_formatter(PercentFormatter(1.0))
    accepted.legend(frameon=False, fontsize=9, title="acceptance length", title_fontsize=9, alignment="left")
    label_axes(
        accepted, "Rounds that accept all drafts up to a position", "position in the block (0 is the anchor)", "rounds"
    )
    histogram = result["histogram"]
    lengths.bar(range(1, len(histogram) + 1), histogram, color=BLUE, width=0.8)
    if result["acceptance_length"] is not None:
        mean = result["acceptance_length"]
        lengths.axvline(mean, color=ORANGE, linewidth=1.2, label=f"mean: {mean:.2f}")
        lengths.legend(frameon=False, fontsize=9)
    for axes in (accepted, lengths):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_axes(
        lengths, f"Tokens gained by each of {result['num_rounds']:,} rounds", "tokens, bonus token included", "rounds"
    )
    how = f"temperature {result['temperature']:g}, block size {result['block_size']}, {result['num_prompts']:,} prompts"
    figure.suptitle(f"{Path(result['drafter']).name}: {how}", x=0.01, ha="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _cumulative(entry: dict[str, Any]) -> tuple[list[int], list[float]]:
    known = [(one["position"], one["cumulative"]) for one in entry["positions"] if one["cumulative"] is not None]
    return [0, *(position for position, _ in known)], [1.0, *(share for _, share in known)]


def _length(entry: dict[str, Any]) -> str:
    return "–" if entry["acceptance_length"] is None else f"{entry['acceptance_length']:.2f}"
