from __future__ import annotations

import numpy as np
import pytest

from dflash_train.stage2_drafter.rounds import count_rounds, tokens_produced


def walk(runs: list[list[tuple[int, int]]]) -> tuple[int, int]:
    """The slow twin: answer by answer, of (accepted, left) at each anchor."""
    rounds = tokens = 0
    for run in runs:
        place = 0
        while place < len(run):
            accepted, left = run[place]
            gained = min(accepted + 1, left)
            rounds, tokens, place = rounds + 1, tokens + gained, place + gained
    return rounds, tokens


@pytest.mark.parametrize("seed", range(30))
def test_rounds_are_those_of_walking_each_answer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    anchors: list[int] = []
    runs: list[list[tuple[int, int]]] = []
    first = 0
    for _ in range(int(rng.integers(1, 6))):
        length = int(rng.integers(1, 30))
        left = np.arange(length, 0, -1)
        runs.append([(int(min(rng.integers(0, 8), most)), int(most)) for most in left])
        anchors += range(first, first + length)
        first += length + int(rng.integers(1, 9))  # at least the last token, which is no anchor
    accepted, left = np.array([pair for run in runs for pair in run]).T
    assert count_rounds(np.array(anchors, dtype=np.int32), tokens_produced(accepted, left)) == walk(runs)


def test_a_stretch_that_is_cut_counts_its_last_round_whole() -> None:
    assert count_rounds(np.array([10, 11, 12]), np.array([2, 1, 4])) == (2, 6)


def test_no_anchor_is_no_round() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert count_rounds(nothing, nothing) == (0, 0)
