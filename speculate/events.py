"""What an evaluation tells its caller while it runs, for a terminal to draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Decoded:
    """Event: prompts decoded so far."""

    num_prompts: int
    num_all: int
    num_tokens: int
    """New tokens of speculative decoding."""
    acceptance_length: float | None
    """Over all rounds so far; None where there was none."""
    tokens_per_second: float | None
    """Of speculative decoding on one device, without reading the prompts."""


Progress = Callable[[Decoded | str], None]
"""Takes events, and notes as text."""
