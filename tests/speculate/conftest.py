"""Tiny random targets of every cache kind, and random drafters for them."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from dflash_train.stage1_target.target import Target, make_target
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.stage2_drafter.drafter import Drafter, DrafterConfig

VOCAB_SIZE = 11  # small, so that a random drafter is sometimes right
HIDDEN_SIZE = 32
NUM_LAYERS = 6
TARGET_LAYER_IDS = (1, 3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_config(kind: str) -> Any:
    """A tiny transformers config; the initialisation is wide, so that greedy outputs are no constant runs."""
    import transformers

    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if kind == "llama":
        return transformers.LlamaConfig(**shape)
    if kind == "qwen3":
        return transformers.Qwen3Config(**{**shape, "tie_word_embeddings": True})
    if kind == "mistral":  # every layer slides
        return transformers.MistralConfig(**shape, sliding_window=6)
    if kind == "gemma3":  # sliding and full layers, scaled embeddings
        layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        return transformers.Gemma3TextConfig(
            **shape, sliding_window=6, layer_types=layer_types, query_pre_attn_scalar=8
        )
    if kind == "gpt2":
        return transformers.GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=HIDDEN_SIZE,
            n_layer=NUM_LAYERS,
            n_head=4,
            n_positions=256,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=1,
        )
    hybrid: dict[str, Any] = {  # gated-delta-net layers, and some of attention
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    if kind == "qwen3_5":
        return transformers.Qwen3_5TextConfig(**shape, **hybrid)
    assert kind == "qwen3_next"
    return transformers.Qwen3NextConfig(
        **shape,
        **hybrid,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        decoder_sparse_step=1,
    )


@cache
def tiny_target(kind: str) -> Target:
    """A seeded random target, float32 on the CPU, shared by all tests: nothing changes it."""
    import transformers

    config = model_config(kind)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return make_target(TargetConfig(name=f"tiny-{kind}"), model, None, TARGET_LAYER_IDS)


@pytest.fixture
def make_tiny_target() -> Callable[[str], Target]:
    return tiny_target


@pytest.fixture
def forgetful_target() -> Iterator[Target]:
    """One whose recurrent layers lose their state when several tokens are read at once."""
    target = tiny_target("qwen3_next")

    def lose_state(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        cache = next(value for value in keywords.values() if hasattr(value, "layers"))
        for layer in cache.layers:
            if type(layer).__name__ == "LinearAttentionLayer":
                layer.reset()

    handle = target.model.register_forward_pre_hook(lose_state, with_kwargs=True)
    yield target
    handle.remove()


@pytest.fixture
def make_tiny_drafter() -> Callable[..., Drafter]:
    """A random drafter for a tiny target; keywords override its config."""

    def make(target: Target, seed: int = 0, **fields: Any) -> Drafter:
        values: dict[str, Any] = {
            "hidden_size": target.hidden_size,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": target.vocab_size,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 256,
            "block_size": 4,
            "mask_token_id": VOCAB_SIZE - 1,
            "target_layer_ids": target.target_layer_ids,
            "num_target_layers": len(target.layers),
            "initializer_range": 0.3,
        }
        return Drafter(DrafterConfig(**{**values, **fields}), seed=seed).requires_grad_(False).eval()

    return make
