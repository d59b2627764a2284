"""The manifest: what two extracts must agree on before their segments may lie in one store.

It is the attributes of the store's root `zarr.json`. Everything that changes a stored state or what stage 2 makes of it
is here and compared field by field; what only describes a run (data source, package versions) goes into its segments.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.files import StoreError

__all__ = [
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "Manifest",
    "StoreError",
    "canonical_json",
    "format_id",
    "hash_bytes",
    "hash_calibration",
    "hash_id",
    "hash_json",
]

FORMAT_NAME = "dflash-train store"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a store was made from; equal manifests make stores that may be mixed."""

    format_version: int = FORMAT_VERSION
    """Layout of the store, docs/store-format.md."""
    target_name: str
    """Hub id or folder name of the target; not compared where the weights agree."""
    target_revision: str | None
    """Commit of the hub repository, None for a local folder; not compared where the weights agree."""
    target_config_hash: str
    """Hash of the target's config."""
    weights_fingerprint: str
    """Hash over 1-D tensors and seeded rows of every matrix as loaded: a fine-tune keeps name and config."""
    target_dtype: str
    """bfloat16, float32 or float16: what the target computed in."""
    quantization: str | None
    """Quantisation of the target's weights, None if there is none."""
    tokenizer_hash: str
    """Hash of the tokenizer's files."""
    chat_template_hash: str
    """Hash of the chat template."""
    target_layer_ids: tuple[int, ...]
    """Tapped decoder layers, 0-based and ascending; layer i is `hidden_states[i + 1]` in transformers."""
    num_target_layers: int
    """Decoder layers of the target."""
    hidden_size: int
    """H of the target."""
    vocab_size: int
    """Rows of the embedding."""
    tied_embeddings: bool
    """Whether lm_head is the embedding; then the store holds it once."""
    embedding_scale: float
    """Factor on the embedding's output (Gemma: sqrt(H))."""
    logit_scale: float
    """Factor on the logits."""
    logit_softcap: float | None
    """Soft cap c of c * tanh(logits / c), None without one."""
    encoding: str
    """How features are stored: store/encoding.py."""
    rank: int | None
    """Features per token of a projecting encoding, None otherwise."""
    calibration_hash: str
    """`hash_calibration` of channel scale, projection and eigenvalues."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))

    def to_json(self) -> dict[str, Any]:
        """Return the attributes of the root group."""
        fields = dataclasses.asdict(self) | {"target_layer_ids": list(self.target_layer_ids)}
        return {"format": FORMAT_NAME, **fields}

    @cached_property
    def origin(self) -> dict[str, Any]:
        """What a segment repeats as `source["store"]`, so that it is known again in another store's folder.

        bf16 states are raw, and mean the same under any calibration.
        """
        return {name: value for name, value in self.to_json().items() if name not in self._free_of_origin()}

    def check_origin(self, segment: object, source: Mapping[str, Any]) -> None:
        """Raise StoreError for a segment that was made for a store unlike this one; one that does not say passes."""
        found = source.get("store")
        if found is None or found == self.origin:
            return
        own = {name: value for name, value in self.to_json().items() if name in self._free_of_origin()}
        differences = Manifest.from_json({**found, **own}).differences(self)
        if differences:
            raise StoreError(
                f"{segment} was made for another store than the one it lies in ({'; '.join(differences)}), whose training "
                "would misread it. Move it back, or extract its samples into this store."
            )

    def _free_of_origin(self) -> set[str]:
        return {"calibration_hash"} if self.encoding == "bf16" else set()

    @classmethod
    def from_json(cls, attributes: dict[str, Any]) -> Manifest:
        """Read root attributes; unknown ones are ignored, a newer version or a missing field raises StoreError."""
        if attributes.get("format") != FORMAT_NAME:
            raise StoreError(f"These attributes are of no {FORMAT_NAME}: 'format' is {attributes.get('format')!r}.")
        version = attributes.get("format_version")
        if not isinstance(version, int) or version < 1:
            raise StoreError(f"format_version is {version!r}, but it is a whole number from 1 on; the file is damaged.")
        if version > FORMAT_VERSION:
            raise StoreError(
                f"The store has format version {version} but this dflash-train reads up to {FORMAT_VERSION}. "
                f"Install a newer dflash-train."
            )
        values = {}
        for field, kind in _field_types().items():
            if field not in attributes:
                raise StoreError(f"The manifest has no field '{field}'; it is damaged or not of format {version}.")
            value = attributes[field]
            if not _is_a(value, kind):
                raise StoreError(f"The manifest's field '{field}' is {value!r}, not {_kind_name(kind)}; it is damaged.")
            values[field] = value
        return cls(**values)

    def differences(self, other: Manifest) -> list[str]:
        """Name each field in which other, the wanted one, differs: «field: found A, wanted B»."""
        same_weights = self.weights_fingerprint == other.weights_fingerprint
        ignored = {"target_name", "target_revision"} if same_weights else set()
        pairs = {
            field: (getattr(self, field), getattr(other, field)) for field in _field_types() if field not in ignored
        }
        return [f"{field}: found {_show(a)}, wanted {_show(b)}" for field, (a, b) in pairs.items() if a != b]


def canonical_json(value: Any) -> bytes:
    """Serialise to the one spelling that equal values share: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def hash_bytes(data: bytes) -> str:
    """Hash bytes to 16 hex digits (blake2b-64)."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def hash_json(value: Any) -> str:
    """Hash a JSON value, whatever the order of its keys, to 16 hex digits."""
    return hash_bytes(canonical_json(value))


def hash_id(data: bytes) -> int:
    """Hash bytes to an id: the low 63 bits of blake2b-64, so that it fits a signed int64."""
    return int(hash_bytes(data), 16) & (2**63 - 1)


def format_id(identity: int) -> str:
    """Show an id as 16 hex digits."""
    return f"{identity:016x}"


def hash_calibration(*arrays: NDArray[np.float32]) -> str:
    """Hash a channel scale [L * H], and projection [F, L * H] and eigenvalues [F] where there are some, one after the other.

    Stores with equal hashes hold features on the same scale, in the same directions.
    """
    hashed = hashlib.blake2b(digest_size=8)
    for array in arrays:
        hashed.update(np.ascontiguousarray(array, dtype="<f4").data)
    return hashed.hexdigest()


def _field_types() -> dict[str, Any]:
    return typing.get_type_hints(Manifest)


def _kind_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a JSON value fits a field's type; JSON has no tuples, and a whole float may be spelled as an int."""
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_is_a(item, typing.get_args(kind)[0]) for item in value)
    if typing.get_args(kind):
        return any(_is_a(value, option) for option in typing.get_args(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _show(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value)
