"""Writing to a store in an object store: spooled on this machine, uploaded, committed by one small object put last.

A segment is written by the SegmentWriter for local stores into a spool folder and uploaded whole: its rows, then its
small files, then, when a listing shows all of them with their sizes, its group's zarr.json, create-only. Before that
object no reader sees the segment, after it everything is there. An upload that died leaves objects without it: removed
by the next extract of this machine, which finds its id in the spool, or after ORPHAN_SECONDS by that of any other.

There is no lock across machines: segment ids are random, so two extracts disturb each other in nothing, and what both
stored is counted once. Creation is claimed by checksums.json, create-only, and committed by the root's zarr.json.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dflash_train.store.checksums import CHECKSUMS_NAME
from dflash_train.store.download import VERIFICATION
from dflash_train.store.encoding import Encoding
from dflash_train.store.files import Files, StoreError, write_error
from dflash_train.store.location import StoreLocation, StoreUrl
from dflash_train.store.objects import MissingBucket, MissingObject, Objects
from dflash_train.store.segment import SEGMENTS, STAGING, SegmentWriter
from dflash_train.units import format_bytes, format_duration

ORPHAN_SECONDS = 3600.0
"""Age of the newest object of an uncommitted segment after which nobody is uploading it any more."""
CLAIM_SECONDS = 600.0
"""Age of a creation's claim after which whoever made it has died: creation uploads for seconds, at most minutes."""


class SpoolFiles(Files):
    """Files that need not outlive this machine."""

    def fsync(self, descriptor: int) -> None:
        """Nothing: what a crash loses here was not committed."""

    def sync_directory(self, path: Path) -> None:
        """Nothing."""


class RemoteSegmentWriter(SegmentWriter):
    """A segment that is spooled, then uploaded by `commit`."""

    def __init__(self, location: StoreUrl, encoding: Encoding, attributes: dict[str, Any]) -> None:
        self._spool = location.spool / f"segments-{os.getpid()}"
        super().__init__(self._spool, encoding, attributes, SpoolFiles())
        self._location = location

    def commit(self) -> str | None:
        """Upload the segment; return its id when it is committed. What fails raises, and nothing is committed then."""
        try:
            (self._spool / SEGMENTS).mkdir(parents=True, exist_ok=True)
            (self._spool / STAGING).mkdir(exist_ok=True)
        except OSError as error:
            raise write_error(self._spool, 0, error) from error
        segment_id = super().commit()
        if segment_id is not None:
            folder = self._spool / SEGMENTS / segment_id
            upload_segment(Objects(self._location), segment_id, folder)
            shutil.rmtree(folder, ignore_errors=True)
        return segment_id


def open_segment_writer(store: StoreLocation, encoding: Encoding, attributes: dict[str, Any]) -> SegmentWriter:
    """A writer of a new segment of a store, wherever that is."""
    if isinstance(store, StoreUrl):
        return RemoteSegmentWriter(store, encoding, attributes)
    return SegmentWriter(store, encoding, attributes)


def upload_segment(objects: Objects, segment_id: str, folder: Path) -> None:
    """Upload a whole segment folder and commit it; StoreError where that fails."""
    prefix = f"{SEGMENTS}/{segment_id}"
    sizes = _upload(objects, f"{prefix}/", folder, last="zarr.json")
    found = objects.sizes(prefix)
    lost = [name for name, size in sizes.items() if found.get(name) != size]
    if lost:
        raise StoreError(
            f"{objects.location.container} lost what it had taken: {objects.url(lost[0])} has {found.get(lost[0])} bytes, "
            f"not {sizes[lost[0]]:,}. The segment is not committed; look at the service, then run the same command again."
        )
    objects.create(f"{prefix}/zarr.json", (folder / "zarr.json").read_bytes())


def _upload(objects: Objects, prefix: str, folder: Path, last: str) -> dict[str, int]:
    """Upload the files of a folder but one, large ones first; return names and sizes of what was uploaded."""
    files = [path for path in folder.rglob("*") if path.is_file() and path != folder / last]
    sizes = {path: path.stat().st_size for path in files}
    files.sort(key=lambda path: -sizes[path])
    names = {path: f"{prefix}{path.relative_to(folder).as_posix()}" for path in files}
    for path in files[:4]:  # in parts side by side, one after the other
        objects.put_file(names[path], path)
    list(objects.together(lambda path: objects.put_file(names[path], path), files[4:]))
    return {names[path]: sizes[path] for path in files}


@contextlib.contextmanager
def spooled_store(location: StoreUrl) -> Iterator[Path]:
    """A path for a store that is created here first, and uploaded when the block ends without an error."""
    folder = location.spool / f"create-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
        yield folder / "store"
        _publish(Objects(location), folder / "store")
    except OSError as error:
        raise write_error(folder, 0, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(objects: Objects, folder: Path) -> None:
    """Claim the store, upload its own files, and commit them; StoreError if another process was faster."""
    location, claim = objects.location, (folder / CHECKSUMS_NAME).read_bytes()
    if remote_store_exists(objects):
        raise StoreError(f"{location} exists already. Choose another URL, or remove it first.")
    for name, age in objects.ages(CHECKSUMS_NAME).items():
        if age < CLAIM_SECONDS:
            raise StoreError(
                f"{location} is being created by another process since {format_duration(age)}, or that has died. Wait "
                f"until it is there, or {format_duration(CLAIM_SECONDS)} in all, then run this again."
            )
        objects.remove([name])
    try:
        objects.create(CHECKSUMS_NAME, claim)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if name not in ("zarr.json", CHECKSUMS_NAME):
                objects.put_file(name, path)
    except StoreError:
        with contextlib.suppress(StoreError):  # let go of the claim: whoever comes next need not wait
            objects.remove([CHECKSUMS_NAME])
        raise
    except FileExistsError as error:
        raise StoreError(f"{location} is created by another process in this moment. Run this again.") from error
    try:
        if objects.read(CHECKSUMS_NAME) != claim:
            raise FileExistsError(f"{location} was claimed by another process.")
        objects.create("zarr.json", (folder / "zarr.json").read_bytes())
    except FileExistsError as error:
        raise StoreError(f"{location} was created by another process in this moment. Run this again.") from error


def remote_store_exists(objects: Objects) -> bool:
    """Whether a store's root is committed; a bucket that is not there raises StoreError."""
    try:
        objects.read("zarr.json")
    except MissingBucket:
        raise
    except MissingObject:
        return False
    return True


def store_exists(store: StoreLocation) -> bool:
    """Whether something is at a location: of a local path anything, of a URL a committed store."""
    return remote_store_exists(Objects(store)) if isinstance(store, StoreUrl) else store.exists()


def check_writable(store: StoreLocation) -> None:
    """Write a small object to a URL and remove it; StoreError where that is refused. Nothing for a local path."""
    if isinstance(store, StoreUrl):
        objects, name = Objects(store), f".write-test-{secrets.token_hex(4)}"
        objects.put(name, b"dflash extract will write here\n")
        objects.remove([name])


def check_spool(store: StoreLocation, num_bytes: int) -> None:
    """Raise StoreError unless what waits for its upload to a URL has so much room; nothing for a local path."""
    if isinstance(store, StoreUrl):
        try:
            store.spool.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(store.spool).free
        except OSError as error:
            raise write_error(store.spool, 0, error) from error
        if free < num_bytes:
            raise StoreError(
                f"{format_bytes(num_bytes)} may wait for their upload to {store}, but {store.spool} has {format_bytes(free)} "
                "free. Make room, or give another --cache-folder or fewer --segment-bytes."
            )


def clean_spool(location: StoreUrl) -> int:
    """Remove what dead runs left: this machine's spool, and uncommitted segments of its own or of long ago.

    Returns how many. Call it under the store's lock.
    """
    objects, spool = Objects(location), location.spool
    own = {path.name for path in spool.glob(f"segments-*/{SEGMENTS}/*")}
    orphans = orphans_of(objects.sizes(SEGMENTS))
    removed = 0
    for segment_id, names in orphans.items():
        if segment_id in own or min(objects.ages(f"{SEGMENTS}/{segment_id}").values(), default=0.0) > ORPHAN_SECONDS:
            objects.remove(names)
            removed += 1
    folders = (
        [folder for folder in spool.iterdir() if not folder.name.startswith(VERIFICATION)] if spool.is_dir() else []
    )
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return removed + len(folders)


def orphans_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Objects of segments that are not committed, by segment, among all objects of a store."""
    segments: dict[str, list[str]] = {}
    for name in names:
        parts = name.split("/")
        if len(parts) > 2 and parts[0] == SEGMENTS:
            segments.setdefault(parts[1], []).append(name)
    return {
        segment_id: names for segment_id, names in segments.items() if f"{SEGMENTS}/{segment_id}/zarr.json" not in names
    }
