"""Hidden states in the layouts of speculators and SpecForge, made here without either, become a store that trains."""

import errno
import gzip
import io
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dflash_train.errors import InputError
from dflash_train.stage1_target import importing, preparation, worker
from dflash_train.stage1_target.extract_config import ExtractConfig
from dflash_train.stage1_target.foreign import Speculators
from dflash_train.stage1_target.forward import Forwarder
from dflash_train.stage1_target.import_config import ImportConfig, ImportResult
from dflash_train.stage1_target.importing import import_store
from dflash_train.stage1_target.samples import DataConfig
from dflash_train.stage1_target.target import Target, load_target
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.stage1_target.writer import StoreWriter
from dflash_train.store.consumed import remove_segments
from dflash_train.store.encoding import make_encoding
from dflash_train.store.files import Files
from dflash_train.store.manifest import StoreError
from dflash_train.store.opened import Segment
from dflash_train.store.reader import StoreReader
from dflash_train.store.report import store_report
from dflash_train.store.verify import verify_store

torch.set_num_threads(1)
LAYER_IDS = (1, 3)
LENGTHS = (7, 33, 100, 12, 50, 5, 64, 21)


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Path]) -> Target:
    return load_target(TargetConfig(name=str(tiny_target("qwen3")), dtype="bfloat16"), LAYER_IDS, "cpu")


def tokens_of(number: int, length: int) -> tuple[list[int], list[int]]:
    generator = np.random.default_rng(number)
    return generator.integers(4, 300, length).tolist(), [0] * (length // 3) + [1] * (length - length // 3)


def planes_of(target: Target, token_ids: Sequence[int], layer_ids: Sequence[int] = LAYER_IDS) -> torch.Tensor:
    """[T, L, H] of a sample, as a server of the target would give them."""
    tapped = replace(target, target_layer_ids=tuple(layer_ids))
    return tapped.hidden_states(torch.tensor([token_ids]))[0].view(len(token_ids), len(layer_ids), -1)


def write_speculators(folder: Path, target: Target, last: bool = True, lengths: Sequence[int] = LENGTHS) -> Path:
    rows = [tokens_of(number, length) for number, length in enumerate(lengths)]
    columns = {"input_ids": [row[0] for row in rows], "loss_mask": [row[1] for row in rows]}
    datasets.Dataset.from_dict({**columns, "seq_len": list(lengths)}).save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    for number, (token_ids, _) in enumerate(rows):
        states = planes_of(target, token_ids, (*LAYER_IDS, target.num_target_layers - 1) if last else LAYER_IDS)
        content = {"token_ids": torch.tensor(token_ids), "hidden_states": states.contiguous()}
        save_file(content, folder / "hidden_states" / f"hs_{number}.safetensors")
    return folder


def specforge_content(target: Target, number: int, length: int, padding: int = 0) -> dict[str, Any]:
    token_ids, loss_mask = tokens_of(number, length)
    token_ids, loss_mask = token_ids + [0] * padding, loss_mask + [0] * padding
    return {
        "input_ids": torch.tensor(token_ids),
        "loss_mask": torch.tensor(loss_mask),
        "hidden_state": torch.randn(1, len(token_ids), 32),
        "aux_hidden_state": planes_of(target, token_ids).flatten(1)[None].clone(),
    }


def write_specforge(folder: Path, target: Target, lengths: Sequence[int] = LENGTHS) -> Path:
    for number, length in enumerate(lengths):
        group = folder / f"rows_{number // 4 * 4}-{number // 4 * 4 + 4}"
        group.mkdir(parents=True, exist_ok=True)
        content = specforge_content(target, number, length, padding=5 if number == 2 else 0)
        if number == 3:  # captured for DFlash
            content = {
                "input_ids": content["input_ids"][None],
                "loss_mask": content["loss_mask"][None],
                "hidden_states": content["aux_hidden_state"],
                "target_last_hidden_states": content["hidden_state"],
            }
        if number == 4:
            packed = io.BytesIO()
            torch.save(content, packed)
            (group / f"data_{number}.ckpt.gz").write_bytes(gzip.compress(packed.getvalue()))
        else:
            torch.save(content, group / f"data_{number}.ckpt")
    return folder


@pytest.fixture
def config(target: Target, tmp_path: Path) -> ImportConfig:
    return ImportConfig(
        source=tmp_path / "source",
        store=tmp_path / "store",
        target=replace(target.config, dtype="auto"),
        layers=LAYER_IDS,
        encoding="bf16",
        segment_bytes=20_000,
    )


def contents(store: Path) -> dict[tuple[int, ...], tuple[list[int], Any]]:
    reader = StoreReader(store)
    assert reader.num_duplicates == 0 and verify_store(store).problems == []
    assert all(source["store"] == reader.manifest.origin for source in reader.sources()[-1:])
    samples = [reader.read(index) for index in range(len(reader.samples))]
    return {tuple(sample.token_ids.tolist()): (sample.loss_mask.tolist(), sample.features) for sample in samples}


def assert_imported(store: Path, target: Target, numbers: Sequence[int] = range(8)) -> None:
    found = contents(store)
    assert len(found) == len(numbers)
    for number in numbers:
        token_ids, loss_mask = tokens_of(number, LENGTHS[number])
        mask, features = found[tuple(token_ids)]
        assert mask == loss_mask
        wanted = planes_of(target, token_ids).flatten(1).view(torch.int16).numpy()
        np.testing.assert_array_equal(features.view(np.int16), wanted)


@pytest.mark.parametrize("last", [True, False])
def test_speculators_files_are_imported_without_the_last_plane(
    config: ImportConfig, target: Target, last: bool
) -> None:
    write_speculators(config.source, target, last)
    events: list[Any] = []
    result = import_store(replace(config, layers=(2, 4)), events.append)  # they count the embedding as 0
    assert result.num_new == 8 and result.lines()[-1].startswith("imported 8 of 8 files (292 tokens); 0 were stored")
    assert "the files hold decoder layers 1, 3: 2 samples differ by 0.00% at most" in events
    assert events[-1] == (8, 8)
    assert_imported(config.store, target)
    manifest = StoreReader(config.store).manifest
    assert manifest.target_layer_ids == LAYER_IDS and manifest.target_dtype == "bfloat16"
    assert len(StoreReader(config.store).segment_ids) > 1
    again = import_store(replace(config, layers=(2, 4)))
    assert again.lines() == ["nothing to do: all 8 files are stored or in quarantine (0)"]


def test_specforge_files_are_imported_and_their_padding_is_not(config: ImportConfig, target: Target) -> None:
    write_specforge(config.source, target)
    result = import_store(config)
    assert (result.num_new, result.num_padding) == (8, 5) and not result.reasons
    assert "cut off: 5 tokens of padding" in result.lines()
    assert_imported(config.store, target)
    assert import_store(config).num_stored == 8


def test_the_states_may_lie_elsewhere(config: ImportConfig, target: Target, tmp_path: Path) -> None:
    write_speculators(config.source, target)
    moved = (config.source / "hidden_states").rename(tmp_path / "states")
    with pytest.raises(InputError, match="holds no hs_….safetensors and no data_….ckpt"):
        import_store(replace(config, layers=(2, 4)))
    assert import_store(replace(config, layers=(2, 4), hidden_states=moved)).num_new == 8


@pytest.mark.parametrize(("layout", "layers", "right"), [("speculators", (1, 3), "2,4"), ("specforge", (0, 3), "1,3")])
def test_layers_counted_in_another_way_are_refused_and_the_right_ones_told(
    config: ImportConfig, target: Target, layout: str, layers: tuple[int, ...], right: str
) -> None:
    if layout == "speculators":
        write_speculators(config.source, target)
    else:
        write_specforge(config.source, target)
    wanted = rf"Plane 0 of .* is the output of decoder layer 1 \(difference 0.0%\), not of 0 .* is --layers {right}, as {layout}"
    with pytest.raises(InputError, match=wanted):
        import_store(replace(config, layers=layers))
    assert not config.store.exists()
    unchecked = import_store(replace(config, layers=layers, check_samples=0))
    assert unchecked.num_new == 8, "one may know better"


def test_states_of_another_target_are_refused(
    config: ImportConfig, target: Target, tiny_target: Callable[..., Path]
) -> None:
    write_specforge(config.source, target)
    other = replace(config.target, name=str(tiny_target("qwen3", seed=1)))
    with pytest.raises(InputError, match="are not those of .*: plane . differs by .*% from the most similar layer"):
        import_store(replace(config, target=other))
    assert not config.store.exists()


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ((2,), "None of 8 files of .* the commonest reason .* Check --layers"),
        ((4, 5), "is the last one"),
        ((0, 2), "-1,1"),
    ],
)
def test_layers_that_cannot_be_are_refused_before_the_target_is_loaded(
    config: ImportConfig, target: Target, layers: tuple[int, ...], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_speculators(config.source, target)
    (config.source / "hidden_states" / "hs_0.safetensors").rename(config.source / "hidden_states" / "hs_00.safetensors")
    monkeypatch.setattr(importing, "load_target", None)
    if layers == (2,):
        config = replace(config, layers=(2,), source=write_specforge(config.source.with_name("other"), target))
        with pytest.raises(InputError, match=match):
            import_store(replace(config, layers=(1, 2, 3)))
        return
    with pytest.raises(InputError, match=match):
        import_store(replace(config, layers=layers))


class Exploit:
    """A pickle that would run code."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("exploited",)


def spoil_specforge(folder: Path, target: Target) -> dict[int, str]:
    """Damage or replace six of eight files; the reason by number."""
    path = {int(file.name.split("_")[1].split(".")[0]): file for file in folder.rglob("data_*")}
    path[0].write_bytes(path[0].read_bytes()[:-200])
    torch.save({"input_ids": Exploit()}, path[1])
    nan = specforge_content(target, 2, 100)
    nan["aux_hidden_state"][0, 17, 40] = float("nan")
    torch.save(nan, path[2])
    torch.save({**specforge_content(target, 3, 12), "loss_mask": torch.zeros(12, dtype=torch.int64)}, path[3])
    path[4].write_bytes(path[4].read_bytes()[:300])
    torch.save({**specforge_content(target, 5, 5), "aux_hidden_state": torch.randn(1, 5, 32)}, path[5])
    return {
        0: "it cannot be read: RuntimeError: PytorchStreamReader failed",
        1: "it is damaged, or holds more than tensors, which could run code",
        2: "hidden state of layer 3 is not finite, or beyond 1e+10, at token 17 of 100",
        3: "no supervised tokens",
        4: "it cannot be read: EOFError: ",
        5: "its aux_hidden_state has shape [1, 5, 32], but tokens x 2 layers of 32 channels are wanted",
    }


def test_files_that_cannot_be_used_are_named_with_the_reason_and_tried_again_when_they_change(
    config: ImportConfig, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_specforge(config.source, target)
    reasons = spoil_specforge(config.source, target)
    result = import_store(config)
    assert not (tmp_path / "exploited").exists()
    assert (result.num_new, result.reasons.total()) == (2, 6)
    entries = {entry["row"]: entry for entry in StoreReader(config.store).quarantined()}
    assert entries.keys() == reasons.keys()
    for number, reason in reasons.items():
        assert entries[number]["reason"].startswith(reason), number
        assert entries[number]["file"].endswith(f"data_{number}.ckpt{'.gz' if number == 4 else ''}")
    assert_imported(config.store, target, [6, 7])
    assert import_store(config).lines() == ["nothing to do: all 8 files are stored or in quarantine (6)"]
    write_specforge(config.source, target)  # whole again
    mended = import_store(config)
    assert (mended.num_new, mended.num_stored, mended.num_known) == (6, 2, 0)
    assert_imported(config.store, target)


@pytest.mark.parametrize("value", [1e30, 2e10, float("inf")])
def test_absurd_states_are_quarantined_as_in_extract(config: ImportConfig, target: Target, value: float) -> None:
    """They would be stored, and their squares are beyond what a step of training can hold."""
    write_specforge(config.source, target)
    content = specforge_content(target, 6, 64)
    content["aux_hidden_state"][0, 9, 5] = value
    (path,) = config.source.rglob("data_6.ckpt")
    torch.save(content, path)
    result = import_store(replace(config, encoding="int8"))
    assert result.num_new == 7
    assert [entry["reason"] for entry in StoreReader(config.store).quarantined()] == [
        "hidden state of layer 1 is not finite, or beyond 1e+10, at token 9 of 64"
    ]


def test_token_ids_beyond_the_vocabulary_are_quarantined_and_not_checked(config: ImportConfig, target: Target) -> None:
    write_specforge(config.source, target)
    for number in (0, 1, 2, 5, 6, 7):
        (path,) = config.source.rglob(f"data_{number}.ckpt")
        content = specforge_content(target, number, LENGTHS[number])
        content["input_ids"][3] = 10**6
        torch.save(content, path)
    events: list[Any] = []
    result = import_store(config, events.append)
    assert "the files hold decoder layers 1, 3: 2 samples differ by 0.00% at most" in events
    [(reason, count)] = result.reasons.items()
    assert count == 6 and reason.startswith("token id 1000000 is beyond the target's vocabulary of ")
    assert_imported(config.store, target, [3, 4])


def write_unsound(config: ImportConfig, target: Target, num_sound: int, layer_ids: Sequence[int]) -> None:
    """103 files of the given layers, of which all but the last few in the order of reading are not finite."""
    config.source.mkdir()
    for place, number in enumerate(np.random.default_rng([config.seed, 2]).permutation(103).tolist()):
        content = specforge_content(target, number, 6)
        states = planes_of(target, content["input_ids"].tolist(), layer_ids).flatten(1)[None].clone()
        states[0, 0, 0] = float("nan") if place < 103 - num_sound else states[0, 0, 0]
        torch.save({**content, "aux_hidden_state": states}, config.source / f"data_{number}.ckpt")


def test_layers_are_checked_however_many_files_before_cannot_be_used(config: ImportConfig, target: Target) -> None:
    write_unsound(config, target, 3, (0, 2))
    with pytest.raises(InputError, match=r"Plane 0 of .* is the output of decoder layer 0 .* is --layers 0,2, as"):
        import_store(config)
    assert not config.store.exists()


@pytest.mark.parametrize("num_sound", [0, 1])
def test_a_check_of_fewer_samples_than_wanted_says_so(config: ImportConfig, target: Target, num_sound: int) -> None:
    write_unsound(config, target, num_sound, LAYER_IDS)
    events: list[Any] = []
    assert import_store(config, events.append).num_new == num_sound
    wanted = f"layers were checked on {num_sound} of 2 samples (--check-samples): no other file can be used"
    assert wanted in events
    assert any(str(event).startswith("the files hold decoder layers") for event in events) == (num_sound > 0)
    events.clear()
    write_specforge(config.source, target)
    import_store(replace(config, check_samples=0), events.append)
    assert not any("layers were checked" in str(event) for event in events)


def test_a_file_that_is_mended_after_a_check_of_nothing_is_not_stored(config: ImportConfig, target: Target) -> None:
    write_unsound(config, target, 0, LAYER_IDS)

    def mend(event: Any) -> None:
        if event == (0, 103):
            torch.save(specforge_content(target, 5, 6), config.source / "data_5.ckpt")

    with pytest.raises(InputError, match=r"data_5\.ckpt has changed since no file could be used to check the layers"):
        import_store(config, mend)
    assert len(StoreReader(config.store).samples) == 0
    assert import_store(config).num_new == 1


def test_a_pickle_of_another_protocol_is_left_out_without_torchs_warning(config: ImportConfig, target: Target) -> None:
    """torch warns of the protocol once a process, then refuses the file: only the latter says what was done."""
    write_specforge(config.source, target)
    (path,) = config.source.rglob("data_6.ckpt")
    torch.save(torch.load(path), path, pickle_protocol=4)
    result = import_store(config)  # warnings are errors here, and would be the reason
    assert result.num_new == 7
    assert list(result.reasons) == ["it is damaged, or holds more than tensors, which could run code"]


def test_a_file_that_is_a_link_to_nowhere_ends_no_import(config: ImportConfig, target: Target) -> None:
    write_specforge(config.source, target)
    link = next(config.source.rglob("data_0.ckpt*")).with_name("data_70.ckpt")
    link.symlink_to(config.source / "nowhere")
    result = import_store(config)
    [(reason, count)] = result.reasons.items()
    assert (result.num_new, count) == (8, 1) and reason.startswith("it cannot be read: FileNotFoundError")
    assert import_store(config).lines() == ["nothing to do: all 9 files are stored or in quarantine (1)"]


def test_speculators_files_that_do_not_fit_their_data_set_are_named(config: ImportConfig, target: Target) -> None:
    states = write_speculators(config.source, target) / "hidden_states"
    (states / "hs_1.safetensors").rename(states / "hs_8.safetensors")
    (states / "hs_2.safetensors").write_bytes((states / "hs_3.safetensors").read_bytes())
    (states / "hs_4.safetensors").write_bytes((states / "hs_4.safetensors").read_bytes()[:50])
    save_file({"token_ids": torch.tensor(tokens_of(5, 5)[0])}, states / "hs_5.safetensors")
    eight_bits = torch.zeros(64, 3, 32).to(torch.float8_e4m3fn)
    save_file(
        {"token_ids": torch.tensor(tokens_of(6, 64)[0]), "hidden_states": eight_bits}, states / "hs_6.safetensors"
    )
    result = import_store(replace(config, layers=(2, 4)))
    assert result.num_new == 3
    reasons = {entry["row"]: entry["reason"] for entry in StoreReader(config.store).quarantined()}
    assert reasons[8] == "the data set has no row 8, only 8"
    assert reasons[2] == "its token ids are not those of its row of the data set"
    assert reasons[4].startswith("it cannot be read: SafetensorError: ")
    assert reasons[5].startswith("it cannot be read: SafetensorError: ") and "hidden_states" in reasons[5]
    assert reasons[6] == "its states are torch.float8_e4m3fn; wanted bfloat16, float16 or float32"
    assert_imported(config.store, target, [0, 3, 7])


def save_rows(folder: Path, rows: dict[str, Any]) -> None:
    """Save the data set of a folder of speculators anew; the files of states stay as they are."""
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder))


def test_speculators_files_are_tried_again_when_their_rows_of_the_data_set_change(
    config: ImportConfig, target: Target
) -> None:
    whole = datasets.load_from_disk(str(write_speculators(config.source, target))).to_dict()
    rows = {name: list(values[:7]) for name, values in whole.items()}  # none for hs_7
    rows["loss_mask"][2] = [0] * LENGTHS[2]
    rows["input_ids"][4] = rows["input_ids"][4][::-1]
    path = config.source / "hidden_states" / "hs_5.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    save_rows(config.source, rows)
    config = replace(config, layers=(2, 4))
    assert import_store(config).num_new == 4
    reasons = {entry["row"]: entry["reason"] for entry in StoreReader(config.store).quarantined()}
    assert reasons[2] == "no supervised tokens"
    assert reasons[4] == "its token ids are not those of its row of the data set"
    assert reasons[7] == "the data set has no row 7, only 7"
    assert import_store(config).lines() == ["nothing to do: all 8 files are stored or in quarantine (4)"]
    save_rows(config.source, whole)
    mended = import_store(config)
    assert (mended.num_new, mended.num_stored, mended.num_known) == (3, 4, 1), "the file itself is still damaged"
    assert_imported(config.store, target, [0, 1, 2, 3, 4, 6, 7])


def test_quarantine_entries_without_a_row_of_the_data_set_are_known_as_before(
    config: ImportConfig, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_speculators(config.source, target)
    rows = datasets.load_from_disk(str(config.source)).to_dict()
    rows["loss_mask"][2] = [0] * LENGTHS[2]
    save_rows(config.source, rows)
    config = replace(config, layers=(2, 4))
    with monkeypatch.context() as patch:
        patch.setattr(Speculators, "row_version", lambda *_arguments: None)
        assert import_store(config).num_new == 7
    [entry] = StoreReader(config.store).quarantined()
    assert "data_row" not in entry
    assert import_store(config).lines() == ["nothing to do: all 8 files are stored or in quarantine (1)"]


def test_a_stop_and_a_failure_lose_nothing(config: ImportConfig, target: Target) -> None:
    write_specforge(config.source, target)
    config = replace(config, segment_bytes=1)

    def stop(event: Any) -> None:
        if isinstance(event, tuple) and event[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = import_store(config, stop)
    assert stopped.stopped and stopped.num_new == 3 and stopped.lines()[-1].endswith("; run again to go on")

    def fail(event: Any) -> None:
        if isinstance(event, tuple) and event[0] == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        import_store(replace(config, segment_bytes=10**9), fail)  # two samples are in the open segment
    assert len(contents(config.store)) == 3 and list((config.store / ".staging").iterdir())
    result = import_store(config)
    assert (result.num_new, result.num_stored) == (5, 3)
    assert_imported(config.store, target)
    assert not list((config.store / ".staging").iterdir())


def test_a_full_disk_says_how_much_is_missing_and_loses_nothing(
    config: ImportConfig, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_specforge(config.source, target)
    write, room = Files.write, 30_000

    def full(self: Files, descriptor: int, data: memoryview) -> int:
        nonlocal room
        if len(data) > room and (config.store / "segments").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        room -= len(data) if (config.store / "segments").exists() else 0
        return write(self, descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "write", full)
        patch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1024))
        wanted = r"the disk is full, .* What is left takes .* KiB, but .* has 1\.0 KiB free: .* KiB more are needed"
        with pytest.raises(StoreError, match=wanted):
            import_store(config)
    before = len(contents(config.store))
    assert before < 8 and import_store(config).num_new == 8 - before
    assert_imported(config.store, target)


class Killed(BaseException):
    """Nothing may clean up after it."""


class Dying:
    """Counts the calls that change the disk, and ends the process, as it were, at one of them and ever after."""

    def __init__(self, patch: pytest.MonkeyPatch, stop_at: int | None = None) -> None:
        self.num_calls, self._stop_at, self._lock = 0, stop_at, threading.Lock()
        self._descriptors: set[int] = set()
        open_file, close = Files.open, Files.close

        def opened(*arguments: Any) -> int:
            descriptor = open_file(*arguments)
            self._descriptors.add(descriptor)
            return descriptor

        def closed(files: Files, descriptor: int) -> None:
            self._descriptors.discard(descriptor)
            close(files, descriptor)

        patch.setattr(Files, "open", opened)
        patch.setattr(Files, "close", closed)
        for name in ("open", "write", "fsync", "make_directory", "sync_directory", "rename", "remove_tree"):
            patch.setattr(Files, name, self._counted(getattr(Files, name)))

    def _counted(self, original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with self._lock:
                if self._stop_at is not None and self.num_calls >= self._stop_at:
                    raise Killed
                self.num_calls += 1
            return original(*arguments)

        return call

    def close_files(self) -> None:
        """What the end of a process does with the files that it has open."""
        for descriptor in self._descriptors:
            os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize("is_new", [True, False])
def test_a_kill_at_any_call_loses_and_doubles_nothing(
    config: ImportConfig, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """Creation, two segments, a quarantined file and reference samples; or the same into a store that is there."""
    monkeypatch.setattr("dflash_train.store.reference.ONE_IN", 1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(importing, "load_target", lambda *_arguments: target)
    write_specforge(config.source, target, LENGTHS[:2])
    (config.source / "rows_0-4" / "data_2.ckpt").write_bytes(b"")
    config = replace(config, encoding="int8", segment_bytes=1, check_samples=0)
    wanted = {tuple(tokens_of(number, LENGTHS[number])[0]) for number in range(2)}
    base = tmp_path / "base"
    if not is_new:
        whole = import_store(replace(config, store=base))
        assert whole.num_new == 2
        for segment in [*(base / "segments").glob("2*"), *(base / "reference").glob("2*")]:
            shutil.rmtree(segment)

    def begin() -> ImportConfig:
        shutil.rmtree(config.store, ignore_errors=True)
        if not is_new:
            shutil.copytree(base, config.store)
        return config

    with monkeypatch.context() as patch:
        counted = Dying(patch)
        import_store(begin())
    assert counted.num_calls > (150 if is_new else 90)
    for stop_at in range(0, counted.num_calls, 7 if is_new else 1):  # test_crashes.py stops creation at every call
        begin()
        with monkeypatch.context() as patch:
            dying = Dying(patch, stop_at)
            with pytest.raises(Killed):
                import_store(config)
            dying.close_files()
        before: set[tuple[int, ...]] = set()
        if config.store.exists():
            before = set(contents(config.store))
        result = import_store(config)
        assert result.num_new == 2 - len(before), stop_at
        assert before <= wanted and set(contents(config.store)) == wanted, stop_at
        assert len(StoreReader(config.store).quarantined()) == 1
        assert verify_store(config.store).leftovers == [], stop_at


def test_a_store_of_extract_is_filled_up_and_nothing_is_stored_twice(
    config: ImportConfig, target: Target, tmp_path: Path
) -> None:
    rows = [tokens_of(number, LENGTHS[number]) for number in range(3)]
    data = tmp_path / "data.jsonl"
    lines = [f'{{"input_ids": {ids}, "loss_mask": {mask}}}\n' for ids, mask in rows]
    data.write_text("".join(lines))
    extracted = ExtractConfig(
        target=replace(config.target, dtype="bfloat16"),
        data=DataConfig(source=str(data)),
        store=config.store,
        devices="cpu",
        target_layer_ids=LAYER_IDS,
        encoding="int8",
        sample_cache=tmp_path / "cache",
    )
    prepared = preparation.prepare(extracted, lambda _event: None)
    encoding = make_encoding("int8", 2, 32)
    worker._create(prepared.config, target, encoding, prepared.table)
    forwarder = Forwarder(target, encoding, StoreReader(config.store).calibration, prepared.table, 500)
    writer = StoreWriter(prepared.config, encoding, prepared.table, {}, lambda _message: None)
    for part in forwarder.run(range(3)):
        writer.put(part)
    writer.close()
    write_specforge(config.source, target)
    result = import_store(replace(config, encoding="int8"))
    assert (result.num_stored, result.num_new) == (3, 5)
    assert len(contents(config.store)) == 8
    with pytest.raises(StoreError, match="encoding: found 'int8', wanted 'bf16'"):
        import_store(config)
    with pytest.raises(StoreError, match=r"target_layer_ids: found \[1, 3\], wanted \[1, 2\]"):
        import_store(replace(config, encoding="int8", layers=(1, 2)))


def test_samples_that_were_consumed_are_not_imported_again(config: ImportConfig, target: Target) -> None:
    write_specforge(config.source, target)
    assert import_store(config).num_new == 8
    folder = config.store / "segments" / StoreReader(config.store).segment_ids[0]
    segment = Segment(folder, make_encoding("bf16", 2, 32))
    remove_segments(config.store, {folder.name: (segment.samples, segment.quarantined)})
    assert len(StoreReader(config.store).samples) < 8
    assert import_store(config).lines() == ["nothing to do: all 8 files are stored or in quarantine (0)"]


def test_projected_stores_are_fitted_on_the_files_and_keep_references(
    config: ImportConfig, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_train.store.reference.ONE_IN", 2)
    write_specforge(config.source, target)
    config = replace(config, encoding="projected-int8", rank="16")
    assert import_store(config).num_new == 8
    report = store_report(config.store)
    assert report["manifest"]["rank"] == 16 and report["reference"]["samples"] >= 1
    assert all(0.3 < layer["reference_energy_kept"] < 1 for layer in report["features"])
    other = replace(config, store=tmp_path / "other", rank="auto", calibration_from=config.store)
    other = replace(other, seed=7, calibration_tokens=64)  # which would give another one
    assert import_store(other).num_new == 8
    assert StoreReader(other.store).manifest == StoreReader(config.store).manifest


@pytest.fixture
def loaded(config: ImportConfig, target: Target, monkeypatch: pytest.MonkeyPatch) -> ImportConfig:
    """An import that need not load the target, of files that are trusted."""
    monkeypatch.setattr(importing, "load_target", lambda *_arguments: target)
    write_specforge(config.source, target)
    return replace(config, check_samples=0)


def test_files_are_stored_in_an_order_of_the_seed(loaded: ImportConfig, tmp_path: Path) -> None:
    """So what is there after a stop is a fair sample, whatever the files are sorted by."""
    orders = []
    for number, seed in enumerate((0, 0, 1)):
        import_store(replace(loaded, store=tmp_path / f"{number}.zarr", seed=seed, segment_bytes=10**9))
        orders.append(StoreReader(tmp_path / f"{number}.zarr").samples["length"].tolist())
    assert orders[0] == orders[1] != orders[2]
    in_order = list(LENGTHS)
    assert in_order not in orders and all(sorted(order) == sorted(in_order) for order in orders)


def test_no_more_files_are_calibrated_on_than_tokens_are_asked_for(loaded: ImportConfig, tmp_path: Path) -> None:
    scales = []
    for number, tokens in enumerate((1, 100_000, 292)):
        import_store(replace(loaded, store=tmp_path / f"{number}.zarr", calibration_tokens=tokens))
        scales.append(StoreReader(tmp_path / f"{number}.zarr").channel_scale)
    assert not np.array_equal(scales[0], scales[1])
    np.testing.assert_array_equal(scales[1], scales[2], "all tokens there are")


def test_a_segment_is_committed_at_its_age(loaded: ImportConfig) -> None:
    import_store(replace(loaded, segment_bytes=10**9, segment_seconds=1e-9))
    assert len(StoreReader(loaded.store).segment_ids) == 8


def test_a_calibration_from_elsewhere_is_checked_before_the_target_is_loaded(
    loaded: ImportConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_store(loaded)
    other = replace(loaded, store=tmp_path / "other.zarr", seed=1, calibration_tokens=1)
    import_store(other)
    monkeypatch.setattr(importing, "load_target", None)
    new = replace(loaded, store=tmp_path / "new.zarr", calibration_from=loaded.store)
    with pytest.raises(StoreError, match=r"The calibration of .* is for layers \[1, 3\] of 32 channels"):
        import_store(replace(new, layers=(0, 3)))
    assert not new.store.exists()
    with pytest.raises(StoreError, match="calibration_hash: found '.*', wanted '"):
        import_store(replace(new, store=other.store))


def test_a_folder_without_files_and_a_wrong_setting_are_one_sentence(config: ImportConfig, target: Target) -> None:
    with pytest.raises(InputError, match="is not there, but a folder of states is wanted"):
        import_store(config)
    config.source.mkdir()
    with pytest.raises(InputError, match="holds no hs_….safetensors and no data_….ckpt"):
        import_store(config)
    with pytest.raises(InputError, match="holds no file of specforge"):
        import_store(replace(config, layout="specforge"))
    with pytest.raises(InputError, match="holds no prepared data set of speculators"):
        import_store(replace(config, layout="speculators"))
    write_specforge(config.source, target, lengths=[5])
    with pytest.raises(InputError, match="--hidden-states is for speculators"):
        import_store(replace(config, hidden_states=config.source))
    with pytest.raises(InputError, match="--check-samples is -1"):
        replace(config, check_samples=-1)
    with pytest.raises(InputError, match="--rank 3 is for the projected encodings"):
        replace(config, rank="3")
    assert ImportResult(num_files=3, num_stored=1).lines()[-1].startswith("nothing to do")


def test_an_imported_store_trains(config: ImportConfig, target: Target, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from dflash_train.cli import main

    write_speculators(config.source, target)
    name, store = target.config.name, str(config.store)
    words = f"import-store {config.source} --store {store} --target {name} --layers 2,4 --gpus cpu"
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 0, result.output
    assert "imported 8 of 8 files" in result.output and (tmp_path / "store.recipe.toml").exists()
    words = "train-drafter --gpus cpu --steps 1 --num-layers 1 --block-size 4 --row-tokens 128 --anchors 16 --holdout 0"
    words += f" --rows-per-step 1 --mask-token <|mask|> --store {store} --run {tmp_path / 'run'}"
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 0, result.output
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/model.safetensors"))
