"""One extract worker: batch → hidden states → encoded features → segment, on one device.

The main thread alone uses torch: it runs the target, encodes on the device and starts the copy to host memory; while
the next batch runs, a writer thread appends the last one to the open segment (numpy and file writes only). At most two
batches wait between them. Host memory: four encoded batches (4 x 16,384 tokens x 40,960 bytes = 2.7 GB for Qwen3-8B in
bf16), pinned on CUDA; device memory: the target, and the raw and encoded states of one batch.

Shapes: B batch, T tokens, N tokens without padding, L tapped target layers, H hidden size, F features a token.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_train.errors import InputError
from dflash_train.stage1_target import messages
from dflash_train.stage1_target.calibration import calibrate, calibration_of, draw_samples
from dflash_train.stage1_target.extract_config import ExtractConfig
from dflash_train.stage1_target.forward import EncodedBatch, Forwarder, pad_right
from dflash_train.stage1_target.identity import build_manifest, check_target, frozen_target
from dflash_train.stage1_target.projection import fit_projection
from dflash_train.stage1_target.samples import SampleTable
from dflash_train.stage1_target.schedule import plan_batches
from dflash_train.stage1_target.target import Target, load_target
from dflash_train.stage1_target.writer import StoreWriter
from dflash_train.store.calibration import Calibration
from dflash_train.store.creation import create_store
from dflash_train.store.encoding import Encoding
from dflash_train.store.reader import StoreReader

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


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
    encoding = config.resolve_encoding(len(target.target_layer_ids), target.hidden_size)
    send(messages.Loaded())
    command = connection.recv()
    if isinstance(command, messages.Create):
        _create(config, target, encoding, table)
        send(messages.Created())
    elif isinstance(command, messages.Finish):
        return
    reader = StoreReader(config.store, segments=())
    check_target(reader, target, encoding)
    forwarder = Forwarder(target, encoding, reader.calibration, table)
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


def _create(config: ExtractConfig, target: Target, encoding: Encoding, table: SampleTable) -> None:
    """Calibrate and create the store in one transaction."""
    if config.calibration_from is not None:
        calibration = calibration_of(config.calibration_from, target.target_layer_ids, encoding)
    else:
        drawn = draw_samples(table.lengths, config.calibration_tokens, config.seed)
        planned = plan_batches(table.lengths, drawn, config.batch_tokens, config.seed)

        def batches() -> Iterator[tuple[torch.Tensor, list[int]]]:
            for batch in planned:
                samples = [table.sample(index)[2] for index in batch.indices]
                yield pad_right(samples), list(map(len, samples))

        logger.info("Calibrating on %d samples, %d tokens.", len(drawn), int(table.lengths[drawn].sum()))
        calibration = Calibration.from_arrays(calibrate(target, batches()))
        if encoding.is_projected:  # the same tokens again, now that D is known: keeping them would take gigabytes
            calibration = fit_projection(target, batches(), calibration.channel_scale, encoding, config.seed)
    manifest = build_manifest(target, encoding, calibration.hash)
    create_store(config.store, manifest, calibration, frozen_target(target))
    logger.info("Created %s.", config.store)
