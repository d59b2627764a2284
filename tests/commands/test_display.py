"""Views: what each event says, what is drawn of it, at every width."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dflash_train.commands.display import CountView, EvaluateView, ExtractView, RegenerateView, TrainView
from dflash_train.commands.drawing import Clock, Curve
from dflash_train.commands.terminal import View
from dflash_train.speculate.events import Decoded
from dflash_train.stage1_target.events import Answering, Note, Progress, Tokenising, WorkerProgress
from dflash_train.stage1_target.forecast import Forecast
from dflash_train.stage2_drafter.events import StepDone

FORECAST = Forecast(
    num_samples=1000,
    num_tokens=700_000,
    supervised_share=0.5,
    length_percentiles={50: 600, 100: 4096},
    num_rows=1000,
    num_duplicates=0,
    num_truncated=0,
    num_quarantined=0,
    quarantine_reasons={},
    counts_all_tokens=False,
    num_pending=1000,
    num_pending_tokens=700_000,
    padding_share=0.01,
    encoding="int8",
    rank=1024,
    bytes_per_token={"int8": 5140},
    needed_bytes=2**32,
    frozen_bytes=0,
    free_bytes=2**40,
    store=Path("s.zarr"),
)
WORKERS = (WorkerProgress("GPU 0", "running", 4000, 900.0), WorkerProgress("GPU 1", "died", 1000, 300.0))


def progress(num_samples: int, num_committed: int) -> Progress:
    return Progress(
        num_samples=num_samples,
        num_pending=1000,
        num_tokens=700 * num_samples,
        num_pending_tokens=700_000,
        num_committed=num_committed,
        num_committed_bytes=3_600_000 * num_committed,
        tokens_per_second=1234.5,
        hours_left=(1000 - num_samples) / 1000,
        num_workers=1,
        workers=WORKERS,
    )


def step_done(step: int, loss: float | None = 2.5) -> StepDone:
    values = {"loss": loss, "acceptance_length": loss, "tokens_per_second": 12_345.6, "wait_share": 0.031}
    return StepDone(step, 100, 0.5, values)


def draw(view: View, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def test_extract_draws_bars_of_samples_tokens_size_and_workers() -> None:
    view = ExtractView()
    assert "so far" in draw(view)
    (line,) = view.take(Tokenising(5, None))
    assert (line.text, line.drawn, line.paced) == ("tokenising: 5 rows", True, True)
    assert "tokenising" in draw(view)
    assert [line.drawn for line in view.take(FORECAST)] == [False] * 4
    assert [line.text for line in view.take(Note("hear, hear"))] == ["hear, hear"]
    (line,) = view.take(progress(500, 100))
    assert (line.event, line.drawn, line.paced, line.values["num_samples"]) == ("progress", True, True, 500)
    text = draw(view)
    for part in ("500 of 1,000", "100 committed", "350,000 of 700,000", "1,234 tokens/s", "343.3 MiB of 4.0 GiB"):
        assert part in text
    assert "GPU 0" in text and "900 tokens/s  running" in text
    assert "GPU 1" in text and "300 tokens/s" not in text and "died" in text
    assert "30 min left" in text
    (line,) = view.take(progress(1000, 1000))
    assert not line.paced
    view.ended = True
    text = draw(view)
    assert "3.4 GiB of 3.4 GiB" in text and "left" not in text and "in all" in text


def test_many_workers_do_not_fill_the_screen() -> None:
    view = ExtractView()
    view.take(FORECAST)
    many = tuple(WorkerProgress(f"CPU worker {n}", "running", 0, 0.0) for n in range(64))
    view.take(Progress(**{**vars(progress(1, 0)), "workers": many}))
    assert "and 48 more" in draw(view)
    assert len(draw(view).splitlines()) < 25


def test_regenerate_says_the_speed_and_what_is_left_out_or_failed() -> None:
    view = RegenerateView()
    event = Answering(num_done=5, num_rows=20, num_left_out=2, num_failed=1, num_tokens=900, tokens_per_second=4321.0)
    [said] = view.take(event)
    told = "5 of 20 conversations done (2 left out, 1 failed), 900 tokens, 4,321 tokens/s"
    assert said.text.startswith(told) and said.values["num_failed"] == 1
    drawn = draw(view)
    assert "5 of 20" in drawn and "2 left out, 1 failed" in drawn and "4,321 tokens/s" in drawn


def test_training_says_the_numbers_and_the_time_left_of_a_step() -> None:
    view = TrainView()
    assert view.take(step_done(1)) == []
    (line,) = view.take("step 1 of 100: loss 2.5")
    assert line.text == "step 1 of 100: loss 2.5", "nothing tells how long a step takes"
    assert view.take(step_done(2, None)) == []
    (line,) = view.take("step 2 of 100 (skipped: not finite): loss none")
    assert (line.event, line.drawn, line.values["step"]) == ("step", True, 2)
    assert line.text.endswith(" s left")
    (line,) = view.take("held out at step 2: loss 2")
    assert (line.event, line.drawn) == ("note", False)
    text = draw(view)
    for part in ("2 of 100", "none", "12,346 tokens/s", "3% of the time waiting for data", "over anchors"):
        assert part in text
    evaluation = {"acceptance_length": 3.1, "real_acceptance_length": 2.95}
    view.take(replace(step_done(3), evaluation=(500, evaluation)))
    assert "over anchors; over rounds held out 3.10, real 2.95 at step 500" in draw(view)


def test_evaluation_draws_the_running_acceptance_length() -> None:
    view = EvaluateView()
    view.take(Decoded(1, 3, 10, None, None))
    (line,) = view.take(Decoded(2, 3, 20, 2.345, 9.5))
    assert line.text.startswith("2 of 3 prompts decoded, acceptance length 2.35")
    assert "2.35  tokens per target forward" in draw(view) and "9.5 tokens/s" in draw(view)
    (line,) = view.take(Decoded(3, 3, 30, 2.0, 9.5))
    assert (line.text, line.paced) == ("3 of 3 prompts decoded, acceptance length 2.00", False)


def test_a_count_of_bytes_has_units_and_a_speed() -> None:
    view = CountView.of_bytes()
    view.take((0, 3 * 2**20))
    (line,) = view.take((2**20, 3 * 2**20))
    assert line.text.startswith("bytes: 1.0 MiB of 3.0 MiB, ")
    assert "1.0 MiB of 3.0 MiB" in draw(view) and "iB/s" in draw(view)
    (line,) = view.take((3 * 2**20, 3 * 2**20))
    assert line.text == "bytes: 3.0 MiB of 3.0 MiB"


def test_a_count_tells_no_time_left_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sample comes after the target has loaded, which tells nothing of the rest."""
    now = [100.0]
    monkeypatch.setattr("dflash_train.commands.drawing.time.monotonic", lambda: now[0])
    view = CountView("samples")
    now[0] = 113.0
    (line,) = view.take((1, 4))
    assert line.text == "samples: 1 of 4" and "left" not in draw(view)
    now[0] = 115.0
    (line,) = view.take((2, 4))
    assert line.text == "samples: 2 of 4, 4 s left"


def test_an_extract_with_nothing_to_run_ends_without_a_bar() -> None:
    view = ExtractView()
    view.take(FORECAST)
    assert "0 of 1,000" in draw(view)
    view.ended = True
    assert "samples" not in draw(view)
    nothing = ExtractView()
    nothing.take(replace(FORECAST, num_pending=0))
    assert "0 of 0" not in draw(nothing)


@pytest.mark.parametrize("width", [20, 40, 79, 250])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    extract, train, evaluate = ExtractView(), TrainView(), EvaluateView()
    events: list[tuple[Any, Any]] = [
        (extract, FORECAST),
        (extract, progress(500, 100)),
        (evaluate, Decoded(1, 2, 3, 4, 5)),
    ]
    events += [(train, step_done(step)) for step in range(1, 60)]
    for view, event in events:
        view.take(event)
    for view in (extract, train, evaluate):
        assert max(map(len, draw(view, width).splitlines())) <= width


def test_curve_keeps_the_shape_of_a_long_run_in_bounded_memory() -> None:
    curve = Curve(size=16)
    for value in range(10_000):
        curve.add(float(value))
        curve.add(None)
    assert len(curve._entries) <= 16
    assert curve.values(8) == sorted(curve.values(8))
    assert curve.text(8)[0] == "▁" and curve.text(8)[-1] == "█" and len(curve.text(8)) == 8
    assert curve.text(3, "_#") == "__#" or curve.text(3, "_#") == "_##"


@pytest.mark.parametrize("values, text", [([], ""), ([3.0], "▁"), ([2.0, 2.0], "▁▁"), ([1.0, 2.0, 0.0], "▅█▁")])
def test_sparkline_runs_from_smallest_to_largest(values: list[float], text: str) -> None:
    curve = Curve()
    for value in values:
        curve.add(value)
    assert curve.text(10) == text


def test_clock_tells_nothing_before_there_is_something_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dflash_train.commands.drawing.time.monotonic", lambda: now[0])
    clock = Clock()
    assert clock.left(1, 10) is None and clock.per_second(1) is None
    clock.begin(20)  # a resumed run: these were done before
    assert clock.left(20, 40) is None
    now[0] = 110.0
    assert (clock.left(25, 40), clock.per_second(25), clock.elapsed) == (30.0, 0.5, 10.0)
