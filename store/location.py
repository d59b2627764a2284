"""Where a store is: a folder, or a URL of an object store that fsspec knows, such as `s3://bucket/qwen3-8b.zarr`.

Only names here, no access: a `StoreUrl` goes where a `Path` goes (configs, workers, recipes), `remote.py` opens it. A
URL never carries credentials: it is written into recipes, logs and error messages, so one that does is refused without
being repeated. Backends take them from their own places (AWS_PROFILE, AWS_ACCESS_KEY_ID, fsspec's configuration).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from dflash_train.errors import InputError

CACHE_BYTES = 50_000_000_000
"""Most bytes of rows that are kept of each store at a URL, unless --cache-bytes says otherwise."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*(?:::[A-Za-z0-9+.:/-]*)?)://(.*)", re.DOTALL)
_SECRETS = (
    (re.compile(r"(?<=://)[^/@\s]+@"), "…@"),
    (re.compile(r"(?<=[?])[^\s\"'<>]+"), "…"),
    (re.compile(r"(?i)\b(authorization|x-amz-security-token|signature|credential|token|secret|password)\b\s*[=:]\s*\S+"), r"\1=…"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"), "…"),
)  # fmt: skip


@dataclass(frozen=True)
class StoreUrl:
    """A store in an object store, and the local folder that this machine keeps for it."""

    url: str
    cache_folder: Path | None = None
    """Below it every store has a folder of its own; filled in by `located`."""
    cache_bytes: int = CACHE_BYTES
    """Most bytes of sample rows kept there."""

    def __str__(self) -> str:
        return self.url

    @property
    def protocol(self) -> str:
        """What stands before `://`: s3, gs, …"""
        return self.url.partition("://")[0]

    @property
    def container(self) -> str:
        """Protocol and bucket: what access is granted to."""
        return "/".join(self.url.split("/")[:3])

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def local_folder(self) -> Path:
        """This store's folder below cache_folder."""
        assert self.cache_folder is not None, "located() fills it in"
        return self.cache_folder / f"{self.name}-{hashlib.blake2b(self.url.encode(), digest_size=4).hexdigest()}"

    @property
    def mirror(self) -> Path:
        """A folder like that of a local store, with its small files alone: all that is not rows of samples."""
        return self.local_folder / "store"

    @property
    def row_cache(self) -> Path:
        """Rows that were read."""
        return self.local_folder / "rows"

    @property
    def spool(self) -> Path:
        """What is written here before it is uploaded."""
        return self.local_folder / "spool"


StoreLocation = Path | StoreUrl


def parse_store(text: str) -> StoreLocation:
    """A folder, or the StoreUrl of a text with `://`; raises InputError for a URL that cannot be one of a store.

    What may be a secret is never part of the message.
    """
    match = _URL.fullmatch(text)
    if match is None:
        return Path(text)
    protocol, rest = match[1].lower(), match[2]
    if protocol == "file":
        if not rest.startswith("/"):
            raise InputError(
                "A file:// URL of a store has a host, a user or a password. Leave them out: file:///folder/store."
            )
        return Path(unquote(rest))
    authority = rest.partition("/")[0]
    user = re.match(r"[^/]*:(?!\d*(/|$))", rest)  # a colon that no port follows: the password may hold a slash
    if "@" in authority or ("@" in rest and user):
        raise InputError(
            f"The URL of the store, {protocol}://…, has a user or password before «@», which would end up in recipes and "
            f"logs. Leave them out and give them as {_way_in(protocol)}."
        )
    if "?" in rest or "#" in rest:
        raise InputError(
            f"The URL of the store, {protocol}://{_before_query(rest)}, has a query or fragment, which may be a secret and "
            f"would end up in recipes and logs. Leave it out; options and credentials go into {_way_in(protocol)}."
        )
    if "::" in protocol:
        raise InputError(
            f"The URL of the store, {text}, is a chain. Give its last part alone: dflash keeps a cache of its own."
        )
    parts = rest.rstrip("/").split("/")
    if len(parts) < 2 or not all(parts) or {".", ".."} & set(parts) or any(character < " " for character in rest):
        raise InputError(
            f"{text!r} is no URL of a store. Give protocol, bucket and a name within, such as s3://bucket/qwen3-8b.zarr."
        )
    return StoreUrl(f"{protocol}://{'/'.join(parts)}")


def located(store: StoreLocation, cache_folder: Path, cache_bytes: int = CACHE_BYTES) -> StoreLocation:
    """The same location; a URL knows then where it keeps what locally."""
    if isinstance(store, StoreUrl):
        return replace(store, cache_folder=cache_folder, cache_bytes=cache_bytes)
    return store


def beside(store: StoreLocation) -> Path:
    """The path that logs and recipe lie beside: the store's own, or for a URL its name in the current folder."""
    return Path(store.name) if isinstance(store, StoreUrl) else store


def scrub(text: str) -> str:
    """A message of a backend without what may be a secret, in one line."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def _before_query(rest: str) -> str:
    return re.split(r"[?#]", rest)[0]


def _way_in(protocol: str) -> str:
    if protocol in ("s3", "s3a"):
        return "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in the environment"
    return f"fsspec's configuration (variables FSSPEC_{protocol.upper()}_…, or ~/.config/fsspec)"


def way_in(location: StoreUrl) -> str:
    """Where the backend of a location takes credentials from."""
    return _way_in(location.protocol)
