"""crc32c of parts against the crc32c of the whole."""

from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from dflash_train.store.checksums import (
    COMBINE_BYTES,
    Checksum,
    SummedFile,
    combine_crc,
    format_checksums,
    parse_checksums,
)
from dflash_train.store.files import Files, StoreError


@pytest.mark.parametrize(("first", "second"), [(0, 0), (5, 0), (0, 7), (100, 3), (1000, 123_457), (1, 1 << 20)])
def test_combined_crc_is_that_of_the_whole(first: int, second: int) -> None:
    data = np.random.default_rng(first + second).integers(0, 256, first + second, np.uint8).tobytes()
    parts = google_crc32c.value(data[:first]), google_crc32c.value(data[first:])
    assert combine_crc(*parts, second) == google_crc32c.value(data)


def test_summed_file_knows_its_own_crc_and_that_of_each_part(tmp_path: Path) -> None:
    sizes = [7, COMBINE_BYTES - 1, COMBINE_BYTES, 3 * (1 << 20) + 5, 0, 100]
    parts = [np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes() for size in sizes]
    with SummedFile(Files(), tmp_path / "f") as file:
        assert [file.write_summed(part) for part in parts] == [google_crc32c.value(part) for part in parts]
        file.write(b"end")
    whole = b"".join([*parts, b"end"])
    assert (tmp_path / "f").read_bytes() == whole
    assert (file.checksum.size, file.checksum.crc32c) == (len(whole), google_crc32c.value(whole))


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "", "a//b", "./a", "a/"])
def test_names_that_lead_out_of_the_folder_are_refused(name: str) -> None:
    """A store at a URL is mirrored by these names."""
    text = format_checksums({"a/b": Checksum(1, 2), name: Checksum(1, 2)})
    with pytest.raises(StoreError, match=r"which is no file below its folder\. Do not use this store"):
        parse_checksums(text, "s3://bucket/s.zarr/checksums.json")
