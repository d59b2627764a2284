"""Several stores as one: training on data that lies in several places, without moving it.

Stores whose manifests agree (made with --calibration-from) hold features on one scale. `JoinedReader` is a `StoreReader`
over all of them: the samples of the first, then of the next, each id once; everything else is the first store's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.calibration import Calibration
from dflash_train.store.files import StoreError
from dflash_train.store.index import SegmentEntry
from dflash_train.store.location import StoreLocation
from dflash_train.store.opened import list_segments
from dflash_train.store.reader import Sample, StoreReader

if TYPE_CHECKING:
    import torch


def open_stores(
    paths: Sequence[StoreLocation], segments: Sequence[str] | None = None, direct_io: bool = False
) -> StoreReader:
    """A reader over one or several stores; raises StoreError naming every field in which their manifests differ.

    segments: those to read, in this order within each store; None takes all.
    """
    if len(paths) == 1:
        return StoreReader(paths[0], segments, direct_io=direct_io)
    return JoinedReader([path for path in paths if isinstance(path, Path)], segments, direct_io)


class JoinedReader(StoreReader):
    """Several stores; sample indices and segment numbers run on from one to the next. It does not grow."""

    def __init__(self, paths: Sequence[Path], segments: Sequence[str] | None, direct_io: bool) -> None:
        if len({path.resolve() for path in paths}) < len(paths):
            raise StoreError(f"--store names one store twice: {', '.join(map(str, paths))}. Name each once.")
        self._parts: list[StoreReader] = []
        left = list(segments or ())
        for path in paths:
            chosen = None
            if segments is not None:
                present = set(list_segments(path))
                chosen, left = (
                    [name for name in left if name in present],
                    [name for name in left if name not in present],
                )
            self._parts.append(StoreReader(path, chosen, direct_io=direct_io))
        first = self._parts[0]
        for part in self._parts[1:]:
            if differences := part.manifest.differences(first.manifest):
                raise StoreError(
                    f"{part.path} does not go with {first.path}: {'; '.join(differences)}. Make stores for one training "
                    "with the same target and --calibration-from."
                )
        if left:
            names = ", ".join(str(path) for path in paths)
            raise StoreError(f"{names} have no segment {left[0]}: it was removed, or the run began with other stores.")
        self.path, self.folder, self._remote = first.path, first.folder, None
        self.manifest, self.encoding = first.manifest, first.encoding
        self.channel_scale = first.channel_scale
        self.segment_ids = [name for part in self._parts for name in part.segment_ids]
        tables, number = [], 0
        for part in self._parts:
            table = part.samples.copy()
            table["segment"] += number
            number += len(part.segment_ids)
            tables.append(table)
        joined = np.concatenate(tables)
        origins = np.concatenate([np.full(len(table), part) for part, table in enumerate(tables)])
        places = np.concatenate([np.arange(len(table)) for table in tables])
        _, kept = np.unique(joined["id"], return_index=True)
        kept.sort()
        self.samples, self._origins, self._places = joined[kept], origins[kept], places[kept]
        self.num_duplicates = sum(part.num_duplicates for part in self._parts) + len(joined) - len(kept)

    @cached_property
    def calibration(self) -> Calibration:
        return self._parts[0].calibration

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    def refresh(self, segments: Sequence[str] | None = None) -> int:
        raise AssertionError("several stores do not grow")

    def entry(self, segment: str) -> SegmentEntry:
        return next(part for part in self._parts if segment in part.segment_ids).entry(segment)

    def quarantined(self) -> list[dict[str, Any]]:
        return [entry for part in self._parts for entry in part.quarantined()]

    def sources(self) -> list[dict[str, Any]]:
        return [source for part in self._parts for source in part.sources()]

    def read_into(
        self,
        index: int,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        features: NDArray[Any],
        scales: NDArray[np.float32] | None = None,
    ) -> None:
        part, place = self._parts[int(self._origins[index])], int(self._places[index])
        part.read_into(place, token_ids, loss_mask, features, scales)

    def read(self, index: int) -> Sample:
        return self._parts[int(self._origins[index])].read(int(self._places[index]))

    def frozen_embed_tokens(self) -> torch.Tensor:
        return self._parts[0].frozen_embed_tokens()

    def frozen_lm_head(self) -> torch.Tensor:
        return self._parts[0].frozen_lm_head()

    def target_config(self) -> dict[str, Any]:
        return self._parts[0].target_config()

    def tokenizer_path(self) -> Path:
        return self._parts[0].tokenizer_path()
