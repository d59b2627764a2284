"""What a line of quality.py's results says of a run beside its acceptance length: its rows, its bytes, its metrics."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_train.stage2_drafter.rows import RowSchedule, split_samples
from dflash_train.stage2_drafter.run_folder import read_metrics
from dflash_train.store.reader import StoreReader

LAST_STEPS = 50
"""Steps at the end of a run whose mean is its training loss."""
RECOMPILE_LIMIT_PASSED = "torch._dynamo hit config."
"""How torch's warning begins, of recompile_limit or accumulated_recompile_limit (2.11, _dynamo/convert_frame.py)."""


def planned_rows(
    store: Path, segments: Sequence[str] | None, seed: int, steps: int, options: argparse.Namespace, fraction: float
) -> tuple[dict[str, Any], list[int]]:
    """What a run of train-drafter trains on: a hash of the sample ids of all its rows in order, and each step's tokens.

    Planned by the trainer's own functions from the samples of these segments.
    """
    reader = StoreReader(store, segments)
    samples = reader.samples
    ids, lengths = np.asarray(samples["id"]), np.asarray(samples["length"]).astype(np.int64)
    training, _ = split_samples(ids, np.asarray(samples["group"]), options.holdout, fraction)
    schedule = RowSchedule(lengths, training, seed=seed, row_tokens=options.row_tokens, epochs=None)
    hashed, tokens = hashlib.blake2b(digest_size=8), []
    for step in range(steps):
        rows = [schedule.samples(key) for key in schedule.step_keys(step, options.rows_per_step, 0, 1) if key]
        for row in rows:
            hashed.update(ids[row].astype("<i8").tobytes() + b"|")
        tokens.append(int(sum(lengths[row].sum() for row in rows)))
    record = {
        "hash": hashed.hexdigest(),
        "samples": len(training),
        "tokens": int(lengths[training].sum()),
        "supervised_tokens": int(np.asarray(samples["supervised"])[training].sum()),
        "passes": sum(tokens) / max(int(lengths[training].sum()), 1),
    }
    return record, tokens


def store_bytes(store: Path) -> dict[str, float]:
    """Bytes a token: of features and scales, of all arrays of a segment, and of the whole folder with the target's tables."""
    reader = StoreReader(store)
    encoding = reader.encoding
    num_tokens = max(int(reader.samples["length"].sum()), 1)
    whole = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    features = encoding.num_columns * encoding.storage_dtype.itemsize + 4 * encoding.num_scales
    return {"features": features, "arrays": encoding.bytes_per_token, "store": whole / num_tokens}


def questions(path: Path) -> set[str]:
    """The first question of every conversation of a jsonl file, without its spaces at either end."""
    found = set()
    for line in path.read_bytes().split(b"\n"):  # text may hold line separators of its own
        turns = (json.loads(line) if line else {}).get("messages") or ()
        found |= {str(turn["content"]).strip() for turn in turns if turn["role"] == "user" and "content" in turn}
    return found


def read_run(run: Path) -> dict[str, Any]:
    """Losses, held-out evaluation and waits from a run's metrics."""
    steps = read_metrics(run) if (run / "metrics.jsonl").exists() else []
    held_out = read_metrics(run, "evaluation") if steps else []
    losses = [line["loss"] for line in steps[-LAST_STEPS:] if line["loss"] is not None]
    seconds = [line["tokens"] / line["tokens_per_second"] for line in steps if line.get("tokens_per_second")]
    waits = [line["wait_share"] for line in steps if line.get("tokens_per_second")]
    named = (
        "loss",
        "cross_entropy",
        "acceptance_length",
        "acceptance_length_over_anchors",
        "rounds",
        "accuracy",
        "rows",
    )
    return {
        "training_loss": statistics.fmean(losses) if losses else None,
        "held_out": {name: held_out[-1].get(name) for name in named} if held_out else None,
        "skipped_steps": sum(bool(line.get("skipped")) for line in steps),
        "step_seconds": statistics.median(seconds) if seconds else None,
        "wait_share": sum(a * b for a, b in zip(seconds, waits, strict=True)) / sum(seconds) if seconds else None,
        "step_tokens": [line["tokens"] for line in steps],
    }


def compile_facts(text: str) -> dict[str, Any]:
    """What a run's log says of compilation; None for what it does not say.

    Ours ends at the first graph after its warm-up, the peer's step goes on: it makes graphs as shapes come, up to torch's
    limit, of which torch warns once a function, and beyond which that function is not compiled.
    """
    ours = re.findall(r"compiled (\d+) graphs? in (\d+) s, ([\d,]+) recompilations?", text)
    *_, peers = [None, *re.finditer(r"(\d+) graphs compiled\. Measure it by", text)]
    found = ours[-1] if ours else (None if peers is None else peers[1], None, None)
    numbers = [None if number is None else int(number.replace(",", "")) for number in found]
    return {
        **dict(zip(("graphs", "compile_seconds", "recompilations"), numbers, strict=True)),
        "recompile_limit_passed": None if peers is None else RECOMPILE_LIMIT_PASSED in text[: peers.start()],
    }


def hash_file(path: Path | None) -> str:
    """Short hash of a file's bytes, "" for none."""
    return "" if path is None else hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()


def hash_json(value: Any) -> str:
    """Short hash of what JSON can hold."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()
