"""Which samples to run together: a seeded shuffle, sorted by length only inside windows.

Sorting by length saves padding; sorting everything would fill the store with short samples first, and a store that was
interrupted could not be trained on. So the shuffle is cut into windows of 4,096 samples, batches of like length are cut
from each window under a token budget that counts padding, and the batches of a window are shuffled again. Any prefix
of the schedule, and of the store, is a fair sample of the data down to a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW_SAMPLES = 4096


@dataclass(frozen=True)
class Batch:
    """Samples to run in one forward."""

    indices: tuple[int, ...]
    """Positions in the sample table, longest first."""
    num_tokens: int
    """Tokens without padding."""
    num_padded_tokens: int
    """Tokens with padding: samples times the longest."""


def plan_batches(
    lengths: NDArray[np.integer],
    pending: Sequence[int] | NDArray[np.integer],
    batch_tokens: int,
    seed: int,
    window: int = WINDOW_SAMPLES,
) -> list[Batch]:
    """Batches of the `pending` samples (positions in `lengths`, tokens), each at most `batch_tokens` with padding.

    A sample longer than the budget is a batch of its own. The shuffle is of all samples, pending or not, so a resumed
    run goes on in the same order.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    is_pending = np.zeros(len(lengths), dtype=bool)
    is_pending[np.asarray(pending, dtype=np.int64)] = True
    order = order[is_pending[order]]
    batches: list[Batch] = []
    for number, first in enumerate(range(0, len(order), window)):
        part = order[first : first + window]
        part = part[np.argsort(-lengths[part], kind="stable")]
        cut = _cut(part, lengths, batch_tokens)
        shuffled = np.random.default_rng([seed, number]).permutation(len(cut))
        batches += [cut[position] for position in shuffled]
    return batches


def _cut(part: NDArray[np.integer], lengths: NDArray[np.integer], batch_tokens: int) -> list[Batch]:
    """Cut samples sorted by falling length into batches under the budget."""
    batches: list[Batch] = []
    start = 0
    while start < len(part):
        longest = int(lengths[part[start]])
        count = max(1, batch_tokens // max(1, longest))
        indices = part[start : start + count]
        batches.append(Batch(tuple(map(int, indices)), int(lengths[indices].sum()), longest * len(indices)))
        start += count
    return batches


def padding_share(batches: Sequence[Batch]) -> float:
    """Share of the tokens that run which are padding."""
    padded = sum(batch.num_padded_tokens for batch in batches)
    return 1.0 - sum(batch.num_tokens for batch in batches) / padded if padded else 0.0
