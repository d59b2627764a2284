"""One short forward that finds out, by numbers, what the config only claims: scales, soft-cap, order of the layers.

A drafter trained under a head that is scaled otherwise than the target's, or on layers that do not run once and in
order, trains without error and drafts badly. Sixteen tokens through the whole model rule that out before any work.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflash_train.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

NUM_PROBE_TOKENS = 16
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Config attributes that multiply the logits (Cohere, Falcon-H1)."""
DIVISORS = ("logits_scaling",)
"""Config attributes that divide them (Granite, MiniCPM)."""
EMBEDDING_FACTORS = ("embedding_multiplier", "scale_emb", "embed_scale")
"""Config attributes that may hold the exact embedding scale (Granite, MiniCPM); Gemma's is sqrt(H)."""


@dataclass(frozen=True)
class Probe:
    """What the forward showed."""

    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None


def probe_target(model: Any, decoder: nn.Module, layers: nn.ModuleList) -> Probe:
    """Run 16 seeded tokens through the whole model. Raises InputError where layers or head are not plain."""
    head = model.get_output_embeddings().weight
    table = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(table.shape[0], (1, NUM_PROBE_TOKENS), generator=generator).to(table.device)
    calls: list[int] = []
    seen: dict[str, Tensor] = {}

    def first_input(_module: nn.Module, arguments: Any, keywords: Any) -> None:
        seen["first"] = (arguments[0] if arguments else keywords["hidden_states"])[0].float().to(table.device)

    def count(index: int) -> Any:
        def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
            state = output if isinstance(output, torch.Tensor) else output[0]
            if state.shape != (1, NUM_PROBE_TOKENS, table.shape[1]):
                raise InputError(
                    f"Decoder layer {index} of {type(model).__name__} gives states of shape {list(state.shape)}, not "
                    f"{[1, NUM_PROBE_TOKENS, table.shape[1]]}; targets with a plain residual stream are wanted."
                )
            calls.append(index)

        return hook

    def last_output(_module: nn.Module, _arguments: Any, output: Any) -> None:
        seen["last"] = (output if isinstance(output, torch.Tensor) else output[0])[0].float().to(head.device)

    handles = [layer.register_forward_hook(count(index)) for index, layer in enumerate(layers)]
    handles.append(layers[0].register_forward_pre_hook(first_input, with_kwargs=True))
    handles.append(decoder.register_forward_hook(last_output))
    try:
        with torch.no_grad():
            logits = model(input_ids=token_ids, use_cache=False).logits[0].float().to(head.device)
    finally:
        for handle in handles:
            handle.remove()
    if calls != list(range(len(layers))):
        raise InputError(
            f"The {len(layers)} decoder layers of {type(model).__name__} do not run once each, in order; "
            "targets with a plain stack of decoder layers are wanted."
        )
    if not bool(logits.isfinite().all()):
        raise InputError(f"The target's logits are not finite: {why_not_finite(model)}")
    text = model.config.get_text_config(decoder=True)
    rounding = float(torch.finfo(head.dtype).eps)
    logit_scale, softcap = _logit_scale(logits, seen["last"] @ head.float().T, text, rounding)
    rows = table[token_ids[0]].float()
    return Probe(_embedding_scale(seen["first"], rows, text, rounding), logit_scale, softcap)


def why_not_finite(model: nn.Module) -> str:
    """What is wrong with a model whose states or logits are not finite, and what helps, as a sentence."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.detach().isfinite().all()):
            return f"{name} has values that are not; the checkpoint is damaged, get it again."
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if dtype == "float32":
        return "all weights are, so it overflows even in float32; another checkpoint is wanted."
    return f"all weights are, so it overflows in {dtype}; try --dtype float32."


def _relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def _logit_scale(logits: Tensor, products: Tensor, config: Any, rounding: float) -> tuple[float, float | None]:
    """Scale and soft-cap with which the head's products, [T, V], become the logits; from the config, then measured."""
    claimed = 1.0
    for name in MULTIPLIERS:
        claimed *= float(getattr(config, name, None) or 1.0)
    for name in DIVISORS:
        claimed /= float(getattr(config, name, None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    measured = float((products * logits).sum() / products.square().sum().clamp_min(1e-30))
    for scale, cap in ((claimed, softcap), (1.0, softcap), (claimed, None), (measured, None)):
        expected = products * scale if cap is None else cap * torch.tanh(products * scale / cap)
        if logits.shape == products.shape and _relative(expected, logits) <= 4 * rounding + 1e-5:
            return scale, None if cap is None else float(cap)
    raise InputError(
        "The target's logits are no scaled (or soft-capped) product of its final states and its head, "
        f"off by {_relative(products * claimed, logits):.1%}: a drafter could not share its head."
    )


def _embedding_scale(first: Tensor, rows: Tensor, config: Any, rounding: float) -> float:
    """Factor between table rows, [T, H], and the first layer's input; 1.0 where it is no plain factor (GPT-2 adds positions)."""
    measured = float((first * rows).sum() / rows.square().sum().clamp_min(1e-30))
    if _relative(rows * measured, first) > 4 * rounding + 1e-6:
        return 1.0
    known = [1.0, math.sqrt(rows.shape[1])]
    known += [
        float(value) for name in EMBEDDING_FACTORS if isinstance(value := getattr(config, name, None), int | float)
    ]
    closest = min(known, key=lambda value: abs(value - measured))
    return closest if abs(closest - measured) <= 2 * rounding * abs(measured) + 1e-6 else measured
