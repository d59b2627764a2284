"""Batches of samples through the target: padded, run, stripped of padding, encoded, and on their way to host memory.

Shapes: B batch, T tokens, N tokens without padding, L tapped target layers, G scale groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_train.errors import InputError
from dflash_train.stage1_target.samples import SampleTable
from dflash_train.stage1_target.target import Target
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import Encoding

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedBatch:
    """Features of some samples in host memory, without padding."""

    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    features: torch.Tensor
    """[N, columns] as stored."""
    scales: torch.Tensor | None
    """float32 [N, G]."""
    finite: torch.Tensor
    """bool [N, L]: whether a token's state of a tapped layer was finite."""
    copied: Any
    """CUDA event of the copy, None on a CPU."""


def pad_right(samples: Sequence[NDArray[np.int32]]) -> torch.Tensor:
    """Token ids int64 [B, T], rows filled with 0 to the longest."""
    token_ids = np.zeros((len(samples), max(map(len, samples))), np.int64)
    for row, sample in zip(token_ids, samples, strict=True):
        row[: len(sample)] = sample
    return torch.from_numpy(token_ids)


class Forwarder:
    """Runs batches of samples through the target and encodes the tapped states."""

    def __init__(self, target: Target, encoding: Encoding, calibration: Calibration, table: SampleTable) -> None:
        self._target = target
        self._encoding = encoding
        self._calibration = calibration.to(target.device)
        self._table = table
        on_cuda = target.device.type == "cuda"
        self._copies: Any = torch.cuda.Stream(target.device) if on_cuda else None  # type: ignore[no-untyped-call]

    def run(self, indices: Sequence[int]) -> Iterator[EncodedBatch]:
        """Encode the samples at `indices`; where the device's memory does not suffice, in halves.

        Raises InputError where a single sample does not fit.
        """
        try:
            encoded = self._run(tuple(indices))
        except torch.OutOfMemoryError as error:
            if len(indices) == 1:
                length = int(self._table.lengths[indices[0]])
                raise InputError(
                    f"A sample of {length:,} tokens does not fit into the memory of the device; lower --max-tokens."
                ) from error
            encoded = None
        if encoded is not None:
            yield encoded
            return
        # outside the except clause: there the traceback would keep the failed batch's tensors alive
        if self._target.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(indices) // 2
        logger.warning("Out of device memory with %d samples; going on in halves. Lower --batch-tokens.", len(indices))
        yield from self.run(indices[:half])
        yield from self.run(indices[half:])

    def _run(self, indices: tuple[int, ...]) -> EncodedBatch:
        samples = [self._table.sample(index)[2] for index in indices]
        lengths = tuple(map(len, samples))
        token_ids = pad_right(samples)
        valid = torch.arange(token_ids.shape[1])[None, :] < torch.tensor(lengths)[:, None]
        rows = self._to_device(valid.flatten().nonzero()[:, 0])
        tokens = self._target.hidden_states(self._to_device(token_ids)).flatten(0, 1)[rows]
        layers = tokens.view(len(tokens), self._encoding.num_layers, self._encoding.hidden_size)
        finite = layers.sum(-1, dtype=torch.float32).isfinite()  # a sum needs no mask as large as the states
        features, scales = self._encoding.encode(tokens, self._calibration)
        if self._copies is None:
            return EncodedBatch(indices, lengths, features, scales, finite, None)
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            on_host = [self._to_host(tensor) for tensor in (features, scales, finite)]
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copies)
        return EncodedBatch(indices, lengths, on_host[0], on_host[1], on_host[2], copied)  # type: ignore[arg-type]

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to the device without waiting for the batch that still runs there (from pageable memory it would)."""
        return tensor if self._copies is None else tensor.pin_memory().to(self._target.device, non_blocking=True)

    def _to_host(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Start the copy of a device tensor into pinned memory (torch reuses the blocks of earlier batches)."""
        if tensor is None:
            return None
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        on_host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._copies)
        return on_host
