"""The import of hidden states that another trainer wrote (foreign.py): its files become samples of a store that trains.

The target is loaded once, for what the files lack: embedding, head, tokenizer and the fingerprint, and to prove on a few
samples that the files hold the layers one says. Then files are read two ahead, in a seeded order (so that what is there
after a stop is a fair sample), encoded on the device and appended to segments as an extract's are. A file that cannot be
used goes into quarantine by name, with the reason; it is not tried again until it, or its row of the data set, changes. A sample's id is that of
its tokens, so whatever was stored, by whichever run, extract included, is not stored twice.

Host memory: three files. Speed: that of reading the files.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_train.errors import InputError
from dflash_train.machine.launch import stop_signals
from dflash_train.stage1_target.calibration import calibrate_states, calibration_of
from dflash_train.stage1_target.encoding_choice import resolve_encoding
from dflash_train.stage1_target.forecast import lacking_room, saying_what_lacks
from dflash_train.stage1_target.foreign import ForeignSample, Layout, StateFile, UnusableFile, open_layout
from dflash_train.stage1_target.identity import (
    build_manifest,
    check_target,
    frozen_target,
    known_without_weights,
    refuse_differences,
)
from dflash_train.stage1_target.import_check import CHECK_TOKENS, check_states
from dflash_train.stage1_target.import_config import ImportConfig, ImportResult
from dflash_train.stage1_target.preparation import open_if_there
from dflash_train.stage1_target.projection import fit_states
from dflash_train.stage1_target.sample_table import prompt_group, sample_id
from dflash_train.stage1_target.target import Target, load_target
from dflash_train.stage1_target.target_config import (
    check_target_layer_ids,
    load_model_config,
    load_tokenizer,
    text_config,
)
from dflash_train.store.calibration import Calibration
from dflash_train.store.consumed import read_consumed
from dflash_train.store.creation import clean_staging, create_store, store_lock
from dflash_train.store.encoding import Encoding, are_sound, unsound_state
from dflash_train.store.reader import StoreReader, open_manifest
from dflash_train.store.reference import ReferenceWriter
from dflash_train.store.segment import SegmentWriter
from dflash_train.units import format_count

logger = logging.getLogger(__name__)

READ_AHEAD = 2
ENCODE_TOKENS = 4096
"""Of a sample, encoded at a time: device memory does not grow with its length."""
Report = Callable[[tuple[int, int] | str], None]
"""Gets (files done, files in all), or a note."""


def import_store(config: ImportConfig, report: Report | None = None) -> ImportResult:
    """Store the samples of another program's files. Raises InputError before any work where the input cannot do."""
    report = report or (lambda _event: None)
    layout = open_layout(config.source, config.layout, config.hidden_states)
    model_config = load_model_config(config.target)
    text = text_config(model_config)
    layer_ids = layout.layer_ids(config.layers)
    try:
        check_target_layer_ids(layer_ids, int(text.num_hidden_layers))
    except InputError as error:
        raise InputError(
            f"--layers {','.join(map(str, config.layers))} are decoder layers {','.join(map(str, layer_ids))}, as "
            f"{layout.name} numbers them. {error}"
        ) from error
    hidden_size, started = int(text.hidden_size), time.monotonic()
    with store_lock(config.store), stop_signals() as stop, warnings.catch_warnings():
        # torch warns of a protocol that it then refuses: the file is quarantined, with the reason
        warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
        reader, other = open_if_there(config.store), config.calibration_from
        manifests = [None if reader is None else reader.manifest, None if other is None else open_manifest(other)]
        encoding = resolve_encoding(config.encoding, config.rank, len(layer_ids), hidden_size, *manifests)
        # refused now, not after the target is loaded
        calibration = None if other is None else calibration_of(other, layer_ids, encoding)
        tokenizer = load_tokenizer(config.target)
        if reader is not None:
            known = known_without_weights(config.target, model_config, tokenizer, layer_ids, encoding)
            if calibration is not None:
                known["calibration_hash"] = calibration.hash
            refuse_differences(config.store, reader.manifest.differences(replace(reader.manifest, **known)))
        clean_staging(config.store)
        run = _Import(config, layout, encoding, tokenizer.pad_token_id, report)
        pending = run.pending(reader)
        if not pending:
            return run.result
        dtype = config.target.dtype
        if reader is None:  # where nothing can be used, it is better not made
            sample = run.first_usable(pending)
            dtype = str(sample.states.dtype).removeprefix("torch.") if dtype == "auto" else dtype
        elif dtype == "auto":
            dtype = reader.manifest.target_dtype
        report(f"loading {config.target.name} in {dtype} on {config.device}")
        target = load_target(replace(config.target, dtype=dtype), layer_ids, config.device)
        run.check(target, pending)
        if reader is None:
            calibration = calibration or run.calibrate(pending)
            create_store(
                config.store, build_manifest(target, encoding, calibration.hash), calibration, frozen_target(target)
            )
            reader = StoreReader(config.store)
        else:
            check_target(reader, target, encoding)
        vocab_size = target.vocab_size
        del target
        with saying_what_lacks(lambda: lacking_room(config.store, run.bytes_left(pending))):
            run.store(pending, reader, vocab_size, stop.is_set)
        run.result.seconds = time.monotonic() - started
        return run.result


class _Import:
    """One run: what is to be read, and what has come of it."""

    def __init__(
        self, config: ImportConfig, layout: Layout, encoding: Encoding, padding: int | None, report: Report
    ) -> None:
        self.config = config
        self.layout = layout
        self.encoding = encoding
        self.result = ImportResult(num_files=len(layout.files))
        self._num_checked = 0
        self._num_committed = 0
        self._padding = padding
        self._report = report
        self._device = torch.device(config.device)
        self._source = str(config.source)

    def pending(self, reader: StoreReader | None) -> list[StateFile]:
        """The files that are neither stored nor in quarantine, in the order in which they will be."""
        files = self.layout.files
        order = np.random.default_rng([self.config.seed, 2]).permutation(len(files)).tolist()
        if reader is None:
            return [files[number] for number in order]
        consumed = read_consumed(reader.path)
        stored, entries = reader.stored_ids() | consumed.ids, [*reader.quarantined(), *consumed.quarantined]
        known: dict[Any, set[str | None]] = {}
        for entry in entries:
            version = (entry.get("file"), entry.get("bytes"), entry.get("modified"))
            known.setdefault(version, set()).add(entry.get("data_row"))
        pending = []
        for number in order:
            file = files[number]
            rows = known.get((file.name, *_version(file)), set())
            if None in rows or (rows and self.layout.row_version(file) in rows):
                self.result.num_known += 1
                continue
            try:
                is_stored = stored and sample_id(*self._without_padding(*self.layout.read_tokens(file))) in stored
            except UnusableFile:
                is_stored = False  # read whole, it goes into quarantine
            if is_stored:
                self.result.num_stored += 1
            else:
                pending.append(file)
        return pending

    def first_usable(self, files: Sequence[StateFile]) -> ForeignSample:
        """The first file that can be read; InputError, with the commonest reason, if none of the first hundred can."""
        reasons: Counter[str] = Counter()
        for file in files[:100]:
            try:
                return self._read(file)
            except UnusableFile as error:
                reasons[str(error)] += 1
        [(reason, count)] = reasons.most_common(1)
        raise InputError(
            f"None of {format_count(reasons.total(), 'file')} of {self.layout.folder} can be used; the commonest "
            f"reason ({format_count(count, 'time')}): {reason}. Check --layers and --target."
        )

    def _read(self, file: StateFile) -> ForeignSample:
        return self.layout.read(file, self.encoding.num_layers, self.encoding.hidden_size)

    def _readable(self, files: Sequence[StateFile]) -> Iterator[tuple[StateFile, ForeignSample]]:
        for file, read in self._read_ahead(files):
            if isinstance(read, ForeignSample):
                yield file, read

    def _read_ahead(self, files: Sequence[StateFile]) -> Iterator[tuple[StateFile, ForeignSample | UnusableFile]]:
        """Read files while others are at work on the ones before."""

        def read(file: StateFile) -> ForeignSample | UnusableFile:
            try:
                return self._read(file)
            except UnusableFile as error:
                return error

        with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="reader") as pool:
            ahead: list[tuple[StateFile, Future[ForeignSample | UnusableFile]]] = []
            for file in files:
                ahead.append((file, pool.submit(read, file)))
                if len(ahead) > READ_AHEAD:
                    done, future = ahead.pop(0)
                    yield done, future.result()
            for done, future in ahead:
                yield done, future.result()

    def check(self, target: Target, files: Sequence[StateFile]) -> None:
        """Prove on some files that they hold the layers that they should."""
        largest, wanted = 0.0, self.config.check_samples
        for file, sample in self._readable(files) if wanted else ():
            sample = self._trimmed(sample)
            is_sound = self._soundness(sample.states[:CHECK_TOKENS]).all()
            if not is_sound or sample.token_ids.max() >= target.vocab_size:
                continue  # it will go into quarantine
            largest = max(largest, check_states(target, self.layout, file, sample))
            self._num_checked += 1
            if self._num_checked == wanted:
                break
        if self._num_checked:
            layers = ", ".join(map(str, target.target_layer_ids))
            self._report(
                f"the files hold decoder layers {layers}: {self._num_checked} samples differ by {largest:.2%} at most"
            )
        if self._num_checked < wanted:
            self._report(
                f"layers were checked on {self._num_checked} of {wanted} samples (--check-samples): no other file can be "
                "used"
            )

    def calibrate(self, files: Sequence[StateFile]) -> Calibration:
        """Channel scale, and projection, of a draw of files of their own order."""
        config, encoding = self.config, self.encoding
        order = np.random.default_rng([config.seed, 1]).permutation(len(files)).tolist()

        def states() -> Iterator[torch.Tensor]:
            num_tokens = 0
            for _, sample in self._readable([files[number] for number in order]):
                yield sample.states.to(self._device)
                num_tokens += len(sample.states)
                if num_tokens >= config.calibration_tokens:
                    break

        self._report(
            f"measuring the channel scale on {config.calibration_tokens:,} tokens or all, and creating the store"
        )
        scale = calibrate_states(states(), encoding.num_layers, encoding.num_states, self._device)
        if scale is None:
            raise InputError(f"No token of the files in {self.layout.folder} has finite states. Give other files.")
        calibration = Calibration.from_arrays(scale)
        if encoding.is_projected:
            return fit_states(states(), calibration.channel_scale, encoding, self._device, config.seed)
        return calibration

    def store(
        self,
        files: Sequence[StateFile],
        reader: StoreReader,
        vocab_size: int,
        stopped: Callable[[], bool],
    ) -> None:
        """Encode and commit the files' samples until all are, or somebody says stop."""
        config, result = self.config, self.result
        attributes = {
            "data": {"name": self._source, "format": self.layout.name, "layers": list(config.layers)},
            "settings": {"target": config.target.name, "seed": config.seed},
            "store": reader.manifest.origin,
        }
        stored = reader.stored_ids() | read_consumed(reader.path).ids
        calibration = reader.calibration.to(self._device)
        state_bytes = sum(_version(file)[0] for file in self.layout.files)
        num_tokens = state_bytes // (2 * self.encoding.num_states)  # about: for the share of reference samples alone
        reference = ReferenceWriter(config.store, self.encoding, attributes, num_tokens)
        segment = SegmentWriter(config.store, self.encoding, attributes)
        new: set[int] = set()
        self._report((0, len(files)))
        for number, (file, read) in enumerate(self._read_ahead(files), start=1):
            try:
                if isinstance(read, UnusableFile):
                    raise read
                sample = self._trimmed(read)
                token_ids, loss_mask, states = sample.token_ids, sample.loss_mask, sample.states
                identity = sample_id(token_ids, loss_mask)
                if identity in stored or identity in new:
                    result.num_duplicates += identity in new
                    result.num_stored += identity in stored
                else:
                    features, scales = self._encode(token_ids, loss_mask, states, calibration, vocab_size)
                    if config.check_samples and not self._num_checked:  # none could be used then
                        raise InputError(
                            f"{file.path} has changed since no file could be used to check the layers. Run this again "
                            "when nothing writes there, or with --check-samples 0 where you know the layers."
                        )
                    group = prompt_group(token_ids, loss_mask, identity)
                    segment.append(identity, group, token_ids, loss_mask, features, scales)
                    if reference.keeps(identity):
                        bits = states.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
                        reference.append(identity, group, token_ids, loss_mask, bits)
                    new.add(identity)
                    result.num_new += 1
                    result.num_new_tokens += len(token_ids)
                    result.num_padding += len(read.token_ids) - len(token_ids)
            except UnusableFile as error:
                reason, (size, modified) = str(error), _version(file)
                entry = {"id": None, "row": file.number, "reason": reason, "data": self._source}
                entry |= {"file": file.name, "bytes": size, "modified": modified}
                row = self.layout.row_version(file)
                segment.quarantine(entry if row is None else {**entry, "data_row": row})
                result.reasons[reason] += 1
                logger.warning("%s: %s.", file.path, reason)
            if segment.num_bytes >= config.segment_bytes or segment.age_seconds >= config.segment_seconds:
                segment.commit()
                self._num_committed = number
                reference.commit()
                segment = SegmentWriter(config.store, self.encoding, attributes)
            self._report((number, len(files)))
            if stopped():
                self._report("stopping: what was read is committed")
                result.stopped = True
                break
        segment.commit()
        reference.commit()

    def bytes_left(self, files: Sequence[StateFile]) -> int:
        """About what the files that `store` has not committed will take, from their sizes."""
        state_bytes = sum(_version(file)[0] for file in files[self._num_committed :])
        return state_bytes * self.encoding.bytes_per_token // (2 * self.encoding.num_states)

    def _soundness(self, states: torch.Tensor) -> torch.Tensor:
        """Which states of a sample [T, L * H] may be stored, bool [T, L]."""
        return are_sound(states.reshape(len(states), self.encoding.num_layers, self.encoding.hidden_size))

    def _without_padding(
        self, token_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """A sample without padding tokens at its end that do not count in the loss."""
        used = np.flatnonzero((token_ids != self._padding) | (loss_mask == 1))
        length = int(used[-1]) + 1 if len(used) else len(token_ids)
        return token_ids[:length], loss_mask[:length]

    def _trimmed(self, sample: ForeignSample) -> ForeignSample:
        """A sample as it will be stored."""
        token_ids, loss_mask = self._without_padding(sample.token_ids, sample.loss_mask)
        return ForeignSample(token_ids, loss_mask, sample.states[: len(token_ids)])

    def _encode(
        self,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        states: torch.Tensor,
        calibration: Calibration,
        vocab_size: int,
    ) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
        if not loss_mask.any():
            raise UnusableFile("no supervised tokens")
        if int(token_ids.max()) >= vocab_size:
            raise UnusableFile(f"token id {int(token_ids.max())} is beyond the target's vocabulary of {vocab_size}")
        features, scales = [], []
        for start in range(0, len(states), ENCODE_TOKENS):
            piece = states[start : start + ENCODE_TOKENS].to(self._device)
            sound = self._soundness(piece)
            if not sound.all():
                token, plane = (~sound).nonzero()[0].tolist()
                layer_id = self.layout.layer_ids(self.config.layers)[plane]
                raise UnusableFile(unsound_state(layer_id, start + token, len(states)))
            encoded, steps = self.encoding.encode(piece, calibration)
            features.append(encoded.cpu())
            scales += [] if steps is None else [steps.cpu()]
        return torch.cat(features).numpy(), torch.cat(scales).numpy() if scales else None


def _version(file: StateFile) -> tuple[int, int]:
    """Size and time of the last change, in nanoseconds: by these a file that was mended is known."""
    try:
        status = file.path.stat()
    except OSError:  # a link to nowhere, or gone: reading it gives the reason
        return 0, 0
    return status.st_size, status.st_mtime_ns
