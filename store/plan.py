"""The plan: what an extract will have stored when it ends, and that it is alive; `plan.json` in the store.

A trainer that follows a growing store reads it: the length of its schedule follows from the tokens, and whether waiting
makes sense from the state. The extract writes it again every few seconds; one whose `beat` stands still has died. The
file is a report and may be absent: nothing but waiting depends on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from dataclasses import dataclass
from pathlib import Path

from dflash_train.store.checksums import seal, unseal
from dflash_train.store.files import Files, StoreError

PLAN_NAME = "plan.json"
BEAT_SECONDS = 5.0
SILENT_SECONDS = 30.0
"""An extract that is running but has not said so for this long has died."""
STATES = ("running", "finished", "stopped", "failed")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the store will hold, and how the newest extract stands."""

    samples: int
    """In the store at the end, those consumed included, quarantined ones not."""
    tokens: int
    longest: int
    """Tokens of the longest sample."""
    state: str
    """running, finished, stopped (by a signal) or failed; running stays after a kill, and `beat` then stands still."""
    beat: int
    """Counts up while the extract lives."""
    run: str
    """Of this extract, to tell its beats from those of another."""


def new_run() -> str:
    """An id for an extract."""
    return secrets.token_hex(4)


def write_plan(store: Path, plan: Plan, files: Files | None = None) -> None:
    """Replace the plan in one rename; a full disk is no reason to stop, and the next beat tries again."""
    files, temporary = files or Files(), store / f".tmp-{PLAN_NAME}"
    with contextlib.suppress(OSError, StoreError):
        files.remove_tree(temporary)
        files.write_file(temporary, seal("plan", dataclasses.asdict(plan)))
        files.rename(temporary, store / PLAN_NAME)


def read_plan(store: Path) -> Plan | None:
    """The plan of a store; None where there is none, or none that is intact and that this version understands."""
    try:
        values = unseal("plan", (store / PLAN_NAME).read_bytes())
        plan = Plan(**{field.name: values[field.name] for field in dataclasses.fields(Plan)})
        numbers = (plan.samples, plan.tokens, plan.longest, plan.beat)
        return plan if all(type(number) is int for number in numbers) and plan.state in STATES else None
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
