"""The plan that an extract leaves, and its pauses under --max-store-size."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_train.errors import InputError
from dflash_train.stage1_target.dealer import Dealer
from dflash_train.stage1_target.events import Event, Note
from dflash_train.stage1_target.extract import ExtractConfig, extract
from dflash_train.stage1_target.room import Room
from dflash_train.stage1_target.samples import DataConfig
from dflash_train.stage1_target.schedule import Batch
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.store.arrays import group_text
from dflash_train.store.consumed import COPY_SOURCE, read_consumed, remove_segments
from dflash_train.store.manifest import StoreError
from dflash_train.store.plan import read_plan
from dflash_train.store.reader import StoreReader
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
    room = Room(tmp_path, 20_000, bytes_per_token=10, report=report, clock=lambda: now[0])
    assert room.fits(300, 200)
    make_folder(tmp_path / "segments" / "b", 2000)
    assert not room.fits(200, 200) and not room.fits(200, 200)
    shutil.rmtree(tmp_path / "segments" / "a")
    assert not room.fits(200, 200), "a full store is looked at once a second"
    now[0] += 1
    assert room.fits(200, 200)
    assert len(said) == 2
    assert said[0].startswith(
        "paused: the store holds 6.8 KiB and 2.0 KiB are being written, of --max-store-size 19.5 KiB. It goes on"
    )
    assert "--follow --consume N" in said[0] and said[1].endswith("going on")
    with pytest.raises(StoreError, match=r"embedding, head, calibration and one batch take 20\.5 KiB"):
        room.fits(2000, 0)


def test_copies_of_held_out_samples_do_not_fill_a_store(tmp_path: Path) -> None:
    """They stay for good, so an extract that counted them might pause for ever."""
    (tmp_path / "zarr.json").write_bytes(bytes(100))
    make_folder(tmp_path / "segments" / "copies", 15_000)
    room = Room(tmp_path, 20_000, bytes_per_token=10, report=lambda event: None)
    assert not room.fits(300, 0)
    attributes = {"source": {"copied": COPY_SOURCE}}
    (tmp_path / "segments" / "copies" / "zarr.json").write_bytes(group_text(attributes))
    assert Room(tmp_path, 20_000, bytes_per_token=10, report=lambda event: None).fits(300, 0)


def test_a_limit_that_metadata_alone_exceed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_bytes(bytes(100))
    (tmp_path / "segments").mkdir()
    with pytest.raises(StoreError, match="Give more, or lower --batch-tokens"):
        Room(tmp_path, 20_000, bytes_per_token=10, report=lambda event: None).fits(1000, 0)


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


def test_a_bounded_store_is_filled_as_somebody_consumes_it(tiny_target: Callable[..., Path], tmp_path: Path) -> None:
    """Here a thread stands for the trainer; afterwards an extract of the same data has nothing to do."""
    data, store = tmp_path / "rows.jsonl", tmp_path / "store"
    data.write_text("".join(f'{{"text": "{"one two " * (5 + row % 9)} {row}"}}\n' for row in range(60)))
    config = ExtractConfig(
        target=TargetConfig(name=str(tiny_target("llama"))),
        data=DataConfig(source=str(data), max_tokens=200),
        store=store,
        devices="cpu",
        encoding="bf16",
        num_taps=2,
        batch_tokens=100,
        segment_bytes=20_000,
        calibration_tokens=200,
        sample_cache=tmp_path / "cache",
        max_store_size="160kB",
    )
    notes: list[str] = []
    done = threading.Event()

    def consume() -> None:
        while not done.wait(0.05):
            if notes and notes[-1].startswith("paused"):
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
    assert any(note.startswith("paused") for note in notes) and any(note.startswith("there is room") for note in notes)
    consumed, stored = read_consumed(store), StoreReader(store).stored_ids()
    assert consumed.ids and not consumed.ids & stored and len(consumed.ids | stored) == 60
    plan = read_plan(store)
    assert plan is not None and (plan.state, plan.samples) == ("finished", 60)
    began = time.monotonic()
    assert extract(config).message == "nothing to do: all 60 samples are stored"
    assert time.monotonic() - began < 30
