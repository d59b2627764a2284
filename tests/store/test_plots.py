"""Pictures of a store: they are whole PNG files, nothing global changes, and the quantisation error is the true one."""

import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image

from dflash_train.errors import InputError
from dflash_train.store.files import StoreError
from dflash_train.store.plots import measure_rounding_error, plot_store
from dflash_train.store.reader import StoreReader
from dflash_train.store.report import draw_features
from dflash_train.store.segment import SegmentWriter

NAMES = ["lengths.png", "supervised.png", "features.png", "quantization.png"]


def test_four_pictures_are_drawn(with_: Any, tmp_path: Path) -> None:
    path = with_(encoding_name="int8").store(tmp_path / "s.zarr")
    drawn = plot_store(path, tmp_path / "new" / "pictures")
    assert [picture.name for picture in drawn] == NAMES
    for picture in drawn:
        with Image.open(picture) as image:
            image.load()
            assert image.width >= 800
            assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 10, "not blank"


def test_pictures_of_one_token_and_of_dead_channels(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    writer = SegmentWriter(path, bf16.encoding, {})
    sample = bf16.sample(0, 1)
    writer.append(**(sample | {"features": np.zeros_like(sample["features"])}))
    writer.commit()
    assert len(plot_store(path, tmp_path)) == 4


def test_a_long_tail_of_lengths_has_a_log_axis(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    bf16.add_segment(path, range(5), [3, 3, 4, 5, 900])
    assert len(plot_store(path, tmp_path)) == 4


def test_neither_pyplot_nor_its_state_is_touched(bf16: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bf16.store(tmp_path / "s.zarr")
    before = matplotlib.rcParams.copy()
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would raise
    plot_store(path, tmp_path)
    assert matplotlib.rcParams.copy() == before


def test_expected_error_of_int8_is_the_measured_one(with_: Any, tmp_path: Path) -> None:
    """The same states in both encodings: s / sqrt(12) of the int8 store against encoding the bf16 store's features."""
    errors = []
    for name in ("bf16", "int8"):
        maker = with_(encoding_name=name, hidden_size=64)
        reader = StoreReader(maker.store(tmp_path / f"{name}.zarr"))
        errors.append(measure_rounding_error(draw_features(reader, seed=0)))
    measured, expected = errors
    assert measured.by_channel.shape == (3, 64)
    np.testing.assert_allclose(expected.by_layer, measured.by_layer, rtol=0.03)
    assert np.quantile(np.abs(expected.by_channel / measured.by_channel - 1), 0.95) < 0.1


def test_a_channel_that_int8_loses_has_an_infinite_error(with_: Any, tmp_path: Path) -> None:
    maker = with_(encoding_name="int8")
    path = maker.create(tmp_path / "s.zarr")
    writer = SegmentWriter(path, maker.encoding, {})
    sample = maker.sample(0, 32)
    sample["features"][:, 3] = 0
    writer.append(**sample)
    writer.commit()
    error = measure_rounding_error(draw_features(StoreReader(path), seed=0))
    assert np.argwhere(np.isinf(error.by_channel)).tolist() == [[0, 3]]
    assert np.isfinite(error.by_layer).all()
    plot_store(path, tmp_path)


def test_stores_without_samples_are_refused(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    with pytest.raises(InputError, match="holds no samples, so there is nothing to draw"):
        plot_store(path, tmp_path / "pictures")
    with pytest.raises(StoreError, match="is not there"):
        plot_store(tmp_path / "nowhere", tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()
