"""The table of eight_gpus.py: rates alone and together, waits, memory, and what was proved by kills."""

import argparse
import re
from typing import Any

from dflash_train.units import format_bytes

PROOFS = (
    "extract_went_on_without_trainer",
    "trainer_resumed",
    "trainer_went_on_without_extract",
    "other_workers_went_on",
    "extract_resumed",
    "steps_in_order",
    "finished",
)


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}x" if value and base else "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def table(results: dict[str, Any], options: argparse.Namespace) -> str:
    """The results as a Markdown table."""
    one, every = results.get("one", {}), results.get("all", {})
    train_one, train_all = results.get("train_one", {}), results.get("train_all", {})
    lines = ["| what | GPUs | rate | against one | waiting |", "|---|---|---|---|---|"]

    def add(what: str, gpus: str, rate: float | None, unit: str, base: float | None, waiting: float | None) -> None:
        if rate is None:
            return
        share = "–" if waiting is None else f"{waiting:.1%}"
        lines.append(f"| {what} | {gpus} | {_number(rate)} {unit} | {_ratio(rate, base)} | {share} |")

    extract_one, rows_one = one.get("tokens_per_second"), train_one.get("rows_per_second")
    add("extract, RAM disk", first_gpu(options.extract_gpus), extract_one, "tokens/s", None, None)
    add("extract, RAM disk", options.extract_gpus, every.get("tokens_per_second"), "tokens/s", extract_one, None)
    add("train", first_gpu(options.train_gpus), rows_one, "rows/s", None, train_one.get("wait_share"))
    rows_all = train_all.get("rows_per_second")
    add("train", options.train_gpus, rows_all, "rows/s", rows_one, train_all.get("wait_share"))
    sets = [("both", options.extract_gpus, options.train_gpus), ("swapped", options.train_gpus, options.extract_gpus)]
    for name, extract_gpus, train_gpus in sets:
        if (found := results.get(name)) is None:
            continue
        before, beside = found.get("extract_before", {}), found.get("extract", {})
        train, again = found.get("train", {}), found.get("train_beside_start", {})
        alone = before.get("tokens_per_second")
        add(f"{name}: extract, before the first step", extract_gpus, alone, "tokens/s", extract_one, None)
        base = extract_one or alone
        add(f"{name}: extract", extract_gpus, beside.get("tokens_per_second"), "tokens/s", base, None)
        rows = train.get("rows_per_second")
        add(f"{name}: train --follow", train_gpus, rows, "rows/s", rows_one, train.get("wait_share"))
        if again:
            rate, waiting = again["rows_per_second"], again["wait_share"]
            add(f"{name}: the same while extract starts again", train_gpus, rate, "rows/s", rows_one or rows, waiting)
        if "ahead_seconds" in found:
            lines.append(f"| {name}: store ahead of the first step | – | {found['ahead_seconds']:.0f} s | – | – |")
        if (rate := found.get("store_bytes_per_second")) is not None:
            share = rate / results["disk_bytes_per_second"]
            lines.append(f"| {name}: written to the store | – | {format_bytes(rate)}/s | {share:.0%} of the disk | – |")
        if memory := found.get("gpu_memory_bytes"):
            used = ", ".join(f"{index}: {format_bytes(size)}" for index, size in memory.items())
            lines.append(f"| {name}: GPU memory | {used} | – | – | – |")
        if train:
            lines.append(f"| {name}: compiled | {train.get('compiled') or 'nothing: CPU'} | – | – | – |")
        if "samples" in found:
            counts = f"{found['samples']:,}, {found['lost']}, {found['doubled']}, {found.get('damaged', 'not read')}"
            lines.append(f"| {name}: samples stored, lost, doubled, problems | – | {counts} | – | – |")
        said = {True: "yes", False: "NO", None: "not reached"}
        proofs = [key for key in PROOFS if key in found]
        lines += [f"| {name}: {key.replace('_', ' ')} | – | {said[found[key]]} | – | – |" for key in proofs]
    return "\n".join(lines)


def first_gpu(gpus: str) -> str:
    """The first of some GPUs, as an option of its own."""
    return "cpu:1" if gpus.startswith("cpu") else re.split("[-,]", gpus)[0]
