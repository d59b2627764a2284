"""`dflash report`: one run folder as one HTML file that opens anywhere, without network and without scripts.

Reads only what a run leaves: metrics.jsonl, recipe.toml, checkpoints/*/trainer/state.json, and, where given, what `dflash evaluate
--output` wrote. Works while the run goes on: a line that is still being written, or a checkpoint that cannot be read, is
named in the page and left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.checkpoint import TrainerState
from dflash_train.stage2_drafter.run_checkpoints import list_checkpoints

_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint on disk; state is None, and problem says why, where it cannot be read."""

    name: str
    step: int
    drafter_bytes: int
    total_bytes: int
    state: TrainerState | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """One `dflash evaluate` of a checkpoint of the run."""

    step: int
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that the page shows; metrics ascend by step."""

    path: Path
    steps: list[dict[str, Any]]
    """Lines of kind `train`."""
    evaluations: list[dict[str, Any]]
    """Lines of kind `evaluation`: held-out rows, teacher-forced."""
    checkpoints: list[CheckpointRecord]
    decodings: list[Decoding] = field(default_factory=list)
    recipe: str | None = None
    """RUN/recipe.toml, which is there before the first checkpoint."""
    unreadable_lines: int = 0

    @property
    def state(self) -> TrainerState | None:
        """State of the newest checkpoint that can be read."""
        return next((entry.state for entry in reversed(self.checkpoints) if entry.state is not None), None)


def read_run(run: Path, evaluations: Sequence[Path] = ()) -> RunRecord:
    """Read a run folder and evaluations of its checkpoints; InputError for a folder that is no run's."""
    if not (run / "metrics.jsonl").is_file() and not (run / "checkpoints").is_dir():
        found = "has neither metrics.jsonl nor checkpoints" if run.is_dir() else "is no folder"
        raise InputError(f"{run} {found}, so it is not a run. Give the --run folder of `dflash train-drafter`.")
    metrics: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "evaluation": {}}
    unreadable = 0
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        entry = _json_object(line)
        if entry is None or type(entry.get("step")) is not int:
            unreadable += 1
        elif entry.get("kind") in metrics:
            metrics[entry["kind"]][entry["step"]] = entry  # a step taken twice, before and after a kill, counts once
    recipe = run / "recipe.toml"
    ordered = {kind: [lines[step] for step in sorted(lines)] for kind, lines in metrics.items()}
    return RunRecord(
        path=run,
        steps=ordered["train"],
        evaluations=ordered["evaluation"],
        checkpoints=_read_checkpoints(run),
        decodings=sorted((_read_decoding(run, file) for file in evaluations), key=lambda entry: entry.step),
        recipe=recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else None,
        unreadable_lines=unreadable,
    )


def write_report(run: Path, output: Path | None = None, evaluations: Sequence[Path] = ()) -> Path:
    """Write the page to output, RUN/report.html by default, whole or not at all; returns its path."""
    from dflash_train.stage2_drafter.page import make_page

    text = make_page(read_run(run, evaluations))
    output = output or run / "report.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".tmp-{output.name}-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    return output


def _read_checkpoints(run: Path) -> list[CheckpointRecord]:
    records = []
    for checkpoint in list_checkpoints(run):
        sizes = {file.name: file.stat().st_size for file in checkpoint.path.rglob("*") if file.is_file()}
        state, problem = None, None
        try:
            state = checkpoint.state()
        except InputError as error:
            problem = str(error)
        records.append(
            CheckpointRecord(
                name=checkpoint.path.name,
                step=checkpoint.step,
                drafter_bytes=sizes.get("model.safetensors", 0),
                total_bytes=sum(sizes.values()),
                state=state,
                problem=problem,
            )
        )
    return records


def _read_decoding(run: Path, file: Path) -> Decoding:
    """Read what `dflash evaluate --output` wrote about a checkpoint of this run, wherever the run has been moved."""
    try:
        values = _json_object(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}. Give a file of `dflash evaluate --output`.") from error
    if values is None or "acceptance_length" not in values or "drafter" not in values:
        raise InputError(f"{file} is no evaluation. Give a file of `dflash evaluate --output`.")
    drafter = Path(str(values["drafter"]))
    match = _CHECKPOINT_NAME.fullmatch(drafter.name)
    if match is None or drafter.parts[-3:-1] != (run.resolve().name, "checkpoints"):
        wanted = f"{run.resolve().name}/checkpoints/step-…"
        raise InputError(f"{file} evaluates {drafter}, not a checkpoint of this run ({wanted}). Leave it out.")
    return Decoding(step=int(match[1]), values=values)


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
