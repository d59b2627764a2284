"""One extract worker: batch → hidden states → encoded features → segment, on one device.

The main thread alone uses torch: it runs the target, encodes on the device and starts the copy to host memory; while
the next batch runs, a writer thread appends the last one to the open segment (numpy and file writes only). At most two
batches wait between them. Host memory: four encoded batches (4 x 16,384 tokens x 40,960 bytes = 2.7 GB for Qwen3-8B in
bf16), pinned on CUDA; device memory: the target, and the raw and encoded states of one batch.

Shapes: B batch, T tokens, N tokens without padding, L tapped target layers, H hidden size, F features a token.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_train.errors import InputError
from dflash_train.stage1_target import messages
from dflash_train.stage1_target.calibration import calibrate, draw_samples
from dflash_train.stage1_target.identity import build_manifest, frozen_target
from dflash_train.stage1_target.samples import SampleTable
from dflash_train.stage1_target.schedule import plan_batches
from dflash_train.stage1_target.target import Target, load_target
from dflash_train.store.creation import create_store
from dflash_train.store.encoding import Encoding, make_encoding
from dflash_train.store.manifest import StoreError, format_id, hash_calibration
from dflash_train.store.reader import StoreReader
from dflash_train.store.segment import SegmentWriter

if TYPE_CHECKING:
    from dflash_train.stage1_target.extract import ExtractConfig

logger = logging.getLogger(__name__)

WAITING_BATCHES = 2
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class EncodedBatch:
    """Features of some samples in host memory, without padding."""

    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    features: torch.Tensor
    """[N, F] as stored."""
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

    def __init__(
        self, target: Target, encoding: Encoding, channel_scale: NDArray[np.float32], table: SampleTable
    ) -> None:
        self._target = target
        self._encoding = encoding
        self._channel_scale = torch.from_numpy(channel_scale).to(target.device)
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
        features, scales = self._encoding.encode(tokens, self._channel_scale)
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


class StoreWriter:
    """The writer thread: appends encoded batches to the open segment and commits it when it is full or old."""

    def __init__(
        self,
        config: ExtractConfig,
        encoding: Encoding,
        table: SampleTable,
        attributes: dict[str, Any],
        report: Callable[[messages.Committed], None],
    ) -> None:
        self._config = config
        self._encoding = encoding
        self._table = table
        self._attributes = attributes
        self._report = report
        self._queue: queue.Queue[EncodedBatch | messages.Quarantine | messages.Commit | None] = queue.Queue(
            WAITING_BATCHES
        )
        self._segment: SegmentWriter | None = None
        self._indices: list[int] = []
        self._num_entries = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, item: EncodedBatch | messages.Quarantine | messages.Commit) -> None:
        """Hand over a batch whose copy is complete, or a command; waits while two are waiting. Raises what writing raised."""
        self.check()
        self._queue.put(item)

    def check(self) -> None:
        """Raise what the thread raised."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write what waits, commit the open segment and end the thread."""
        self.check()
        self._queue.put(None)
        self._thread.join()
        self.check()

    def _run(self) -> None:
        try:
            while True:
                try:
                    item = self._queue.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    self._commit_if_due()
                    continue
                if isinstance(item, EncodedBatch):
                    self._append(item)
                elif isinstance(item, messages.Quarantine):
                    for entry in item.entries:
                        self._open().quarantine(entry)
                    self._num_entries += len(item.entries)
                else:
                    self._commit()
                    if item is None:
                        return
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._error = error
            while self._queue.get() is not None:  # never leave the main thread waiting
                pass

    def _open(self) -> SegmentWriter:
        if self._segment is None:
            self._segment = SegmentWriter(self._config.store, self._encoding, self._attributes)
        return self._segment

    def _append(self, batch: EncodedBatch) -> None:
        features = batch.features.numpy()
        scales = None if batch.scales is None else batch.scales.numpy()
        finite = batch.finite.numpy()
        start = 0
        for index, length in zip(batch.indices, batch.lengths, strict=True):
            rows = slice(start, start + length)
            start += length
            sample_id, group, token_ids, loss_mask = self._table.sample(index)
            segment = self._open()
            if finite[rows].all():
                segment.append(
                    sample_id, group, token_ids, loss_mask, features[rows], None if scales is None else scales[rows]
                )
            else:
                position, layer = (int(number) for number in np.argwhere(~finite[rows])[0])
                layer_id = self._layer_id(layer)
                reason = f"hidden state of layer {layer_id} is not finite at token {position} of {length}"
                segment.quarantine({"id": format_id(sample_id), "row": None, "reason": reason})
                logger.warning("Sample %s: %s.", format_id(sample_id), reason)
            self._indices.append(index)
            self._commit_if_due()

    def _layer_id(self, position: int) -> int:
        ids = self._config.target_layer_ids
        assert ids is not None, "the parent fills in the layers"
        return ids[position]

    def _commit_if_due(self) -> None:
        segment = self._segment
        if segment is not None and (
            segment.num_bytes >= self._config.segment_bytes or segment.age_seconds >= self._config.segment_seconds
        ):
            self._commit()

    def _commit(self) -> None:
        segment, indices, num_entries = self._segment, tuple(self._indices), self._num_entries
        if segment is None:
            return
        num_tokens, num_bytes = segment.num_tokens, segment.num_bytes
        segment_id = segment.commit()
        self._segment, self._indices, self._num_entries = None, [], 0
        if segment_id is not None:
            logger.info("Committed segment %s: %d samples, %d tokens.", segment_id, segment.num_samples, num_tokens)
            self._report(
                messages.Committed(segment_id, indices, segment.num_samples, num_tokens, num_bytes, num_entries)
            )


def run_worker(
    connection: Connection, config: ExtractConfig, table_path: Path, device: str, attributes: dict[str, Any]
) -> None:
    """Body of a worker process: load, let the parent decide who creates the store, run batches until told to finish."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sending = threading.Lock()

    def send(message: Any) -> None:
        with sending:
            connection.send(message)

    try:
        _work(connection, send, config, SampleTable.load(table_path), device, attributes)
    except InputError as error:
        logger.error("%s", error)
        send(messages.Failed(error))
        raise SystemExit(1) from error


def _work(
    connection: Connection,
    send: Callable[[Any], None],
    config: ExtractConfig,
    table: SampleTable,
    device: str,
    attributes: dict[str, Any],
) -> None:
    assert config.target_layer_ids is not None, "the parent fills in the layers"
    logger.info("Loading %s on %s.", config.target.name, device)
    target = load_target(config.target, config.target_layer_ids, device)
    encoding = make_encoding(config.encoding, len(target.target_layer_ids), target.hidden_size)
    send(messages.Loaded())
    command = connection.recv()
    if isinstance(command, messages.Create):
        _create(config, target, encoding, table)
        send(messages.Created())
    elif isinstance(command, messages.Finish):
        return
    reader = StoreReader(config.store, segments=())
    check_target(reader, target, encoding)
    forwarder = Forwarder(target, encoding, reader.channel_scale, table)
    writer = StoreWriter(config, encoding, table, attributes, send)
    send(messages.Ready())
    waiting: tuple[int, list[EncodedBatch]] | None = None  # number of a batch, and what of it is on its way to the host

    def hand_over() -> None:
        nonlocal waiting
        if waiting is not None:
            number, encoded = waiting
            waiting = None
            for part in encoded:
                if part.copied is not None:
                    part.copied.synchronize()
                writer.put(part)
            send(messages.Ran(number))

    while True:
        if not connection.poll(0):
            hand_over()
            while not connection.poll(POLL_SECONDS):
                writer.check()
        command = connection.recv()
        if isinstance(command, messages.Run):
            parts: list[EncodedBatch] = []
            for part in forwarder.run(command.indices):
                hand_over()
                parts.append(part)
            waiting = (command.number, parts)
        elif isinstance(command, messages.Finish):
            hand_over()
            writer.close()
            return
        else:
            hand_over()
            writer.put(command)


def check_target(reader: StoreReader, target: Target, encoding: Encoding) -> None:
    """Raise StoreError naming every field in which the store was made from something else."""
    wanted = build_manifest(target, encoding, reader.manifest.calibration_hash)
    refuse_differences(reader.path, reader.manifest.differences(wanted))


def refuse_differences(path: Path, differences: Sequence[str]) -> None:
    """Raise StoreError if there are any."""
    if differences:
        raise StoreError(
            f"The store {path} was made from something else: {'; '.join(differences)}. "
            "Give the same target, data settings and encoding, or another --store."
        )


def _create(config: ExtractConfig, target: Target, encoding: Encoding, table: SampleTable) -> None:
    """Calibrate and create the store in one transaction."""
    if config.calibration_from is not None:
        other = StoreReader(config.calibration_from, segments=())
        wanted = (target.target_layer_ids, target.hidden_size)
        found = (other.manifest.target_layer_ids, other.manifest.hidden_size)
        if found != wanted:
            raise StoreError(
                f"The calibration of {config.calibration_from} is for layers {list(found[0])} of {found[1]} channels, "
                f"but the layers {list(wanted[0])} of {wanted[1]} channels are to be stored; choose another store."
            )
        channel_scale = other.channel_scale
    else:
        drawn = draw_samples(table.lengths, config.calibration_tokens, config.seed)
        batches = plan_batches(table.lengths, drawn, config.batch_tokens, config.seed)
        logger.info("Calibrating on %d samples, %d tokens.", len(drawn), int(table.lengths[drawn].sum()))
        channel_scale = calibrate(
            target,
            (
                (
                    pad_right([table.sample(index)[2] for index in batch.indices]),
                    [int(table.lengths[i]) for i in batch.indices],
                )
                for batch in batches
            ),
        )
    manifest = build_manifest(target, encoding, hash_calibration(channel_scale))
    create_store(config.store, manifest, channel_scale, frozen_target(target))
    logger.info("Created %s.", config.store)
