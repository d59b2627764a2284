"""Training on a store that grows: rounds, each over whole segments, decided by the first rank and kept in the ledger.

A round trains once on every sample of its segments: all that are stored and have had fewer than `passes` rounds. So what
is new comes soon, nothing is trained on more than `passes` times before the extract has finished, and the trainer waits
when it is that far ahead. Rows follow from (segments of the round, seed, number of the round) alone, and every line of
the ledger says from which step on it holds; so a resume repeats the run bit by bit, however the store has grown since.

With --consume N a segment that has had N rounds is removed once a checkpoint lies behind the last of them. Held-out
samples that evaluations need are copied first, into a segment of their own.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.rows import (
    GrowingSchedule,
    HoldoutRows,
    by_id,
    check_lengths,
    hash_place,
    in_fraction,
    plan_epoch,
)
from dflash_train.stage2_drafter.run_folder import Round
from dflash_train.store.consumed import (
    CONSUMER_STAGING,
    COPY_SOURCE,
    consumed_segments,
    remove_segments,
)
from dflash_train.store.manifest import format_id
from dflash_train.store.opened import list_segments
from dflash_train.store.reader import StoreReader
from dflash_train.store.segment import SegmentWriter


class LedgerDiffers(InputError):
    """A round of the ledger is not what these options make of its segments."""


class Following:
    """The rounds of a run and the rows they make; the same on every rank."""

    def __init__(self, config: TrainConfig, reader: StoreReader, rounds: Sequence[Round], first_row: int) -> None:
        """rounds: the ledger; rows before first_row are done, and their segments may be gone."""
        self.config, self.reader = config, reader
        self.rounds: list[Round] = []
        self.schedule = GrowingSchedule(seed=config.seed, row_tokens=config.row_tokens)
        self.holdout = HoldoutRows(
            np.zeros(0, np.int64), np.zeros(0, np.int64), seed=config.seed, row_tokens=config.row_tokens, limit=0
        )
        self.total_steps = self.length(0)
        self.num_rounds = 0
        """Of the rounds, those that hold at the step under way: a checkpoint's position in the ledger."""
        self._held_out: list[int] = []
        self._consumed: set[str] = set()
        self._planned: tuple[tuple[int, tuple[str, ...]], list[np.ndarray]] | None = None
        done = 0
        for entry in rounds:
            done += entry.rows
            self._add(entry, is_done=done <= first_row)

    def _add(self, entry: Round, is_done: bool = False) -> None:
        plan = entry.rows if is_done else self.plan(entry.segments)
        if not isinstance(plan, int) and (len(plan), self.num_tokens(plan)) != (entry.rows, entry.tokens):
            raise LedgerDiffers(
                f"{self.config.run / 'ledger.jsonl'}, line {len(self.rounds) + 1}, has {entry.rows} rows of {entry.tokens:,} "
                f"tokens, but its segments make {len(plan)} of {self.num_tokens(plan):,}: they hold other samples now, or "
                "the run began with other options. Restore them, or give another --run folder."
            )
        self.rounds.append(entry)
        self.schedule.add(plan, entry.last)

    def extend(self, rounds: Sequence[Round]) -> None:
        """Take in what the first rank decided."""
        self.reader.refresh([name for entry in rounds for name in entry.segments])
        for entry in rounds:
            self._add(entry)

    def plan(self, segments: tuple[str, ...]) -> list[np.ndarray]:
        """The rows of the next round over these segments, filled up with empty ones to whole optimizer steps.

        A row left for a step that the next round must complete would keep its segments from being consumed, and the
        extract, whose store is full, from storing what the next round is made of.
        """
        wanted = len(self.rounds), segments
        if self._planned is None or self._planned[0] != wanted:  # the first rank has planned it to decide it
            lengths, training, _held_out = self.split(segments)
            plan = plan_epoch(lengths, training, self.config.seed, len(self.rounds), self.config.row_tokens)
            plan += [np.zeros(0, np.int64)] * (-len(plan) % self.config.rows_per_step)
            self._planned = wanted, plan
        return self._planned[1]

    def num_tokens(self, plan: Sequence[np.ndarray]) -> int:
        """Tokens of rows."""
        lengths = self.reader.samples["length"]
        return int(sum(np.minimum(lengths[row], self.config.row_tokens).sum() for row in plan))

    def split(self, segments: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lengths of all samples as rows will hold them, and the indices of these segments' to train on and held out.

        A group is held out by its hash alone, so that it never changes sides as the store grows.
        """
        samples, config = self.reader.samples, self.config
        numbers = self._numbers(segments)
        starts = np.searchsorted(samples["segment"], numbers)
        ends = np.searchsorted(samples["segment"], numbers, side="right")
        spans = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        indices = by_id(np.concatenate(spans) if spans else np.zeros(0, np.int64), samples["id"])
        check_lengths(np.asarray(samples["length"][indices]), config.row_tokens, config.crop)
        held_out = hash_place(samples["group"][indices]) < config.holdout
        training = ~held_out & in_fraction(samples["id"][indices], config.fraction)
        lengths = np.minimum(samples["length"].astype(np.int64), config.row_tokens)
        return lengths, indices[training], indices[held_out]

    def _numbers(self, segments: Sequence[str]) -> list[int]:
        places = {name: number for number, name in enumerate(self.reader.segment_ids)}
        return [places[name] for name in segments]

    def training_tokens(self) -> dict[str, int]:
        """Tokens that a round over each known segment trains on."""
        samples, config = self.reader.samples, self.config
        kept = (hash_place(samples["group"]) >= config.holdout) & in_fraction(samples["id"], config.fraction)
        lengths = np.minimum(samples["length"], config.row_tokens) * kept
        ids = self.reader.segment_ids
        return dict(zip(ids, np.bincount(samples["segment"], lengths, len(ids)).astype(int).tolist(), strict=True))

    def activate(self, step: int) -> None:
        """Let all lines of the ledger hold that were decided before optimizer step `step` or earlier."""
        while self.num_rounds < len(self.rounds) and self.rounds[self.num_rounds].step <= step:
            entry = self.rounds[self.num_rounds]
            self.num_rounds += 1
            self.total_steps = self.length(self.num_rounds)
            self._held_out += entry.held_out
            if entry.held_out:
                self._find_held_out()

    def length(self, num_rounds: int) -> int:
        """Optimizer steps of the whole run, as known from the first num_rounds lines of the ledger.

        Nothing follows the last one, so its length is counted from the rows: a run may have ended at fewer --steps, and
        ledgers of before recorded the smaller number there.
        """
        steps, newest = self.config.steps, self.rounds[num_rounds - 1] if num_rounds else None
        if newest is None or not newest.last:
            return steps if steps is not None else 0 if newest is None else newest.total_steps
        of_rows = -(-self.schedule.ends()[num_rounds - 1] // self.config.rows_per_step)
        return of_rows if steps is None else min(steps, of_rows)

    def _find_held_out(self) -> None:
        samples, config = self.reader.samples, self.config
        order = np.argsort(samples["id"])
        wanted = np.array(self._held_out, np.int64)
        places = np.minimum(np.searchsorted(samples["id"], wanted, sorter=order), len(order) - 1)
        found = order[places]
        missing = wanted[samples["id"][found] != wanted]
        if len(missing):
            raise InputError(
                f"The held-out sample {format_id(int(missing[0]))} is no longer in {config.store}, but the run evaluates "
                "on it. Extract it again, or give another --run folder."
            )
        lengths = np.minimum(samples["length"].astype(np.int64), config.row_tokens)
        self.holdout.rows = HoldoutRows(
            lengths, found, seed=config.seed, row_tokens=config.row_tokens, limit=config.evaluate_rows
        ).rows

    # -- consumption ---------------------------------------------------------------------------------------------------

    def due(self, num_rows: int) -> list[str]:
        """Segments that have had all their passes within the first num_rows rows, and were not let go of yet."""
        counts: Counter[str] = Counter()
        for entry, end in zip(self.rounds, self.schedule.ends(), strict=True):
            if end > num_rows:
                break
            counts.update(entry.segments)
        passes = self.config.consume
        return [] if passes is None else [n for n, c in counts.items() if c >= passes and n not in self._consumed]

    def let_go(self, due: Sequence[str], present: Sequence[str], copies: Sequence[str]) -> None:
        """Forget the due segments, of which those present are about to be removed; their held-out samples are in `copies`."""
        known = set(self.reader.segment_ids)
        self._consumed.update(due)
        self.reader.drop([name for name in present if name in known])
        self.reader.refresh(copies)
        if self._held_out:
            self._find_held_out()

    def copy_held_out(self, due: Sequence[str]) -> list[str]:
        """Copy the held-out samples of segments into a new one; returns its id, in a list, or none. First rank only."""
        wanted = {identity for entry in self.rounds for identity in entry.held_out}
        samples = self.reader.samples
        indices = np.flatnonzero(np.isin(samples["segment"], self._numbers(due)))
        chosen = [index for index in indices.tolist() if int(samples["id"][index]) in wanted]
        if not chosen:
            return []
        attributes = {"copied": COPY_SOURCE}
        writer = SegmentWriter(self.config.store_folder, self.reader.encoding, attributes, staging=CONSUMER_STAGING)
        for index in chosen:
            sample = self.reader.read(index)
            writer.append(sample.id, sample.group, sample.token_ids, sample.loss_mask, sample.features, sample.scales)
        segment_id = writer.commit()
        assert segment_id is not None
        return [segment_id]


def remove_consumed(following: Following, due: Sequence[str]) -> None:
    """Record and remove segments that every rank has let go of. First rank only."""
    reader = following.reader
    tables: dict[str, tuple[Any, Any]] = {
        name: (reader.entry(name).samples, reader.entry(name).quarantined) for name in due
    }
    remove_segments(following.config.store_folder, tables)


def segments_to_open(store: Path, rounds: Sequence[Round], first_row: int) -> list[str]:
    """What a resumed run reads: the segments of rounds that go on after first_row, in the ledger's order, and all others.

    Raises InputError where a segment that the run needs is gone.
    """
    recorded = consumed_segments(store)
    live = [name for name in list_segments(store) if name not in recorded]
    present, needed, end = set(live), dict[str, None](), 0
    for entry in rounds:
        end += entry.rows
        if end > first_row:
            needed.update(dict.fromkeys(entry.segments))
    missing = next((name for name in needed if name not in present), None)
    if missing is not None:
        why = "it was consumed after a later checkpoint" if missing in recorded else "it was removed"
        raise InputError(
            f"{store} has no segment {missing} any more, which the run still needs: {why}. Go on from a later checkpoint, "
            "or give another --run folder."
        )
    ledger = [name for name in dict.fromkeys(name for entry in rounds for name in entry.segments) if name in present]
    return [*ledger, *(name for name in live if name not in set(ledger))]
