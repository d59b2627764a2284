"""The manifest: JSON, comparison, and what it says about stores it cannot read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dflash_train.store.manifest import Manifest, StoreError, format_id, hash_bytes, hash_id, hash_json
from dflash_train.store.reader import open_manifest


def test_manifest_survives_json(bf16: Any) -> None:
    manifest = bf16.manifest
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_unknown_attributes_are_ignored(bf16: Any) -> None:
    assert Manifest.from_json(bf16.manifest.to_json() | {"later": 1}) == bf16.manifest


def test_every_difference_is_named(bf16: Any) -> None:
    found = bf16.manifest
    wanted = dataclasses.replace(found, target_layer_ids=(1, 4), weights_fingerprint="f" * 16, logit_softcap=30.0)
    assert found.differences(wanted) == [
        "weights_fingerprint: found '1111111111111111', wanted 'ffffffffffffffff'",
        "target_layer_ids: found [1, 2, 3], wanted [1, 4]",
        "logit_softcap: found None, wanted 30.0",
    ]


def test_name_counts_only_where_weights_differ(bf16: Any) -> None:
    moved = dataclasses.replace(bf16.manifest, target_name="/elsewhere", target_revision=None)
    assert bf16.manifest.differences(moved) == []
    other = dataclasses.replace(moved, weights_fingerprint="f" * 16)
    assert [line.split(":")[0] for line in bf16.manifest.differences(other)] == [
        "target_name",
        "target_revision",
        "weights_fingerprint",
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, "'format' is 'other'"),
        ({"format_version": 2}, "format version 2 but this dflash-train reads up to 1. Install a newer"),
        ({"format_version": "1"}, "format_version is '1'"),
        ({"hidden_size": "8"}, "field 'hidden_size' is '8'"),
        ({"tied_embeddings": 1}, "field 'tied_embeddings' is 1"),
        ({"target_layer_ids": [1, "2"]}, "field 'target_layer_ids'"),
    ],
)
def test_bad_attributes_are_named(bf16: Any, change: Any, text: str) -> None:
    with pytest.raises(StoreError, match=text):
        Manifest.from_json(bf16.manifest.to_json() | change)


def test_missing_field_is_named(bf16: Any) -> None:
    attributes = bf16.manifest.to_json()
    del attributes["logit_scale"]
    with pytest.raises(StoreError, match="no field 'logit_scale'"):
        Manifest.from_json(attributes)


def test_paths_that_are_no_store_say_why(tmp_path: Path, bf16: Any) -> None:
    with pytest.raises(StoreError, match="is not there, but a store is a folder"):
        open_manifest(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is a file"):
        open_manifest(tmp_path / "file")
    with pytest.raises(StoreError, match="it has no zarr.json"):
        open_manifest(tmp_path)
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(StoreError, match="a zarr group but not a dflash-train store"):
        open_manifest(tmp_path)
    (tmp_path / "zarr.json").write_bytes(b"\xff{")
    with pytest.raises(StoreError, match="is no zarr metadata"):
        open_manifest(tmp_path)


def test_newer_store_is_refused_by_name(tmp_path: Path, bf16: Any) -> None:
    path = bf16.create(tmp_path / "new.zarr")
    metadata = json.loads((path / "zarr.json").read_text())
    metadata["attributes"]["format_version"] = 7
    (path / "zarr.json").write_text(json.dumps(metadata))
    with pytest.raises(StoreError, match=r"new\.zarr: The store has format version 7 but this .* up to 1"):
        open_manifest(path)


def test_hashes_have_16_digits_and_ids_63_bits() -> None:
    assert len(hash_bytes(b"x")) == 16 and hash_json({"a": 1, "b": 2}) == hash_json({"b": 2, "a": 1})
    ids = [hash_id(bytes([number])) for number in range(64)]
    assert all(0 <= identity < 2**63 for identity in ids) and len({*ids}) == 64
    assert format_id(0x1F) == "000000000000001f"
