"""The training loop of one rank: rows in, optimizer steps out, all ranks in lock-step.

A step is R rows, one forward and backward each. What the ranks must agree on (the loss's denominator Σ w, the stop
signal, rows that are not finite) travels in one all-reduce after the last row, so they also skip, stop and save at the
same step. How a row becomes a loss is row_forward.py's.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.broadcast import broadcast_json
from dflash_train.stage2_drafter.checkpoint import (
    Checkpoint,
    TrainerState,
    export_tensors,
    load_masters,
    prune_checkpoints,
    read_groups,
    record_evaluation,
    save_checkpoint,
)
from dflash_train.stage2_drafter.events import Progress, StepDone
from dflash_train.stage2_drafter.follow import remove_consumed
from dflash_train.stage2_drafter.initial_weights import initial_weights
from dflash_train.stage2_drafter.measurement import Measurement
from dflash_train.stage2_drafter.metrics import MetricsLog, StepNumbers, StepSums, format_evaluation, format_step
from dflash_train.stage2_drafter.optimizer import (
    gradient_norm,
    learning_rate,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    scale_and_clip,
    set_learning_rate,
)
from dflash_train.stage2_drafter.preparation import PreparedRun
from dflash_train.stage2_drafter.round_planner import RoundPlanner
from dflash_train.stage2_drafter.row_forward import RowForward
from dflash_train.stage2_drafter.row_loader import Row, RowBuffer, RowBuilder, RowLoader
from dflash_train.stage2_drafter.rows import GrowingSchedule, RowKey
from dflash_train.stage2_drafter.run_folder import Round, append_rounds, rewind_metrics
from dflash_train.stage2_drafter.versions import package_versions
from dflash_train.units import format_count

RANDOM_RULE = "rows: (seed, 0, epoch); anchors: (seed, 1, epoch, row, held out); first weights: seed, kind of device"
_NAMED_SAMPLES = 20


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Which of the run's processes this is, and its device."""

    rank: int = 0
    world: int = 1
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))


class Trainer:
    """One rank. report gets one plain line at a time, on rank 0 alone; stop_requested is asked once a step.

    progress gets every step, and measurement is asked at every evaluation, on rank 0 alone. forward is how a row becomes a
    loss, where it is not the run's own.
    """

    def __init__(
        self,
        run: PreparedRun,
        rank: Rank,
        report: Callable[[str], None],
        stop_requested: Callable[[], bool],
        progress: Progress = lambda event: None,
        measurement: Measurement | None = None,
        forward: RowForward | None = None,
    ) -> None:
        """forward: its drafter with first weights, or with none where `restore` or `start_from` follows. None: made here."""
        self.run, self.config, self.rank = run, run.config, rank
        self.report = report if rank.rank == 0 else lambda line: None
        self.stop_requested = stop_requested
        self.versions = package_versions() if rank.rank == 0 else {}  # as they are now, not at the first checkpoint
        self.progress = progress
        self.measurement = measurement if rank.rank == 0 else None
        self.forward = RowForward(run, rank.device, rank.world) if forward is None else forward
        self.named = list(self.forward.drafter.named_parameters())
        self.parameters = [parameter for _, parameter in self.named]
        self.optimizer = make_optimizer(self.named, self.config)
        self.builder = RowBuilder(
            reader=run.reader,
            row_tokens=self.config.row_tokens,
            num_anchors=self.config.anchors,
            block_size=run.drafter_config.block_size,
            mask_token_id=run.drafter_config.mask_token_id,
            seed=self.config.seed,
            sources=(run.schedule, run.holdout),
        )
        self._evaluation_buffers: list[RowBuffer] = []
        self._bad_steps = 0
        self._planner = None if run.following is None or rank.rank else RoundPlanner(run.following, self.report)
        self.step = 0
        self._saved_step = -1
        self._restored: Checkpoint | None = None
        self.evaluation: dict[str, Any] | None = None
        self._newest_evaluation: tuple[int, dict[str, Any]] | None = None
        self._groups = np.empty(0, dtype=np.int64)  # trained on before this process began

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, as far as it is known at this step."""
        following = self.run.following
        return self.run.total_steps if following is None else following.total_steps

    # -- state ---------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint: masters, moments and the step; everything random follows from these."""
        load_masters(self.named, checkpoint.masters(), checkpoint.path)
        load_optimizer_tensors(self.optimizer, self.named, checkpoint.optimizer())
        self.step, self.evaluation = checkpoint.step, checkpoint.state().evaluation
        self._saved_step, self._restored = self.step, checkpoint
        if (groups := read_groups(checkpoint.path)) is not None:
            self._groups = groups

    def start_from(self, path: Path) -> None:
        """Begin a new run with the weights of an existing drafter, on every rank alike."""
        reader = self.run.reader
        initial = initial_weights(path, reader.encoding, reader.calibration, self.rank.device)
        load_masters(self.named, initial.masters, initial.folder)
        self.run.training_groups()  # under torchrun nobody has read the drafter's own list yet: better now than at a save
        self.report(initial.describe())

    def save(self) -> Checkpoint | None:
        """Write a checkpoint and drop old ones, on rank 0; the others go on and wait at the next step's all-reduce."""
        self._saved_step = self.step
        if self.rank.rank != 0:
            return None
        following = self.run.following
        manifest = self.run.reader.manifest
        state = TrainerState(
            step=self.step,
            config=self.config.to_json(),
            drafter=self.run.drafter_config.to_json(),
            store=manifest.to_json(),
            segments=list(self.run.reader.segment_ids),
            total_steps=self.total_steps,
            random_state={"seed": self.config.seed, "rule": RANDOM_RULE},
            versions=self.versions,
            evaluation=self.evaluation,
            rounds=0 if following is None else following.num_rounds,
        )
        checkpoint = save_checkpoint(
            self.config.run,
            state=state,
            masters=dict(self.named),
            optimizer=optimizer_tensors(self.optimizer, self.named),
            encoding=self.run.reader.encoding,
            calibration=self.run.reader.calibration,
            groups=np.union1d(self._groups, self.run.training_groups()),
        )
        prune_checkpoints(self.config.run, self.config.keep)
        self.report(f"saved {checkpoint.path}")
        return checkpoint

    # -- the loop ------------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Run until the last step or a stop signal; returns whether it was stopped. Saves where it ends."""
        config, following = self.config, self.run.following
        stopped = self._extend_rows()
        if following is not None:
            following.activate(max(self.step - 1, 0))  # as it was at the evaluation of the last step
        any_step, first = not stopped and self._rows_left(), self.step
        if any_step:
            self._warm_up()
        buffers = [self._buffer() for _ in range(config.read_ahead if any_step else 0)]
        with contextlib.ExitStack() as stack:
            loader = stack.enter_context(RowLoader(self.builder, self._keys(), buffers))
            stack.callback(self.run.schedule.abandon)
            log, lacks_evaluation = None, any_step and self._lacks_evaluation()
            if self.rank.rank == 0:
                if lacks_evaluation:
                    rewind_metrics(config.run, self.step, evaluated=False)
                log = stack.enter_context(contextlib.closing(MetricsLog(config.run, self.step)))
            rows = iter(loader)
            if lacks_evaluation:
                stopped = self._make_up(log)
            while not stopped:
                began = time.perf_counter()
                stopped = self._extend_rows()
                if following is not None:
                    following.activate(self.step)
                if stopped or self.step >= self.total_steps:
                    break
                waited = time.perf_counter() - began
                values, stopped = self._train_step(loader, rows)
                if following is not None:
                    values["store_wait_seconds"] = waited
                if log is not None:
                    log.write("train", self.step, values)
                    seconds = time.perf_counter() - began
                    self.progress(StepDone(self.step, self.total_steps, seconds, values, self._newest_evaluation))
                if self.step % config.log_every == 0 or self.step in (1, self.total_steps) or self._bad_steps:
                    self.report(
                        format_step(self.step, self.total_steps, values, self._bad_steps, config.bad_step_limit)
                    )
                self.evaluation = None
                if self._evaluation_due() and (self.step == self.total_steps or not stopped):
                    stopped = self._evaluate_and_log(log) or stopped
                if stopped or self._saving_due():
                    self.save()
                    self._consume()
            if self._saved_step != self.step:  # no step was taken, or the last one showed only afterwards
                if self.step and not stopped:
                    self._evaluate_and_log(log)
                self.save()
            self._consume()  # also what a run that was killed after its last checkpoint left
        if following is not None and not stopped and config.holdout > 0 and not self.run.holdout.rows:
            self.report(f"--holdout {config.holdout} has held out none of these samples, so nothing was evaluated")
        closing_line = self.forward.compiled.closing_line(self.step - first)
        if closing_line is not None:
            self.report(closing_line)
        may_go_on = following is not None and config.steps is None and not following.schedule.closed
        return stopped and (may_go_on or self.step < self.total_steps)

    def _rows_left(self) -> bool:
        """Whether a step is to be taken."""
        following, steps = self.run.following, self.config.steps
        if following is None:
            return self.step < self.total_steps
        is_short = steps is None or self.step < steps
        return is_short and following.schedule.num_planned > self.step * self.config.rows_per_step

    def _extend_rows(self) -> bool:
        """Where the store grows, plan rows for the steps ahead; all ranks call it before each step, and wait here if there
        are none for this one. Returns whether a stop was asked for meanwhile."""
        following, rows = self.run.following, self.config.rows_per_step
        if following is None:
            return False
        following.schedule.forget(self.step * rows)
        ahead = (self.step + 2) * rows + self.config.read_ahead * self.rank.world
        while not following.schedule.covers(ahead):
            if self.config.steps is not None and self.step >= self.config.steps:
                return False
            urgent = not following.schedule.covers((self.step + 1) * rows)
            decided: dict[str, Any] = {}
            if self._planner is not None:
                rounds = self._planner.look(self.step, urgent)
                if rounds:
                    append_rounds(self.config.run, rounds)
                decided = {"rounds": [entry.to_json() for entry in rounds], "stop": self.stop_requested()}
            decided = broadcast_json(decided, self.rank.device, self.rank.world)
            following.extend([Round.from_json(entry) for entry in decided["rounds"]])
            if urgent and decided["stop"]:
                return True
            if not decided["rounds"]:
                if not urgent:
                    return False
                if following.due(self.step * rows):  # the store may be full: make room before waiting on
                    if self._saved_step != self.step:
                        self.save()
                    self._consume()
        return False

    def _consume(self) -> None:
        """After a checkpoint: remove the segments that have had all their passes; all ranks."""
        following = self.run.following
        due = [] if following is None else following.due(self.step * self.config.rows_per_step)
        if following is None or not due:
            return
        decided: dict[str, Any] = {}
        if self._planner is not None:
            present = self._planner.still_there(due)
            decided = {"present": present, "copies": following.copy_held_out(present)}
        decided = broadcast_json(decided, self.rank.device, self.rank.world)
        following.let_go(due, decided["present"], decided["copies"])  # the same `due` on every rank
        if self._planner is not None and decided["present"]:
            remove_consumed(following, decided["present"])
            count = format_count(len(decided["present"]), "segment")
            self.report(f"removed {count} after {self.config.consume} passes")

    def _train_step(self, loader: RowLoader, rows: Iterator[Row]) -> tuple[dict[str, Any], bool]:
        """One optimizer step; returns what metrics.jsonl gets, and whether all ranks stop here."""
        rank, config = self.rank, self.config
        began, waited = time.perf_counter(), loader.wait_seconds
        turns = -(-config.rows_per_step // rank.world)
        sums = StepSums(self.run.drafter_config.block_size, turns * rank.world, rank.device)
        for turn in range(turns):
            row = next(rows)
            last = turn == turns - 1
            if len(row.slots) or last:  # the last one reduces the gradients, and so always runs, on every rank
                synchronised = last or rank.world == 1
                with contextlib.nullcontext() if synchronised else self.forward.model.no_sync():  # type: ignore[operator]
                    torch.autograd.backward(self.forward.loss(row, turn * rank.world + rank.rank, sums))
            sums.add("tokens", row.num_tokens)
            loader.release(row.buffer)
        norm = gradient_norm(self.parameters)
        sums.add("bad", (~torch.isfinite(norm)).double())
        sums.add("wait_seconds", loader.wait_seconds - waited)
        sums.add("stop", float(self.stop_requested()))
        numbers = sums.reduced(rank.world)
        lr = learning_rate(self.step, self.total_steps, config)
        finite = numbers.bad == 0 and not numbers.bad_rows and math.isfinite(numbers.weighted_loss)
        scaled_norm: float | None = None
        if finite and numbers.weight > 0:
            # DDP gave the mean over ranks of Σ w·∇CE; the step's gradient is their sum over Σ w of all ranks.
            scaled_norm = scale_and_clip(self.parameters, float(norm), rank.world / numbers.weight, config.clip)
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._count_bad_step(finite, numbers)
        self.step += 1
        seconds = time.perf_counter() - began
        values = {
            **numbers.quality(),
            "lr": lr,
            "gradient_norm": scaled_norm,
            "skipped": None if scaled_norm is not None else "not finite" if not finite else "no label",
            "slots": int(numbers.slots),
            "tokens": int(numbers.tokens),
            "tokens_per_second": numbers.tokens / seconds,
            "wait_share": numbers.wait_seconds / (rank.world * seconds),
            "recompilations": self.forward.compiled.recompilations(),
        }
        return values, numbers.stop > 0

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any] | None:
        """The held-out rows, the same ones with the same anchors each time; None where nothing is held out."""
        if not self.run.holdout.rows:
            return None
        keys = self.run.holdout.rank_keys(self.rank.rank, self.rank.world)
        sums = StepSums(self.run.drafter_config.block_size, len(keys) * self.rank.world, self.rank.device)
        if not self._evaluation_buffers:
            self._evaluation_buffers = [self._buffer(), self._buffer()]
        with RowLoader(self.builder, keys, self._evaluation_buffers) as loader:
            for turn, row in enumerate(loader):
                if len(row.slots):
                    self.forward.loss(row, turn * self.rank.world + self.rank.rank, sums)
                loader.release(row.buffer)
        return {**sums.reduced(self.rank.world).quality(), "rows": len(self.run.holdout.rows)}

    def _lacks_evaluation(self) -> bool:
        """Whether a stop came before all that belongs to the step under way was measured; the same on every rank."""
        if self.evaluation is None:
            return self._evaluation_due()
        return self.config.evaluate_target is not None and "real_acceptance_length" not in self.evaluation

    def _make_up(self, log: MetricsLog | None) -> bool:
        """Before the first step: measure what is lacking, for the checkpoint gone on from too, or it would never be the
        best one. Returns whether a stop came again."""
        before = self.evaluation
        stopped = self._evaluate_and_log(log) if before is None else self._measure_and_log(log)
        if (
            self.rank.rank == 0
            and self._restored is not None
            and self.evaluation is not None
            and self.evaluation != before
        ):
            record_evaluation(self._restored, self.evaluation)
        return stopped

    def _evaluate_and_log(self, log: MetricsLog | None) -> bool:
        """All ranks; returns whether a stop cut the real measurement short: the run then ends here, to make up for it."""
        self.evaluation = self.evaluate()
        return self._measure_and_log(log)

    def _measure_and_log(self, log: MetricsLog | None) -> bool:
        cut_short = False
        if self.measurement is not None:
            real = self._measure(self.measurement, (self.evaluation or {}).get("acceptance_length"))
            self.evaluation = {**(self.evaluation or {}), **real} or None
            cut_short = not real and self.stop_requested()
        if self.evaluation is not None:
            self._newest_evaluation = self.step, self.evaluation
            if log is not None:
                log.write("evaluation", self.step, self.evaluation)
            self.report(format_evaluation(self.step, self.evaluation))
        return bool(broadcast_json({"stop": cut_short}, self.rank.device, self.rank.world)["stop"])

    def _measure(self, measurement: Measurement, estimate: float | None) -> dict[str, Any]:
        """The real acceptance length of the drafter as a checkpoint would hold it; the other ranks wait for its end."""
        reader = self.run.reader
        return measurement.measure(
            self.run,
            export_tensors(dict(self.named), reader.encoding, reader.calibration),
            self.rank.device,
            estimate,
            self.report,
            self.stop_requested,
        )

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _saving_due(self) -> bool:
        return self.step == self.total_steps or self.step % self.config.save_every == 0

    def _evaluation_due(self) -> bool:
        return self.step == 0 or self._saving_due() or self.step % self.config.evaluate_every == 0

    def _keys(self) -> Iterator[RowKey | None]:
        if self.run.following is not None:
            yield from self._growing_keys(self.run.following.schedule)
            return
        for step in range(self.step, self.total_steps):
            yield from self.run.schedule.step_keys(step, self.config.rows_per_step, self.rank.rank, self.rank.world)

    def _growing_keys(self, schedule: GrowingSchedule) -> Iterator[RowKey | None]:
        """The same where rows are planned as the store grows; the loader's thread waits here for the training thread."""
        rows_per_step = self.config.rows_per_step
        for step in itertools.count(self.step):
            if not schedule.wait((step + 1) * rows_per_step) or step * rows_per_step >= schedule.num_planned:
                return  # abandoned, or past the last row
            yield from schedule.step_keys(step, rows_per_step, self.rank.rank, self.rank.world)

    def _buffer(self) -> RowBuffer:
        return RowBuffer.allocate(self.run.reader, self.config.row_tokens, pinned=self.rank.device.type == "cuda")

    def _warm_up(self) -> None:
        """Compile everything, on a real row, before anything is counted."""
        following = self.run.following
        first = 0 if following is None else self.step * self.config.rows_per_step  # earlier rows may be gone
        row = self.builder.build(self.run.schedule.key(first), self._buffer())
        evaluates = bool(self.run.holdout.rows) or (following is not None and self.config.holdout > 0)
        self.forward.warm_up(row, evaluates)
        self.report(self.forward.compiled.summary())

    def _count_bad_step(self, finite: bool, numbers: StepNumbers) -> None:
        """Count steps in a row that were skipped as not finite; raise InputError with the samples' ids at the limit."""
        self._bad_steps = 0 if finite else self._bad_steps + 1
        if self._bad_steps < self.config.bad_step_limit:
            return
        places = numbers.bad_rows or range(self.config.rows_per_step)
        keys = [self.run.schedule.key(self.step * self.config.rows_per_step + place) for place in places]
        ids = [
            f"{int(self.run.reader.samples['id'][index]):016x}"
            for key in keys
            if key is not None
            for index in self.run.schedule.samples(key).tolist()
        ]
        more = f" and {len(ids) - _NAMED_SAMPLES} more" if len(ids) > _NAMED_SAMPLES else ""
        raise InputError(
            f"{'The loss' if numbers.bad_rows else 'The gradient'} was not finite in {self._bad_steps} steps in a row, "
            f"the last of them step {self.step + 1}, with samples {', '.join(ids[:_NAMED_SAMPLES])}{more}. Look at them "
            "with `dflash inspect-store --sample`, or lower --lr; the run goes on from its last checkpoint."
        )
