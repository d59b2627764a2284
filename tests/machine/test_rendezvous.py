"""The folders in which processes meet: gone at the end, and after a kill at the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_train.machine.rendezvous import PREFIX, rendezvous_file

HOLD = """
import sys
from dflash_train.machine.rendezvous import rendezvous_file
with rendezvous_file() as path:
    path.write_text("addresses")
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def holder(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process with a file, and the file's path."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_nothing_stays_behind(temporary: Path) -> None:
    with rendezvous_file() as path:
        assert path.parent.parent == temporary and not path.exists()
        path.write_text("addresses")
    assert list(temporary.iterdir()) == []


def test_a_killed_runs_folder_is_removed_at_the_next_start_and_a_living_ones_is_not(
    holder: tuple[subprocess.Popen[str], Path],
) -> None:
    process, path = holder
    with rendezvous_file() as own:
        assert path.read_text() == "addresses" and own.parent != path.parent
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert path.exists()
    with rendezvous_file() as own:
        assert not path.parent.exists() and own.parent.exists()


def test_what_is_not_this_users_folder_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / "elsewhere").mkdir()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "elsewhere")
    (temporary / f"{PREFIX}file").touch()
    (temporary / "other").mkdir()
    (temporary / f"{PREFIX}other").mkdir()
    user = os.getuid()
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: user + 1)
        with rendezvous_file():
            pass
    names = {"elsewhere", f"{PREFIX}link", f"{PREFIX}file", "other", f"{PREFIX}other"}
    assert {path.name for path in temporary.iterdir()} == names
    with rendezvous_file():
        pass
    assert {path.name for path in temporary.iterdir()} == names - {f"{PREFIX}other"}
