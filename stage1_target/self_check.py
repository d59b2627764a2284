"""The check at every start: states of a padded batch against the same samples run alone, before anything is written.

Causal attention and right padding make the states of a batch those of an unpadded run by construction. A target's code
can still get it wrong (left padding, masks, kernels that mix rows), and a store of such states looks like any other. So
some rows of the first batch, one cut short so that padding is there for certain, run again alone; how far they may be
apart is what two unpadded runs of different batch size are apart in the same weights and dtype, which is rounding.
One forward of the first batch and at most 2.2 times its tokens for the rows: 0.5 to 1.3 s for an 8B target on one H200 with
batches of 16,384 tokens.

The difference of two states of a token and layer is |D⁻¹(a - b)| / |D⁻¹b|, Euclidean over the channels; that of two runs
of a sample is the median over its tokens, which a wrong batch moves by tens of times and a single odd token not at all.
With routed experts a close decision falls the other way now and then, and that token then differs by more than rounding:
there the median may also go as far as nine tenths of the tokens do between the unpadded runs.

Shapes: T tokens, L tapped target layers, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_train.errors import InputError
from dflash_train.stage1_target.quantization import quantization_name
from dflash_train.stage1_target.target import Target
from dflash_train.stage1_target.target_config import text_config

logger = logging.getLogger(__name__)

States = Callable[[torch.Tensor], torch.Tensor]
"""Token ids int64 [B, T] to states [B, T, L * H]."""

FACTOR = 4.0
"""A batch may differ by so many times what two unpadded runs differ by; wrong states differ by tens of times that."""
NUM_COPIES = 2
"""Rows of the second unpadded run: copies of one sample, no more tokens than the batch has."""
FEW_TOKENS = 16
"""The median over fewer says little."""
CUT = 2 / 3
"""How much is left of a sample that is cut so that padding follows it."""
NINE_TENTHS = 0.9
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class SelfCheck:
    """How far the states of a batch are from those of samples alone, by tapped layer."""

    layer_ids: tuple[int, ...]
    num_samples: int
    """Rows that ran again."""
    num_rows: int
    """Rows of the batch."""
    found: tuple[float, ...]
    """Difference between the batch and the samples alone."""
    allowed: tuple[float, ...]
    """The most that rounding explains."""

    @property
    def worst(self) -> int:
        """Position of the layer that is furthest from what is allowed."""
        return max(range(len(self.found)), key=lambda layer: self.found[layer] / self.allowed[layer])

    def __str__(self) -> str:
        layer = self.worst
        return (
            f"layer {self.layer_ids[layer]} of a padded batch of {self.num_rows} differs by "
            f"{self.found[layer]:.2g} from the same samples alone, {self.allowed[layer]:.2g} is allowed"
        )

    def stop_if_wrong(self) -> None:
        """Raise InputError with one sentence if a layer differs by more than rounding."""
        layer = self.worst
        if self.found[layer] <= self.allowed[layer]:
            return
        raise InputError(
            f"The target's states depend on the batch: in layer {self.layer_ids[layer]}, {self.num_samples} samples in a "
            f"padded batch of {self.num_rows} differ by {self.found[layer]:.2g} from the same samples alone, where "
            f"{self.allowed[layer]:.2g} is allowed (median token, relative, in units of the channel scale). Nothing wrong was "
            "stored; run each sample alone with --batch-tokens 1, or take another version of transformers."
        )


def self_check(
    target: Target,
    samples: Sequence[NDArray[np.int32]],
    channel_scale: torch.Tensor,
    pad: Callable[[Sequence[NDArray[np.int32]]], torch.Tensor],
    batch_states: States | None = None,
) -> SelfCheck | None:
    """Run the samples of a batch of two or more as they will be run, and some of them alone.

    None where the memory does not suffice, or all samples are single tokens.

    channel_scale is D, [L * H]. `batch_states` is how batches run; alone, samples run by `target.hidden_states`.
    """
    rows = _rows_to_check(samples)
    if rows is None:
        return None
    try:
        return _compare(target, rows, channel_scale, pad, batch_states or target.hidden_states)
    except torch.OutOfMemoryError:
        pass
    # outside the except clause, where the traceback keeps the tensors alive
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
    if len(samples) < 4:
        logger.warning("The device has no memory to check a batch against its samples alone; going on without.")
        return None
    return self_check(target, samples[: len(samples) // 2], channel_scale, pad, batch_states)


@dataclass(frozen=True)
class _Rows:
    samples: list[NDArray[np.int32]]
    checked: tuple[int, ...]
    """Rows to compare."""
    cut: int
    """The one that was cut short; what rounding does is measured on it."""


def _rows_to_check(samples: Sequence[NDArray[np.int32]]) -> _Rows | None:
    """The batch with one row cut short, and which rows to compare: the longest, the cut one, the shortest.

    Of a few tokens the median says little, so they are taken only where there is nothing longer; single tokens never are:
    compiled layers take a size of 1 for a constant.
    """
    rows = list(samples)
    falling = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    order = [row for row in falling if len(rows[row]) >= FEW_TOKENS] or [row for row in falling if len(rows[row]) > 1]
    if not order:
        return None
    cut = order[len(order) // 2]
    rows[cut] = rows[cut][: max(2, int(len(rows[cut]) * CUT))]
    return _Rows(rows, tuple(sorted({order[0], cut, order[-1]})), cut)


def _compare(
    target: Target,
    rows: _Rows,
    channel_scale: torch.Tensor,
    pad: Callable[[Sequence[NDArray[np.int32]]], torch.Tensor],
    batch_states: States,
) -> SelfCheck:
    """The batch, then each of its rows to compare alone, then copies of one of them."""
    batch = batch_states(pad(rows.samples))
    kept = {row: batch[row, : len(rows.samples[row])].clone() for row in rows.checked}
    del batch
    scale = channel_scale.to(target.device).view(len(target.target_layer_ids), -1)
    found, allowed = [], torch.empty(0)
    floor, ceiling = limits(target, routed := has_experts(target))
    for row in rows.checked:
        alone_ids = torch.from_numpy(rows.samples[row].astype(np.int64))[None]
        alone = target.hidden_states(alone_ids)[0]
        found.append(_difference(kept[row], alone, scale))
        if row == rows.cut:
            copies = target.hidden_states(alone_ids.repeat(NUM_COPIES, 1))
            # the copy that is nearest: were the others wrong, that would be no rounding
            allowed = FACTOR * torch.stack([_difference(copy, alone, scale) for copy in copies]).amin(0)
            if routed:
                most = torch.stack([_difference(copy, alone, scale, NINE_TENTHS) for copy in copies]).amin(0)
                allowed = torch.maximum(allowed, most)
    return SelfCheck(
        layer_ids=target.target_layer_ids,
        num_samples=len(rows.checked),
        num_rows=len(rows.samples),
        found=tuple(torch.stack(found).amax(0).tolist()),
        allowed=tuple(allowed.clamp(floor, ceiling).tolist()),
    )


def _difference(found: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor, share: float = 0.5) -> torch.Tensor:
    """What `share` of the tokens differ by at most: states [T, L * H], scale [L, H]; float64 [L], on the CPU.

    A token that is finite in only one of them differs without bound; one that is in neither is left to quarantine.
    """
    layers = (len(found), *scale.shape)
    ours, other = (states.view(layers).float() / scale for states in (found, wanted))
    difference = (ours - other).norm(dim=-1) / other.norm(dim=-1).clamp_min(1e-30)
    finite = torch.stack([states.view(layers).sum(-1, dtype=torch.float32).isfinite() for states in (found, wanted)])
    difference = torch.where(finite.all(0), difference, torch.inf).double().cpu()
    seen = finite.any(0).cpu()
    columns = [difference[seen[:, layer], layer] for layer in range(scale.shape[0])]
    # higher, not linear: between two infinite values linear is not a number
    return torch.stack(
        [column.quantile(share, interpolation="higher") if len(column) else column.new_zeros(()) for column in columns]
    )


def limits(target: Target, routed: bool) -> tuple[float, float]:
    """Least and most that a difference may be allowed, by the dtype's rounding eps.

    The least, 4 eps, is what two runs through the same kernels (difference 0) may not be held to. The most, 32 eps (bf16
    25 %) and at least 1 %, is for a target whose unpadded runs disagree already; with experts a close routing decision
    falls the other way, and 8-bit activations are scaled by what else is in the batch, so there it is 50 %.
    """
    eps = float(torch.finfo(target.dtype).eps)
    coarse = routed or quantization_name(target.config, target.model_config) is not None
    return max(4 * eps, 1e-4), 0.5 if coarse else max(32 * eps, 0.01)


def has_experts(target: Target) -> bool:
    """Whether tokens are routed to experts."""
    config = text_config(target.model_config)
    return any((getattr(config, name, None) or 0) > 1 for name in EXPERT_COUNTS)
