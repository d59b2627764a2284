"""One rank: a process with one device. It joins the others, agrees with them on ledger and checkpoint, and trains.

Rank 0 decides which segments the run trains on and which checkpoint it goes on from, and holds the run folder's lock.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from dflash_train.errors import InputError
from dflash_train.machine.compile_cache import compile_cache_folder, has_compiled_kernels
from dflash_train.stage2_drafter.checkpoint import Checkpoint
from dflash_train.stage2_drafter.collectives import Rank
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.events import Progress, StepDone
from dflash_train.stage2_drafter.follow import LedgerDiffers, segments_to_open
from dflash_train.stage2_drafter.measurement import Measurement
from dflash_train.stage2_drafter.preparation import (
    CountedRows,
    PreparedRun,
    check_resume,
    prepare_ahead,
    prepare_run,
)
from dflash_train.stage2_drafter.run_checkpoints import newest_checkpoint, prune_checkpoints
from dflash_train.stage2_drafter.run_folder import (
    Round,
    read_ledger,
    read_rounds,
    rewind_metrics,
    run_lock,
    start_ledger,
)
from dflash_train.store.consumed import consumer_lock

RANK_FUNCTION = f"{__name__}.train_rank"
COLLECTIVE_TIMEOUT = timedelta(hours=6)
"""How long ranks wait for one another in a collective, in place of NCCL's 10 minutes and gloo's 30: the first rank saves (15
GB for Qwen3-8B's drafter, 25 minutes to a network disk of 10 MB/s), or loads a target and decodes with it, while the others
stand in the next all-reduce. It need not tell of a rank that died: the parent notices the end of its process
(train.py, `_check_end`), and under torchrun the agent of its machine does; both end the ranks beside it. On other machines
its connections break. Only a machine that falls silent with its connections open is waited for this long.
"""


def train_rank(
    connection: Connection,
    config: TrainConfig,
    rank: int,
    world: int,
    device: str,
    rendezvous: str,
    measurement: Measurement | None = None,
    counted: CountedRows | None = None,
) -> None:
    """Body of one rank's process: ("line", text), ("step", StepDone), ("done", stopped) go up, "stop" comes down."""
    stop = threading.Event()  # nobody waits for it: the flag outlives the message

    def stop_requested() -> bool:
        while connection.poll():
            connection.recv()  # the only message there is; a closed pipe raises, and the parent is gone
            stop.set()
        return stop.is_set()

    def report(line: str) -> None:
        connection.send(("line", line))

    def progress(event: StepDone) -> None:
        connection.send(("step", event))

    try:
        stopped = run_rank(
            config, rank, world, device, rendezvous, report, stop_requested, progress, measurement, counted
        )
        connection.send(("done", stopped))
    except InputError as error:
        connection.send(("input_error", str(error)))


def run_rank(
    config: TrainConfig,
    rank: int,
    world: int,
    device_name: str,
    rendezvous: str,
    report: Callable[[str], None],
    stop_requested: Callable[[], bool],
    progress: Progress = lambda event: None,
    measurement: Measurement | None = None,
    counted: CountedRows | None = None,
    announce: Callable[[PreparedRun, Checkpoint | None], None] = lambda run, checkpoint: None,
) -> bool:
    """Join the other ranks, agree on ledger and checkpoint, train; returns whether a stop signal ended it.

    counted: for the first rank, what its parent has found; without it the first rank counts, for all. announce: called
    by the first rank before anything is loaded; it may refuse the run.
    """
    from dflash_train.stage2_drafter.row_forward import RowForward
    from dflash_train.stage2_drafter.trainer import Trainer

    device = torch.device(device_name)
    place = Rank(rank=rank, world=world, device=device)
    compiles_again = _compiles(device) and not has_compiled_kernels()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(run_lock(config.run))
        if world > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            torch.distributed.init_process_group(
                backend, init_method=rendezvous, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT
            )
        agreed: dict[str, Any] = {}
        run: PreparedRun | None = None
        if rank == 0:
            if config.consume is not None:
                stack.enter_context(consumer_lock(config.store_folder))
            prune_checkpoints(config.run, config.keep)
            newest = newest_checkpoint(config.run)
            if config.follow:
                agreed = _plan_following(config, newest)
            else:
                run = prepare_ahead(config, counted)
                agreed = _plan_segments(run)
            agreed["checkpoint"] = None if newest is None else newest.path.name
        agreed = place.broadcast(agreed)
        if run is None:
            rounds = [Round.from_json(entry) for entry in agreed["rounds"]]
            counted = CountedRows(segments=agreed["segments"], epochs=agreed["epochs"])
            run = prepare_run(config, agreed["segments"], rounds, agreed["first_row"], counted)
        checkpoint = check_resume(run)
        if (None if checkpoint is None else checkpoint.path.name) != agreed["checkpoint"]:
            raise InputError(
                f"Rank {rank} sees another newest checkpoint in {config.run} than rank 0. "
                "Use a run folder that all machines share."
            )
        if rank == 0:
            announce(run, checkpoint)
        forward = RowForward(run, device, world, first_weights=checkpoint is None and config.init_from is None)
        trainer = Trainer(run, place, report, stop_requested, progress, measurement, forward)
        if checkpoint is not None:
            found = place.gather(compiles_again)
            if rank == 0:
                _describe_caches(config, found, report)
            trainer.restore(checkpoint)
        elif config.init_from is not None:
            trainer.start_from(config.init_from)
        if rank == 0:
            rewind_metrics(config.run, trainer.step, evaluated=trainer.evaluator.current is not None)
        stopped = trainer.train()
        if world > 1:
            torch.distributed.barrier()  # nobody leaves the group while rank 0 still saves
            forward.leave_group()
            # Only after success: with a peer gone it may hang, and the process ends anyway.
            torch.distributed.destroy_process_group()
        return stopped


def _compiles(device: torch.device) -> bool:
    """Whether training compiles on this device."""
    return device.type == "cuda"


def _describe_caches(config: TrainConfig, compiles_again: list[bool], report: Callable[[str], None]) -> None:
    """Say which ranks of a run that goes on find none of the kernels that it compiled before."""
    ranks = [rank for rank, again in enumerate(compiles_again) if again]
    if ranks:
        report(
            f"no compile cache of rank {', '.join(map(str, ranks))} in "
            f"{compile_cache_folder(config.run, config.compile_cache)}: kernels are compiled again, and last bits may differ"
        )


def _plan_segments(run: PreparedRun) -> dict[str, Any]:
    """The segments that a run trains on, decided once, and what the first rank knows of their rows."""
    segments = run.reader.segment_ids
    if read_ledger(run.config.run) is None:
        start_ledger(run.config.run, segments)
    return {"segments": segments, "rounds": [], "first_row": 0, "epochs": run.schedule.counted()}


def _plan_following(config: TrainConfig, newest: Checkpoint | None) -> dict[str, Any]:
    """The rounds that a run has decided so far, and the segments to open for those that are not done."""
    rounds = read_rounds(config.run)
    first_row = 0 if newest is None else newest.step * config.rows_per_step
    segments = segments_to_open(config.store_folder, rounds, first_row)
    if rounds and newest is None:  # a start that failed: perhaps with rows too long for the GPU's memory
        try:
            prepare_run(config, segments, rounds, first_row)
        except LedgerDiffers:
            (config.run / "ledger.jsonl").unlink()
            return _plan_following(config, newest)
    return {"segments": segments, "rounds": [entry.to_json() for entry in rounds], "first_row": first_row, "epochs": []}
