"""What an extract says while it runs."""

from __future__ import annotations

import dataclasses

from dflash_train.stage1_target.events import Progress

PROGRESS = Progress(
    num_samples=7,
    num_pending=1000,
    num_tokens=5000,
    num_pending_tokens=700_000,
    num_committed=0,
    num_committed_bytes=0,
    tokens_per_second=1234.5,
    hours_left=0.75,
    num_workers=1,
)


def test_progress_says_what_is_left_until_nothing_is() -> None:
    line = "7 of 1,000 samples run (0 committed, 0 bytes), 5,000 tokens, 1,234 tokens/s on 1 worker, 45 min left"
    assert PROGRESS.line() == line
    assert (
        dataclasses.replace(PROGRESS, num_samples=1000, num_workers=2)
        .line()
        .endswith("1,234 tokens/s on 2 workers (617 each)")
    )
