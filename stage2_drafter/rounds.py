"""The rounds that speculative decoding would take over a text, from what is accepted at each of its tokens.

A mean over anchors is not the acceptance length: a stretch of text that is drafted well has as many anchors as any other
of its length, but few rounds. So the held-out estimate has an anchor at every token of whole answers, and walks: each
round begins where the one before it ends, as in decoding. On the target's own greedy answers that is what greedy decoding
does (tests/speculate/test_training.py compares it with `dflash evaluate --replay`).

Symbols: A anchors.
"""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer]


def count_rounds(anchor: Integers, accepted: Integers, left: Integers) -> tuple[int, int]:
    """(rounds, tokens produced) over stretches of anchors, all int [A].

    anchor: packed positions, ascending; a gap begins another stretch, at whose first anchor a round begins. accepted: drafts
    that are right from the anchor on. left: tokens of the answer after the anchor, at least 1; a round produces no more.
    """
    produced = np.minimum(accepted + 1, left)
    following = np.searchsorted(anchor, anchor + produced)
    place = rounds = tokens = 0
    while place < len(anchor):
        rounds, tokens = rounds + 1, tokens + int(produced[place])
        place = int(following[place])
    return rounds, tokens
