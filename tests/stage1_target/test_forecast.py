"""The forecast of a store's size, against the files."""

from pathlib import Path

import numpy as np
import pytest

from dflash_train.stage1_target.forecast import sample_bytes
from dflash_train.store.encoding import make_encoding
from dflash_train.store.reference import ONE_IN
from dflash_train.store.segment import SegmentWriter


@pytest.mark.parametrize(("name", "align_tokens"), [("bf16", 64), ("int8", 128), ("projected-int4", 64)])
def test_samples_take_what_is_forecast_empty_rows_included(tmp_path: Path, name: str, align_tokens: int) -> None:
    """Rows are narrow here, so that the empty ones before samples are a sixth of all."""
    encoding = make_encoding(name, 3, 4 if name != "projected-int4" else 8, 16 if "projected" in name else None)
    assert encoding.align_tokens == align_tokens
    lengths = np.random.default_rng(0).integers(align_tokens, 5 * align_tokens, 300)
    writer = SegmentWriter(tmp_path, encoding, {})
    for number, length in enumerate(lengths.tolist()):
        features = np.zeros((length, encoding.num_columns), encoding.storage_dtype)
        scales = np.zeros((length, encoding.num_scales), np.float32) if encoding.num_scales else None
        writer.append(number, 0, np.zeros(length, np.int32), np.ones(length, np.uint8), features, scales)
    segment = writer.commit()
    files = (tmp_path / "segments" / str(segment)).rglob("*")
    found = sum(path.stat().st_size for path in files if path.is_file() and "c" in path.parts)
    num_tokens = int(lengths.sum())
    assert sample_bytes(encoding, 300, num_tokens) == pytest.approx(found, rel=0.05)
    assert found > 1.1 * num_tokens * encoding.bytes_per_token


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_reference_samples_are_part_of_what_samples_take(name: str) -> None:
    encoding = make_encoding(name, 5, 4096)  # whose rows need no empty ones
    references = 0 if name == "bf16" else 10**6 // ONE_IN * 40_965
    assert sample_bytes(encoding, 10_000, 10**6) == 10**6 * encoding.bytes_per_token + references
