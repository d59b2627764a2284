"""Reading rows ahead: one plain thread fills reused buffers with preadv and numpy while the device computes.

The thread never calls anything compiled (torch's compiler keeps global state), and the features stay in their stored
encoding until the device decodes them: a row of Qwen3-8B at S = 8,192 is 335 MB in bf16, half of it in int8.

Symbols: S tokens of a row, F columns of the features as stored, G scale groups, A anchors, K block size, N counted slots.
"""

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.blocks import (
    Blocks,
    document_positions,
    labels_left,
    make_blocks,
    sample_anchors,
    sample_anchors_by_document,
    sample_stretch,
)
from dflash_train.stage2_drafter.rows import ANCHOR_STREAM, HoldoutRows, RowKey, RowSchedule
from dflash_train.store.reader import StoreReader


@dataclass(kw_only=True)
class RowBuffer:
    """Memory of one row's features and scales, reused; pinned where rows go to a GPU."""

    features: torch.Tensor
    scales: torch.Tensor | None

    @staticmethod
    def allocate(reader: StoreReader, row_tokens: int, pinned: bool) -> "RowBuffer":
        encoding = reader.encoding
        dtype = torch.int16 if encoding.storage_dtype.itemsize == 2 else torch.int8
        scales = (
            torch.zeros((row_tokens, encoding.num_scales), dtype=torch.float32, pin_memory=pinned)
            if encoding.num_scales
            else None
        )
        features = torch.zeros((row_tokens, encoding.num_columns), dtype=dtype, pin_memory=pinned)
        return RowBuffer(features=features, scales=scales)


@dataclass(kw_only=True)
class Row:
    """One row on the host. features [S, F] and scales [S, G] are as stored and live in a buffer that is reused."""

    key: RowKey | None
    samples: np.ndarray
    num_tokens: int
    positions: np.ndarray
    """int64 [S]: positions within the document, 0 in the unused tail."""
    blocks: Blocks
    slots: np.ndarray
    """int64 [N]: places of the slots that count in the loss within the A·K slots of the row."""
    labels: np.ndarray
    """int64 [N]: their labels."""
    left: np.ndarray | None
    """int64 [A]: tokens of its answer after each anchor, of held-out rows."""
    buffer: RowBuffer


@dataclass(frozen=True, kw_only=True)
class RowBuilder:
    """Reads the samples of a row and draws its blocks. Thread-safe; numpy and preadv only."""

    reader: StoreReader
    row_tokens: int
    num_anchors: int
    block_size: int
    mask_token_id: int
    seed: int
    sources: tuple[RowSchedule, HoldoutRows]
    """Training rows, then held-out rows."""
    anchors_by: str = "token"
    """token: each candidate of a row is as likely; conversation: each conversation gets as many anchors."""

    def buffer(self, pinned: bool) -> RowBuffer:
        """A new buffer for a row; pinned for copies to CUDA."""
        return RowBuffer.allocate(self.reader, self.row_tokens, pinned=pinned)

    def read_ahead(self, key: RowKey | None) -> None:
        """Begin to fetch the samples of a row that is built next, where the store is remote."""
        if key is not None:
            self.reader.read_ahead(self.sources[key.holdout].samples(key).tolist())

    def build(self, key: RowKey | None, buffer: RowBuffer) -> Row:
        """Fill `buffer` and return the row; a None key gives a dummy row without a single anchor."""
        samples = np.zeros(0, dtype=np.int64) if key is None else self.sources[key.holdout].samples(key)
        token_ids = np.zeros(self.row_tokens, dtype=np.int32)
        loss_mask = np.zeros(self.row_tokens, dtype=np.uint8)
        documents = np.full(self.row_tokens, -1, dtype=np.int32)
        features = buffer.features.numpy().view(self.reader.encoding.storage_dtype)
        scales = None if buffer.scales is None else buffer.scales.numpy()
        first = 0
        for document, index in enumerate(samples.tolist()):
            length = int(self.reader.samples["length"][index])
            kept = min(length, self.row_tokens)
            span = slice(first, first + kept)
            if kept == length:
                self.reader.read_into(
                    index, token_ids[span], loss_mask[span], features[span], None if scales is None else scales[span]
                )
            else:  # --crop: the sample's checksum covers all of it
                whole = self.reader.read(index)
                token_ids[span], loss_mask[span] = whole.token_ids[:kept], whole.loss_mask[:kept]
                features[span] = whole.features[:kept]
                if scales is not None and whole.scales is not None:
                    scales[span] = whole.scales[:kept]
            self._refuse_mask_token(index, token_ids[span], loss_mask[span])
            documents[span] = document
            first += kept
        features[first:] = 0  # nothing may see the tail, but what the last row left there must not decide anything
        if scales is not None:
            scales[first:] = 0
        blocks = self._blocks(key, token_ids, loss_mask, documents)
        slots = np.flatnonzero(blocks.label_mask)
        return Row(
            key=key,
            samples=samples,
            num_tokens=first,
            positions=document_positions(documents),
            blocks=blocks,
            slots=slots,
            labels=blocks.labels.reshape(-1)[slots],
            left=labels_left(loss_mask, documents)[blocks.anchor] if key is not None and key.holdout else None,
            buffer=buffer,
        )

    def _refuse_mask_token(self, index: int, token_ids: np.ndarray, loss_mask: np.ndarray) -> None:
        """A mask token that the target emits (eos, pad) would be trained as a label and drafted as an open slot."""
        if not ((token_ids == self.mask_token_id) & (loss_mask != 0)).any():
            return
        raise InputError(
            f"The mask token {self.mask_token_id} is a supervised token of sample "
            f"{int(self.reader.samples['id'][index]):016x}. Give a --mask-token that never occurs in the data."
        )

    def _blocks(
        self, key: RowKey | None, token_ids: np.ndarray, loss_mask: np.ndarray, documents: np.ndarray
    ) -> Blocks:
        """Training rows have anchors at random, held-out rows a stretch of them."""
        epoch, number, holdout = key or RowKey(0, 0)
        rng = np.random.default_rng((self.seed, ANCHOR_STREAM, epoch, number, int(holdout)))
        drawn = sample_anchors_by_document if self.anchors_by == "conversation" else sample_anchors
        sample = sample_stretch if holdout else drawn
        anchors, valid = sample(loss_mask, documents, self.num_anchors, rng)
        return make_blocks(token_ids, loss_mask, documents, anchors, valid, self.block_size, self.mask_token_id)


class RowLoader:
    """Iterates over the rows of `keys`, which one thread builds up to `len(buffers)` rows ahead.

    A row's buffer is the caller's until `release(row.buffer)`; `wait_seconds` counts the time the caller stood still.
    What the thread raises is raised at the row it was building. `close()` ends the thread.
    """

    def __init__(self, builder: RowBuilder, keys: Iterable[RowKey | None], buffers: Sequence[RowBuffer]) -> None:
        self.wait_seconds = 0.0
        self._free: queue.SimpleQueue[RowBuffer | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Row | BaseException | None] = queue.SimpleQueue()
        self._num_buffers = len(buffers)
        for buffer in buffers:
            self._free.put(buffer)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(builder, keys), name="row-loader", daemon=True)
        self._thread.start()

    def _run(self, builder: RowBuilder, keys: Iterable[RowKey | None]) -> None:
        try:
            for key in keys:
                builder.read_ahead(key)
                buffer = self._free.get()
                if buffer is None or self._closed.is_set():
                    return
                self._ready.put(builder.build(key, buffer))
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
            self._ready.put(error)

    def __iter__(self) -> Iterator[Row]:
        while True:
            began = time.perf_counter()
            item = self._ready.get()
            self.wait_seconds += time.perf_counter() - began
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return
            yield item

    def release(self, buffer: RowBuffer) -> None:
        self._free.put(buffer)

    def close(self) -> None:
        self._closed.set()
        self._free.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
