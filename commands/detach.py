"""`--detach`, and the state that extract and train-drafter keep for `dflash status`, with or without it."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from dflash_train.commands.terminal import Failure, say
from dflash_train.machine.launch import last_lines
from dflash_train.machine.run_state import RunState
from dflash_train.machine.runs import Recorder, await_first_progress, recording, start_detached
from dflash_train.machine.torchrun import torchrun_place

_DETACH, _RECORDER = f"{__name__}.detach", f"{__name__}.recorder"
_SAY_SECONDS = 10.0

Function = Callable[..., None]
Places = Callable[[Mapping[str, Any]], tuple[Path, Path]]


def detachable(places: Places) -> Callable[[Function], Function]:
    """Add --detach to a command and record its run; place it directly above the function.

    `places` makes the folder of the state file and the folder of the logs from the command's parameters.
    """

    def remember(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        context.meta[_DETACH] = value

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(**parameters: Any) -> None:
            context = click.get_current_context()
            folder, logs = places(parameters)
            name = context.info_name or ""
            if context.meta[_DETACH]:
                _detach(name, parameters, folder, logs)
                return
            recorder = Recorder(folder, name, logs)
            context.meta[_RECORDER] = recorder
            try:
                with recording(recorder):
                    function(**parameters)
            finally:
                if recorder.stop_asked:
                    say("stopped before any batch or step was under way")

        option = click.option(
            "--detach",
            is_flag=True,
            expose_value=False,
            callback=remember,
            help="Run on without this terminal; return when the first batch or step is done, or the start failed.",
        )
        return option(command)

    return decorate


def current_recorder() -> Recorder:
    """The recorder of the running command, which `detachable` made."""
    recorder = click.get_current_context().meta[_RECORDER]
    assert isinstance(recorder, Recorder)
    return recorder


def recorded_extract(report: Callable[[Any], None]) -> Callable[[Any], None]:
    """`report` for extract, which also keeps the state of the running command; call it for a run that stores."""
    from dflash_train.stage1_target.events import Note, Progress, Tokenising
    from dflash_train.stage1_target.forecast import Forecast

    recorder = current_recorder()

    def record(event: Any) -> None:
        if isinstance(event, Forecast | Progress) or (
            isinstance(event, Tokenising) and event.num_done != event.num_rows
        ):
            recorder.begin()  # not before: what the first checks refuse leaves nothing behind
        if isinstance(event, Note) and recorder.begun:
            recorder.note(event.text)
        elif isinstance(event, Progress):
            recorder.progress(
                unit="samples",
                done=event.num_samples,
                total=event.num_pending,
                committed=event.num_committed,
                committed_bytes=event.num_committed_bytes,
                tokens=event.num_tokens,
                tokens_per_second=event.tokens_per_second,
                hours_left=event.hours_left,
                workers=event.num_workers,
                line=event.line(),
            )
        report(event)

    return record


def recorded_training(
    report: Callable[[str], None], progress: Callable[[Any], None] = lambda event: None
) -> tuple[Callable[[str], None], Callable[[Any], None]]:
    """`report` and `progress` for train, which also keep the state of the running command."""
    recorder = current_recorder()
    began: list[tuple[float, int]] = []  # when the first step of this process was done, and which it was

    def record_line(line: str) -> None:
        recorder.note(line)
        report(line)

    def record_step(event: Any) -> None:
        now = time.monotonic()
        if not began:
            began.append((now, event.step))
        (first_at, first), values = began[0], event.values
        seconds = (now - first_at) / (event.step - first) if event.step > first else event.seconds  # with saving
        recorder.progress(
            unit="steps",
            done=event.step,
            total=event.total_steps,
            tokens_per_second=values["tokens_per_second"],
            hours_left=(event.total_steps - event.step) * seconds / 3600,
            loss=values["loss"],
            acceptance_length=values["acceptance_length"],
            line=f"step {event.step:,} of {event.total_steps:,}",
        )
        progress(event)

    return record_line, record_step


def _detach(name: str, parameters: Mapping[str, Any], folder: Path, logs: Path) -> None:
    """Start the same command in its own session, wait for its first progress, and say how it went."""
    if parameters.get("dry_run"):
        raise click.UsageError("--dry-run ends by itself before anything is loaded: leave --detach out.")
    if torchrun_place() is not None:
        raise click.UsageError("torchrun owns its processes: start torchrun itself with `setsid nohup`, not --detach.")
    log = logs / f"console-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    popen = start_detached([word for word in sys.argv[1:] if word != "--detach"], log)
    say(f"starting, until the first batch or step is done; it logs to {log}")
    began, said = time.monotonic(), time.monotonic()

    def waiting() -> None:
        nonlocal said
        if time.monotonic() - said >= _SAY_SECONDS:
            said = time.monotonic()
            say(f"still starting, for {said - began:.0f} s: {_last_line(log) or 'its log has no line yet'}")

    try:
        state = await_first_progress(popen, folder / "state.json", waiting)
    except KeyboardInterrupt:
        click.echo(f"Not waited for; process {popen.pid} goes on. {_hints(name, parameters)}", err=True)
        raise
    code = popen.poll()
    if code:
        _fail(code, log, state)
    click.echo(_describe(state, popen.pid, code))
    click.echo(_hints(name, parameters))


def _last_line(log: Path) -> str:
    """The last line of a log without its time of day: the line that quotes it has one."""
    return re.sub(r"^\d\d:\d\d:\d\d  ", "", " ".join(last_lines(log, 1)))


def _describe(state: RunState | None, pid: int, code: int | None) -> str:
    if code is not None:
        return f"finished already: {state.message if state is not None else 'nothing was to do'}"
    assert state is not None and state.progress is not None, "a running process is waited for until it has progress"
    return f"process {pid} runs: {state.progress['line']}"


def _hints(name: str, parameters: Mapping[str, Any]) -> str:
    import shlex

    folder = shlex.quote(str(parameters["store" if name == "extract" else "run"]))
    return f"Watch it: dflash status {folder}; dflash logs -f {folder}. End it: dflash stop {folder}"


def _fail(code: int, log: Path, state: RunState | None) -> None:
    how = f"exit status {code}" if code > 0 else f"killed by signal {-code}"
    lines = "".join(f"\n  {line}" for line in last_lines(log, 10)) or " none"
    when = "soon" if state is not None and state.progress is not None else "before any batch or step was done"
    raise Failure(f"The run ended {when} ({how}); the last lines of {log}:{lines}")
