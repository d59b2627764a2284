"""tensorstore, a zarr implementation of its own in C++, reads every array of a store as zarr-python does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from dflash_train.store.reader import StoreReader
from dflash_train.store.reference import ReferenceWriter
from dflash_train.store.segment import SEGMENTS, row_arrays


def read(tensorstore: Any, path: Path) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, "open": True}
    return tensorstore.open(spec, read=True).result()


@pytest.mark.filterwarnings("ignore:Object at .* is not recognized as a component of a Zarr hierarchy")
def test_tensorstore_reads_every_array(maker: Any, tmp_path: Path) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    path = maker.store(tmp_path / "s.zarr")
    if maker.encoding_name != "bf16":
        writer = ReferenceWriter(path, maker.encoding, {}, 1)
        sample = maker.sample(3, 33)
        states = np.arange(33 * 24, dtype=np.int16).reshape(33, 24)
        writer.append(sample["sample_id"], 0, sample["token_ids"], sample["loss_mask"], states)
        writer.commit()
    arrays = {
        name: node for name, node in zarr.open_group(path, mode="r").members(None) if isinstance(node, zarr.Array)
    }
    parents = {name.split("/")[0] for name in arrays}
    assert parents == {"calibration", "frozen", "segments"} | (
        {"reference"} if maker.encoding_name != "bf16" else set()
    )
    for name, array in arrays.items():
        found = read(tensorstore, path / name)
        assert found.shape == array.shape and found.dtype.numpy_dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found.read().result()), np.asarray(array[:]), err_msg=name)


def test_tensorstore_reads_the_rows_of_one_sample(maker: Any, tmp_path: Path) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    reader = StoreReader(maker.store(tmp_path / "s.zarr"))
    assert isinstance(reader.path, Path)
    for index in (0, 5, 13):
        sample, entry = reader.read(index), reader.samples[index]
        first, end = int(entry["first_row"]), int(entry["first_row"] + entry["length"])
        segment = reader.path / SEGMENTS / reader.segment_ids[int(entry["segment"])]
        named = {"features": sample.features, "feature_scale": sample.scales}
        named |= {"token_ids": sample.token_ids, "loss_mask": sample.loss_mask}
        for name in row_arrays(reader.encoding):
            rows = np.asarray(read(tensorstore, segment / name)[first:end].read().result())
            np.testing.assert_array_equal(rows, named[name])
        if reader.encoding.dtype_view:  # what the bits mean is an attribute, which any reader of JSON finds
            text = json.loads((segment / "features" / "zarr.json").read_text())
            assert text["attributes"]["dtype_view"] == reader.encoding.dtype_view
