"""What the recipes beside this file cost: GPU-hours of each step, and bytes of the store in each encoding.

    python examples/qwen3/forecast.py

prints the tables of README.md, for Qwen3-4B and Qwen3-8B on H200s. A rate that was measured is quoted from
docs/performance.md; one that was not is scaled from the 8B's by model work, and marked so. Once it is measured, put it into
the tables below and the output into README.md.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dflash_train.benchmarks.drafter_step import GEOMETRIES, model_flops
from dflash_train.benchmarks.random_target import GEOMETRIES as TARGETS
from dflash_train.stage1_target.forecast import frozen_bytes, sample_bytes
from dflash_train.stage2_drafter.rows import plan_rows
from dflash_train.store.encoding import ENCODINGS, is_projected, make_encoding

NAMES = {"qwen3-4b": "Qwen3-4B", "qwen3-8b": "Qwen3-8B"}
MEASURED = "qwen3-8b"
EXTRACT_TOKENS_PER_SECOND = {"qwen3-8b": 41_269}
"""`dflash extract --compile-target`, int8, one H200: docs/performance.md, «What limits extract»."""
STEP_MS = {"qwen3-8b": 246.6}
"""`dflash train-drafter`, a row of 8,192 tokens with 1,024 anchors, six rows a step, one H200: benchmarks/training_step.py."""
BARE_STEP_MS = {"qwen3-4b": 144.5, "qwen3-8b": 238.0}
"""Its forward and backward alone: benchmarks/drafter_step.py. A geometry that has only this one gets the 8B's ratio."""
REGENERATE_TOKENS_PER_SECOND = {"qwen3-4b": 7136, "qwen3-8b": 5694}
"""Quoted, not measured here: SGLang without a drafter, 32 requests in flight, one B200 (arXiv 2602.06036, MATH-500)."""

SAMPLES = {"100,000": 100_000, "800,000": 800_000}
MEAN_TOKENS, MAX_TOKENS, SPREAD = 1500, 3072, 0.6
"""Assumed: lognormal lengths cut at --max-tokens, prompts included."""
ANSWER_SHARE = 0.8
"""Assumed: tokens of the answers over all tokens."""
EPOCHS, ROW_TOKENS, ROWS_PER_STEP = 6, 8192, 6
DEFAULT_ANCHORS, PAPER_ANCHORS = 1024, 512
"""Of a row, and of a sequence."""
NUM_TAPS, LAST_TAP = 5, 33


class Rate(NamedTuple):
    """A rate, and how it is known."""

    value: float
    source: str


def assumed_lengths(num_samples: int, seed: int = 0) -> np.ndarray:
    """Lengths with a mean of MEAN_TOKENS after the cut, int64 [N]."""
    draws = np.random.default_rng(seed).lognormal(0.0, SPREAD, num_samples)
    scale = float(MEAN_TOKENS)
    for _ in range(20):  # the cut lowers the mean
        lengths = np.clip((draws * scale).astype(np.int64), 16, MAX_TOKENS)
        scale *= MEAN_TOKENS / float(lengths.mean())
    return lengths


def fill_of_rows() -> float:
    """The share of a row's tokens that hold samples, by the trainer's own packing of the assumed lengths."""
    lengths = assumed_lengths(20_000)
    rows = plan_rows(lengths, np.random.default_rng(1).permutation(len(lengths)), ROW_TOKENS)
    return float(lengths.sum() / (len(rows) * ROW_TOKENS))


def target_flops(name: str) -> float:
    """Products of one token up to the last tapped layer; attention is not counted."""
    target = TARGETS[name]
    hidden, head_dim = target["hidden_size"], target["head_dim"]
    heads = 2 * target["num_attention_heads"] + 2 * target["num_key_value_heads"]
    layer = hidden * head_dim * heads + 3 * hidden * target["intermediate_size"]
    return float(2 * (LAST_TAP + 1) * layer)


def extract_rate(name: str) -> Rate:
    """Tokens a second of one H200."""
    if name in EXTRACT_TOKENS_PER_SECOND:
        return Rate(EXTRACT_TOKENS_PER_SECOND[name], "measured")
    return Rate(EXTRACT_TOKENS_PER_SECOND[MEASURED] * target_flops(MEASURED) / target_flops(name), "scaled")


def step_ms(name: str, num_anchors: int) -> Rate:
    """Milliseconds for one row on one H200."""
    if name in STEP_MS and num_anchors == DEFAULT_ANCHORS:
        return Rate(STEP_MS[name], "measured")
    if name in BARE_STEP_MS and num_anchors == DEFAULT_ANCHORS:
        return Rate(BARE_STEP_MS[name] * STEP_MS[MEASURED] / BARE_STEP_MS[MEASURED], "bare step measured")
    base = name if name in STEP_MS else MEASURED
    work = model_flops(replace(GEOMETRIES[name], num_anchors=num_anchors)) / model_flops(GEOMETRIES[base])
    return Rate(STEP_MS[base] * work, "scaled")


def num_rows(num_samples: int, fill: float) -> float:
    """Rows of all epochs."""
    return num_samples * MEAN_TOKENS * EPOCHS / (ROW_TOKENS * fill)


def store_bytes(name: str, encoding_name: str, num_samples: int) -> int:
    """As `dflash extract --dry-run` adds it up; projections at rank H."""
    hidden_size = TARGETS[name]["hidden_size"]
    encoding = make_encoding(encoding_name, NUM_TAPS, hidden_size, hidden_size if is_projected(encoding_name) else None)
    frozen = frozen_bytes(encoding, SimpleNamespace(**TARGETS[name]), table_bytes=2)
    return sample_bytes(encoding, num_samples, num_samples * MEAN_TOKENS) + frozen


def hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f}" if seconds < 36_000 else f"{seconds / 3600:,.0f}"


def rates_table() -> list[str]:
    lines = ["| rate, one GPU | Qwen3-4B | Qwen3-8B |", "|---|---|---|"]

    def cells(rates: list[Rate], form: str) -> str:
        return " | ".join(f"{form.format(rate.value)} ({rate.source})" for rate in rates)

    paper = paper_anchors()
    quoted = [Rate(REGENERATE_TOKENS_PER_SECOND[name], "quoted") for name in NAMES]
    lines.append(f"| regenerate, answer tokens/s | {cells(quoted, '{:,.0f}')} |")
    lines.append(f"| extract, tokens/s | {cells([extract_rate(name) for name in NAMES], '{:,.0f}')} |")
    for anchors in (DEFAULT_ANCHORS, paper):
        rates = [step_ms(name, anchors) for name in NAMES]
        lines.append(f"| train, ms a row with {anchors:,} anchors | {cells(rates, '{:,.0f}')} |")
    return lines


def paper_anchors() -> int:
    """Anchors of a row that are as many as the paper's 512 for each of its sequences, to the next multiple of 128."""
    return round(PAPER_ANCHORS * ROW_TOKENS / MEAN_TOKENS / 128) * 128


def hours_table(fill: float) -> list[str]:
    paper = paper_anchors()
    lines = [
        f"| GPU-hours | regenerate | extract | train, {DEFAULT_ANCHORS:,} anchors | all | train, {paper:,} anchors |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in NAMES.items():
        for label, samples in SAMPLES.items():
            tokens = samples * MEAN_TOKENS
            answers = tokens * ANSWER_SHARE / REGENERATE_TOKENS_PER_SECOND[name]
            states = tokens / extract_rate(name).value
            rows = num_rows(samples, fill)
            train, dense = (rows * step_ms(name, anchors).value / 1e3 for anchors in (DEFAULT_ANCHORS, paper))
            cells = [answers, states, train, answers + states + train, dense]
            lines.append(f"| {title}, {label} samples | {' | '.join(map(hours, cells))} |")
    return lines


def bytes_table() -> list[str]:
    lines = [f"| store, TB | {' | '.join(ENCODINGS)} |", f"|---{'|---' * len(ENCODINGS)}|"]
    for name, title in NAMES.items():
        for label, samples in SAMPLES.items():
            sizes = [store_bytes(name, encoding, samples) / 1e12 for encoding in ENCODINGS]
            lines.append(f"| {title}, {label} samples | {' | '.join(f'{size:.2f}' for size in sizes)} |")
    return lines


def tables() -> list[list[str]]:
    """The tables of README.md, as lines."""
    return [rates_table(), hours_table(fill_of_rows()), bytes_table()]


def main() -> None:
    fill = fill_of_rows()
    print("\n\n".join("\n".join(table) for table in tables()))
    print(f"\nrows are {fill:.1%} full; 800,000 samples make {num_rows(800_000, fill) / ROWS_PER_STEP:,.0f} steps")
    for name, title in NAMES.items():
        encoding = make_encoding("int8", NUM_TAPS, TARGETS[name]["hidden_size"])
        pace = ROW_TOKENS * encoding.bytes_per_token / step_ms(name, DEFAULT_ANCHORS).value / 1e3
        print(f"{title}: each training GPU reads {pace:,.0f} MB/s of an int8 store")


if __name__ == "__main__":
    main()
