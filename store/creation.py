"""Creating a store: one transaction by one process, under a lock beside the store.

Everything that all segments share (manifest, calibration, frozen tables, tokenizer) is written under a temporary name
and renamed at once, so a store that exists is whole. The lock is an flock, which the kernel drops with its process: no
stale lock survives a kill. It lies beside the store because it is needed before the store exists.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.arrays import array_contents, group_text
from dflash_train.store.calibration import CALIBRATION, Calibration
from dflash_train.store.checksums import CHECKSUMS_NAME, format_checksums, sum_contents
from dflash_train.store.encoding import Encoding, make_encoding
from dflash_train.store.files import Data, Files, list_temporaries, take_lock, write_directory, write_error
from dflash_train.store.location import StoreLocation, StoreUrl
from dflash_train.store.manifest import Manifest, StoreError, canonical_json
from dflash_train.store.segment import REFERENCE, SEGMENTS, STAGING
from dflash_train.store.upload import SpoolFiles, clean_spool, spooled_store

EMBED_TOKENS = "frozen/embed_tokens"
LM_HEAD = "frozen/lm_head"
TARGET_FILES = "frozen/target"


@dataclass(kw_only=True)
class FrozenTarget:
    """What stage 2 needs of the target: its tables, config and tokenizer files."""

    embed_tokens: NDArray[Any]
    """[V, H] as stored: bfloat16 as uint16 (encoding.to_stored)."""
    lm_head: NDArray[Any] | None
    """[V, H] as stored, None if it is the embedding (tied)."""
    dtype_view: str | None
    """What the bits of both tables mean: «bfloat16», or None for float32 and float16."""
    config: dict[str, Any]
    """The target's config.json."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Tokenizer files and chat template by name: tokenizer.json, chat_template.jinja, …"""


def manifest_encoding(manifest: Manifest) -> Encoding:
    """Return the encoding that a manifest names."""
    return make_encoding(manifest.encoding, len(manifest.target_layer_ids), manifest.hidden_size, manifest.rank)


def calibration_shapes(encoding: Encoding) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the float32 arrays below `calibration/` that an encoding needs."""
    shapes: dict[str, tuple[int, ...]] = {"channel_scale": (encoding.num_states,)}
    if encoding.is_projected:
        shapes["projection"] = (encoding.num_features, encoding.num_states)
        shapes["eigenvalues"] = (encoding.num_features,)
        shapes["layer_energy"] = (encoding.num_layers,)
    return shapes


def create_store(
    path: StoreLocation, manifest: Manifest, calibration: Calibration, frozen: FrozenTarget, files: Files | None = None
) -> None:
    """Create a store without segments, whole or not at all; a path that exists raises StoreError.

    The calibration, on the CPU, has the arrays that the encoding needs; its hash is the manifest's calibration_hash.
    Call it under `store_lock`.
    """
    if isinstance(path, StoreUrl):
        with spooled_store(path) as folder:
            create_store(folder, manifest, calibration, frozen, files or SpoolFiles())
        return
    encoding = manifest_encoding(manifest)
    table = (manifest.vocab_size, manifest.hidden_size)
    arrays = calibration.arrays()
    for name, shape in calibration_shapes(encoding).items():
        found = (arrays[name].shape, arrays[name].dtype)
        assert found == (shape, np.dtype("f4")), f"{name} is {found}, wanted float32 of {shape}"
        assert np.isfinite(arrays[name]).all(), f"{name} is not finite"
    assert arrays.keys() == calibration_shapes(encoding).keys(), f"{list(arrays)} for {encoding.name}"
    assert all((arrays[name] > 0).all() for name in arrays if name in ("channel_scale", "eigenvalues")), "they divide"
    assert manifest.calibration_hash == calibration.hash, "calibration_hash is of another calibration"
    assert frozen.embed_tokens.shape == table, f"embed_tokens is {frozen.embed_tokens.shape}, manifest says {table}"
    assert (frozen.lm_head is None) == manifest.tied_embeddings, "lm_head is stored exactly when it is not tied"
    contents: dict[str, Data] = {
        f"{CALIBRATION}/zarr.json": group_text(),
        "frozen/zarr.json": group_text(),
        f"{SEGMENTS}/zarr.json": group_text(),
        **array_contents(EMBED_TOKENS, frozen.embed_tokens, frozen.dtype_view),
        f"{TARGET_FILES}/config.json": canonical_json(frozen.config),
    }
    if encoding.name != "bf16":  # which keeps the states of all samples
        contents[f"{REFERENCE}/zarr.json"] = group_text()
    for name, array in arrays.items():
        contents |= array_contents(f"{CALIBRATION}/{name}", array)
    if frozen.lm_head is not None:
        assert frozen.lm_head.shape == table, f"lm_head is {frozen.lm_head.shape}, the manifest says {table}"
        contents |= array_contents(LM_HEAD, frozen.lm_head, frozen.dtype_view)
    for name, data in frozen.files.items():
        assert name == PurePosixPath(name).name and name != "config.json", f"'{name}' is no name of a tokenizer file"
        contents[f"{TARGET_FILES}/{name}"] = data
    contents["zarr.json"] = group_text(manifest.to_json())
    contents[CHECKSUMS_NAME] = format_checksums({name: sum_contents([data]) for name, data in contents.items()})
    try:
        write_directory(path, contents, files, empty=[STAGING])
    except FileExistsError as error:
        raise StoreError(f"{path} exists already. Choose another path, or remove it first.") from error


def is_locked(path: Path) -> bool:
    """Whether some process holds a store's lock; a file that a killed one left is no lock.

    Asking takes the lock for a moment, in which a start would be refused: ask rarely.
    """
    try:
        descriptor = os.open(path.resolve().with_name(f"{path.resolve().name}.lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def store_lock(path: StoreLocation) -> Iterator[None]:
    """Hold the one lock of a store, existing or not; a second holder gets StoreError naming the first one's pid.

    Where there is still no store when it is let go, the lock file goes too. The lock of a URL is this machine's.
    """
    if isinstance(path, StoreUrl):
        with store_lock(path.mirror):
            yield
        return
    try:
        given, path = path, path.resolve()
    except (OSError, RuntimeError) as error:  # which of them depends on the version of Python
        raise StoreError(
            f"{path} is a link that leads in a circle. Choose another path, or remove it first."
        ) from error
    if not path.name:
        raise StoreError(f"{path} cannot be a store. Choose a folder inside it.")
    lock = path.with_name(path.name + ".lock")
    descriptor = _open_lock(given, lock)
    try:
        if (holder := take_lock(descriptor, lock)) is not None:
            raise StoreError(
                f"{path} is in use by process {holder}. Wait until it has ended, or stop it, then run this again."
            )
        if not _is_same_file(descriptor, lock):
            raise StoreError(f"{path} was let go by another process in this very moment. Run this again.")
        try:
            yield
        finally:
            if not (path / "zarr.json").exists():
                lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _open_lock(store: Path, lock: Path) -> int:
    try:
        Files().make_directories(lock.parent)
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR):
            reason = "its name is too long" if error.errno == errno.ENAMETOOLONG else "a file stands in its way"
            raise StoreError(f"{store} cannot be a store: {reason}. Choose another path.") from error
        raise write_error(lock, 0, error) from error


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at path: its last holder may have removed it before it was locked here."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def clean_staging(path: StoreLocation, files: Files | None = None) -> int:
    """Remove what dead runs left half-written in and beside a store; return how many. Call it under `store_lock`."""
    if isinstance(path, StoreUrl):
        return clean_spool(path)
    files, leftovers = files or Files(), stale_entries(path)
    for leftover in leftovers:
        files.remove_tree(leftover)
    return len(leftovers)


def stale_entries(path: Path) -> list[Path]:
    """List what is half-written in and beside a store; unless an extract is running, nobody needs it."""
    staging = path / STAGING
    return [*(sorted(staging.iterdir()) if staging.is_dir() else []), *list_temporaries(path)]
