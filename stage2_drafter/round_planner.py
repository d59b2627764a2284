"""The first rank's eyes on a store that grows: what the next round of follow.py is, how long the run will be, and what to
say while there is nothing to train on.

It looks at the store before every step, at most once a second: segments in `segments/`, and the extract's plan.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.follow import Following
from dflash_train.stage2_drafter.run_folder import Round
from dflash_train.store.consumed import COPY_SOURCE, consumed_segments, read_consumed
from dflash_train.store.opened import list_segments
from dflash_train.store.plan import SILENT_SECONDS, Plan, read_plan

LOOK_SECONDS = 1.0
SAY_SECONDS = 60.0
"""Between two lines that say the same of a wait."""
EXPECTED_FILL = 0.95
"""Share of a row's tokens that are used, before enough rows are planned to know."""


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
        """Length of the run: as given, or from the rows planned and those to come; once nothing is to come, from its rows
        alone, for a later start may be given more --steps."""
        config = self._following.config
        fill = num_tokens / (num_rows * config.row_tokens) if num_rows >= 50 else EXPECTED_FILL
        rows = num_rows + left_tokens / (config.row_tokens * max(fill, 0.01))
        return math.ceil(rows / config.rows_per_step) if config.steps is None or last else config.steps

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
