"""The plan that an extract leaves, and its pauses under --max-store-size."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dflash_train.errors import InputError
from dflash_train.machine.torchrun import TorchrunPlace
from dflash_train.stage1_target.dealer import Dealer
from dflash_train.stage1_target.events import Event, Note
from dflash_train.stage1_target.extract import ExtractConfig, extract
from dflash_train.stage1_target.ranks import Ranks
from dflash_train.stage1_target.room import METADATA_BYTES, PlanKeeper, Room, StoredSizes, StoreSize, refuse_limit
from dflash_train.stage1_target.samples import DataConfig
from dflash_train.stage1_target.schedule import Batch
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.store.arrays import group_text
from dflash_train.store.consumed import COPY_SOURCE, read_consumed, remove_segments
from dflash_train.store.encoding import Encoding, make_encoding
from dflash_train.store.manifest import StoreError
from dflash_train.store.plan import read_plan
from dflash_train.store.reader import StoreReader
from dflash_train.store.reference import reference_encoding
from dflash_train.store.segment import SegmentWriter
from dflash_train.units import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("2TB", 2 * 10**12), ("500 GiB", 500 * 2**30), ("1.5m", 1_500_000), ("1e9", 10**9), ("7", 7), ("3kib", 3072)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["much", "", "0", "-1GB", "nan", "2XB", "inf", "1e30 TB"])
def test_what_is_no_size_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--max-store-size is"):
        ExtractConfig(target=TargetConfig(name="t"), data=DataConfig(source="d"), store=tmp_path, max_store_size=text)


def test_a_plan_counts_every_sample_once_consumed_ones_included(tmp_path: Path) -> None:
    """Three were consumed, of which one is stored again: a copy for evaluations."""
    (tmp_path / "zarr.json").touch()
    table = np.zeros((3, 6), np.int64)
    table[:, 0], table[:, 3] = (1, 2, 3), (100, 200, 300)
    make_folder(tmp_path / "segments" / "a", 1)
    remove_segments(tmp_path, {"a": (table, [])})
    samples = np.array([(2, 200), (4, 500)], [("id", "i8"), ("length", "i8")])
    reader: Any = SimpleNamespace(samples=samples, num_tokens=700)
    keeper = PlanKeeper(tmp_path, reader, np.array([50, 60]))
    keeper.silent().beat()
    assert read_plan(tmp_path) is None
    keeper.beat()
    plan = read_plan(tmp_path)
    assert plan is not None and (plan.samples, plan.tokens, plan.longest) == (6, 1210, 500)
    assert (plan.state, plan.beat) == ("running", 1)
    keeper.beat()
    assert read_plan(tmp_path) == plan, "again after some seconds"
    keeper.beat("stopped")
    stopped = read_plan(tmp_path)
    assert stopped is not None and (stopped.state, stopped.beat, stopped.run) == ("stopped", 2, plan.run)
    PlanKeeper(tmp_path / "none", None, np.array([50])).beat("finished")  # not there yet
    PlanKeeper(tmp_path, None, np.array([50, 70])).beat("finished")
    first = read_plan(tmp_path)
    assert first is not None and (first.samples, first.tokens, first.longest) == (2, 120, 70)
    assert first.run != plan.run


def make_folder(path: Path, num_bytes: int) -> None:
    path.mkdir(parents=True)
    (path / "file").write_bytes(bytes(num_bytes))


def test_room_pauses_once_and_goes_on_when_there_is_some(tmp_path: Path) -> None:
    said: list[str] = []
    now = [0.0]

    def report(event: Event) -> None:
        assert isinstance(event, Note)
        said.append(event.text)

    (tmp_path / "zarr.json").write_bytes(bytes(100))
    make_folder(tmp_path / "frozen", 900)
    make_folder(tmp_path / "segments" / "a", 4000)
    room = Room(tmp_path, 20_000, report, clock=lambda: now[0])
    assert room.fits(13_000, 2_000)
    make_folder(tmp_path / "segments" / "b", 2000)
    assert not room.fits(12_000, 2_000) and not room.fits(12_000, 2_000)
    shutil.rmtree(tmp_path / "segments" / "a")
    assert not room.fits(12_000, 2_000), "a full store is looked at once a second"
    now[0] += 1
    assert room.fits(12_000, 2_000)
    assert len(said) == 2
    assert said[0].startswith(
        "paused: the store holds 6.8 KiB and 2.0 KiB are being written, of --max-store-size 19.5 KiB. It goes on"
    )
    assert "--follow --consume N" in said[0] and said[1].endswith("going on")
    with pytest.raises(
        StoreError,
        match=r"is 19\.5 KiB, but at least 22\.6 KiB are needed: 1000 bytes for what stays .*, 20\.5 KiB for one batch",
    ):
        room.fits(21_000, 0)


def test_a_commit_in_a_pause_is_not_taken_for_room(tmp_path: Path) -> None:
    """The bytes that were being written are stored now, and the look at the store may be of before."""
    (tmp_path / "zarr.json").write_bytes(bytes(100))
    make_folder(tmp_path / "segments" / "a", 10_000)
    room = Room(tmp_path, 20_000, lambda event: None, clock=lambda: 0.0)
    assert room.fits(4_000, 5_000) and not room.fits(4_000, 9_000)
    make_folder(tmp_path / "segments" / "b", 9_000)
    assert not room.fits(4_000, 0)
    shutil.rmtree(tmp_path / "segments" / "a")
    make_folder(tmp_path / "segments" / "c", 1_000)
    assert not room.fits(4_000, 0)
    room = Room(tmp_path, 20_000, lambda event: None, clock=lambda: 0.0)
    assert not room.fits(11_000, 0) and not room.fits(8_000, 0), "looked at a moment ago"


def test_all_that_lies_in_a_store_counts(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_bytes(bytes(100))
    for name in ("frozen", "calibration", "segments/a", "reference/a", ".consumer/trash/b"):
        make_folder(tmp_path / name, 1000)
    (tmp_path / "checksums.json").write_bytes(bytes(10))
    make_folder(tmp_path / ".staging" / "a", 7)  # of an open segment, which counts as being written
    (tmp_path / "consumed").mkdir()
    (tmp_path / "consumed" / "b.json").write_bytes(bytes(1))
    size = StoreSize(tmp_path)
    assert (size.measure(), size.lasting) == (5111, 3111)
    make_folder(tmp_path / "reference" / "b", 1000)
    assert (size.measure(), size.lasting) == (6111, 4111)


@pytest.mark.parametrize("name", ["bf16", "int8", "projected-int4"])
def test_stored_sizes_are_those_of_files(name: str, tmp_path: Path) -> None:
    """Never less; more by 10 kB, a chunk of features and a sample's alignment a segment, and for each reference sample."""
    rng = np.random.default_rng(0)
    encoding = make_encoding(name, 3, 100, 37 if "projected" in name else None)
    lengths, ids = rng.integers(1, 700, 40), np.arange(40)
    sizes = StoredSizes(
        encoding=encoding,
        lengths=lengths,
        ids=ids,
        reference_one_in=13 if name != "bf16" else 0,
        segment_bytes=10**9,
    )

    def write(encoding: Encoding, indices: NDArray[np.int64], parent: str) -> None:
        writer = SegmentWriter(tmp_path, encoding, {}, parent=parent)
        for index in indices:
            length = int(lengths[index])
            features = np.zeros((length, encoding.num_columns), encoding.storage_dtype)
            scales = np.zeros((length, encoding.num_scales), np.float32) if encoding.num_scales else None
            rows = np.zeros(length, np.int32), np.zeros(length, np.uint8)
            writer.append(int(ids[index]), 0, *rows, features, scales)
        writer.commit()

    write(encoding, ids, "segments")
    bounds = METADATA_BYTES + (32 + encoding.align_tokens) * encoding.bytes_per_token
    if name != "bf16":
        kept = ids[ids % 13 == 0]
        write(reference_encoding(encoding), kept, "reference")
        bounds += len(kept) * METADATA_BYTES + (32 * len(kept) + 64) * 605
    found = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    told = sizes.with_segments(sizes.samples(ids), 1)
    assert told - bounds < found <= told


def test_ranks_count_what_the_others_write(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_bytes(bytes(100))
    (tmp_path / "segments").mkdir()
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    reserve = [Ranks(TorchrunPlace(rank, 2, rank), store).reserve for rank in (0, 1)]
    rooms = [Room(tmp_path, 20_000, lambda event: None, one, clock=lambda: 0.0) for one in reserve]
    assert rooms[0].fits(9_000, 0) and rooms[1].fits(9_000, 0) and not rooms[0].fits(9_000, 9_000)
    rooms[1].close()
    assert rooms[0].fits(9_000, 8_999)


def test_copies_of_held_out_samples_do_not_fill_a_store(tmp_path: Path) -> None:
    """They stay for good, so an extract that counted them might pause for ever."""
    (tmp_path / "zarr.json").write_bytes(bytes(100))
    make_folder(tmp_path / "segments" / "copies", 15_000)
    assert not Room(tmp_path, 20_000, lambda event: None).fits(13_000, 0)
    attributes = {"source": {"copied": COPY_SOURCE}}
    (tmp_path / "segments" / "copies" / "zarr.json").write_bytes(group_text(attributes))
    assert Room(tmp_path, 20_000, lambda event: None).fits(13_000, 0)


def test_a_limit_under_one_batch_is_refused_with_the_least_that_does(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_bytes(bytes(100))
    (tmp_path / "segments").mkdir()
    refuse_limit(20_000, 100, 18_890)
    with pytest.raises(StoreError, match=r"is 20,000 bytes, but at least 20,002 bytes are needed: 101 bytes"):
        refuse_limit(20_000, 101, 18_900)
    with pytest.raises(StoreError, match="Give more, or lower --batch-tokens"):
        Room(tmp_path, 20_000, lambda event: None).fits(20_000, 0)


def test_a_dealer_knows_what_is_open_and_lets_workers_commit_in_a_pause() -> None:
    dealer = Dealer([Batch((0, 1), 2, 2), Batch((2,), 1, 1), Batch((3,), 1, 1)])
    assert dealer.peek(0) is dealer.deal(0)
    dealer.deal(0)
    assert dealer.peek(0) is None and dealer.open_samples() == [0, 1, 2]
    dealer.ran(0, 0)
    dealer.ran(0, 1)
    assert sorted(dealer.open_samples()) == [0, 1, 2]
    assert not dealer.wants_commit(0) and dealer.wants_commit(0, is_paused=True)
    dealer.committed(0, [0, 1, 2])
    assert dealer.open_samples() == [] and not dealer.wants_commit(0, is_paused=True)


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_a_bounded_store_is_filled_as_somebody_consumes_it(
    devices: str, tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    """Here a thread stands for the trainer, and looks how large the full store is; afterwards an extract of the same data has nothing to do."""
    data, store = tmp_path / "rows.jsonl", tmp_path / "store"
    data.write_text("".join(f'{{"text": "{"one two " * (5 + row % 9)} {row}"}}\n' for row in range(60)))
    config = ExtractConfig(
        target=TargetConfig(name=str(tiny_target("llama"))),
        data=DataConfig(source=str(data), max_tokens=200),
        store=store,
        devices=devices,
        encoding="bf16",
        num_taps=2,
        batch_tokens=100,
        segment_bytes=20_000,
        calibration_tokens=200,
        sample_cache=tmp_path / "cache",
        max_store_size="160kB",
    )
    notes: list[str] = []
    sizes: list[int] = []
    done = threading.Event()

    def consume() -> None:
        while not done.wait(0.05):
            if notes and notes[-1].startswith("paused") and not list((store / ".staging").iterdir()):
                sizes.append(sum(path.stat().st_size for path in store.rglob("*") if path.is_file()))
                reader = StoreReader(store)
                name = reader.segment_ids[0] if reader.segment_ids else None
                if name is not None:
                    remove_segments(store, {name: (reader.entry(name).samples, [])})

    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        result = extract(config, lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    finally:
        done.set()
        consumer.join()
    assert (result.outcome, result.num_stored) == ("finished", 60)
    assert 80_000 < max(sizes) <= 160_000
    assert any(note.startswith("paused") for note in notes) and any(note.startswith("there is room") for note in notes)
    consumed, stored = read_consumed(store), StoreReader(store).stored_ids()
    assert consumed.ids and not consumed.ids & stored and len(consumed.ids | stored) == 60
    plan = read_plan(store)
    assert plan is not None and (plan.state, plan.samples) == ("finished", 60)
    assert plan.tokens == StoreReader(store).num_tokens + consumed.num_tokens
    began = time.monotonic()
    assert extract(config).message == "nothing to do: all 60 samples are stored"
    assert time.monotonic() - began < 30
