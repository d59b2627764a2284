"""Training steps of other DFlash trainers, for benchmarks that run them beside ours; each is an optional import.

A peer is built from its PyPI wheel alone. What it imports and the step does not need (a server's client, its own data
loader) is replaced by an empty module, so that neither sglang nor vLLM has to be installed.

Shapes: D documents of T tokens each, S = D · T, F features per token, H hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], Tensor]
"""One forward pass; returns the loss."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Geometry and inputs that every variant of the step shares."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_layers: int = 5
    num_taps: int = 5
    block_size: int = 16
    num_documents: int = 4
    document_tokens: int = 2048
    num_anchors: int = 1024

    @property
    def row_tokens(self) -> int:
        return self.num_documents * self.document_tokens

    @property
    def num_features(self) -> int:
        return self.num_taps * self.hidden_size

    @property
    def mask_token_id(self) -> int:
        return self.vocab_size - 1


@dataclass(frozen=True)
class StepInputs:
    """Random inputs, on the device."""

    features: Tensor
    """bf16 [S,F]."""
    token_ids: Tensor
    """int64 [S]."""
    embed_tokens: Tensor
    """[V,H]."""
    lm_head: Tensor
    """[V,H]."""


class _Stub(types.ModuleType):
    """A module of which every name exists and none does anything."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _stub(*names: str) -> None:
    for name in names:
        try:
            missing = find_spec(name) is None
        except (ImportError, ValueError):
            missing = True
        if missing:
            sys.modules[name] = _Stub(name)


def _bare_package(name: str, folder: Path) -> None:
    """Register a package without running its __init__."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    module.__spec__ = ModuleSpec(name, None, origin=str(folder), is_package=True)
    module.__spec__.submodule_search_locations = [str(folder)]
    sys.modules[name] = module


def _qwen3_config(shape: StepShape, attention: str) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        layer_types=["full_attention"] * shape.num_layers,
    )
    config._attn_implementation = attention
    return config


def import_specforge() -> tuple[Any, Any]:
    """SpecForge's class DFlashDraftModel, and the module with OnlineDFlashModel; ImportError where it is not installed."""
    spec = find_spec("specforge")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("specforge is not installed; pip install --no-deps specforge==0.2.0")
    root = Path(spec.submodule_search_locations[0])
    for name in ("", ".modeling", ".modeling.draft", ".core", ".algorithms", ".algorithms.common"):
        if f"specforge{name}" not in sys.modules:
            _bare_package(f"specforge{name}", root.joinpath(*name.split(".")[1:]))
    draft_class = importlib.import_module("specforge.modeling.draft.dflash").DFlashDraftModel
    return draft_class, importlib.import_module("specforge.algorithms.common.dflash_family_model")


def specforge_step(shape: StepShape, inputs: StepInputs, compiled: bool = False) -> tuple[nn.Module, Step]:
    """SpecForge's OnlineDFlashModel with flex_attention; it does not pack, so a document is a row of its batch.

    compiled wraps its drafter in torch.compile, which SpecForge itself does not do.
    """
    draft_class, family = import_specforge()
    config = _qwen3_config(shape, "flex_attention")
    config.block_size = shape.block_size
    config.num_target_layers = 36
    config.dflash_config = {"target_layer_ids": list(range(shape.num_taps)), "mask_token_id": shape.mask_token_id}
    with inputs.features.device:
        draft = draft_class(config).to(torch.bfloat16)
    head, embed = frozen_modules(inputs.embed_tokens, inputs.lm_head)
    model = family.OnlineDFlashModel(
        torch.compile(draft) if compiled else draft,
        head,
        embed,
        shape.mask_token_id,
        shape.block_size,
        "flex_attention",
        shape.num_anchors // shape.num_documents,
        loss_decay_gamma=7.0,
    )
    token_ids = inputs.token_ids.view(shape.num_documents, -1)
    features = inputs.features.view(shape.num_documents, shape.document_tokens, -1)
    loss_mask = torch.ones_like(token_ids)

    def step() -> Tensor:
        loss: Tensor = model(token_ids, features, loss_mask)[0]
        return loss

    return draft, step


def speculators_step(shape: StepShape, inputs: StepInputs) -> tuple[nn.Module, Step]:
    """speculators' DFlashDraftModel, compiled by its own decorator, cross-entropy by its eager implementation."""
    if find_spec("speculators") is None:
        raise ImportError("speculators is not installed; pip install --no-deps speculators==0.9.0")
    _stub("openai", "loguru", "httpx", "hs_connectors", "speculators.train.data")
    config_class = importlib.import_module("speculators.models.dflash").DFlashSpeculatorConfig
    config_class.model_rebuild(_types_namespace={"torch": torch})  # transformers' annotations name it (5.24)
    draft_class = importlib.import_module("speculators.models.dflash.core").DFlashDraftModel
    loss_config = importlib.import_module("speculators.losses").resolve_loss_config("ce", "eager")
    config = config_class(
        transformer_layer_config=_qwen3_config(shape, "simple_flex_attention"),
        draft_vocab_size=shape.vocab_size,
        block_size=shape.block_size,
        aux_hidden_state_layer_ids=list(range(shape.num_taps)),
        mask_token_id=shape.mask_token_id,
    )
    with inputs.features.device:
        draft = draft_class(config).to(torch.bfloat16)
    head, embed = frozen_modules(inputs.embed_tokens, inputs.lm_head)
    draft.lm_head, draft.verifier_lm_head, draft.embed_tokens = head, head, embed
    features, token_ids = inputs.features[None], inputs.token_ids[None]
    last_states = inputs.features[None, :, : shape.hidden_size].contiguous()
    device = token_ids.device
    document_ids = torch.arange(shape.num_documents, device=device).repeat_interleave(shape.document_tokens)[None]
    positions = torch.arange(shape.document_tokens, device=device).repeat(shape.num_documents)[None]
    loss_mask = torch.ones_like(token_ids)

    def step() -> Tensor:
        loss: Tensor = draft(
            hidden_states=features,
            input_ids=token_ids,
            loss_mask=loss_mask,
            verifier_last_hidden_states=last_states,
            document_ids=document_ids,
            position_ids=positions,
            loss_config=loss_config,
            gamma=7.0,
            max_anchors=shape.num_anchors,
        )[1]
        return loss

    return draft, step


def frozen_modules(embed_tokens: Tensor, lm_head: Tensor) -> tuple[nn.Linear, nn.Embedding]:
    """Head and embedding modules over the target's tables [V,H], without gradients."""
    vocab_size, hidden_size = lm_head.shape
    with torch.device("meta"):
        head = nn.Linear(hidden_size, vocab_size, bias=False)
        embed = nn.Embedding(vocab_size, hidden_size)
    head.weight = nn.Parameter(lm_head, requires_grad=False)
    embed.weight = nn.Parameter(embed_tokens, requires_grad=False)
    return head, embed
