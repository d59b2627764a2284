import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import zarr

from dflash_train.errors import InputError
from dflash_train.machine.devices import Device
from dflash_train.machine.launch import ProcessGroup, start_processes
from dflash_train.machine.torchrun import TorchrunPlace
from dflash_train.stage1_target import extract as extract_module
from dflash_train.stage1_target import messages, preparation, worker, writer
from dflash_train.stage1_target.extract import Event, ExtractConfig, Note, Progress, extract
from dflash_train.stage1_target.forecast import Forecast
from dflash_train.stage1_target.forward import NUM_BUFFERS, EncodedBatch, Forwarder
from dflash_train.stage1_target.host_buffers import HostBuffers
from dflash_train.stage1_target.overlap import Overlap
from dflash_train.stage1_target.recompute import recompute_samples
from dflash_train.stage1_target.samples import DataConfig, SampleTable
from dflash_train.stage1_target.supervisor import Supervisor
from dflash_train.stage1_target.target import Target, load_target
from dflash_train.stage1_target.target_config import TargetConfig, load_model_config, load_tokenizer
from dflash_train.stage1_target.weight_files import files_fingerprint
from dflash_train.stage1_target.writer import StoreWriter
from dflash_train.store.encoding import Encoding, make_encoding
from dflash_train.store.files import Files
from dflash_train.store.manifest import StoreError, format_id
from dflash_train.store.reader import StoreReader
from dflash_train.store.reference import ReferenceWriter, open_references, read_references
from dflash_train.store.report import store_report
from dflash_train.store.verify import verify_store

torch.set_num_threads(1)
NUM_SAMPLES = 120


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 short conversations, a duplicate, and two rows that cannot be used."""
    rng = np.random.default_rng(0)
    rows: list[Any] = [
        [
            {"role": "user", "content": f"Question {row}: " + "one two " * int(rng.integers(1, 20))},
            {"role": "assistant", "content": f"Answer {row}. " + "Paris " * int(rng.integers(1, 20))},
        ]
        for row in range(NUM_SAMPLES)
    ]
    rows += [rows[5], [{"role": "user", "content": "nobody answers"}], [{"role": "robot", "content": "beep"}]]
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def base_config(
    tiny_target: Callable[..., Path], conversations: Path, tmp_path_factory: pytest.TempPathFactory
) -> ExtractConfig:
    return ExtractConfig(
        target=TargetConfig(name=str(tiny_target("llama"))),
        data=DataConfig(source=str(conversations), max_tokens=200),
        store=Path("unset"),
        devices="cpu",
        encoding="bf16",
        num_taps=2,
        batch_tokens=150,
        segment_bytes=100_000,
        calibration_tokens=500,
        sample_cache=tmp_path_factory.mktemp("cache"),
    )


@pytest.fixture
def config(base_config: ExtractConfig, tmp_path: Path) -> ExtractConfig:
    return replace(base_config, store=tmp_path / "store")


@pytest.fixture(scope="module")
def full_store(base_config: ExtractConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole data set, stored by one worker."""
    store = tmp_path_factory.mktemp("full") / "store"
    events: list[Event] = []
    result = extract(replace(base_config, store=store), events.append)
    assert (result.outcome, result.exit_status) == ("finished", 0)
    assert result.message == "stored 120 of 120"
    assert result.num_new_samples == 120
    progress = [event for event in events if isinstance(event, Progress)][-1]
    assert (progress.num_samples, progress.num_committed) == (120, 120)
    (worker,) = progress.workers
    assert (worker.label, worker.state, worker.num_tokens) == ("CPU worker 0", "done", progress.num_tokens)
    assert progress.num_workers == 1 and progress.line().endswith("tokens/s on 1 worker")
    return store


def contents(store: Path) -> dict[int, tuple[Any, ...]]:
    """Everything stored, by sample id."""
    reader = StoreReader(store)
    assert reader.num_duplicates == 0
    samples = [reader.read(index) for index in range(len(reader.samples))]
    return {
        sample.id: (sample.group, sample.token_ids.tolist(), sample.loss_mask.tolist(), sample.features)
        for sample in samples
    }


def folder_of(config: ExtractConfig) -> Path:
    assert isinstance(config.store, Path)
    return config.store


def assert_whole(store: Path) -> None:
    report = verify_store(store)
    assert report.problems == [] and report.num_samples == NUM_SAMPLES
    reader = StoreReader(store)
    assert len(reader.samples) == NUM_SAMPLES and reader.num_duplicates == 0
    assert sorted(entry["row"] for entry in reader.quarantined()) == [121, 122], "each quarantined row once"


def test_one_and_three_workers_store_the_same(config: ExtractConfig, full_store: Path) -> None:
    assert_whole(full_store)
    result = extract(replace(config, devices="cpu:3"))
    assert (result.outcome, result.num_new_samples, result.num_stored) == ("finished", 120, 120)
    assert_whole(folder_of(config))
    ours, wanted = contents(folder_of(config)), contents(full_store)
    assert ours.keys() == wanted.keys()
    for identity, (*exact, features) in ours.items():
        assert exact == list(wanted[identity][:3])
        # bf16 rounds fp32 states that may differ in the last place with the batch: one unit of 2^-8 at most
        found, expected = (from_bf16(array) for array in (features, wanted[identity][3]))
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-5)
    assert StoreReader(full_store).manifest == StoreReader(config.store).manifest
    np.testing.assert_array_equal(StoreReader(full_store).channel_scale, StoreReader(config.store).channel_scale)


def from_bf16(features: Any) -> Any:
    return torch.from_numpy(features.view(np.int16)).view(torch.bfloat16).float().numpy()


def test_stored_states_are_those_of_the_target(config: ExtractConfig, full_store: Path) -> None:
    report = recompute_samples(full_store, config.target, 10)
    assert list(report.largest) == ["layer 1", "layer 2"] and report.num_tokens > 300
    assert max(report.largest.values()) < 2**-8 + 1e-4  # half a unit in the last of 8 bits of the largest value
    embed_tokens = zarr.open_array(full_store / "frozen/embed_tokens", mode="r")
    assert embed_tokens.shape[1] == 32


def test_the_worker_that_makes_the_store_checks_its_first_batch_once(full_store: Path) -> None:
    (log,) = full_store.with_name("store.logs").rglob("worker-*.log")
    assert log.read_text().count(" INFO Checked in ") == 1


def test_nothing_to_do_loads_no_target(
    config: ExtractConfig, full_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract_module, "start_processes", None)
    result = extract(replace(config, store=full_store))
    assert (result.outcome, result.exit_status) == ("nothing to do", 0)
    assert result.message == "nothing to do: all 120 samples are stored"


def test_the_time_of_tokenising_is_told_where_the_cache_is_cold(
    config: ExtractConfig, full_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract_module, "start_processes", None)
    notes: list[str] = []
    whole = replace(config, store=full_store, sample_cache=tmp_path / "cold")
    for _ in range(2):  # cold, then warm
        result = extract(whole, lambda event: notes.append(event.text) if isinstance(event, Note) else None)
        assert result.outcome == "nothing to do"
    [told] = [note for note in notes if note.startswith("tokenised")]
    assert re.fullmatch(rf"tokenised 123 rows in \d+ s; kept in {tmp_path / 'cold'} for the next start", told)


@pytest.mark.parametrize("dry_run", [False, True])
def test_nothing_to_do_refuses_another_targets_weights_without_loading_them(
    dry_run: bool,
    config: ExtractConfig,
    full_store: Path,
    tiny_target: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extract_module, "start_processes", None)
    other = replace(config.target, name=str(tiny_target("llama", seed=1)))
    with pytest.raises(StoreError, match="weights_fingerprint: found '.*', wanted ") as caught:
        extract(replace(config, store=full_store, target=other, dry_run=dry_run))
    assert "target_config_hash" not in str(caught.value)


def test_nothing_to_do_says_where_the_weights_were_not_compared(
    config: ExtractConfig, full_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract_module, "start_processes", None)
    for path in Path(config.target.name).iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    result = extract(replace(config, store=full_store, target=TargetConfig(name=str(tmp_path))))
    assert (result.outcome, result.exit_status) == ("nothing to do", 0)
    assert result.message == (
        "nothing to do: all 120 samples are stored; the weights were not compared (it has no safetensors file on this "
        f"machine), which `dflash inspect-store {full_store} --verify recompute --target {tmp_path}` does"
    )


def test_rank_0_alone_compares_the_weights_where_nothing_is_left(
    config: ExtractConfig, full_store: Path, tiny_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, compared, ends = torch.distributed.HashStore(), [], {}  # type: ignore[attr-defined,var-annotated]
    same, other = config.target, replace(config.target, name=str(tiny_target("llama", seed=1)))

    def count(*arguments: Any) -> str:
        compared.append(threading.current_thread().name)
        return files_fingerprint(*arguments)

    def run(rank: int, target: TargetConfig) -> None:
        place = TorchrunPlace(rank, 2, rank, 2)
        given = replace(config, store=full_store, target=target)
        try:
            ends[rank] = extract_module._extract_under_torchrun(
                given, [Device("CPU worker 0", "cpu")], place, print
            ).outcome
        except InputError as error:
            ends[rank] = str(error)

    monkeypatch.setattr(preparation, "files_fingerprint", count)
    monkeypatch.setattr(extract_module, "torchrun_store", lambda *_arguments: store)
    for target in (same, other):
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        threads = [threading.Thread(target=run, args=(rank, target), name=f"rank {rank}") for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if target is same:
            assert list(ends.values()) == ["nothing to do"] * 2
    assert compared == ["rank 0"] * 2
    assert "weights_fingerprint: found" in ends[0] and ends[1].startswith("Rank 0 has ended")


def test_a_store_that_is_extended_with_other_template_arguments_is_warned_of_once(
    config: ExtractConfig, conversations: Path, tmp_path: Path
) -> None:
    store, lines = tmp_path / "own", conversations.read_text().splitlines(keepends=True)
    files = []
    for number, part in enumerate((lines[:20], lines[20:30], lines[30:40])):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text("".join(part))

    def extended(number: int, dry_run: bool = False, **arguments: Any) -> list[str]:
        notes: list[Any] = []
        data = replace(config.data, source=str(files[number]), chat_template_arguments=arguments)
        assert extract(replace(config, store=store, data=data, dry_run=dry_run), notes.append).exit_status == 0
        return [note.text for note in notes if isinstance(note, Note) and "template" in note.text]

    assert extended(0) == []
    [text] = extended(1, enable_thinking=False)
    assert re.fullmatch(
        r"warning: segments of the store \((\d+) of \1\) were extracted with --chat-template-arguments '{}', this start has "
        r"'{\"enable_thinking\": false}': .* give the same, or another --store",
        text,
    )
    assert extended(1, enable_thinking=False) == [], "nothing is left to store"
    assert len(StoreReader(store).samples) == 30, "it is no error"
    [text] = extended(2, dry_run=True)
    assert """with --chat-template-arguments '{"enable_thinking": false}', this start has '{}'""" in text


def test_dry_run_forecasts_and_writes_nothing(config: ExtractConfig) -> None:
    events: list[Event] = []
    result = extract(replace(config, dry_run=True), events.append)
    assert result.outcome == "dry run"
    assert list(folder_of(config).parent.iterdir()) == []
    [forecast] = [event for event in events if isinstance(event, Forecast)]
    assert (forecast.num_samples, forecast.num_duplicates, forecast.num_quarantined) == (120, 1, 2)
    assert forecast.num_pending_tokens == forecast.num_tokens > 5000
    projected = {"projected-int8": 32 + 4 + 5, "projected-int4": 16 + 4 + 5}  # auto: the hidden size
    assert forecast.bytes_per_token == {"bf16": 2 * 32 * 2 + 5, "int8": 2 * 32 + 2 * 4 + 5, **projected}
    assert forecast.needed_bytes - forecast.frozen_bytes >= forecast.num_tokens * 133 and forecast.frozen_bytes > 0
    text = "\n".join(forecast.lines())
    assert (
        "120 samples of 123 rows (1 duplicates, 2 quarantined, 0 cut)" in text
        and "bf16 133, int8 77, projected-int8 41, projected-int4 25 (projected: rank 32); this store: bf16" in text
    )
    assert "of it embedding, head and tokenizer) of" in text
    assert "\nquarantined: " in text and sum(forecast.quarantine_reasons.values()) == 2


def test_the_forecast_of_a_new_store_counts_the_tokenizer(config: ExtractConfig, full_store: Path) -> None:
    """Embedding, head and calibration of a tiny target are less than its tokenizer: all that is frozen is counted."""
    forecast = extract(replace(config, dry_run=True)).forecast
    kept = [path for name in ("frozen", "calibration") for path in (full_store / name).rglob("*") if path.is_file()]
    tokenizer = sum(path.stat().st_size for path in kept if path.name in ("tokenizer.json", "tokenizer_config.json"))
    assert tokenizer > 10_000
    total = sum(path.stat().st_size for path in kept)
    metadata = sum(path.stat().st_size for path in kept if path.name in ("zarr.json", "config.json"))
    assert total - metadata - 1000 <= forecast.frozen_bytes <= total + 1000
    assert extract(replace(config, store=full_store)).forecast.frozen_bytes == 0


def test_a_target_without_a_mask_token_is_told_of_at_the_end_and_in_a_dry_run(
    config: ExtractConfig, full_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of train-drafter's refusal; of a target with a mask token, or with a free row, nothing is said."""

    def notes_of(config: ExtractConfig) -> list[str]:
        events: list[Event] = []
        extract(config, events.append)
        return [event.text for event in events if isinstance(event, Note) and "mask token" in event.text]

    whole, dry = replace(config, store=full_store), replace(config, dry_run=True)
    assert notes_of(whole) == notes_of(dry) == []
    tokenizer = load_tokenizer(config.target)
    tokenizer.mask_token = None
    monkeypatch.setattr(preparation, "load_tokenizer", lambda _config: tokenizer)
    rows = int(load_model_config(config.target).vocab_size)
    assert preparation._mask_token_note(tokenizer, rows + 1) is None, "a row is free"
    (note,) = notes_of(dry)
    assert note.startswith(f"the target's tokenizer has no mask token and uses all {rows:,} rows of the embedding: ")
    assert "train-drafter will want --mask-token, the id or text of a token that never occurs in the data, " in note
    assert "perhaps '<|mask|>'" in note
    assert notes_of(whole) == [note]


def test_a_store_that_does_not_fit_is_refused_before_any_work(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("usage", (), {"free": 100_000}))
    with pytest.raises(
        StoreError, match=r"needs .*MiB but .* has 97.7 KiB free; choose --encoding projected-int4, fewer"
    ):
        extract(config)
    assert not folder_of(config).exists()


def test_a_store_that_exists_and_does_not_fit_says_how_much_room_is_missing(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(config, data=replace(config.data, max_samples=4))
    assert extract(few).outcome == "finished"
    reader = StoreReader(folder_of(config))
    assert all(source["store"] == reader.manifest.origin for source in reader.sources()), "told apart when moved"
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("usage", (), {"free": 1000}))
    with pytest.raises(
        StoreError, match=r"has 1000 bytes free: .* more are needed .*\. Or choose fewer --max-samples\."
    ):
        extract(config)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_taps": 1}, r"target_layer_ids: found \[1, 2\], wanted \[2\]"),
        ({"target_layer_ids": (0, 3)}, r"target_layer_ids: found \[1, 2\], wanted \[0, 3\]"),
        ({"encoding": "int8"}, "encoding: found 'bf16', wanted 'int8'"),
        (
            {"encoding": "projected-int8"},
            "encoding: found 'bf16', wanted 'projected-int8'; rank: found None, wanted 32",
        ),
    ],
)
def test_each_difference_from_the_store_is_named(
    config: ExtractConfig, full_store: Path, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(StoreError, match=match):
        extract(replace(config, store=full_store, **change))


def test_another_tokenizer_template_and_config_are_named_together(
    config: ExtractConfig, full_store: Path, tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    for path in tiny_target("qwen3").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(StoreError, match="target_config_hash: .*chat_template_hash: ") as caught:
        extract(replace(config, store=full_store, target=TargetConfig(name=str(tmp_path))))
    assert "tokenizer_hash" not in str(caught.value)


def test_a_fine_tuned_target_is_refused_by_its_weights(
    config: ExtractConfig, full_store: Path, tiny_target: Callable[..., Path], conversations: Path, tmp_path: Path
) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text(conversations.read_text().replace("Question", "Query"))
    before = contents(full_store).keys()
    with pytest.raises(StoreError, match="weights_fingerprint: found '.*', wanted ") as caught:
        extract(
            replace(
                config,
                store=full_store,
                target=TargetConfig(name=str(tiny_target("llama", seed=1))),
                data=replace(config.data, source=str(more)),
                log_folder=tmp_path / "logs",
            )
        )
    assert "target_config_hash" not in str(caught.value)
    assert contents(full_store).keys() == before


def test_a_folder_that_is_no_store_is_refused(config: ExtractConfig) -> None:
    folder_of(config).mkdir()
    with pytest.raises(StoreError, match="is not a store"):
        extract(config)


def test_calibration_of_other_layers_or_of_no_store_is_refused_before_the_target_is_loaded(
    base_config: ExtractConfig, full_store: Path, tmp_path: Path
) -> None:
    config = replace(base_config, store=tmp_path / "new", target_layer_ids=(0, 2))
    for store, wanted in ((full_store, "The calibration of .* is for layers"), (tmp_path / "none", "is not there")):
        with pytest.raises(StoreError, match=wanted):
            preparation.prepare(replace(config, calibration_from=store), lambda _event: None)


def test_a_target_over_several_gpus_without_accelerate_is_refused(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="--gpus-per-target .* the package accelerate: pip install accelerate"):
        preparation.prepare(replace(config, gpus_per_target=2), lambda _event: None)


def test_wrong_settings_are_refused() -> None:
    parts: dict[str, Any] = {
        "target": TargetConfig(name="x"),
        "data": DataConfig(source="y"),
        "store": Path("z"),
    }
    with pytest.raises(InputError, match="--segment-seconds is nan, but must be more than 0"):
        ExtractConfig(**parts, segment_seconds=float("nan"))
    with pytest.raises(InputError, match="--seed is -1, but must be at least 0"):
        ExtractConfig(**parts, seed=-1)
    with pytest.raises(InputError, match="--batch-tokens is 0, but must be more than 0"):
        ExtractConfig(**parts, batch_tokens=0)
    with pytest.raises(InputError, match="Encoding 'fp4' is unknown"):
        ExtractConfig(**parts, encoding="fp4")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[ProcessGroup]:
    """The process groups that extract starts."""
    started: list[ProcessGroup] = []

    def start(*arguments: Any) -> ProcessGroup:
        started.append(start_processes(*arguments))
        return started[-1]

    monkeypatch.setattr(extract_module, "start_processes", start)
    return started


def test_a_killed_workers_samples_go_to_the_others(config: ExtractConfig, groups: list[ProcessGroup]) -> None:
    killed: list[int] = []
    notes: list[str] = []

    def kill_one(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
        if isinstance(event, Progress) and event.num_samples > event.num_committed and not killed:
            # one that has run a batch and so has the next: the one that made the store may have none yet
            position = next(i for i, each in enumerate(event.workers) if each.num_tokens)
            killed.append(groups[0].processes[position].pid)
            os.kill(killed[0], signal.SIGKILL)

    result = extract(replace(config, devices="cpu:2"), kill_one)
    assert killed and (result.outcome, result.exit_status) == ("finished", 1)
    assert result.message == "stored 120 of 120"
    [failure] = result.failures
    assert "was killed by SIGKILL" in failure and failure in notes
    assert "; its last lines: " in failure and " INFO " in failure, "what its log ends with"
    assert any("uncommitted samples go to the other workers" in note for note in notes)
    assert_whole(folder_of(config))
    assert list((folder_of(config) / ".staging").iterdir()) == []


def test_the_death_of_the_only_worker_ends_with_what_was_committed(
    config: ExtractConfig, groups: list[ProcessGroup]
) -> None:
    def kill_all(event: Event) -> None:
        if isinstance(event, Progress) and event.num_committed:
            for process in groups[0].running:
                os.kill(process.pid, signal.SIGKILL)

    result = extract(replace(config, segment_bytes=20_000), kill_all)
    assert (result.outcome, result.exit_status, len(result.failures)) == ("failed", 1, 1)
    stored = len(StoreReader(config.store).samples)
    assert 0 < result.num_new_samples <= stored == result.num_stored < NUM_SAMPLES
    assert result.message == f"stored {stored} of 120; run again to go on"


def test_a_stop_before_any_sample_says_so(config: ExtractConfig) -> None:
    notes: list[str] = []

    def stop(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
            if "measuring the channel scale on" in event.text:
                os.kill(os.getpid(), signal.SIGTERM)

    stopped = extract(config, stop)
    assert (stopped.outcome, stopped.num_stored) == ("stopped", 0)
    assert notes[-1] == "stopping: the store is created first, no sample has run; Ctrl-C once more to drop it"
    assert extract(config).outcome == "finished"


def test_a_stop_signal_commits_what_has_run(config: ExtractConfig) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Progress) and event.num_samples:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    stopped = extract(config, stop)
    assert signal.getsignal(signal.SIGTERM) is before
    assert (stopped.outcome, stopped.exit_status) == ("stopped", 0)
    assert 0 < stopped.num_stored == stopped.num_new_samples < NUM_SAMPLES
    assert stopped.message == f"stored {stopped.num_stored} of 120; run again to go on"
    assert len(StoreReader(config.store).samples) == stopped.num_stored


def test_the_command_ends_well_by_sigterm_and_says_how_to_go_on(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm or a terminal stops it: the sentence on stdout, status 0, and the same words finish the store."""
    from click.testing import CliRunner

    from dflash_train.cli import main
    from dflash_train.commands.display import ExtractView

    words = ["extract", "--target", config.target.name, "--data", config.data.source, "--store", str(config.store)]
    words += ["--gpus", "cpu", "--encoding", "bf16", "--num-taps", "2", "--batch-tokens", "150", "--max-tokens", "200"]
    words += ["--calibration-tokens", "500", "--sample-cache", str(config.sample_cache)]
    take = ExtractView.take

    def stop(self: ExtractView, event: Event) -> Any:
        if isinstance(event, Progress) and event.num_samples < NUM_SAMPLES:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, event)

    with monkeypatch.context() as patched:
        patched.setattr(ExtractView, "take", stop)
        stopped = CliRunner().invoke(main, words)
    stored = len(StoreReader(config.store).samples)
    assert stopped.exit_code == 0 and 0 < stored < NUM_SAMPLES, stopped.output
    assert f"\nstored {stored} of 120; run again to go on (" in stopped.output
    assert "stopping: what has run is committed first; Ctrl-C once more to drop it" in stopped.output
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 0 and "\nstored 120 of 120 (" in again.output, again.output


def test_a_killed_parent_loses_no_sample(config: ExtractConfig, tmp_path: Path) -> None:
    code = "import pickle, sys; from dflash_train.stage1_target.extract import extract; "
    code += "extract(pickle.load(open(sys.argv[1], 'rb')))"
    pickled = tmp_path / "config.pickle"
    pickled.write_bytes(pickle.dumps(replace(config, segment_bytes=50_000)))
    parent = subprocess.Popen([sys.executable, "-c", code, str(pickled)])
    segments = folder_of(config) / "segments"
    deadline = time.monotonic() + 60
    while not list(segments.glob("2*")) and time.monotonic() < deadline:
        assert parent.poll() is None
        time.sleep(0.005)
    parent.kill()
    parent.wait()
    while True:  # the worker dies with it; what it was writing stays behind
        before = len(list(segments.glob("2*")))
        time.sleep(0.3)
        if len(list(segments.glob("2*"))) == before:
            break
    stored = len(StoreReader(config.store).samples)
    assert 0 < stored < NUM_SAMPLES
    result = extract(replace(config, devices="cpu:2"))
    assert (result.outcome, result.exit_status, result.num_new_samples) == ("finished", 0, NUM_SAMPLES - stored)
    assert_whole(folder_of(config))
    assert list((folder_of(config) / ".staging").iterdir()) == []


LACK = r"What is left takes .* [KM]iB, but .* has 1\.0 KiB free: [0-9.]+ [KM]iB more are needed before the next run"


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1024))


def test_workers_that_die_on_a_full_disk_leave_how_much_is_missing_and_lose_nothing(
    config: ExtractConfig, groups: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    def fill_and_kill(event: Event) -> None:
        if isinstance(event, Progress) and event.num_samples and not killed:
            fill_disk(monkeypatch)
            killed.append(groups[0].processes[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    result = extract(config, fill_and_kill)
    assert (result.outcome, result.exit_status) == ("failed", 1)
    assert "was killed by SIGKILL" in result.failures[0] and re.match(LACK, result.failures[-1])
    monkeypatch.undo()
    assert extract(config).outcome == "finished"
    assert_whole(folder_of(config))


def test_a_worker_that_finds_the_disk_full_ends_the_extract_with_how_much_is_missing(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_self: Any) -> None:
        fill_disk(monkeypatch)
        raise StoreError("Writing x failed at 7 bytes: the disk is full.")

    monkeypatch.setattr(Supervisor, "run", run)
    with pytest.raises(StoreError, match=rf"^Writing x failed at 7 bytes: the disk is full\. {LACK}"):
        extract(config)


# What follows runs a worker's parts in this process.


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Path]) -> Target:
    return load_target(TargetConfig(name=str(tiny_target("llama"))), (1, 2), "cpu")


@pytest.fixture
def opened(
    config: ExtractConfig, target: Target, tmp_path: Path
) -> Iterator[tuple[ExtractConfig, SampleTable, Forwarder]]:
    """A new store, its samples and a forwarder."""
    prepared = preparation.prepare(config, lambda _event: None)
    encoding = make_encoding("bf16", 2, 32)
    worker._create(prepared.config, target, encoding, prepared.table)
    forwarder = Forwarder(target, encoding, StoreReader(config.store).calibration, prepared.table, config.batch_tokens)
    yield prepared.config, prepared.table, forwarder


def write(
    config: ExtractConfig, table: SampleTable, items: list[Any], seconds: float = 0.0
) -> tuple[list[messages.Committed], StoreReader]:
    committed: list[messages.Committed] = []
    store_writer = StoreWriter(config, make_encoding("bf16", 2, 32), table, {}, committed.append)
    for item in items:
        store_writer.put(item)
    time.sleep(seconds)
    count = len(committed)
    store_writer.close()
    if seconds:
        assert count
    return committed, StoreReader(config.store)


def test_states_that_are_not_finite_or_absurd_put_the_sample_into_quarantine(
    opened: tuple[ExtractConfig, SampleTable, Forwarder],
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, table, forwarder = opened
    run_taps = Target.run_taps

    def broken(self: Target, token_ids: torch.Tensor, tap: Callable[[int, torch.Tensor], None]) -> None:
        def broken_tap(layer: int, states: torch.Tensor) -> None:
            states = states.clone()
            states[1, 7 if layer else 9, 5] = float("nan" if layer else "inf")
            states[2, 4, 3] = 1e30 if layer else 1
            tap(layer, states)

        run_taps(self, token_ids, broken_tap)

    monkeypatch.setattr(Target, "run_taps", broken)
    batches = list(forwarder.run([0, 1, 2]))
    committed, reader = write(config, table, batches)
    assert reader.samples["id"].tolist() == [table.ids[0]]
    wanted = [
        {
            "id": format_id(int(table.ids[index])),
            "row": None,
            "reason": f"hidden state of layer 2 is not finite, or beyond 1e+10, at token {token} of {table.lengths[index]}",
        }
        for index, token in ((1, 7), (2, 4))
    ]
    assert reader.quarantined() == wanted
    assert [message.indices for message in committed] == [(0, 1, 2)]
    done = preparation.stored_indices(table, reader)
    assert np.flatnonzero(done).tolist() == [0, 1, 2], "a resume does not try it again"
    assert np.flatnonzero(preparation.stored_and_quarantined(table, reader)[1]).tolist() == [1, 2]


def test_the_result_tells_the_stored_from_the_quarantined(config: ExtractConfig, tmp_path: Path) -> None:
    """A damaged row of the embedding spoils the samples that have its token."""
    table = preparation.prepare(config, lambda _event: None).table
    in_samples = [set(table.sample(index)[2].tolist()) for index in range(len(table))]
    counts = Counter(token for tokens in in_samples for token in tokens)
    rare, count = min(counts.items(), key=lambda item: item[1])
    target = load_target(config.target, (1,), "cpu")
    target.model.config.tie_word_embeddings = False
    embedding = target.model.get_input_embeddings()
    target.model.lm_head.weight = torch.nn.Parameter(embedding.weight.detach().clone())
    with torch.no_grad():
        embedding.weight[rare] = float("nan")
    target.model.save_pretrained(tmp_path / "damaged")
    target.tokenizer.save_pretrained(tmp_path / "damaged")
    damaged = replace(config, target=TargetConfig(name=str(tmp_path / "damaged")))
    result = extract(damaged)
    assert 0 < count < 30 and (result.num_stored, result.num_quarantined, result.exit_status) == (120, count, 0)
    assert result.message == f"stored {120 - count} of 120, {count} are in quarantine"
    assert len(StoreReader(config.store).samples) == 120 - count


def test_out_of_memory_halves_the_token_budget_for_the_rest_of_the_run(
    opened: tuple[ExtractConfig, SampleTable, Forwarder], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, table, forwarder = opened
    run_taps = Target.run_taps
    shapes: list[tuple[int, ...]] = []
    longest = int(table.lengths[4:9].max())
    room = 2 * longest

    def small(self: Target, token_ids: torch.Tensor, tap: Any) -> None:
        shapes.append(tuple(token_ids.shape))
        if token_ids.numel() > room:
            raise torch.OutOfMemoryError
        run_taps(self, token_ids, tap)

    def run(indices: list[int]) -> list[EncodedBatch]:
        parts = list(forwarder.run(indices))
        assert all(isinstance(part, EncodedBatch) for part in parts)
        return cast(list[EncodedBatch], parts)

    [whole] = run([4, 5, 6, 7, 8])
    monkeypatch.setattr(Target, "run_taps", small)
    parts = run([4, 5, 6, 7, 8])
    assert shapes[0] == (5, longest) and [index for part in parts for index in part.indices] == [4, 5, 6, 7, 8]
    num_short = sum(rows * tokens > room for rows, tokens in shapes)
    assert 1 <= num_short <= 2, "5 longest samples, then 2.5 or 1.25 of them"
    assert torch.equal(whole.sound, torch.cat([part.sound for part in parts]))
    assert len(whole.features) == sum(len(part.features) for part in parts)
    shapes.clear()
    run([8, 7, 6, 5, 4])
    assert len(shapes) > 1 and all(rows * tokens <= room for rows, tokens in shapes), "no batch is too large again"


def test_a_sample_that_does_not_fit_alone_is_quarantined_and_many_of_them_end_the_run(
    opened: tuple[ExtractConfig, SampleTable, Forwarder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, table, forwarder = opened
    run_taps = Target.run_taps
    longest = int(table.lengths[:8].max())
    index = int(table.lengths[:8].argmax())

    def small(self: Target, token_ids: torch.Tensor, tap: Any) -> None:
        if token_ids.shape[1] >= longest:
            raise torch.OutOfMemoryError
        run_taps(self, token_ids, tap)

    monkeypatch.setattr(Target, "run_taps", small)
    _, reader = write(config, table, list(forwarder.run(range(8))))
    fitting = [int(table.ids[other]) for other in range(8) if table.lengths[other] < longest]
    assert sorted(reader.samples["id"].tolist()) == sorted(fitting) and len(fitting) == 7
    reason = f"{longest} tokens do not fit into the device's memory, even alone"
    assert reader.quarantined() == [{"id": format_id(int(table.ids[index])), "row": None, "reason": reason}]
    longest = 1
    with pytest.raises(InputError, match="8 samples one after the other, the last of [0-9]+ tokens, do not fit"):
        list(forwarder.run(range(20)))


def test_two_writer_threads_store_each_sample_once_and_commit_what_was_asked(
    opened: tuple[ExtractConfig, SampleTable, Forwarder],
) -> None:
    config, table, forwarder = opened
    committed: list[messages.Committed] = []
    store_writer = StoreWriter(config, make_encoding("bf16", 2, 32), table, {}, committed.append, num_threads=2)
    for index in range(40):
        for part in forwarder.run([index]):
            store_writer.put(part)
    store_writer.put(messages.Quarantine([{"id": None, "row": 7, "reason": "none"}]))
    store_writer.put(messages.Commit())
    deadline = time.monotonic() + 20
    while sum(len(message.indices) for message in committed) < 40 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(index for message in committed for index in message.indices) == list(range(40))
    for part in forwarder.run([40]):
        store_writer.put(part)
    store_writer.close()
    assert sorted(index for message in committed for index in message.indices) == list(range(41))
    assert sum(message.num_entries for message in committed) == 1
    reader = StoreReader(config.store)
    assert len(reader.samples) == 41 and reader.num_duplicates == 0
    assert reader.quarantined() == [{"id": None, "row": 7, "reason": "none"}]
    assert verify_store(config.store).problems == []


def test_a_batch_waits_while_two_are_waiting_to_be_written(
    opened: tuple[ExtractConfig, SampleTable, Forwarder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bounds the host memory of a worker whose disk is slow."""
    config, table, forwarder = opened
    written, free = threading.Event(), threading.Event()
    take = StoreWriter._take

    def slow(self: StoreWriter, *arguments: Any) -> None:
        written.set()
        assert free.wait(20)
        take(self, *arguments)

    monkeypatch.setattr(StoreWriter, "_take", slow)
    store_writer = StoreWriter(config, make_encoding("bf16", 2, 32), table, {}, lambda _message: None)
    first, *others = [part for index in range(2 + writer.WAITING_BATCHES) for part in forwarder.run([index])]
    store_writer.put(first)
    assert written.wait(20), "one is being written"
    for part in others[:-1]:
        store_writer.put(part)
    last = threading.Thread(target=store_writer.put, args=(others[-1],))
    last.start()
    last.join(0.2)
    assert last.is_alive(), "it waits"
    free.set()
    last.join(20)
    store_writer.close()
    assert len(StoreReader(config.store).samples) == 2 + writer.WAITING_BATCHES


def test_a_full_disk_is_one_sentence_and_commits_nothing(
    opened: tuple[ExtractConfig, SampleTable, Forwarder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, table, forwarder = opened
    write_bytes = Files.write
    room = 30_000

    def full(self: Files, descriptor: int, data: memoryview) -> int:
        nonlocal room
        if len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room -= len(data)
        return write_bytes(self, descriptor, data)

    batches = [part for index in range(40) for part in forwarder.run([index])]
    with monkeypatch.context() as patch:
        patch.setattr(Files, "write", full)
        with pytest.raises(StoreError, match="the disk is full"):
            write(config, table, batches)
    assert list((folder_of(config) / ".staging").iterdir()) == []
    assert len(StoreReader(config.store).samples) == 0
    _, reader = write(config, table, batches)  # after somebody made room
    assert sorted(reader.samples["id"].tolist()) == sorted(table.ids[:40].tolist())


def test_a_segment_is_committed_when_it_is_full_or_old(
    opened: tuple[ExtractConfig, SampleTable, Forwarder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, table, forwarder = opened
    batches = [part for index in range(6) for part in forwarder.run([index])]
    full, _ = write(replace(config, segment_bytes=1), table, batches[:3])
    assert [message.indices for message in full] == [(0,), (1,), (2,)]
    monkeypatch.setattr(writer, "POLL_SECONDS", 0.02)
    old, _ = write(replace(config, segment_seconds=0.05), table, batches[3:], seconds=0.4)
    assert sorted(index for message in old for index in message.indices) == [3, 4, 5]


class FakeEvent:
    """A CUDA event that has always happened already."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: "FakeEvent") -> float:
        return 1.0


def as_on_a_gpu(forwarder: Forwarder, encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a forwarder take the path of a GPU, with its streams and events replaced."""
    forwarder._copies = SimpleNamespace(wait_event=lambda _event: None)
    forwarder._buffers = HostBuffers(encoding, 3 * 200, NUM_BUFFERS, pinned=False)
    monkeypatch.setattr(forwarder, "_to_device", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())


def test_a_sample_is_called_too_long_only_with_nothing_else_on_the_device(
    config: ExtractConfig, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = preparation.prepare(replace(config, encoding="int8"), lambda _event: None)
    encoding = make_encoding("int8", 2, 32)
    worker._create(prepared.config, target, encoding, prepared.table)
    calibration = StoreReader(config.store).calibration
    forwarder = Forwarder(target, encoding, calibration, prepared.table, config.batch_tokens)
    as_on_a_gpu(forwarder, encoding, monkeypatch)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_device: None)
    [before] = forwarder.run([0, 1])
    assert isinstance(before, EncodedBatch) and before.on_device, "its copies are under way"
    run = forwarder._run

    def with_memory_for_one(indices: tuple[int, ...]) -> EncodedBatch:
        if before.on_device:
            raise torch.OutOfMemoryError
        return run(indices)

    monkeypatch.setattr(forwarder, "_run", with_memory_for_one)
    [part] = forwarder.run([2])
    assert isinstance(part, EncodedBatch) and part.indices == (2,)
    before.wait(Overlap())


@pytest.mark.parametrize("name", ["bf16", "int8", "projected-int8"])
def test_batches_through_reused_buffers_and_two_threads_are_stored_as_they_are(
    config: ExtractConfig, target: Target, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = preparation.prepare(replace(config, encoding=name), lambda _event: None)
    encoding = make_encoding(name, 2, 32, 32 if name.startswith("projected") else None)
    worker._create(prepared.config, target, encoding, prepared.table)
    calibration = StoreReader(config.store).calibration
    plain = Forwarder(target, encoding, calibration, prepared.table, config.batch_tokens)
    batches = [[3 * number, 3 * number + 1, 3 * number + 2] for number in range(20)]
    wanted = {batch[0]: list(plain.run(batch)) for batch in batches}
    overlap = Overlap()
    forwarder = Forwarder(target, encoding, calibration, prepared.table, config.batch_tokens, overlap)
    as_on_a_gpu(forwarder, encoding, monkeypatch)
    committed: list[messages.Committed] = []
    store_writer = StoreWriter(prepared.config, encoding, prepared.table, {}, committed.append, 2, overlap)
    for batch in batches:
        for part in forwarder.run(batch):
            assert isinstance(part, EncodedBatch) and part.is_copied
            part.wait(overlap)
            [other] = wanted[batch[0]]
            assert isinstance(other, EncodedBatch) and torch.equal(part.features, other.features)
            assert (part.scales is None) == (other.scales is None) and torch.equal(part.sound, other.sound)
            assert not part.on_device
            store_writer.put(part)
    store_writer.close()
    assert forwarder._buffers is not None and forwarder._buffers._free.qsize() == NUM_BUFFERS, "every buffer came back"
    reader = StoreReader(config.store)
    assert sorted(index for message in committed for index in message.indices) == list(range(60))
    assert verify_store(config.store).problems == [] and len(reader.samples) == 60
    stored = {sample.id: sample for sample in (reader.read(index) for index in range(60))}
    for batch in batches:
        [other] = wanted[batch[0]]
        assert isinstance(other, EncodedBatch)
        features, start = other.features.numpy(), 0
        for index, length in zip(other.indices, other.lengths, strict=True):
            sample = stored[int(prepared.table.ids[index])]
            np.testing.assert_array_equal(sample.features.view(features.dtype), features[start : start + length])
            if sample.scales is not None and other.scales is not None:
                np.testing.assert_array_equal(sample.scales, other.scales.numpy()[start : start + length])
            start += length
    summary = overlap.summary()
    assert summary["gpu_busy"] > 0 and len(summary["writers_busy"]) == 2 and summary["written_gb"] >= 0


def test_a_segment_records_the_error_of_its_encoding_and_a_rise_of_it_is_warned_of(
    config: ExtractConfig, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = preparation.prepare(replace(config, encoding="int8", segment_bytes=1), lambda _event: None)
    encoding = make_encoding("int8", 2, 32)
    worker._create(prepared.config, target, encoding, prepared.table)
    calibration = StoreReader(config.store).calibration
    forwarder = Forwarder(target, encoding, calibration, prepared.table, config.batch_tokens)
    store_writer = StoreWriter(prepared.config, encoding, prepared.table, {"x": 1}, lambda _message: None)
    with caplog.at_level("INFO"):
        for index in range(3):
            for part in forwarder.run([index]):
                assert isinstance(part, EncodedBatch) and part.errors is not None
                part.errors *= 9 if index == 2 else 1
                store_writer.put(part)
        store_writer.close()
    errors = []
    assert isinstance(config.store, Path)
    for segment in StoreReader(config.store).segment_ids:
        attributes = json.loads((folder_of(config) / "segments" / segment / "zarr.json").read_text())["attributes"]
        assert attributes["source"] == {"x": 1}, "the same for all segments, which the index says once"
        assert len(attributes["relative_error"]) == 2
        errors.append(max(attributes["relative_error"]))
    assert 0.001 < errors[0] < 0.01 and errors[1] < 1.5 * errors[0] < errors[2]
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "The error of what is stored has risen from 0." in warnings[0]
    assert "samples, " in caplog.text and "tokens, relative error 0." in caplog.text


def test_encoded_batches_leave_out_the_padding(opened: tuple[ExtractConfig, SampleTable, Forwarder]) -> None:
    _, table, forwarder = opened
    [batch] = forwarder.run([3, 4])
    assert isinstance(batch, EncodedBatch) and batch.lengths == tuple(table.lengths[3:5])
    assert batch.features.shape == (table.lengths[3:5].sum(), 64) and bool(batch.sound.all())


def test_reference_samples_are_those_of_the_stored_ones_that_their_ids_choose(
    config: ExtractConfig, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_train.store.reference.ONE_IN", 4)
    config = replace(config, encoding="projected-int8", rank="0.5H")
    prepared = preparation.prepare(config, lambda _event: None)
    encoding, table = make_encoding("projected-int8", 2, 32, 16), prepared.table
    worker._create(prepared.config, target, encoding, table)
    forwarder = Forwarder(target, encoding, StoreReader(config.store).calibration, table, 10_000)
    reference = ReferenceWriter(config.store, encoding, {}, int(table.lengths.sum()))
    store_writer = StoreWriter(
        prepared.config, encoding, table, {}, lambda _message: None, num_threads=2, reference=reference
    )
    for part in forwarder.run(range(40)):
        assert isinstance(part, EncodedBatch)
        for index in part.indices:
            if index == 11:  # not finite, so not stored
                part.sound[sum(part.lengths[:11])] = False
        worker.add_reference(part, target, table, reference)
        store_writer.put(part)
    store_writer.close()
    wanted = {int(table.ids[index]) for index in range(40) if table.ids[index] % 4 == 0 and index != 11}
    samples = list(read_references(open_references(config.store, encoding)))
    assert {sample.id for sample in samples} == wanted and 3 < len(wanted) < 20
    for sample in samples:
        states = target.hidden_states(torch.from_numpy(sample.token_ids).long()[None])[0].bfloat16()
        np.testing.assert_array_equal(sample.features.view(np.int16), states.view(torch.int16).numpy())
    assert len(StoreReader(config.store).samples) == 39 and verify_store(config.store).problems == []
    report = store_report(config.store)
    assert report["reference"]["samples"] == len(wanted)
    for layer in report["features"]:  # measured on them, and on the calibration's tokens
        assert layer["reference_energy_kept"] == pytest.approx(layer["energy_kept"], abs=0.05)


def test_calibration_of_another_store_is_taken_over(config: ExtractConfig, target: Target, full_store: Path) -> None:
    prepared = preparation.prepare(replace(config, calibration_from=full_store), lambda _event: None)
    worker._create(prepared.config, target, make_encoding("int8", 2, 32), prepared.table)
    ours, other = StoreReader(config.store), StoreReader(full_store)
    assert ours.manifest.calibration_hash == other.manifest.calibration_hash
    wrong = load_target(config.target, (0, 3), "cpu")
    with pytest.raises(StoreError, match=r"is for layers \[1, 2\] of 32 channels, but the layers \[0, 3\]"):
        worker._create(prepared.config, wrong, make_encoding("int8", 2, 32), prepared.table)


def test_a_projected_store_keeps_the_rank_and_projection_that_it_began_with(
    config: ExtractConfig, target: Target, full_store: Path, tmp_path: Path
) -> None:
    config = replace(config, encoding="projected-int8", rank="0.7H")
    assert extract(config).outcome == "finished"
    assert_whole(folder_of(config))
    store = StoreReader(config.store)
    assert store.manifest.rank == store.encoding.num_features == 22
    calibration = store.calibration
    assert calibration.projection is not None and calibration.projection.shape == (22, 64)
    torch.testing.assert_close(calibration.projection @ calibration.projection.T, torch.eye(22), rtol=0, atol=1e-5)
    report = recompute_samples(config.store, config.target, 10)
    assert list(report.largest) == ["projection"] and 1e-3 < report.largest["projection"] < 1 / 254 + 1e-4
    kept = store_report(config.store)["features"]
    assert all(0.3 < layer["energy_kept"] < 1 for layer in kept)

    again = replace(
        config, rank="auto", encoding="projected-int4", store=tmp_path / "int4", calibration_from=config.store
    )
    prepared = preparation.prepare(again, lambda _event: None)
    assert (prepared.config.rank, prepared.forecast.rank) == ("22", 22)
    worker._create(prepared.config, target, make_encoding("projected-int4", 2, 32, 22), prepared.table)
    assert StoreReader(again.store).manifest.calibration_hash == store.manifest.calibration_hash
    assert extract(replace(config, rank="auto")).outcome == "nothing to do"
    with pytest.raises(StoreError, match="rank: found 22, wanted 32"):
        extract(replace(config, rank="H"))
    with pytest.raises(StoreError, match="has a projection of rank 22, but projected-int4 of rank 32 is to be stored"):
        extract(replace(again, rank="H", store=tmp_path / "other"))
    with pytest.raises(StoreError, match="has no projection, but projected-int8 of rank 32 is to be stored"):
        extract(replace(config, rank="H", store=tmp_path / "other", calibration_from=full_store))


def test_a_projection_from_a_drafter_is_made_once_and_checked_before_the_target_is_loaded(
    config: ExtractConfig, target: Target, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    drafter = tmp_path / "drafter"
    drafter.mkdir()
    fc = torch.randn(8, 64)
    save_file({"fc.weight": fc}, drafter / "model.safetensors")
    (drafter / "config.json").write_text(json.dumps({"dflash_config": {"target_layer_ids": [1, 2]}}))
    config = replace(config, encoding="projected-int8", rank="20", projection_from=drafter)
    prepared = preparation.prepare(config, lambda _event: None)
    worker._create(prepared.config, target, make_encoding("projected-int8", 2, 32, 20), prepared.table)
    calibration = StoreReader(config.store).calibration
    assert calibration.projection is not None
    wanted = fc * calibration.channel_scale
    torch.testing.assert_close(wanted @ calibration.projection.T @ calibration.projection, wanted, rtol=0, atol=1e-3)
    (drafter / "model.safetensors").unlink()
    preparation.prepare(config, lambda _event: None)  # the store has its projection
    with pytest.raises(InputError, match="The fc of the drafter .* cannot be read"):
        preparation.prepare(replace(config, store=tmp_path / "new"), lambda _event: None)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"projection_from": Path("d")}, "--projection-from d is for the projected encodings, but --encoding is bf16"),
        (
            {"projection_from": Path("d"), "calibration_from": Path("s"), "encoding": "projected-int8"},
            "--projection-from and --calibration-from both say where the projection comes from",
        ),
        ({"rank": "7"}, "--rank 7 is for the projected encodings, but --encoding is bf16"),
        ({"rank": "x", "encoding": "projected-int8"}, "--rank is 'x'. Give a number"),
    ],
)
def test_a_rank_is_checked_with_the_options(config: ExtractConfig, change: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        replace(config, **change)
