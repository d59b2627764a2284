"""A drafter against its target: numbering of the layers, widths, rotary base, and the mask token in the tokenizer.

All from the target's config and tokenizer; what needs its weights is in `parity`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dflash_train.errors import InputError
from dflash_train.speculate.drafter_folder import DrafterFolder
from dflash_train.speculate.findings import Check, error, ok, warning
from dflash_train.stage1_target.target_config import default_target_layer_ids, text_config
from dflash_train.stage2_drafter.drafter_config import target_rope_theta
from dflash_train.store.mask_token import mask_token_fault, token_text

LEAST_TARGET_LAYERS = 4
OTHER_TARGET = "Give the target that the drafter was trained for, or mend config.json."


def check_against_target(
    folder: DrafterFolder, model_config: Any, tokenizer: Any, engines: Collection[str]
) -> list[Check]:
    """All checks that need the target's config (transformers) and tokenizer, without its weights."""
    return [
        _sizes(folder, model_config),
        _layers(folder, model_config, engines),
        _rope_base(folder, model_config),
        _heads(folder, model_config),
        _positions(folder, model_config),
        check_mask_token(folder, model_config, tokenizer),
    ]


def _sizes(folder: DrafterFolder, model_config: Any) -> Check:
    text = text_config(model_config)
    facts = (
        ("hidden_size", int(text.hidden_size)),
        ("vocab_size", int(text.vocab_size)),
        ("num_target_layers", int(text.num_hidden_layers)),
    )
    wrong = [
        f"{key} is {folder.integer(key)}, the target has {has}" for key, has in facts if folder.integer(key) != has
    ]
    if wrong:
        return error("target sizes", f"{'; '.join(wrong)}.", OTHER_TARGET)
    return ok("target sizes", ", ".join(f"{key} {has}" for key, has in facts) + ", as the target.")


def _layers(folder: DrafterFolder, model_config: Any, engines: Collection[str]) -> Check:
    name, number = "target layers", int(text_config(model_config).num_hidden_layers)
    ids = folder.target_layer_ids()
    numbering = "0 is the first decoder layer, so layer i is hidden_states[i + 1] of transformers"
    if ids is None or not ids:
        text = f"target_layer_ids is {folder.value('target_layer_ids')!r}; engines would choose layers of their own."
        return error(name, text, f"Write the layers of training; {numbering}.")
    shown = ",".join(map(str, ids))
    if ids != sorted(set(ids)) or ids[0] < 0:
        text = f"{shown} are not ascending and distinct from 0 on; the columns of fc stand in the order of training."
        way_out = (
            "Write the layers of training; if their order was another than ascending, sort fc's columns with them."
        )
        return error(name, text, way_out)
    if ids[-1] == number - 1:
        text = (
            f"{shown} name the target's last layer, {number - 1}: SGLang cannot tap it, and transformers gives it after "
            "the final norm."
        )
        return error(name, text, f"Are they counted from 1? Here {numbering}. Otherwise extract and train again.")
    if ids[-1] >= number:
        text = f"{shown} go beyond the target's {number} layers."
        return error(name, text, f"Are they counted from 1? Here {numbering}.")
    if number < LEAST_TARGET_LAYERS and "sglang" in engines:
        text = f"the target has {number} layers; SGLang wants {LEAST_TARGET_LAYERS} at least."
        return error(name, text, "Serve it with another engine (--engine).")
    if "fc.weight" in folder.shapes and folder.integer("hidden_size"):
        width, hidden = folder.shapes["fc.weight"][-1], folder.integer("hidden_size") or 1
        if width != len(ids) * hidden:
            text = f"{len(ids)} layers are named, but fc takes {width} features, {width / hidden:g} layers of {hidden}."
            return error(name, text, "Write the layers of training.")
    try:
        rule = list(default_target_layer_ids(number, len(ids)))
    except InputError:
        rule = []
    if ids == [layer + 1 for layer in rule]:
        text = f"{shown} are z-lab's choice for {number} layers, each plus 1: as vLLM and speculators count, not z-lab."
        return warning(name, text, f"If it was trained on {','.join(map(str, rule))}, write those; {numbering}.")
    default = ", z-lab's choice" if ids == rule else ""
    return ok(name, f"{shown} of {number}{default}; {numbering}.")


def _rope_base(folder: DrafterFolder, model_config: Any) -> Check:
    name, target = "rotary base", target_rope_theta(text_config(model_config).to_dict())
    parameters = folder.config.get("rope_parameters")
    nested = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    bases = [base for base in (folder.config.get("rope_theta"), nested) if base is not None]
    wrong = [base for base in bases if base != target]
    if wrong:
        if isinstance(wrong[0], bool) or not isinstance(wrong[0], int | float):
            text = f"rope_theta is {wrong[0]!r}, no number."
        else:
            text = f"{wrong[0]:,} is not the target's {target:,.0f}, with which drafters are trained."
        return error(name, text, "Write the base of training in rope_theta and in rope_parameters.")
    scaling = text_config(model_config).to_dict().get("rope_parameters") or {}
    kind = scaling.get("rope_type", "default")
    partial = scaling.get("partial_rotary_factor", 1.0)
    note = ""
    if kind != "default" or partial != 1.0:
        note = f" Its {'partial rotation' if kind == 'default' else f'{kind} scaling'} is not inherited."
    return ok(name, f"{target:,.0f}, the target's.{note}")


def _heads(folder: DrafterFolder, model_config: Any) -> Check:
    text = text_config(model_config)
    size = getattr(text, "head_dim", None) or int(text.hidden_size) // int(text.num_attention_heads)
    found = folder.integer("head_dim")
    if found != size:
        wording = (
            f"head_dim is {found}, the target's heads have {size}; allowed, but some attention kernels are choosy."
        )
        return warning("head size", wording, "Start the engine once before you rely on it.")
    return ok("head size", f"{size}, as the target's heads.")


def _positions(folder: DrafterFolder, model_config: Any) -> Check:
    name, target = "positions", getattr(text_config(model_config), "max_position_embeddings", None)
    found = folder.integer("max_position_embeddings")
    if found is None:
        return warning(name, "max_position_embeddings is missing; engines would take 32,768.", "Write the target's.")
    if isinstance(target, int) and found < target:
        return warning(
            name,
            f"max_position_embeddings is {found:,}, the target has {target:,}: engines may refuse longer contexts.",
            "Write the target's: rotary positions have no end.",
        )
    return ok(name, f"{found:,}, enough for the target.")


def check_mask_token(folder: DrafterFolder, model_config: Any, tokenizer: Any) -> Check:
    """Is the mask token a row of the table, and never a token of text?"""
    name, rows = "mask token", int(text_config(model_config).vocab_size)
    token, nested = folder.integer("mask_token_id"), folder.nested.get("mask_token_id")
    unused = (
        "Train with a row that the tokenizer does not use, or its own mask token; write here what was trained with."
    )
    if token is None:
        found = folder.value("mask_token_id")
        text = "mask_token_id is missing; SGLang would look for «<|MASK|>»" if found is None else f"it is {found!r}"
        return error(name, f"{text}.", "Write the id of training into dflash_config.")
    if nested is None:
        return error(name, "mask_token_id is not in dflash_config, where engines look.", "Write it there.")
    top = folder.config.get("mask_token_id")
    if top is not None and top != nested:
        text = f"mask_token_id is {top} at the top but {nested} in dflash_config."
        return error(name, text, "Make both what it was trained with.")
    if not 0 <= token < rows:
        text = f"{token} is no row of the target's table, which has {rows}; engines would read other memory or fail."
        return error(name, text, "Write the id of training; a new one needs training again.")
    fault = mask_token_fault(token, tokenizer, text_config(model_config).to_dict())
    if fault is not None:
        return error(name, f"{fault}.", unused)
    word = token_text(token, tokenizer)
    if word is None:
        return ok(name, f"{token}, a row that the tokenizer does not use.")
    if token == tokenizer.mask_token_id:
        return ok(name, f"{token}, the tokenizer's own mask token {word!r}.")
    text = f"{token} is {word!r}, an added token: text that holds it literally would confuse the drafter."
    return warning(name, text, "Harmless if it never occurs in your traffic.")
