"""A worker's body, run in this process: what it does, and in which order, before a batch is written."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target import messages, preparation, worker
from dflash_train.stage1_target.extract import ExtractConfig
from dflash_train.stage1_target.forward import EncodedBatch, Forwarder, Unfit
from dflash_train.stage1_target.preparation import Prepared
from dflash_train.stage1_target.samples import DataConfig
from dflash_train.stage1_target.self_check import SelfCheck
from dflash_train.stage1_target.target import load_target
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.stage1_target.writer import StoreWriter
from dflash_train.store.reader import StoreReader

torch.set_num_threads(1)


class Parent:
    """The parent's end of the pipe: what it will say, and what it was told."""

    def __init__(self, *commands: Any) -> None:
        self.commands = deque(commands)
        self.told: list[Any] = []

    def poll(self, _seconds: float = 0.0) -> bool:
        return bool(self.commands)

    def recv(self) -> Any:
        return self.commands.popleft()


@pytest.fixture
def prepared(tiny_target: Callable[..., Path], tmp_path: Path) -> Prepared:
    data = tmp_path / "rows.jsonl"
    rows = [
        [{"role": "user", "content": f"Question {row}"}, {"role": "assistant", "content": "Paris " * (row + 5)}]
        for row in range(12)
    ]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    config = ExtractConfig(
        target=TargetConfig(name=str(tiny_target("llama"))),
        data=DataConfig(source=str(data)),
        store=tmp_path / "store",
        devices="cpu",
        num_taps=2,
        batch_tokens=100,
        sample_cache=tmp_path / "cache",
    )
    return preparation.prepare(config, lambda _event: None)


def work(prepared: Prepared, *commands: Any, **changes: Any) -> Parent:
    parent: Any = Parent(*commands)
    config = replace(prepared.config, **changes)
    worker._work(parent, parent.told.append, config, prepared.table, "cpu", {})
    return parent  # type: ignore[no-any-return]


def batches(prepared: Prepared) -> list[messages.Run]:
    """Those of more than one sample: of one there is nothing to check."""
    runs = [messages.Run(number, batch.indices) for number, batch in enumerate(prepared.batches)]
    return [run for run in runs if len(run.indices) > 1]


def test_a_start_that_finds_a_store_checks_its_first_batch_and_writes_nothing_of_a_wrong_one(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, *others = batches(prepared)
    work(prepared, messages.Create(), first, messages.Finish())
    stored = len(StoreReader(prepared.config.store).samples)
    assert stored == len(first.indices)
    caplog.clear()
    with caplog.at_level("INFO"):
        work(prepared, messages.Go(), others[0], others[1], messages.Finish())
    assert caplog.text.count("Checked in ") == 1
    stored = len(StoreReader(prepared.config.store).samples)

    def differ(self: SelfCheck) -> None:
        raise InputError("The target's states depend on the batch")

    monkeypatch.setattr(SelfCheck, "stop_if_wrong", differ)  # as after an update of transformers
    with pytest.raises(InputError, match="depend on the batch"):
        work(prepared, messages.Go(), first, messages.Finish())
    assert len(StoreReader(prepared.config.store).samples) == stored


def test_the_target_is_compiled_in_the_main_thread_before_any_other_thread_and_then_checked(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = threading.active_count()
    compiled: list[tuple[bool, int, int, int]] = []

    def compile_layers(_target: Any, batch_tokens: int, max_tokens: int) -> int:
        in_main = threading.current_thread() is threading.main_thread()
        compiled.append((in_main, threading.active_count() - before, batch_tokens, max_tokens))
        caplog.clear()
        return 2

    monkeypatch.setattr(worker, "compile_layers", compile_layers)
    first, *_ = batches(prepared)
    with caplog.at_level("INFO"):
        parent = work(prepared, messages.Create(), first, messages.Finish(), compile_target=True)
    assert compiled == [(True, 0, 100, int(prepared.table.lengths.max()))]
    assert caplog.text.count("Checked in ") == 1, "once more, now that the layers are others"
    assert [type(each) for each in parent.told[:3]] == [messages.Loaded, messages.Created, messages.Ready]


def test_a_batch_that_is_still_copied_is_waited_for_after_the_next_one_has_begun(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, tuple[int, ...]]] = []
    run, wait, put = Forwarder.run, EncodedBatch.wait, StoreWriter.put

    def recorded_run(self: Forwarder, indices: tuple[int, ...]) -> Iterator[EncodedBatch | Unfit]:
        order.append(("forward", indices))  # with the first next()
        yield from run(self, indices)

    def recorded_wait(self: EncodedBatch, overlap: Any) -> None:
        order.append(("wait", self.indices))
        wait(self, overlap)

    def recorded_put(self: StoreWriter, item: Any) -> None:
        if isinstance(item, EncodedBatch):
            order.append(("put", item.indices))
        put(self, item)

    monkeypatch.setattr(Forwarder, "run", recorded_run)
    monkeypatch.setattr(EncodedBatch, "wait", recorded_wait)
    monkeypatch.setattr(StoreWriter, "put", recorded_put)
    monkeypatch.setattr(EncodedBatch, "is_copied", False)  # as on a GPU; a CPU has no copy to wait for
    runs = batches(prepared)[:3]
    work(prepared, messages.Create(), *runs, messages.Finish())
    one, two, three = (each.indices for each in runs)
    assert order == [
        ("forward", one),
        ("forward", two),
        ("wait", one),
        ("put", one),
        ("forward", three),
        ("wait", two),
        ("put", two),
        ("wait", three),
        ("put", three),
    ]


def test_the_target_is_loaded_over_its_gpus_and_what_it_lacks_is_told(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread: list[int] = []

    def load_with_eager_attention(config: TargetConfig, layer_ids: Any, device: str, num_devices: int) -> Any:
        spread.append(num_devices)
        target = load_target(config, layer_ids, device)
        target.model.set_attn_implementation("eager")
        return target

    monkeypatch.setattr(worker, "load_target", load_with_eager_attention)
    [loaded] = work(prepared, messages.Finish(), gpus_per_target=2).told
    assert [slow.name for slow in loaded.slow_paths] == ["attention"]
    assert spread == [2]
