"""The recent speed of a worker."""

from __future__ import annotations

from dflash_train.stage1_target.speed import WINDOW_SECONDS, RecentSpeed


def test_recent_speed_follows_a_change_within_its_window() -> None:
    speed = RecentSpeed(now=0.0)
    assert speed.per_second() == 0
    for second in range(1, 301):
        speed.add(100, now=float(second))
    assert speed.per_second() == 100
    for second in range(301, 302 + int(WINDOW_SECONDS)):
        speed.add(10, now=float(second))
    assert speed.per_second() == 10
    assert speed.num_counted == 100 * 300 + 10 * (1 + int(WINDOW_SECONDS))


def test_a_long_pause_counts() -> None:
    speed = RecentSpeed(now=0.0)
    speed.add(100, now=1.0)
    speed.add(100, now=1000.0)
    assert speed.per_second() == 100 / 999
