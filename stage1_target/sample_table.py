"""The sample table on disk: one Arrow stream file, memory-mapped by the workers, and one JSON file that describes it.

Opening a table of a million samples maps the file and copies three integers a sample; it needs pyarrow alone and no import
of `datasets` or transformers (seconds). `datasets.Dataset.from_file` opens the Arrow file as well.
Legend: N samples, T tokens of a sample.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_train.store.manifest import hash_id

SAMPLES = "samples.arrow"
DESCRIPTION = "samples.json"
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "group": pa.int64(),
        "supervised": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
    }
)


def sample_id(token_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> int:
    """A sample's id, whatever it came from: a hash of its token ids and loss mask, both [T]."""
    return hash_id(token_ids.astype("<i4").tobytes() + loss_mask.tobytes())


def hash_tokens(token_ids: NDArray[np.int32]) -> int:
    """The group of a prompt that is known as token ids [T] alone."""
    return hash_id(token_ids.astype("<i4").tobytes())


def prompt_group(token_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8], identity: int) -> int:
    """The group of a sample without turns: the hash of what comes before its first supervised token, else its own id."""
    prompt = token_ids[: int(loss_mask.argmax())]
    return hash_tokens(prompt) if len(prompt) else identity


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """Samples of one data set, opened from its cache folder."""

    path: Path
    ids: NDArray[np.int64]
    groups: NDArray[np.int64]
    lengths: NDArray[np.int32]
    supervised: NDArray[np.int32]
    quarantined: list[dict[str, Any]]
    """One entry a lost sample: row (from 0), id as 16 hex digits or None, reason."""
    num_rows: int
    num_duplicates: int
    num_truncated: int
    counts_all_tokens: bool
    """Plain text: the loss counts every token, which the log has to say."""
    source: dict[str, Any]
    """What a segment records about its data."""
    _tokens: list[tuple[pa.ListArray, pa.ListArray]]
    _starts: NDArray[np.int64]  # first sample of each Arrow batch

    def __len__(self) -> int:
        return len(self.ids)

    def sample(self, index: int) -> tuple[int, int, NDArray[np.int32], NDArray[np.uint8]]:
        """(id, group, token_ids int32 [T], loss_mask uint8 [T]); the arrays are read-only views of the mapped file."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        token_ids, loss_mask = (column[index - int(self._starts[batch])].values for column in self._tokens[batch])
        return int(self.ids[index]), int(self.groups[index]), token_ids.to_numpy(), loss_mask.to_numpy()

    @classmethod
    def load(cls, path: Path) -> SampleTable:
        """Open a finished cache folder; also in a worker process."""
        described = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
        with pa.memory_map(str(path / SAMPLES)) as file, pa.ipc.open_stream(file) as reader:
            batches = list(reader)
        table = pa.Table.from_batches(batches, SCHEMA)
        columns = {name: table[name].to_numpy() for name in ("id", "group", "supervised")}
        lengths = [np.diff(batch["token_ids"].offsets.to_numpy()) for batch in batches]
        starts = np.cumsum([0, *(batch.num_rows for batch in batches)])[:-1]
        return cls(
            path=path,
            ids=columns["id"],
            groups=columns["group"],
            supervised=columns["supervised"],
            lengths=np.concatenate([np.empty(0, np.int32), *lengths]),
            _tokens=[(batch["token_ids"], batch["loss_mask"]) for batch in batches],
            _starts=starts.astype(np.int64),
            **described,
        )
