"""The calls that a remote store makes: read, list, put and remove objects below one URL, with retries and plain errors.

fsspec is the door to every backend; its file objects, caches and listings are not used, only whole-object and range
calls. What may pass by itself (5xx, throttling, time-outs, broken connections, short answers) is tried again for half a
minute; s3fs's and botocore's own retries are switched off, or they would multiply. Everything else becomes a StoreError
of one sentence that names bucket and way out. Threads may share an `Objects`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from dflash_train.store.files import StoreError, write_error
from dflash_train.store.location import StoreUrl, scrub, way_in

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Item = TypeVar("Item")

RETRY_SECONDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0)
"""Pauses between tries, each up to a quarter longer: 24 s and more in all, enough for an S3 prefix to be split."""
TIMEOUT_SECONDS = 20
"""Silence of an S3 server after which a call is given up and tried again."""
S3 = ("s3", "s3a")
PARALLEL_CALLS = 16
PIECE_BYTES = 32 << 20
"""Of an object that is downloaded whole, fetched by one call."""
_DEFINITE = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(NotImplementedError, ValueError, TypeError, ImportError, StoreError),
)


class MissingObject(StoreError):
    """An object, or its bucket, that is not there."""


class MissingBucket(MissingObject):
    """A bucket that is not there."""


class Objects:
    """The objects below a store's URL, by their names relative to it."""

    def __init__(self, location: StoreUrl) -> None:
        """Connect; a protocol without its package, or an unknown one, raises StoreError."""
        self.location = location
        self._system, self._root = _open(location)
        # s3fs asks for the size first, to read large objects in parts; those that are read whole are small
        self._whole = {"max_concurrency": 1} if location.protocol in S3 else {}
        self._pool = ThreadPoolExecutor(PARALLEL_CALLS, thread_name_prefix="objects")

    def url(self, name: str) -> str:
        """The URL of an object."""
        return f"{self.location.url}/{name}" if name else self.location.url

    def read(self, name: str) -> bytes:
        """A whole object; MissingObject where there is none."""
        return bytes(self._call("read", name, lambda: self._system.cat_file(self._path(name), **self._whole)))

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Bytes of an object; MissingObject where there is none, StoreError where it ends before."""

        def read() -> bytes:
            data = bytes(self._system.cat_file(self._path(name), start=start, end=start + length))
            if len(data) != length:
                raise EOFError(f"{len(data):,} bytes came at {start:,} for {length:,} wanted")
            return data

        return self._call("read", name, read) if length else b""

    def download(self, name: str, path: Path, size: int) -> None:
        """Copy an object of a known size into a new local file, several pieces at a time."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise write_error(path, 0, error) from error

        def copy(start: int) -> None:
            data = memoryview(self.read_range(name, start, min(PIECE_BYTES, size - start)))
            try:
                while len(data):
                    written = os.pwrite(descriptor, data, start)
                    data, start = data[written:], start + written
            except OSError as error:
                raise write_error(path, size, error) from error

        try:
            if size <= PIECE_BYTES:
                copy(0)
            else:
                with ThreadPoolExecutor(PARALLEL_CALLS // 2) as pool:  # not self._pool: whoever calls may be in it
                    list(pool.map(copy, range(0, size, PIECE_BYTES)))
        finally:
            os.close(descriptor)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Names of all objects below a prefix, with their sizes; none where there is nothing."""
        return {name: int(info["size"] or 0) for name, info in self._find(prefix).items()}

    def ages(self, prefix: str) -> dict[str, float]:
        """Seconds since each object below a prefix was written; 0 where the backend does not say."""
        ages = {}
        for name, info in self._find(prefix).items():
            written: Any = next(
                filter(None, map(info.get, ("LastModified", "last_modified", "created", "mtime"))), None
            )
            stamp = written.timestamp() if isinstance(written, datetime) else written
            ages[name] = max(0.0, time.time() - stamp) if isinstance(stamp, int | float) else 0.0
        return ages

    def folders(self, prefix: str) -> list[str]:
        """Names directly below a prefix that have something below them, ascending."""

        def call() -> list[Any]:
            self._system.invalidate_cache()
            return list(self._system.ls(self._path(prefix), detail=True))

        try:
            entries = self._call("list", prefix, call)
        except MissingObject:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in place of an older one."""
        self._call("write", name, lambda: self._system.pipe_file(self._path(name), data))

    def put_file(self, name: str, path: Path) -> None:
        """Write an object from a local file, large ones in parts."""
        self._call("write", name, lambda: self._system.put_file(str(path), self._path(name)))

    def create(self, name: str, data: bytes) -> None:
        """Write an object only where there is none: FileExistsError if there is one with other content.

        Atomic where the backend is (S3: If-None-Match); backends that cannot look first and then write.
        """
        path = self._path(name)

        def create() -> None:
            try:
                self._system.pipe_file(path, data, mode="create")
            except (NotImplementedError, TypeError) as error:
                logger.debug("%s has no create-only writes: %s", self.location.protocol, error)
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
            else:
                return
            if self._system.exists(path):
                raise FileExistsError(name)
            self._system.pipe_file(path, data)

        try:
            self._call("write", name, create)
        except FileExistsError as error:
            if self.read(name) != data:  # else it was this very call, whose answer was lost
                raise FileExistsError(f"{self.url(name)} exists already.") from error

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; what is gone already is fine."""

        def remove(name: str) -> None:
            with contextlib.suppress(MissingObject):
                self._call("remove", name, lambda: self._system.rm_file(self._path(name)))

        self.together(remove, names)

    def together(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Call a function on every item, several at a time; results in order, or the first error when all have ended."""
        calls = [self._pool.submit(function, item) for item in items]
        try:
            wait(calls, return_when=FIRST_EXCEPTION)
        finally:
            for call in calls:
                call.cancel()
            wait(calls)
        return iter([call.result() for call in calls])

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _find(self, prefix: str) -> dict[str, dict[str, Any]]:
        def call() -> dict[str, Any]:
            self._system.invalidate_cache()  # a listing is asked for to see what others have written
            return dict(self._system.find(self._path(prefix), detail=True))

        try:
            found = self._call("list", prefix, call)
        except MissingObject:
            return {}
        start = len(self._root.lstrip("/")) + 1
        return {path.lstrip("/")[start:]: info for path, info in sorted(found.items())}

    def _call(self, what: str, name: str, call: Callable[[], Result]) -> Result:
        """Make a call, again while its error may pass."""
        for pause in (*RETRY_SECONDS, None):
            try:
                return call()
            except (FileExistsError, StoreError):
                raise
            except Exception as error:
                if pause is None or not _may_pass(error):
                    raise self._sentence(what, name, error) from error
                logger.warning("Trying again to %s %s in %.1f s: %s", what, self.url(name), pause, _reason(error))
                time.sleep(pause * (1 + random.random() / 4))
        raise AssertionError("the last pause is None")

    def _sentence(self, what: str, name: str, error: Exception) -> StoreError:
        location, reason = self.location, _reason(error)
        if _code(error) == "NoSuchBucket":
            return MissingBucket(f"{location.container} is not there. Make it, or correct the URL of the store.")
        if isinstance(error, FileNotFoundError):
            return MissingObject(f"{self.url(name)} is not there. Restore it from a copy, or extract again.")
        if isinstance(error, PermissionError) or _status(error) in (401, 403) or "Credentials" in type(error).__name__:
            return StoreError(
                f"{location.container} refuses to {what} {self.url(name)} ({reason}). Give credentials that may list, read "
                f"and write there as {way_in(location)}."
            )
        if isinstance(error, EOFError) or _status(error) == 416:
            return StoreError(f"{self.url(name)} is cut short: {reason}. Remove its segment and extract again.")
        return StoreError(
            f"{location.container} did not {what} {self.url(name)}, tried for "
            f"{sum(RETRY_SECONDS):.0f} s and more: {reason}. Look at the network and the service, then run this again."
            if _may_pass(error)
            else f"{location.container} did not {what} {self.url(name)}: {reason}. Correct the URL or its settings."
        )


def _open(location: StoreUrl) -> tuple[Any, str]:
    """The fsspec file system of a location, and the path of the store in it."""
    import fsspec
    from fsspec.config import conf

    protocol, is_s3 = location.protocol, location.protocol in S3
    options: dict[str, Any] = {"use_listings_cache": False}
    if is_s3:
        once = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
        limits = {"connect_timeout": TIMEOUT_SECONDS, "read_timeout": TIMEOUT_SECONDS, "max_pool_connections": 64}
        options["config_kwargs"] = {**limits, **conf.get(protocol, {}).get("config_kwargs", {}), **once}
    try:
        system, root = fsspec.core.url_to_fs(location.url, **options)
    except ImportError as error:
        package = "'dflash-train[s3]'" if is_s3 else "the package that fsspec wants for it"
        raise StoreError(
            f"{protocol}:// needs a package that is not installed. Run `pip install {package}`."
        ) from error
    except Exception as error:
        known = (
            f"Known are {', '.join(sorted(set(fsspec.available_protocols()) & {'s3', 'gs', 'abfs', 'az', 'hdfs'}))}."
        )
        raise StoreError(f"{location.url} cannot be opened: {_reason(error)}. {known}") from error
    if is_s3:
        system.retries = 1
    return system, str(root).rstrip("/")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or current.__context__


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error stands for."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for name in ("status", "status_code", *(["code"] if type(one).__name__ == "HttpError" else [])):  # gcsfs's
            status = getattr(one, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
    return None


def _code(error: BaseException) -> str | None:
    """The service's own name of an error."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
    return None


def _may_pass(error: Exception) -> bool:
    status = _status(error)
    if status is not None and status >= 400:
        return status >= 500 and status != 501 or status in (408, 409, 429)
    return not isinstance(error, _DEFINITE) and "Credentials" not in type(error).__name__


def _reason(error: BaseException) -> str:
    text = re.sub(r"^\[Errno \d+\] ", "", scrub(str(error))).rstrip(".") or type(error).__name__
    code = _code(error)
    return f"{code}: {text}" if code and code not in text else text
