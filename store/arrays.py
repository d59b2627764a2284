"""The two kinds of zarr v3 array in a store: one plain chunk, or one flat shard of inner chunks of 32 rows.

zarr-python writes every zarr.json, so the format is zarr's and not ours; the values are raw little-endian bytes behind
it. A flat shard is a `sharding_indexed` shard, codec bytes only, whose inner chunks lie one after the other from byte 0
with the index at the end: any row range is one `preadv` at 1.0 of raw speed (zarr-python: 0.18; store-format.md, 4.2),
and a file that was cut short has no valid index. 32 rows cost a generic reader 3 % more bytes than exact rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.checksums import Checksum, check_sum, extend_crc, read_summed
from dflash_train.store.files import Data, StoreError

INNER_ROWS = 32


@dataclass(frozen=True)
class ArrayInfo:
    """What a reader needs of an array's zarr.json."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dtype_view: str | None
    sharded: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry along the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def chunk_name(self) -> str:
        """Path of the one chunk or shard below the array's folder."""
        return chunk_name(len(self.shape))


def chunk_name(num_axes: int) -> str:
    """Path of the first and only chunk below the array's folder."""
    return "/".join(["c", *["0"] * num_axes])


def group_text(attributes: Mapping[str, Any] | None = None) -> bytes:
    """Return the zarr.json of a group, made by zarr-python."""
    import zarr

    memory: dict[str, Any] = {}
    zarr.create_group(zarr.storage.MemoryStore(memory), zarr_format=3, attributes=dict(attributes or {}))
    return _metadata(memory)


def array_text(shape: tuple[int, ...], dtype: np.dtype[Any], dtype_view: str | None, sharded: bool) -> bytes:
    """Return the zarr.json of an array of one chunk or one shard, made by zarr-python."""
    import zarr

    memory: dict[str, Any] = {}
    rows = max(1, math.ceil(shape[0] / INNER_ROWS)) * INNER_ROWS if sharded else max(1, shape[0])
    zarr.create_array(
        zarr.storage.MemoryStore(memory),
        shape=shape,
        dtype=dtype,
        chunks=(INNER_ROWS if sharded else rows, *shape[1:]),
        shards=(rows, *shape[1:]) if sharded else None,
        compressors=None,
        filters=None,
        fill_value=0,
        zarr_format=3,
        attributes={"dtype_view": dtype_view} if dtype_view else {},
    )
    return _metadata(memory)


def _metadata(memory: dict[str, Any]) -> bytes:
    (buffer,) = memory.values()
    return bytes(buffer.to_bytes())


def array_contents(name: str, array: NDArray[Any], dtype_view: str | None = None) -> dict[str, Data]:
    """Return the files of an array of one chunk, path to contents; an empty array has no chunk."""
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    contents: dict[str, Data] = {f"{name}/zarr.json": array_text(array.shape, array.dtype, dtype_view, sharded=False)}
    if array.size:
        contents[f"{name}/{chunk_name(array.ndim)}"] = array.data.cast("B")
    return contents


def shard_index(num_rows: int, row_bytes: int) -> bytes:
    """Return the index at the end of a flat shard: offset and size of every inner chunk, then the crc32c of that."""
    inner_bytes = INNER_ROWS * row_bytes
    num_inner = math.ceil(num_rows / INNER_ROWS)
    entries = np.empty((num_inner, 2), "<u8")
    entries[:, 0] = np.arange(num_inner, dtype=np.uint64) * np.uint64(inner_bytes)
    entries[:, 1] = inner_bytes
    index = entries.tobytes()
    return index + extend_crc(0, index).to_bytes(4, "little")


def stored_bytes(info: ArrayInfo) -> int:
    """Bytes of the file of an array with rows: of its chunk, or of its flat shard with the index."""
    if not info.sharded:
        return info.shape[0] * info.row_bytes
    num_inner = math.ceil(info.shape[0] / INNER_ROWS)
    return num_inner * (INNER_ROWS * info.row_bytes + 16) + 4


def read_group(folder: Path, name: str = ".", checksums: Mapping[str, Checksum] | None = None) -> dict[str, Any]:
    """Read the attributes of the group at folder/name; anything but a zarr v3 group raises StoreError."""
    metadata = _read_metadata(folder, f"{name}/zarr.json".removeprefix("./"), checksums, "group")
    attributes = metadata.get("attributes", {})
    if not isinstance(attributes, dict):
        raise StoreError(f"{folder / name / 'zarr.json'} is damaged: its attributes are no JSON object.")
    return attributes


def read_array_info(folder: Path, name: str, checksums: Mapping[str, Checksum] | None = None) -> ArrayInfo:
    """Read the zarr.json of the array at folder/name; a layout that this package does not write raises StoreError."""
    metadata = _read_metadata(folder, f"{name}/zarr.json", checksums, "array")
    path = folder / name / "zarr.json"
    try:
        shape = tuple(int(size) for size in metadata["shape"])
        info = ArrayInfo(
            shape=shape,
            dtype=np.dtype(metadata["data_type"]).newbyteorder("<"),
            dtype_view=metadata.get("attributes", {}).get("dtype_view"),
            sharded=_name(metadata["codecs"][0]) == "sharding_indexed",
        )
        as_written = min(shape) >= 0 and _is_as_written(metadata, info)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    if not as_written:
        raise StoreError(
            f"{path} describes other chunks or codecs than dflash-train writes (one uncompressed chunk, or one shard of "
            f"{INNER_ROWS} rows a chunk). Another program rewrote the array; extract it again."
        )
    return info


def _is_as_written(metadata: Mapping[str, Any], info: ArrayInfo) -> bool:
    """Whether grid, keys and codecs are those of `array_text`; spelled out, because zarr versions may differ in form."""
    chunk_shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    keys = metadata["chunk_key_encoding"]
    one_chunk = (
        _name(metadata["chunk_grid"]) == "regular"
        and tuple(chunk_shape[1:]) == info.shape[1:]
        and _name(keys) == "default"
        and (isinstance(keys, str) or keys.get("configuration", {}).get("separator", "/") == "/")
    )
    if not info.sharded:
        return one_chunk and _is_bytes(metadata["codecs"], info.dtype) and chunk_shape[0] == max(1, info.shape[0])
    inner = metadata["codecs"][0]["configuration"]
    return (
        one_chunk
        and len(metadata["codecs"]) == 1
        and list(inner["chunk_shape"]) == [INNER_ROWS, *info.shape[1:]]
        and chunk_shape[0] == max(1, math.ceil(info.shape[0] / INNER_ROWS)) * INNER_ROWS
        and _is_bytes(inner["codecs"], info.dtype)
        and _is_bytes(inner["index_codecs"][:1], np.dtype("<u8"))
        and [_name(codec) for codec in inner["index_codecs"][1:]] == ["crc32c"]
        and inner.get("index_location", "end") == "end"
    )


def _is_bytes(codecs: list[Any], dtype: np.dtype[Any]) -> bool:
    """Whether the codecs are `bytes`, little endian, alone."""
    codec = codecs[0]
    endian = "little" if isinstance(codec, str) else codec.get("configuration", {}).get("endian", "little")
    return len(codecs) == 1 and _name(codec) == "bytes" and (dtype.itemsize == 1 or endian == "little")


def _name(extension: Any) -> str:
    """Name of a zarr v3 extension point, which may be spelled as an object or as its name alone."""
    return str(extension if isinstance(extension, str) else extension["name"])


def _read_metadata(folder: Path, name: str, checksums: Mapping[str, Checksum] | None, node_type: str) -> dict[str, Any]:
    text = read_summed(folder, name, checksums)
    try:
        metadata: dict[str, Any] = json.loads(text)
        if not isinstance(metadata, dict):
            raise TypeError(f"found a JSON {type(metadata).__name__}, wanted an object")
        found = (metadata["zarr_format"], metadata["node_type"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{folder / name} is no zarr metadata: {type(error).__name__}: {error}. Restore it from a copy, or "
            f"extract again."
        ) from error
    if found != (3, node_type):
        raise StoreError(f"{folder / name} describes a zarr v{found[0]} {found[1]}, not a zarr v3 {node_type}.")
    return metadata


def read_array(
    folder: Path, name: str, checksums: Mapping[str, Checksum] | None = None
) -> tuple[NDArray[Any], str | None]:
    """Read an array of one chunk whole, with its dtype_view; a missing chunk or a wrong size raises StoreError."""
    info = read_array_info(folder, name, checksums)
    path = folder / name / info.chunk_name
    try:
        array = np.fromfile(path, info.dtype) if math.prod(info.shape) else np.empty(0, info.dtype)
        num_bytes = path.stat().st_size if array.size else 0
    except OSError as error:
        raise StoreError(f"{path} could not be read: {error.strerror or error}.") from error
    if info.sharded or num_bytes != math.prod(info.shape) * info.dtype.itemsize:
        raise StoreError(f"{path} holds {num_bytes:,} bytes, which do not fit the shape {list(info.shape)}.")
    if array.size and checksums is not None:
        check_sum(folder, f"{name}/{info.chunk_name}", Checksum(num_bytes, extend_crc(0, array)), checksums)
    return array.reshape(info.shape), info.dtype_view
