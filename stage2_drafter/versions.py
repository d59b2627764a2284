"""Which code and packages a run was made with: what a checkpoint records and a report shows."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "numpy", "zarr")
_GIT_SECONDS = 10.0


@functools.cache
def package_versions() -> dict[str, str]:
    """Versions of this package (and its source revision, in a git checkout), of Python and of what computes."""
    versions = {"dflash-train": _version_of("dflash-train") or "not installed"}
    revision = source_revision(Path(__file__).parents[1])
    if revision is not None:
        versions["source revision"] = revision
    versions["python"] = platform.python_version()
    return versions | {name: version for name in PACKAGES if (version := _version_of(name)) is not None}


def source_revision(root: Path) -> str | None:
    """The commit that the checkout at root is at, with « with changes» where tracked files differ from it.

    None where root is no checkout's top folder (an installed package may lie inside somebody else's) or git is missing.
    """
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit} with changes" if changed else commit


def _git(root: Path, *words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_GIT_SECONDS).stdout.strip()


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
