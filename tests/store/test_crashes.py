"""Every point at which a power cut or a kill can stop the writers: what is left opens, is sound, and can be gone on with.

`CrashingFiles` stops the process, as it were, after call n. Then the disk is looked at twice: as the system calls left
it, and as a power cut might, where only fsynced contents and directory entries of synced directories are there.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_train.store.consumed import (
    CONSUMER_STAGING,
    COPY_SOURCE,
    TRASH,
    finish_removals,
    read_consumed,
    remove_segments,
)
from dflash_train.store.creation import clean_staging, create_store, store_lock
from dflash_train.store.files import Files, list_temporaries, write_directory
from dflash_train.store.index import read_index
from dflash_train.store.manifest import StoreError
from dflash_train.store.opened import list_segments
from dflash_train.store.plan import Plan, read_plan, write_plan
from dflash_train.store.reader import StoreReader, open_manifest
from dflash_train.store.reference import ReferenceWriter, open_references, read_references
from dflash_train.store.segment import SegmentWriter
from dflash_train.store.verify import verify_store


class Crash(BaseException):
    """The power is gone: nothing may clean up after it."""


class Node:
    """A file (data) or a directory (entries), each as the system calls left it and as it is on the disk."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = self.durable_data = data
        self.entries: dict[str, Node] = {}
        self.durable_entries: dict[str, Node] = {}
        self.is_directory = False

    def sync(self) -> None:
        self.durable_data, self.durable_entries = self.data, dict(self.entries)

    def write_durable(self, path: Path) -> None:
        if not self.is_directory:
            path.write_bytes(self.durable_data)
            return
        path.mkdir()
        for name, node in self.durable_entries.items():
            node.write_durable(path / name)


def load(path: Path) -> Node:
    """Model a tree that is durable already."""
    node = Node(b"" if path.is_dir() else path.read_bytes())
    if path.is_dir():
        node.is_directory = True
        node.entries = {entry.name: load(entry) for entry in path.iterdir()}
    node.sync()
    return node


class CrashingFiles(Files):
    """Do the real calls below root, model what is durable, and crash after num_calls of them (a write: halfway)."""

    def __init__(self, root: Path, num_calls: int | None = None) -> None:
        self.root = root
        self.left = num_calls
        self.num_calls = 0
        self.tree = load(root)
        self._open: dict[int, Node] = {}

    def node(self, path: Path) -> Node:
        node = self.tree
        for part in path.relative_to(self.root).parts:
            node = node.entries[part]
        return node

    def call(self, action: Callable[[], Any]) -> Any:
        if self.left is not None and self.num_calls >= self.left:
            raise Crash
        result = action()
        self.num_calls += 1
        if self.num_calls == self.left:
            raise Crash
        return result

    def open(self, path: Path) -> int:
        def action() -> int:
            descriptor = super(CrashingFiles, self).open(path)
            self._open[descriptor] = self.node(path.parent).entries[path.name] = Node()
            return descriptor

        return int(self.call(action))

    def write(self, descriptor: int, data: memoryview) -> int:
        def action() -> int:
            last = self.left is not None and self.num_calls + 1 == self.left
            written = super(CrashingFiles, self).write(descriptor, data[: len(data) // 2] if last else data)
            self._open[descriptor].data += bytes(data[:written])
            return written

        return int(self.call(action))

    def fsync(self, descriptor: int) -> None:
        self.call(lambda: self._open[descriptor].sync())

    def close(self, descriptor: int) -> None:
        super().close(descriptor)

    def together(self, calls: Sequence[Callable[[], None]]) -> None:
        for call in calls:  # any order may be the one in which they end
            call()

    def make_directory(self, path: Path) -> None:
        def action() -> None:
            super(CrashingFiles, self).make_directory(path)
            node = self.node(path.parent).entries[path.name] = Node()
            node.is_directory = True

        self.call(action)

    def sync_directory(self, path: Path) -> None:
        self.call(lambda: self.node(path).sync())

    def rename(self, source: Path, destination: Path) -> None:
        def action() -> None:
            super(CrashingFiles, self).rename(source, destination)
            node = self.node(source.parent).entries.pop(source.name)
            self.node(destination.parent).entries[destination.name] = node

        self.call(action)

    def remove_tree(self, path: Path) -> None:
        def action() -> None:
            super(CrashingFiles, self).remove_tree(path)
            node = self.node(path.parent).entries.pop(path.name, None)
            if node is not None:  # what was in a directory may be gone from the disk before its name is
                node.durable_entries = {}

        self.call(action)


def crash_everywhere(base: Path, work: Callable[[Path, Files], Any], check: Callable[[Path, bool], None]) -> int:
    """Run work(root, files) on copies of base, stopped after every call; check(root, finished) what each leaves."""
    scratch = base.parent / "scratch"
    num_calls: int | None = None  # first uninterrupted
    while num_calls is None or num_calls >= 0:
        for drop in (False, True):
            root = scratch / "root"
            shutil.copytree(base, root)
            files = CrashingFiles(root, num_calls)
            finished = False
            try:
                work(root, files)
                finished = True
            except Crash:
                pass
            if drop:
                files.tree.write_durable(scratch / "durable")
                root = scratch / "durable"
            check(root, finished)
            shutil.rmtree(scratch)
        if num_calls is None:
            total = num_calls = files.num_calls
        num_calls -= 1
    return total


@pytest.mark.parametrize("encoding_name", ["int8"])
def test_segment_survives_a_stop_after_every_call(with_: Any, quick_path: Path, encoding_name: str) -> None:
    maker = with_(encoding_name=encoding_name, num_layers=1, hidden_size=4)
    base = quick_path / "base"
    base.mkdir()
    maker.create(base / "s.zarr")
    maker.add_segment(base / "s.zarr", [0], [3])
    wanted = {1000, 1001, 1002}
    lengths = {1: 33, 2: 7}
    samples = {number: maker.sample(number, length) for number, length in lengths.items()}

    def work(root: Path, files: Files) -> None:
        writer = SegmentWriter(root / "s.zarr", maker.encoding, {}, files)
        writer.quarantine({"id": None, "row": 9, "reason": "empty"})
        for sample in samples.values():
            writer.append(**sample)
        writer.commit()

    def check(root: Path, finished: bool) -> None:
        path = root / "s.zarr"
        assert verify_store(path).problems == []
        stored = StoreReader(path).stored_ids()
        assert stored == wanted if finished else stored in ({1000}, wanted)
        with store_lock(path):
            clean_staging(path)
            missing = sorted(wanted - stored)
            maker.add_segment(path, [i - 1000 for i in missing], [lengths[i - 1000] for i in missing])
        report = verify_store(path)
        assert report.problems == [] and report.leftovers == []
        reader = StoreReader(path)
        assert sorted(reader.samples["id"].tolist()) == sorted(wanted) and reader.num_duplicates == 0
        index = reader.samples["id"].tolist().index(1001)
        np.testing.assert_array_equal(reader.read(index).features, samples[1]["features"])

    assert crash_everywhere(base, work, check) > 40


def test_reference_samples_survive_a_stop_after_every_call(with_: Any, quick_path: Path) -> None:
    maker = with_(encoding_name="int8", num_layers=1, hidden_size=4)
    base = quick_path / "base"
    base.mkdir()
    maker.create(base / "s.zarr")
    maker.add_segment(base / "s.zarr", [0], [3])
    shutil.rmtree(base / "s.zarr" / "reference")  # as in a store of before, where the folder is made, too
    states = maker.states(1, 33).bfloat16().view(torch.int16).numpy()
    sample = maker.sample(1, 33)
    arguments = {name: sample[name] for name in ("sample_id", "group", "token_ids", "loss_mask")}

    def work(root: Path, files: Files) -> None:
        writer = ReferenceWriter(root / "s.zarr", maker.encoding, {}, 100, files)
        writer.append(**arguments, states=states)
        writer.commit()

    def check(root: Path, finished: bool) -> None:
        path = root / "s.zarr"
        problems = [problem for problem in verify_store(path).problems if problem.file != "reference/zarr.json"]
        assert problems == [], "but for the group that was removed above"
        assert StoreReader(path).stored_ids() == {1000}
        for _ in range(2):  # what a kill left; then, after a resume
            kept = list(read_references(open_references(path, maker.encoding)))
            assert [each.id for each in kept] in ([[1001]] if finished else ([], [1001]))
            for each in kept:
                np.testing.assert_array_equal(each.features.view(np.int16), states)
            with store_lock(path):
                clean_staging(path)
                work(root, Files())
            finished = True
        assert verify_store(path).leftovers == []

    assert crash_everywhere(base, work, check) > 30


def test_creation_survives_a_stop_after_every_call(with_: Any, quick_path: Path) -> None:
    maker = with_(tied=False, num_layers=1, hidden_size=4)
    base = quick_path / "base"
    base.mkdir()

    def work(root: Path, files: Files) -> None:
        maker.create(root / "deep" / "s.zarr", files)

    def check(root: Path, finished: bool) -> None:
        path = root / "deep" / "s.zarr"
        assert path.is_dir() or not finished
        with store_lock(path):
            clean_staging(path)
            if path.is_dir():
                assert open_manifest(path) == maker.manifest
            else:
                with pytest.raises(StoreError, match="is not there"):
                    open_manifest(path)
                create_store(path, maker.manifest, maker.calibration, maker.frozen())
        maker.add_segment(path, [0])
        report = verify_store(path)
        assert report.problems == [] and report.leftovers == [] and report.num_samples == 1

    assert crash_everywhere(base, work, check) > 70


def test_index_cache_survives_a_stop_after_every_call(
    with_: Any, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_train.store.reader.MIN_SEGMENTS", 1)
    maker = with_(num_layers=1, hidden_size=4)
    base = quick_path / "base"
    base.mkdir()
    maker.create(base / "s.zarr")
    maker.add_segment(base / "s.zarr", [0, 1])
    StoreReader(base / "s.zarr")  # an older index is there already
    maker.add_segment(base / "s.zarr", [2, 3])
    (base / "s.zarr" / ".staging").rmdir()  # as in a copied store

    def work(root: Path, files: Files) -> None:
        StoreReader(root / "s.zarr", files=files)

    def check(root: Path, finished: bool) -> None:
        path = root / "s.zarr"
        assert verify_store(path).problems == []
        assert set(read_index(path)) in ([set(list_segments(path))] if finished else map(set, _prefixes(path)))
        assert StoreReader(path).samples["id"].tolist() == [1000, 1001, 1002, 1003]
        assert set(read_index(path)) == set(list_segments(path))
        with store_lock(path):
            clean_staging(path)
        assert verify_store(path).leftovers == []

    assert crash_everywhere(base, work, check) >= 8


def _prefixes(path: Path) -> list[list[str]]:
    names = list_segments(path)
    return [names[:count] for count in range(1, len(names) + 1)]


@pytest.mark.parametrize("begun", [False, True])
def test_consuming_survives_a_stop_after_every_call(with_: Any, quick_path: Path, begun: bool) -> None:
    """Copies of held-out samples, records, and segments that go; or (begun) what a killed trainer has recorded only."""
    maker = with_(num_layers=1, hidden_size=4)
    base = quick_path / "base"
    base.mkdir()
    maker.create(base / "s.zarr")
    names = [maker.add_segment(base / "s.zarr", [2 * number, 2 * number + 1], [3, 5]) for number in range(3)]
    reader = StoreReader(base / "s.zarr")
    gone = {name: (reader.entry(name).samples, reader.entry(name).quarantined) for name in names[:2]}
    if begun:
        shutil.copytree(base / "s.zarr", quick_path / "removed")
        remove_segments(quick_path / "removed", gone)
        shutil.copytree(quick_path / "removed" / "consumed", base / "s.zarr" / "consumed")
    copied = maker.sample(1, 5)

    def work(root: Path, files: Files) -> None:
        path = root / "s.zarr"
        if begun:
            finish_removals(path, files)
            return
        writer = SegmentWriter(path, maker.encoding, {"copied": COPY_SOURCE}, files, staging=CONSUMER_STAGING)
        writer.append(**copied)
        writer.commit()
        remove_segments(path, gone, files)

    def check(root: Path, finished: bool) -> None:
        path = root / "s.zarr"
        for _ in range(2):  # what a kill left; then, after the next start
            assert verify_store(path).problems == []
            stored, record = StoreReader(path).stored_ids(), read_consumed(path)
            assert stored | record.ids == set(range(1000, 1006)) and record.segments <= set(names[:2])
            assert set(list_segments(path)) | record.segments >= set(names), (
                "a segment goes only once its record is there"
            )
            assert not finished or record.segments == set(names[:2])
            finish_removals(path)
            assert not set(list_segments(path)) & record.segments
        left = {name: table for name, table in gone.items() if name in list_segments(path)}
        remove_segments(path, left)
        assert read_consumed(path).ids == {1000, 1001, 1002, 1003} and names[2] in list_segments(path)
        assert verify_store(path).leftovers == [] and not list((path / TRASH).iterdir())

    assert crash_everywhere(base, work, check) > (5 if begun else 40)


def test_plan_is_the_old_or_the_new_one_after_a_stop_at_any_call(with_: Any, quick_path: Path) -> None:
    base = quick_path / "base"
    base.mkdir()
    path = with_(num_layers=1, hidden_size=4).create(base / "s.zarr")
    old = Plan(samples=14, tokens=900, longest=507, state="running", beat=3, run="a")
    new = replace(old, beat=4, state="finished")
    write_plan(path, old)

    def work(root: Path, files: Files) -> None:
        write_plan(root / "s.zarr", new, files)

    def check(root: Path, finished: bool) -> None:
        assert read_plan(root / "s.zarr") in (old, new) and verify_store(root / "s.zarr").problems == []
        write_plan(root / "s.zarr", new)
        assert read_plan(root / "s.zarr") == new and not list((root / "s.zarr").glob(".tmp-*"))

    assert crash_everywhere(base, work, check) >= 4


def test_directory_appears_whole_or_not_at_all(quick_path: Path) -> None:
    base = quick_path / "base"
    base.mkdir()
    (base / "old").write_text("kept")
    contents: dict[str, Any] = {"config.json": b"{}", "model/weights": [b"abc", b"", memoryview(b"def")], "empty": b""}

    def work(root: Path, files: Files) -> None:
        write_directory(root / "step-1", contents, files, empty=["logs/a"])

    def check(root: Path, finished: bool) -> None:
        final = root / "step-1"
        assert (root / "old").read_text() == "kept"
        assert final.exists() or not finished
        for leftover in list_temporaries(final):
            shutil.rmtree(leftover)
        if not final.exists():
            write_directory(final, contents, empty=["logs/a"])
        assert {file.relative_to(final).as_posix() for file in final.rglob("*")} == {
            "config.json",
            "model",
            "model/weights",
            "empty",
            "logs",
            "logs/a",
        }
        assert (final / "model/weights").read_bytes() == b"abcdef" and (final / "config.json").read_bytes() == b"{}"
        assert {entry.name for entry in root.iterdir()} == {"old", "step-1"}

    assert crash_everywhere(base, work, check) > 15
