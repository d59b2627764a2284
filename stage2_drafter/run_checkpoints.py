"""The checkpoints of a run: which there are, the newest, the best, which stay; and the drafter that a path names."""

import json
import re
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.checkpoint import CONFIG_FILE, WEIGHTS_FILE, Checkpoint
from dflash_train.stage2_drafter.drafter_config import DrafterConfig
from dflash_train.store.files import Files

LEAST_LOSS = 0.05
"""Relative: how far the newest checkpoint must lie below the best one to be worth a word."""
_NAME = re.compile(r"step-(\d{8,})")
_TRASH = ".trash-"


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """Checkpoints of a run, oldest first. Temporary folders of an interrupted save are not among them."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    matches = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    found = [Checkpoint(path=path, step=int(match[1])) for path, match in matches if match and path.is_dir()]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_checkpoint(run: Path) -> Checkpoint | None:
    checkpoints = list_checkpoints(run)
    return checkpoints[-1] if checkpoints else None


class Measure(IntEnum):
    """What an acceptance length is a mean over; of one run a later one goes before an earlier one."""

    ANCHORS = 0
    """Held-out anchors at random: of checkpoints from before estimates walked rounds."""
    ROUNDS = 1
    """Rounds walked over held-out answers."""
    DECODED = 2
    """Rounds of real decoding."""


def best_checkpoint(run: Path) -> Checkpoint | None:
    """The checkpoint with the largest acceptance length, by real decoding where there was any; None where none was evaluated."""
    scored = [(evaluation_score(checkpoint), checkpoint) for checkpoint in list_checkpoints(run)]
    known = [(score, checkpoint) for score, checkpoint in scored if score is not None]
    return max(known, key=lambda item: item[0])[1] if known else None


def evaluation_score(checkpoint: Checkpoint) -> tuple[Measure, float] | None:
    """How the checkpoint was measured, and its acceptance length by that; None without an evaluation that can be read.

    So of a run some of whose checkpoints were decoded for real, only those compete.
    """
    try:
        return score_of(checkpoint.state().evaluation)
    except (InputError, TypeError, ValueError):
        return None


def score_of(evaluation: Mapping[str, Any] | None) -> tuple[Measure, float] | None:
    """The score of an evaluation; see `evaluation_score`."""
    values = evaluation or {}
    estimated = Measure.ROUNDS if "rounds" in values else Measure.ANCHORS
    for measure, name in ((Measure.DECODED, "real_acceptance_length"), (estimated, "acceptance_length")):
        score = values.get(name)  # None as well where the loss was not finite
        if score is not None:
            return measure, float(score)
    return None


def prune_checkpoints(run: Path, keep: int, files: Files | None = None) -> list[Checkpoint]:
    """Delete all but the newest `keep` checkpoints and the best one; also what an interrupted save or prune left.

    A checkpoint is renamed before it is deleted, so that a crash leaves no half of one under its name.
    Call it only while holding the run's lock.
    """
    files = files or Files()
    folder = run / "checkpoints"
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith((".tmp-", _TRASH)):
                files.remove_tree(path)
    checkpoints = list_checkpoints(run)
    best = best_checkpoint(run) if len(checkpoints) > keep else None
    removed = [checkpoint for checkpoint in checkpoints[:-keep] if checkpoint != best]
    for checkpoint in removed:
        _remove(checkpoint.path, files)
    return removed


class Overtaken(NamedTuple):
    """That a run's newest checkpoint lies below its best one, and the way out: a sentence each."""

    found: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.found} {self.way_out}"


def worse_than_best(path: Path) -> Overtaken | None:
    """Whether the newest checkpoint of the run `path` lies below the best one there; None where it does not, where that is
    not known, and for a drafter's folder."""
    newest, best = newest_checkpoint(path), best_checkpoint(path)
    if newest is None or best is None or (path / WEIGHTS_FILE).is_file():
        return None
    measured, most = evaluation_score(newest), evaluation_score(best)
    if measured is None or most is None or measured[0] != most[0] or measured[1] >= (1 - LEAST_LOSS) * most[1]:
        return None
    if _measured_on(newest) != _measured_on(best):
        return None
    kind = "real acceptance length" if most[0] is Measure.DECODED else "held-out estimate"
    found = (
        f"the newest checkpoint, step {newest.step:,}, is worse than step {best.step:,}: {kind} {measured[1]:.3f} against "
        f"{most[1]:.3f}."
    )
    way_out = f"Take {best.path}; more samples, fewer steps or a smaller --lr keep it from learning samples by heart."
    return Overtaken(found, way_out)


def _measured_on(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """What must be alike for two checkpoints' scores to be of the same data: under --follow more may come to be held out."""
    state = checkpoint.state()
    values = state.evaluation or {}
    return state.rounds, values.get("rows"), values.get("real_prompts")


def find_drafter(path: Path) -> Path:
    """The folder with config.json and model.safetensors: `path` itself, or the newest checkpoint of the run `path`."""
    if not path.is_dir():
        raise InputError(f"{path} is no folder; give a drafter's folder or the run folder of `dflash train-drafter`.")
    folder = path
    if not (path / WEIGHTS_FILE).is_file() and (path / "checkpoints").is_dir():
        newest = newest_checkpoint(path)
        if newest is None:
            raise InputError(f"The run {path} has no checkpoint yet; train it until its first checkpoint is saved.")
        folder = newest.path
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{folder} lacks {' and '.join(missing)}; give a drafter's folder in z-lab's format or a run folder."
        )
    return folder


def load_drafter_config(path: Path) -> DrafterConfig:
    """The config of the drafter at `path` (see `find_drafter`), without its weights. Raises InputError."""
    file = find_drafter(path) / CONFIG_FILE
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no JSON ({error}); give a drafter's folder in z-lab's format.") from error
    if not isinstance(fields, dict):
        raise InputError(f"{file} holds no JSON object; give a drafter's folder in z-lab's format.")
    refuse_speculators(file.parent, fields)
    return DrafterConfig.from_json(fields)


def refuse_speculators(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise InputError for a drafter in the speculators format, which is an end: nothing here reads it."""
    if "speculators_model_type" in config:
        raise InputError(
            f"{folder} is in the speculators format, which `dflash export` writes; give the drafter in z-lab's format that "
            "it was made from."
        )


def _remove(path: Path, files: Files) -> None:
    trash = path.with_name(_TRASH + path.name)
    if trash.exists():
        files.remove_tree(trash)
    files.rename(path, trash)
    files.sync_directory(path.parent)  # or a power cut could bring the name back without its files
    files.remove_tree(trash)
