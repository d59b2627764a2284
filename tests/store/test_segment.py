"""Writing segments: what is committed, what is abandoned, and what it costs in memory."""

import errno
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from dflash_train.store.arrays import array_contents
from dflash_train.store.files import Files
from dflash_train.store.manifest import StoreError
from dflash_train.store.reader import StoreReader
from dflash_train.store.segment import SegmentWriter
from dflash_train.store.verify import verify_store


class FullDisk(Files):
    """A disk with room for so many bytes; then write, and fsync or mkdir where asked, find it full."""

    def __init__(self, room: int, full: str = "write") -> None:
        self.room = room
        self.full = full

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.full == "write" and self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(descriptor, data[: self.room] if self.full == "write" else data)
        self.room -= written
        return written

    def fsync(self, descriptor: int) -> None:
        if self.full == "fsync":
            raise OSError(errno.ENOSPC, "No space left on device")
        super().fsync(descriptor)

    def make_directory(self, path: Path) -> None:
        if self.full == "mkdir":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        super().make_directory(path)


def assert_nothing_left(path: Path) -> None:
    assert list((path / ".staging").iterdir()) == []
    assert [entry.name for entry in (path / "segments").iterdir()] == ["zarr.json"]
    assert verify_store(path).problems == []


def test_files_are_those_that_zarr_would_write(maker: Any, tmp_path: Path) -> None:
    path = maker.create(tmp_path / "s.zarr")
    name = maker.add_segment(path, range(1, 7))
    folder = path / "segments" / name
    with zarr.config.set({"array.write_empty_chunks": True}):
        for ours in (entry for entry in folder.iterdir() if entry.is_dir()):
            array = zarr.open_array(ours, mode="r")
            twin = zarr.create_array(
                tmp_path / "twin" / ours.name,
                shape=array.shape,
                dtype=array.dtype,
                chunks=array.chunks,
                shards=array.shards,
                compressors=None,
                fill_value=0,
                zarr_format=3,
                attributes=dict(array.attrs),
            )
            twin[:] = array[:]
            files = {file.relative_to(ours): file.read_bytes() for file in ours.rglob("*") if file.is_file()}
            theirs = tmp_path / "twin" / ours.name
            assert files == {
                file.relative_to(theirs): file.read_bytes() for file in theirs.rglob("*") if file.is_file()
            }


def test_counts_grow_with_appends(maker: Any, tmp_path: Path) -> None:
    path = maker.create(tmp_path / "s.zarr")
    writer = SegmentWriter(path, maker.encoding, {})
    assert (writer.num_samples, writer.num_tokens, writer.num_bytes, writer.age_seconds) == (0, 0, 0, 0)
    writer.append(**maker.sample(0, 7))
    assert writer.num_bytes == 7 * maker.encoding.bytes_per_token
    writer.append(**maker.sample(1, 33))
    time.sleep(0.01)
    assert (writer.num_samples, writer.num_tokens) == (2, 40) and writer.age_seconds >= 0.01
    assert len(list((path / ".staging").iterdir())) == 1 and StoreReader(path).segment_ids == []
    assert writer.commit() == writer.segment_id
    assert StoreReader(path).segment_ids == [writer.segment_id]


def test_nothing_appended_commits_nothing(maker: Any, tmp_path: Path) -> None:
    path = maker.create(tmp_path / "s.zarr")
    assert SegmentWriter(path, maker.encoding, {}).commit() is None
    assert_nothing_left(path)


def test_quarantine_alone_is_committed(maker: Any, tmp_path: Path) -> None:
    path = maker.create(tmp_path / "s.zarr")
    writer = SegmentWriter(path, maker.encoding, {"split": "train"})
    writer.quarantine({"id": "00ff", "row": 1, "reason": "states are not finite"})
    assert writer.commit() is not None
    reader = StoreReader(path)
    assert len(reader.samples) == 0 and [entry["id"] for entry in reader.quarantined()] == ["00ff"]
    assert reader.sources() == [{"split": "train"}] and verify_store(path).problems == []
    group = zarr.open_group(path / "segments" / writer.segment_id, mode="r")
    assert np.asarray(group["features"]).shape == (0, maker.encoding.num_columns)


def test_abandoned_segment_leaves_nothing(maker: Any, tmp_path: Path) -> None:
    path = maker.create(tmp_path / "s.zarr")
    writer = SegmentWriter(path, maker.encoding, {})
    writer.append(**maker.sample(0, 7))
    writer.abandon()
    writer.abandon()
    assert_nothing_left(path)


@pytest.mark.parametrize("full", ["write", "fsync", "mkdir"])
def test_full_disk_commits_nothing_and_names_path_and_bytes(maker: Any, tmp_path: Path, full: str) -> None:
    path = maker.create(tmp_path / "s.zarr")
    rooms = range(0, 6000, 500) if full == "write" else [0]
    for room in rooms:
        text = rf"Writing {path}.* failed at [\d,]+ bytes \(.*\): (the disk is full), with .* free there. Make room"
        with pytest.raises(StoreError, match=text):
            maker.add_segment(path, range(6), files=FullDisk(room, full))
        assert_nothing_left(path)
    maker.add_segment(path, range(7))
    assert verify_store(path).num_samples == 7


def test_failed_append_abandons_the_segment(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    writer = SegmentWriter(path, bf16.encoding, {})
    writer.append(**bf16.sample(0, 7))
    with pytest.raises(AssertionError, match="token_ids is"):
        writer.append(**(bf16.sample(1, 7) | {"token_ids": np.zeros(7, np.int64)}))
    with pytest.raises(AssertionError, match="committed or abandoned"):
        writer.commit()
    assert_nothing_left(path)


def test_two_writers_of_one_segment_id_lose_nothing_of_the_first(bf16: Any, tmp_path: Path) -> None:
    """Ids are the time and 32 random bits; where two are equal all the same, the second writer fails, and only it."""
    path = bf16.create(tmp_path / "s.zarr")
    first = SegmentWriter(path, bf16.encoding, {})

    def same_id() -> SegmentWriter:
        writer = SegmentWriter(path, bf16.encoding, {})
        writer.segment_id = first.segment_id
        writer._staging, writer._final = first._staging, first._final
        return writer

    first.append(**bf16.sample(0, 7))
    with pytest.raises(StoreError, match="File exists"):  # while the first one writes
        same_id().append(**bf16.sample(1, 7))
    late = same_id()
    assert first.commit() == first.segment_id
    late.append(**bf16.sample(1, 33))
    with pytest.raises(StoreError, match="Directory not empty"):  # after it has committed
        late.commit()
    assert list((path / ".staging").iterdir()) == []
    assert StoreReader(path).samples["id"].tolist() == [1000] and verify_store(path).problems == []


def test_memory_does_not_grow_with_the_segment(with_: Any, tmp_path: Path) -> None:
    maker = with_(num_layers=2, hidden_size=1024)
    path = maker.create(tmp_path / "s.zarr")
    sample = maker.sample(0, 64)  # 256 KiB
    writer = SegmentWriter(path, maker.encoding, {})
    writer.append(**sample)
    tracemalloc.start()
    for number in range(1, 101):
        writer.append(**(sample | {"sample_id": number}))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20, peak
    writer.commit()
    assert StoreReader(path).num_tokens == 101 * 64


def test_array_of_zeros_has_its_chunk() -> None:
    contents = array_contents("x", np.zeros((3, 2), np.int64))
    assert contents["x/c/0/0"] == bytes(48)
    assert list(array_contents("x", np.zeros((0, 6), np.int64))) == ["x/zarr.json"]


def test_copied_store_without_its_empty_folder_takes_segments(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    (path / ".staging").rmdir()
    assert bf16.add_segment(path, [0]) is not None and verify_store(path).problems == []
