"""What a step measured: sums that are all-reduced once, the numbers made of them, and where these are written.

All sums of a step travel in one float64 vector, with the loss's denominator, the stop signal and the flags of rows that
are not finite: one small all-reduce and one host synchronisation a step, and all ranks decide alike.
Symbols: A anchors, K block size, N counted slots, R rows of the step.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_train.stage2_drafter.events import describe_waiting
from dflash_train.stage2_drafter.loss import DraftStatistics, describe_statistics, draft_statistics
from dflash_train.stage2_drafter.rounds import count_rounds, tokens_produced
from dflash_train.stage2_drafter.row_loader import Row
from dflash_train.units import format_count

_SCALARS = (
    "weight",
    "weighted_loss",
    "loss",
    "slots",
    "tokens",
    "wait_seconds",
    "stop",
    "bad",
    "rounds",
    "produced",
    "anchors",
    "at_anchors",
)


class StepSums:
    """Sums over rows and ranks of one optimizer step or one evaluation."""

    def __init__(self, block_size: int, num_rows: int, device: torch.device) -> None:
        num_statistics = 2 * block_size + 2  # draft_statistics
        self._values = torch.zeros(len(_SCALARS) + num_statistics + num_rows, dtype=torch.float64, device=device)
        self._statistics = slice(len(_SCALARS), len(_SCALARS) + num_statistics)
        self._bad_rows = slice(len(_SCALARS) + num_statistics, None)
        self._accepted: Tensor | None = None

    def add_row(
        self, place: int, ce: Tensor, correct: Tensor, weights: Tensor, slots: Tensor, label_mask: Tensor
    ) -> None:
        """Add one row: fp32 CE, bool correct and fp32 weights of its counted slots [N], whose flat places are `slots`.

        label_mask is bool [A, K]; `place` is the row's number within the step, to name it where its loss is not finite.
        """
        right = torch.zeros_like(label_mask)
        right.view(-1)[slots] = correct
        weighted = (ce.double() * weights.double()).sum()
        values = self._values
        self.add("weight", weights.double().sum())
        self.add("weighted_loss", weighted)
        self.add("loss", ce.double().sum())
        self.add("slots", len(ce))
        values[self._statistics] += draft_statistics(right, label_mask)
        self._accepted = right[:, 1:]
        values[self._bad_rows][place] += (~torch.isfinite(weighted)).double()

    def add_rounds(self, row: Row) -> None:
        """Walk the rounds of the row that was added last, whose anchors lie next to each other; waits for the device."""
        assert self._accepted is not None and row.left is not None, "a held-out row was added"
        accepted = self._accepted.to(torch.int64).cumprod(-1).sum(-1).cpu().numpy()
        valid = row.blocks.valid
        at_anchors = tokens_produced(accepted[valid], row.left[valid])
        rounds, produced = count_rounds(row.blocks.anchor[valid], at_anchors)
        for name, value in (("rounds", rounds), ("produced", produced), ("anchors", len(at_anchors))):
            self.add(name, value)
        self.add("at_anchors", int(at_anchors.sum()))

    def add(self, name: str, value: float | Tensor) -> None:
        """Add to one of the scalars."""
        self._values[_SCALARS.index(name)] += value

    def reduced(self, world: int) -> "StepNumbers":
        """Sum over all ranks (one all-reduce where there are several) and bring the result to the host."""
        if world > 1:
            torch.distributed.all_reduce(self._values)
        values = self._values.cpu()
        return StepNumbers(
            **dict(zip(_SCALARS, values.tolist(), strict=False)),
            statistics=describe_statistics(values[self._statistics]),
            bad_rows=torch.nonzero(values[self._bad_rows]).flatten().tolist(),
        )


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """StepSums on the host."""

    weight: float
    weighted_loss: float
    loss: float
    slots: float
    tokens: float
    wait_seconds: float
    stop: float
    bad: float
    rounds: float
    produced: float
    anchors: float
    at_anchors: float
    statistics: DraftStatistics
    bad_rows: list[int]

    def quality(self) -> dict[str, Any]:
        """Loss, acceptance length (bonus token included) and accuracy of slots 1 … K - 1.

        Teacher-forced on the data: a proxy for what speculative decoding accepts, not that itself. The acceptance length is
        the mean over rounds where they were walked, and that over anchors beside it, both as `dflash evaluate --replay` has
        them; else the mean over anchors, where drafts past an answer's end count as one more. None where nothing was
        counted, or where the loss is not finite.
        """
        statistics = self.statistics
        over_anchors = _finite(self.at_anchors, self.anchors)
        walked = {"acceptance_length_over_anchors": over_anchors, "rounds": int(self.rounds)} if self.rounds else {}
        return {
            "loss": _finite(self.weighted_loss, self.weight),
            "cross_entropy": _finite(self.loss, self.slots),
            "acceptance_length": _finite(self.produced, self.rounds)
            if self.rounds
            else _finite(statistics.estimated_acceptance, 1),
            **walked,
            "accuracy": [_finite(share, 1) for share in statistics.accuracy_by_slot],
        }


def _finite(numerator: float, denominator: float) -> float | None:
    value = numerator / denominator if denominator else math.nan
    return value if math.isfinite(value) else None


class MetricsLog:
    """run/metrics.jsonl and run/tensorboard, written by the first rank alone."""

    def __init__(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._file = (run / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")
        self._board = SummaryWriter(log_dir=str(run / "tensorboard"), purge_step=step + 1, flush_secs=20)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One line {kind, step, …}; lists become one TensorBoard curve an entry, text and None are left out there."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        for name, value in values.items():
            curves = {name: value}
            if isinstance(value, list):
                curves = {f"{name}/{slot:02d}": entry for slot, entry in enumerate(value, start=1)}
            for curve, entry in curves.items():
                if isinstance(entry, int | float):
                    self._board.add_scalar(f"{kind}/{curve}", entry, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def format_step(step: int, total: int, values: Mapping[str, Any], bad_steps: int = 0, bad_step_limit: int = 0) -> str:
    """One plain line for the terminal; bad_steps is how many steps in a row up to this one were not finite."""
    skipped = f" (skipped: {values['skipped']})" if values["skipped"] else ""
    if bad_steps:
        skipped = f" (skipped: not finite, {bad_steps} in a row; the run ends at {bad_step_limit})"
    return (
        f"step {step} of {total}{skipped}: {_quality(values)}, {values['tokens_per_second']:,.0f} tokens/s, "
        f"{describe_waiting(values)}, lr {values['lr']:.2e}, gradient norm "
        f"{_number(values['gradient_norm'], '.3f')}"
    )


def format_evaluation(step: int, values: Mapping[str, Any]) -> str:
    """One plain line: what was held out, as estimated, and beside it what real decoding reached, where it was measured."""
    parts = [f"{_quality(values)} ({format_count(values['rows'], 'row')})"] if "rows" in values else []
    if "real_acceptance_length" in values:
        real = f"real acceptance length {_number(values['real_acceptance_length'], '.3f')}"
        prompts = format_count(values["real_prompts"], "prompt")
        rounds = format_count(values["real_rounds"], "round")
        parts.append(f"{real} ({prompts}, {rounds}, {values['real_seconds']:.0f} s)")
    return f"held out at step {step}: {', '.join(parts)}"


def _quality(values: Mapping[str, Any]) -> str:
    length = _number(values["acceptance_length"], ".3f")
    if "acceptance_length_over_anchors" in values:
        over_anchors = _number(values["acceptance_length_over_anchors"], ".3f")
        length = f"estimated acceptance length {length} ({over_anchors} over anchors)"
    else:
        length = f"acceptance length {length} over anchors"
    return (
        f"loss {_number(values['loss'], '.4f')}, accuracy {_number(values['accuracy'][0], '.1%')} at slot 1, {length}"
    )


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)
