"""A store that grows, shrinks and is merged under its readers."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_train.store import reader as reader_module
from dflash_train.store.consumed import finish_removals, read_consumed, remove_segments
from dflash_train.store.files import Files, StoreError
from dflash_train.store.index import INDEX_NAME, read_index
from dflash_train.store.joined import open_stores
from dflash_train.store.opened import list_segments
from dflash_train.store.plan import PLAN_NAME, Plan, read_plan, write_plan
from dflash_train.store.reader import StoreReader
from dflash_train.store.segment import SegmentWriter
from dflash_train.store.verify import verify_store

PLAN = Plan(samples=14, tokens=900, longest=507, state="running", beat=3, run="a")


@pytest.mark.parametrize("indexed", [False, True])
def test_stores_with_equal_manifests_merge_by_moving_segment_folders(
    bf16: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool
) -> None:
    """With and without an index, which is that of before; a sample that both have counts once."""
    monkeypatch.setattr(reader_module, "MIN_SEGMENTS", 1 if indexed else 1000)
    one, two = bf16.store(tmp_path / "one"), bf16.create(tmp_path / "two")
    bf16.add_segment(two, range(10, 24))  # 10 … 13 are in `one`, too
    assert StoreReader(one).manifest.differences(StoreReader(two).manifest) == []
    expected = StoreReader(one).stored_ids() | StoreReader(two).stored_ids()
    reader = StoreReader(one)
    assert (one / INDEX_NAME).exists() == indexed
    for name in list_segments(two):
        (two / "segments" / name).rename(one / "segments" / name)
    assert reader.refresh() == 1
    merged = StoreReader(one)
    for found in (reader, merged):
        assert (found.stored_ids(), found.num_duplicates) == (expected, 4)
        twin = bf16.sample(20, 507)
        index = int(np.flatnonzero(found.samples["id"] == 1020)[0])
        assert np.array_equal(
            found.read(index).features, twin["features"].view(np.uint16)[: found.samples["length"][index]]
        )
    assert verify_store(one).problems == [] and len(StoreReader(two).samples) == 0
    assert list(read_index(one)) == (list_segments(one) if indexed else [])


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize(
    ("encoding", "changes", "named"),
    [
        ("int8", {"calibration_hash": "9" * 16}, "calibration_hash: found '9{16}', wanted '"),
        ("projected-int4", {"calibration_hash": "9" * 16}, "calibration_hash"),
        ("bf16", {"weights_fingerprint": "9" * 16}, "weights_fingerprint"),
        ("bf16", {"target_layer_ids": (0, 1, 2, 3, 4)}, "target_layer_ids"),
        ("bf16", {"calibration_hash": "9" * 16}, None),  # raw states: only D of the store that reads them counts
        ("int8", {"target_name": "org/copy"}, None),  # the weights agree
    ],
)
def test_a_segment_that_was_moved_from_an_unlike_store_is_refused_by_name(
    with_: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    indexed: bool,
    encoding: str,
    changes: dict[str, Any],
    named: str | None,
) -> None:
    monkeypatch.setattr(reader_module, "MIN_SEGMENTS", 1 if indexed else 1000)
    maker = with_(encoding_name=encoding)
    store = maker.store(tmp_path / "store")
    writer = SegmentWriter(store, maker.encoding, {"store": replace(maker.manifest, **changes).origin})
    writer.append(**maker.sample(30, 9))
    moved = writer.commit()
    if named is None:
        assert 1030 in StoreReader(store).stored_ids() and verify_store(store).problems == []
        return
    for _ in range(2):  # also from an index, had one been written
        with pytest.raises(StoreError, match=rf"segments/{moved} was made for another store .*{named}.* Move it back"):
            StoreReader(store)
    [problem] = verify_store(store).problems
    assert problem.segment == moved and "was made for another store" in problem.text


def test_several_stores_read_as_one(bf16: Any, with_: Any, tmp_path: Path) -> None:
    one, two = bf16.store(tmp_path / "one"), bf16.create(tmp_path / "two")
    other = bf16.add_segment(two, range(10, 24))
    joined, first = open_stores([one, two]), StoreReader(one)
    assert joined.segment_ids == [*first.segment_ids, other]
    assert (len(joined.samples), joined.num_duplicates) == (24, 4)
    assert joined.stored_ids() == set(range(1000, 1024))
    for index in (0, 13, 14, 23):
        sample = joined.read(index)
        twin = bf16.sample(sample.id - 1000, len(sample.token_ids))
        assert np.array_equal(sample.features, twin["features"].view(np.uint16))
        table = joined.samples[index]
        assert joined.segment_ids[table["segment"]] == (other if index > 13 else first.segment_ids[index // 7])
        token_ids, loss_mask = np.empty_like(sample.token_ids), np.empty_like(sample.loss_mask)
        features = np.empty_like(sample.features)
        joined.read_into(index, token_ids, loss_mask, features)
        assert np.array_equal(features, sample.features) and np.array_equal(token_ids, sample.token_ids)
    assert joined.num_bytes == first.num_bytes + StoreReader(two).num_bytes
    again = open_stores([one, two], segments=[first.segment_ids[0], other])
    assert again.stored_ids() == {*range(1000, 1007), *range(1010, 1024)}
    with pytest.raises(StoreError, match="have no segment gone"):
        open_stores([one, two], segments=["gone"])
    with pytest.raises(StoreError, match="names one store twice"):
        open_stores([one, one])
    int8 = with_(encoding_name="int8").create(tmp_path / "int8")
    with pytest.raises(StoreError, match=r"does not go with .*encoding: found 'int8', wanted 'bf16'"):
        open_stores([one, int8])


def test_a_segment_that_goes_between_listing_and_opening_is_left_out(
    bf16: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bf16.store(tmp_path / "store")
    first, *others = list_segments(store)
    entry = StoreReader(store).entry(first)
    listed = list_segments(store)
    remove_segments(store, {first: (entry.samples, [])})
    monkeypatch.setattr(reader_module, "list_segments", lambda path: listed)
    assert StoreReader(store).segment_ids == others
    with pytest.raises(StoreError, match=f"has no segment {first}"):
        StoreReader(store, segments=[first])


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("direct_io", [False, True])
def test_a_segment_deleted_under_a_reader_is_read_on_or_named(
    maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool, direct_io: bool
) -> None:
    """What is open stays readable; what is not yet, is an error that names the segment; never a wrong or empty row."""
    monkeypatch.setattr(reader_module, "MIN_SEGMENTS", 1 if indexed else 1000)
    store = maker.store(tmp_path / "store")
    wanted = [StoreReader(store).read(index) for index in range(14)]
    reader = StoreReader(store, direct_io=direct_io)
    reader.read(0)
    held, other, _ = reader.segment_ids
    for name in (held, other):
        shutil.rmtree(store / "segments" / name)
    for index in range(7):
        np.testing.assert_array_equal(reader.read(index).features, wanted[index].features)
    for index in range(7, 14):
        with pytest.raises(StoreError, match=rf"segments/{other}/.* could not be opened|has no segment {other}"):
            reader.read(index)
    assert len(StoreReader(store).samples) == 0 and verify_store(store).problems == []


def test_a_dropped_segment_can_be_replaced_by_a_copy_of_some_of_its_samples(bf16: Any, tmp_path: Path) -> None:
    store = bf16.store(tmp_path / "store")
    reader = StoreReader(store)
    name, sample = reader.segment_ids[0], reader.read(2)
    copy = bf16.add_segment(store, [2])
    assert reader.refresh() == 1 and reader.num_duplicates == 1
    again = StoreReader(store, segments=[name])
    again.drop([name])
    again.refresh([copy])
    assert again.samples["id"].tolist() == [-1] * 7 + [sample.id]
    assert np.array_equal(again.read(7).features, sample.features)


def test_samples_of_several_stores_stand_in_the_order_of_stores_and_rows(bf16: Any, tmp_path: Path) -> None:
    one, two = bf16.create(tmp_path / "one"), bf16.create(tmp_path / "two")
    bf16.add_segment(one, [5, 3])
    bf16.add_segment(two, [4, 3, 1])
    joined = open_stores([one, two])
    assert joined.samples["id"].tolist() == [1005, 1003, 1004, 1001]
    assert [joined.read(index).id for index in range(4)] == [1005, 1003, 1004, 1001]


def test_a_segment_that_goes_while_a_store_is_opened_is_left_out(
    bf16: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bf16.store(tmp_path / "store")
    names = list_segments(store)
    monkeypatch.setattr(reader_module, "list_local_segments", lambda _store: [names[0], "gone", *names[1:]])
    reader = StoreReader(store)
    assert reader.segment_ids == names and len(reader.samples) == 14
    assert reader.read(13).id == 1013 and reader.refresh() == 0
    (store / "segments" / "gone").mkdir()  # there, and no segment
    with pytest.raises(StoreError, match=r"gone/checksums\.json could not be read"):
        StoreReader(store)


@pytest.mark.parametrize("stop_at", range(1, 8))
def test_a_kill_at_any_call_of_a_removal_leaves_every_sample_somewhere(bf16: Any, tmp_path: Path, stop_at: int) -> None:
    store = bf16.store(tmp_path / "store")
    reader = StoreReader(store)
    ids, names = reader.stored_ids(), reader.segment_ids[:2]
    calls = [0]

    class Killed(BaseException):
        pass

    class Dying(Files):
        def _count(self) -> None:
            calls[0] += 1
            if calls[0] == stop_at:
                raise Killed

        def write_file(self, path: Path, data: Any) -> None:
            self._count()
            super().write_file(path, data)

        def rename(self, source: Path, destination: Path) -> None:
            self._count()
            super().rename(source, destination)

        def remove_tree(self, path: Path) -> None:
            self._count()
            super().remove_tree(path)

    tables = {name: (reader.entry(name).samples, reader.entry(name).quarantined) for name in names}
    with pytest.raises(Killed):
        remove_segments(store, tables, Dying())
    present, record = set(list_segments(store)), read_consumed(store)
    assert StoreReader(store).stored_ids() | record.ids == ids
    assert present | record.segments >= set(reader.segment_ids), "a segment goes only once its record is there"
    finish_removals(store)
    assert not set(list_segments(store)) & record.segments
    assert StoreReader(store).stored_ids() | read_consumed(store).ids == ids
    assert verify_store(store).problems == []


def test_the_plan_is_read_as_it_was_written_or_not_at_all(bf16: Any, tmp_path: Path) -> None:
    store = bf16.create(tmp_path / "store")
    assert read_plan(store) is None
    write_plan(store, PLAN)
    assert read_plan(store) == PLAN
    assert verify_store(store).problems == []
    for text in ("{}", "[", '{"samples": 1}', (store / PLAN_NAME).read_text().replace("running", "resting")):
        (store / PLAN_NAME).write_text(text)
        assert read_plan(store) is None
    write_plan(tmp_path / "nowhere", PLAN)  # a full or missing disk is no reason to end an extract
