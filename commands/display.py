"""What each long command shows: a view takes its events, says them as lines and draws their newest state.

Only a view knows a command's events; how they reach the user is terminal.py's business, how a bar looks drawing.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from dflash_train.commands.drawing import Clock, Curve, Lines
from dflash_train.commands.terminal import Line
from dflash_train.speculate.events import Decoded
from dflash_train.stage1_target.events import Answering, Note, Progress, Tokenising, WorkerProgress
from dflash_train.stage1_target.events import Event as ExtractEvent
from dflash_train.stage1_target.forecast import Forecast
from dflash_train.stage2_drafter.events import StepDone, describe_waiting
from dflash_train.units import format_bytes, format_duration

MOST_WORKERS = 16
"""Workers that get a line of their own."""


class RunView:
    """What all views share: the time since the start and the time left, until the run has ended."""

    def __init__(self) -> None:
        self._clock = Clock()
        self.ended = False

    def _times(self, left: float | None) -> tuple[str, str]:
        elapsed = format_duration(self._clock.elapsed)
        return (f"{elapsed} in all", "") if self.ended else (f"{elapsed} so far", _left(left)[2:])


class ExtractView(RunView):
    """Bars of samples, tokens and size, the speed of every worker, and the time left."""

    def __init__(self) -> None:
        super().__init__()
        self._tokenising: Tokenising | None = None
        self._forecast: Forecast | None = None
        self._progress: Progress | None = None

    def take(self, event: ExtractEvent) -> list[Line]:
        """Take in an event."""
        if isinstance(event, Tokenising):
            self._tokenising = event
            rows = "" if event.num_rows is None else f" of {event.num_rows:,}"
            finished = event.num_done == event.num_rows
            text = f"tokenising: {event.num_done:,}{rows} rows"
            return [Line(text, "tokenising", asdict(event), drawn=True, paced=not finished)]
        if isinstance(event, Forecast):
            self._forecast = event
            first, *lines = event.lines()
            return [Line(first, "forecast", asdict(event)), *(Line(line, "forecast") for line in lines)]
        if isinstance(event, Progress):
            self._progress = event
            finished = event.num_committed == event.num_pending
            return [Line(event.line(), "progress", asdict(event), drawn=True, paced=not finished)]
        return [Line(event.text)]

    def __rich__(self) -> Lines:
        lines, progress, rows = Lines(), self._progress, self._tokenising
        if self._forecast is None:
            if rows is not None:
                lines.bar("rows", rows.num_done, rows.num_rows, _of(rows.num_done, rows.num_rows), "tokenising")
        elif progress is None:
            if self._forecast.num_pending and not self.ended:  # a dry run has nothing to show
                lines.bar("samples", 0, self._forecast.num_pending, _of(0, self._forecast.num_pending))
        else:
            self._draw(lines, progress, self._forecast)
        left = None
        if progress is not None and progress.num_samples < progress.num_pending:
            left = progress.hours_left * 3600
        lines.end(*self._times(left))
        return lines

    def _draw(self, lines: Lines, progress: Progress, forecast: Forecast) -> None:
        committed = f"{progress.num_committed:,} committed"
        lines.bar(
            "samples",
            progress.num_samples,
            progress.num_pending,
            _of(progress.num_samples, progress.num_pending),
            committed,
        )
        speed = f"{progress.tokens_per_second:,.0f} tokens/s"
        lines.bar(
            "tokens",
            progress.num_tokens,
            progress.num_pending_tokens,
            _of(progress.num_tokens, progress.num_pending_tokens),
            speed,
        )
        size = progress.num_committed_bytes
        expected = forecast.needed_bytes - forecast.frozen_bytes  # the frozen tables are no part of a segment
        total = size if progress.num_committed == progress.num_pending else max(expected, size)
        lines.bar("size", size, total, f"{format_bytes(size)} of {format_bytes(total)}", "on disk")
        fastest = max((worker.tokens_per_second for worker in progress.workers), default=0.0)
        for worker in progress.workers[:MOST_WORKERS]:
            _draw_worker(lines, worker, fastest)
        if len(progress.workers) > MOST_WORKERS:
            lines.table.add_row("", f"and {len(progress.workers) - MOST_WORKERS} more")


def _draw_worker(lines: Lines, worker: WorkerProgress, fastest: float) -> None:
    speed = 0.0 if worker.state == "died" else worker.tokens_per_second
    value = f"{speed:,.0f} tokens/s" if speed else ""
    lines.bar(worker.label, speed, max(fastest, 1.0), value, worker.state, full_style="cyan")


class RegenerateView(RunView):
    """A bar of conversations, the speed, and how many are left out or failed."""

    def __init__(self) -> None:
        super().__init__()
        self._event: Answering | None = None
        self._speed = Curve()

    def take(self, event: Answering | Note) -> list[Line]:
        """Take in an event."""
        if isinstance(event, Note):
            return [Line(event.text)]
        self._clock.begin(event.num_done if self._event is None else 0)
        self._event = event
        self._speed.add(event.tokens_per_second)
        seconds = None if event.num_rows is None else self._clock.left(event.num_done, event.num_rows)
        values = {**asdict(event), "seconds_left": seconds}
        return [Line(f"{event.line()}{_left(seconds)}", "answering", values, drawn=True, paced=True)]

    def __rich__(self) -> Lines:
        lines, event, left = Lines(), self._event, None
        if event is not None:
            rows = event.num_rows
            left = None if rows is None else self._clock.left(event.num_done, rows)
            rest = f"{event.num_left_out:,} left out, {event.num_failed:,} failed"
            lines.bar("conversations", event.num_done, rows, _of(event.num_done, rows), rest)
            lines.curve(
                "speed", self._speed, f"{event.tokens_per_second:,.0f} tokens/s", f"{event.num_tokens:,} tokens"
            )
        lines.end(*self._times(left))
        return lines


class TrainView(RunView):
    """A bar of steps, curves of loss and acceptance length over anchors, speed, waiting share and the time left."""

    def __init__(self) -> None:
        super().__init__()
        self._loss, self._acceptance, self._speed = Curve(), Curve(), Curve()
        self._step: StepDone | None = None

    def take(self, event: StepDone | str) -> list[Line]:
        """Take in a step, or a line of the log; the line that repeats the last step has its numbers and the time left."""
        if isinstance(event, StepDone):
            self._clock.begin(event.step)
            self._step = event
            self._loss.add(event.values["loss"])
            self._acceptance.add(event.values["acceptance_length"])
            self._speed.add(event.values["tokens_per_second"])
            return []
        step = self._step
        if step is not None and event.startswith(f"step {step.step} of {step.total_steps}"):
            seconds = self._clock.left(step.step, step.total_steps)
            values = {"step": step.step, "total_steps": step.total_steps, **step.values, "seconds_left": seconds}
            return [Line(f"{event}{_left(seconds)}", "step", values, drawn=True)]
        return [Line(event)]

    def __rich__(self) -> Lines:
        lines, step, left = Lines(), self._step, None
        if step is not None:
            left = self._clock.left(step.step, step.total_steps)
            values, done = step.values, step.step / step.total_steps
            lines.bar("steps", step.step, step.total_steps, _of(step.step, step.total_steps), f"{done:.0%}")
            lines.curve("loss", self._loss, _number(values["loss"], ".4f"))
            acceptance = _number(values["acceptance_length"], ".3f")
            lines.curve("acceptance", self._acceptance, acceptance, f"over anchors{_real(step)}")
            lines.curve("speed", self._speed, f"{values['tokens_per_second']:,.0f} tokens/s", describe_waiting(values))
        lines.end(*self._times(left))
        return lines


def _real(step: StepDone) -> str:
    """«; over rounds held out 3.10, real 2.95 at step 500», of the newest evaluation that measured both."""
    at, values = step.evaluation or (0, {})
    if values.get("real_acceptance_length") is None:
        return ""
    estimate = values.get("acceptance_length")
    held_out = "" if estimate is None else f"held out {estimate:.2f}, "
    return f"; over rounds {held_out}real {values['real_acceptance_length']:.2f} at step {at:,}"


class EvaluateView(RunView):
    """A bar of prompts and the running acceptance length."""

    def __init__(self) -> None:
        super().__init__()
        self._decoded: Decoded | None = None
        self._acceptance = Curve()

    def take(self, event: Decoded | str) -> list[Line]:
        """Take in an event; a string is a note."""
        if isinstance(event, str):
            return [Line(event)]
        self._clock.begin(1 if self._decoded is None else 0)
        self._decoded = event
        self._acceptance.add(event.acceptance_length)
        seconds = self._clock.left(event.num_prompts, event.num_all)
        text = (
            f"{event.num_prompts:,} of {event.num_all:,} prompts decoded, acceptance length "
            f"{_number(event.acceptance_length, '.2f')}{_left(seconds)}"
        )
        values = {**asdict(event), "seconds_left": seconds}
        return [Line(text, "decoded", values, drawn=True, paced=event.num_prompts < event.num_all)]

    def __rich__(self) -> Lines:
        lines, event, left = Lines(), self._decoded, None
        if event is not None:
            left = self._clock.left(event.num_prompts, event.num_all)
            speed = event.tokens_per_second
            rest = "" if speed is None else f"{speed:,.1f} tokens/s"
            lines.bar("prompts", event.num_prompts, event.num_all, _of(event.num_prompts, event.num_all), rest)
            acceptance = _number(event.acceptance_length, ".2f")
            lines.curve("acceptance", self._acceptance, acceptance, "tokens per target forward")
        lines.end(*self._times(left))
        return lines


class CountView(RunView):
    """One bar, of bytes read or of anything else that is counted."""

    def __init__(self, name: str, form: Callable[[float], str] = "{:,.0f}".format) -> None:
        super().__init__()
        self._name, self._form = name, form
        self._done, self._total = 0, 0

    @classmethod
    def of_bytes(cls) -> CountView:
        return cls("bytes", format_bytes)

    def take(self, event: tuple[int, int] | str) -> list[Line]:
        """Take in (done, total), or a note."""
        if isinstance(event, str):
            return [Line(event)]
        self._clock.begin(event[0])  # the first may come after a long start, which tells nothing of the rest
        self._done, self._total = event
        text = f"{self._name}: {self._form(self._done)} of {self._form(self._total)}"
        seconds = self._clock.left(self._done, self._total)
        values = {"done": self._done, "total": self._total, "seconds_left": seconds}
        finished = self._done == self._total
        return [Line(f"{text}{_left(seconds)}", self._name, values, drawn=True, paced=not finished)]

    def __rich__(self) -> Lines:
        lines, left = Lines(), None
        if self._total:
            left = self._clock.left(self._done, self._total)
            speed = self._clock.per_second(self._done)
            rest = f"{self._form(speed)}/s" if speed and self._form is format_bytes else ""
            value = f"{self._form(self._done)} of {self._form(self._total)}"
            lines.bar(self._name, self._done, self._total, value, rest)
        lines.end(*self._times(left))
        return lines


def _of(done: int, total: int | None) -> str:
    return f"{done:,}" if total is None else f"{done:,} of {total:,}"


def _left(seconds: float | None) -> str:
    """«, 12 min left»; empty where nothing is left or nothing tells."""
    return f", {format_duration(seconds)} left" if seconds else ""


def _number(value: Any, form: str) -> str:
    return "none" if value is None else format(value, form)
