"""Stores in an object store, against a real S3 server process on loopback (s3_server.py), and the faults it can make."""

import errno
import itertools
import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_train.store import objects as objects_module
from dflash_train.store import remote as remote_module
from dflash_train.store import upload as upload_module
from dflash_train.store.checksums import CHECKSUMS_NAME, format_checksums, read_checksums, sum_contents
from dflash_train.store.creation import clean_staging, create_store, store_lock
from dflash_train.store.download import downloaded
from dflash_train.store.files import StoreError
from dflash_train.store.location import StoreUrl, located, parse_store
from dflash_train.store.objects import Objects
from dflash_train.store.reader import StoreReader, list_segments, open_manifest
from dflash_train.store.report import store_report
from dflash_train.store.segment import REFERENCE, SegmentWriter
from dflash_train.store.upload import open_segment_writer, store_exists, upload_segment
from dflash_train.store.verify import verify_store


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "RETRY_SECONDS", (0.01,) * 4)


@pytest.fixture
def locate(s3: Any, tmp_path: Path) -> Callable[..., StoreUrl]:
    """A store's location, as one machine (its cache folder) sees it."""

    def locate(machine: str = "machine", cache_bytes: int = 10**9) -> StoreUrl:
        location = located(parse_store(s3.url("deep/s.zarr")), tmp_path / machine, cache_bytes)
        assert isinstance(location, StoreUrl)
        return location

    return locate


@pytest.fixture
def location(locate: Callable[..., StoreUrl]) -> StoreUrl:
    return locate()


@pytest.fixture
def stored(bf16: Any, s3: Any, tmp_path: Path) -> Path:
    """A local store of two segments and a quarantined sample, and its copy in the bucket."""
    path: Path = bf16.store(tmp_path / "local.zarr")
    s3.upload(path, "deep/s.zarr")
    s3.requests()
    return path


def create(maker: Any, location: StoreUrl) -> None:
    create_store(location, maker.manifest, maker.calibration, maker.frozen())


def add_segment(maker: Any, location: StoreUrl, numbers: Any) -> str:
    writer = open_segment_writer(location, maker.encoding, {"source": "test"})
    for number in numbers:
        writer.append(**maker.sample(number, 20 + number))
    segment_id = writer.commit()
    assert segment_id is not None
    return segment_id


def assert_same_samples(one: StoreReader, two: StoreReader) -> None:
    assert one.samples.tolist() == two.samples.tolist() and len(one.samples)
    for index in range(len(one.samples)):
        a, b = one.read(index), two.read(index)
        for name in ("token_ids", "loss_mask", "features", "scales"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_copied_store_reads_as_the_local_one(
    maker: Any, s3: Any, location: StoreUrl, tmp_path: Path, is_ahead: bool
) -> None:
    s3.upload(maker.store(tmp_path / "local.zarr"), "deep/s.zarr")
    local, remote = StoreReader(tmp_path / "local.zarr"), StoreReader(location)
    if is_ahead:
        remote.read_ahead(range(len(remote.samples)))
    assert_same_samples(remote, local)
    assert remote.manifest == local.manifest and remote.num_bytes == local.num_bytes
    assert remote.quarantined() == local.quarantined() and remote.sources() == local.sources()
    assert remote.frozen_embed_tokens().equal(local.frozen_embed_tokens())
    assert remote.frozen_lm_head().equal(local.frozen_lm_head())
    assert remote.calibration.hash == local.calibration.hash
    assert remote.target_config() == local.target_config()
    assert sorted(path.name for path in remote.tokenizer_path().iterdir()) == sorted(
        path.name for path in local.tokenizer_path().iterdir()
    )
    one, two = store_report(location), store_report(tmp_path / "local.zarr")
    assert one.pop("path") == str(location) and two.pop("path") and one == two


def test_features_come_by_range_once(stored: Path, s3: Any, location: StoreUrl) -> None:
    reader = StoreReader(location)
    s3.requests()
    for index in (3, 1, 3):
        reader.read(index)
    features = [line for line in s3.requests() if "/features/" in line]
    assert len(features) == 2 and all(re.search(r"bytes=\d+-\d+$", line) for line in features)
    s3.fault("GET", status=500, code="InternalError")
    assert_same_samples_of(StoreReader(stored), reader, (1, 3))


def test_other_rows_of_large_segments_come_by_range_too(
    stored: Path, s3: Any, location: StoreUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "WHOLE_BYTES", 7)
    reader = StoreReader(location)
    s3.requests()
    for _ in range(2):
        assert len(reader.read(3).token_ids) == 32
    ranges = [tuple(map(int, line.rpartition("=")[2].split("-"))) for line in s3.requests()]
    assert sorted(end - start + 1 for start, end in ranges) == [32, 4 * 32, 48 * 32]
    assert_same_samples(StoreReader(stored), reader)


def assert_same_samples_of(one: StoreReader, two: StoreReader, indices: Any) -> None:
    for index in indices:
        assert np.array_equal(one.read(index).features, two.read(index).features)


def wait_for_ahead(reader: StoreReader) -> int:
    """Wait until what was begun ahead has come; returns how many ranges wait to be read."""
    assert reader._remote is not None
    pieces = list(reader._remote.ahead._pieces.values())
    for future, _length in pieces:
        future.result()
    return len(pieces)


def test_samples_are_fetched_ahead_and_not_again_when_they_are_read(stored: Path, s3: Any, location: StoreUrl) -> None:
    reader = StoreReader(location)
    s3.requests()
    reader.read_ahead([3, 5])
    assert wait_for_ahead(reader) == 6, "features, token ids and loss mask of each"
    fetched = s3.requests()
    assert len([line for line in fetched if "/features/" in line]) == 2 and len(fetched) == 4
    reader.read_ahead([3, 5])
    s3.fault("GET", status=500, code="InternalError")
    assert_same_samples_of(StoreReader(stored), reader, (3, 5))
    assert wait_for_ahead(reader) == 0
    reader.read_ahead([3, 5])  # the cache has them
    assert wait_for_ahead(reader) == 0 and s3.requests() == []


def test_no_more_is_fetched_ahead_than_memory_is_for(
    stored: Path, s3: Any, locate: Callable[..., StoreUrl], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, reader = StoreReader(stored), StoreReader(locate(cache_bytes=0))
    token_bytes = local.encoding.bytes_per_token
    monkeypatch.setattr(remote_module, "AHEAD_BYTES", 140 * token_bytes)
    lengths = local.samples["length"].tolist()
    assert lengths[4:7] == [33, 100, 507]
    for _ in range(2):  # what was read makes room again
        reader.read_ahead([4, 5, 6])
        waiting = sum(length for _future, length in reader._remote.ahead._pieces.values()) if reader._remote else 0
        assert 133 * token_bytes <= waiting <= 140 * token_bytes
        wait_for_ahead(reader)
        s3.requests()
        assert_same_samples_of(local, reader, (4, 5))
        assert s3.requests() == []
        reader.read(6)


def test_a_file_of_another_size_than_its_shape_asks_for_is_refused(
    bf16: Any, s3: Any, location: StoreUrl, tmp_path: Path
) -> None:
    """Sound by its checksums, as another program might rewrite it."""
    path = bf16.create(tmp_path / "local.zarr")
    folder = path / "segments" / bf16.add_segment(path, [4, 5])
    file = folder / "features/c/0/0"
    file.write_bytes(file.read_bytes()[:-16])
    sums = {"features/c/0/0": sum_contents([file.read_bytes()])}
    (folder / CHECKSUMS_NAME).write_bytes(format_checksums(read_checksums(folder) | sums))
    s3.upload(path, "deep/s.zarr")
    reader = StoreReader(location)
    with pytest.raises(StoreError, match=r"s3://.*features/c/0/0 has not the size that its shape asks for"):
        reader.read(0)


def test_next_opening_fetches_two_small_objects(stored: Path, s3: Any, location: StoreUrl) -> None:
    StoreReader(location)
    s3.requests()
    StoreReader(location)
    requests = [line for line in s3.requests() if line.startswith("GET") and "list-type" not in line]
    assert [line.rpartition("/")[2] for line in requests if "deep" in line] == ["zarr.json", "checksums.json"]


def test_new_segments_come_with_refresh_and_removed_ones_leave_the_mirror(
    bf16: Any, stored: Path, s3: Any, location: StoreUrl
) -> None:
    reader = StoreReader(location)
    segment_id = add_segment(bf16, location, [30, 31])
    assert reader.refresh() == 1 and reader.segment_ids[-1] == segment_id
    for name in s3.objects(f"deep/s.zarr/segments/{segment_id}"):
        s3.remove(name)
    assert segment_id not in list_segments(location)
    assert not (location.mirror / "segments" / segment_id).exists()
    with pytest.raises(StoreError, match=rf"s\.zarr has no segment {segment_id}: it was removed"):
        StoreReader(location, [segment_id])


def test_store_made_anew_at_the_same_url_replaces_the_mirror(
    with_: Any, stored: Path, s3: Any, location: StoreUrl
) -> None:
    old = StoreReader(location).tokenizer_path() / "added_tokens.json"
    old.write_text("{}")  # as if the old target had had one
    for name in s3.objects():
        s3.remove(name)
    other = with_(encoding_name="int8")
    create(other, location)
    add_segment(other, location, [1])
    reader = StoreReader(location)
    assert reader.manifest.encoding == "int8" and len(reader.samples) == 1
    assert reader.read(0).features.dtype == np.int8
    assert reader.tokenizer_path() == old.parent and not old.exists()


def test_any_other_fsspec_backend_will_do(bf16: Any, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    location = located(parse_store(f"memory://{tmp_path.name}/s.zarr"), tmp_path / "cache")
    assert isinstance(location, StoreUrl) and not store_exists(location)
    create(bf16, location)
    add_segment(bf16, location, range(3))
    assert len(StoreReader(location).read(2).token_ids) == 22
    assert verify_store(location).problems == []
    with pytest.raises(StoreError, match="exists already"):
        create(bf16, location)


def test_zarr_python_reads_what_was_uploaded(bf16: Any, location: StoreUrl) -> None:
    import zarr

    create(bf16, location)
    segment_id = add_segment(bf16, location, [4])
    with zarr.config.set({"async.timeout": 30}):
        group = zarr.open_group(str(location), mode="r")
        features = np.asarray(group[f"segments/{segment_id}/features"])
    assert np.array_equal(features, StoreReader(location).read(0).features)


# -- writing -----------------------------------------------------------------------------------------------------------


def test_group_metadata_is_put_last_and_nothing_stays_here(maker: Any, s3: Any, location: StoreUrl) -> None:
    assert not store_exists(location)
    create(maker, location)
    puts = [line.split(" ")[1] for line in s3.requests() if line.startswith("PUT")]
    assert puts[0].endswith("s.zarr/checksums.json") and puts[-1].endswith("s.zarr/zarr.json")
    segment_id = add_segment(maker, location, range(5))
    puts = [line.split(" ")[1] for line in s3.requests() if line.startswith("PUT")]
    assert puts[-1].endswith(f"segments/{segment_id}/zarr.json") and "/features/c/" in "".join(puts[:1] + puts[1:-1])
    assert store_exists(location) and list_segments(location) == [segment_id]
    report = verify_store(location)
    assert (report.problems, report.leftovers, report.num_samples) == ([], [], 5)
    assert [path for path in location.spool.rglob("*") if path.is_file()] == []
    assert clean_staging(location) == 1 and not list(location.spool.iterdir())


def test_quarantine_alone_is_a_segment_and_nothing_is_none(bf16: Any, location: StoreUrl) -> None:
    create(bf16, location)
    assert open_segment_writer(location, bf16.encoding, {}).commit() is None
    writer = open_segment_writer(location, bf16.encoding, {})
    writer.quarantine({"id": None, "row": 3, "reason": "empty"})
    assert writer.commit() is not None
    assert StoreReader(location).quarantined()[0]["reason"] == "empty"
    assert verify_store(location).problems == []


def test_upload_that_died_at_any_request_is_never_seen_and_is_cleaned(
    bf16: Any, s3: Any, location: StoreUrl, locate: Callable[..., StoreUrl], monkeypatch: pytest.MonkeyPatch
) -> None:
    create(bf16, location)
    kept = add_segment(bf16, location, range(3))
    before = s3.objects()
    call, died = Objects._call, 0
    for stop in range(12):
        calls = itertools.count()

        def dying(self: Any, what: str, name: str, function: Any, calls: Any = calls, stop: int = stop) -> Any:
            if next(calls) >= stop:
                raise KeyboardInterrupt
            return call(self, what, name, function)

        monkeypatch.setattr(Objects, "_call", dying)
        try:
            add_segment(bf16, location, range(3, 6))
        except KeyboardInterrupt:
            died += 1
        monkeypatch.setattr(Objects, "_call", call)
        if stop < 11:
            assert list_segments(location) == [kept]
            if stop == 5:
                report = verify_store(location)
                assert (len(report.problems), len(report.leftovers), report.num_segments) == (0, 1, 1)
            assert clean_staging(locate("another machine")) == 0, "an upload may be going on there"
            clean_staging(location)
            assert s3.objects() == before and not list(location.spool.iterdir())
    assert died == 11, "11 requests: 9 files, a listing, and the commit"
    assert len(StoreReader(location).samples) == 6


def test_long_dead_uploads_of_other_machines_are_cleaned(
    bf16: Any, s3: Any, location: StoreUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(bf16, location)
    s3.put("deep/s.zarr/segments/19991231-dead/features/c/0/0", b"x")
    assert clean_staging(location) == 0
    assert verify_store(location).leftovers == [f"{location}/segments/19991231-dead"]
    monkeypatch.setattr(upload_module, "ORPHAN_SECONDS", -1.0)
    assert clean_staging(location) == 1
    assert not s3.objects("deep/s.zarr/segments/19991231-dead")


def test_two_machines_at_once_store_every_sample_once(bf16: Any, locate: Callable[..., StoreUrl]) -> None:
    one, two = locate("one"), locate("two")
    create(bf16, one)
    writers = [open_segment_writer(location, bf16.encoding, {}) for location in (one, two)]
    for number in range(6):
        for writer in writers:
            writer.append(**bf16.sample(number, 30))
    with store_lock(one), store_lock(two):
        for writer in writers:
            assert writer.commit() is not None
    reader = StoreReader(locate("reader"))
    assert len(reader.segment_ids) == 2 and len(reader.samples) == 6 and reader.num_duplicates == 6
    assert verify_store(one).problems == []


def test_lock_is_the_machines(location: StoreUrl, locate: Callable[..., StoreUrl]) -> None:
    with store_lock(location), store_lock(locate("another")), pytest.raises(StoreError, match="is in use by process"):  # noqa: SIM117
        with store_lock(location):
            pass


def test_second_creation_is_refused_at_every_moment(
    bf16: Any, s3: Any, location: StoreUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("deep/s.zarr/checksums.json", b"the claim of somebody else")
    with pytest.raises(StoreError, match="is being created by another process since"):
        create(bf16, location)
    assert s3.objects() == {"deep/s.zarr/checksums.json": b"the claim of somebody else"}
    monkeypatch.setattr(upload_module, "CLAIM_SECONDS", -1.0)
    create(bf16, location)
    with pytest.raises(StoreError, match="exists already"):
        create(bf16, location)
    assert verify_store(location).problems == []


@pytest.mark.parametrize(
    ("call", "name"), [("ages", "checksums.json"), ("put_file", "checksums.json"), ("read", "zarr.json")]
)
def test_of_two_creations_at_once_one_is_refused_and_changes_nothing(
    bf16: Any, s3: Any, location: StoreUrl, monkeypatch: pytest.MonkeyPatch, call: str, name: str
) -> None:
    """The other one claims just before, takes over during the upload, or commits after our last look at the claim."""
    original = getattr(Objects, call)

    def meanwhile(self: Objects, given: str, *rest: Any) -> Any:
        result = original(self, given, *rest)
        if call != "read" or given == CHECKSUMS_NAME:
            s3.put(f"deep/s.zarr/{name}", b"of the other")
        return result

    monkeypatch.setattr(Objects, call, meanwhile)
    with pytest.raises(StoreError, match="(is|was) created by another process in this moment"):
        create(bf16, location)
    objects = s3.objects()
    assert objects[f"deep/s.zarr/{name}"] == b"of the other"
    assert name == "zarr.json" or "deep/s.zarr/zarr.json" not in objects


def test_creation_that_died_at_any_request_is_no_store_and_is_taken_over(
    bf16: Any, s3: Any, location: StoreUrl, locate: Callable[..., StoreUrl], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, total, stop = Objects._call, 0, 0
    monkeypatch.setattr(upload_module, "CLAIM_SECONDS", -1.0)
    while not total:
        calls = itertools.count()

        def dying(self: Any, what: str, name: str, function: Any, calls: Any = calls, stop: int = stop) -> Any:
            if next(calls) >= stop:
                raise SystemExit  # and nothing may clean up after a kill
            return call(self, what, name, function)

        monkeypatch.setattr(Objects, "_call", dying)
        try:
            create(bf16, location)
            total = stop
        except SystemExit:
            pass
        monkeypatch.setattr(Objects, "_call", call)
        if not total:
            with pytest.raises(StoreError, match="has no zarr.json"):
                StoreReader(locate(f"reader {stop}"))
            create(bf16, locate("another machine"))
            assert verify_store(location).problems == []
            for name in s3.objects():
                s3.remove(name)
            stop += 1
    assert total > 10 and verify_store(location).problems == []


def test_failed_creation_lets_go_of_its_claim(bf16: Any, s3: Any, location: StoreUrl) -> None:
    s3.fault("PUT", status=403, code="AccessDenied")
    with pytest.raises(StoreError, match="refuses to write"):
        create(bf16, location)
    s3.fault("embed_tokens/c", status=403, code="AccessDenied")
    with pytest.raises(StoreError, match="refuses to write"):
        create(bf16, location)
    s3.fault()
    create(bf16, location)
    assert len(StoreReader(location).segment_ids) == 0


def test_a_segment_that_the_service_lost_in_part_is_not_committed(
    bf16: Any, location: StoreUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(bf16, location)
    put_file = Objects.put_file

    def losing(self: Objects, name: str, path: Path) -> None:
        if not name.endswith("token_ids/c/0"):
            put_file(self, name, path)

    monkeypatch.setattr(Objects, "put_file", losing)
    with pytest.raises(
        StoreError, match=r"lost what it had taken: .*token_ids/c/0 has None bytes, not \d+\. The segment"
    ):
        add_segment(bf16, location, [1])
    assert list_segments(location) == []


def test_a_committed_segment_is_not_committed_over(bf16: Any, s3: Any, location: StoreUrl, tmp_path: Path) -> None:
    create(bf16, location)
    name = add_segment(bf16, location, [1])
    wanted = s3.objects()
    (tmp_path / "zarr.json").write_bytes(b"of another machine, which drew the same id")
    with pytest.raises(FileExistsError, match="exists already"):
        upload_segment(Objects(location), name, tmp_path)
    assert s3.objects() == wanted


@pytest.mark.parametrize("has_create", [True, False])
def test_commit_whose_answer_was_lost_is_not_taken_for_anothers(
    s3: Any, location: StoreUrl, monkeypatch: pytest.MonkeyPatch, has_create: bool
) -> None:
    objects = Objects(location)
    pipe_file = objects._system.pipe_file

    def without(path: str, data: bytes, mode: str = "overwrite") -> None:
        if mode == "create":
            raise NotImplementedError
        pipe_file(path, data)

    if not has_create:  # as of many backends: it looks first
        monkeypatch.setattr(objects._system, "pipe_file", without)
    objects.create("a", b"mine")
    objects.create("a", b"mine")
    with pytest.raises(FileExistsError):
        objects.create("a", b"another's")
    assert objects.read("a") == b"mine"


def test_spool_without_space_says_so(bf16: Any, location: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    create(bf16, location)
    monkeypatch.setattr(upload_module.SpoolFiles, "write", full)
    with pytest.raises(StoreError, match="the disk is full.*Make room"):
        add_segment(bf16, location, [1])
    assert StoreReader(location).segment_ids == []


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_every_flipped_cut_and_missing_object_is_found(stored: Path, s3: Any, location: StoreUrl) -> None:
    objects = s3.objects()
    wanted = verify_store(location)
    assert wanted.problems == [] and wanted.num_samples == 14
    generator = np.random.default_rng(3)
    names = [name for name in objects if len(objects[name]) and not name.endswith(("segments/zarr.json", ".lock"))]
    for number, name in enumerate(generator.permutation(names)[:15].tolist()):
        data = objects[name]
        if number % 3 == 0 and not re.search(r"(segments/[^/]*|s\.zarr)/zarr\.json$", name):
            s3.remove(name)
        elif number % 3 == 1:
            s3.put(name, data[:-1])
        else:
            s3.put(name, flip(data, int(generator.integers(len(data)))))
        report = verify_store(location)
        texts = " ".join(problem.text for problem in report.problems)
        assert report.problems and name.removeprefix("deep/s.zarr/").split("/")[-1] in texts, (name, texts)
        assert str(location.spool) not in texts and str(location) in texts
        s3.put(name, data)
    dead = location.spool / "verify-dead"
    (dead / "segments").mkdir(parents=True)
    assert verify_store(location) == wanted
    assert not list(location.spool.iterdir())


def test_a_verification_is_left_alone_by_extracts_and_other_verifications(stored: Path, location: StoreUrl) -> None:
    with downloaded(location) as (folder, _objects, _sizes):
        before = sorted(folder.rglob("*"))
        assert clean_staging(location) == 0 and verify_store(location).problems == []
        assert sorted(folder.rglob("*")) == before
    assert not folder.exists()


def test_reference_samples_of_a_copied_store_are_verified(
    with_: Any, s3: Any, location: StoreUrl, tmp_path: Path
) -> None:
    maker, bf16 = with_(encoding_name="int8"), with_(encoding_name="bf16")
    path = maker.store(tmp_path / "local.zarr")
    writer = SegmentWriter(path, bf16.encoding, {}, None, REFERENCE)
    writer.append(**bf16.sample(1, 20))
    segment = writer.commit()
    s3.upload(path, "deep/s.zarr")
    wanted = verify_store(path)
    found = verify_store(location)
    assert (found.problems, found.leftovers, found.num_samples) == ([], [], wanted.num_samples)
    assert found.num_bytes == wanted.num_bytes and len(StoreReader(location).samples) == 14
    name = f"deep/s.zarr/reference/{segment}/features/c/0/0"
    s3.put(name, flip(s3.objects(name)[name], 5))
    assert {problem.segment for problem in verify_store(location).problems} == {f"reference/{segment}"}


def test_damaged_rows_are_refused_by_name(stored: Path, s3: Any, location: StoreUrl) -> None:
    segment = list_segments(location)[0]
    name = f"deep/s.zarr/segments/{segment}/features/c/0/0"
    data = s3.objects(name)[name]
    reader = StoreReader(location)
    s3.put(name, flip(data, 0))
    with pytest.raises(StoreError, match=rf"Sample .* in segment {segment} of s3://.*s\.zarr is damaged: crc32c"):
        reader.read(0)
    s3.put(name, data[:100])
    with pytest.raises(StoreError, match=r"features/c/0/0 is cut short: .*Remove its segment"):
        reader.read(6)
    s3.remove(name)
    with pytest.raises(StoreError, match=r"features/c/0/0 is not there\. Restore it"):
        reader.read(5)
    s3.put(name, data)
    reader.read(0)


def test_damaged_small_object_is_refused_by_its_url(stored: Path, s3: Any, location: StoreUrl) -> None:
    segment = min(path.name for path in (stored / "segments").iterdir() if path.is_dir())
    name = f"deep/s.zarr/segments/{segment}/samples/c/0/0"
    data = s3.objects(name)[name]
    s3.put(name, flip(data, 9))
    with pytest.raises(StoreError, match=rf"s3://.*/{segment}/samples/c/0/0 has crc32c .* it is damaged"):
        StoreReader(location)
    s3.put(name, data)
    assert len(StoreReader(location).samples) == 14


def test_damage_on_this_machine_heals_itself(stored: Path, location: StoreUrl) -> None:
    reader = StoreReader(location)
    for index in range(14):
        reader.read(index)
    for path in [*location.row_cache.glob("*/*"), *location.mirror.glob("segments/*/samples/c/0/0")]:
        path.write_bytes(bytes(path.stat().st_size))
    again = StoreReader(location)
    assert_same_samples(again, StoreReader(stored))


def read_own_files(reader: StoreReader) -> list[Any]:
    embedding = reader.frozen_embed_tokens().view(torch.int16).numpy().tobytes()
    tokenizer = {path.name: path.read_bytes() for path in reader.tokenizer_path().iterdir()}
    return [reader.channel_scale.tobytes(), embedding, reader.target_config(), tokenizer]


@pytest.mark.parametrize(
    "name",
    [
        "calibration/channel_scale/c/0",
        "calibration/channel_scale/zarr.json",
        "frozen/embed_tokens/c/0/0",
        "frozen/target/config.json",
        "frozen/target/tokenizer.json",
    ],
)
def test_the_stores_own_files_that_are_damaged_on_this_machine_are_fetched_again(
    stored: Path, s3: Any, location: StoreUrl, name: str
) -> None:
    wanted = read_own_files(StoreReader(location))
    path = location.mirror / name
    path.write_bytes(bytes(path.stat().st_size))  # of the right size, as a power cut leaves it
    s3.requests()
    assert read_own_files(StoreReader(location)) == wanted
    fetched = [line for line in s3.requests() if "GET" in line and ("calibration" in line or "frozen" in line)]
    assert len(fetched) == 1 and name in fetched[0]
    [data] = s3.objects(f"deep/s.zarr/{name}").values()
    assert path.read_bytes() == data
    path.write_bytes(bytes(len(data)))
    s3.put(f"deep/s.zarr/{name}", flip(data, 3))
    with pytest.raises(StoreError, match=rf"s3://.*/{name} has crc32c .* it is damaged"):
        read_own_files(StoreReader(location))


# -- the cache ---------------------------------------------------------------------------------------------------------


def cached_bytes(location: StoreUrl) -> int:
    return sum(path.stat().st_size for path in location.row_cache.glob("*/*"))


def test_cache_keeps_its_limit_and_what_it_has(
    stored: Path, s3: Any, locate: Callable[..., StoreUrl], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 40_000
    location = locate(cache_bytes=limit)
    reader, local = StoreReader(location), StoreReader(stored)
    kept: set[Path] = set()
    for index in range(14):
        reader.read(index)
        assert cached_bytes(location) <= limit
        kept = kept or ({*location.row_cache.glob("*/*")} if reader._remote and reader._remote.rows.full else kept)
    assert kept and cached_bytes(location) > limit / 4
    assert_same_samples(reader, local)
    assert {*location.row_cache.glob("*/*")} >= kept, "what this run uses stays"
    later = StoreReader(location)
    assert later._remote is not None
    later._remote.rows._began += 10  # as if it began after all of that
    later.read(13)
    assert cached_bytes(location) <= limit
    assert any("features" in path.name for path in {*location.row_cache.glob("*/*")} - kept)


def test_no_cache_reads_too(stored: Path, s3: Any, locate: Callable[..., StoreUrl]) -> None:
    location = locate(cache_bytes=0)
    reader = StoreReader(location)
    s3.requests()
    for _ in range(2):  # a range is begun once
        reader.read_ahead(range(3))
    assert wait_for_ahead(reader) == len(s3.requests()) == 9
    assert_same_samples(reader, StoreReader(stored))
    assert not location.row_cache.exists()


def test_full_disk_ends_the_caching_and_nothing_else(
    stored: Path, location: StoreUrl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = StoreReader(location)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    reader.read(0)
    monkeypatch.setattr(Path, "rename", full)
    with caplog.at_level(logging.WARNING):
        reader.read(1)
    monkeypatch.undo()
    assert_same_samples(reader, StoreReader(stored))
    assert caplog.text.count("No more rows are kept in") <= 1


def test_mirror_without_space_says_so(stored: Path, location: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="the disk is full.*Make room"):
        StoreReader(location)


# -- the service -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503, "code": "SlowDown"},
        {"status": 500, "code": "InternalError"},
        {"status": 429, "code": "TooManyRequests"},
        {"cut": 3},
    ],
    ids=lambda fault: str(fault.get("code", "cut")),
)
def test_what_passes_is_tried_again(
    bf16: Any, s3: Any, location: StoreUrl, fault: dict[str, Any], stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    s3.fault("/features/c/0/0" if "cut" in fault else "/deep", count=3, **fault)
    with caplog.at_level(logging.WARNING):
        reader = StoreReader(location)
        assert len(reader.read(0).token_ids) == 1
    assert caplog.text.count("Trying again to") == 3
    if "status" in fault:
        s3.fault("PUT", count=3, **fault)
        segment_id = add_segment(bf16, location, [50])
        assert segment_id in list_segments(location)


def test_what_does_not_pass_is_one_sentence(stored: Path, s3: Any, location: StoreUrl) -> None:
    s3.fault("GET", status=503, code="SlowDown", message="Reduce your request rate")
    with pytest.raises(StoreError) as error:
        StoreReader(location)
    assert re.fullmatch(
        r"s3://bucket-\w+ did not read s3://bucket-\w+/deep/s\.zarr/zarr\.json, tried for \d+ s and more: SlowDown: "
        r"Reduce your request rate\. Look at the network and the service, then run this again\.",
        str(error.value),
    )


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
def test_refused_access_names_bucket_and_way_out(stored: Path, s3: Any, location: StoreUrl, code: str) -> None:
    s3.fault("GET", status=403, code=code)
    s3.requests()
    with pytest.raises(StoreError) as error:
        StoreReader(location)
    assert re.fullmatch(
        rf"s3://bucket-\w+ refuses to read s3://\S+zarr\.json \({code}: injected\)\. Give credentials that may list, read "
        r"and write there as AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in the environment\.",
        str(error.value),
    )
    assert len([line for line in s3.requests() if "zarr.json" in line]) == 1, "it is not tried again"


def test_silent_server_is_given_up(stored: Path, s3: Any, location: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(objects_module, "RETRY_SECONDS", (0.01,))
    s3.fault("GET", count=1, sleep=1.0)
    assert len(StoreReader(location).samples) == 14
    s3.fault("GET", sleep=1.0)
    with pytest.raises(StoreError, match="did not read .* Look at the network"):
        StoreReader(location)


def test_no_server_is_one_sentence(s3: Any, location: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(objects_module, "TIMEOUT_SECONDS", 0.5)  # a connection of its own
    with pytest.raises(StoreError, match=r"did not read .*http://127\.0\.0\.1:9.* Look at the network"):
        open_manifest(location)


def test_what_is_no_store_is_refused(s3: Any, location: StoreUrl) -> None:
    with pytest.raises(StoreError, match=r"deep/s\.zarr is not there, or has no zarr\.json\. Give the URL"):
        open_manifest(location)
    with pytest.raises(StoreError, match="is not there"):
        verify_store(location)
    s3.put("deep/s.zarr/notes.txt", b"x")
    with pytest.raises(StoreError, match=r"is not a store: it has no zarr\.json"):
        StoreReader(location)
    s3.put("deep/s.zarr/zarr.json", json.dumps({"zarr_format": 3, "node_type": "group"}).encode())
    with pytest.raises(StoreError, match=r"s3://.*checksums\.json is not there"):
        StoreReader(location)
    nowhere = replace(location, url="s3://no-such-bucket/s.zarr")
    with pytest.raises(StoreError, match=r"s3://no-such-bucket is not there\. Make it, or correct"):
        open_manifest(nowhere)


def test_missing_package_and_unknown_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    location = located(parse_store("s3://bucket/s.zarr"), tmp_path)
    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(StoreError, match=r"Run `pip install 'dflash-train\[s3\]'`"):
        open_manifest(location)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="magnet://a/b cannot be opened: .*Known are .*s3"):
        open_manifest(located(parse_store("magnet://a/b"), tmp_path))
