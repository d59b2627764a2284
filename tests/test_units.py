from __future__ import annotations

import pytest

from dflash_train.units import format_bytes, format_count, format_duration


def test_sizes_have_a_unit() -> None:
    assert [format_bytes(size) for size in (0, 1023, 40960, 3 * 2**30)] == [
        "0 bytes",
        "1023 bytes",
        "40.0 KiB",
        "3.0 GiB",
    ]
    assert format_bytes(5000 * 2**40) == "5000.0 TiB"


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0 s"), (99, "99 s"), (100, "2 min"), (5940, "99 min"), (11_100, "3 h 05 min"), (4e6, "1,111 h 07 min")],
)
def test_duration_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_one_thing_is_not_many() -> None:
    assert [format_count(count, "worker") for count in (0, 1, 1000)] == ["0 workers", "1 worker", "1,000 workers"]
