"""The training loop of one rank: rows in, optimizer steps out, all ranks in lock-step.

A step is R rows, one forward and backward each. What the ranks must agree on (the loss's denominator Σ w, the stop
signal, rows that are not finite) travels in one all-reduce after the last row, so they also skip, stop and save at the
same step. How a row becomes a loss is row_forward.py's.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.checkpoint import Checkpoint, TrainerState, load_masters, read_groups, save_checkpoint
from dflash_train.stage2_drafter.collectives import Rank
from dflash_train.stage2_drafter.evaluator import Evaluator
from dflash_train.stage2_drafter.events import Progress, StepDone
from dflash_train.stage2_drafter.growth import Growth
from dflash_train.stage2_drafter.initial_weights import initial_weights
from dflash_train.stage2_drafter.measurement import Measurement
from dflash_train.stage2_drafter.metrics import MetricsLog, StepNumbers, StepSums, format_step
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
from dflash_train.stage2_drafter.row_forward import RowForward
from dflash_train.stage2_drafter.row_loader import Row, RowBuffer, RowBuilder, RowLoader
from dflash_train.stage2_drafter.rows import RowKey
from dflash_train.stage2_drafter.run_checkpoints import prune_checkpoints, worse_than_best
from dflash_train.stage2_drafter.run_folder import rewind_metrics
from dflash_train.stage2_drafter.versions import package_versions

RANDOM_RULE = "rows: (seed, 0, epoch); anchors: (seed, 1, epoch, row, held out); first weights: seed, kind of device"
_NAMED_SAMPLES = 20


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
        self.report = report if rank.is_first else lambda line: None
        self.stop_requested = stop_requested
        self.versions = package_versions() if rank.is_first else {}  # as they are now, not at the first checkpoint
        self.progress = progress
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
            anchors_by=self.config.anchors_by,
        )
        self.evaluator = Evaluator(run, rank, self.forward, self.builder, self.report, stop_requested, measurement)
        self.growth: Growth | None = None
        if run.following is not None:
            self.growth = Growth(run.following, self.config, rank, self.report, stop_requested)
        self._bad_steps = 0
        self.step = 0
        self._saved_step = -1
        self._restored: Checkpoint | None = None
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
        self.step, self.evaluator.current = checkpoint.step, checkpoint.state().evaluation
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
        if (worse := worse_than_best(path)) is not None:
            self.report(f"warning: {worse}")

    def save(self) -> Checkpoint | None:
        """Write a checkpoint and drop old ones, on rank 0; the others go on and wait at the next step's all-reduce."""
        self._saved_step = self.step
        if not self.rank.is_first:
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
            evaluation=self.evaluator.current,
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
        config, following, evaluator = self.config, self.run.following, self.evaluator
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
            log, lacks_evaluation = None, any_step and evaluator.is_incomplete(self._evaluation_due())
            if self.rank.is_first:
                if lacks_evaluation:
                    rewind_metrics(config.run, self.step, evaluated=False)
                log = stack.enter_context(contextlib.closing(MetricsLog(config.run, self.step)))
            rows = iter(loader)
            if lacks_evaluation:
                stopped = evaluator.make_up(self.step, log, self._restored)
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
                    self.progress(StepDone(self.step, self.total_steps, seconds, values, evaluator.newest))
                if self.step % config.log_every == 0 or self.step in (1, self.total_steps) or self._bad_steps:
                    self.report(
                        format_step(self.step, self.total_steps, values, self._bad_steps, config.bad_step_limit)
                    )
                evaluator.current = None
                if self._evaluation_due() and (self.step == self.total_steps or not stopped):
                    stopped = evaluator.evaluate(self.step, log) or stopped
                if stopped or self._saving_due():
                    self.save()
                    self._consume()
            if self._saved_step != self.step:  # no step was taken, or the last one showed only afterwards
                if self.step and not stopped:
                    evaluator.evaluate(self.step, log)
                self.save()
            self._consume()  # also what a run that was killed after its last checkpoint left
        if following is not None and not stopped and config.holdout > 0 and not self.run.holdout.rows:
            self.report(f"--holdout {config.holdout} has held out none of these samples, so nothing was evaluated")
        closing_line = self.forward.compiled.closing_line(self.step - first)
        if closing_line is not None:
            self.report(closing_line)
        return stopped and (self.step < self.total_steps or (self.growth is not None and self.growth.may_go_on()))

    def _rows_left(self) -> bool:
        return self.step < self.total_steps if self.growth is None else self.growth.rows_left(self.step)

    def _extend_rows(self) -> bool:
        return self.growth is not None and self.growth.extend(self.step, self._save_once)

    def _save_once(self) -> None:
        if self._saved_step != self.step:
            self.save()

    def _consume(self) -> None:
        if self.growth is not None:
            self.growth.consume(self.step)

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

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _saving_due(self) -> bool:
        return self.step == self.total_steps or self.step % self.config.save_every == 0

    def _evaluation_due(self) -> bool:
        return self.step == 0 or self._saving_due() or self.step % self.config.evaluate_every == 0

    def _keys(self) -> Iterator[RowKey | None]:
        if self.growth is not None:
            yield from self.growth.keys(self.step)
            return
        for step in range(self.step, self.total_steps):
            yield from self.run.schedule.step_keys(step, self.config.rows_per_step, self.rank.rank, self.rank.world)

    def _buffer(self) -> RowBuffer:
        return self.builder.buffer(pinned=self.rank.device.type == "cuda")

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
