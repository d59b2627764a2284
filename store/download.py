"""Copies of a remote store's objects, as they are, for a check that reads every byte: one segment at a time.

Unlike the mirror (remote.py) nothing is checked on the way, and nothing stays: what is damaged is what is looked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from dflash_train.store.files import StoreError, write_error
from dflash_train.store.location import StoreUrl
from dflash_train.store.objects import MissingObject, Objects
from dflash_train.store.remote import WAY_OUT
from dflash_train.store.segment import REFERENCE, SEGMENTS

VERIFICATION = "verify-"
"""Begins the names of folders in the spool for verifications."""


@contextlib.contextmanager
def downloaded(location: StoreUrl) -> Iterator[tuple[Path, Objects, dict[str, int]]]:
    """A folder with the store's own files, whatever their state, and an empty one for each committed segment.

    Yields it with the sizes of all objects; `download_segment` fills a segment's folder. It is removed at the end.
    Folders of reference samples are treated as segments; what is half-written or a cache is left out.
    """
    objects = Objects(location)
    sizes = objects.sizes()
    if not sizes:
        raise StoreError(f"{location} is not there. {WAY_OUT}")
    with _own_folder(location.spool) as folder:
        try:
            (folder / SEGMENTS).mkdir()
            for name, size in sizes.items():
                if not _is_of_segment(name):
                    if not name.startswith("."):
                        _download(objects, name, folder, size)
                elif name.split("/")[2:] == ["zarr.json"]:
                    (folder / name).parent.mkdir(parents=True)
        except OSError as error:
            raise write_error(folder, 0, error) from error
        yield folder, objects, sizes


@contextlib.contextmanager
def _own_folder(parent: Path) -> Iterator[Path]:
    """A new folder that is removed at the end; those of processes that were killed are removed before."""
    folder = parent / f"{VERIFICATION}{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise write_error(folder, 0, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for other in parent.glob(f"{VERIFICATION}*"):
            with contextlib.suppress(OSError):
                held = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(other)
                finally:
                    os.close(held)
        yield folder
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def download_segment(folder: Path, name: str, objects: Objects, sizes: Mapping[str, int]) -> None:
    """Fetch all objects of a segment, `segments/<id>` or `reference/<id>`, into its folder below `folder`."""
    for file, size in sizes.items():
        if file.startswith(f"{name}/"):
            _download(objects, file, folder, size)


def _download(objects: Objects, name: str, folder: Path, size: int) -> None:
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, 0, error) from error
    with contextlib.suppress(MissingObject):  # removed since it was listed
        objects.download(name, path, size)


def _is_of_segment(name: str) -> bool:
    return name.startswith((f"{SEGMENTS}/", f"{REFERENCE}/")) and name.count("/") >= 2
