"""Rows: samples packed whole into S tokens, planned from (seed, epoch) and shared out among the ranks.

Which samples form row n of epoch e, and where its anchors are, follows from (set of samples, seed, e, n) alone; ranks only
choose which rows they take. So any number of devices, a resumed run, or a store of the same samples in another order (other
workers, another encoding) sees the same rows. First-fit over a few open
rows fills about 97 % of the slots at 20 samples a row without sorting by length, which would make rows alike.
row_loader.py reads what is planned here.

Under --follow the store grows, and the sequence is made of rounds, each over a list of segments (follow.py); then `e`
counts rounds.

Symbols: S tokens of a row, N samples.
"""

import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_train.errors import InputError

_ORDER, ANCHOR_STREAM, _HOLDOUT = range(3)  # keeps the random streams of one seed apart
_OPEN_ROWS = 16


class RowKey(NamedTuple):
    """Which row: `holdout` rows are numbered apart; None in place of a key means a dummy row."""

    epoch: int
    number: int
    holdout: bool = False


def split_holdout(groups: np.ndarray, share: float) -> np.ndarray:
    """Which samples (bool [N]) are held out: whole groups, chosen by a hash, so that a growing store never moves one.

    With share > 0 and at least two groups, at least one group is held out and one is left.
    """
    unique, inverse = np.unique(np.asarray(groups, dtype=np.int64), return_inverse=True)
    if share <= 0 or len(unique) < 2:
        return np.zeros(len(groups), dtype=bool)
    place = hash_place(unique)
    chosen = place < share
    chosen[np.argmin(place)] = True
    chosen[np.argmax(place)] = False
    held_out: np.ndarray = chosen[inverse]
    return held_out


def hash_place(ids: np.ndarray) -> np.ndarray:
    """Where ids (int64 [N]) fall in [0, 1), the same in every store: what lies below a share is held out, or selected.

    splitmix64's finaliser: an id is a hash already, this only unties the place from the id's own bits.
    """
    values = np.asarray(ids, dtype=np.int64).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    place: np.ndarray = (values ^ (values >> np.uint64(31))) / np.float64(2**64)
    return place


def in_fraction(ids: np.ndarray, fraction: float) -> np.ndarray:
    """Which samples (bool [N]) belong to a fraction of the data: by their ids, so that a smaller one is part of a larger."""
    chosen: np.ndarray = hash_place(ids) < fraction if fraction < 1 else np.ones(len(ids), dtype=bool)
    return chosen


def by_id(indices: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Samples in the order of their ids, not in that in which workers happened to store them: indices int64 [N] again."""
    ordered: np.ndarray = indices[np.argsort(ids[indices], kind="stable")]
    return ordered


def split_samples(
    ids: np.ndarray, groups: np.ndarray, holdout: float, fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """The samples (int64 indices, by id) to train on and those held out, of all ids and groups [N] of a store."""
    held_out = split_holdout(groups, holdout)
    training = np.flatnonzero(~held_out & in_fraction(ids, fraction))
    return by_id(training, ids), by_id(np.flatnonzero(held_out), ids)


def check_lengths(lengths: np.ndarray, row_tokens: int, crop: bool) -> np.ndarray:
    """Lengths as rows will hold them (int64 [N]); raises InputError naming the longest sample if it does not fit."""
    longest = int(lengths.max(initial=0))
    if longest > row_tokens and not crop:
        raise InputError(
            f"The longest sample has {longest} tokens, --row-tokens is {row_tokens}. "
            f"Give --row-tokens of at least {longest}, or --crop to cut such samples at the tail."
        )
    return np.minimum(lengths.astype(np.int64), row_tokens)


def plan_rows(lengths: np.ndarray, order: np.ndarray, row_tokens: int) -> list[np.ndarray]:
    """Pack samples, taken in `order`, whole into rows of at most row_tokens; every sample is in exactly one row.

    First fit over at most 16 open rows, the fullest of which is closed when another must be opened. Returns the sample
    indices of each row in the order in which they are laid out. Lengths must not exceed row_tokens.

    A sample longer than the room in every row but the newest (of 500 tokens in rows of 8,192: four in five) is placed
    without looking at those, which halves the time; the test compares with the plain search.
    """
    taken = lengths[order]
    assert taken.max(initial=0) <= row_tokens, "check_lengths was not applied"
    closed: list[list[int]] = []
    older: list[list[int]] = []  # the open rows but the newest, oldest first; `rooms`: tokens left in each
    rooms: list[int] = []
    newest: list[int] = []
    room, most_room = row_tokens, -1  # in the newest; the largest of `rooms`
    for index, length in zip(order.tolist(), taken.tolist(), strict=True):
        if length <= most_room:
            for place, left in enumerate(rooms):
                if length <= left:
                    older[place].append(index)
                    rooms[place] = left - length
                    break
            most_room = max(rooms)
        elif length <= room:
            newest.append(index)
            room -= length
        else:
            older.append(newest)
            rooms.append(room)
            if len(rooms) == _OPEN_ROWS:
                fullest = rooms.index(min(rooms))
                del rooms[fullest]
                closed.append(older.pop(fullest))
            newest, room, most_room = [index], row_tokens - length, max(rooms)
    rows = [*closed, *older, newest] if newest else []
    return [np.asarray(samples, dtype=np.int64) for samples in rows]


def plan_epoch(lengths: np.ndarray, training: np.ndarray, seed: int, epoch: int, row_tokens: int) -> list[np.ndarray]:
    """The rows of one epoch (or round) over the samples `training`, shuffled: which samples meet, then in which order."""
    rng = np.random.default_rng((seed, _ORDER, epoch))
    rows = plan_rows(lengths, rng.permutation(training), row_tokens)
    return [rows[place] for place in rng.permutation(len(rows))]


class RowSchedule:
    """The endless (or `epochs` long) sequence of training rows, and who takes which in every optimizer step.

    lengths: int64 [N] of all samples, as check_lengths gave them; training: the indices that may be trained on; counted:
    rows of the first epochs, where another process has counted them.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        training: np.ndarray,
        *,
        seed: int,
        row_tokens: int,
        epochs: int | None,
        counted: Sequence[int] = (),
    ) -> None:
        self._lengths, self._training, self._seed, self._row_tokens = lengths, training, seed, row_tokens
        self._epochs = epochs
        self._first_row = [0, *itertools.accumulate(counted)]  # of each epoch counted so far, and of the next one
        self._plans: dict[int, list[np.ndarray]] = {}

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """The rows of one epoch, each the indices of its samples. Only the last two plans asked for are kept."""
        plan = self._plans.pop(epoch, None)
        if plan is None:
            plan = plan_epoch(self._lengths, self._training, self._seed, epoch, self._row_tokens)
            if len(self._plans) == 2:
                del self._plans[next(iter(self._plans))]  # the one not asked for longest
        self._plans[epoch] = plan
        return plan

    def num_rows(self) -> int:
        """Rows of all epochs together; only where the number of epochs is given."""
        assert self._epochs is not None
        epochs = range(len(self._first_row) - 1, self._epochs)
        counts = [len(self.epoch(epoch)) for epoch in reversed(epochs)]  # the first is kept: it is read next
        for count in reversed(counts):
            self._first_row.append(self._first_row[-1] + count)
        return self._first_row[self._epochs]

    def counted(self) -> list[int]:
        """Rows of each epoch counted so far."""
        return [end - start for start, end in itertools.pairwise(self._first_row)]

    def key(self, index: int) -> RowKey | None:
        """The row at place `index` of the sequence, None past its end."""
        while self._first_row[-1] <= index:
            epoch = len(self._first_row) - 1
            if epoch == self._epochs:
                return None
            self._first_row.append(self._first_row[-1] + len(self.epoch(epoch)))
        epoch = int(np.searchsorted(self._first_row, index, side="right")) - 1
        return RowKey(epoch, index - self._first_row[epoch])

    def samples(self, key: RowKey) -> np.ndarray:
        return self.epoch(key.epoch)[key.number]

    def abandon(self) -> None:
        """Nothing waits for this schedule."""

    def step_keys(self, step: int, rows_per_step: int, rank: int, world: int) -> list[RowKey | None]:
        """The rows that `rank` takes in optimizer step `step`: r, r + world, …; every rank gets the same number.

        A None is a dummy row: where rows_per_step is not a multiple of world, and past the last epoch.
        """
        turns = -(-rows_per_step // world)
        places = [turn * world + rank for turn in range(turns)]
        return [self.key(step * rows_per_step + place) if place < rows_per_step else None for place in places]


class GrowingSchedule(RowSchedule):
    """A sequence of rows that the training thread extends by whole rounds, while a loader's thread reads behind it."""

    def __init__(self, *, seed: int, row_tokens: int) -> None:
        nothing = np.zeros(0, dtype=np.int64)
        super().__init__(nothing, nothing, seed=seed, row_tokens=row_tokens, epochs=None)
        self._changed = threading.Condition()
        self._abandoned = False
        self.closed = False
        """Whether no round will follow."""

    def add(self, plan: Sequence[np.ndarray] | int, last: bool) -> None:
        """Append a round: its rows, or the number of them where they are done and never asked for again."""
        with self._changed:
            if not isinstance(plan, int):
                self._plans[len(self._first_row) - 1] = list(plan)
            self._first_row.append(self._first_row[-1] + (plan if isinstance(plan, int) else len(plan)))
            self.closed = self.closed or last
            self._changed.notify_all()

    def forget(self, num_rows: int) -> None:
        """Drop the plans of rounds that end within the first num_rows rows of the sequence."""
        with self._changed:
            for number in [number for number in self._plans if self._first_row[number + 1] <= num_rows]:
                del self._plans[number]

    @property
    def num_planned(self) -> int:
        """Rows planned so far."""
        return self._first_row[-1]

    def ends(self) -> list[int]:
        """For each round, the number of rows of the sequence up to its end."""
        return self._first_row[1:]

    def covers(self, num_rows: int) -> bool:
        """Whether so many rows are planned, or no more will be."""
        return self.closed or self.num_planned >= num_rows

    def wait(self, num_rows: int) -> bool:
        """Wait until so many rows are covered; False where the schedule was abandoned."""
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self.covers(num_rows))
            return not self._abandoned

    def abandon(self) -> None:
        """Wake who waits: nobody will extend this any more."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def epoch(self, epoch: int) -> list[np.ndarray]:
        with self._changed:
            return self._plans[epoch]

    def num_rows(self) -> int:
        assert self.closed, "more rounds may come"
        return self.num_planned

    def key(self, index: int) -> RowKey | None:
        with self._changed:
            assert self.covers(index + 1), "a row was asked for before its round was planned"
            if index >= self.num_planned:
                return None
            number = int(np.searchsorted(self._first_row, index, side="right")) - 1
            return RowKey(number, index - self._first_row[number])


class HoldoutRows:
    """The held-out samples as a list of rows, the same at every evaluation unless the store grows (follow.py)."""

    def __init__(self, lengths: np.ndarray, held_out: np.ndarray, *, seed: int, row_tokens: int, limit: int) -> None:
        rng = np.random.default_rng((seed, _HOLDOUT))
        self.rows = plan_rows(lengths, rng.permutation(held_out), row_tokens)[:limit]

    def samples(self, key: RowKey) -> np.ndarray:
        return self.rows[key.number]

    def rank_keys(self, rank: int, world: int) -> list[RowKey | None]:
        """The rows that `rank` evaluates; every rank gets the same number, the missing ones are None."""
        places = range(rank, -(-len(self.rows) // world) * world, world)
        return [RowKey(0, place, holdout=True) if place < len(self.rows) else None for place in places]
