"""Training on a store that grows: rounds, each over whole segments, decided by the first rank and kept in the ledger.

A round trains once on every sample of its segments: all that are stored and have had fewer than `passes` rounds. So what
is new comes soon, nothing is trained on more than `passes` times before the extract has finished, and the trainer waits
when it is that far ahead. Rows follow from (segments of the round, seed, number of the round) alone, and every line of
the ledger says from which step on it holds; so a resume repeats the run bit by bit, however the store has grown since.

With --consume N a segment that has had N rounds is removed once a checkpoint lies behind the last of them. Held-out
samples that evaluations need are copied first, into a segment of their own.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.rows import (
    GrowingSchedule,
    HoldoutRows,
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
    read_consumed,
    remove_segments,
)
from dflash_train.store.manifest import format_id
from dflash_train.store.opened import list_segments
from dflash_train.store.plan import SILENT_SECONDS, Plan, read_plan
from dflash_train.store.reader import StoreReader
from dflash_train.store.segment import SegmentWriter

LOOK_SECONDS = 1.0
SAY_SECONDS = 60.0
EXPECTED_FILL = 0.95
"""Share of a row's tokens that are used, before enough rows are planned to know."""


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
        self.total_steps = config.steps or 0
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
        indices = np.concatenate(spans) if spans else np.zeros(0, np.int64)
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
            steps = self.config.steps
            self.total_steps = steps if steps is not None and not entry.last else entry.total_steps
            self._held_out += entry.held_out
            if entry.held_out:
                self._find_held_out()

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


class RoundPlanner:
    """The first rank's eyes on the store: what the next round is, and what to say while there is none."""

    def __init__(
        self, following: Following, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._following, self._report, self._clock = following, report, clock
        self._store: Path = following.config.store_folder
        consumed = read_consumed(self._store)
        self._num_consumed, self._gone = len(consumed.ids), consumed.segments
        self._held_tokens = 0
        self._copies: dict[str, bool] = {}
        self._looked = -math.inf
        self._without_plan: float | None = None
        self._said: tuple[float, str] | None = None
        self._beat: tuple[tuple[str, int], float] | None = None

    def look(self, step: int, urgent: bool) -> list[Round]:
        """The rounds that come next, decided before optimizer step `step`; none where there is nothing new.

        urgent: the step waits for it; then it may take a second, and the wait is reported.
        """
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            if not urgent:
                return []
            time.sleep(LOOK_SECONDS - (now - self._looked))
        self._looked = self._clock()
        plan = read_plan(self._store)  # before the segments: one that has finished then has committed them all
        if plan is None and self._without_plan is None:
            self._without_plan = self._looked  # an extract that has just made the store writes one at once
        silent = self._without_plan is not None and self._looked - self._without_plan > SILENT_SECONDS
        finished = silent if plan is None else plan.state == "finished"
        live = self._live()
        rounds = self._decide(step, plan, live, finished)
        if urgent and not rounds:
            self._say(plan, live)
        return rounds

    def still_there(self, segments: Sequence[str]) -> list[str]:
        """Those segments that were not removed before: a resumed run finds old ones due again."""
        live = set(self._live())
        return [name for name in segments if name in live]

    def _live(self) -> list[str]:
        """The segments of the store that may be trained on: not those that were removed, nor copies of held-out samples."""
        reader, gone = self._following.reader, consumed_segments(self._store)
        names = [name for name in list_segments(self._store) if name not in gone]
        reader.refresh(names)
        if gone - self._gone:
            self._num_consumed, self._gone = len(read_consumed(self._store).ids), gone
        number = len(self._copies)
        for name, source in zip(reader.segment_ids[number:], reader.sources()[number:], strict=True):
            self._copies[name] = source.get("copied") == COPY_SOURCE
        return [name for name in names if not self._copies[name]]

    def _decide(self, step: int, plan: Plan | None, live: Sequence[str], finished: bool) -> list[Round]:
        following, config = self._following, self._following.config
        limit = self._passes(plan)
        counts = Counter(name for entry in following.rounds for name in entry.segments)
        again = False
        chosen = [name for name in live if limit is None or counts[name] < limit]
        if not chosen and finished:
            if config.steps is None or config.consume is not None or not live:
                return [self._closing(step)]
            chosen, again = list(live), True  # --steps asks for more passes than were foreseen
        if not chosen:
            return []
        segments = tuple(chosen)
        lengths, _training, held_out = following.split(segments)
        rows = following.plan(segments)
        if again and not rows:
            return [self._closing(step)]
        tokens = following.num_tokens(rows)
        counts.update(segments)
        left = [name for name in live if limit is not None and counts[name] < limit]
        last = finished and not left and (config.steps is None or config.consume is not None)
        done = following.rounds
        num_rows = sum(one.rows for one in done) + len(rows)
        num_tokens = sum(one.tokens for one in done) + tokens
        if last:
            self._refuse_nothing(num_tokens)
        left_tokens = self._left_tokens(plan, finished, limit, counts, left, num_tokens)
        entry = Round(
            step=step,
            segments=segments,
            rows=len(rows),
            tokens=tokens,
            total_steps=self._total_steps(num_rows, num_tokens, left_tokens, last),
            held_out=tuple(self._newly_held_out(lengths, held_out)),
            last=last,
        )
        return [entry]

    def _passes(self, plan: Plan | None) -> int | None:
        """Rounds that a segment gets at most while the store grows; None where nothing tells."""
        config = self._following.config
        if config.consume is not None:
            return config.consume
        if config.num_epochs is not None:
            return config.num_epochs
        if plan is None or config.steps is None:
            return None
        rows = plan.tokens * (1 - config.holdout) * config.fraction / (config.row_tokens * EXPECTED_FILL)
        return max(1, math.ceil(config.steps * config.rows_per_step / max(rows, 1)))

    def _newly_held_out(self, lengths: np.ndarray, held_out: np.ndarray) -> list[int]:
        """Of a round's held-out samples, those that come to the evaluation, until its rows are full."""
        config, ids = self._following.config, self._following.reader.samples["id"]
        if self._held_tokens >= config.evaluate_rows * config.row_tokens:
            return []
        known = {identity for entry in self._following.rounds for identity in entry.held_out}
        tokens = int(lengths[np.isin(ids, list(known))].sum()) if known else 0
        added: list[int] = []
        for index in held_out.tolist():
            if tokens >= config.evaluate_rows * config.row_tokens:
                break
            if int(ids[index]) not in known:
                added.append(int(ids[index]))
                tokens += int(lengths[index])
        self._held_tokens = tokens
        return added

    def _left_tokens(
        self,
        plan: Plan | None,
        finished: bool,
        limit: int | None,
        counts: Counter[str],
        left: Sequence[str],
        num_tokens: int,
    ) -> float:
        """Tokens that rounds after this one will train on, as far as is known."""
        if limit is None:
            return 0.0
        if not finished and plan is not None:
            config = self._following.config
            return max(0.0, limit * plan.tokens * (1 - config.holdout) * config.fraction - num_tokens)
        tokens = self._following.training_tokens()
        return float(sum((limit - counts[name]) * tokens[name] for name in left))

    def _total_steps(self, num_rows: int, num_tokens: int, left_tokens: float, last: bool) -> int:
        """Length of the run: as given, or from the rows planned and those to come; exact once nothing is to come."""
        config = self._following.config
        fill = num_tokens / (num_rows * config.row_tokens) if num_rows >= 50 else EXPECTED_FILL
        rows = num_rows + left_tokens / (config.row_tokens * max(fill, 0.01))
        steps = math.ceil(rows / config.rows_per_step)
        if config.steps is not None:
            return min(config.steps, steps) if last else config.steps
        return steps

    def _closing(self, step: int) -> Round:
        """A line without segments: nothing follows."""
        rounds = self._following.rounds
        self._refuse_nothing(sum(entry.tokens for entry in rounds))
        total = self._total_steps(sum(entry.rows for entry in rounds), sum(entry.tokens for entry in rounds), 0.0, True)
        return Round(step=step, segments=(), rows=0, tokens=0, total_steps=total, held_out=(), last=True)

    def _refuse_nothing(self, num_tokens: int) -> None:
        """Raise InputError where all rounds together, after which no more follow, train on nothing."""
        config = self._following.config
        if num_tokens or config.steps == 0:
            return
        consumed = f" {self._num_consumed:,} samples were consumed." if self._num_consumed else ""
        raise InputError(
            f"{config.store} has no sample to train on, and its extract has ended: of those that it holds, --holdout "
            f"{config.holdout:g} and --fraction {config.fraction:g} leave none.{consumed} Extract more, or change these."
        )

    def _say(self, plan: Plan | None, live: Sequence[str]) -> None:
        """Report the wait: at once, when the extract's state changes, and every minute."""
        now = self._clock()
        state = self._state(plan, now)
        if self._said is not None and self._said[1] == state and now - self._said[0] < SAY_SECONDS:
            return
        self._said = now, state
        reader = self._following.reader
        num_stored = self._num_consumed + sum(len(reader.entry(name).samples) for name in live)
        total = "" if plan is None else f" of {plan.samples:,}"
        ways = {
            "running": "",
            "finished": "",
            "stopped": "; the extract was stopped: start it again to go on, or Ctrl-C to stop here with a checkpoint",
            "failed": "; the extract failed: start it again to go on, or Ctrl-C to stop here with a checkpoint",
            "silent": f"; the extract has given no sign of life for {SILENT_SECONDS:.0f} s: start it again to go on, or "
            "Ctrl-C to stop here with a checkpoint",
        }
        self._report(f"waiting for the store: {num_stored:,}{total} samples stored{ways[state]}")

    def _state(self, plan: Plan | None, now: float) -> str:
        """The extract's state, or silent where it says that it runs but its beat stands still."""
        if plan is None:
            return "finished"
        beat = plan.run, plan.beat
        if self._beat is None or self._beat[0] != beat:
            self._beat = beat, now
        return "silent" if plan.state == "running" and now - self._beat[1] > SILENT_SECONDS else plan.state


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
