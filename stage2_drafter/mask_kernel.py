"""The block mask on a GPU in three kernel launches; `blocks.block_mask` is the twin that says what it must equal.

What a noise token sees is two runs of keys, one of the context and one of its own block, so a program that holds the 128
queries of a tile counts, from four numbers each, the keys they see in 64 tiles at a time: nothing larger than the tables
themselves is ever in memory, the host waits for nothing, and torch's compiler has no part in it. Then one program for each
row and each column of the table of tiles lists those seen in part and those seen whole, in flex_attention's order.

Eager torch needs some forty launches for the same tables: 3.7 ms at S = 8,192 and A = 1,024 on one H200 (torch 2.11),
against 240 ms of a training step.

Shapes: S context tokens, A anchors, K block size, Q = A · K noise tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_train.stage2_drafter.blocks import TILE, block_mask_mod

_TILES = 64
"""Tiles of keys that one program counts at a time."""
PARTIAL, FULL = 1, 2
"""States of a tile in the table; 0 is unseen."""


@triton.jit
def _seen(first, last, tile_begin, TILE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    overlap = tl.minimum(last[:, None], tile_begin[None, :] + TILE_SIZE) - tl.maximum(
        first[:, None], tile_begin[None, :]
    )
    return tl.maximum(overlap, 0)


@triton.jit
def _classify(  # type: ignore[no-untyped-def]
    start_pointer,
    anchor_pointer,
    state_pointer,
    num_anchors,
    num_tokens,
    num_tiles,
    block_size: tl.constexpr,
    window: tl.constexpr,
    causal: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    TILES: tl.constexpr,
):
    """State of a tile of queries against TILES tiles of keys; window 0: none."""
    row = tl.program_id(0)
    query = row * TILE_SIZE + tl.arange(0, TILE_SIZE)
    inside = query < num_anchors * block_size
    block = tl.minimum(query // block_size, num_anchors - 1)
    slot = query % block_size
    first = tl.load(start_pointer + block)
    last = tl.load(anchor_pointer + block)
    own_begin = num_tokens + query - slot
    own_first = own_begin
    own_last = own_begin + block_size
    if causal:
        own_last = own_begin + slot + 1
    if window > 0:
        first = tl.maximum(first, last + slot - window + 1)
        own_last = tl.minimum(own_last, own_begin + slot + window)
        own_first = tl.maximum(own_first, own_begin + slot - window + 1)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    count = _seen(first, last, tile * TILE_SIZE, TILE_SIZE) + _seen(own_first, own_last, tile * TILE_SIZE, TILE_SIZE)
    count = tl.where(inside[:, None], count, 0)
    some = (tl.max(count, axis=0) > 0).to(tl.int8)
    full = (tl.min(count, axis=0) == TILE_SIZE).to(tl.int8)
    tl.store(state_pointer + row * num_tiles + tile, some + full, mask=tile < num_tiles)


@triton.jit
def _order(  # type: ignore[no-untyped-def]
    state_pointer,
    count_pointer,
    index_pointer,
    num_lines,
    length,
    line_stride,
    stride,
    WIDTH: tl.constexpr,
):
    """Of one line of the table: how many tiles have a state, and all positions, those first that have it."""
    line = tl.program_id(0)
    wanted = tl.program_id(1) + 1
    position = tl.arange(0, WIDTH)
    inside = position < length
    state = tl.load(state_pointer + line * line_stride + position * stride, mask=inside, other=0)
    chosen = (state == wanted).to(tl.int32)
    through = tl.cumsum(chosen, axis=0)
    total = tl.sum(chosen, axis=0)
    place = tl.where(chosen == 1, through - 1, total + position - through)
    out = (wanted - 1) * num_lines + line
    tl.store(count_pointer + out, total)
    tl.store(index_pointer + out * length + place, position, mask=inside)


def fused_block_mask(
    start: Tensor, anchor: Tensor, num_tokens: int, block_size: int, window: int | None = None, causal: bool = False
) -> BlockMask:
    """`blocks.block_mask` of start and anchor int32 [A], both contiguous and on a GPU: equal in all eight tables."""
    num_queries = len(anchor) * block_size
    rows, columns = triton.cdiv(num_queries, TILE), triton.cdiv(num_tokens + num_queries, TILE)
    state = torch.empty((rows, columns), dtype=torch.int8, device=anchor.device)
    _classify[(rows, triton.cdiv(columns, _TILES))](
        start,
        anchor,
        state,
        len(anchor),
        num_tokens,
        columns,
        block_size=block_size,
        window=window or 0,
        causal=causal,
        TILE_SIZE=TILE,
        TILES=_TILES,
    )

    def ordered(lines: int, length: int, line_stride: int, stride: int) -> tuple[Tensor, Tensor]:
        counts = torch.empty((2, 1, 1, lines), dtype=torch.int32, device=anchor.device)
        indices = torch.empty((2, 1, 1, lines, length), dtype=torch.int32, device=anchor.device)
        width = triton.next_power_of_2(length)
        _order[(lines, 2)](state, counts, indices, lines, length, line_stride, stride, WIDTH=width)
        return counts, indices

    kv_counts, kv_indices = ordered(rows, columns, columns, 1)
    q_counts, q_indices = ordered(columns, rows, 1, columns)
    return BlockMask(
        seq_lengths=(num_queries, num_tokens + num_queries),
        kv_num_blocks=kv_counts[0],
        kv_indices=kv_indices[0],
        full_kv_num_blocks=kv_counts[1],
        full_kv_indices=kv_indices[1],
        q_num_blocks=q_counts[0],
        q_indices=q_indices[0],
        full_q_num_blocks=q_counts[1],
        full_q_indices=q_indices[1],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=block_mask_mod(start, anchor, num_tokens, block_size, window, causal),
    )
