"""Reads past the page cache equal buffered ones in every byte: straight, through the bounce buffer, and where refused."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_train.store import direct
from dflash_train.store.direct import DirectFile
from dflash_train.store.reader import StoreReader

DIRECT = getattr(os, "O_DIRECT", 0)


def aligned(shape: tuple[int, int], dtype: Any, shift: int = 0) -> Any:
    """An array whose memory begins `shift` bytes behind a page."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + 2 * 4096, np.uint8)
    start = -memory.ctypes.data % 4096 + shift
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


class Kernel:
    """os.open and os.preadv of a system with sectors of so many bytes, on any file system; counts direct reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sector: int, opens: bool = True) -> None:
        self.sector, self.opens, self.straight, self.refused = sector, opens, 0, 0
        self.direct: set[int] = set()
        self._open, self._preadv = os.open, os.preadv
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "preadv", self.preadv)

    def open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & DIRECT and not self.opens:
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = self._open(path, flags & ~DIRECT, *rest, **more)
        self.direct.discard(descriptor)
        if flags & DIRECT:
            self.direct.add(descriptor)
        return descriptor

    def preadv(self, descriptor: int, buffers: Any, offset: int) -> int:
        if descriptor in self.direct:
            address = np.frombuffer(buffers[0], np.uint8).ctypes.data
            if (address | offset | len(buffers[0])) % self.sector:
                self.refused += 1
                raise OSError(errno.EINVAL, "Invalid argument")
            self.straight += 1
        return self._preadv(descriptor, buffers, offset)


def read_all(path: Path, encoding: Any, shift: int = 0) -> StoreReader:
    """Read every sample directly into memory with this shift and compare it with the buffered read."""
    buffered, reader = StoreReader(path), StoreReader(path, direct_io=True)
    for index, entry in enumerate(reader.samples):
        wanted, length = buffered.read(index), int(entry["length"])
        features = aligned((length, encoding.num_columns), encoding.storage_dtype, shift)
        scales = None if wanted.scales is None else np.empty_like(wanted.scales)
        ids, mask = np.empty(length, np.int32), np.empty(length, np.uint8)
        reader.read_into(index, ids, mask, features, scales)
        np.testing.assert_array_equal(features, wanted.features)
        np.testing.assert_array_equal(ids, wanted.token_ids)
        np.testing.assert_array_equal(reader.read(index).features, wanted.features)
    return reader


@pytest.mark.parametrize("hidden_size", [8, 256])
@pytest.mark.parametrize("shift", [0, 64])
def test_direct_reads_equal_buffered_ones(
    with_: Any, tmp_path: Path, hidden_size: int, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the real file system, whatever it allows; 3 x 8 bf16 rows have 48 bytes, 2 x 256 have two sectors."""
    monkeypatch.setattr(direct, "BOUNCE_BYTES", 8192)
    maker = with_(num_layers=3 if hidden_size == 8 else 2, hidden_size=hidden_size)
    read_all(maker.store(tmp_path / "s.zarr"), maker.encoding, shift)


@pytest.mark.skipif(not DIRECT, reason="no O_DIRECT here")
@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize("encoding_name", ["bf16", "int8"])
def test_aligned_rows_go_straight_and_others_through_the_bounce_buffer(
    with_: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sector: int, encoding_name: str
) -> None:
    maker = with_(encoding_name=encoding_name, num_layers=2, hidden_size=256)
    path = maker.store(tmp_path / "s.zarr")
    kernel = Kernel(monkeypatch, sector)
    monkeypatch.setattr(direct, "BOUNCE_BYTES", 8192)
    reader = read_all(path, maker.encoding)
    assert kernel.straight > 0 and (kernel.refused == 0 if sector == 512 else kernel.refused > 0)
    bounces: list[int] = []
    bounce = direct._bounce

    def counted() -> memoryview:
        bounces.append(1)
        return bounce()

    monkeypatch.setattr(direct, "_bounce", counted)
    length = int(reader.samples["length"][6])
    ids, mask = np.empty(length, np.int32), np.empty(length, np.uint8)
    scales = np.empty((length, 2), np.float32) if encoding_name == "int8" else None
    for shift in (0, 64):
        fresh = StoreReader(path, direct_io=True)
        features = aligned((length, 512), maker.encoding.storage_dtype, shift)
        fresh.read_into(6, ids, mask, features, scales)
        assert bool(bounces) == (shift != 0 or sector == 4096)


@pytest.mark.skipif(not DIRECT, reason="no O_DIRECT here")
@pytest.mark.parametrize("opens", [False, True])
def test_file_systems_without_direct_reads_are_read_through_the_cache(
    maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    path = maker.store(tmp_path / "s.zarr")
    kernel = Kernel(monkeypatch, 1 << 40, opens)  # no alignment is enough
    read_all(path, maker.encoding)
    assert kernel.straight == 0


@pytest.mark.skipif(not DIRECT, reason="no O_DIRECT here")
def test_short_direct_reads_are_continued_and_the_end_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(1).integers(0, 256, 20_000, np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    kernel, preadv = Kernel(monkeypatch, 512), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:1024]], at))
    file = DirectFile(tmp_path / "f", straight=True)
    found = aligned((1, 20_000), np.uint8)[0]
    address, position = found.ctypes.data, 0
    while num_read := file.read(found.data[position:], address + position, position):
        position += num_read
    assert num_read is None and position == 19_968 and kernel.straight > 10  # the last bytes need the bounce buffer
    assert file.usable
    monkeypatch.setattr(os, "preadv", preadv)
    assert file.read(found.data[position:], address + position, position) == 32
    assert file.read(found.data[:8], address, 20_480) == 0
    np.testing.assert_array_equal(found, data)


@pytest.mark.skipif(not DIRECT, reason="no O_DIRECT here")
def test_no_more_pages_are_read_than_hold_what_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(bytes(range(250)) * 100)
    Kernel(monkeypatch, 512)
    preadv, sizes = os.preadv, []

    def noted(descriptor: int, buffers: Any, offset: int) -> int:
        sizes.append(len(buffers[0]))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    file, found = DirectFile(tmp_path / "f", straight=False), bytearray(4000)
    for length in (8, 4000):  # from 904 bytes behind a page
        assert file.read(memoryview(found)[:length], 0, 5000) == length
        assert found[:length] == (bytes(range(250)) * 16)[:length]
    assert sizes == [4096, 8192]


def test_direct_files_are_closed(bf16: Any, tmp_path: Path) -> None:
    path = bf16.store(tmp_path / "s.zarr")
    before = len(list(Path("/proc/self/fd").iterdir()))
    reader = StoreReader(path, direct_io=True)
    reader.read(0)
    del reader
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_bounce_buffer_is_within_its_bar() -> None:
    assert direct.BOUNCE_BYTES <= 8 << 20
