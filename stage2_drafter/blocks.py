"""Anchors, noise blocks, their labels, and which keys a noise token may see.

The loader thread makes anchors and blocks with numpy, on the host, so that a row is a function of (seed, epoch, row)
alone; only the mask functions touch torch. Blocks are sorted by the packed position of their anchor, which costs
nothing and halves the tiles that flex_attention visits; dummies (start = anchor = 0) are last.

A row packs whole documents: `document_ids` is int32 [S], ascending from 0, negative on padding. Positions are counted
from the start of the document, as at serving time.

Shapes: S tokens of a row, A anchors, K block size (anchor included), Q = A · K noise tokens.
Source: DFlash, arXiv 2602.06036, section 4.2; candidates follow SpecForge since its pull request 731.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

Array = npt.NDArray[Any]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

TILE = 128
"""Rows and columns of a flex_attention tile."""


def document_starts(document_ids: Array) -> Array:
    """First packed position of each token's document (or of its run of padding): int64 [S]."""
    index = np.arange(len(document_ids), dtype=np.int64)
    changed = np.ones(len(document_ids), dtype=bool)
    changed[1:] = document_ids[1:] != document_ids[:-1]
    return np.maximum.accumulate(np.where(changed, index, 0))


def document_positions(document_ids: Array) -> Array:
    """Position of each token in its own document: int64 [S]; 0 on padding."""
    positions = np.arange(len(document_ids), dtype=np.int64) - document_starts(document_ids)
    return np.where(document_ids >= 0, positions, 0)


def anchor_candidates(loss_mask: Array, document_ids: Array) -> Array:
    """Packed positions where the token and its successor in the same document both count in the loss, ascending."""
    counted = (np.asarray(loss_mask) != 0) & (document_ids >= 0)
    pair = counted[:-1] & counted[1:] & (document_ids[:-1] == document_ids[1:])
    return np.flatnonzero(pair)


def sample_anchors(
    loss_mask: Array, document_ids: Array, num_anchors: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Draw anchors uniformly without replacement: (anchor int32 [A] ascending, valid bool [A]).

    Where the row has fewer candidates all are taken, and the rest are dummies: 0, not valid, last.
    """
    candidates = anchor_candidates(loss_mask, document_ids)
    if len(candidates) > num_anchors:
        candidates = np.sort(rng.choice(candidates, size=num_anchors, replace=False))
    return _filled_up(candidates, num_anchors)


def equal_shares(num_candidates: Array, total: int) -> Array:
    """Anchors of each document, int64 [D]: `total` in all, none more than its candidates, else equal but for one.

    num_candidates int [D]; `total` is at most their sum. This is SpecForge's draw, a number for each conversation, where all
    of a row's together have a number.
    """
    assert 0 <= total <= num_candidates.sum(), "more anchors than candidates"
    each = 0
    while np.minimum(num_candidates, each).sum() < total:
        each += 1
    shares: Array = np.minimum(num_candidates, each).astype(np.int64)
    surplus = int(shares.sum()) - total
    shares[np.flatnonzero(shares == each)[:surplus]] -= 1
    return shares


def sample_anchors_by_document(
    loss_mask: Array, document_ids: Array, num_anchors: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """As `sample_anchors`, but every document of the row gets as many (`equal_shares`), whatever its length."""
    candidates = anchor_candidates(loss_mask, document_ids)
    if len(candidates) > num_anchors:
        _, document, counts = np.unique(document_ids[candidates], return_inverse=True, return_counts=True)
        shuffled = np.lexsort((rng.random(len(candidates)), document))  # document by document, as their candidates are
        place = np.arange(len(candidates)) - np.repeat(np.cumsum(counts) - counts, counts)
        candidates = np.sort(candidates[shuffled[place < equal_shares(counts, num_anchors)[document]]])
    return _filled_up(candidates, num_anchors)


def sample_stretch(
    loss_mask: Array, document_ids: Array, num_anchors: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Candidates next to each other, so that rounds can be walked from anchor to anchor; as `sample_anchors` returns them.

    The stretch begins anywhere and goes on at the row's start, so each candidate is as likely as any other.
    """
    candidates = anchor_candidates(loss_mask, document_ids)
    if len(candidates) > num_anchors:
        places = rng.integers(len(candidates)) + np.arange(num_anchors)
        candidates = np.sort(candidates[places % len(candidates)])
    return _filled_up(candidates, num_anchors)


def labels_left(loss_mask: Array, document_ids: Array) -> Array:
    """How many tokens that count follow each token without a break in its document: int64 [S], 0 for one that does not count."""
    counted = (np.asarray(loss_mask) != 0) & (document_ids >= 0)
    place = np.arange(len(counted), dtype=np.int64)
    is_last = np.ones(len(counted), dtype=bool)
    is_last[:-1] = ~(counted[1:] & (document_ids[1:] == document_ids[:-1]))
    last = np.minimum.accumulate(np.where(is_last, place, len(place))[::-1])[::-1]
    return np.where(counted, last - place, 0)


def _filled_up(candidates: Array, num_anchors: int) -> tuple[Array, Array]:
    """At most `num_anchors` anchors, then dummies."""
    anchor = np.zeros(num_anchors, dtype=np.int32)
    anchor[: len(candidates)] = candidates
    return anchor, np.arange(num_anchors) < len(candidates)


@dataclass(frozen=True)
class Blocks:
    """The noise blocks of one row."""

    anchor: Array
    """int32 [A], packed position of the anchor; ascending, dummies (0) last."""
    start: Array
    """int32 [A], packed position where the anchor's document starts: the block sees [start, anchor)."""
    valid: Array
    """bool [A], False for dummies."""
    noise_ids: Array
    """int64 [A,K], the anchor's token, then mask tokens."""
    noise_positions: Array
    """int64 [A,K], positions in the document."""
    labels: Array
    """int64 [A,K], the token at the slot's own position; 0 where it does not count."""
    label_mask: Array
    """bool [A,K], slots that count: a prefix of slots 1 to K-1, never slot 0."""


def make_blocks(
    token_ids: Array,
    loss_mask: Array,
    document_ids: Array,
    anchor: Array,
    valid: Array,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Build the blocks of a row: token_ids [S], loss_mask [S], document_ids [S], anchor [A], valid [A].

    A label counts if its token does, in the anchor's document, and so do all labels before it in the block: after an
    uncounted token (the next turn's prompt) no draft can be accepted, so DFlash would be trained on what never serves.
    """
    num_tokens = len(token_ids)
    slots = np.arange(block_size, dtype=np.int64)
    anchor = np.where(valid, anchor, 0).astype(np.int32)
    start = np.where(valid, document_starts(document_ids)[anchor], 0).astype(np.int32)
    packed = anchor[:, None].astype(np.int64) + slots
    inside = packed < num_tokens
    clipped = np.minimum(packed, num_tokens - 1)
    counts = inside & (np.asarray(loss_mask)[clipped] != 0) & (document_ids[clipped] == document_ids[anchor][:, None])
    counts &= valid[:, None]
    counts[:, 0] = True  # the anchor itself does not stop the run
    label_mask = np.logical_and.accumulate(counts, axis=1)
    label_mask[:, 0] = False
    label_mask &= valid[:, None]
    noise_ids = np.full((len(anchor), block_size), mask_token_id, dtype=np.int64)
    noise_ids[:, 0] = np.asarray(token_ids)[anchor]
    return Blocks(
        anchor=anchor,
        start=start,
        valid=np.asarray(valid, dtype=bool),
        noise_ids=noise_ids,
        noise_positions=packed - start[:, None],
        labels=np.where(label_mask, np.asarray(token_ids)[clipped], 0).astype(np.int64),
        label_mask=label_mask,
    )


def dense_block_mask(
    start: Tensor, anchor: Tensor, num_tokens: int, block_size: int, window: int | None = None, causal: bool = False
) -> Tensor:
    """Which keys each noise token sees, bool [Q, S + Q]: the CPU path, and the oracle of `block_mask_mod`.

    start, anchor int [A]. A query at slot k of a block sees context tokens j with start <= j < anchor (anchor + k - j
    < window) and the slots of its own block (up to k if causal). Dummies see themselves.
    """
    num_blocks, device = len(anchor), anchor.device
    slot = torch.arange(block_size, device=device)
    token = torch.arange(num_tokens, device=device)
    context = (token >= start[:, None]) & (token < anchor[:, None])  # [A,S]
    context = context[:, None, :].expand(num_blocks, block_size, num_tokens)
    distance = slot[:, None] - slot[None, :]
    inside = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        query_position = anchor[:, None] + slot
        context = context & (query_position[:, :, None] - token < window)
        inside = inside & (distance.abs() < window)
    same = torch.eye(num_blocks, dtype=torch.bool, device=device)
    own = (same[:, None, :, None] & inside[None, :, None, :]).reshape(num_blocks * block_size, num_blocks * block_size)
    return torch.cat((context.reshape(num_blocks * block_size, num_tokens), own), dim=1)


def block_mask_mod(
    start: Tensor, anchor: Tensor, num_tokens: int, block_size: int, window: int | None = None, causal: bool = False
) -> MaskMod:
    """The same rule pair by pair, for the tiles that are seen in part: start and anchor int32 [A].

    flex_attention rounds Q up to whole tiles, so the block index is clamped: it would read beyond `anchor`
    (SpecForge issue 501, illegal memory access).
    """
    last = len(anchor) - 1

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = torch.clamp(query // block_size, max=last)
        context = (key >= start[block]) & (key < anchor[block])
        inside = (key >= num_tokens) & ((key - num_tokens) // block_size == query // block_size)
        if window is not None:
            context = context & (anchor[block] + query % block_size - key < window)
            inside = inside & ((key - num_tokens - query).abs() < window)
        if causal:
            inside = inside & (key - num_tokens <= query)
        return context | inside

    return mask_mod


def block_mask(
    start: Tensor, anchor: Tensor, num_tokens: int, block_size: int, window: int | None = None, causal: bool = False
) -> BlockMask:
    """The same rule as flex_attention wants it, tile by tile: start and anchor int32 [A], Q and S + Q any length.

    What a noise token sees is two runs of keys, one of the context and one of its own block, so the keys it sees in a
    tile are counted from four numbers: no Q x K table, no host synchronisation, nothing to compile. (Compiling
    `create_block_mask` gives the same tables, but its reduction kernel took minutes to compile on one H200 with torch
    2.11 at Q = 8192, S = 4096.) Equal to `create_block_mask` in all eight tables.
    """
    num_queries = len(anchor) * block_size
    query = torch.arange(num_queries, dtype=torch.int32, device=anchor.device)
    block, slot = query // block_size, query % block_size
    first, last = start[block], anchor[block]
    own_first = num_tokens + query - slot
    own_last = own_first + (slot + 1 if causal else block_size)
    if window is not None:
        first = torch.maximum(first, last + slot - window + 1)
        own_last = torch.minimum(own_last, own_first + slot + window)
        own_first = torch.maximum(own_first, own_first + slot - window + 1)
    tile = torch.arange(0, num_tokens + num_queries, TILE, dtype=torch.int32, device=anchor.device)

    def seen(first: Tensor, last: Tensor) -> Tensor:  # [Q] -> [Q, tiles]
        return (torch.minimum(last[:, None], tile + TILE) - torch.maximum(first[:, None], tile)).clamp(min=0)

    count = seen(first, last) + seen(own_first, own_last)
    count = F.pad(count, (0, 0, 0, -num_queries % TILE)).view(1, 1, -1, TILE, len(tile))
    full = (count == TILE).all(3)
    return BlockMask.from_kv_blocks(
        *_ordered((count > 0).any(3) & ~full),
        *_ordered(full),
        BLOCK_SIZE=TILE,
        mask_mod=block_mask_mod(start, anchor, num_tokens, block_size, window, causal),
        seq_lengths=(num_queries, num_tokens + num_queries),
    )


def _ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of a bool table: how many are set, and all columns, those that are set first; both int32."""
    columns = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32), columns.to(torch.int32)
