"""`train`: check everything cheap, start one process a device, follow them, and end with one clear result.

The parent computes nothing; it holds the terminal and the signals. Each rank is a fresh process with one device, a log
file of its own and a pipe to the parent, over which the first rank's lines arrive as they are written. A stop signal
goes to all ranks, which agree on the step to stop at. A rank that dies ends the run at once, with its log's last lines.
Under torchrun every process calls `train` itself and is a rank.
"""

import secrets
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.machine.launch import (
    Device,
    Process,
    ProcessGroup,
    TorchrunPlace,
    parse_devices,
    start_processes,
    stop_signals,
    torchrun_place,
    with_compile_cache,
)
from dflash_train.stage2_drafter.checkpoint import Checkpoint, newest_checkpoint
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.events import Progress
from dflash_train.stage2_drafter.preparation import (
    PreparedRun,
    check_initial_weights,
    check_resume,
    planned_segments,
    prepare_run,
)
from dflash_train.stage2_drafter.rank import RANK_FUNCTION, run_rank
from dflash_train.stage2_drafter.run_folder import check_disk_space, run_lock
from dflash_train.store.reader import list_segments, open_manifest

Report = Callable[[str], None]
_POLL_SECONDS = 0.2


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
    checkpoint: Path
    """The newest checkpoint."""
    evaluation: dict[str, Any] | None
    """Held-out evaluation recorded in that checkpoint."""


def train(config: TrainConfig, report: Report = print, progress: Progress = lambda event: None) -> TrainResult:
    """Train a drafter, or go on with the run in config.run; `report` gets one plain line at a time.

    `progress` gets every step, where the first rank's parent (under torchrun, the first rank) calls.

    Raises InputError (and StoreError) for bad input, RankDied where a process died. A first SIGINT or SIGTERM stops
    after the step under way, with a checkpoint; a second SIGINT stops at once.
    """
    place = torchrun_place()
    if place is not None:
        return _train_under_torchrun(config, place, report if place.rank == 0 else lambda line: None, progress)
    devices = parse_devices(config.devices)
    open_manifest(config.store)  # what is no store is refused before the run folder is made
    # only to refuse early: the first rank holds the lock while it trains; what cannot be prepared leaves no folder
    with run_lock(config.run) if config.run.exists() else nullcontext():
        run = prepare_run(config, planned_segments(config.run))
        checkpoint = check_resume(run)
        if checkpoint is None:
            check_initial_weights(run)
        check_disk_space(config.run, _num_parameters(run), config.keep)
    if checkpoint is not None and checkpoint.step >= run.total_steps:
        report(f"the run is complete at step {checkpoint.step}; give more --steps or --epochs to go on")
        return _result(config, run.total_steps, stopped=False)
    _describe(run, checkpoint, devices, report)
    stopped = _follow(config, devices, report, progress)
    result = _result(config, run.total_steps, stopped)
    if stopped:
        report(f"stopped at step {result.step} of {result.total_steps}; run again to go on")
    return result


def _follow(config: TrainConfig, devices: list[Device], report: Report, progress: Progress) -> bool:
    """Start the ranks and pass on what they say until all have ended; returns whether they were stopped."""
    world = len(devices)
    # on this machine's own disk: the run folder may be on a network file system, where file locks are unreliable
    rendezvous = Path(tempfile.gettempdir()) / f"dflash-rendezvous-{secrets.token_hex(8)}"
    arguments = [
        {
            "config": config,
            "rank": rank,
            "world": world,
            "device": device.torch_device,
            "rendezvous": rendezvous.as_uri(),
        }
        for rank, device in enumerate(devices)
    ]
    cache = config.run.resolve() / "compile-cache"
    caches = [
        device if device.torch_device == "cpu" else with_compile_cache(device, cache / f"rank-{rank}")
        for rank, device in enumerate(devices)
    ]
    stopped = False
    try:
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
    finally:
        rendezvous.unlink(missing_ok=True)
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


def _train_under_torchrun(config: TrainConfig, place: TorchrunPlace, report: Report, progress: Progress) -> TrainResult:
    """Be one rank of those that torchrun started; the rendezvous is torchrun's."""
    import torch

    device = f"cuda:{place.local_rank}" if torch.cuda.is_available() else "cpu"
    with stop_signals() as stop:
        stopped = run_rank(config, place.rank, place.world, device, "env://", report, stop.is_set, progress)
    total = prepare_run(config, planned_segments(config.run)).total_steps
    result = _result(config, total, stopped)
    if stopped:
        report(f"stopped at step {result.step} of {result.total_steps}; run again to go on")
    return result


def _num_parameters(run: PreparedRun) -> int:
    from dflash_train.stage2_drafter.drafter import Drafter

    return sum(
        parameter.numel()
        for parameter in Drafter(
            run.drafter_config, seed=None, num_features=run.reader.encoding.num_features
        ).parameters()
    )


def _describe(run: PreparedRun, checkpoint: Checkpoint | None, devices: list[Device], report: Report) -> None:
    config, reader = run.config, run.reader
    total = len(reader.samples)
    report(
        f"{run.num_training} samples to train on and {total - run.num_training} held out, in rows of "
        f"{config.row_tokens} tokens with {config.anchors} anchors; {run.total_steps} steps of {config.rows_per_step} "
        f"rows on {', '.join(device.label for device in devices)}; mask token {run.drafter_config.mask_token_id}"
    )
    newer = len(list_segments(reader.path)) - len(reader.segment_ids)
    if newer > 0:
        report(f"{newer} segments came into the store after this run began; it goes on with those it began with")
    if checkpoint is not None:
        report(f"going on from {checkpoint.path}")
        if devices[0].torch_device != "cpu" and not (config.run / "compile-cache").exists():
            report("no compile cache in the run folder: kernels are compiled again, and last bits may differ")


def _result(config: TrainConfig, total_steps: int, stopped: bool) -> TrainResult:
    checkpoint = newest_checkpoint(config.run)
    assert checkpoint is not None, "training ends with a checkpoint"
    return TrainResult(
        run=config.run,
        step=checkpoint.step,
        total_steps=max(total_steps, checkpoint.step),
        stopped=stopped,
        checkpoint=checkpoint.path,
        evaluation=checkpoint.state().evaluation,
    )
