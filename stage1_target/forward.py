"""Batches of samples through the target: padded, run, stripped of padding, encoded, and on their way to host memory.

Each tapped layer is encoded as soon as it has run. Copies go on a stream of their own into buffers that are made once
(host_buffers.py): with `NUM_BUFFERS` of them one is filled, one waits and two are written.

Shapes: B batch, T tokens, N tokens without padding, L tapped target layers, G scale groups.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_train.errors import InputError
from dflash_train.stage1_target.host_buffers import HostBuffer, HostBuffers
from dflash_train.stage1_target.overlap import Overlap
from dflash_train.stage1_target.samples import SampleTable
from dflash_train.stage1_target.target import Target
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import Encoding
from dflash_train.store.tap_encoder import TapEncoder
from dflash_train.units import format_bytes

logger = logging.getLogger(__name__)

NUM_BUFFERS = 4
MAX_UNFIT_IN_A_ROW = 8
"""So many samples that do not fit, one after the other, are no odd samples any more."""


@dataclass(eq=False)
class EncodedBatch:
    """Features of some samples in host memory, without padding."""

    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    features: torch.Tensor
    """[N, columns] as stored."""
    scales: torch.Tensor | None
    """float32 [N, G]."""
    sound: torch.Tensor
    """bool [N, L]: whether a token's state of a tapped layer may be stored."""
    errors: torch.Tensor | None
    """float32 [L]: mean square error of some tokens, relative (`TapEncoder.errors`)."""
    num_padded_tokens: int
    """B * T."""
    buffer: HostBuffer | None = None
    """Where the tensors lie, to be given back once they are written; None on a CPU."""
    buffers: HostBuffers | None = None
    events: tuple[Any, Any, Any] | None = None
    """CUDA events: the batch began, was encoded, is copied. None on a CPU."""
    on_device: list[torch.Tensor] = field(default_factory=list)
    """Sources of the copies, kept until they are complete."""
    reference: dict[int, torch.Tensor] = field(default_factory=dict)
    """Raw states of samples that are kept for reference, by index: int16 [T, L * H], the bits of bfloat16."""

    @property
    def is_copied(self) -> bool:
        """Whether the tensors are on the host."""
        return self.events is None or bool(self.events[2].query())

    def wait(self, overlap: Overlap) -> None:
        """Wait until the tensors are on the host."""
        gpu_seconds = 0.0
        if self.events is not None:
            began, encoded, copied = self.events
            with overlap.waiting("gpu"):
                copied.synchronize()
            gpu_seconds = began.elapsed_time(encoded) / 1e3
        self.on_device.clear()
        overlap.batch_ran(sum(self.lengths), self.num_padded_tokens, gpu_seconds)

    def release(self) -> None:
        """The tensors are written (or not wanted); a second call is fine."""
        if self.buffer is not None and self.buffers is not None:
            self.buffers.give_back(self.buffer)
            self.buffer = None


@dataclass(frozen=True)
class Unfit:
    """A sample that the device's memory does not hold even alone."""

    index: int
    length: int


def pad_right(samples: Sequence[NDArray[np.int32]]) -> torch.Tensor:
    """Token ids int64 [B, T], rows filled with 0 to the longest."""
    token_ids = np.zeros((len(samples), max(map(len, samples))), np.int64)
    for row, sample in zip(token_ids, samples, strict=True):
        row[: len(sample)] = sample
    return torch.from_numpy(token_ids)


class Forwarder:
    """Runs batches of samples through the target and encodes the tapped states."""

    def __init__(
        self,
        target: Target,
        encoding: Encoding,
        calibration: Calibration,
        table: SampleTable,
        batch_tokens: int,
        overlap: Overlap | None = None,
    ) -> None:
        self._target = target
        self._encoding = encoding
        self._calibration = calibration.to(target.device)
        self._table = table
        self._budget: int | None = None  # tokens with padding; None until memory was short
        self._num_unfit = 0
        self._overlap = overlap or Overlap()
        self._under_way: list[torch.Tensor] = []  # what the batch before this one still has on the device
        self._copies: Any = None
        self._buffers: HostBuffers | None = None
        if target.device.type == "cuda":
            self._copies = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
            num_tokens = min(max(batch_tokens, int(table.lengths.max())), int(table.lengths.sum()))
            self._buffers = HostBuffers(encoding, num_tokens, NUM_BUFFERS, pinned=True)
            self._overlap.num_ring_bytes = self._buffers.num_bytes
            logger.info(
                "Host memory for batches on their way to disk: %d pinned buffers of %d tokens, %s in all.",
                NUM_BUFFERS,
                num_tokens,
                format_bytes(self._buffers.num_bytes),
            )

    def run(self, indices: Sequence[int]) -> Iterator[EncodedBatch | Unfit]:
        """Encode the samples at `indices`.

        Where the device's memory does not suffice, the token budget is halved for the rest of the run and a batch above
        it is run in parts. A sample that does not fit alone is given back as Unfit. Raises InputError where eight of them
        follow one another.
        """
        parts = deque(self._split(tuple(indices)))
        while parts:
            part = parts.popleft()
            encoded = self._try(part)
            if encoded is None and len(part) == 1:
                encoded = self._try(part)  # everything else has left the device now
            if encoded is not None:
                self._num_unfit = 0
                yield encoded
            elif len(part) == 1:
                yield self._unfit(part[0])
            else:
                self._budget = len(part) * int(self._table.lengths[list(part)].max()) // 2
                logger.warning(
                    "Out of device memory with %d samples: batches have at most %d tokens from here on. "
                    "Lower --batch-tokens to start there.",
                    len(part),
                    self._budget,
                )
                parts.extendleft(reversed(self._split(part)))

    def _split(self, indices: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Cut a batch into parts within the budget, or of one sample."""
        if self._budget is None:
            return [indices]
        parts: list[tuple[int, ...]] = []
        start = longest = 0
        for position, index in enumerate(indices):
            longest = max(longest, int(self._table.lengths[index]))
            if position > start and (position - start + 1) * longest > self._budget:
                parts.append(indices[start:position])
                start, longest = position, int(self._table.lengths[index])
        return [*parts, indices[start:]]

    def _unfit(self, index: int) -> Unfit:
        self._num_unfit += 1
        length = int(self._table.lengths[index])
        if self._num_unfit == MAX_UNFIT_IN_A_ROW:
            raise InputError(
                f"{MAX_UNFIT_IN_A_ROW} samples one after the other, the last of {length:,} tokens, do not fit into the "
                "memory of the device even alone; lower --max-tokens, or free the device."
            )
        return Unfit(index, length)

    def _try(self, indices: tuple[int, ...]) -> EncodedBatch | None:
        """Run one batch; None, with the device's memory cleared, where it was out of memory."""
        try:
            return self._run(indices)
        except torch.OutOfMemoryError:
            pass
        # outside the except clause: there the traceback would keep the failed batch's tensors alive
        if self._copies is not None:
            torch.cuda.synchronize(self._target.device)
            self._under_way.clear()  # its copies are complete now
            torch.cuda.empty_cache()
        return None

    def _run(self, indices: tuple[int, ...]) -> EncodedBatch:
        samples = [self._table.sample(index)[2] for index in indices]
        lengths = tuple(map(len, samples))
        token_ids = pad_right(samples)
        num_padded = token_ids.numel()
        valid = torch.arange(token_ids.shape[1])[None, :] < torch.tensor(lengths)[:, None]
        began = self._event()
        encoder = TapEncoder(self._encoding, self._calibration, self._to_device(valid.flatten().nonzero()[:, 0]))
        self._target.run_taps(self._to_device(token_ids), encoder.add)
        features, scales, sound = encoder.finish()
        errors = encoder.errors(features, scales)
        encoded = self._event()
        if self._buffers is None:
            return EncodedBatch(indices, lengths, features, scales, sound, errors, num_padded)
        with self._overlap.waiting("writer"):
            buffer = self._buffers.take()
        self._copies.wait_event(encoded)
        num_tokens = sum(lengths)
        places = (
            buffer.features[:num_tokens],
            buffer.scales[:num_tokens],
            buffer.sound[:num_tokens],
            buffer.errors[0],
        )
        sources = (features, scales, sound, errors)
        with torch.cuda.stream(self._copies):
            for place, source in zip(places, sources, strict=True):
                if source is not None:
                    place.copy_(source, non_blocking=True)
            copied = self._event()
        self._under_way = [source for source in sources if source is not None]
        return EncodedBatch(
            indices,
            lengths,
            features=places[0],
            scales=None if scales is None else places[1],
            sound=places[2],
            errors=None if errors is None else places[3],
            num_padded_tokens=num_padded,
            buffer=buffer,
            buffers=self._buffers,
            events=(began, encoded, copied),
            on_device=self._under_way,
        )

    def _event(self) -> Any:
        """A timed event in the current stream; None on a CPU."""
        if self._copies is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to the device without waiting for the batch that still runs there (from pageable memory it would)."""
        return tensor if self._copies is None else tensor.pin_memory().to(self._target.device, non_blocking=True)
