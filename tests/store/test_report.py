"""What inspect-store shows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dflash_train.errors import InputError
from dflash_train.store.encoding import unsound_state
from dflash_train.store.reader import StoreReader
from dflash_train.store.report import count_reasons, find_sample, format_report, sample_report, store_report
from dflash_train.store.segment import SegmentWriter


def test_report_counts_and_measures(maker: Any, tmp_path: Path) -> None:
    path = maker.store(tmp_path / "s.zarr")
    report = json.loads(json.dumps(store_report(path)))
    assert (report["segments"], report["samples"], report["tokens"]) == (3, 14, 2 * 711)
    assert report["length_percentiles"] == {"p0": 1, "p5": 1, "p25": 7, "p50": 32, "p75": 100, "p95": 507, "p100": 507}
    assert report["quarantined"] == {"no supervised tokens": 1}
    assert report["sources"] == [{"source": "test"}, {}]
    assert report["bytes_per_token"] == maker.encoding.bytes_per_token
    on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file.name != "checksums.json")
    assert report["size_bytes"] == on_disk
    reader = StoreReader(path)
    supervised = sum(int(reader.read(index).loss_mask.sum()) for index in range(14))
    assert report["supervised_share"] == pytest.approx(supervised / 1422)
    assert [layer["layer"] for layer in report["features"]] == [1, 2, 3]
    for layer in report["features"]:
        if reader.manifest.rank is None:
            assert layer["rms"] == pytest.approx(1, rel=0.1)  # the states are standard normal
            assert 3 < layer["absmax"] < 6
            assert layer["energy_kept"] == 1
        else:
            assert 0 < layer["energy_kept"] < 1


def test_reasons_of_quarantine_are_counted_by_kind_the_commonest_first(maker: Any, tmp_path: Path) -> None:
    path = maker.create(tmp_path / "s.zarr")
    writer = SegmentWriter(path, maker.encoding, {})
    reasons = ["token id 70000 is beyond the target's vocabulary of 65536", "no supervised tokens"]
    reasons += [unsound_state(layer, token, 400 + token) for layer, count in ((1, 2), (9, 3)) for token in range(count)]
    reasons += [
        f"{length} tokens do not fit into the device's memory, even alone" for length in (4096, 5000, 6000, 7000)
    ]
    for reason in reasons:
        writer.quarantine({"id": None, "row": None, "reason": reason})
    writer.commit()
    report = store_report(path)
    assert list(report["quarantined"].items()) == [
        ("… tokens do not fit into the device's memory, even alone", 4),
        ("hidden state of layer 9 is not finite, or beyond 1e+10, at token …", 3),
        ("hidden state of layer 1 is not finite, or beyond 1e+10, at token …", 2),
        ("token id … is beyond the target's vocabulary of 65536", 1),
        ("no supervised tokens", 1),
    ]
    console = Console(width=400, record=True)
    console.print(format_report(report))
    assert (
        "4 x … tokens do not fit into the device's memory, even alone, 3 x hidden state of layer 9"
        in console.export_text()
    )


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("it has states of 17 tokens but 18 token ids", "it has states of … token ids"),
        ("the data set has no row 12, only 11", "the data set has no row …, only 11"),
        ("its states have shape [17, 3], but tokens x 4 layers", "its states have shape […], but tokens x 4 layers"),
        ("no supervised tokens in the first 2048", "no supervised tokens in the first 2048"),
    ],
)
def test_what_is_of_one_file_alone_is_left_out(reason: str, kind: str) -> None:
    assert count_reasons([reason]) == {kind: 1}


def test_outliers_are_counted(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    writer = SegmentWriter(path, bf16.encoding, {})
    sample = bf16.sample(0, 32)
    states = np.ones((32, 24), np.float32) * bf16.channel_scale
    states[:, 9] *= 25  # one of 8 channels of the second layer
    states[:, 17] *= 15  # one of the third: less than 20 times the median
    bits = (states.view(np.uint32) >> 16).astype(np.uint16)
    writer.append(**(sample | {"features": bits}))
    writer.commit()
    shares = [layer["outlier_share"] for layer in store_report(path)["features"]]
    assert shares == [0, 1 / 8, 0]


def test_report_prints(maker: Any, tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    console.print(format_report(store_report(maker.store(tmp_path / "s.zarr"))))
    text = console.export_text()
    assert "D: channel scale" in text and "embedding and head in it" in text
    assert "org/target @ abc" in text and "1 x no supervised tokens" in text and "1, 2, 3 of 5" in text
    assert ("energy kept" in text and "rank 7" in text) == maker.encoding.is_projected


def test_empty_store_has_a_report(maker: Any, tmp_path: Path) -> None:
    report = store_report(maker.create(tmp_path / "s.zarr"))
    assert report["samples"] == 0 and report["features"] == [] and report["supervised_share"] == 0.0
    Console(quiet=True).print(format_report(report))


def test_sample_is_found_by_prefix(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    writer = SegmentWriter(path, bf16.encoding, {})
    ids = [0x0123456789ABCDEF, 0x0123FFFFFFFFFFFF, 0x7FFFFFFFFFFFFFFF]
    for number, identity in enumerate(ids):
        writer.append(**(bf16.sample(number, 7) | {"sample_id": identity}))
    writer.commit()
    reader = StoreReader(path)
    assert [find_sample(reader, prefix) for prefix in ("01234", "0123F", "7", "7FFFFFFFFFFFFFFF")] == [0, 1, 2, 2]
    report = sample_report(reader, "01234")
    assert report["id"] == "0123456789abcdef" and report["length"] == 7
    assert report["token_ids"] == bf16.sample(0, 7)["token_ids"].tolist()
    assert sum(report["loss_mask"]) == report["supervised"]
    with pytest.raises(InputError, match=r"2 samples of .* begin with 0123 \(0123456789abcdef, 0123ffffffffffff"):
        find_sample(reader, "0123")
    with pytest.raises(InputError, match="has no sample whose id begins with ffff.*; its first are 0123456789abcdef, "):
        find_sample(reader, "ffffffffffffffff")
    with pytest.raises(InputError, match="'xyz' is no sample id"):
        find_sample(reader, "xyz")
