"""What a run says of itself before its first step, or instead of one where its steps are done."""

from pathlib import Path

from dflash_train.stage2_drafter.checkpoint import Checkpoint
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.events import Report
from dflash_train.stage2_drafter.preparation import PreparedRun
from dflash_train.store.consumed import read_consumed
from dflash_train.store.files import StoreError
from dflash_train.store.opened import list_segments
from dflash_train.store.plan import read_plan
from dflash_train.units import format_count


def describe_run(run: PreparedRun, checkpoint: Checkpoint | None, where: str, report: Report) -> None:
    """Report what a run trains on, in what steps, and what it goes on from. where: its devices, in words."""
    config, reader = run.config, run.reader
    if run.following is not None:
        _describe_following(run, checkpoint, where, report)
        return
    total = len(reader.samples)
    report(
        f"{format_count(run.num_training, 'sample')} to train on and {total - run.num_training} held out, in "
        f"{_describe_rows(config)}; {format_count(run.total_steps, 'step')} of "
        f"{format_count(config.rows_per_step, 'row')} on {where}; mask token {run.drafter_config.mask_token_id}"
    )
    stores = (config.store, *config.more_stores)
    newer = sum(len(list_segments(store)) for store in stores if isinstance(store, Path)) - len(reader.segment_ids)
    if newer > 0:
        report(
            f"{format_count(newer, 'segment')} came into the store after this run began; it goes on with those it began with"
        )
    _describe_consumed(run, report)
    _describe_resume(checkpoint, report)


def _describe_rows(config: TrainConfig) -> str:
    drawn = f"{config.anchors} anchors by {config.anchors_by}"
    return f"rows of {config.row_tokens} tokens with {drawn}, loss {config.loss}"


def _describe_consumed(run: PreparedRun, report: Report) -> None:
    """Say how many samples a run lacks because another one consumed them; held-out ones that it copied are there."""
    stores = (run.config.store, *run.config.more_stores)
    try:
        consumed = {identity for store in stores for identity in read_consumed(store).ids}
    except StoreError as error:  # extracts need the records, this run does not
        report(f"warning: {error}")
        return
    gone = len(consumed.difference(run.reader.samples["id"].tolist()))
    if gone:
        report(
            f"this run lacks the {format_count(gone, 'sample')} that a run with --consume removed from the store; to have "
            "them, remove its folder consumed/ and extract again"
        )


def _describe_following(run: PreparedRun, checkpoint: Checkpoint | None, where: str, report: Report) -> None:
    config, plan = run.config, read_plan(run.config.store_folder)
    data = (
        "a store without a plan" if plan is None else f"a store of {plan.samples:,} samples when its extract has ended"
    )
    passes = "removed after" if config.consume is not None else "for"
    count = config.consume or config.num_epochs
    ends = (
        format_count(config.steps or 0, "step")
        if count is None
        else f"{passes} {count} pass{'' if count == 1 else 'es'}"
    )
    report(
        f"following {data}, {ends}; {_describe_rows(config)}, {format_count(config.rows_per_step, 'row')} a step on "
        f"{where}; mask token {run.drafter_config.mask_token_id}"
    )
    _describe_resume(checkpoint, report)


def _describe_resume(checkpoint: Checkpoint | None, report: Report) -> None:
    if checkpoint is not None:
        report(f"going on from {checkpoint.path}")


def how_to_go_on(run: PreparedRun, step: int) -> str:
    """What makes a run train on whose steps are done."""
    if run.following is None:
        return "give more --steps or --epochs to go on"
    schedule = run.following.schedule
    if not schedule.closed or schedule.num_planned > step * run.config.rows_per_step:
        return "give more --steps to go on"
    return (
        "its rounds over the store are done and closed, which more --steps or --epochs do not change: to train on, give "
        f"another --run and --init-from {run.config.run}"
    )
