from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from dflash_train.stage2_drafter.blocks import (
    anchor_candidates,
    block_mask,
    block_mask_mod,
    dense_block_mask,
    document_positions,
    document_starts,
    equal_shares,
    labels_left,
    make_blocks,
    sample_anchors,
    sample_anchors_by_document,
    sample_stretch,
)


def random_row(seed: int, num_tokens: int = 50) -> tuple[np.random.Generator, Any, Any, Any]:
    rng = np.random.default_rng(seed)
    document_ids = np.sort(rng.integers(0, 6, num_tokens)).astype(np.int32)
    document_ids[int(rng.integers(num_tokens - 8, num_tokens + 1)) :] = -1
    loss_mask = ((rng.random(num_tokens) < 0.6) & (document_ids >= 0)).astype(np.uint8)
    return rng, rng.integers(0, 90, num_tokens), loss_mask, document_ids


def test_positions_are_counted_from_the_start_of_the_document() -> None:
    document_ids = np.array([0, 0, 0, 1, 2, 2, -1, -1], dtype=np.int32)
    assert document_starts(document_ids).tolist() == [0, 0, 0, 3, 4, 4, 6, 6]
    assert document_positions(document_ids).tolist() == [0, 1, 2, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_candidates_are_counted_tokens_with_a_counted_successor_in_their_document(seed: int) -> None:
    _, _, loss_mask, document_ids = random_row(seed)
    expected = [
        a
        for a in range(len(loss_mask) - 1)
        if loss_mask[a] and loss_mask[a + 1] and document_ids[a] == document_ids[a + 1] >= 0
    ]
    assert anchor_candidates(loss_mask, document_ids).tolist() == expected


def test_anchors_are_ascending_distinct_and_follow_the_generator() -> None:
    _, _, loss_mask, document_ids = random_row(3, num_tokens=200)
    draws = [sample_anchors(loss_mask, document_ids, 5, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    anchor, valid = draws[0]
    assert anchor.dtype == np.int32 and valid.all()
    assert (np.diff(anchor) > 0).all()
    assert np.isin(anchor, anchor_candidates(loss_mask, document_ids)).all()
    assert anchor.tolist() == draws[1][0].tolist() != draws[2][0].tolist()


@pytest.mark.parametrize("total", [0, 1, 7, 20, 31, 32])
def test_anchors_are_shared_out_exactly_and_evenly(total: int) -> None:
    candidates = np.array([3, 12, 1, 9, 7])
    shares = equal_shares(candidates, total)
    assert shares.sum() == total
    assert (shares <= candidates).all() and (shares >= 0).all()
    short_of_all = shares[shares < candidates]
    assert len(short_of_all) == 0 or shares.max() - short_of_all.min() <= 1


@pytest.mark.parametrize("seed", range(20))
def test_by_document_each_gets_as_many_anchors_as_it_has_candidates_or_an_equal_share(seed: int) -> None:
    _, _, loss_mask, document_ids = random_row(seed, num_tokens=120)
    candidates = anchor_candidates(loss_mask, document_ids)
    there = np.bincount(document_ids[candidates])
    for num_anchors in (1, 7, 13, 24, len(candidates), 100):
        anchor, valid = sample_anchors_by_document(loss_mask, document_ids, num_anchors, np.random.default_rng(seed))
        taken = anchor[valid]
        assert valid.sum() == min(num_anchors, len(candidates)) and (anchor[~valid] == 0).all()
        assert (np.diff(taken) > 0).all() and np.isin(taken, candidates).all()
        share = np.bincount(document_ids[taken], minlength=len(there))
        short_of_all = share[share < there]
        assert len(short_of_all) == 0 or share.max() - short_of_all.min() <= 1


def test_by_document_every_token_of_a_document_is_as_likely() -> None:
    """A long document and a short one: 8 anchors are 4 of 40 candidates and 4 of 5."""
    document_ids = np.repeat(np.arange(2, dtype=np.int32), (41, 6))
    rng, counts = np.random.default_rng(0), np.zeros(47)
    for _ in range(4000):
        anchor, _ = sample_anchors_by_document(np.ones(47, np.uint8), document_ids, 8, rng)
        counts[anchor] += 1
    assert counts[[40, 46]].tolist() == [0, 0], "the last token of a document is no candidate"
    assert counts[:40] / 4000 == pytest.approx(np.full(40, 4 / 40), abs=0.025)  # 5 standard errors
    assert counts[41:46] / 4000 == pytest.approx(np.full(5, 4 / 5), abs=0.035)


@pytest.mark.parametrize("seed", range(20))
def test_a_stretch_is_candidates_next_to_each_other_round_the_row(seed: int) -> None:
    rng, _, loss_mask, document_ids = random_row(seed)
    candidates = anchor_candidates(loss_mask, document_ids).tolist()
    anchor, valid = sample_stretch(loss_mask, document_ids, 11, rng)
    taken = anchor[valid].tolist()
    size = min(11, len(candidates))
    assert valid.sum() == size and (anchor[~valid] == 0).all()
    twice = candidates * 2
    assert taken in [sorted(twice[first : first + size]) for first in range(len(candidates))]
    assert sample_stretch(loss_mask, document_ids, 60, rng)[0][: len(candidates)].tolist() == candidates


@pytest.mark.parametrize("seed", range(20))
def test_labels_left_counts_to_the_end_of_the_answer(seed: int) -> None:
    _, _, loss_mask, document_ids = random_row(seed)
    for place, left in enumerate(labels_left(loss_mask, document_ids).tolist()):
        following = 0
        if loss_mask[place]:
            rest = zip(loss_mask[place + 1 :], document_ids[place + 1 :], strict=True)
            for counted, document in rest:
                if not counted or document != document_ids[place]:
                    break
                following += 1
        assert left == following


@pytest.mark.parametrize("sample", [sample_anchors, sample_stretch])
def test_every_candidate_is_drawn_equally_often(sample: Callable[..., Any]) -> None:
    _, _, loss_mask, document_ids = random_row(4)
    candidates = anchor_candidates(loss_mask, document_ids)
    rng = np.random.default_rng(0)
    drawn = np.concatenate([sample(loss_mask, document_ids, 4, rng)[0] for _ in range(3000)])
    share = np.bincount(drawn, minlength=50)[candidates] / 3000
    expected = 4 / len(candidates)
    assert np.abs(share - expected).max() < 5 * np.sqrt(expected / 3000)


def test_missing_anchors_are_dummies_at_the_end() -> None:
    loss_mask = np.array([0, 1, 1, 1, 0, 0, 0], dtype=np.uint8)
    anchor, valid = sample_anchors(loss_mask, np.zeros(7, dtype=np.int32), 5, np.random.default_rng(0))
    assert anchor.tolist() == [1, 2, 0, 0, 0]
    assert valid.tolist() == [True, True, False, False, False]


def test_labels_are_the_tokens_of_the_slots_own_positions() -> None:
    """algorithm.md 5.5: S = 10, K = 4; a = 3 is whole, a = 7 has m[9] = 0 and runs out of the row."""
    token_ids = np.arange(100, 110)
    loss_mask = np.ones(10, dtype=np.uint8)
    loss_mask[9] = 0
    blocks = make_blocks(
        token_ids, loss_mask, np.zeros(10, np.int32), np.array([3, 7], np.int32), np.array([True, True]), 4, 999
    )
    assert blocks.noise_ids.tolist() == [[103, 999, 999, 999], [107, 999, 999, 999]]
    assert blocks.label_mask.tolist() == [[False, True, True, True], [False, True, False, False]]
    assert blocks.labels.tolist() == [[0, 104, 105, 106], [0, 108, 0, 0]]
    assert blocks.noise_positions.tolist() == [[3, 4, 5, 6], [7, 8, 9, 10]]
    mask = dense_block_mask(torch.tensor(blocks.start), torch.tensor(blocks.anchor), 10, 4)
    assert mask[0, :10].nonzero().flatten().tolist() == [0, 1, 2]


def test_labels_after_an_uncounted_one_do_not_count() -> None:
    loss_mask = np.array([0, 1, 1, 0, 1, 1, 1, 1], dtype=np.uint8)
    blocks = make_blocks(
        np.arange(8), loss_mask, np.zeros(8, np.int32), np.array([1], np.int32), np.array([True]), 6, 99
    )
    assert blocks.label_mask.tolist() == [[False, True, False, False, False, False]]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_match_a_loop(seed: int) -> None:
    rng, token_ids, loss_mask, document_ids = random_row(seed)
    size = int(rng.integers(2, 9))
    anchor, valid = sample_anchors(loss_mask, document_ids, 20, rng)
    blocks = make_blocks(token_ids, loss_mask, document_ids, anchor, valid, size, 91)
    for n in range(20):
        a = int(blocks.anchor[n])
        if not valid[n]:
            assert a == blocks.start[n] == 0 and not blocks.label_mask[n].any()
            continue
        assert blocks.start[n] == np.flatnonzero(document_ids == document_ids[a])[0]
        open_run = True
        for k in range(size):
            assert blocks.noise_positions[n, k] == a - blocks.start[n] + k
            same = a + k < len(token_ids) and document_ids[a + k] == document_ids[a]
            if k:
                open_run = open_run and same and bool(loss_mask[a + k])
                assert blocks.label_mask[n, k] == open_run
                assert blocks.labels[n, k] == (token_ids[a + k] if open_run else 0)
        assert blocks.label_mask[n, 1]


def visible(
    start: Any, anchor: Any, num_tokens: int, size: int, window: int | None, causal: bool, query: int, key: int
) -> bool:
    """The rule of algorithm.md 5.2 and 2.6 for one pair."""
    n, k = divmod(query, size)
    if key < num_tokens:
        if not start[n] <= key < anchor[n]:
            return False
        return window is None or anchor[n] + k - key < window
    m, j = divmod(key - num_tokens, size)
    if m != n or (causal and j > k):
        return False
    return window is None or abs(k - j) < window


@pytest.mark.parametrize("window, causal", [(None, False), (None, True), (5, False), (5, True), (2, False)])
def test_block_mask_matches_the_rule_pair_by_pair(window: int | None, causal: bool) -> None:
    rng, token_ids, loss_mask, document_ids = random_row(7, num_tokens=23)
    size, num_anchors, num_tokens = 4, 7, 23
    drawn, valid = sample_anchors(loss_mask, document_ids, num_anchors, rng)
    drawn[-1], valid[-1] = 0, False
    blocks = make_blocks(token_ids, loss_mask, document_ids, drawn, valid, size, 91)
    start, anchor = torch.from_numpy(blocks.start), torch.from_numpy(blocks.anchor)
    queries, keys = num_anchors * size, num_tokens + num_anchors * size
    expected = torch.tensor(
        [[visible(start, anchor, num_tokens, size, window, causal, q, k) for k in range(keys)] for q in range(queries)]
    )
    dense = dense_block_mask(start, anchor, num_tokens, size, window, causal)
    assert torch.equal(dense, expected)
    assert dense.any(-1).all(), "a query that sees nothing would be NaN in dense backends"
    mask_mod = block_mask_mod(start, anchor, num_tokens, size, window, causal)
    zero = torch.tensor(0)
    assert torch.equal(mask_mod(zero, zero, torch.arange(queries)[:, None], torch.arange(keys)[None]), expected)


TABLES = [
    f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
]


@pytest.mark.parametrize("window, causal", [(None, False), (None, True), (150, False), (5, True)])
@pytest.mark.parametrize("num_tokens, num_anchors, size", [(512, 64, 16), (384, 128, 10), (507, 33, 7), (128, 8, 16)])
def test_block_mask_equals_create_block_mask_in_every_table(
    num_tokens: int, num_anchors: int, size: int, window: int | None, causal: bool
) -> None:
    for seed in range(4):
        rng, token_ids, loss_mask, document_ids = random_row(seed, num_tokens=num_tokens)
        drawn, valid = sample_anchors(loss_mask, document_ids, num_anchors, rng)
        blocks = make_blocks(token_ids, loss_mask, document_ids, drawn, valid, size, 91)
        start, anchor = torch.from_numpy(blocks.start), torch.from_numpy(blocks.anchor)
        if seed == 3:  # one long document: whole tiles of context are seen in full
            start, anchor = torch.zeros_like(start), torch.sort(torch.randint(num_tokens, anchor.shape)).values.int()
        queries = num_anchors * size
        mask_mod = block_mask_mod(start, anchor, num_tokens, size, window, causal)
        expected = create_block_mask(mask_mod, None, None, queries, num_tokens + queries, device="cpu")
        found = block_mask(start, anchor, num_tokens, size, window, causal)
        for table in TABLES:
            torch.testing.assert_close(getattr(found, table), getattr(expected, table), atol=0, rtol=0, msg=table)
        assert (found.seq_lengths, found.BLOCK_SIZE) == (expected.seq_lengths, expected.BLOCK_SIZE)


def test_mask_function_stays_inside_the_anchors_on_padded_queries() -> None:
    """flex_attention rounds Q up to 128; SpecForge issue 501 read out of bounds."""
    start, anchor = torch.zeros(3, dtype=torch.int32), torch.tensor([1, 2, 3], dtype=torch.int32)
    mask_mod = block_mask_mod(start, anchor, 8, 4)
    zero = torch.tensor(0)
    mask_mod(zero, zero, torch.arange(128)[:, None], torch.arange(128)[None])
    block_mask = create_block_mask(mask_mod, None, None, 12, 20, device="cpu")
    assert torch.equal(block_mask.to_dense()[0, 0].bool(), torch.ones(1, 1, dtype=torch.bool))


def test_a_row_without_an_anchor_has_only_dummies() -> None:
    blocks = make_blocks(
        np.arange(9),
        np.zeros(9, np.uint8),
        np.zeros(9, np.int32),
        *sample_anchors(np.zeros(9, np.uint8), np.zeros(9, np.int32), 3, np.random.default_rng(0)),
        4,
        99,
    )
    assert not blocks.valid.any() and not blocks.label_mask.any()
    mask = dense_block_mask(torch.tensor(blocks.start), torch.tensor(blocks.anchor), 9, 4)
    assert mask[:, :9].sum() == 0 and torch.equal(mask.sum(-1), torch.full((12,), 4))
