"""Reference samples: the states of one sample in 500, kept as tapped in bfloat16, so that what an encoding loses can be measured.

They lie in `reference/<id>/`, built like segments of a bf16 store, and are never training data: nothing that lists
samples looks there. An int8 or projected store cannot tell what it lost, and P cannot be fitted again from it; from
these states both can. Which samples are kept follows from their ids alone, so a resume and any number of workers choose
the same ones. Cost: at most 1/500 of bf16's bytes, 0.4 % of an int8 store and 2 to 4 % of a projected one at F = H, and
10 GB (`LIMIT_BYTES`): of larger data fewer samples are kept. A bf16 store needs none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.checksums import extend_crc
from dflash_train.store.encoding import Encoding, make_encoding
from dflash_train.store.files import Files, StoreError
from dflash_train.store.location import StoreLocation, StoreUrl
from dflash_train.store.manifest import format_id
from dflash_train.store.opened import Segment, SegmentFiles
from dflash_train.store.reader import Sample
from dflash_train.store.segment import REFERENCE, SegmentWriter, row_arrays

ONE_IN = 500
LIMIT_BYTES = 10_000_000_000


def reference_encoding(encoding: Encoding) -> Encoding:
    """How the reference samples of a store are stored: as tapped."""
    return make_encoding("bf16", encoding.num_layers, encoding.hidden_size)


def expected_bytes(num_tokens: int, encoding: Encoding) -> int:
    """About how many bytes the reference samples of so many tokens take."""
    reference = reference_encoding(encoding)
    return 0 if encoding == reference else min(LIMIT_BYTES, num_tokens * reference.bytes_per_token // ONE_IN)


def one_in(num_tokens: int, encoding: Encoding) -> int:
    """Of data of so many tokens, one sample in how many is kept: those whose id this divides; 0 where none are."""
    reference = reference_encoding(encoding)
    return 0 if encoding == reference else max(ONE_IN, num_tokens * reference.bytes_per_token // LIMIT_BYTES + 1)


class ReferenceWriter:
    """Keeps reference samples of the segments that one worker writes; they become visible with `commit`.

    Threads that each give their own name may share it.
    """

    def __init__(
        self,
        store: StoreLocation,
        encoding: Encoding,
        attributes: dict[str, Any],
        num_tokens: int,
        files: Files | None = None,
    ) -> None:
        """num_tokens is that of the whole data: where one sample in 500 would be over the limit, fewer are kept.

        At a URL none are kept.
        """
        self._store = store
        self._encoding = reference_encoding(encoding)
        self._attributes = attributes
        self._files = files
        self._segments: dict[str, SegmentWriter] = {}
        self._one_in = one_in(num_tokens, encoding)
        wanted = self._one_in and not isinstance(store, StoreUrl)
        self._room = LIMIT_BYTES - sum(map(_num_bytes, list_references(store))) if wanted else 0

    def keeps(self, sample_id: int) -> bool:
        """Whether this sample is one of them."""
        return self._room > 0 and sample_id % self._one_in == 0

    def append(
        self,
        sample_id: int,
        group: int,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        states: NDArray[np.int16],
        thread: str = "",
    ) -> None:
        """Write one sample: token_ids int32 [T], loss_mask uint8 [T], states [T, L * H] as bits of bfloat16."""
        assert isinstance(self._store, Path), "keeps says no for a URL"
        if thread not in self._segments:
            segment = SegmentWriter(self._store, self._encoding, self._attributes, self._files, REFERENCE)
            self._segments[thread] = segment
        self._segments[thread].append(sample_id, group, token_ids, loss_mask, states)
        self._room -= len(token_ids) * self._encoding.bytes_per_token

    def commit(self, thread: str = "") -> str | None:
        """Make what this thread appended durable and visible; return its id, None where there is nothing."""
        segment = self._segments.pop(thread, None)
        return None if segment is None else segment.commit()


def list_references(store: StoreLocation) -> list[Path]:
    """Return the folders of reference samples, oldest first; of a store at a URL, which keeps none, nothing."""
    if isinstance(store, StoreUrl):
        return []
    folder = store / REFERENCE
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def open_references(store: StoreLocation, encoding: Encoding) -> list[Segment]:
    """Open all reference samples of a store whose encoding is this; damage raises StoreError."""
    return [Segment(folder, reference_encoding(encoding)) for folder in list_references(store)]


def read_references(segments: list[Segment]) -> Iterator[Sample]:
    """Read each reference sample once, features uint16 [T, L * H]; damage raises StoreError.

    Of equal ids the first counts: a sample whose segment was removed without a record is stored, and kept, again.
    """
    seen: set[int] = set()
    for segment in segments:
        files = SegmentFiles(segment)
        files.check()
        for identity, group, first_row, length, _, crc32c in segment.samples.tolist():
            if identity in seen:
                continue
            seen.add(identity)
            rows = {name: files.new_rows(name, first_row, length) for name in row_arrays(segment.encoding)}
            crc = 0
            for array in rows.values():
                crc = extend_crc(crc, array)
            if crc != crc32c:
                raise StoreError(
                    f"Reference sample {format_id(identity)} in {segment.folder} is damaged: crc32c {crc:08x}, wanted "
                    f"{crc32c:08x}. Remove that folder: nothing is trained on it."
                )
            yield Sample(identity, group, rows["token_ids"], rows["loss_mask"], rows["features"], None)


def num_reference_bytes(segments: list[Segment]) -> int:
    """Bytes of all files that the checksums of these list."""
    return sum(checksum.size for segment in segments for checksum in segment.checksums.values())


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
