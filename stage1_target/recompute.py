"""Run stored samples again, each alone and without padding, and compare with what the store holds.

The one check that crosses everything: target, layers, padding, batching, encoding, channel scale and bytes. What is left
is rounding: bf16 features are within 0.4 % of their layer's largest value, int8 within 0.8 %, projected-int4 within
7.2 %, and a batch of another shape takes other matrix kernels (in bfloat16 another 1 % or so).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target.identity import check_target, known_without_weights, refuse_differences
from dflash_train.stage1_target.target import Target, load_target
from dflash_train.stage1_target.target_config import TargetConfig, load_model_config, load_tokenizer
from dflash_train.store.location import StoreLocation
from dflash_train.store.manifest import StoreError, format_id
from dflash_train.store.reader import StoreReader


@dataclass(frozen=True)
class RecomputeReport:
    """How far stored features are from features computed again."""

    samples: tuple[str, ...]
    """Ids of the samples, 16 hex digits."""
    num_tokens: int
    rounding: float
    """What the encoding's rounding alone makes of it, at most."""
    largest: dict[str, float]
    """«layer 9», or «projection» → largest difference of any channel over the largest value of the same token and layer;
    of a projected store, of any component over the largest, both in units of √λ."""


def recompute_samples(
    path: StoreLocation,
    target_config: TargetConfig,
    num_samples: int,
    device: str | torch.device = "cpu",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> RecomputeReport:
    """Compare a seeded draw of stored samples with a new forward, in units of the channel scale D (and √λ); progress gets samples done and in all.

    Raises StoreError where the store is empty or was made from something else.
    """
    if num_samples < 1:
        raise InputError(f"--num-samples is {num_samples}, but at least 1 is needed to compare.")
    reader = StoreReader(path)
    if not len(reader.samples):
        raise StoreError(f"The store {path} holds no samples to recompute; run dflash extract first.")
    layer_ids, model_config = reader.manifest.target_layer_ids, load_model_config(target_config)
    tokenizer = load_tokenizer(target_config)
    known = known_without_weights(target_config, model_config, tokenizer, layer_ids, reader.encoding)
    refuse_differences(path, reader.manifest.differences(replace(reader.manifest, **known)))  # before the weights load
    target = load_target(target_config, layer_ids, device)
    check_target(reader, target, reader.encoding)
    drawn = np.sort(np.random.default_rng(seed).permutation(len(reader.samples))[:num_samples])
    return compare_samples(reader, target, drawn.tolist(), progress)


def compare_samples(
    reader: StoreReader, target: Target, drawn: Sequence[int], progress: Callable[[int, int], None] | None = None
) -> RecomputeReport:
    """The same for given samples and a loaded target, which must be the store's."""
    encoding, calibration = reader.encoding, reader.calibration
    units = calibration.component_sizes() if encoding.is_projected else torch.ones(1)
    largest = torch.zeros(1 if encoding.is_projected else encoding.num_layers)
    num_tokens = 0
    for number, index in enumerate(drawn, start=1):
        sample = reader.read(index)
        features = torch.from_numpy(sample.features.view(f"i{sample.features.itemsize}"))
        scales = None if sample.scales is None else torch.from_numpy(sample.scales)
        stored = encoding.decode(features, scales, calibration, torch.float32) / units
        states = target.hidden_states(torch.from_numpy(sample.token_ids).long()[None])[0].float().cpu()
        again = encoding.fc_input(states, calibration) / units
        groups = (len(sample.token_ids), len(largest), -1)
        difference = (stored - again).view(groups).abs().amax(-1) / again.view(groups).abs().amax(-1).clamp_min(1e-30)
        largest = torch.maximum(largest, difference.amax(0))
        num_tokens += len(sample.token_ids)
        if progress is not None:
            progress(number, len(drawn))
    names = ["projection"] if encoding.is_projected else [f"layer {layer}" for layer in target.target_layer_ids]
    return RecomputeReport(
        samples=tuple(format_id(int(reader.samples["id"][index])) for index in drawn),
        num_tokens=num_tokens,
        rounding=encoding.rounding,
        largest=dict(zip(names, largest.tolist(), strict=True)),
    )
