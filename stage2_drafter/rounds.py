"""The rounds that speculative decoding would take over a text, from what is accepted at each of its tokens.

A mean over anchors is not the acceptance length: a stretch of text that is drafted well has as many anchors as any other
of its length, but few rounds. So the anchors of held-out rows lie next to each other, and the estimate walks: each
round begins where the one before it ends, as in decoding. On the target's own greedy answers that is what greedy decoding
does (tests/speculate/test_training.py compares it with the drafts of `dflash evaluate --replay`).

Symbols: A anchors.
"""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer]


def tokens_produced(accepted: Integers, left: Integers) -> Integers:
    """What a round at each anchor produces, int [A]: the drafts that are right from it on and the bonus token, but no more
    than the answer has left after the anchor."""
    return np.minimum(accepted + 1, left)


def count_rounds(anchor: Integers, produced: Integers) -> tuple[int, int]:
    """(rounds, tokens produced) of walking from anchor to anchor, both int [A].

    anchor: packed positions, ascending; after a gap a round begins at the next anchor. produced: of a round at each, at
    least 1.
    """
    following = np.searchsorted(anchor, anchor + produced)
    place = rounds = tokens = 0
    while place < len(anchor):
        rounds, tokens = rounds + 1, tokens + int(produced[place])
        place = int(following[place])
    return rounds, tokens
