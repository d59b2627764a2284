"""What `dflash inspect-store` shows: counts, sizes, lengths, and what the features of each tapped layer look like.

Counts come from the tables in memory; feature statistics from a seeded draw of at most 64 samples and 2,048 tokens, so
a report on 30 TB takes seconds and less than a gigabyte.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_train.errors import InputError
from dflash_train.store.encoding import from_stored
from dflash_train.store.location import StoreLocation
from dflash_train.store.manifest import canonical_json, format_id
from dflash_train.store.reader import Sample, StoreReader
from dflash_train.store.reference import num_reference_bytes, open_references, read_references
from dflash_train.units import format_bytes

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

DRAW_SAMPLES = 64
DRAW_TOKENS = 32  # of each drawn sample
OUTLIER_FACTOR = 20
OWN_NUMBERS = re.compile(
    r"(?<=, at token )\d+ of \d+$|^\d+(?= tokens do not fit)|(?<=^token id )\d+|(?<= has no row )\d+"
    r"|(?<= states of )\d+ tokens but \d+(?= token ids$)|(?<= shape \[)[\d, ]+(?=\])"
)
"""What of a reason of quarantine is of one sample alone: its length, a position, an id; a layer is not."""
PERCENTILES = (0, 5, 25, 50, 75, 95, 100)


def store_report(path: StoreLocation, seed: int = 0) -> dict[str, Any]:
    """Describe a store in JSON-able values; a damaged store raises StoreError."""
    reader = StoreReader(path)
    lengths, supervised = reader.samples["length"], reader.samples["supervised"]
    percentiles = np.percentile(lengths, PERCENTILES, method="nearest").tolist() if len(lengths) else []
    made_from = [{key: value for key, value in source.items() if key != "store"} for source in reader.sources()]
    sources = {canonical_json(source): source for source in made_from}  # the manifest stands beside them
    references = open_references(path, reader.encoding)
    reference_bytes = num_reference_bytes(references)
    features = feature_statistics(reader, seed)
    kept = reference_energy(reader, read_references(references)) if features else None
    return {
        "path": str(path),
        "manifest": reader.manifest.to_json(),
        "segments": len(reader.segment_ids),
        "samples": len(reader.samples),
        "tokens": reader.num_tokens,
        "duplicates": reader.num_duplicates,
        "supervised_share": float(supervised.sum() / lengths.sum()) if len(lengths) else 0.0,
        "length_percentiles": {f"p{p}": int(value) for p, value in zip(PERCENTILES, percentiles, strict=False)},
        "bytes_per_token": reader.encoding.bytes_per_token,
        "size_bytes": reader.num_bytes + reference_bytes,
        "quarantined": count_reasons(str(entry.get("reason")) for entry in reader.quarantined()),
        "sources": list(sources.values()),
        "reference": {
            "samples": sum(segment.num_samples for segment in references),
            "tokens": sum(segment.num_tokens for segment in references),
            "bytes": reference_bytes,
        },
        "features": [
            {**layer, "reference_energy_kept": share}
            for layer, share in zip(features, kept or repeat(None, len(features)), strict=True)
        ],
    }


def count_reasons(reasons: Iterable[str]) -> dict[str, int]:
    """How many samples are in quarantine for each kind of reason, the commonest first: «…» for what only one sample has."""
    return dict(Counter(OWN_NUMBERS.sub("…", reason) for reason in reasons).most_common())


def reference_energy(reader: StoreReader, samples: Iterable[Sample]) -> list[float] | None:
    """Share of the energy of D^-1 h of each tapped layer that is left after encoding and decoding, over reference samples.

    Tokens count the same, whatever their size, and attention sinks (over 20 times the median rms) do not, as in the
    calibration. A seeded draw of at most 32 tokens each of 64 samples; None where there are none.
    """
    import torch

    generator = np.random.default_rng(0)
    tokens = [
        sample.features[np.sort(generator.permutation(len(sample.features))[:DRAW_TOKENS])]
        for sample in islice(samples, DRAW_SAMPLES)
    ]
    if not tokens:
        return None
    encoding, calibration = reader.encoding, reader.calibration
    states = from_stored(np.concatenate(tokens), "bfloat16").float()
    rms = states.square().mean(1).sqrt()
    states = states[rms <= OUTLIER_FACTOR * rms.median()]
    scaled = states / calibration.channel_scale
    left = encoding.decode(*encoding.encode(states, calibration), calibration, torch.float32)
    left = encoding.scaled_states(left, calibration)
    shape = (-1, encoding.num_layers, encoding.hidden_size)
    weights = scaled.square().mean(1).clamp_min(1e-30).reciprocal().double()[:, None]
    lost = ((scaled - left).view(shape).double().square().sum(2) * weights).sum(0)
    energy = (scaled.view(shape).double().square().sum(2) * weights).sum(0)
    share: list[float] = (1 - lost / energy.clamp_min(1e-30)).tolist()
    return share


@dataclass(frozen=True)
class DrawnFeatures:
    """Features of a draw of N tokens."""

    scaled: torch.Tensor
    """D^-1 h [N, L, H]; of a projected store what it kept."""
    channel_scale: torch.Tensor
    """D [L, H]."""
    rounding: torch.Tensor | None
    """Mean square error of `scaled` that its rounding to int8 or int4 made, [L, H]; None for bf16."""


def draw_features(reader: StoreReader, seed: int) -> DrawnFeatures:
    """Decode, in float32, at most DRAW_TOKENS tokens each of at most DRAW_SAMPLES samples of a store that has some."""
    import torch

    generator = np.random.default_rng(seed)
    features, scales = [], []
    for index in generator.permutation(len(reader.samples))[:DRAW_SAMPLES].tolist():
        sample = reader.read(index)
        tokens = np.sort(generator.permutation(len(sample.token_ids))[:DRAW_TOKENS])
        features.append(sample.features[tokens])
        scales.append(sample.features[tokens] if sample.scales is None else sample.scales[tokens])
    encoding, calibration = reader.encoding, reader.calibration
    stored = np.concatenate(features)
    bits = torch.from_numpy(stored.view(f"i{stored.itemsize}"))
    steps = torch.from_numpy(np.concatenate(scales)) if encoding.num_scales else None
    scaled = encoding.scaled_states(encoding.decode(bits, steps, calibration, torch.float32), calibration)
    shape = (encoding.num_layers, encoding.hidden_size)
    rounding = None if steps is None else encoding.rounding_error(steps, calibration)
    return DrawnFeatures(scaled.view(-1, *shape), calibration.channel_scale.view(shape), rounding)


def feature_statistics(reader: StoreReader, seed: int) -> list[dict[str, Any]]:
    """Measure each tapped layer over a seeded draw of tokens: raw h and D^-1 h, of a projected store what it kept of them.

    outlier_share is the share of |D^-1 h| above 20 times the layer's median; energy_kept the share of the energy of
    D^-1 h that the projection kept over the calibration's tokens, 1 without one.
    """
    if not len(reader.samples):
        return []
    drawn = draw_features(reader, seed)
    channel_scale = drawn.channel_scale
    energy_kept = reader.calibration.energy_kept()
    statistics = []
    for number, layer in enumerate(reader.manifest.target_layer_ids):
        scaled = drawn.scaled[:, number]
        raw = scaled * channel_scale[number]
        median = scaled.abs().median()
        statistics.append(
            {
                "layer": layer,
                "tokens": len(scaled),
                "rms": float(raw.square().mean().sqrt()),
                "absmax": float(raw.abs().max()),
                "scaled_rms": float(scaled.square().mean().sqrt()),
                "scaled_absmax": float(scaled.abs().max()),
                "outlier_share": float((scaled.abs() > OUTLIER_FACTOR * median).double().mean()),
                "energy_kept": 1.0 if energy_kept is None else float(energy_kept[number]),
            }
        )
    return statistics


def format_report(report: dict[str, Any]) -> RenderableType:
    """Lay a report out for the terminal."""
    from rich.console import Group
    from rich.table import Table

    manifest = report["manifest"]
    revision = f" @ {manifest['target_revision']}" if manifest["target_revision"] else ""
    quarantined = report["quarantined"]
    facts = {
        "target": f"{manifest['target_name']}{revision}",
        "target dtype": ", ".join(filter(None, [manifest["target_dtype"], manifest["quantization"]])),
        "weights fingerprint": manifest["weights_fingerprint"],
        "tapped layers": f"{', '.join(map(str, manifest['target_layer_ids']))} of {manifest['num_target_layers']}",
        "hidden size": f"{manifest['hidden_size']:,}",
        "vocabulary": f"{manifest['vocab_size']:,}, head {'tied' if manifest['tied_embeddings'] else 'of its own'}",
        "encoding": manifest["encoding"] + (f", rank {manifest['rank']:,}" if manifest["rank"] else ""),
        "calibration": manifest["calibration_hash"],
        "format version": str(manifest["format_version"]),
        "segments": f"{report['segments']:,}",
        "samples": f"{report['samples']:,} ({report['duplicates']:,} duplicates ignored)",
        "tokens": f"{report['tokens']:,}, {report['supervised_share']:.1%} supervised",
        "tokens a sample": ", ".join(f"{name} {value:,}" for name, value in report["length_percentiles"].items()),
        "size": f"{format_bytes(report['size_bytes'])}, embedding and head in it; {report['bytes_per_token']:,} bytes a token",
        "quarantined": ", ".join(f"{count:,} x {reason}" for reason, count in quarantined.items()) or "none",
    }
    if (reference := report["reference"])["samples"]:
        facts["reference"] = (
            f"{reference['samples']:,} samples, {reference['tokens']:,} tokens as tapped in bfloat16, "
            f"{format_bytes(reference['bytes'])}"
        )
    table = Table("", report["path"], box=None, pad_edge=False, header_style="bold")
    for name, value in facts.items():
        table.add_row(name, value)
    columns = ["layer", "rms of h", "max |h|", "rms of h / D", "max |h / D|", "outliers"]
    measured = any(layer["reference_energy_kept"] is not None for layer in report["features"])
    columns += (["energy kept"] if manifest["rank"] else []) + (["of reference"] if measured else [])
    features = Table(*columns, box=None, pad_edge=False)
    for layer in report["features"]:
        numbers = [f"{layer[name]:.4g}" for name in ("rms", "absmax", "scaled_rms", "scaled_absmax")]
        kept = [f"{layer['energy_kept']:.1%}"] if manifest["rank"] else []
        kept += [f"{layer['reference_energy_kept']:.3%}"] if measured else []
        features.add_row(str(layer["layer"]), *numbers, f"{layer['outlier_share']:.3%}", *kept)
    legend = (
        f"h: hidden state; D: channel scale, by which h is divided; outliers: over {OUTLIER_FACTOR} medians of |h / D|"
    )
    if manifest["rank"]:
        legend += "; energy kept: share of the energy of h / D that the projection keeps, over the calibration's tokens"
    if measured:
        legend += "; of reference: the same after projection and rounding, over the reference samples"
    return Group(table, "", features, legend) if report["features"] else table


def find_sample(reader: StoreReader, prefix: str) -> int:
    """Return the index of the one sample whose id begins with these hex digits; InputError for none or several."""
    digits = prefix.lower().removeprefix("0x")
    if not 0 < len(digits) <= 16 or not set(digits) <= set("0123456789abcdef"):
        raise InputError(f"'{prefix}' is no sample id. Give 1 to 16 hex digits, as in {format_id(0x1F3A5B)}.")
    matches = np.flatnonzero(reader.samples["id"] >> (64 - 4 * len(digits)) == int(digits, 16))
    if len(matches) == 1:
        return int(matches[0])
    shown = reader.samples["id"][matches[:5] if len(matches) else slice(5)]
    ids = ", ".join(map(format_id, map(int, shown)))
    if len(matches) == 0:
        raise InputError(f"{reader.path} has no sample whose id begins with {digits}; its first are {ids or 'none'}.")
    more = ", …" if len(matches) > len(shown) else ""
    raise InputError(f"{len(matches):,} samples of {reader.path} begin with {digits} ({ids}{more}). Give more digits.")


def sample_report(reader: StoreReader, prefix: str) -> dict[str, Any]:
    """Describe one sample, found by the first hex digits of its id, with its token ids and loss mask."""
    index = find_sample(reader, prefix)
    entry, sample = reader.samples[index], reader.read(index)
    return {
        "id": format_id(sample.id),
        "group": format_id(sample.group),
        "segment": reader.segment_ids[int(entry["segment"])],
        "length": int(entry["length"]),
        "supervised": int(entry["supervised"]),
        "token_ids": sample.token_ids.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
    }
