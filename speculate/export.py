"""`dflash export`: a drafter as a folder of its own, in z-lab's format or in that of vLLM's speculators.

z-lab's format is what a checkpoint already is; exporting leaves out the trainer's state and normalises config.json. The
speculators format says the same in other words: layer ids count what `hidden_states` of transformers counts (z-lab's
plus 1), the drafter's own geometry stands in transformer_layer_config, and the file carries embedding and head. It has
one flag for causality, which vLLM applies to all layers and the speculators library to sliding layers alone, and no
scales: a drafter for which its readers would differ is refused.
Source: speculators' DFlashSpeculatorConfig, vLLM's transformers_utils/configs/speculators/algos.py, August 2026.

Shapes: V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_train.errors import InputError
from dflash_train.speculate.loading import check_drafter_fits, find_drafter, load_drafter_config
from dflash_train.stage1_target.target import load_target
from dflash_train.stage1_target.target_config import TargetConfig, load_model_config
from dflash_train.stage2_drafter.checkpoint import round_to_bfloat16, safetensors_bytes
from dflash_train.stage2_drafter.drafter import DrafterConfig, load_drafter
from dflash_train.store.files import Files, write_directory
from dflash_train.store.reader import StoreReader

FORMATS = ("z-lab", "speculators")
SPECULATORS_VERSION = "0.5.0"
"""Written as speculators_version, which readers want to be there."""
NOT_IN_A_LAYER = ("architectures", "auto_map", "block_size", "dflash_config", "dtype", "is_causal", "num_target_layers")
"""Keys of z-lab's config.json that say nothing of transformer_layer_config's model."""


@dataclass(frozen=True)
class Frozen:
    """What the speculators format takes from the target."""

    name: str
    architectures: list[str]
    embed_tokens: Tensor
    """[V, H]."""
    lm_head: Tensor
    """[V, H], the embedding where they are tied."""


def export_drafter(
    drafter: Path,
    output: Path,
    *,
    format_name: str,
    store: Path | None = None,
    target: TargetConfig | None = None,
    files: Files | None = None,
) -> dict[str, Any]:
    """Write the drafter (a folder in z-lab's format, or a run's newest checkpoint) to the new folder `output`.

    The speculators format needs the store or the target. The folder appears complete or not at all. Raises InputError
    for a drafter that cannot be read or said in that format; returns a JSON-able summary.
    """
    if format_name not in FORMATS:
        raise InputError(f"The format {format_name!r} is unknown; use {' or '.join(FORMATS)}.")
    if output.exists() or output.is_symlink():
        raise InputError(f"{output} exists already; name a folder that does not.")
    folder = find_drafter(drafter)
    config = load_drafter_config(folder)
    frozen = None
    if format_name == "speculators":
        non_causal = _sliding_window_non_causal(config)
        frozen = _frozen(config, store, target)
    loaded = load_drafter(folder)
    tensors = {name: _bfloat16(tensor) for name, tensor in loaded.state_dict().items()}
    if frozen is None:
        document = config.to_json()
    else:
        document = speculators_config(config, frozen, non_causal)
        tensors["embed_tokens.weight"] = _bfloat16(frozen.embed_tokens)
        tensors["lm_head.weight"] = _bfloat16(frozen.lm_head)
    contents: dict[str, Iterable[bytes]] = {
        "config.json": [(json.dumps(document, indent=2) + "\n").encode()],
        "model.safetensors": safetensors_bytes(tensors, {"format": "pt"}),
    }
    write_directory(output, contents, files)
    size = sum(path.stat().st_size for path in output.iterdir())
    return {
        "drafter": str(folder),
        "output": str(output),
        "format": format_name,
        "num_tensors": len(tensors),
        "num_bytes": size,
        "num_speculative_tokens": config.block_size - 1,
        "verifier": None if frozen is None else frozen.name,
    }


def speculators_config(config: DrafterConfig, frozen: Frozen, non_causal: bool) -> dict[str, Any]:
    """config.json of the speculators format."""
    layer = {name: value for name, value in config.to_json().items() if name not in NOT_IN_A_LAYER}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [index + 1 for index in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": "bfloat16",
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": non_causal,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": frozen.name, "architectures": frozen.architectures},
        },
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }


def _sliding_window_non_causal(config: DrafterConfig) -> bool:
    """The format's flag for causality; raises InputError where it cannot say what the drafter is."""
    scales = {
        "input_embedding_scale": config.input_embedding_scale != 1.0,
        "output_multiplier": config.output_multiplier != 1.0,
        "final_logit_softcapping": config.final_logit_softcapping is not None,
    }
    if any(scales.values()):
        named = ", ".join(name for name, is_set in scales.items() if is_set)
        raise InputError(f"The speculators format has no {named}, which this drafter needs; use --format z-lab.")
    layers = range(config.num_hidden_layers)
    causal = {config.layer_is_causal(index) for index in layers}
    if causal == {False}:
        return True
    if causal == {True} and all(config.layer_window(index) is not None for index in layers):
        return False
    raise InputError(
        "The drafter has causal layers, and the speculators format has one flag that its readers apply to different "
        "layers unless all slide; use --format z-lab."
    )


def _frozen(config: DrafterConfig, store: Path | None, target: TargetConfig | None) -> Frozen:
    """Embedding and head of the store or the target, which must be the drafter's."""
    if target is not None:
        model_config = load_model_config(target)
        check_drafter_fits(config, model_config)
        loaded = load_target(target, config.target_layer_ids, "cpu")
        head = loaded.embed_tokens if loaded.lm_head is None else loaded.lm_head
        name = str(Path(target.name).absolute()) if Path(target.name).exists() else target.name
        return Frozen(name, list(model_config.architectures or []), loaded.embed_tokens, head)
    if store is None:
        raise InputError("The speculators format carries the target's embedding and head; give --store or --target.")
    reader = StoreReader(store, segments=[])
    manifest = reader.manifest
    facts = {
        "hidden_size": (config.hidden_size, manifest.hidden_size),
        "vocab_size": (config.vocab_size, manifest.vocab_size),
        "num_target_layers": (config.num_target_layers, manifest.num_target_layers),
        "target_layer_ids": (list(config.target_layer_ids), list(manifest.target_layer_ids)),
    }
    differences = [f"{name} {has}, the store has {wanted}" for name, (has, wanted) in facts.items() if has != wanted]
    if differences:
        raise InputError(
            f"The drafter was not trained on {store}: it has {'; '.join(differences)}. Give the store it was trained on."
        )
    architectures = list(reader.target_config().get("architectures") or [])
    return Frozen(manifest.target_name, architectures, reader.frozen_embed_tokens(), reader.frozen_lm_head())


def _bfloat16(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dtype == torch.bfloat16 else round_to_bfloat16(tensor.double())


def format_export(result: Mapping[str, Any]) -> str:
    """A few lines for the terminal."""
    from dflash_train.units import format_bytes

    verifier = ""
    if result["verifier"] is not None:
        verifier = f"\n`vllm serve {result['output']}` loads the target {result['verifier']}"
        if "/" not in result["verifier"]:  # of a local target a store knows the folder's name alone
            verifier += ", the name that the store has of it; for the path of a local target export with --target"
    return (
        f"{result['output']}: {result['num_tensors']} tensors, {format_bytes(result['num_bytes'])}, "
        f"{result['format']} format of {result['drafter']}\n"
        f"engines draft num_speculative_tokens = {result['num_speculative_tokens']}{verifier}"
    )
