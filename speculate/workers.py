"""Evaluation on several devices: a process each, which takes the next prompts when it has finished some."""

from __future__ import annotations

import logging
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.machine.devices import Device
from dflash_train.machine.launch import Process, start_processes, stop_signals
from dflash_train.speculate.answering import run_facts
from dflash_train.speculate.evaluate import EvaluateConfig, Outcome, decoded_event, load_decoder
from dflash_train.speculate.events import Progress
from dflash_train.speculate.prompts import Prompt
from dflash_train.units import format_count

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Loaded:
    """Worker: send prompts."""

    facts: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """Worker: it cannot go on, for a reason that the user has to settle."""

    error: InputError


def run_worker(
    connection: Connection, config: EvaluateConfig, folder: Path, prompts: Sequence[Prompt], device: str
) -> None:
    """Body of a worker process: load, then answer the prompts whose positions arrive, until None does."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        decoder = load_decoder(config, folder, device)
        decoder.warm_up(prompts[0])
        connection.send(Loaded(run_facts(decoder.target, decoder.is_recurrent)))
        while (unit := connection.recv()) is not None:
            connection.send(decoder.run_all(unit, prompts))
    except InputError as error:
        connection.send(Failed(error))
        raise SystemExit(1) from error


def run_workers(
    config: EvaluateConfig,
    folder: Path,
    prompts: Sequence[Prompt],
    units: Sequence[tuple[int, ...]],
    devices: Sequence[Device],
    outcome: Outcome,
    report: Progress,
) -> None:
    """Fill `outcome`, one unit of prompts after the other to each worker, until all prompts are answered, a signal ends it, or no worker is left.

    A unit that a worker died of is given to another one once. Raises InputError where a worker says so.
    """
    waiting, given_again = deque(units), set[tuple[int, ...]]()
    under_way: dict[Process, tuple[int, ...] | None] = {}
    report(f"{format_count(len(devices), 'worker')} will load {config.target.name}")
    with tempfile.TemporaryDirectory(prefix="dflash-evaluate-") as logs:  # what matters of them is told when one dies
        arguments = {"config": config, "folder": folder, "prompts": list(prompts)}
        with (
            start_processes(
                f"{__name__}.run_worker",
                [{**arguments, "device": device.torch_device} for device in devices],
                devices,
                Path(logs),
            ) as group,
            stop_signals() as stop,
        ):
            while group.running and (waiting or any(unit is not None for unit in under_way.values())):
                for process in [process for process, unit in under_way.items() if unit is None and waiting]:
                    under_way[process] = waiting.popleft()
                    process.send(under_way[process])
                for process, message in group.wait(POLL_SECONDS):
                    match message:
                        case Loaded(facts):
                            outcome.facts = outcome.facts or facts
                            under_way[process] = None
                        case list():
                            under_way[process] = None
                            outcome.results += message
                            report(decoded_event(outcome.results, len(prompts)))
                        case Failed(error):
                            raise error
                        case None:
                            outcome.failures.append(process.describe_end())
                            report(outcome.failures[-1])
                            lost = under_way.pop(process, None)
                            if lost is not None and lost not in given_again:
                                given_again.add(lost)
                                waiting.appendleft(lost)
                if stop.is_set():
                    outcome.interrupted = True
                    group.stop(0.0)
                    break
            for process in group.running:
                process.send(None)
