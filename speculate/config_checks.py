"""What config.json says by itself: keys that one engine reads here and another there, and what each does where they are missing.

Engines fall back to defaults without a word where a key is missing, and differ in which of two places they read. What
they do was read in their sources in August 2026 (SGLang models/dflash.py and speculative/dflash_utils.py, vLLM
qwen3_dflash.py, PyPI dflash 0.1.0, transformers' Qwen3Config).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dflash_train.speculate.drafter_folder import STATE_FILE, DrafterFolder
from dflash_train.speculate.findings import Check, error, ok, warning
from dflash_train.stage2_drafter.drafter_config import FOREIGN_KEYS, LAYER_TYPES
from dflash_train.units import format_count

QWEN3_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
}
"""What transformers' Qwen3Config, which all engines read the file with, takes for a key that is missing."""

EXPORT_AGAIN = "Write it, or export the drafter again."


def check_config(folder: DrafterFolder, engines: Collection[str]) -> list[Check]:
    """All checks that need config.json alone."""
    return [
        _files(folder),
        _architecture(folder),
        _geometry(folder),
        _recorded(folder),
        _block_size(folder),
        _causality(folder, engines),
        *_layer_types(folder, engines),
        _rope(folder),
        _head(folder),
        *_scales(folder, engines),
    ]


def _files(folder: DrafterFolder) -> Check:
    if folder.damage is None:
        return ok("files", f"config.json and model.safetensors are in {folder.path}.")
    return error("files", f"{folder.damage}.", "Copy or export the drafter again; edit no checkpoint by hand.")


def _architecture(folder: DrafterFolder) -> Check:
    name, wanted = "architecture", "DFlashDraftModel"
    found = folder.config.get("architectures")
    if found != [wanted]:
        return error(
            name,
            f"architectures is {found!r}; engines choose their code by it and know {wanted!r}.",
            f'Write "architectures": ["{wanted}"].',
        )
    if folder.config.get("model_type") != "qwen3":
        return error(
            name,
            f"model_type is {folder.config.get('model_type')!r}, so the file is read with another model's defaults.",
            'Write "model_type": "qwen3": the drafter\'s layers are Qwen3\'s.',
        )
    foreign = [key for key in FOREIGN_KEYS if folder.value(key) not in (None, False)]
    if foreign:
        return error(
            name,
            f"{', '.join(foreign)} asks for another kind of drafter: the same tensors would mean something else.",
            "Remove it if the drafter was trained here; otherwise this is no classic DFlash drafter.",
        )
    activation, bias = folder.value("hidden_act") or "silu", folder.value("attention_bias")
    if activation != "silu" or bias:
        found = f"hidden_act {activation!r}" if activation != "silu" else "attention_bias true"
        return error(name, f"{found} is set; DFlash drafters have silu and no biases.", "Set silu and false.")
    return ok(name, f"{wanted} on Qwen3's layers, silu, no biases, nothing of another kind of drafter.")


def _geometry(folder: DrafterFolder) -> Check:
    wrong = []
    for key, default in QWEN3_DEFAULTS.items():
        found = folder.config.get(key)
        if found is None:
            wrong.append(f"{key} is missing (engines would take {default})")
        elif not isinstance(found, int) or isinstance(found, bool) or found < 1:
            wrong.append(f"{key} is {found!r}, no number of at least 1")
    if folder.integer("num_target_layers") is None:
        wrong.append("num_target_layers is missing")
    if wrong:
        return error("geometry", f"{'; '.join(wrong)}.", EXPORT_AGAIN)
    config = folder.config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads or config["head_dim"] % 2:
        return error(
            "geometry",
            f"{heads} query heads, {kv_heads} key heads of {config['head_dim']}: the first must be a multiple of the "
            "second, the size even.",
            EXPORT_AGAIN,
        )
    return ok(
        "geometry",
        f"{format_count(config['num_hidden_layers'], 'layer')}, hidden size {config['hidden_size']}, {heads} heads on {kv_heads} of "
        f"{config['head_dim']}, MLP {config['intermediate_size']}; nothing is left to a default.",
    )


def _recorded(folder: DrafterFolder) -> Check:
    """config.json against what the trainer wrote beside it."""
    name = "training record"
    if folder.trained_config is None:
        text = f"there is no {STATE_FILE} to read, as in an export"
        return ok(name, f"{text}, so block size and mask token cannot be compared with the training.")
    found, trained = _flat(folder.config), _flat(folder.trained_config)
    differences = [
        f"{key} is {found.get(key)!r}, trained with {trained.get(key)!r}"
        for key in sorted(found.keys() | trained.keys())
        if found.get(key) != trained.get(key)
    ]
    if differences:
        return error(
            name,
            f"config.json is not what the trainer wrote: {'; '.join(differences)}.",
            "Put back the values that it was trained with.",
        )
    return ok(name, "config.json is as the trainer wrote it.")


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    for table, values in config.items():
        if isinstance(values, Mapping):
            flat |= {f"{table}.{key}": value for key, value in values.items()}
    return flat


def _block_size(folder: DrafterFolder) -> Check:
    name = "block size"
    top, nested = folder.config.get("block_size"), folder.nested.get("block_size")
    if top is not None and nested is not None and top != nested:
        return error(
            name,
            f"block_size is {top} but dflash_config.block_size is {nested}: engines draft by one or the other.",
            "Make both the block size that it was trained with.",
        )
    size = folder.integer("block_size")
    if size is None or size < 2:
        text = f"block_size is {folder.value('block_size')!r}; a block holds the anchor and at least one open slot"
        text = "block_size is missing; SGLang would take 16" if top is nested is None else text
        return error(name, f"{text}.", "Write the block size of training, at the top and in dflash_config.")
    if top is None or nested is None:
        where = "dflash_config" if nested is None else "the top of config.json"
        return warning(
            name, f"block_size {size} is not in {where}, where some readers look.", "Write it in both places."
        )
    return ok(name, f"{size}, in both places; engines draft num_speculative_tokens = {size - 1}.")


def _causality(folder: DrafterFolder, engines: Collection[str]) -> Check:
    name = "causality"
    top, nested = folder.config.get("is_causal"), folder.nested.get("causal")
    sliding = [kind == "sliding_attention" for kind in folder.layer_types()]
    if top is not None and nested is not None and top != nested:
        return error(
            name,
            f"is_causal is {_json(top)} but dflash_config.causal is {_json(nested)}; vLLM reads the first first, z-lab's "
            "package only the first.",
            "Make both what it was trained with.",
        )
    flag = nested if top is None else top
    if flag is None:
        text = "neither is_causal nor dflash_config.causal is there: engines take full layers for bidirectional"
        text += ", sliding ones for causal inside the block" if any(sliding) else ""
        return warning(name, f"{text}.", "Write both, as it was trained.")
    misread = ["sliding" if slides else "full" for slides in sorted(set(sliding)) if slides != bool(flag)]
    blind = ["SGLang, which reads no flag,"] if "sglang" in engines else []
    blind += ["z-lab's package, which reads is_causal alone,"] if "z-lab" in engines and top is None else []
    if misread and blind:
        text = f"the flag is {_json(flag)}, but {' and '.join(blind)} would take {' and '.join(misread)} layers for "
        text += f"{'bidirectional' if flag else 'causal'} inside the block."
        way_out = "If it was not trained so, correct is_causal and dflash_config.causal. If it was, take another engine"
        return error(name, text, f"{way_out} (and say so here with --engine).")
    if top is None or nested is None:
        missing = "is_causal" if top is None else "dflash_config.causal"
        return warning(name, f"the flag is {_json(flag)}, but {missing} is missing.", "Write both.")
    return ok(name, f"{'causal' if flag else 'bidirectional'} inside the block, said in both places.")


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _layer_types(folder: DrafterFolder, engines: Collection[str]) -> list[Check]:
    name, kinds, number = "layer types", folder.layer_types(), folder.integer("num_hidden_layers")
    unknown = sorted({kind for kind in kinds if kind not in LAYER_TYPES})
    if unknown or len(kinds) != number:
        text = f"the types {', '.join(unknown)} are unknown" if unknown else f"{len(kinds)} types for {number} layers"
        return [error(name, f"{text}.", f"Write one of {', '.join(LAYER_TYPES)} a layer.")]
    sliding, window = "sliding_attention" in kinds, folder.config.get("sliding_window")
    if not sliding:
        return [ok(name, "full attention in every layer.")]
    if not isinstance(window, int) or window < 1 or folder.config.get("use_sliding_window") is False:
        return [
            error(
                name,
                f"sliding layers, but sliding_window is {window!r} and use_sliding_window "
                f"{_json(folder.config.get('use_sliding_window'))}.",
                "Write the window of training, in tokens, and use_sliding_window true.",
            )
        ]
    if "full_attention" in kinds and "vllm" in engines:
        return [
            warning(
                name,
                f"full and sliding layers (window {window}): vLLM takes them only with its V2 model runner.",
                "Start vLLM with VLLM_USE_V2_MODEL_RUNNER=1, as below.",
            )
        ]
    return [ok(name, f"sliding layers with a window of {window} tokens, the query included.")]


def _rope(folder: DrafterFolder) -> Check:
    name = "rotary positions"
    top = folder.config.get("rope_theta")
    parameters = folder.config.get("rope_parameters") or {}
    scaling = folder.config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping) or not isinstance(scaling, Mapping):
        return error(name, "rope_parameters or rope_scaling is no table.", EXPORT_AGAIN)
    nested = parameters.get("rope_theta")
    kinds = {table.get("rope_type", table.get("type", "default")) for table in (parameters, scaling)} - {"default"}
    if kinds:
        return error(
            name,
            f"the rotation is scaled ({', '.join(map(str, kinds))}), which drafters of this package never are.",
            "Remove the scaling: rope_type default, rope_scaling null.",
        )
    if top is not None and nested is not None and top != nested:
        return error(
            name,
            f"rope_theta is {top} but rope_parameters.rope_theta is {nested}; transformers 4 and 5 read different ones.",
            "Make both the base of training, which is the target's.",
        )
    if top is None and nested is None:
        return error(name, "rope_theta is missing; engines would take 10,000 or 1,000,000.", "Write the target's base.")
    if top is None or nested is None:
        missing = "rope_theta" if top is None else "rope_parameters"
        return warning(name, f"{missing} is missing; transformers 4 and 5 look in different places.", "Write both.")
    return ok(name, f"base {top:,.0f}, in both places, without scaling." if _is_number(top) else f"base {top!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _head(folder: DrafterFolder) -> Check:
    name = "tied head"
    if folder.config.get("tie_word_embeddings"):
        return error(
            name,
            "tie_word_embeddings is true, but the file has no embedding: readers that tie would make a head of nothing.",
            'Write "tie_word_embeddings": false; engines take the target\'s embedding and head.',
        )
    return ok(name, "tie_word_embeddings is false: embedding and head are the target's.")


def _scales(folder: DrafterFolder, engines: Collection[str]) -> list[Check]:
    """Factors that not every engine applies."""
    scale, multiplier = folder.value("input_embedding_scale"), folder.value("output_multiplier")
    softcap, found = folder.value("final_logit_softcapping"), []
    blind = [name for key, name in (("sglang", "SGLang"), ("vllm", "vLLM")) if key in engines]
    if scale not in (None, 1, 1.0) and blind:
        found.append(
            warning(
                "embedding scale",
                f"input_embedding_scale is {scale}, which {' and '.join(blind)} did not read in August 2026.",
                "Compare the served acceptance length with `dflash evaluate` before going live.",
            )
        )
    if (multiplier not in (None, 1, 1.0) or softcap) and "vllm" in engines:
        found.append(
            warning(
                "logit scale",
                "output_multiplier or final_logit_softcapping is set, which vLLM did not read in August 2026: greedy "
                "drafts are the same, sampled ones come from another distribution.",
                "Serve at temperature 0, or compare the served acceptance length with `dflash evaluate`.",
            )
        )
    return found
