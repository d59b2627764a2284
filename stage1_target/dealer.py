"""Which batch is where: not dealt, running in a worker, run but in its open segment, or committed.

Pure bookkeeping in the parent, without processes, so that every order of deaths can be tested. A batch counts as done
when its samples are in a committed segment, never earlier. A batch that was running when its worker died is dealt once
more and then given up: it may be what kills workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflash_train.stage1_target.schedule import Batch

BATCHES_IN_FLIGHT = 2
"""Per worker: one that runs and one that waits in its pipe, so that no worker waits for the parent."""
MAX_DEATHS = 2
"""A batch that was running in so many dying workers is given up."""


@dataclass
class Deal:
    """A batch on its way, or what is left of it."""

    number: int
    indices: tuple[int, ...]
    num_deaths: int = 0


class Dealer:
    """Deals batches to workers 0 … n - 1 and takes back what a dead one had not committed."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._queue = deque(Deal(number, batch.indices) for number, batch in enumerate(batches))
        self._next_number = len(batches)
        self._running: dict[int, list[Deal]] = {}
        self._uncommitted: dict[int, dict[int, Deal]] = {}
        self.given_up: list[Deal] = []

    def peek(self, worker: int) -> Deal | None:
        """What `deal` would give."""
        is_busy = len(self._running.get(worker, ())) >= BATCHES_IN_FLIGHT
        return None if is_busy or not self._queue else self._queue[0]

    def open_samples(self) -> list[int]:
        """Samples that were dealt and are in no committed segment."""
        running = [index for deals in self._running.values() for deal in deals for index in deal.indices]
        return running + [index for samples in self._uncommitted.values() for index in samples]

    def open_workers(self) -> set[int]:
        """Workers that have such samples."""
        return {worker for part in (self._running, self._uncommitted) for worker, deals in part.items() if deals}

    def deal(self, worker: int) -> Deal | None:
        """The next batch for a worker; None if it has enough or nothing is left."""
        running = self._running.setdefault(worker, [])
        if len(running) >= BATCHES_IN_FLIGHT or not self._queue:
            return None
        running.append(self._queue.popleft())
        return running[-1]

    def ran(self, worker: int, number: int) -> None:
        """A worker has run a batch; its samples are in the open segment."""
        running = self._running[worker]
        deal = next(deal for deal in running if deal.number == number)
        running.remove(deal)
        self._uncommitted.setdefault(worker, {}).update(dict.fromkeys(deal.indices, deal))

    def committed(self, worker: int, indices: Iterable[int]) -> None:
        """Samples are in a committed segment (or in its quarantine)."""
        open_samples = self._uncommitted.get(worker, {})
        for index in indices:
            open_samples.pop(index, None)
            for deal in self._running.get(worker, []):  # a segment may be full in the middle of a batch
                deal.indices = tuple(other for other in deal.indices if other != index)

    def lost(self, worker: int, stored: Iterable[int] = ()) -> int:
        """A worker died: deal its samples again, but for those `stored` after all; return how many."""
        stored = set(stored)
        open_samples = self._uncommitted.pop(worker, {})
        stored.update(index for deal in open_samples.values() for index in deal.indices if index not in open_samples)
        left = [(deal, deal.num_deaths) for deal in {id(deal): deal for deal in open_samples.values()}.values()]
        for position, deal in enumerate(self._running.pop(worker, [])):
            left.append((deal, deal.num_deaths + (position == 0)))
        count = 0
        for deal, num_deaths in reversed(left):
            indices = tuple(index for index in deal.indices if index not in stored)
            again = Deal(self._next_number, indices, num_deaths)
            self._next_number += 1
            if num_deaths >= MAX_DEATHS:
                self.given_up.append(again)
            elif indices:
                self._queue.appendleft(again)
                count += len(indices)
        return count

    def wants_commit(self, worker: int, is_paused: bool = False) -> bool:
        """Whether a worker has nothing left to run (or nothing for now, in a pause) but samples in its open segment."""
        return (is_paused or not self._queue) and not self._running.get(worker) and bool(self._uncommitted.get(worker))

    @property
    def done(self) -> bool:
        """Whether everything is committed or given up."""
        return not self._queue and not any(self._running.values()) and not any(self._uncommitted.values())
