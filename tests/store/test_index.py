"""The index cache: a store opens the same with it, without it, and whatever has happened to it or to the segments."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from dflash_train.store import reader as reader_module
from dflash_train.store.index import INDEX_NAME, read_index
from dflash_train.store.manifest import StoreError
from dflash_train.store.opened import Segment
from dflash_train.store.reader import StoreReader
from dflash_train.store.verify import verify_store


@pytest.fixture(autouse=True)
def always_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MIN_SEGMENTS", 1)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the segments that were opened themselves."""
    names: list[str] = []

    class Counted(Segment):
        def __init__(self, folder: Path, encoding: Any) -> None:
            names.append(folder.name)
            super().__init__(folder, encoding)

    monkeypatch.setattr(reader_module, "Segment", Counted)
    return names


def same(first: StoreReader, second: StoreReader) -> bool:
    return (
        first.segment_ids == second.segment_ids
        and np.array_equal(first.samples, second.samples)
        and first.quarantined() == second.quarantined()
        and first.sources() == second.sources()
        and (first.num_bytes, first.num_duplicates) == (second.num_bytes, second.num_duplicates)
    )


def test_index_gives_what_the_segments_give(maker: Any, tmp_path: Path, opened: list[str]) -> None:
    path = maker.store(tmp_path / "s.zarr", segments=3)
    maker.add_segment(path, [0, 30], [9, 8])  # a duplicate
    plain = StoreReader(path)
    assert len(opened) == 5 and (path / INDEX_NAME).is_file() and not list((path / ".staging").iterdir())
    indexed = StoreReader(path)
    assert len(opened) == 5 and same(plain, indexed)
    for index in range(len(plain.samples)):
        np.testing.assert_array_equal(plain.read(index).features, indexed.read(index).features)
    assert len(opened) == 9  # each of the four with samples, once, when it was read
    assert same(StoreReader(path, plain.segment_ids[::-1]), StoreReader(path, plain.segment_ids[::-1]))
    assert len(opened) == 9


def test_small_stores_have_no_index(bf16: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = bf16.store(tmp_path / "s.zarr")
    StoreReader(path)
    assert not (path / INDEX_NAME).exists()


def test_new_and_removed_segments_make_it_stale(bf16: Any, tmp_path: Path, opened: list[str]) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    names = [bf16.add_segment(path, [number]) for number in range(3)]
    StoreReader(path)
    names.append(bf16.add_segment(path, [3]))
    assert StoreReader(path).segment_ids == names and opened[3:] == names[3:]
    assert list(read_index(path)) == names
    shutil.rmtree(path / "segments" / names[1])
    assert StoreReader(path).samples["id"].tolist() == [1000, 1002, 1003] and len(opened) == 4
    assert list(read_index(path)) == [names[0], *names[2:]]
    with pytest.raises(StoreError, match=f"has no segment {names[1]}"):
        StoreReader(path, names)


def test_segment_replaced_under_its_name_is_read_anew(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    first, second = bf16.add_segment(path, [0]), bf16.add_segment(path, [1])
    reader = StoreReader(path)
    late = StoreReader(path)
    shutil.rmtree(path / "segments" / first)
    (path / "segments" / second).rename(path / "segments" / first)
    assert StoreReader(path).samples["id"].tolist() == [1001]
    assert reader.samples["id"].tolist() == [1000, 1001]
    with pytest.raises(StoreError, match="has other samples than .* says"):
        late.read(0)


def test_damaged_index_is_ignored_and_replaced(bf16: Any, tmp_path: Path) -> None:
    path = bf16.store(tmp_path / "s.zarr")
    wanted = StoreReader(path)
    intact = (path / INDEX_NAME).read_bytes()
    generator = random.Random(3)
    cases = [b"", b"x", intact[:50], intact[:-1], intact + b"x"]
    for _ in range(100):
        flipped = bytearray(intact)
        flipped[generator.randrange(len(flipped))] ^= 1 << generator.randrange(8)
        cases.append(bytes(flipped))
    for data in cases:
        (path / INDEX_NAME).write_bytes(data)
        assert read_index(path) == {}
    for data in cases[:10]:
        (path / INDEX_NAME).write_bytes(data)
        assert same(StoreReader(path), wanted) and (path / INDEX_NAME).read_bytes() == intact
    assert verify_store(path).problems == []


def test_index_that_cannot_be_written_or_is_a_folder_harms_nothing(bf16: Any, tmp_path: Path) -> None:
    path = bf16.store(tmp_path / "s.zarr")
    (path / INDEX_NAME).mkdir()
    assert len(StoreReader(path).samples) == 14
    assert not list((path / ".staging").iterdir())
    (path / INDEX_NAME).rmdir()
    shutil.rmtree(path / ".staging")
    (path / ".staging").write_text("in the way")
    assert len(StoreReader(path).samples) == 14 and not (path / INDEX_NAME).exists()


def test_damage_behind_the_index_is_found_when_the_segment_is_read(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    name = bf16.add_segment(path, [4])
    StoreReader(path)
    table = path / "segments" / name / "samples/c/0/0"
    data = bytearray(table.read_bytes())
    data[9] ^= 1
    table.write_bytes(data)
    with pytest.raises(StoreError, match="has crc32c"):
        StoreReader(path).read(0)
    assert verify_store(path).problems


def test_zarr_and_verification_see_the_same_store(maker: Any, tmp_path: Path) -> None:
    path = maker.store(tmp_path / "s.zarr")
    StoreReader(path)
    assert verify_store(path).problems == []
    root: Any = zarr.open_group(path, mode="r")
    assert set(root["segments"].group_keys()) == set(StoreReader(path).segment_ids)


def test_refresh_goes_on_behind_an_index(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    bf16.add_segment(path, [0, 1])
    StoreReader(path)
    reader = StoreReader(path)
    bf16.add_segment(path, [1, 2])
    assert reader.refresh() == 1 and reader.samples["id"].tolist() == [1000, 1001, 1002]
    assert reader.num_duplicates == 1 and len(read_index(path)) == 2
    assert [reader.read(index).id for index in range(3)] == [1000, 1001, 1002]


def test_layout_is_the_documented_one(bf16: Any, tmp_path: Path) -> None:
    path = bf16.store(tmp_path / "s.zarr")
    reader = StoreReader(path)
    data = (path / INDEX_NAME).read_bytes()
    header_bytes = int.from_bytes(data[8:16], "little")
    header = json.loads(data[16 : 16 + header_bytes])
    assert data[:8] == b"DFLASHI1" and (16 + header_bytes) % 8 == 0
    assert [line[0] for line in header["segments"]] == reader.segment_ids
    table = np.frombuffer(data[16 + header_bytes : -4], "<i8").reshape(-1, 6)
    assert table[:, 0].tolist() == reader.samples["id"].tolist()
    assert sum(line[-1] for line in header["segments"]) == len(table)
