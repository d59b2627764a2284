"""Reference samples: kept as tapped, never listed, checked like segments, and what a report says by them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from rich.console import Console

from dflash_train.store import reference
from dflash_train.store.files import Files
from dflash_train.store.manifest import StoreError
from dflash_train.store.reader import Sample, StoreReader
from dflash_train.store.reference import (
    ReferenceWriter,
    expected_bytes,
    list_references,
    open_references,
    read_references,
)
from dflash_train.store.report import format_report, reference_energy, store_report
from dflash_train.store.verify import verify_store, walk


def add_reference(
    maker: Any, path: Path, numbers: list[int], length: int = 33, files: Files | None = None
) -> str | None:
    """Commit reference samples: the states that the maker's samples of these numbers were encoded from."""
    writer = ReferenceWriter(path, maker.encoding, {"source": "test"}, 10**6, files)
    for number in numbers:
        sample = maker.sample(number, length)
        states = maker.states(number, length).bfloat16().view(torch.int16).numpy()
        writer.append(sample["sample_id"], sample["group"], sample["token_ids"], sample["loss_mask"], states)
    return writer.commit()


def read(path: Path, maker: Any) -> list[Any]:
    return list(read_references(open_references(path, maker.encoding)))


def test_reference_samples_are_kept_as_tapped_and_never_listed(maker: Any, tmp_path: Path) -> None:
    path = maker.store(tmp_path / "s.zarr")
    before = StoreReader(path).samples.tolist()
    add_reference(maker, path, [3, 20])
    add_reference(maker, path, [3, 5])  # once more, as after its segment was removed
    assert StoreReader(path).samples.tolist() == before
    samples = read(path, maker)
    assert [sample.id for sample in samples] == [1003, 1020, 1005]
    for sample in samples:
        wanted = maker.states(sample.id - 1000, 33).bfloat16().view(torch.int16).numpy()
        np.testing.assert_array_equal(sample.features.view(np.int16), wanted)
        assert len(sample.token_ids) == len(sample.loss_mask) == 33
    assert verify_store(path).problems == [] and verify_store(path).num_samples == 14
    group = zarr.open_group(path, mode="r")
    for folder in list_references(path):
        assert group[f"reference/{folder.name}/features"].attrs["dtype_view"] == "bfloat16"


def test_a_store_of_before_takes_reference_samples(maker: Any, tmp_path: Path) -> None:
    path = maker.create(tmp_path / "s.zarr")
    if maker.encoding_name == "bf16":  # its segments hold the states themselves
        assert not (path / "reference").exists() and not ReferenceWriter(path, maker.encoding, {}, 1).keeps(0)
    add_reference(maker, path, [1])
    assert len(read(path, maker)) == 1 and verify_store(path).problems == []


def test_one_sample_in_500_by_its_id_and_at_most_10_gb(
    with_: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = with_(encoding_name="int8")
    path = maker.create(tmp_path / "s.zarr")
    writer = ReferenceWriter(path, maker.encoding, {}, 1000)
    assert [number for number in range(1700) if writer.keeps(number)] == [0, 500, 1000, 1500]
    large = ReferenceWriter(path, maker.encoding, {}, 2000 * 10**10 // 53)  # 53 bytes a token: 2,000 times too much
    assert [number for number in range(4001) if large.keeps(number)] == [0, 2000, 4000]
    assert writer.commit() is None and list_references(path) == []
    assert [expected_bytes(tokens, maker.encoding) for tokens in (0, 1000, 10**15)] == [0, 106, 10**10]
    assert expected_bytes(1000, reference.reference_encoding(maker.encoding)) == 0
    monkeypatch.setattr(reference, "LIMIT_BYTES", 33 * 53)
    add_reference(maker, path, [0])
    assert not ReferenceWriter(path, maker.encoding, {}, 1).keeps(0), "the room is taken"


def test_every_flipped_byte_of_a_reference_is_reported_with_its_sample(with_: Any, quick_path: Path) -> None:
    maker = with_(encoding_name="projected-int8")
    path = maker.create(quick_path / "s.zarr")
    name = add_reference(maker, path, [1, 2])
    generator = np.random.default_rng(0)
    for file in sorted(walk(path / "reference")):
        data = file.read_bytes()
        for offset in {0, len(data) - 1, *generator.integers(0, len(data), 5).tolist()}:
            file.write_bytes(data[:offset] + bytes([data[offset] ^ 4]) + data[offset + 1 :])
            problems = verify_store(path).problems
            assert problems, f"{file} byte {offset}"
            inside = file.relative_to(path / "reference").parts
            assert problems[0].segment == (f"reference/{name}" if len(inside) > 1 else None)
        file.write_bytes(data)
    rows = path / "reference" / str(name) / "features/c/0/0"
    damaged = bytearray(rows.read_bytes())
    damaged[9] ^= 1
    rows.write_bytes(damaged)
    assert [problem.sample for problem in verify_store(path).problems] == [None, f"{1001:016x}"]
    with pytest.raises(StoreError, match=r"Reference sample 0{13}3e9 in .* is damaged: crc32c .* Remove that folder"):
        read(path, maker)


def test_the_report_measures_what_the_encoding_loses(maker: Any, tmp_path: Path) -> None:
    path = maker.store(tmp_path / "s.zarr")
    plain = store_report(path)
    assert plain["reference"] == {"samples": 0, "tokens": 0, "bytes": 0}
    assert all(layer["reference_energy_kept"] is None for layer in plain["features"])
    add_reference(maker, path, [3, 20, 5])
    report = json.loads(json.dumps(store_report(path)))
    assert (report["reference"]["samples"], report["reference"]["tokens"]) == (3, 99)
    assert report["size_bytes"] == plain["size_bytes"] + report["reference"]["bytes"]
    # the slow twin: every token of the draw, from the definition
    states = torch.cat([maker.states(number, 33).bfloat16().float() for number in (3, 20, 5)]).double()
    scaled = states / maker.calibration.channel_scale
    encoding = maker.encoding
    decoded = encoding.decode(*encoding.encode(states.float(), maker.calibration), maker.calibration, torch.float32)
    error = (scaled - encoding.scaled_states(decoded, maker.calibration)).view(-1, 3, 8)
    weights = 1 / scaled.square().mean(1)[:, None]
    lost = (error.square().sum(2) * weights).sum(0) / (scaled.view(-1, 3, 8).square().sum(2) * weights).sum(0)
    for layer, wanted in zip(report["features"], (1 - lost).tolist(), strict=True):
        limit = {"bf16": 1e-6, "int8": 1e-5}.get(maker.encoding_name, 0.03)  # a third of the drawn tokens is left out
        assert layer["reference_energy_kept"] == pytest.approx(wanted, abs=limit)
    console = Console(record=True, width=160)
    console.print(format_report(store_report(path)))
    text = console.export_text()
    assert "3 samples, 99 tokens as tapped in bfloat16" in text and "of reference" in text


def test_attention_sinks_do_not_count_in_what_the_encoding_keeps(with_: Any, tmp_path: Path) -> None:
    maker = with_(encoding_name="int8")
    reader = StoreReader(maker.create(tmp_path / "s.zarr"))

    def kept(states: torch.Tensor) -> list[float]:
        features = states.bfloat16().view(torch.int16).numpy().view(np.uint16)
        rows = np.zeros(len(states), np.int32), np.ones(len(states), np.uint8)
        found = reference_energy(reader, [Sample(1, 1, *rows, features, None)])
        assert found is not None
        return found

    def with_large(factor: float) -> torch.Tensor:
        states: torch.Tensor = maker.states(1, 32)
        states[5] = 0
        states[5, 3] = factor * 24**0.5  # in a single channel, so that the others round to nothing
        states[5, [11, 19]] = 0.01
        return states

    others = torch.cat([maker.states(1, 32)[:5], maker.states(1, 32)[6:]])
    assert kept(with_large(25.0)) == pytest.approx(kept(others), abs=1e-9)
    assert kept(with_large(15.0)) != pytest.approx(kept(others), abs=1e-9)
