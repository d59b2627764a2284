"""Fixtures shared by all tests: tiny targets, a tiny tokenizer and small conversations, made on the spot."""

from pathlib import Path
from typing import Any

import pytest

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
