"""Evaluations of a run under way: its held-out rows, and beside them the real acceptance length where one is measured."""

from collections.abc import Callable
from typing import Any

import torch

from dflash_train.stage2_drafter.checkpoint import Checkpoint, export_tensors, record_evaluation
from dflash_train.stage2_drafter.collectives import Rank
from dflash_train.stage2_drafter.measurement import Measurement
from dflash_train.stage2_drafter.metrics import MetricsLog, StepSums, format_evaluation
from dflash_train.stage2_drafter.preparation import PreparedRun
from dflash_train.stage2_drafter.row_forward import RowForward
from dflash_train.stage2_drafter.row_loader import RowBuffer, RowBuilder, RowLoader


class Evaluator:
    """One rank's part; all ranks call each method at the same step. measurement: asked by the first rank alone."""

    def __init__(
        self,
        run: PreparedRun,
        rank: Rank,
        forward: RowForward,
        builder: RowBuilder,
        report: Callable[[str], None],
        stop_requested: Callable[[], bool],
        measurement: Measurement | None = None,
    ) -> None:
        self._run, self._rank, self._forward, self._builder = run, rank, forward, builder
        self._report, self._stop_requested = report, stop_requested
        self._measurement = measurement if rank.is_first else None
        self._buffers: list[RowBuffer] = []
        self.current: dict[str, Any] | None = None
        """Numbers of the step under way, None before they are there: what a checkpoint of this step records."""
        self.newest: tuple[int, dict[str, Any]] | None = None
        """Step and numbers of the last evaluation of this process."""

    def evaluate(self, step: int, log: MetricsLog | None) -> bool:
        """Everything that belongs to this step; returns whether a stop cut the real measurement short: the run then ends
        here, and `make_up` does the rest at its next start."""
        self.current = self.held_out()
        return self._measure(step, log)

    @torch.no_grad()
    def held_out(self) -> dict[str, Any] | None:
        """The held-out rows, the same ones with the same anchors each time, next to each other, over which rounds are walked;
        None where nothing is held out."""
        holdout, rank = self._run.holdout, self._rank
        if not holdout.rows:
            return None
        keys = holdout.rank_keys(rank.rank, rank.world)
        sums = StepSums(self._run.drafter_config.block_size, len(keys) * rank.world, rank.device)
        if not self._buffers:
            self._buffers = [self._builder.buffer(pinned=rank.device.type == "cuda") for _ in range(2)]
        with RowLoader(self._builder, keys, self._buffers) as loader:
            for turn, row in enumerate(loader):
                if len(row.slots):
                    self._forward.loss(row, turn * rank.world + rank.rank, sums)
                    sums.add_rounds(row)
                loader.release(row.buffer)
        return {**sums.reduced(rank.world).quality(), "rows": len(holdout.rows)}

    def is_incomplete(self, is_due: bool) -> bool:
        """Whether a stop came before all was measured that belongs to this step, which is evaluated if it is due."""
        if self.current is None:
            return is_due
        return self._run.config.evaluate_target is not None and "real_acceptance_length" not in self.current

    def make_up(self, step: int, log: MetricsLog | None, restored: Checkpoint | None) -> bool:
        """Before the first step: measure what is lacking, for the checkpoint gone on from too, or it would never be the
        best one. Returns whether a stop came again."""
        before = self.current
        stopped = self.evaluate(step, log) if before is None else self._measure(step, log)
        after = self.current
        if self._rank.is_first and restored is not None and after is not None and after != before:
            record_evaluation(restored, after)
        return stopped

    def _measure(self, step: int, log: MetricsLog | None) -> bool:
        cut_short = False
        if self._measurement is not None:
            real = self._real(self._measurement, (self.current or {}).get("acceptance_length"))
            self.current = {**(self.current or {}), **real} or None
            cut_short = not real and self._stop_requested()
        if self.current is not None:
            self.newest = step, self.current
            if log is not None:
                log.write("evaluation", step, self.current)
            self._report(format_evaluation(step, self.current))
        return bool(self._rank.broadcast({"stop": cut_short})["stop"])

    def _real(self, measurement: Measurement, estimate: float | None) -> dict[str, Any]:
        """The real acceptance length of the drafter as a checkpoint would hold it; the other ranks wait for its end."""
        reader, masters = self._run.reader, dict(self._forward.drafter.named_parameters())
        tensors = export_tensors(masters, reader.encoding, reader.calibration)
        device, stop = self._rank.device, self._stop_requested
        return measurement.measure(self._run, tensors, device, estimate, self._report, stop)
