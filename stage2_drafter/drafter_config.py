"""Geometry of a DFlash drafter, and its config.json in z-lab's format.

The keys are those of z-lab's released checkpoints. Readers look for some of them in different places, so every place is
written; what a reader would have to guess (causality inside the block, the tapped layers) is always said. Reading is
strict: a checkpoint whose keys ask for something this drafter does not compute is refused, since loading it would give
an acceptance length near 1 and no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_train.errors import InputError

if TYPE_CHECKING:
    from dflash_train.store.manifest import Manifest

_Number = TypeVar("_Number", int, float)

LAYER_TYPES = ("full_attention", "sliding_attention")
# Keys of other drafters that change what the same tensors mean; loading such a checkpoint here would be silently wrong.
FOREIGN_KEYS = (
    "attention_sink_bias",
    "attention_value_scale",
    "projector_type",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "sample_from_anchor",
    "shift_label",
    "use_swa",
)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Geometry of a drafter and what it must know of its target; written as z-lab's config.json."""

    hidden_size: int
    """Equal to the target's: noise embeddings and head are the target's own."""
    intermediate_size: int
    """Width of the SwiGLU layer; dense even where the target is a mixture of experts."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the target's embedding table, padding rows included."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    """Base of the rotary frequencies, the target's; its scaling and partial rotation are not inherited."""
    max_position_embeddings: int = 32768
    block_size: int = 16
    """Tokens of a block, the anchor included: 16 drafts 15 tokens (the paper's choice for Qwen3)."""
    mask_token_id: int
    """An existing embedding row that the tokenizer never emits."""
    target_layer_ids: tuple[int, ...]
    """Tapped decoder layers, counted from 0, ascending: `fc` takes their outputs in this order."""
    num_target_layers: int
    layer_types: tuple[str, ...] = ()
    """One of `LAYER_TYPES` a layer; empty means full attention everywhere."""
    sliding_window: int | None = None
    """Keys a query of a sliding layer sees, itself included: visible if q_pos - k_pos < sliding_window."""
    is_causal: bool | None = False
    """Whether a slot sees only earlier slots of its block. None: only in sliding layers, as z-lab reads a file
    that does not say; engines disagree there, so every drafter made here says."""
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} of the drafter is {getattr(self, name)}; it must be at least 1.")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"{self.num_attention_heads} query heads of the drafter cannot share {self.num_key_value_heads} "
                "key/value heads; choose a divisor for num_key_value_heads."
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim of the drafter is {self.head_dim}; rotary positions need an even number.")
        if self.block_size < 2:
            raise InputError(
                f"block_size is {self.block_size}; a block holds the anchor and at least one mask token, so 2 or more."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(
                f"mask_token_id {self.mask_token_id} is no row of the embedding table, which has {self.vocab_size} "
                "rows; choose an unused row that exists."
            )
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.num_target_layers:
            raise InputError(
                f"target_layer_ids {list(ids)} must be ascending, without repeats and within 0 to "
                f"{self.num_target_layers - 1}, the layers of the target."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise InputError(
                f"layer_types names {len(self.layer_types)} layers but the drafter has {self.num_hidden_layers}."
            )
        for layer_type in self.layer_types:
            if layer_type not in LAYER_TYPES:
                raise InputError(f"layer type {layer_type!r} is unknown; use one of {', '.join(LAYER_TYPES)}.")
        if "sliding_attention" in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise InputError(
                f"sliding_window is {self.sliding_window} but layer_types asks for sliding layers; give the window "
                "in tokens or use full_attention."
            )

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)

    def layer_window(self, index: int) -> int | None:
        """Sliding window of a layer, None where it sees the whole document."""
        return self.sliding_window if self.layer_types[index] == "sliding_attention" else None

    def layer_is_causal(self, index: int) -> bool:
        if self.is_causal is None:
            return self.layer_types[index] == "sliding_attention"
        return self.is_causal

    def to_json(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The config.json that z-lab's dflash, SGLang, vLLM and transformers read.

        Keys whose place differs among readers are written in every place: block_size, causality and the rotary base.
        """
        dflash_config: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        causality: dict[str, Any] = {}
        if self.is_causal is not None:
            causality["is_causal"] = self.is_causal
            dflash_config["causal"] = self.is_causal
        if self.input_embedding_scale != 1.0:
            dflash_config["input_embedding_scale"] = self.input_embedding_scale
        if self.output_multiplier != 1.0:
            dflash_config["output_multiplier"] = self.output_multiplier
        if self.final_logit_softcapping is not None:
            dflash_config["final_logit_softcapping"] = self.final_logit_softcapping
        sliding = "sliding_attention" in self.layer_types
        return {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dflash_config": dflash_config,
            "dtype": dtype,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            **causality,
            "layer_types": list(self.layer_types),
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": self.sliding_window if sliding else None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": sliding,
            "vocab_size": self.vocab_size,
        }

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Read a z-lab config.json; raises InputError for what is missing and for what this drafter does not compute.

        A key may stand in dflash_config or at the top; in both, it must say the same.
        """
        nested = config.get("dflash_config") if isinstance(config, Mapping) else None
        if not isinstance(nested, Mapping):
            raise InputError(
                "The drafter's config.json has no dflash_config; this is no DFlash checkpoint in z-lab's format. Give the "
                "config.json of one."
            )

        def value(name: str, *, default: Any = None, required: bool = False) -> Any:
            found = nested.get(name)
            found = config.get(name) if found is None else found
            found = default if found is None else found
            if required and found is None:
                raise InputError(f"The drafter's config.json lacks {name}; add it, or export the drafter again.")
            return found

        def integer(name: str, *, default: int | None = None) -> int:
            return _number(name, value(name, default=default, required=default is None), int)

        def real(name: str, *, default: float) -> float:
            return _number(name, value(name, default=default), float)

        _refuse_contradictions(config, nested)
        architectures = config.get("architectures") or ["DFlashDraftModel"]
        if list(architectures) != ["DFlashDraftModel"]:
            raise InputError(
                f"The drafter's config.json is for {', '.join(map(str, architectures))}; only DFlashDraftModel can be "
                "loaded."
            )
        foreign = [name for name in FOREIGN_KEYS if value(name) not in (None, False)]
        if foreign:
            raise InputError(
                f"The drafter's config.json sets {', '.join(foreign)}, which this DFlash drafter does not compute."
            )
        if value("attention_bias", default=False):
            raise InputError("The drafter's config.json sets attention_bias; only drafters without biases are loaded.")
        if value("hidden_act", default="silu") != "silu":
            raise InputError(f"hidden_act of the drafter is {value('hidden_act')!r}; only 'silu' is known.")
        layer_types = tuple(value("layer_types", default=()))
        sliding = "sliding_attention" in layer_types
        # Full-attention checkpoints may carry a window that nothing reads.
        window = integer("sliding_window") if sliding and value("sliding_window") is not None else None
        if sliding and config.get("use_sliding_window") is False:
            raise InputError(
                "The drafter's config.json has sliding layers but use_sliding_window is false; engines would disagree."
            )
        causal = config.get("is_causal")
        causal = nested.get("causal") if causal is None else causal
        hidden_size, num_heads = integer("hidden_size"), integer("num_attention_heads")
        return cls(
            hidden_size=hidden_size,
            intermediate_size=integer("intermediate_size"),
            num_hidden_layers=integer("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=integer("num_key_value_heads", default=num_heads),
            head_dim=integer("head_dim", default=hidden_size // max(num_heads, 1)),
            vocab_size=integer("vocab_size"),
            rms_norm_eps=real("rms_norm_eps", default=1e-6),
            rope_theta=_plain_rope_theta(config),
            max_position_embeddings=integer("max_position_embeddings", default=32768),
            block_size=integer("block_size"),
            mask_token_id=integer("mask_token_id"),
            target_layer_ids=tuple(
                _number("target_layer_ids", i, int) for i in value("target_layer_ids", required=True)
            ),
            num_target_layers=integer("num_target_layers"),
            layer_types=layer_types,
            sliding_window=window,
            is_causal=None if causal is None else bool(causal),
            input_embedding_scale=real("input_embedding_scale", default=1.0),
            output_multiplier=real("output_multiplier", default=1.0),
            final_logit_softcapping=real("final_logit_softcapping", default=0.0) or None,
            initializer_range=real("initializer_range", default=0.02),
        )

    @classmethod
    def from_target(
        cls,
        target_config: Mapping[str, Any],
        *,
        manifest: Manifest,
        mask_token_id: int,
        num_layers: int = 5,
        block_size: int = 16,
        intermediate_size: int | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        sliding_window: int | None = None,
        layer_types: Sequence[str] = (),
        is_causal: bool = False,
    ) -> DrafterConfig:
        """A drafter shaped like one layer of the target, from the target's config.json and the store's manifest.

        What the arguments leave open comes from the target's text config, under whatever names its family uses.
        A mixture of experts without a dense width gets 3 H, the width of z-lab's Qwen3.5-35B-A3B drafter.
        """
        text = target_config.get("text_config") or target_config
        hidden_size = manifest.hidden_size

        def found(*names: str) -> Any:
            return next((text[name] for name in names if text.get(name) is not None), None)

        num_heads = num_attention_heads or found("num_attention_heads", "n_head", "num_heads") or hidden_size // 64 or 1
        num_kv_heads = num_key_value_heads or found("num_key_value_heads") or num_heads
        if num_attention_heads and not num_key_value_heads and num_heads % num_kv_heads:
            num_kv_heads = num_heads
        experts = found("num_experts", "num_local_experts", "n_routed_experts") or 0
        dense = found("ffn_hidden_size", "n_inner", "intermediate_size")
        if experts and found("moe_intermediate_size") is None:
            dense = None  # the only width named is an expert's
        return cls(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size or dense or (3 if experts else 4) * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim or found("head_dim") or hidden_size // num_heads,
            vocab_size=manifest.vocab_size,
            rms_norm_eps=float(found("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps") or 1e-6),
            rope_theta=target_rope_theta(text),
            max_position_embeddings=int(found("max_position_embeddings", "n_positions") or 32768),
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=manifest.target_layer_ids,
            num_target_layers=manifest.num_target_layers,
            layer_types=tuple(layer_types),
            sliding_window=sliding_window,
            is_causal=is_causal,
            input_embedding_scale=manifest.embedding_scale,
            output_multiplier=manifest.logit_scale,
            final_logit_softcapping=manifest.logit_softcap,
        )


def _number(name: str, found: Any, kind: type[_Number]) -> _Number:
    """`found` as an int or float; raises InputError for anything else, a float with a fraction for an int included."""
    if isinstance(found, bool) or not isinstance(found, int | float) or kind(found) != found:
        raise InputError(f"{name} of the drafter's config.json is {found!r}; it must be a number ({kind.__name__}).")
    return kind(found)


def _refuse_contradictions(config: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """What may stand in two places must agree: engines differ in which they read."""
    rope_parameters = config.get("rope_parameters") or {}
    pairs = (
        ("block_size", config.get("block_size"), "dflash_config.block_size", nested.get("block_size")),
        ("is_causal", config.get("is_causal"), "dflash_config.causal", nested.get("causal")),
        ("rope_theta", config.get("rope_theta"), "rope_parameters.rope_theta", rope_parameters.get("rope_theta")),
    )
    for first, first_value, second, second_value in pairs:
        if first_value is not None and second_value is not None and first_value != second_value:
            raise InputError(
                f"The drafter's config.json says {first} {first_value} but {second} {second_value}; engines would "
                "disagree, so make them equal."
            )


def target_rope_theta(text: Mapping[str, Any]) -> float:
    """Rotary base of the target's full-attention layers, in either spelling; 10000 where it has none (GPT-2)."""
    parameters = text.get("rope_parameters") or {}
    if isinstance(parameters.get("full_attention"), Mapping):
        parameters = parameters["full_attention"]
    return float(parameters.get("rope_theta") or text.get("rope_theta") or 10000.0)


def _plain_rope_theta(config: Mapping[str, Any]) -> float:
    """Rotary base of a drafter; refuses scaled rotations, which would be loaded without an error and draft nonsense."""
    for name in ("rope_parameters", "rope_scaling"):
        scaling = config.get(name) or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise InputError(
                f"{name} of the drafter's config.json asks for {kind!r} rotary positions; only the default is known."
            )
    theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise InputError("The drafter's config.json lacks rope_theta; add the rotary base of the target.")
    return _number("rope_theta", theta, float)
