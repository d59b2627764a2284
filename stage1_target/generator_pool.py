"""Generators on several devices: deal batches of questions, take answers, survive workers that die."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from dflash_train.errors import InputError
from dflash_train.machine.devices import parse_devices
from dflash_train.machine.launch import Process, start_processes
from dflash_train.stage1_target import messages
from dflash_train.stage1_target.answering import Run
from dflash_train.stage1_target.dialogue import Dialogue
from dflash_train.stage1_target.events import Note
from dflash_train.stage1_target.generator import Generate, Generated, Generating
from dflash_train.units import format_count

WINDOW_BATCHES = 16
"""Batches of like length are cut from this many at a time, so that little is padding and memory stays small."""

SAY_SECONDS = 10.0
"""At least, between two lines about answers under way, however many workers there are."""


@dataclass
class Batch:
    """Questions that one worker answers together."""

    number: int
    dialogues: list[Dialogue]
    num_deaths: int = 0
    """Workers that died while they answered it."""


def plan_batches(pending: Iterator[Dialogue], batch_size: int) -> Iterator[Batch]:
    """Batches of like number of turns and length, read as they are needed."""
    numbers = itertools.count()
    while window := list(itertools.islice(pending, batch_size * WINDOW_BATCHES)):
        window.sort(key=_size)
        for first in range(0, len(window), batch_size):
            yield Batch(next(numbers), window[first : first + batch_size])


def _size(dialogue: Dialogue) -> tuple[int, int]:
    messages_of = itertools.chain.from_iterable(dialogue.turns)
    return len(dialogue.turns), sum(len(str(message.get("content", ""))) for message in messages_of)


def run_generators(run: Run, pending: Iterator[Dialogue], stop: threading.Event) -> None:
    """Start a worker a device and answer all pending dialogues. Raises InputError where no worker can go on.

    One batch a worker is under way: the pause between two is a write, far shorter than a batch.
    """
    config = run.config
    devices = parse_devices(config.devices)
    folder = config.log_folder or config.output.with_name(config.output.name + ".logs")
    logs = folder / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    run.report(Note(f"{format_count(len(devices), 'worker')} will load the target; logs are in {logs}"))
    batches, again = plan_batches(pending, config.batch_size), deque[Batch]()
    dealt: dict[Process, Batch | None] = {}  # what each loaded worker answers
    fatal: InputError | None = None
    finishing = exhausted = False
    said = -math.inf

    with start_processes(
        "dflash_train.stage1_target.generator.run_generator",
        [{"config": config, "device": device.torch_device} for device in devices],
        devices,
        logs,
    ) as group:
        while group.running:
            for process in [process for process, batch in dealt.items() if batch is None and not finishing]:
                batch = again.popleft() if again else next(batches, None)
                if batch is None:
                    exhausted = True
                    break
                dealt[process] = batch
                process.send(Generate(batch.number, batch.dialogues))
            if stop.is_set() and not finishing:
                run.report(Note("stopping: batches under way are dropped, and asked again by the next run"))
            done = exhausted and not again and not any(dealt.values())
            if not finishing and (stop.is_set() or done or fatal is not None):
                finishing = True
                for process in group.running:
                    process.send(messages.Finish())
            for process, message in group.wait(0.2):
                match message:
                    case messages.Loaded():
                        dealt[process] = None
                        if not run.num_tokens:
                            run.started = time.monotonic()
                    case Generating(num_answers, num_tokens):
                        if time.monotonic() - said >= SAY_SECONDS:
                            said = time.monotonic()
                            answers = format_count(num_answers, "answer")
                            run.report(
                                Note(f"{answers} under way: {num_tokens:,} of at most {config.max_new_tokens:,} tokens")
                            )
                    case Generated(number, outcomes):
                        batch = dealt[process]
                        assert batch is not None and batch.number == number, "a worker answers what it was dealt"
                        dealt[process] = None
                        run.add(outcomes)
                    case messages.Failed(error):
                        fatal = fatal or error
                    case None:
                        lost = dealt.pop(process, None)
                        if process.popen.returncode and fatal is None:
                            run.failures.append(process.describe_end())
                            run.report(Note(run.failures[-1]))
                            if lost is not None and _try_again(run, lost):
                                again.append(lost)
    if fatal is not None:
        raise fatal


def _try_again(run: Run, batch: Batch) -> bool:
    """Whether the batch of a dead worker is dealt once more; what two workers died of is given up."""
    batch.num_deaths += 1
    if batch.num_deaths < 2:
        return True
    count = format_count(len(batch.dialogues), "conversation")
    run.failures.append(f"{count} were given up: two workers died while answering them")
    return False
