"""The cache of a remote store's rows: shared by processes, within its limit, and what gives way first."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_train.store import cache
from dflash_train.store.cache import RangeCache


def stored(folder: Path) -> dict[str, int]:
    """What the folder of the only segment holds, half-written ranges included: bytes by name."""
    return {path.name: path.stat().st_size for path in folder.glob("s/*")}


def on_writing(patch: pytest.MonkeyPatch, action: Any) -> None:
    """Do something once, when a range has its room and is about to be written."""
    opened = Path.open

    def open_(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if mode == "r+b":
            patch.undo()
            action()
        return opened(path, mode, *rest, **more)

    patch.setattr(Path, "open", open_)


def test_ranges_are_shared_and_counted_across_caches(tmp_path: Path) -> None:
    one, two = RangeCache(tmp_path / "c", 100), RangeCache(tmp_path / "c", 100)
    assert one.store("s/a-0-60", bytes(60)) and two.has("s/a-0-60")
    assert not two.store("s/b-0-60", bytes(60)) and two.full
    assert one.store("s/c-0-40", bytes(range(40)))
    buffer = bytearray(10)
    assert two.read_into("s/c-0-40", memoryview(buffer), 5) and bytes(buffer) == bytes(range(5, 15))
    assert not two.read_into("s/c-0-40", memoryview(buffer), 35), "it ends before"
    assert one.drop("s/a-0-60") and not one.drop("s/a-0-60")
    assert one.store("s/d-0-60", bytes(60)) and not one.store("s/e-0-1", bytes(1))
    (tmp_path / "c" / "usage").unlink()
    assert RangeCache(tmp_path / "c", 100).store("s/f-0-1", b"x") is False, "counted anew"


def test_a_range_that_two_fetch_at_once_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = RangeCache(tmp_path / "c", 100), RangeCache(tmp_path / "c", 200)
    on_writing(monkeypatch, lambda: two.store("s/a-0-60", bytes(60)))
    assert one.store("s/a-0-60", bytes(60))
    assert stored(tmp_path / "c") == {"a-0-60": 60}
    assert one.store("s/b-0-40", bytes(40)) and not one.store("s/c-0-1", bytes(1))


def test_a_range_that_could_not_be_written_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    one, two = RangeCache(tmp_path / "c", 100), RangeCache(tmp_path / "c", 100)
    on_writing(monkeypatch, fail)
    assert not one.store("s/a-0-60", bytes(60)) and one.full
    assert stored(tmp_path / "c") == {}
    assert two.store("s/b-0-100", bytes(100))


def left_by_an_earlier_run(folder: Path) -> list[str]:
    """Three ranges of 30 bytes, the longest unused first; that order is neither of names nor of writing."""
    names = ["s/b-0-30", "s/c-0-30", "s/a-0-30"]
    earlier = RangeCache(folder, 100)
    for name in sorted(names):
        assert earlier.store(name, bytes(30))
    for place, name in enumerate(names):
        os.utime(folder / name, (time.time() - 100 + place,) * 2)
    return names


def test_what_was_unused_longest_gives_way_first(tmp_path: Path) -> None:
    names = left_by_an_earlier_run(tmp_path / "c")
    later = RangeCache(tmp_path / "c", 100)
    for place, name in enumerate(names):
        assert later.store(f"s/new{place}", bytes(30)) and not later.has(name)
        assert [later.has(other) for other in names[place + 1 :]] == [True] * (2 - place)
    assert not later.store("s/more", bytes(30)), "all that is left is of this run"


def test_what_this_run_reads_stays(tmp_path: Path) -> None:
    first, second, third = left_by_an_earlier_run(tmp_path / "c")
    later = RangeCache(tmp_path / "c", 100)
    assert later.read_into(first, memoryview(bytearray(30)))
    assert later.store("s/new", bytes(30))
    assert later.has(first) and not later.has(second) and later.has(third)


def test_half_written_ranges_of_dead_processes_go_and_others_stay(tmp_path: Path) -> None:
    left_by_an_earlier_run(tmp_path / "c")
    for name, age in (("dead", cache.DEAD_SECONDS + 60), ("alive", 300.0)):
        path = tmp_path / "c" / "s" / f"{cache.TEMPORARY}{name}"
        path.write_bytes(bytes(10))
        os.utime(path, (time.time() - age,) * 2)
    later = RangeCache(tmp_path / "c", 100)
    assert [name for name in stored(tmp_path / "c") if name.startswith(".")] == [".tmp-alive"]
    assert later.store("s/new", bytes(90)), "the other three give way"
    assert stored(tmp_path / "c") == {".tmp-alive": 10, "new": 90}


def test_half_written_ranges_that_die_meanwhile_make_room(tmp_path: Path) -> None:
    half = tmp_path / "c" / "s" / f"{cache.TEMPORARY}half"
    half.parent.mkdir(parents=True)
    half.write_bytes(bytes(60))
    rows = RangeCache(tmp_path / "c", 100)
    os.utime(half, (time.time() - cache.DEAD_SECONDS - 60,) * 2)
    assert rows.store("s/a-0-40", bytes(40)) and rows.store("s/b-0-60", bytes(60))
    assert not rows.store("s/c-0-1", bytes(1)) and stored(tmp_path / "c") == {"a-0-40": 40, "b-0-60": 60}
