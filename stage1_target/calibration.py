"""The channel scale D: how large each channel of the tapped states usually is.

D_i = max(1.4826 * median |h_i|, 1e-3 * median of D over its layer) over tokens normalised to rms 1 over all L * H
channels; tokens whose rms is over 20 times the median are attention sinks and left out. The samples are a seeded draw
of their own, never the first batches. Medians come from one histogram a channel over logarithmic bins (1,024 bins of
2.0 % width from 1e-6 to 1e3): memory is L * H * 4 KiB (80 MiB for Qwen3-8B, five taps) plus slices of 256 MiB,
however many tokens are drawn; the states themselves would be 2.7 GB. Interpolating in the bin leaves an error below 1 %.

Shapes: B batch, T tokens, N tokens without padding, L tapped target layers, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dflash_train.errors import InputError
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import LARGEST_STATE, Encoding
from dflash_train.store.location import StoreLocation
from dflash_train.store.manifest import StoreError
from dflash_train.store.reader import StoreReader

if TYPE_CHECKING:
    import torch

    from dflash_train.stage1_target.target import Target

logger = logging.getLogger(__name__)

MAD_TO_SIGMA = 1.4826
"""Median |x| times this is the standard deviation of a centred normal x."""
FLOOR = 1e-3
SINK_FACTOR = 20.0
NUM_BINS = 1024
LOG_RANGE = (-6.0, 3.0)
"""Decades of |h_i| over the token's rms that the bins cover; what is outside falls into the first or last bin."""
SLICE_BYTES = 256 * 2**20


def calibration_of(store: StoreLocation, layer_ids: Sequence[int], encoding: Encoding) -> Calibration:
    """What an encoding needs of another store's calibration; StoreError where it is of other layers, width or rank."""
    other = StoreReader(store, segments=())
    wanted, found = (
        (tuple(layer_ids), encoding.hidden_size),
        (other.manifest.target_layer_ids, other.manifest.hidden_size),
    )
    if found != wanted:
        raise StoreError(
            f"The calibration of {store} is for layers {list(found[0])} of {found[1]} channels, but the layers "
            f"{list(wanted[0])} of {wanted[1]} channels are to be stored; choose another store."
        )
    if not encoding.is_projected:
        return Calibration.from_arrays(other.channel_scale)
    if other.manifest.rank != encoding.rank:
        rank = "no projection" if other.manifest.rank is None else f"a projection of rank {other.manifest.rank:,}"
        raise StoreError(
            f"The calibration of {store} has {rank}, but {encoding.name} of rank {encoding.rank:,} is to be stored. Choose "
            "another store, --encoding or --rank."
        )
    return other.calibration


def draw_samples(lengths: NDArray[np.integer], num_tokens: int, seed: int) -> NDArray[np.int64]:
    """A seeded random draw of samples with at least `num_tokens` tokens together, or all samples if there are fewer."""
    order = np.random.default_rng([seed, 1]).permutation(len(lengths))
    enough = int(np.searchsorted(np.cumsum(lengths[order]), num_tokens)) + 1
    return order[:enough].astype(np.int64)


class ChannelMedians:
    """Running medians of |x| per channel over tokens [N, F] that come in pieces."""

    def __init__(self, num_channels: int, device: torch.device) -> None:
        import torch

        self._counts = torch.zeros(num_channels * NUM_BINS, dtype=torch.int32, device=device)
        self._offsets = torch.arange(num_channels, device=device) * NUM_BINS
        self._num_channels = num_channels
        self.num_tokens = 0

    def add(self, values: torch.Tensor) -> None:
        """Count values, float [N, F]."""
        import torch

        low, high = LOG_RANGE
        rows = max(1, SLICE_BYTES // (8 * self._num_channels))
        for piece in torch.split(values, rows):
            logarithm = piece.float().abs().clamp_min(10.0**low).log10()
            bins = ((logarithm - low) * (NUM_BINS / (high - low))).long().clamp_(0, NUM_BINS - 1)
            bins = (bins + self._offsets).flatten()
            self._counts.scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.int32))
        self.num_tokens += len(values)

    def medians(self) -> NDArray[np.float64]:
        """Median of |x| per channel, [F]; 0 where it is below the first bin."""
        low, high = LOG_RANGE
        counts = self._counts.view(self._num_channels, NUM_BINS).cpu().numpy()
        half = self.num_tokens / 2
        cumulative = counts.cumsum(axis=1)
        position = (cumulative < half).sum(axis=1)
        channel = np.arange(self._num_channels)
        inside = counts[channel, position]
        share = (half - (cumulative[channel, position] - inside)) / np.maximum(inside, 1)
        medians = 10.0 ** (low + (position + share) * (high - low) / NUM_BINS)
        return np.where(position == 0, 0.0, medians)


def calibrate(target: Target, batches: Iterable[tuple[torch.Tensor, list[int]]]) -> NDArray[np.float32]:
    """Channel scale D, float32 [L * H], from batches of (token ids int64 [B, T], length of each row).

    Raises InputError where no finite token is left.
    """
    num_layers = len(target.target_layer_ids)
    scale = calibrate_states(states_of(target, batches), num_layers, num_layers * target.hidden_size, target.device)
    if scale is None:
        from dflash_train.stage1_target.probe import why_not_finite

        raise InputError(f"No calibration token has finite states: {why_not_finite(target.model)}")
    return scale


def calibrate_states(
    states: Iterable[torch.Tensor], num_layers: int, num_channels: int, device: torch.device
) -> NDArray[np.float32] | None:
    """The same from raw states [N, L * H] that are there already, on `device`; None where no token is finite."""
    import torch

    medians = ChannelMedians(num_channels, device)
    for tokens, rms in ordinary_tokens(states):
        for piece, piece_rms in zip(torch.split(tokens, 1024), torch.split(rms, 1024), strict=True):
            medians.add(piece.float() / piece_rms[:, None])
    return channel_scale(medians.medians(), num_layers) if medians.num_tokens else None


def states_of(target: Target, batches: Iterable[tuple[torch.Tensor, list[int]]]) -> Iterator[torch.Tensor]:
    """Run batches and yield the raw states [N, L * H] of each, without padding.

    Where the device's memory does not suffice, batches are run in halves from there on, and a sample that does not fit
    alone is left out. Raises InputError where no sample fits.
    """
    import torch

    limit: int | None = None  # tokens of a batch with padding; None until memory was short
    num_run = num_unfit = 0
    for batch in batches:
        parts = [batch]
        while parts:
            token_ids, lengths = parts.pop()
            is_one = len(lengths) == 1
            states = None
            if is_one or limit is None or token_ids.numel() <= limit:
                states = _states_or_none(target, token_ids)
            if states is not None:
                num_run += 1
                valid = torch.arange(token_ids.shape[1])[None, :] < torch.tensor(lengths)[:, None]
                yield states[valid.to(states.device)]
            elif is_one:
                num_unfit += 1
                logger.warning(
                    "A sample of %d tokens does not fit into the device's memory: not calibrated on.", *lengths
                )
            else:
                if limit is None or token_ids.numel() <= limit:
                    limit = token_ids.numel() // 2
                    logger.warning(
                        "Out of device memory with %d samples: calibrating on batches of at most %d tokens.",
                        len(lengths),
                        limit,
                    )
                half = len(lengths) // 2
                for rows in (slice(half, None), slice(half)):
                    parts.append((token_ids[rows, : max(lengths[rows])], lengths[rows]))
    if num_unfit and not num_run:
        raise InputError(
            f"None of the {num_unfit} samples drawn for calibration fits into the memory of the device, even alone; lower "
            "--max-tokens, or free the device."
        )


def _states_or_none(target: Target, token_ids: torch.Tensor) -> torch.Tensor | None:
    """The raw states [B, T, L * H]; None, with the device's memory cleared, where it was out of memory."""
    import torch

    try:
        return target.hidden_states(token_ids)
    except torch.OutOfMemoryError:
        pass
    # outside the except clause: there the traceback would keep the batch's tensors alive
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
        torch.cuda.empty_cache()
    return None


def ordinary_tokens(states: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each batch of raw states [N, L * H], those of tokens that are sound and no sinks, and their rms [N]."""
    import torch

    seen: list[torch.Tensor] = []
    for tokens in states:
        rms = torch.cat([piece.float().square().mean(dim=1).sqrt() for piece in torch.split(tokens, 1024)])
        sound = (rms > 0) & (rms <= LARGEST_STATE)
        seen.append(rms[sound].cpu())
        if not len(seen[-1]):
            continue
        # the median of all tokens so far: sinks are one to a few tokens a sample, so it settles at once
        keep = sound & (rms <= SINK_FACTOR * float(torch.cat(seen).median()))
        yield tokens[keep], rms[keep]


def channel_scale(medians: NDArray[np.float64], num_layers: int) -> NDArray[np.float32]:
    """D from the medians of |h| per channel, [L * H]: scaled to a standard deviation, with a floor per layer."""
    scale = (MAD_TO_SIGMA * medians).reshape(num_layers, -1)
    middle = np.median(scale, axis=1, keepdims=True)
    middle = np.where(middle > 0, middle, 1.0)  # a layer that is mostly zero has no scale of its own
    return np.maximum(scale, FLOOR * middle).reshape(-1).astype(np.float32)
