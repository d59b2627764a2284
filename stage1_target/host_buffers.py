"""Pinned host memory that encoded batches pass through on their way to disk: a fixed number of buffers, made once.

One slab for all buffers, registered with CUDA (torch's own pinned allocator rounds every size up to a power of two: 335
MB to 537 MB). A buffer holds one batch; the main thread waits where all are full, which bounds a worker's host memory.

Shapes: N tokens of a batch at most, L tapped target layers, G scale groups.
"""

from __future__ import annotations

import logging
import queue
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from dflash_train.store.encoding import Encoding

logger = logging.getLogger(__name__)
ALIGN_BYTES = 4096


@dataclass(frozen=True, eq=False)
class HostBuffer:
    """Room for one encoded batch."""

    features: torch.Tensor
    """[N, columns] as stored."""
    scales: torch.Tensor
    """float32 [N, G]; G may be 0."""
    sound: torch.Tensor
    """bool [N, L]."""
    errors: torch.Tensor
    """float32 [1, L]."""


class HostBuffers:
    """`count` buffers of `num_tokens` tokens each; pinned where CUDA copies into them."""

    def __init__(self, encoding: Encoding, num_tokens: int, count: int, pinned: bool) -> None:
        dtype = {"uint16": torch.int16, "uint8": torch.uint8}.get(encoding.storage_dtype.name, torch.int8)
        parts = [
            ((num_tokens, encoding.num_columns), dtype),
            ((num_tokens, encoding.num_scales), torch.float32),
            ((num_tokens, encoding.num_layers), torch.bool),
            ((1, encoding.num_layers), torch.float32),
        ]
        sizes = [-(-rows * columns * part.itemsize // ALIGN_BYTES) * ALIGN_BYTES for (rows, columns), part in parts]
        self.num_tokens = num_tokens
        self.num_bytes = count * sum(sizes)
        self._free: queue.SimpleQueue[HostBuffer] = queue.SimpleQueue()
        slab = torch.empty(self.num_bytes + ALIGN_BYTES, dtype=torch.uint8)
        if pinned:
            slab = _register(self, slab)
        start = -slab.data_ptr() % ALIGN_BYTES
        for _ in range(count):
            views: list[torch.Tensor] = []
            for (shape, part), size in zip(parts, sizes, strict=True):
                num_bytes = shape[0] * shape[1] * part.itemsize
                views.append(slab[start : start + num_bytes].view(part).view(shape))
                start += size
            self._free.put(HostBuffer(*views))

    def take(self) -> HostBuffer:
        """A free buffer; waits for one."""
        return self._free.get()

    def give_back(self, buffer: HostBuffer) -> None:
        """The buffer's contents are no longer needed; any thread may say so."""
        self._free.put(buffer)


def _register(owner: Any, slab: torch.Tensor) -> torch.Tensor:
    """Pin the slab's memory until its owner is gone; where that is refused, torch's pinned memory instead."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
    if error:
        logger.warning("cudaHostRegister failed with error %d; torch's allocator pins the buffers instead.", error)
        return torch.empty(slab.shape, dtype=slab.dtype, pin_memory=True)
    weakref.finalize(owner, lambda memory: runtime.cudaHostUnregister(memory.data_ptr()), slab)
    return slab
