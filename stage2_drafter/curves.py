"""Which curves a run's report shows: metrics and evaluations as the series of charts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dflash_train.stage2_drafter.charts import Chart, Series
from dflash_train.stage2_drafter.report import RunRecord

MOST_SLOTS = 5  # curves of accuracy: slots 1, 2, 4, 8 … and the last


def run_charts(run: RunRecord) -> list[Chart]:
    """The charts of a run; those without a value are not drawn."""
    at, held_out_at = [entry["step"] for entry in run.steps], [entry["step"] for entry in run.evaluations]

    def train(key: str) -> Series:
        return Series(name="training rows", x=at, y=[number(entry.get(key)) for entry in run.steps])

    def held_out(key: str) -> Series:
        y = [number(entry.get(key)) for entry in run.evaluations]
        return Series(name="held-out rows", x=held_out_at, y=y, colour=2, style="dots")

    measured = Series(
        name="real decoding in training",
        x=held_out_at,
        y=[number(entry.get("real_acceptance_length")) for entry in run.evaluations],
        colour=4,
        style="dots",
    )
    decoded = Series(
        name="real decoding",
        x=[entry.step for entry in run.decodings],
        y=[number(entry.values.get("acceptance_length")) for entry in run.decodings],
        colour=3,
        style="dots",
    )
    slots = shown_slots(max((len(accuracy_of(entry)) for entry in run.steps), default=0))
    by_slot = [
        Series(
            name=f"slot {slot}",
            x=at,
            y=[slot_accuracy(entry, slot) for entry in run.steps],
            colour=place,
            style="trend",
        )
        for place, slot in enumerate(slots, start=1)
    ]
    return [
        Chart(title="Loss", note="weighted cross-entropy", series=[train("loss"), held_out("loss")], log=True),
        Chart(
            title="Acceptance length",
            note="tokens gained per target forward; on rows teacher-forced, of training rows over anchors",
            series=[train("acceptance_length"), held_out("acceptance_length"), measured, decoded],
            y_from=1.0,
        ),
        Chart(
            title="Accuracy by position",
            note="training rows; slot 1 follows the anchor",
            series=by_slot,
            form="percent",
            y_from=0,
        ),
        Chart(
            title="Accuracy over the block",
            note="held-out rows; and what decoding accepted up to each slot",
            series=_profiles(run),
            form="percent",
            x_name="slot",
            y_from=0,
        ),
        Chart(title="Speed", note="tokens a second, all devices", series=[train("tokens_per_second")],
              form="short", y_from=0),
        Chart(title="Waiting for data", note="share of the time of a step", series=[train("wait_share")],
              form="percent", y_from=0, y_to=0.05),
        Chart(title="Learning rate", note="of the step", series=[dataclasses.replace(train("lr"), style="plain")],
              form="science", y_from=0),
        Chart(title="Gradient norm", note="before clipping", series=[train("gradient_norm")], log=True),
    ]  # fmt: skip


def shown_slots(num_slots: int) -> list[int]:
    """Slots whose accuracy is drawn: 1, 2, 4, 8 … and the last."""
    doubled = [2**power for power in range(num_slots.bit_length()) if 2**power < num_slots]
    return doubled[: MOST_SLOTS - 1] + [num_slots] if num_slots else []


def number(value: Any) -> float:
    """A finite number from data, or nan."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else math.nan


def _profiles(run: RunRecord) -> list[Series]:
    """Accuracy by slot at the first, a middle and the last held-out evaluation; cumulative acceptance of decoding."""
    known = [entry for entry in run.evaluations if accuracy_of(entry)]
    chosen = {index: known[index] for index in (0, len(known) // 2, len(known) - 1) if known}
    series = [
        Series(
            name=f"held out at step {entry['step']:,}",
            x=list(range(1, len(accuracy_of(entry)) + 1)),
            y=[number(value) for value in accuracy_of(entry)],
            colour={0: 5, len(known) - 1: 2}.get(index, 4),
            style="dots",
        )
        for index, entry in chosen.items()
    ]
    if run.decodings:
        last = run.decodings[-1]
        positions = [entry for entry in as_list(last.values.get("positions")) if isinstance(entry, dict)]
        series.append(
            Series(
                name=f"accepted in decoding, step {last.step:,}",
                x=[number(entry.get("position")) for entry in positions],
                y=[number(entry.get("cumulative")) for entry in positions],
                colour=3,
                style="dots",
            )
        )
    return series


def accuracy_of(entry: Mapping[str, Any]) -> list[Any]:
    """Accuracy of slots 1 … K - 1 of a line of metrics, as it stands there; empty where it has none."""
    return as_list(entry.get("accuracy"))


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def slot_accuracy(entry: Mapping[str, Any], slot: int) -> float:
    """Accuracy of one slot, 1 … K - 1, or nan."""
    accuracy = accuracy_of(entry)
    return number(accuracy[slot - 1]) if slot <= len(accuracy) else math.nan
