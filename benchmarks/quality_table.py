"""The tables of docs/quality.md from the lines that quality.py wrote: means over seeds and paired differences.

A pair is two runs of one seed: same samples in the same rows, same anchors, same first weights where shapes agree. Its
difference is free of what a seed does to both; s.e. is the standard error of the mean difference over the seeds.
"""

from __future__ import annotations

import fcntl
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN_ROWS = ("fraction-0.5", "fraction-0.25", "fraction-0.1", "original-answers")
"""Variants with data, and so rows, of their own."""
LARGEST_LOSS = 0.03
"""What a pass may lose of the reference's mean acceptance length; beside it, one standard error."""
BASE, RAW, SCALED = "int8", "bf16-as-tapped", "bf16"
ENCODINGS = (
    RAW,
    SCALED,
    "int8",
    "projected-int8-2H",
    "projected-int8-H",
    "projected-int4-2H",
    "projected-int4-H",
)
RECIPES = {
    "Block size": (BASE, "block-8"),
    "Layers of the drafter": (BASE, "layers-3", "layers-1"),
    "Loss": (BASE, "dpace"),
    "Draw of anchors": (BASE, "by-conversation"),
    "Training data": (BASE, "fraction-0.5", "fraction-0.25", "fraction-0.1"),
    "Whose answers": (BASE, "original-answers"),
}
MEANINGS = {
    RAW: "bf16 as tapped (D = 1)",
    SCALED: "bf16 with D",
    BASE: "int8",
    "projected-int8-2H": "projected-int8, r = 2H",
    "projected-int8-H": "projected-int8, r = H",
    "projected-int4-2H": "projected-int4, r = 2H",
    "projected-int4-H": "projected-int4, r = H",
    "fp8": "int8 store, --precision fp8",
    "block-8": "block 8",
    "layers-3": "3 layers",
    "layers-1": "1 layer",
    "dpace": "D-PACE",
    "by-conversation": "int8, anchors by conversation",
    f"{RAW}-by-conversation": "bf16 as tapped (D = 1), anchors by conversation",
    f"{SCALED}-by-conversation": "bf16 with D, anchors by conversation",
    "fraction-0.5": "half of the samples",
    "fraction-0.25": "a quarter",
    "fraction-0.1": "a tenth",
    "original-answers": "the data set's own answers",
    "peer-specforge": "SpecForge 0.2.0's step, its labels",
    "peer-our-labels": "SpecForge 0.2.0's step, our labels",
    "peer-scaled": "SpecForge 0.2.0's step, our labels, D⁻¹h",
}
BASE_MEANINGS = {
    "Block size": "block 16",
    "Layers of the drafter": "5 layers",
    "Loss": "decay",
    "Draw of anchors": "int8, anchors by token",
    "Training data": "all samples",
    "Whose answers": "the target's own answers",
}

OURS = (RAW, f"{RAW}-by-conversation", SCALED, f"{SCALED}-by-conversation", BASE, "by-conversation")
"""Of our runs those that stand beside SpecForge's, whose draw is by conversation."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """Mean of the paired differences of the acceptance length, its standard error (None of one pair), and relative to the
    reference's mean."""

    num_pairs: int
    mean: float
    error: float | None
    relative: float

    @property
    def is_level(self) -> bool | None:
        """Whether it is equal within the standard error, or better; None of one pair."""
        return None if self.error is None else self.mean >= -self.error

    @property
    def passes(self) -> bool | None:
        """Whether nothing was lost that the seeds can show: at least -1 standard error and -3 %; None of one pair."""
        return None if self.error is None else bool(self.is_level) and self.relative >= -LARGEST_LOSS

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.mean:+.3f}{error} ({self.relative:+.1%})"


def read_results(path: Path) -> list[Line]:
    """The lines of a results file; an unfinished last one is left out."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n") and line.strip()]


def append_result(path: Path, line: Line) -> None:
    """Append a line, in the place of an unfinished last one; several processes may append to one file."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")


def mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error, None of fewer than two values."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def by_seed(lines: Iterable[Line], variant: str) -> dict[int, Line]:
    """The newest finished line of each seed of a variant."""
    return {line["seed"]: line for line in lines if line["variant"] == variant}


def paired_difference(lines: Sequence[Line], variant: str, reference: str) -> Difference | None:
    """Acceptance length of a variant minus the reference's, over the seeds that both have; None where there is none."""
    ones, others = by_seed(lines, variant), by_seed(lines, reference)
    seeds = sorted(ones.keys() & others.keys())
    if not seeds or variant == reference:
        return None
    mean, error = mean_error([ones[seed]["acceptance_length"] - others[seed]["acceptance_length"] for seed in seeds])
    whole = statistics.fmean(others[seed]["acceptance_length"] for seed in seeds)
    return Difference(len(seeds), mean, error, mean / whole)


def row_problems(lines: Sequence[Line], variants: Sequence[str]) -> list[str]:
    """Seeds in which variants that must have trained on the same rows did not, or whose record does not show it."""
    problems = []
    for seed in sorted({line["seed"] for line in lines}):
        found = {variant: by_seed(lines, variant).get(seed) for variant in variants}
        rows = {variant: line["rows"] for variant, line in found.items() if line is not None}
        if len({entry["hash"] for entry in rows.values()}) > 1:
            problems.append(f"seed {seed}: {', '.join(rows)} were not trained on the same rows")
        problems += [
            f"seed {seed}: {variant}'s steps do not have the tokens of the rows planned"
            for variant, entry in rows.items()
            if entry["as_planned"] is False
        ]
    return problems


def format_tables(lines: Sequence[Line]) -> str:
    """All tables that the lines suffice for, in Markdown; runs of unlike settings stand apart."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(json.dumps([line["steps"], line["settings"]], sort_keys=True), []).append(line)
    return "\n\n".join(_format_group(group) for group in groups.values()) or "no finished run yet"


def _format_group(lines: Sequence[Line]) -> str:
    first, names = lines[0], {line["variant"] for line in lines}
    settings = ", ".join(f"{name} {value}" for name, value in first["settings"].items())
    places = sorted({f"{line['device']}, torch {line['versions'].get('torch')}, {line['date'][:10]}" for line in lines})
    parts = [f"{first['steps']:,} steps; {settings}. {'; '.join(places)}."]
    peers = tuple(name for name in MEANINGS if name in names and name.startswith("peer-"))
    if names & set(ENCODINGS) - {BASE, RAW, SCALED} or (names & {RAW, SCALED} and not peers):
        parts += ["### Encodings", encoding_table(lines)]
    if "fp8" in names:
        parts += ["### FP8", comparison_table(lines, (BASE, "fp8"), BASE, {BASE: "int8 store, --precision bf16"})]
    for title, variants in RECIPES.items():
        if names & set(variants[1:]):
            extra = {BASE: BASE_MEANINGS[title]}
            parts += [f"### {title}", comparison_table(lines, variants, BASE, extra, title == "Training data")]
    if peers:
        parts += ["### Against SpecForge", peer_table(lines, peers)]
    alike = sorted(names - set(OWN_ROWS))
    problems = row_problems(lines, alike)
    same = "The runs of a seed were trained on the same rows (hash of their sample ids)"
    parts.append("\n".join(problems) or f"{same}, but for those with other data.")
    return "\n\n".join(parts)


def encoding_table(lines: Sequence[Line]) -> str:
    """Bytes, losses and acceptance by encoding, against bf16 as tapped (what every peer trains on) and with D."""
    raw = next((line["bytes"]["features"] for line in lines if line["variant"] in (RAW, SCALED)), None)
    rows = []
    for variant in ENCODINGS:
        own = list(by_seed(lines, variant).values())
        if not own:
            continue
        features = own[0]["bytes"]["features"]
        share = "" if raw is None else f" ({features / raw:.2f})"
        differences = [paired_difference(lines, variant, reference) for reference in (RAW, SCALED)]
        rows.append(
            [MEANINGS[variant], f"{features:,}{share}", *_quality(own)]
            + [cell for difference in differences for cell in (_shown(difference), _verdict(difference))]
        )
    return _markdown(
        ["features given to `fc`", "bytes/token (of bf16's)", *QUALITY_HEADS]
        + ["against bf16 as tapped", "passes", "against bf16 with D", "passes"],
        rows,
    )


def comparison_table(
    lines: Sequence[Line],
    variants: Sequence[str],
    reference: str,
    meanings: dict[str, str],
    with_tokens: bool = False,
) -> str:
    """Variants against one of them; with_tokens: what each had to train on."""
    rows = []
    for variant in variants:
        own = list(by_seed(lines, variant).values())
        if own:
            difference = paired_difference(lines, variant, reference)
            data = own[0]["rows"]
            tokens = [f"{data['samples']:,}", f"{data['supervised_tokens']:,}", f"{data['passes']:.1f}"]
            name = meanings.get(variant) or MEANINGS.get(variant, variant)
            cells = [name, *(tokens if with_tokens else []), *_quality(own), _shown(difference), _verdict(difference)]
            rows.append(cells)
    heads = ["samples", "answer tokens", "times seen"] if with_tokens else []
    return _markdown(
        ["", *heads, *QUALITY_HEADS, f"against {meanings.get(reference) or MEANINGS[reference]}", "passes"], rows
    )


def peer_table(lines: Sequence[Line], peers: Sequence[str]) -> str:
    """Ours against each peer's run: the difference is ours minus theirs, and whether it is equal within its error or more."""
    rows = []
    for name in (*OURS, *peers):
        own = list(by_seed(lines, name).values())
        if own:
            differences = [
                _shown(difference) + ("" if name in peers else _level(difference))
                for difference in (paired_difference(lines, name, peer) for peer in peers)
            ]
            label = MEANINGS.get(name, name) if name in peers else f"ours, {MEANINGS[name]}"
            rows.append([label, *_quality(own), *differences])
    heads = [f"against {MEANINGS.get(peer, peer)}" for peer in peers]
    return _markdown(["", *QUALITY_HEADS, *heads], rows)


QUALITY_HEADS = ["training loss", "held-out accuracy, slot 1", "held-out estimate", "over anchors", "τ (seeds)"]
"""Over anchors: a round at every token of τ's answers, where text counts by its length."""


def _quality(lines: Sequence[Line]) -> list[str]:
    evaluations = [line["held_out"] or {} for line in lines]
    lengths = [line["acceptance_length"] for line in lines]
    mean, error = mean_error(lengths)
    return [
        _mean([line["training_loss"] for line in lines], ".3f"),
        _mean([(entry.get("accuracy") or [None])[0] for entry in evaluations], ".1%"),
        _mean([entry.get("acceptance_length") for entry in evaluations], ".3f"),
        _mean([line.get("acceptance_length_over_anchors") for line in lines], ".3f"),
        f"{mean:.3f}{'' if error is None else f' ± {error:.3f}'} ({len(lengths)})",
    ]


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(statistics.fmean(known), form) if known else "–"


def _shown(difference: Difference | None) -> str:
    return "–" if difference is None else str(difference)


def _level(difference: Difference | None) -> str:
    if difference is None or difference.is_level is None:
        return ""
    return ", equal or better" if difference.is_level else ", less"


def _verdict(difference: Difference | None) -> str:
    if difference is None:
        return "–"
    return {True: "yes", False: "no", None: "one seed"}[difference.passes]


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
