"""All that an extract knows before a worker starts: samples, what is stored already, batches, and the forecast."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_train.errors import InputError
from dflash_train.machine.devices import parse_devices
from dflash_train.machine.disks import user_cache_folder
from dflash_train.stage1_target.calibration import calibration_of
from dflash_train.stage1_target.events import Note, Report, Tokenising
from dflash_train.stage1_target.extract_config import ExtractConfig
from dflash_train.stage1_target.forecast import Forecast, make_forecast
from dflash_train.stage1_target.generation import generation_mismatches, settings_of
from dflash_train.stage1_target.identity import known_without_weights, refuse_differences, tokenizer_files
from dflash_train.stage1_target.projection import read_fc
from dflash_train.stage1_target.quantization import check_quantization
from dflash_train.stage1_target.room import PlanKeeper, StoredSizes, StoreSize, check_limit
from dflash_train.stage1_target.samples import SampleTable, prepare_samples
from dflash_train.stage1_target.schedule import Batch, padding_share, plan_batches
from dflash_train.stage1_target.slow_paths import SlowPath, refused, slow_paths_of_files
from dflash_train.stage1_target.target_config import (
    DTYPES,
    check_target_layer_ids,
    default_target_layer_ids,
    load_model_config,
    load_tokenizer,
    text_config,
)
from dflash_train.stage1_target.target_files import TargetFiles
from dflash_train.stage1_target.tokenization import hash_chat_template
from dflash_train.stage1_target.weight_files import NotComparable, files_fingerprint
from dflash_train.store.consumed import read_consumed
from dflash_train.store.encoding import AUTO_RANK
from dflash_train.store.location import StoreLocation, beside
from dflash_train.store.manifest import format_id
from dflash_train.store.mask_token import default_mask_token, mask_token_wanted
from dflash_train.store.reader import StoreReader, open_manifest
from dflash_train.store.reference import one_in
from dflash_train.store.upload import store_exists
from dflash_train.units import format_count, format_duration

logger = logging.getLogger(__name__)

PACKAGES = ("dflash-train", "torch", "transformers", "tokenizers", "datasets")


@dataclass(frozen=True)
class Prepared:
    """All that is known before a worker starts."""

    config: ExtractConfig
    table: SampleTable
    pending: NDArray[np.int64]
    batches: list[Batch]
    new_entries: list[dict[str, Any]]
    store_exists: bool
    forecast: Forecast
    plan: PlanKeeper
    sizes: StoredSizes
    slow_paths: tuple[SlowPath, ...] = ()
    """Of the target, as far as config and tokenizer tell; said already."""
    mask_token_note: str | None = None
    """What train-drafter will want for this target, where it finds no row for the open slots by itself."""
    weights_note: str | None = None
    """Why the weights were not compared, and what does it, where nothing is left to store; None where they were."""


def prepare(config: ExtractConfig, report: Report, compare_weights: bool = True) -> Prepared:
    """Tokenise, compare with an existing store as far as that goes without loading the target, and forecast.

    Weights are compared here, and with compare_weights, only where nothing is left to store: workers compare what they load.
    """
    model_config = load_model_config(config.target)
    check_quantization(config.target, model_config)
    if config.gpus_per_target > 1 and importlib.util.find_spec("accelerate") is None:
        raise InputError("--gpus-per-target places layers with the package accelerate: pip install accelerate.")
    text = text_config(model_config)
    num_target_layers = int(text.num_hidden_layers)
    layer_ids = (
        default_target_layer_ids(num_target_layers, config.num_taps)
        if config.target_layer_ids is None
        else check_target_layer_ids(config.target_layer_ids, num_target_layers)
    )
    data = config.data
    num_positions = getattr(text, "max_position_embeddings", None)
    if num_positions and data.max_tokens > num_positions:
        report(
            Note(f"max_tokens is lowered from {data.max_tokens:,} to {num_positions:,}, the positions of the target")
        )
        data = replace(data, max_tokens=int(num_positions))
    config = replace(config, data=data, target_layer_ids=layer_ids)
    tokenizer = load_tokenizer(config.target)
    template = hash_chat_template(tokenizer)
    for warning in generation_mismatches(data.source, config.target, data.chat_template_arguments, template):
        report(Note(warning))
    slow_paths = _slow_paths(config, model_config, tokenizer)
    if slow_paths and config.require_fast_kernels:
        raise refused(slow_paths)
    for slow in slow_paths:
        report(Note(f"warning: {slow}"))
    reader, other = open_if_there(config.store), config.calibration_from
    manifests = [None if reader is None else reader.manifest, None if other is None else open_manifest(other)]
    encoding = config.resolve_encoding(len(layer_ids), int(text.hidden_size), *manifests)
    config = replace(config, rank=AUTO_RANK if encoding.rank is None else str(encoding.rank))
    # refused now, not after the target is loaded
    calibration = None if other is None else calibration_of(other, layer_ids, encoding)
    if reader is None and config.projection_from is not None:
        read_fc(config.projection_from, layer_ids, int(text.hidden_size))
    if reader is not None:
        known = known_without_weights(config.target, model_config, tokenizer, layer_ids, encoding)
        if calibration is not None:
            known["calibration_hash"] = calibration.hash
        refuse_differences(config.store, reader.manifest.differences(replace(reader.manifest, **known)))
    cache = config.sample_cache or user_cache_folder() / "samples"
    began = time.monotonic()
    tokenised: list[int] = []

    def tokenising(done: int, rows: int | None) -> None:
        tokenised[:] = [done]
        report(Tokenising(done, rows))

    table = prepare_samples(data, tokenizer, cache, tokenising)
    if tokenised:  # not in the cache
        seconds = format_duration(time.monotonic() - began)
        report(Note(f"tokenised {format_count(tokenised[0], 'row')} in {seconds}; kept in {cache} for the next start"))
    pending = np.flatnonzero(~stored_indices(table, reader))
    weights_note = None
    if compare_weights and reader is not None and not len(pending):
        weights_note = _compare_weights(config, model_config, reader)
    if reader is not None and len(pending):
        mixed = _arguments_warning(reader, data.chat_template_arguments)
        if mixed is not None:
            report(Note(mixed))
    batches = plan_batches(table.lengths, pending, config.batch_tokens, config.seed)
    dtype = config.target.resolve_dtype(torch.device(parse_devices(config.devices)[0].torch_device))
    files = {} if reader is not None else tokenizer_files(tokenizer)
    limit, size = config.max_store_bytes, StoreSize(beside(config.store))
    if limit is not None and len(pending):
        size.measure()
    forecast = make_forecast(
        table,
        pending,
        padding_share(batches),
        encoding=encoding,
        text_config=text,
        table_bytes=dtype.itemsize,
        tokenizer_bytes=sum(map(len, files.values())),
        store=config.store,
        store_exists=reader is not None,
        stored_bytes=size.num_bytes,
        limit_bytes=limit,
    )
    report(forecast)
    for line in forecast.lines():
        logger.info("%s", line)
    forecast.refuse_if_too_large(limit)
    sizes = StoredSizes(
        encoding=encoding,
        lengths=table.lengths,
        ids=table.ids,
        reference_one_in=one_in(int(table.lengths.sum()), encoding),
        segment_bytes=config.segment_bytes,
    )
    if limit is not None:
        check_limit(limit, size, forecast.frozen_bytes, sizes, batches)
    old_entries = [*reader.quarantined(), *read_consumed(config.store).quarantined] if reader is not None else []
    known_entries = set(map(_entry_key, old_entries))
    data_name = f"{data.source} ({data.split})"
    entries = [{**entry, "data": data_name} for entry in table.quarantined]
    new_entries = [entry for entry in entries if _entry_key(entry) not in known_entries]
    plan = PlanKeeper(config.store, reader, table.lengths[pending])
    return Prepared(
        config,
        table,
        pending,
        batches,
        new_entries,
        reader is not None,
        forecast,
        plan,
        sizes,
        slow_paths,
        mask_token_note=_mask_token_note(tokenizer, int(text.vocab_size)),
        weights_note=weights_note,
    )


def _compare_weights(config: ExtractConfig, model_config: Any, reader: StoreReader) -> str | None:
    """Raise StoreError for other weights than the store's; what to say where the files do not tell."""
    manifest = reader.manifest
    try:
        if (dtype := DTYPES.get(manifest.target_dtype)) is None:
            raise NotComparable(f"the store's target was loaded as {manifest.target_dtype}")
        found = files_fingerprint(config.target, model_config, dtype)
    except NotComparable as error:
        return (
            f"the weights were not compared ({error}), which `dflash inspect-store {config.store} --verify recompute "
            f"--target {config.target.name}` does"
        )
    refuse_differences(config.store, manifest.differences(replace(manifest, weights_fingerprint=found)))
    return None


def _mask_token_note(tokenizer: Any, vocab_size: int) -> str | None:
    if default_mask_token(tokenizer, vocab_size) is not None:
        return None
    return (
        f"the target's tokenizer has no mask token and uses all {vocab_size:,} rows of the embedding: train-drafter will "
        f"want --mask-token, {mask_token_wanted(tokenizer)}"
    )


def _arguments_warning(reader: StoreReader, arguments: dict[str, Any]) -> str | None:
    """What to say where segments that are there have other template arguments; None where they have these, or none known.

    Imported segments record none.
    """
    recorded = [source.get("settings", {}).get("chat_template_arguments") for source in reader.sources()]
    others = [json.dumps(one, sort_keys=True) for one in recorded if isinstance(one, dict) and one != arguments]
    if not others:
        return None
    return (
        f"warning: segments of the store ({len(others):,} of {len(recorded):,}) were extracted with "
        f"--chat-template-arguments {' and '.join(repr(one) for one in dict.fromkeys(others))}, this start has "
        f"'{json.dumps(arguments, sort_keys=True)}': a drafter learns both, and another mode of thinking halves acceptance; "
        "give the same, or another --store"
    )


def _slow_paths(config: ExtractConfig, model_config: Any, tokenizer: Any) -> tuple[SlowPath, ...]:
    device = torch.device(parse_devices(config.devices)[0].torch_device)
    files = TargetFiles(
        name=config.target.name, config=model_config.to_dict(), has_fast_tokenizer=bool(tokenizer.is_fast)
    )
    dtype = str(config.target.resolve_dtype(device)).removeprefix("torch.")
    return tuple(slow_paths_of_files(files, device.type == "cuda", dtype))


def _entry_key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry.get("data"), entry.get("row"), entry.get("id"), entry.get("reason")


def open_if_there(store: StoreLocation) -> StoreReader | None:
    """The store, if there is one; StoreError if something else is there."""
    return StoreReader(store) if store_exists(store) else None


def stored_indices(table: SampleTable, reader: StoreReader | None) -> NDArray[np.bool_]:
    """Which samples of the table need no work: stored, quarantined with their id, or either and consumed since."""
    stored, quarantined = stored_and_quarantined(table, reader)
    return stored | quarantined


def stored_and_quarantined(
    table: SampleTable, reader: StoreReader | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which samples of the table are stored, and which are in quarantine with their id; or were, and are consumed since."""
    if reader is None:
        return np.zeros(len(table), dtype=bool), np.zeros(len(table), dtype=bool)
    consumed = read_consumed(reader.path)
    stored = reader.stored_ids() | consumed.ids
    quarantined = {entry["id"] for entry in [*reader.quarantined(), *consumed.quarantined] if entry.get("id")}
    ids = table.ids.tolist()
    return (
        np.array([identity in stored for identity in ids], bool),
        np.array([bool(quarantined) and format_id(identity) in quarantined for identity in ids], bool),
    )


def segment_attributes(prepared: Prepared) -> dict[str, Any]:
    """What a segment records about its making."""
    config = prepared.config
    return {
        "data": prepared.table.source,
        "settings": {
            "target": config.target.name,
            "max_tokens": config.data.max_tokens,
            "batch_tokens": config.batch_tokens,
            "compile_target": config.compile_target,
            "seed": config.seed,
            "chat_template_arguments": config.data.chat_template_arguments,
        },
        "generation": [asdict(settings) for settings in settings_of(config.data.source).values()],
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    """Version of an installed distribution; None where the package is used from a folder."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
