"""One extract worker: batch → hidden states → encoded features → segment, on one device.

The main thread alone uses torch: it runs the target, encodes on the device and starts the copy to host memory; while
the next batch runs, writer threads append earlier ones to open segments (numpy and file writes only). Host memory: four
buffers of one encoded batch each (4 x 16,384 tokens x 40,960 bytes = 2.7 GB for Qwen3-8B in bf16, half of it in int8),
pinned on CUDA and made once; device memory: the target, what a batch needs to run, and two encoded batches.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target import messages
from dflash_train.stage1_target.calibration import calibrate, calibration_of, draw_samples
from dflash_train.stage1_target.compiled_target import compile_layers
from dflash_train.stage1_target.extract_config import ExtractConfig
from dflash_train.stage1_target.forward import EncodedBatch, Forwarder, Unfit, pad_right
from dflash_train.stage1_target.identity import build_manifest, check_target, frozen_target
from dflash_train.stage1_target.overlap import Overlap
from dflash_train.stage1_target.projection import fit_projection, read_fc
from dflash_train.stage1_target.samples import SampleTable
from dflash_train.stage1_target.schedule import plan_batches
from dflash_train.stage1_target.self_check import self_check
from dflash_train.stage1_target.slow_paths import slow_paths_of_model
from dflash_train.stage1_target.target import Target, load_target
from dflash_train.stage1_target.writer import StoreWriter, num_writers
from dflash_train.store.calibration import Calibration
from dflash_train.store.creation import create_store
from dflash_train.store.encoding import Encoding
from dflash_train.store.reader import StoreReader
from dflash_train.store.reference import ReferenceWriter

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
COPY_POLL_SECONDS = 0.001


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
    target = load_target(config.target, config.target_layer_ids, device, config.gpus_per_target)
    encoding = config.resolve_encoding(len(target.target_layer_ids), target.hidden_size)
    send(messages.Loaded(tuple(slow_paths_of_model(target))))
    command = connection.recv()
    checked = False
    if isinstance(command, messages.Create):
        checked = _create(config, target, encoding, table)
        send(messages.Created())
    elif isinstance(command, messages.Finish):
        return
    reader = StoreReader(config.store, segments=())
    check_target(reader, target, encoding)
    if config.compile_target:
        compile_layers(target, config.batch_tokens, int(table.lengths.max()))
        checked = False  # the compiled layers have not been
    attributes = {**attributes, "store": reader.manifest.origin}
    overlap = Overlap()
    forwarder = Forwarder(target, encoding, reader.calibration, table, config.batch_tokens, overlap)
    num_threads = num_writers(target.device.type)
    reference = ReferenceWriter(config.store, encoding, attributes, int(table.lengths.sum()))
    writer = StoreWriter(config, encoding, table, attributes, send, num_threads, overlap, reference)
    send(messages.Ready())
    waiting: list[EncodedBatch | Unfit] = []  # parts of a batch on their way to the host
    ran: list[int] = []  # the number of the batch, once all its parts are waiting

    def hand_over() -> None:
        for part in waiting:
            if isinstance(part, EncodedBatch):
                part.wait(overlap)
            writer.put(part)
        for number in ran:
            send(messages.Ran(number))
        waiting.clear()
        ran.clear()

    def is_copied() -> bool:
        return all(not isinstance(part, EncodedBatch) or part.is_copied for part in waiting)

    while True:
        # the next batch may come while this one runs: waiting for this one alone would leave the GPU idle between them
        with overlap.waiting("gpu"):
            while not is_copied() and not connection.poll(COPY_POLL_SECONDS):
                pass
        if is_copied():
            hand_over()
        with overlap.waiting("parent"):
            while not connection.poll(POLL_SECONDS):
                writer.check()
        command = connection.recv()
        if isinstance(command, messages.Run):
            if not checked and len(command.indices) > 1:
                checked = True
                _check_batch(target, table, command.indices, reader.calibration.channel_scale)
            for part in forwarder.run(command.indices):
                hand_over()  # what ran before this part, while it runs
                if isinstance(part, EncodedBatch):
                    add_reference(part, target, table, reference)
                waiting.append(part)
            ran.append(command.number)
        elif isinstance(command, messages.Finish):
            hand_over()
            writer.close()
            overlap.closed()
            if overlap.num_tokens:  # else nothing ran, or too little to say
                logger.info("%s", overlap.line())
            return
        else:
            hand_over()
            writer.put(command)


def _check_batch(target: Target, table: SampleTable, indices: tuple[int, ...], channel_scale: torch.Tensor) -> None:
    """Stop here, before a batch is written, if its states are not those of its samples alone."""
    began = time.perf_counter()
    result = self_check(target, [table.sample(index)[2] for index in indices], channel_scale, pad_right)
    if result is not None:
        logger.info("Checked in %.1f s: %s.", time.perf_counter() - began, result)
        result.stop_if_wrong()


def add_reference(part: EncodedBatch, target: Target, table: SampleTable, reference: ReferenceWriter) -> None:
    """Add the raw states of those of a batch's samples that are kept for reference.

    They run once more, alone: with one sample in 500 that costs less than to keep every batch's raw states at hand.
    """
    for index in part.indices:
        if reference.keeps(int(table.ids[index])):
            with suppress(torch.OutOfMemoryError):  # nothing is trained on them
                states = target.hidden_states(pad_right([table.sample(index)[2]]))[0]
                part.reference[index] = states.bfloat16().view(torch.int16).cpu()


def _create(config: ExtractConfig, target: Target, encoding: Encoding, table: SampleTable) -> bool:
    """Calibrate and create the store in one transaction. Whether a batch was checked before."""
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
            drafter = config.projection_from
            fc = None if drafter is None else read_fc(drafter, target.target_layer_ids, target.hidden_size)
            calibration = fit_projection(target, batches(), calibration.channel_scale, encoding, config.seed, fc)
    schedule = plan_batches(table.lengths, range(len(table)), config.batch_tokens, config.seed)
    several = next((batch.indices for batch in schedule if len(batch.indices) > 1), ())
    if several:  # before the store is there: its calibration would be of wrong states
        _check_batch(target, table, several, calibration.channel_scale)
    manifest = build_manifest(target, encoding, calibration.hash)
    create_store(config.store, manifest, calibration, frozen_target(target))
    logger.info("Created %s.", config.store)
    return bool(several)
