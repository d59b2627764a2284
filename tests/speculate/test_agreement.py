"""A difference from plain greedy decoding is found, measured and judged."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dflash_train.speculate.agreement import first_difference
from dflash_train.speculate.decode import plain_decode
from dflash_train.stage1_target.target import Target

PROMPT = [3, 1, 4]


def test_equal_outputs_have_no_difference(make_tiny_target: Callable[[str], Target]) -> None:
    assert first_difference(make_tiny_target("llama"), PROMPT, [1, 2], [1, 2]) is None


def test_another_token_is_no_rounding(make_tiny_target: Callable[[str], Target]) -> None:
    target = make_tiny_target("llama")
    plain = plain_decode(target, PROMPT, 8).token_ids
    other = [*plain[:5], (plain[5] + 1) % 11, *plain[6:]]
    difference = first_difference(target, PROMPT, plain, other)
    assert difference is not None
    assert (difference.position, difference.plain_token, difference.speculative_token) == (5, plain[5], other[5])
    with torch.inference_mode():
        logits = target.model(torch.tensor([PROMPT + plain[:5]])).logits[0, -1]
    best = logits.topk(2).values
    assert difference.gap == pytest.approx(float(logits[plain[5]] - logits[other[5]]), rel=1e-3)
    assert difference.top2_gap == pytest.approx(float(best[0] - best[1]), rel=1e-3)
    assert 0 < difference.rounding < 1e-3
    assert not difference.within_rounding


def test_a_tie_is_rounding(make_tiny_target: Callable[[str], Target]) -> None:
    target = make_tiny_target("llama")
    head = target.model.get_output_embeddings().weight
    plain = plain_decode(target, PROMPT, 8).token_ids
    twin = (plain[3] + 1) % 11
    before = head[twin].clone()
    try:
        head[twin] = head[plain[3]]
        difference = first_difference(target, PROMPT, plain, [*plain[:3], twin, *plain[4:]])
    finally:
        head[twin] = before
    assert difference is not None
    assert difference.gap == 0.0
    assert difference.within_rounding


def test_rounding_is_wider_in_bfloat16(make_tiny_target: Callable[[str], Target]) -> None:
    target = make_tiny_target("llama")
    coarse = replace(target, dtype=torch.bfloat16)
    fine_gap, coarse_gap = (first_difference(t, PROMPT, [1, 2], [1, 3]) for t in (target, coarse))
    assert fine_gap is not None
    assert coarse_gap is not None
    assert coarse_gap.rounding > 100 * fine_gap.rounding


def test_an_output_that_ends_early_is_no_rounding(make_tiny_target: Callable[[str], Target]) -> None:
    difference = first_difference(make_tiny_target("gpt2"), PROMPT, [1, 2, 3], [1, 2])
    assert difference is not None
    assert (difference.position, difference.plain_token, difference.speculative_token) == (2, 3, None)
    assert not difference.within_rounding
    assert difference.to_json()["gap"] is None
