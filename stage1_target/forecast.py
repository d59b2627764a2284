"""What an extract will cost, told before the target is loaded: samples, tokens, bytes, and whether they fit."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.stage1_target.samples import SampleTable
from dflash_train.store.creation import calibration_shapes
from dflash_train.store.encoding import AUTO_RANK, ENCODINGS, Encoding, is_projected, make_encoding, resolve_rank
from dflash_train.store.files import StoreError
from dflash_train.store.location import StoreLocation, StoreUrl
from dflash_train.store.reference import expected_bytes
from dflash_train.units import format_bytes

PERCENTILES = (50, 90, 99, 100)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Sizes of a data set and of its store."""

    num_samples: int
    num_tokens: int
    supervised_share: float
    """Share of the tokens that count in the loss."""
    length_percentiles: dict[int, int]
    """Percent → tokens of a sample; 100 is the longest."""
    num_rows: int
    num_duplicates: int
    num_truncated: int
    num_quarantined: int
    quarantine_reasons: dict[str, int]
    """Reason → rows, the commonest first."""
    counts_all_tokens: bool
    """Plain text, where the loss counts every token."""
    num_pending: int
    """Samples that are not stored yet."""
    num_pending_tokens: int
    padding_share: float
    """Share of the forward's tokens that will be padding."""
    encoding: str
    rank: int
    """Features a token of the projected encodings, of this store or of --rank auto."""
    bytes_per_token: dict[str, int]
    """By encoding."""
    needed_bytes: int
    """What the pending samples will take, reference samples included, and what of the target is kept if the store is new."""
    frozen_bytes: int
    """What of it embedding, head, tokenizer and calibration will take; 0 if the store is there."""
    free_bytes: int | None
    """None where the store is at a URL."""
    store: StoreLocation
    stored_bytes: int = 0
    """What the store holds already, where there is a limit."""
    limit_bytes: int | None = None
    """--max-store-size."""

    def lines(self) -> list[str]:
        """The forecast as text, one fact a line."""
        lengths = ", ".join(
            f"{'longest' if percent == 100 else f'{percent} %'} {tokens:,}"
            for percent, tokens in self.length_percentiles.items()
        )
        left_out = (
            f"{self.num_duplicates:,} duplicates, {self.num_quarantined:,} quarantined, {self.num_truncated:,} cut"
        )
        encodings = ", ".join(f"{name} {size:,}" for name, size in self.bytes_per_token.items())
        frozen = (
            f" ({format_bytes(self.frozen_bytes)} of it embedding, head and tokenizer)" if self.frozen_bytes else ""
        )
        free = f" of {format_bytes(self.free_bytes)} free" if self.free_bytes is not None else f" to {self.store}"
        space = f"{format_bytes(self.needed_bytes)}{frozen}{free}"
        pending = f"to store: {self.num_pending:,} samples, {self.num_pending_tokens:,} tokens, {space}"
        lines = [
            f"{self.num_samples:,} samples of {self.num_rows:,} rows ({left_out})",
            f"{self.num_tokens:,} tokens, {self.supervised_share:.1%} supervised; lengths: {lengths}",
            f"bytes per token: {encodings} (projected: rank {self.rank:,}); this store: {self.encoding}",
            f"{pending}; padding {self.padding_share:.1%}",
        ]
        if self.limit_bytes is not None and self.num_pending:
            lines.append(self._describe_limit(self.limit_bytes))
        if self.quarantine_reasons:
            reasons = ", ".join(f"{count:,} × {reason}" for reason, count in self.quarantine_reasons.items())
            lines.insert(1, f"quarantined: {reasons}")
        if self.counts_all_tokens:
            lines.insert(1, "plain text: the loss counts every token")
        return lines

    def _describe_limit(self, limit: int) -> str:
        whole = self.stored_bytes + self.needed_bytes
        if whole <= limit:
            return f"--max-store-size is {format_bytes(limit)}: the whole store fits, about {format_bytes(whole)}"
        return (
            f"--max-store-size is {format_bytes(limit)}, of about {format_bytes(whole)} that the whole store takes: it will "
            "pause when it is full, until a trainer with --follow --consume, or you, remove segments"
        )

    @property
    def store_bytes_per_token(self) -> int:
        """Of the store's encoding."""
        return self.bytes_per_token[self.encoding]

    def refuse_if_too_large(self, limit: int | None = None) -> None:
        """Raise StoreError if the free space does not suffice, for the whole store or one of at most `limit` bytes."""
        needed = min(self.needed_bytes, limit or self.needed_bytes)
        if self.free_bytes is None or needed <= self.free_bytes:
            return
        if not self.frozen_bytes:  # it exists, and keeps its encoding and its layers
            raise StoreError(f"{_describe_lack(self.store, needed, self.free_bytes)} Or choose fewer --max-samples.")
        smallest = min(self.bytes_per_token, key=lambda name: self.bytes_per_token[name])
        smaller = f"--encoding {smallest}, " if smallest != self.encoding else ""
        raise StoreError(
            f"The store needs {format_bytes(self.needed_bytes)} but {self.store} has {format_bytes(self.free_bytes)} free; "
            f"choose {smaller}fewer --target-layers, fewer --max-samples, or another disk."
        )


def sample_bytes(encoding: Encoding, num_samples: int, num_tokens: int) -> int:
    """About what samples take: their tokens, empty rows before some of them, and the reference samples."""
    padding_rows = num_samples * (encoding.align_tokens - 1) // 2
    return (num_tokens + padding_rows) * encoding.bytes_per_token + expected_bytes(num_tokens, encoding)


def frozen_bytes(encoding: Encoding, text_config: Any, table_bytes: int) -> int:
    """What embedding, head and calibration of a store take."""
    tables = 1 if getattr(text_config, "tie_word_embeddings", False) else 2
    calibration = 4 * sum(math.prod(shape) for shape in calibration_shapes(encoding).values())
    return tables * int(text_config.vocab_size) * int(text_config.hidden_size) * table_bytes + calibration


def free_bytes(store: Path) -> int:
    """What is free where a store is, or will be."""
    place = store.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def lacking_room(store: Path, needed: int) -> str | None:
    """How much the disk lacks for needed bytes, in one sentence; None where it suffices."""
    free = free_bytes(store)
    return None if needed <= free else _describe_lack(store, needed, free)


@contextmanager
def saying_what_lacks(lack: Callable[[], str | None]) -> Iterator[None]:
    """Add to a StoreError how much room the disk lacks for what is left, where it does: `lacking_room` of that."""
    try:
        yield
    except StoreError as error:
        sentence = lack()
        if sentence is None:
            raise
        raise StoreError(f"{error} {sentence}") from error


def _describe_lack(store: StoreLocation, needed: int, free: int) -> str:
    return (
        f"What is left takes {format_bytes(needed)}, but {store} has {format_bytes(free)} free: "
        f"{format_bytes(needed - free)} more are needed before the next run."
    )


def make_forecast(
    table: SampleTable,
    pending: NDArray[np.int64],
    padding_share: float,
    *,
    encoding: Encoding,
    text_config: Any,
    table_bytes: int,
    tokenizer_bytes: int,
    store: StoreLocation,
    store_exists: bool,
    stored_bytes: int = 0,
    limit_bytes: int | None = None,
) -> Forecast:
    """Forecast the store of `pending` samples of a table, for a target described by its text config.

    table_bytes: of one value of the frozen embedding and head, 2 or 4 with the dtype that the target is loaded in.
    tokenizer_bytes: of the tokenizer's files.
    """
    hidden_size = int(text_config.hidden_size)
    num_pending_tokens = int(table.lengths[pending].sum())
    frozen = 0 if store_exists else frozen_bytes(encoding, text_config, table_bytes) + tokenizer_bytes
    rank = encoding.rank or resolve_rank(AUTO_RANK, hidden_size)
    percentiles = np.percentile(table.lengths, PERCENTILES, method="nearest").astype(int)
    return Forecast(
        num_samples=len(table),
        num_tokens=int(table.lengths.sum()),
        supervised_share=float(table.supervised.sum() / table.lengths.sum()),
        length_percentiles=dict(zip(PERCENTILES, map(int, percentiles), strict=True)),
        num_rows=table.num_rows,
        num_duplicates=table.num_duplicates,
        num_truncated=table.num_truncated,
        num_quarantined=len(table.quarantined),
        quarantine_reasons=dict(Counter(str(entry["reason"]) for entry in table.quarantined).most_common()),
        counts_all_tokens=table.counts_all_tokens,
        num_pending=len(pending),
        num_pending_tokens=num_pending_tokens,
        padding_share=padding_share,
        encoding=encoding.name,
        rank=rank,
        bytes_per_token={
            name: make_encoding(
                name, encoding.num_layers, hidden_size, rank if is_projected(name) else None
            ).bytes_per_token
            for name in ENCODINGS
        },
        needed_bytes=sample_bytes(encoding, len(pending), num_pending_tokens) + frozen,
        frozen_bytes=frozen,
        free_bytes=None if isinstance(store, StoreUrl) else free_bytes(store),
        store=store,
        stored_bytes=stored_bytes,
        limit_bytes=limit_bytes,
    )
