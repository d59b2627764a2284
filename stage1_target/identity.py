"""Who the target is: hashes that go into the manifest, and what the store keeps of the target for stage 2.

Name and config do not tell a fine-tuned target from its base, so the weights are fingerprinted: all of every 1-D tensor
and 64 rows of every matrix, a few milliseconds a layer.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import torch

from dflash_train.stage1_target.quantization import quantization_name
from dflash_train.stage1_target.target_config import TargetConfig, text_config
from dflash_train.stage1_target.tokenization import hash_chat_template, hash_tokenizer
from dflash_train.store.encoding import Encoding, to_stored
from dflash_train.store.location import StoreLocation
from dflash_train.store.manifest import Manifest, StoreError, hash_json

if TYPE_CHECKING:
    from dflash_train.stage1_target.target import Target
    from dflash_train.store.creation import FrozenTarget
    from dflash_train.store.reader import StoreReader

NUM_FINGERPRINT_ROWS = 64
VOLATILE_CONFIG_KEYS = (
    "_name_or_path",
    "architectures",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Config entries that say how a model was saved or loaded, not what it is."""


def weights_fingerprint(model: torch.nn.Module) -> str:
    """crc32c, 8 hex digits, over all 1-D tensors and 64 seeded rows of every matrix, as loaded; the same on any device."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())  # tied ones once
    persistent = model.state_dict()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return combine_tensors(
        (tensors[name].dtype, tuple(tensors[name].shape), _sampled(tensors[name].detach())) for name in sorted(tensors)
    )


def combine_tensors(tensors: Iterable[tuple[torch.dtype, tuple[int, ...], torch.Tensor]]) -> str:
    """The fingerprint of tensors in the order of their names: dtype and shape of each, and its values that count."""
    crc = 0
    for dtype, shape, values in tensors:
        crc = google_crc32c.extend(crc, f"{dtype}{shape}".encode())
        crc = google_crc32c.extend(crc, values.reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return f"{crc:08x}"


def fingerprint_rows(shape: tuple[int, int]) -> list[int]:
    """The rows of a matrix that count: by its shape alone, the same in every version of every library."""
    digests = [
        hashlib.blake2b(f"{shape}:{position}".encode(), digest_size=8).digest()
        for position in range(NUM_FINGERPRINT_ROWS)
    ]
    return [int.from_bytes(digest, "little") % shape[0] for digest in digests]


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim < 2:
        return tensor
    matrix = tensor.reshape(-1, tensor.shape[-1])
    if tensor.element_size() == 1:  # torch cannot index float8 everywhere
        matrix = matrix.view(torch.uint8)
    rows = fingerprint_rows((matrix.shape[0], matrix.shape[1]))
    return matrix[torch.tensor(rows, device=matrix.device)]


def config_hash(model_config: Any) -> str:
    """Hash of what a config says about the language model; defaults left out, so a new transformers may add some.

    Only the text part counts: transformers loads some multimodal checkpoints as their text model alone.
    """
    entries = json.loads(text_config(model_config).to_json_string(use_diff=True))
    return hash_json(_without_volatile(entries))


def _without_volatile(entries: Any) -> Any:
    if isinstance(entries, dict):
        return {key: _without_volatile(value) for key, value in entries.items() if key not in VOLATILE_CONFIG_KEYS}
    return entries


def known_without_weights(
    config: TargetConfig, model_config: Any, tokenizer: Any, target_layer_ids: tuple[int, ...], encoding: Encoding
) -> dict[str, Any]:
    """The manifest fields that config and tokenizer alone decide."""
    text = text_config(model_config)
    return {
        "target_config_hash": config_hash(model_config),
        "quantization": quantization_name(config, model_config),
        "tokenizer_hash": hash_tokenizer(tokenizer),
        "chat_template_hash": hash_chat_template(tokenizer),
        "target_layer_ids": target_layer_ids,
        "num_target_layers": int(text.num_hidden_layers),
        "hidden_size": int(text.hidden_size),
        "encoding": encoding.name,
        "rank": encoding.rank,
    }


def build_manifest(target: Target, encoding: Encoding, calibration_hash: str) -> Manifest:
    """The manifest of a store of this target."""
    known = known_without_weights(
        target.config, target.model_config, target.tokenizer, target.target_layer_ids, encoding
    )
    return Manifest(
        target_name=Path(target.config.name).name if Path(target.config.name).exists() else target.config.name,
        target_revision=getattr(target.model_config, "_commit_hash", None) or target.config.revision,
        weights_fingerprint=weights_fingerprint(target.model),
        target_dtype=str(target.dtype).removeprefix("torch."),
        vocab_size=target.vocab_size,
        tied_embeddings=target.lm_head is None,
        embedding_scale=target.embedding_scale,
        logit_scale=target.logit_scale,
        logit_softcap=target.logit_softcap,
        calibration_hash=calibration_hash,
        **known,
    )


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """What the store keeps of a tokenizer, by name: some megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
    files.pop("config.json", None)
    return files


def frozen_target(target: Target) -> FrozenTarget:
    """What stage 2 needs of the target: embedding, head, config and the tokenizer's files."""
    from dflash_train.store.creation import FrozenTarget

    embed_tokens, dtype_view = to_stored(target.embed_tokens.cpu())
    lm_head = None if target.lm_head is None else to_stored(target.lm_head.to(target.dtype).cpu())[0]
    return FrozenTarget(
        embed_tokens=embed_tokens,
        lm_head=lm_head,
        dtype_view=dtype_view,
        config=json.loads(target.model_config.to_json_string(use_diff=False)),
        files=tokenizer_files(target.tokenizer),
    )


def check_target(reader: StoreReader, target: Target, encoding: Encoding) -> None:
    """Raise StoreError naming every field in which the store was made from something else."""
    wanted = build_manifest(target, encoding, reader.manifest.calibration_hash)
    refuse_differences(reader.path, reader.manifest.differences(wanted))


def refuse_differences(path: StoreLocation, differences: Sequence[str]) -> None:
    """Raise StoreError if there are any."""
    if differences:
        raise StoreError(
            f"The store {path} was made from something else: {'; '.join(differences)}. "
            "Give the same target, data settings and encoding, or another --store."
        )
