"""What quality.py compares: stores, variants of a training run, and the plans that name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_train.benchmarks.quality_table import BASE, RAW, SCALED


@dataclass(frozen=True)
class Store:
    """A store that runs are trained from."""

    name: str
    words: tuple[str, ...]
    """Options of extract."""
    original: bool = False
    """Of the data set's own answers."""
    copy_of: str | None = None
    """The store whose states it has, with a channel scale of ones."""


@dataclass(frozen=True)
class Variant:
    """A training run but for its seed."""

    name: str
    store: str
    words: tuple[str, ...] = ()
    """Options of train-drafter, or of a peer's script."""
    peer: bool = False


STORES = {
    store.name: store
    for store in (
        Store(SCALED, ("--encoding", "bf16")),
        Store(RAW, (), copy_of=SCALED),
        Store(BASE, ("--encoding", "int8")),
        Store("projected-int8-H", ("--encoding", "projected-int8", "--rank", "H")),
        Store("projected-int8-2H", ("--encoding", "projected-int8", "--rank", "2H")),
        Store("projected-int4-H", ("--encoding", "projected-int4", "--rank", "H")),
        Store("projected-int4-2H", ("--encoding", "projected-int4", "--rank", "2H")),
        Store("original", ("--encoding", "int8"), original=True),
    )
}
PLANS: dict[str, tuple[Variant, ...]] = {
    "encodings": tuple(Variant(name, name) for name in STORES if name != "original"),
    "precision": (Variant(BASE, BASE), Variant("fp8", BASE, ("--precision", "fp8"))),
    "recipe": (
        Variant(BASE, BASE),
        Variant("block-8", BASE, ("--block-size", "8")),
        Variant("layers-3", BASE, ("--num-layers", "3")),
        Variant("layers-1", BASE, ("--num-layers", "1")),
        Variant("dpace", BASE, ("--loss", "dpace")),
        Variant("by-conversation", BASE, ("--anchors-by", "conversation")),
        Variant("fraction-0.5", BASE, ("--fraction", "0.5")),
        Variant("fraction-0.25", BASE, ("--fraction", "0.25")),
        Variant("fraction-0.1", BASE, ("--fraction", "0.1")),
        Variant("original-answers", "original"),
    ),
    "peer": (
        Variant(RAW, RAW),
        Variant(SCALED, SCALED),
        Variant(f"{RAW}-by-conversation", RAW, ("--anchors-by", "conversation")),
        Variant(f"{SCALED}-by-conversation", SCALED, ("--anchors-by", "conversation")),
        Variant("peer-specforge", SCALED, ("--rule", "specforge", "--features", "raw"), peer=True),
        Variant("peer-scaled", SCALED, ("--rule", "ours", "--features", "scaled"), peer=True),
        Variant("peer-our-labels", SCALED, ("--rule", "ours", "--features", "raw"), peer=True),
    ),
}
"""By name; a variant that several have is run once."""


def expand(plans: Iterable[str], seeds: Iterable[int], only: Sequence[str] = ()) -> list[tuple[Variant, int]]:
    """The runs of some plans, each once: all of the first seed, then all of the second."""
    variants = {variant.name: variant for plan in plans for variant in PLANS[plan]}
    unknown = set(only) - variants.keys()
    if unknown:
        raise SystemExit(f"{', '.join(sorted(unknown))}: no variants of these plans, which have {', '.join(variants)}")
    chosen = [variant for name, variant in variants.items() if not only or name in only]
    return [(variant, seed) for seed in seeds for variant in chosen]


def missing(
    runs: Sequence[tuple[Variant, int]], lines: Sequence[dict[str, Any]], steps: int, settings: dict[str, Any]
) -> list[tuple[Variant, int]]:
    """Those runs that no line has, with these steps and settings."""
    done = {
        (line["variant"], line["seed"]) for line in lines if line["steps"] == steps and line["settings"] == settings
    }
    return [(variant, seed) for variant, seed in runs if (variant.name, seed) not in done]
