"""Training while the store grows: rows are planned ahead of the steps, and segments go once they have had their passes.

What a round is stands in follow.py, and when the next one comes in round_planner.py; here all ranks do it in lock-step.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from dflash_train.stage2_drafter.collectives import Rank
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.follow import Following, remove_consumed
from dflash_train.stage2_drafter.round_planner import RoundPlanner
from dflash_train.stage2_drafter.rows import RowKey
from dflash_train.stage2_drafter.run_folder import Round, append_rounds
from dflash_train.units import format_count


class Growth:
    """One rank's part; all ranks call `extend` and `consume` at the same steps. report: lines of the first rank."""

    def __init__(
        self,
        following: Following,
        config: TrainConfig,
        rank: Rank,
        report: Callable[[str], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._following, self._config, self._rank = following, config, rank
        self._report, self._stop_requested = report, stop_requested
        self._planner = RoundPlanner(following, report) if rank.is_first else None

    def extend(self, step: int, save: Callable[[], None]) -> bool:
        """Plan rows for the steps ahead, and wait here if there are none for this one; before each step.

        save: writes a checkpoint where the last one is older than this step. Returns whether a stop was asked for
        meanwhile.
        """
        following, rows, steps = self._following, self._config.rows_per_step, self._config.steps
        following.schedule.forget(step * rows)
        ahead = (step + 2) * rows + self._config.read_ahead * self._rank.world
        while not following.schedule.covers(ahead):
            if steps is not None and step >= steps:
                return False
            urgent = not following.schedule.covers((step + 1) * rows)
            decided: dict[str, Any] = {}
            if self._planner is not None:
                rounds = self._planner.look(step, urgent)
                if rounds:
                    append_rounds(self._config.run, rounds)
                decided = {"rounds": [entry.to_json() for entry in rounds], "stop": self._stop_requested()}
            decided = self._rank.broadcast(decided)
            following.extend([Round.from_json(entry) for entry in decided["rounds"]])
            if urgent and decided["stop"]:
                return True
            if not decided["rounds"]:
                if not urgent:
                    return False
                if following.due(step * rows):  # the store may be full: make room before waiting on
                    save()
                    self.consume(step)
        return False

    def consume(self, step: int) -> None:
        """After a checkpoint: remove the segments that have had all their passes."""
        following = self._following
        due = following.due(step * self._config.rows_per_step)
        if not due:
            return
        decided: dict[str, Any] = {}
        if self._planner is not None:
            present = self._planner.still_there(due)
            decided = {"present": present, "copies": following.copy_held_out(present)}
        decided = self._rank.broadcast(decided)
        following.let_go(due, decided["present"], decided["copies"])  # the same `due` on every rank
        if self._planner is not None and decided["present"]:
            remove_consumed(following, decided["present"])
            count = format_count(len(decided["present"]), "segment")
            self._report(f"removed {count} after {self._config.consume} passes")

    def rows_left(self, step: int) -> bool:
        """Whether a step is to be taken."""
        steps, rows = self._config.steps, self._config.rows_per_step
        return (steps is None or step < steps) and self._following.schedule.num_planned > step * rows

    def may_go_on(self) -> bool:
        """Whether a run without --steps that is stopped here has more before it, for all that is known."""
        return self._config.steps is None and not self._following.schedule.closed

    def keys(self, first: int) -> Iterator[RowKey | None]:
        """This rank's rows from a step on; the loader's thread waits here for the training thread."""
        schedule, rows = self._following.schedule, self._config.rows_per_step
        for step in itertools.count(first):
            if not schedule.wait((step + 1) * rows) or step * rows >= schedule.num_planned:
                return  # abandoned, or past the last row
            yield from schedule.step_keys(step, rows, self._rank.rank, self._rank.world)
