"""docs/store-format.md is enough: a reader written from it alone, without this package or zarr, reads every sample."""

import json
import struct
from collections.abc import Iterator
from math import ceil, gcd
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from dflash_train.store.reader import StoreReader


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def check_listed(folder: Path) -> None:
    text = (folder / "checksums.json").read_text()
    content = json.loads(text)
    start = text.index('"files":') + len('"files":')
    assert google_crc32c.value(text[start:-1].encode()) == content["crc32c"]
    for name, entry in content["files"].items():
        data = (folder / name).read_bytes()
        assert (len(data), google_crc32c.value(data)) == (entry["size"], entry["crc32c"])


def read_store(path: Path) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (id, token_ids, loss_mask, D^-1 h float32) of every sample, as the document says."""
    manifest = read_json(path / "zarr.json")["attributes"]
    assert manifest["format"] == "dflash-train store" and manifest["format_version"] == 1
    num_layers, hidden_size = len(manifest["target_layer_ids"]), manifest["hidden_size"]
    encoding, num_features = manifest["encoding"], manifest["rank"] or num_layers * hidden_size
    projected = encoding.startswith("projected-")
    num_columns = (num_features + 1) // 2 if encoding == "projected-int4" else num_features
    num_scales = {"bf16": 0, "int8": num_layers}.get(encoding, 1)
    if projected:
        assert (path / "calibration/projection/c/0/0").stat().st_size == 4 * num_features * num_layers * hidden_size
        eigenvalues = np.fromfile(path / "calibration/eigenvalues/c/0", "<f4")
    channel_scale = np.fromfile(path / "calibration/channel_scale/c/0", "<f4")
    check_listed(path)
    seen = set()
    for folder in sorted(entry for entry in (path / "segments").iterdir() if entry.is_dir()):
        check_listed(folder)
        counts = read_json(folder / "zarr.json")["attributes"]
        if not counts["num_rows"]:
            continue
        row_bytes = num_columns * (2 if encoding == "bf16" else 1)
        assert counts["align_tokens"] == 512 // gcd(512, row_bytes)
        shard = (folder / "features/c/0/0").read_bytes()
        num_inner, inner_bytes = ceil(counts["num_rows"] / 32), 32 * row_bytes
        index = b"".join(struct.pack("<QQ", number * inner_bytes, inner_bytes) for number in range(num_inner))
        assert shard[num_inner * inner_bytes :] == index + struct.pack("<I", google_crc32c.value(index))
        files = {"features": (shard, row_bytes)}
        if num_scales:
            files["feature_scale"] = ((folder / "feature_scale/c/0/0").read_bytes(), 4 * num_scales)
        files["token_ids"] = ((folder / "token_ids/c/0").read_bytes(), 4)
        files["loss_mask"] = ((folder / "loss_mask/c/0").read_bytes(), 1)
        for identity, _, first, length, supervised, crc in np.fromfile(folder / "samples/c/0/0", "<i8").reshape(-1, 6):
            assert first % counts["align_tokens"] == 0
            rows = {name: data[first * size : (first + length) * size] for name, (data, size) in files.items()}
            assert google_crc32c.value(b"".join(rows.values())) == crc
            assert sum(rows["loss_mask"]) == supervised
            if identity in seen:
                continue
            seen.add(identity)
            if projected:
                stored = np.frombuffer(rows["features"], np.uint8).reshape(length, num_columns)
                if encoding == "projected-int4":
                    values = np.empty((length, 2 * num_columns), np.int8)
                    values[:, 0::2], values[:, 1::2] = stored & 15, stored >> 4
                    values[values > 7] -= 16
                    quantised = values[:, :num_features]
                else:
                    quantised = stored.view(np.int8)
                scales = np.frombuffer(rows["feature_scale"], "<f4").reshape(length, 1)
                decoded = quantised * scales * np.sqrt(eigenvalues)
            elif encoding == "bf16":
                bits = np.frombuffer(rows["features"], "<u2").astype(np.uint32) << 16
                decoded = bits.view(np.float32).reshape(length, num_features) / channel_scale
            else:
                layers = np.frombuffer(rows["features"], np.int8).reshape(length, num_layers, hidden_size)
                steps = np.frombuffer(rows["feature_scale"], "<f4").reshape(length, num_layers, 1)
                decoded = (layers * steps).reshape(length, num_features)
            yield (
                int(identity),
                np.frombuffer(rows["token_ids"], "<i4"),
                np.frombuffer(rows["loss_mask"], np.uint8),
                decoded,
            )


def test_reader_from_the_document_reads_every_sample(maker: Any, tmp_path: Path) -> None:
    import torch

    path = maker.store(tmp_path / "s.zarr")
    maker.add_segment(path, [3, 20])  # number 3 a second time
    reader, calibration = StoreReader(path), maker.calibration
    samples = list(read_store(path))
    assert [sample[0] for sample in samples] == reader.samples["id"].tolist() and len(samples) == 15
    for index, (_, token_ids, loss_mask, decoded) in enumerate(samples):
        ours = reader.read(index)
        np.testing.assert_array_equal(token_ids, ours.token_ids)
        np.testing.assert_array_equal(loss_mask, ours.loss_mask)
        bits = torch.from_numpy(ours.features.view(f"i{ours.features.itemsize}"))
        scales = None if ours.scales is None else torch.from_numpy(ours.scales)
        np.testing.assert_array_equal(decoded, maker.encoding.decode(bits, scales, calibration, torch.float32))
