from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_train.stage1_target import weight_files
from dflash_train.stage1_target.identity import weights_fingerprint
from dflash_train.stage1_target.target_config import (
    DTYPES,
    TargetConfig,
    from_pretrained,
    load_model_config,
    model_class,
)
from dflash_train.stage1_target.weight_files import NotComparable, files_fingerprint

PLAIN = ["llama", "qwen3", "gpt2", "gemma2", "cohere", "granite"]
OTHERS = ["mixture_of_experts", "linear_attention"]


def from_files(folder: Path, dtype: str = "float32") -> str:
    config = TargetConfig(name=str(folder), dtype=dtype)
    return files_fingerprint(config, load_model_config(config), DTYPES[dtype])


def loaded(folder: Path, dtype: str = "float32") -> Any:
    config = TargetConfig(name=str(folder), dtype=dtype)
    automatic = model_class(load_model_config(config), config)
    return from_pretrained(automatic, config, "weights", dtype=DTYPES[dtype], use_safetensors=True)


@pytest.fixture
def copy_of(tiny_target: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`copy_of(kind, **changes of config.json)` is a target's folder that the test may change."""

    def copy(kind: str, **changes: Any) -> Path:
        folder = tmp_path / kind
        folder.mkdir()
        for path in tiny_target(kind).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, **changes}))
        return folder

    return copy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", PLAIN)
def test_files_say_what_the_loaded_weights_are(kind: str, dtype: str, tiny_target: Callable[..., Path]) -> None:
    found = from_files(tiny_target(kind), dtype)
    assert found == weights_fingerprint(loaded(tiny_target(kind), dtype))
    assert found != from_files(tiny_target(kind, seed=1), dtype)


@pytest.mark.parametrize("kind", OTHERS)
def test_layouts_that_loading_changes_are_equal_or_not_compared(kind: str, tiny_target: Callable[..., Path]) -> None:
    with contextlib.suppress(NotComparable):
        found = from_files(tiny_target(kind))
        assert found == weights_fingerprint(loaded(tiny_target(kind)))


def test_several_files_of_another_dtype_are_read_as_they_are_loaded(
    tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    model = loaded(tiny_target("qwen3"), "bfloat16")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    for dtype in DTYPES:
        assert from_files(tmp_path, dtype) == weights_fingerprint(loaded(tmp_path, dtype))


def test_a_fine_tuned_norm_tells_files_apart(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("llama")
    before = from_files(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][7] += 1e-3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert from_files(folder) != before


def test_few_bytes_are_read(copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of a matrix, whatever its size."""
    folder = copy_of("llama", vocab_size=50_000)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.zeros(50_000, 32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sizes: list[int] = []

    class CountingOs:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def pread(self, descriptor: int, size: int, offset: int) -> bytes:
            sizes.append(size)
            return os.pread(descriptor, size, offset)

    monkeypatch.setattr(weight_files, "os", CountingOs())
    from_files(folder)
    assert sum(sizes) < (folder / "model.safetensors").stat().st_size / 10


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("head", "differ in names or shapes of tensors (lm_head.weight)"),
        ("rename", "differ in names or shapes of tensors (embed_tokens.weight)"),
        ("shape", "differ in names or shapes of tensors (model.norm.weight)"),
        ("float64", "its tensor model.norm.weight is stored as F64"),
        ("short", "a file of its weights is shorter than its header says"),
        ("garbage", "a file of its weights is no safetensors file"),
        ("pickle", "it has no safetensors file on this machine"),
        ("adapter", "it has an adapter"),
        ("quantised", "its weights are quantised"),
        ("shard", "model-2.safetensors is not on this machine"),
    ],
)
def test_what_files_do_not_tell_is_not_compared(change: str, reason: str, copy_of: Callable[..., Path]) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}} if change == "quantised" else {}
    folder = copy_of("llama", **quantised)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if change == "head":  # loading ties it, or does not, by its values
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    elif change == "rename":
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    elif change == "shape":
        tensors["model.norm.weight"] = torch.ones(31)
    elif change == "float64":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, path, {"format": "pt"})
    if change == "short":
        path.write_bytes(path.read_bytes()[:-100])
    elif change == "garbage":
        path.write_bytes(b"no safetensors")
    elif change == "pickle":
        path.rename(folder / "pytorch_model.bin")
    elif change == "adapter":
        (folder / "adapter_config.json").write_text("{}")
    elif change == "shard":
        path.rename(folder / "model-1.safetensors")
        weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(NotComparable, match=re.escape(reason)):
        from_files(folder)
