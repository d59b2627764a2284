"""Creating a store, its lock, and tidying up after dead runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

from dflash_train.store.calibration import Calibration
from dflash_train.store.creation import clean_staging, create_store, store_lock
from dflash_train.store.files import Files, StoreError, write_directory
from dflash_train.store.verify import verify_store

HOLDER = """
import sys, time
from pathlib import Path
from dflash_train.store.creation import store_lock
from dflash_train.units import format_bytes
with store_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_existing_store_is_not_overwritten(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    before = (path / "zarr.json").stat()
    with pytest.raises(StoreError, match=r"s\.zarr exists already. Choose another path"):
        bf16.create(path)
    assert (path / "zarr.json").stat() == before


def test_faster_process_wins(bf16: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.zarr"

    class Slow(Files):
        def rename(self, source: Path, destination: Path) -> None:
            if not destination.exists():
                bf16.create(path)
            super().rename(source, destination)

    with pytest.raises(StoreError, match="exists already"):
        bf16.create(path, Slow())
    assert verify_store(path).problems == [] and verify_store(path).leftovers == []


@pytest.mark.filterwarnings("ignore:Object at .* is not recognized as a component of a Zarr hierarchy:UserWarning")
def test_plain_zarr_walks_the_store(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    name = bf16.add_segment(path, [0, 1])
    arrays = dict(zarr.open_group(path, mode="r").members(max_depth=None))
    assert {"calibration/channel_scale", "frozen/embed_tokens", f"segments/{name}/features"} <= set(arrays)


def test_missing_parents_are_made(bf16: Any, tmp_path: Path) -> None:
    assert verify_store(bf16.create(tmp_path / "a" / "b" / "s.zarr")).problems == []


def test_wrong_shapes_are_bugs(bf16: Any, with_: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="calibration_hash"):
        create_store(tmp_path / "s.zarr", bf16.manifest, Calibration(torch.ones(24)), bf16.frozen())
    with pytest.raises(AssertionError, match="not tied"):
        create_store(tmp_path / "s.zarr", bf16.manifest, bf16.calibration, with_(tied=False).frozen())


def test_second_holder_of_the_lock_hears_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr"
    with (
        store_lock(path),
        pytest.raises(StoreError, match=f"s.zarr is in use by process {os.getpid()}. Wait until it has ended"),
        store_lock(tmp_path / "x" / ".." / "s.zarr"),
    ):
        pass
    with store_lock(path):
        pass


def test_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "s.zarr"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(StoreError, match=f"in use by process {process.pid}"), store_lock(path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with store_lock(path):
        pass


def test_leftovers_of_dead_runs_are_removed(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    (path / ".staging" / "dead" / "features").mkdir(parents=True)
    (tmp_path / ".tmp-s.zarr-0123abcd" / "frozen").mkdir(parents=True)
    (tmp_path / ".tmp-other.zarr-0123abcd").mkdir()
    assert clean_staging(path) == 2 and clean_staging(path) == 0
    assert clean_staging(tmp_path / "missing" / "s.zarr") == 0
    assert {entry.name for entry in tmp_path.iterdir()} == {"s.zarr", ".tmp-other.zarr-0123abcd"}


def test_directory_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    with pytest.raises(FileExistsError, match="step-1 exists already"):
        write_directory(tmp_path / "step-1", {"a": b""})
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]


def test_lock_that_cannot_be_made_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StoreError, match=r"s\.zarr cannot be a store: a file stands in its way"),
        store_lock(tmp_path / "file" / "s.zarr"),
    ):
        pass


def test_calls_together_all_end_before_the_first_error_is_raised() -> None:
    ended = []

    def fail() -> None:
        raise OSError("no room")

    def wait() -> None:
        time.sleep(0.05)
        ended.append(1)

    with pytest.raises(OSError, match="no room"):
        Files().together([fail, wait, wait])
    assert len(ended) == 2
    Files().together([])
