"""`train`: check everything cheap, start one process a device, follow them, and end with one clear result.

The parent computes nothing; it holds the terminal and the signals. Each rank is a fresh process with one device, a log
file of its own and a pipe to the parent, over which the first rank's lines arrive as they are written. A stop signal
goes to all ranks, which agree on the step to stop at. A rank that dies ends the run at once, with its log's last lines.
Under torchrun every process calls `train` itself and is a rank.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.machine.compile_cache import compile_cache_folder, with_compile_cache
from dflash_train.machine.devices import Device, parse_devices
from dflash_train.machine.launch import Process, ProcessGroup, start_processes, stop_signals
from dflash_train.machine.rendezvous import rendezvous_file
from dflash_train.machine.torchrun import TorchrunPlace, torchrun_place
from dflash_train.stage2_drafter.checkpoint import Checkpoint
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.events import Progress, Report
from dflash_train.stage2_drafter.measurement import Measurement
from dflash_train.stage2_drafter.opening_lines import describe_run, how_to_go_on
from dflash_train.stage2_drafter.preparation import (
    CountedRows,
    PreparedRun,
    check_initial_weights,
    check_mask_token,
    check_resume,
    prepare_ahead,
)
from dflash_train.stage2_drafter.rank import RANK_FUNCTION, run_rank
from dflash_train.stage2_drafter.run_checkpoints import newest_checkpoint, worse_than_best
from dflash_train.stage2_drafter.run_folder import check_disk_space, run_lock
from dflash_train.store.consumed import consumer_lock
from dflash_train.store.creation import is_locked
from dflash_train.store.opened import list_segments
from dflash_train.store.reader import open_manifest
from dflash_train.units import format_count

_POLL_SECONDS = 0.2
_SAY_SECONDS = 60.0
GRACE_SECONDS = 60.0
"""Two commands started at once: the extract imports for some seconds before it takes the store's lock."""


class RankDied(InputError):
    """A process of the run ended before its work; the message has the last lines of its log."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run of `train` ended."""

    run: Path
    step: int
    """Optimizer steps taken since the run folder was new."""
    total_steps: int
    stopped: bool
    """Whether a stop signal ended it before the last step."""
    checkpoint: Path | None
    """The newest checkpoint; None where a run was stopped before there was a store to follow."""
    evaluation: dict[str, Any] | None
    """Held-out evaluation recorded in that checkpoint."""


def train(
    config: TrainConfig,
    report: Report = print,
    progress: Progress = lambda event: None,
    measurement: Measurement | None = None,
) -> TrainResult:
    """Train a drafter, or go on with the run in config.run; `report` gets one plain line at a time.

    `progress` gets every step, where the first rank's parent (under torchrun, the first rank) calls. `measurement` adds
    the real acceptance length to every evaluation.

    Raises InputError (and StoreError) for bad input, RankDied where a process died. A first SIGINT or SIGTERM stops
    after the step under way, with a checkpoint; a second SIGINT stops at once.
    """
    place = torchrun_place()
    if place is not None:
        return _train_under_torchrun(
            config, place, report if place.rank == 0 else lambda line: None, progress, measurement
        )
    devices = parse_devices(config.devices)
    if config.precision == "fp8" and devices[0].torch_device == "cpu":
        import torch

        from dflash_train.stage2_drafter.fp8 import check_fp8

        check_fp8(torch.device("cpu"), ())  # which refuses it; what a GPU lacks shows in its process
    if config.follow and not _await_store(config.store_folder, report):
        return TrainResult(run=config.run, step=0, total_steps=0, stopped=True, checkpoint=None, evaluation=None)
    open_manifest(config.store)  # what is no store is refused before the run folder is made
    # only to refuse early: the first rank holds the lock while it trains; what cannot be prepared leaves no folder
    with run_lock(config.run) if config.run.exists() else nullcontext():
        run = prepare_ahead(config)
        checkpoint = check_resume(run)
        lines = _check_start(run, checkpoint, measurement)
    where = ", ".join(device.label for device in devices)
    done = checkpoint is not None and checkpoint.step >= run.total_steps and _is_closed(run)
    if checkpoint is not None and done and not _removals_left(run, checkpoint.step):
        report(f"the run is complete at step {checkpoint.step}; {how_to_go_on(run, checkpoint.step)}")
        return _result(config, run.total_steps, stopped=False)
    if config.consume is not None:
        with consumer_lock(config.store_folder):  # only to refuse early: the first rank holds it while it trains
            pass
    describe_run(run, checkpoint, where, report)
    for line in lines:
        report(line)
    stopped = _follow(config, devices, report, progress, measurement, run.counted())
    return _finish(config, prepare_ahead(config).total_steps if config.follow else run.total_steps, stopped, report)


def _await_store(store: Path, report: Report) -> bool:
    """Wait until an extract has made the store; False where a stop signal came first.

    Raises StoreError as `open_manifest` does if nobody is making it: an extract holds its lock from the first second on.
    """
    began, said, asked = time.monotonic(), -math.inf, -math.inf
    with stop_signals() as stop:
        while not store.exists():
            now = time.monotonic()
            if now - began > GRACE_SECONDS and now - asked > GRACE_SECONDS:
                asked = now
                if not is_locked(store):
                    open_manifest(store)
            if now - said > _SAY_SECONDS:
                report(f"waiting for the store: {store} is not there yet")
                said = now
            if stop.wait(_POLL_SECONDS):
                report("stopped before there was a store; run again to go on")
                return False
    return True


def _is_closed(run: PreparedRun) -> bool:
    """Whether no more rows come to a run than those its total is made of."""
    return run.following is None or run.config.steps is not None or run.following.schedule.closed


def _removals_left(run: PreparedRun, step: int) -> bool:
    """Whether a run whose steps are done was killed before it removed all that it consumes."""
    if run.following is None or run.config.consume is None:
        return False
    due = run.following.due(step * run.config.rows_per_step)
    return not set(due).isdisjoint(list_segments(run.config.store_folder))


def _follow(
    config: TrainConfig,
    devices: list[Device],
    report: Report,
    progress: Progress,
    measurement: Measurement | None,
    counted: CountedRows,
) -> bool:
    """Start the ranks and pass on what they say until all have ended; returns whether they were stopped."""
    with rendezvous_file() as rendezvous:
        return _follow_ranks(config, devices, report, progress, measurement, counted, rendezvous.as_uri())


def _follow_ranks(
    config: TrainConfig,
    devices: list[Device],
    report: Report,
    progress: Progress,
    measurement: Measurement | None,
    counted: CountedRows,
    rendezvous: str,
) -> bool:
    world = len(devices)
    arguments = [
        {
            "config": config,
            "rank": rank,
            "world": world,
            "device": device.torch_device,
            "rendezvous": rendezvous,
            "measurement": measurement if rank == 0 else None,
            "counted": counted if rank == 0 else None,
        }
        for rank, device in enumerate(devices)
    ]
    cache = compile_cache_folder(config.run, config.compile_cache)
    caches = [with_compile_cache(device, cache, rank) for rank, device in enumerate(devices)]
    stopped = False
    with (
        start_processes(RANK_FUNCTION, arguments, caches, config.run / "logs", "rank") as group,
        stop_signals() as stop,
    ):
        told = False
        while group.running:
            for process, message in group.wait(_POLL_SECONDS):
                if message is None:
                    _check_end(process, group)
                elif message[0] == "line":
                    report(message[1])
                elif message[0] == "step":
                    progress(message[1])
                elif message[0] == "input_error":
                    raise InputError(message[1])
                else:
                    stopped = bool(message[1])
            if stop.is_set() and not told:
                told = True
                report("stopping after the step under way; once more to stop at once")
                for process in group.running:
                    process.send("stop")
    return stopped


def _check_end(process: Process, group: ProcessGroup) -> None:
    """Raise what ended the run, which stops the other ranks, where a rank ended with a failure.

    A rank that lost its peer fails too, sometimes first: bad input, then a kill, is the cause where there is one.
    """
    if process.popen.poll() == 0:
        return
    dead = [process]
    for other, message in group.wait(1.0):
        if message is None:
            dead.append(other)
        elif message[0] == "input_error":
            raise InputError(message[1])
    cause = next((one for one in dead if (one.popen.poll() or 0) < 0), process)
    raise RankDied(f"Rank {cause.index} died, and the run with it: {cause.describe_end()}. Run again to go on.")


def _train_under_torchrun(
    config: TrainConfig,
    place: TorchrunPlace,
    report: Report,
    progress: Progress,
    measurement: Measurement | None,
) -> TrainResult:
    """Be one rank of those that torchrun started; the rendezvous is torchrun's.

    Its compile cache is the caller's to choose, by `use_compile_cache` before torch is imported, as the command does.
    """
    import torch

    device = f"cuda:{place.local_rank}" if torch.cuda.is_available() else "cpu"
    if config.follow and not _await_store(config.store_folder, report):
        return TrainResult(run=config.run, step=0, total_steps=0, stopped=True, checkpoint=None, evaluation=None)

    def announce(run: PreparedRun, checkpoint: Checkpoint | None) -> None:
        """What `train` checks and says before it starts ranks of its own."""
        lines = _check_start(run, checkpoint, measurement)
        describe_run(run, checkpoint, f"{format_count(place.world, 'rank')} of torchrun", report)
        for line in lines:
            report(line)

    with stop_signals() as stop:
        stopped = run_rank(
            config,
            place.rank,
            place.world,
            device,
            "env://",
            report,
            stop.is_set,
            progress,
            measurement,
            announce=announce,
        )
    return _finish(config, prepare_ahead(config).total_steps if config.follow else config.steps, stopped, report)


def _check_start(run: PreparedRun, checkpoint: Checkpoint | None, measurement: Measurement | None) -> list[str]:
    """Refuse a mask token that stands in text, first weights that do not fit, and a disk that is too small; returns what
    the measurement has to say."""
    if checkpoint is None:
        check_mask_token(run)
        check_initial_weights(run)
    check_disk_space(run.config.run, _num_parameters(run), run.config.keep)
    return [] if measurement is None else measurement.check(run)


def _num_parameters(run: PreparedRun) -> int:
    from dflash_train.stage2_drafter.drafter import Drafter

    return sum(
        parameter.numel()
        for parameter in Drafter(
            run.drafter_config, seed=None, num_features=run.reader.encoding.num_features
        ).parameters()
    )


def _finish(config: TrainConfig, total_steps: int | None, stopped: bool, report: Report) -> TrainResult:
    """Say how the run ended, and return it."""
    result = _result(config, total_steps, stopped)
    if stopped:
        report(f"stopped at step {result.step} of {result.total_steps}; run again to go on")
    elif (worse := worse_than_best(config.run)) is not None:
        report(f"warning: {worse}")
    return result


def _result(config: TrainConfig, total_steps: int | None, stopped: bool) -> TrainResult:
    """How the run ended; total_steps is None where rows must be counted for it: then it is the newest checkpoint's."""
    checkpoint = newest_checkpoint(config.run)
    assert checkpoint is not None, "training ends with a checkpoint"
    state = checkpoint.state()
    return TrainResult(
        run=config.run,
        step=checkpoint.step,
        total_steps=max(state.total_steps if total_steps is None else total_steps, checkpoint.step),
        stopped=stopped,
        checkpoint=checkpoint.path,
        evaluation=state.evaluation,
    )
