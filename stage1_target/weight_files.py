"""The fingerprint of a target's weights from its safetensors files, without loading it.

A start that finds nothing left to store loads no target, and would not notice that its weights have changed since. The
fingerprint takes 64 rows of each matrix, so they are read one by one: 60 MB of 16 GB for Qwen3-8B, on 16 threads, because a
cold network disk answers each row in a millisecond. Where loading does more than read and cast (quantised, renamed or merged
tensors), nothing is guessed: the caller is told why.
"""

from __future__ import annotations

import copy
import json
import math
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_train.stage1_target.identity import combine_tensors, fingerprint_rows
from dflash_train.stage1_target.target_config import TargetConfig, model_class

NUM_READERS = 16
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


class NotComparable(Exception):
    """The files do not say what the loaded weights would be; the text is the reason, a clause."""


@dataclass(frozen=True)
class _StoredTensor:
    """Where a tensor lies."""

    descriptor: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, first: int, count: int) -> torch.Tensor:
        """So many values from the first on, flat."""
        size = self.dtype.itemsize
        data = bytearray()
        while len(data) < count * size:
            part = os.pread(self.descriptor, count * size - len(data), self.offset + first * size + len(data))
            if not part:
                raise NotComparable("a file of its weights is shorter than its header says")
            data += part
        return torch.frombuffer(data, dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)


def files_fingerprint(config: TargetConfig, model_config: Any, dtype: torch.dtype) -> str:
    """What `weights_fingerprint` says of this target loaded as dtype, read from its files; raises NotComparable."""
    if config.is_gguf:
        raise NotComparable("a GGUF file's weights are unpacked when it is loaded")
    if getattr(model_config, "quantization_config", None) is not None:
        raise NotComparable("its weights are quantised")
    try:
        expected = _expected_shapes(config, model_config, dtype)
        paths = _weight_files(config, model_config)
        with ExitStack() as stack:
            stored: dict[str, _StoredTensor] = {}
            for path in paths:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                stored |= _read_header(descriptor)
            _check_names(expected, stored)
            with ThreadPoolExecutor(NUM_READERS) as pool:
                contents = pool.map(lambda name: _sampled(stored[name]).to(dtype), sorted(expected))
                return combine_tensors(
                    (dtype, expected[name], values) for name, values in zip(sorted(expected), contents, strict=True)
                )
    except (OSError, ValueError) as error:
        raise NotComparable(f"its files could not be read ({error})") from error


def _expected_shapes(config: TargetConfig, model_config: Any, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that the fingerprint counts, from a model without memory."""
    if config.trust_remote_code and getattr(model_config, "auto_map", None):
        raise NotComparable("code of its own loads it")
    if getattr(model_config, "transformers_weights", None) is not None:
        raise NotComparable("its config names another file of weights")
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping

        with torch.device("meta"):
            model = model_class(model_config, config).from_config(copy.deepcopy(model_config), dtype=dtype)
        converted = get_model_conversion_mapping(model, add_legacy=False)
        kept_wider = model._get_dtype_plan(dtype)
    except Exception as error:  # a model whose layout needs real tensors, another version of transformers
        raise NotComparable(f"its layout is not known before it is loaded ({type(error).__name__})") from error
    persistent = model.state_dict()
    if converted or any(name in persistent for name, _ in model.named_buffers()) or kept_wider:
        raise NotComparable("transformers renames, merges or keeps apart some of its tensors")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}  # tied ones once


def _weight_files(config: TargetConfig, model_config: Any) -> list[Path]:
    """The safetensors files that loading would read, as far as they are on this machine."""
    find: Callable[[str], Path | None]
    if Path(config.name).is_dir():

        def find(name: str) -> Path | None:
            return path if (path := Path(config.name) / name).is_file() else None

    else:
        from huggingface_hub import try_to_load_from_cache

        revision = getattr(model_config, "_commit_hash", None) or config.revision

        def find(name: str) -> Path | None:
            path = try_to_load_from_cache(config.name, name, revision=revision)
            return Path(path) if isinstance(path, str) else None

    if find("adapter_config.json") is not None:
        raise NotComparable("it has an adapter")
    if (whole := find(WHOLE)) is not None:
        return [whole]
    if (index := find(INDEX)) is None:
        raise NotComparable("it has no safetensors file on this machine")
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    found = {name: find(name) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise NotComparable(f"{missing[0]} is not on this machine")
    return [path for path in found.values() if path is not None]


def _read_header(descriptor: int) -> dict[str, _StoredTensor]:
    """The tensors of one safetensors file. Source: the format's description, github.com/huggingface/safetensors."""
    (size,) = struct.unpack("<Q", os.pread(descriptor, 8, 0).ljust(8, b"\xff"))
    if size > MAX_HEADER_BYTES:
        raise NotComparable("a file of its weights is no safetensors file")
    entries = json.loads(os.pread(descriptor, size, 8))
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in entries.items():
        dtype = STORED_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise NotComparable(f"its tensor {name} is stored as {entry['dtype']}")
        tensors[name] = _StoredTensor(descriptor, 8 + size + entry["data_offsets"][0], dtype, tuple(entry["shape"]))
    return tensors


def _check_names(expected: dict[str, tuple[int, ...]], stored: dict[str, _StoredTensor]) -> None:
    """Raise NotComparable unless the files have exactly the model's tensors: others may change what loading makes of them."""
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    if shapes != expected:
        names = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
        raise NotComparable(f"its files and the loaded model differ in names or shapes of tensors ({names[0]})")


def _sampled(tensor: _StoredTensor) -> torch.Tensor:
    """The values that the fingerprint counts, flat."""
    if len(tensor.shape) < 2:
        return tensor.read(0, math.prod(tensor.shape))
    width = tensor.shape[-1]
    rows = fingerprint_rows((math.prod(tensor.shape[:-1]), width))
    return torch.cat([tensor.read(row * width, width) for row in rows])
