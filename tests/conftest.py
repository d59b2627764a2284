"""Fixtures shared by all tests: tiny targets, a tiny tokenizer and small conversations, made on the spot."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Without a GPU, Triton's kernels are tested under its interpreter, which must be chosen before triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENIZER_TEXT = [
    "<system> You are a helpful assistant who answers in one short sentence.",
    "<user> What is the capital of France? Which river flows through it?",
    "<assistant> The capital of France is Paris, and the Seine flows through it.",
    "Count from one to ten: one two three four five six seven eight nine ten.",
    "def add(a, b):\n    return a + b\n",
]


def make_tiny_tokenizer(chat_template: str | None = CHATML, vocab_size: int = 400) -> Any:
    """A byte-level BPE tokenizer with the ChatML tokens; <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2 (eos), <|mask|> 3."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TOKENIZER_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """The tokenizer of make_tiny_tokenizer: do not change it."""
    return make_tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer saved: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save_pretrained(folder)
    return folder


TINY_TARGETS = (
    "llama",
    "qwen3",
    "gpt2",
    "mixture_of_experts",
    "linear_attention",
    "gemma2",
    "cohere",
    "granite",
)


def make_tiny_target_config(kind: str, vocab_size: int) -> Any:
    """A transformers config of 5 decoder layers and 32 channels; `kind` is one of TINY_TARGETS."""
    import transformers

    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if kind == "llama":
        return transformers.LlamaConfig(**shape, tie_word_embeddings=True)
    if kind == "qwen3":
        return transformers.Qwen3Config(**shape, head_dim=8, tie_word_embeddings=False)
    if kind == "gpt2":
        return transformers.GPT2Config(
            vocab_size=vocab_size, n_embd=32, n_layer=5, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
        )
    if kind == "mixture_of_experts":
        return transformers.Qwen3MoeConfig(**shape, head_dim=8, **experts)
    if kind == "linear_attention":
        return transformers.Qwen3NextConfig(
            **shape,
            **experts,
            head_dim=8,
            shared_expert_intermediate_size=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"] * 2 + ["linear_attention"],
        )
    if kind == "gemma2":
        return transformers.Gemma2Config(**shape, head_dim=8, final_logit_softcapping=5.0, query_pre_attn_scalar=8)
    if kind == "cohere":
        return transformers.CohereConfig(**shape, logit_scale=0.25)
    if kind == "granite":
        return transformers.GraniteConfig(**shape, logits_scaling=8.0, embedding_multiplier=12.0)
    raise AssertionError(kind)


def make_tiny_target(kind: str, vocab_size: int, seed: int = 0) -> Any:
    """A causal language model with seeded random weights, large enough that layers and attention matter."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(make_tiny_target_config(kind, vocab_size)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model


@pytest.fixture(scope="session")
def tiny_target(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_target(kind, seed=0)` is the folder of a saved tiny target with the tiny tokenizer."""
    folders: dict[tuple[str, int], Path] = {}

    def folder_of(kind: str, seed: int = 0) -> Path:
        if (kind, seed) not in folders:
            from transformers.utils import logging

            logging.disable_progress_bar()
            logging.set_verbosity_error()
            folder = tmp_path_factory.mktemp(f"{kind}-{seed}")
            make_tiny_target(kind, len(tiny_tokenizer), seed).save_pretrained(folder)
            tiny_tokenizer.save_pretrained(folder)
            folders[kind, seed] = folder
        return folders[kind, seed]

    return folder_of
