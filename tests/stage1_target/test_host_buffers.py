import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_train.stage1_target import host_buffers
from dflash_train.stage1_target.forward import Forwarder
from dflash_train.stage1_target.host_buffers import HostBuffers
from dflash_train.stage1_target.overlap import Overlap
from dflash_train.store.encoding import make_encoding


@pytest.mark.parametrize(
    ("name", "rank", "dtype", "columns", "groups"),
    [
        ("bf16", None, torch.int16, 21, 0),
        ("int8", None, torch.int8, 21, 3),
        ("projected-int8", 5, torch.int8, 5, 1),
        ("projected-int4", 5, torch.uint8, 3, 1),
    ],
)
def test_buffers_hold_what_the_encoding_makes_and_do_not_overlap(
    name: str, rank: int | None, dtype: torch.dtype, columns: int, groups: int
) -> None:
    buffers = HostBuffers(make_encoding(name, 3, 7, rank), 33, count=3, pinned=False)
    taken = [buffers.take() for _ in range(3)]
    for number, buffer in enumerate(taken):
        assert (buffer.features.dtype, buffer.features.shape) == (dtype, (33, columns))
        assert buffer.scales.shape == (33, groups) and buffer.sound.shape == (33, 3)
        assert buffer.errors.shape == (1, 3) and buffer.errors.dtype == torch.float32
        assert buffer.features.data_ptr() % 4096 == 0
        buffer.features.fill_(number + 1)
        buffer.scales.fill_(number + 1)
        buffer.sound.fill_(number == 1)
    for number, buffer in enumerate(taken):
        assert bool((buffer.features == number + 1).all()) and bool((buffer.scales == number + 1).all())
        assert bool(buffer.sound.all()) == (number == 1)
    assert buffers.num_bytes % 4096 == 0 and buffers.num_bytes >= sum(b.features.nbytes for b in taken)


def test_take_waits_until_a_buffer_is_given_back() -> None:
    buffers = HostBuffers(make_encoding("int8", 1, 8), 4, count=1, pinned=False)
    first = buffers.take()
    timer = threading.Timer(0.05, buffers.give_back, [first])
    timer.start()
    assert buffers.take() is first
    timer.join()


@pytest.mark.parametrize(
    ("batch_tokens", "num_tokens", "size"),
    [
        (1000, 4096, "2.2 MiB"),  # the longest sample
        (8192, 8192, "4.3 MiB"),
        (16_384, 14_096, "7.5 MiB"),  # all there are
    ],
)
def test_a_worker_prints_what_its_buffers_take_of_host_memory(
    batch_tokens: int,
    num_tokens: int,
    size: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a GPU, but for what CUDA does: 4 buffers of 128 int8 and two float32 scales a token, and two bools."""
    monkeypatch.setattr(host_buffers, "_register", lambda _owner, slab: slab)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: None)
    target: Any = SimpleNamespace(device=torch.device("cuda"))
    calibration: Any = SimpleNamespace(to=lambda _device: None)
    table: Any = SimpleNamespace(lengths=np.array([4096, *[100] * 100]))
    overlap = Overlap()
    with caplog.at_level("INFO"):
        Forwarder(target, make_encoding("int8", 2, 64), calibration, table, batch_tokens, overlap)
    line = f"Host memory for batches on their way to disk: 4 pinned buffers of {num_tokens} tokens, {size} in all."
    assert caplog.messages == [line]
    assert overlap.num_ring_bytes == pytest.approx(4 * num_tokens * (128 + 8 + 2), abs=4 * 4 * 4096)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_buffers_take_copies_and_can_be_made_again() -> None:
    for _ in range(3):
        buffers = HostBuffers(make_encoding("int8", 3, 576), 500, count=4, pinned=True)
        buffer = buffers.take()
        assert buffer.features.is_pinned() and buffer.scales.is_pinned() and buffer.sound.is_pinned()
        source = torch.randint(-127, 128, buffer.features.shape, dtype=torch.int8, device="cuda")
        buffer.features.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(buffer.features, source.cpu())
        del buffers, buffer
