"""What a training run is made from: one frozen dataclass, checked across its fields before anything costs time.

The values are written into every checkpoint. A resumed run may change those of `HARMLESS_FIELDS`, which decide how long
and how observably it runs; every other difference is refused by name, because the curve would no longer be one run's.
Symbols: S tokens of a row, A anchors a row, K block size, R rows of an optimizer step.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.machine.disks import remote_stores_folder
from dflash_train.store.location import CACHE_BYTES, StoreLocation, StoreUrl, located, parse_store

SCHEDULES = ("cosine", "wsd", "constant")
LOSSES = ("decay", "dpace")
ANCHORS_BY = ("token", "conversation")
OPTIMIZERS = ("adamw", "muon")
PRECISIONS = ("bf16", "fp8")
PAPER_EPOCHS = 6  # DFlash, section 5.1 (arXiv 2602.06036)
PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # DFlash, section 4.2: gamma by block size

HARMLESS_FIELDS = frozenset(
    ("store", "run", "devices", "steps", "epochs", "save_every", "keep", "evaluate_every", "evaluate_rows")
    + ("log_every", "read_ahead", "direct_io", "compile_cache", "cache_folder", "cache_bytes", "bad_step_limit")
    + ("activation_checkpointing", "more_stores")
    + ("evaluate_target", "evaluate_prompts", "evaluate_prompts_limit", "evaluate_new_tokens")
    + ("num_layers", "block_size", "drafter_config", "mask_token")  # compared as the drafter that they make
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of `dflash train-drafter`; one field for each command-line option."""

    store: StoreLocation
    """Folder or URL (`parse_store`) of the store that `dflash extract` wrote; nothing else is read."""
    more_stores: tuple[Path, ...] = ()
    """Further folders with an equal manifest, read as one with `store`; on the command line --store again."""
    run: Path
    """Folder of this run: checkpoints, metrics, ledger and logs. The same folder again means: go on."""
    devices: str | None = None
    """GPUs as nvidia-smi numbers them («5-7»), «cpu», or «cpu:2»; by default every GPU, or one CPU process."""
    num_layers: int = 5
    """Decoder layers of the drafter; 5 is the paper's best speed-up (table 7.4 of its ablations)."""
    block_size: int = 16
    """K: tokens of a block, the anchor included, so the drafter proposes K - 1; 16 generalises down, never up."""
    drafter_config: Path | None = None
    """A drafter's config.json in z-lab's format, used instead of num_layers, block_size and the target's geometry."""
    init_from: Path | None = None
    """A drafter whose weights a new run starts from, and whose config.json it takes: a folder in z-lab's format, or a
    run. A run that goes on reads its own checkpoint instead."""
    mask_token: int | str | None = None
    """Id or text of the token in the block's open slots; by default the tokenizer's own, else its first unused row."""
    row_tokens: int = 8192
    """S: tokens of a row; samples are packed whole, so at least the longest sample unless `crop`."""
    anchors: int = 1024
    """A: blocks of a row; one anchor in 8 tokens keeps the drafter busier than the context it reads."""
    anchors_by: str = "token"
    """How a row's anchors are drawn: token, each supervised token is as likely; conversation, each conversation gets as
    many, at most its candidates, as in SpecForge (its number is of a conversation)."""
    rows_per_step: int = 6
    """R: rows of an optimizer step over all devices; 6 splits evenly over 1, 2, 3 or 6 devices."""
    crop: bool = False
    """Cut samples longer than row_tokens at the tail instead of refusing them."""
    steps: int | None = None
    """Optimizer steps of the whole run; 0 writes the untrained drafter and stops. Excludes epochs."""
    epochs: int | None = None
    """Passes over the store, anchors drawn anew in each; 6 (the paper's) where steps is not given either."""
    optimizer: str = "adamw"
    """adamw (the paper's); muon: the layers' matrices by torch.optim.Muon, `fc` and the norms still by AdamW."""
    lr: float = 6e-4
    """Peak learning rate (the paper's); Muon's updates are scaled to the size of AdamW's, so the same serves both."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moments; unpublished by the paper, the values usual for transformers of this size."""
    weight_decay: float = 0.0
    """Decay of matrices, never of norms; 0 as in SpecForge and DeepSpec."""
    clip: float = 1.0
    """Largest norm of the whole gradient (the paper's)."""
    warmup_ratio: float = 0.04
    """Share of the steps over which the learning rate rises from 0 (the paper's)."""
    schedule: str = "cosine"
    """cosine, wsd (flat, then a fall over the last `decay_ratio` of the steps) or constant."""
    decay_ratio: float = 0.2
    """Share of the steps that fall under wsd."""
    min_lr_ratio: float = 0.1
    """Last learning rate over the peak, for cosine and wsd."""
    activation_checkpointing: bool = False
    """Keep only the layers' inputs and compute the rest again in the backward pass: less memory, about a third more
    work on the layers."""
    loss: str = "dpace"
    """dpace: a slot weighs what it adds to the expected run of accepted drafts (arXiv 2605.18810); decay: weights
    exp(-(k - 1) / gamma) by slot (the paper's)."""
    gamma: float | None = None
    """Slots over which the weight falls by e; by default 7, 5, 4 for K = 16, 10, 8 (the paper's), else (K - 1) / 2."""
    dpace_alpha: float = 0.5
    """Smoothing of D-PACE's probabilities towards 1 (its paper's)."""
    seed: int = 0
    """Seeds the drafter's first weights, the rows and the anchors."""
    holdout: float = 0.02
    """Share of the conversations (by group, so no conversation is on both sides) kept for evaluation; 0 for none."""
    evaluate_every: int = 500
    """Steps between held-out evaluations."""
    evaluate_rows: int = 32
    """Most rows of one held-out evaluation, the same each time."""
    evaluate_target: str | None = None
    """The target, to measure the real acceptance length at every evaluation; it stays on the first device. None: only
    the estimate."""
    evaluate_prompts: str | None = None
    """Prompts for that, as in `dflash evaluate --data`; those of the training data are left out."""
    evaluate_prompts_limit: int = 8
    """Prompts of these, a sample by a hash of what they ask."""
    evaluate_new_tokens: int = 128
    """Tokens decoded for each of them, greedily."""
    save_every: int = 1000
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 3
    """Newest checkpoints that stay, beside the best one by acceptance length: the real one where it is measured, else the
    held-out estimate."""
    log_every: int = 10
    """Steps between lines on the terminal; metrics.jsonl has every step."""
    read_ahead: int = 3
    """Rows read ahead of the step by each process, in pinned memory on CUDA."""
    precision: str = "bf16"
    """bf16, or fp8: products of the drafter and of the frozen head in e4m3, on a GPU that has it (experimental)."""
    follow: bool = False
    """Train while extracts fill the store: in rounds over what is there (follow.py), waiting where the data is behind."""
    consume: int | None = None
    """Remove a segment after so many passes, once a checkpoint is behind them: a bounded disk, at the price of a store
    that is gone afterwards. Needs `follow`; takes the place of epochs."""
    fraction: float = 1.0
    """Share of the samples to train on, chosen by their ids, so that a smaller share is part of a larger one; the
    held-out samples stay the same."""
    direct_io: bool = False
    """Read features past the page cache: less than half the CPU time, and the cache stays free for others. Off, because
    buffered reads are quicker where the CPU is idle or the store fits into memory."""
    compile_cache: Path | None = None
    """Folder of compiled kernels, `rank-N` of it for each process, best on a local disk. None: compile-cache in the run
    folder; under torchrun on several machines one in the user's cache folder. Nobody else's cache is touched."""
    cache_folder: Path | None = None
    """Where rows and small files of a store at a URL are kept; None is dflash-train/stores in the user's cache folder."""
    cache_bytes: int = CACHE_BYTES
    """Most bytes of rows kept there, by all processes and runs together; 0 keeps none."""
    bad_step_limit: int = 10
    """Steps in a row with a loss or gradient that is not finite, each skipped, before the run stops."""

    def __post_init__(self) -> None:
        store = parse_store(self.store) if isinstance(self.store, str) else self.store
        stores = remote_stores_folder(self.cache_folder)
        object.__setattr__(self, "store", located(store, stores, self.cache_bytes))
        for more in self.more_stores:
            if isinstance(self.store, StoreUrl) or isinstance(more, StoreUrl) or "://" in str(more):
                raise InputError(
                    f"Several stores are read as one only where all are folders, and one of {self.store} and {more} is a "
                    "URL. Give one --store."
                )
        object.__setattr__(self, "more_stores", tuple(map(Path, self.more_stores)))
        if self.follow and isinstance(self.store, StoreUrl):
            raise InputError(
                f"--follow wants a folder, and {self.store} is a URL. Leave it out, or follow a store on a local disk."
            )
        object.__setattr__(self, "run", Path(self.run))
        for name in ("drafter_config", "init_from", "compile_cache"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        if self.drafter_config is not None and self.init_from is not None:
            raise InputError(
                f"Both --drafter-config {self.drafter_config} and --init-from {self.init_from} are given, but the "
                "drafter that the weights come from has a config.json of its own. Give one of the two."
            )
        object.__setattr__(self, "betas", tuple(self.betas))
        if self.steps is not None and self.epochs is not None:
            raise InputError(
                f"Both --steps {self.steps} and --epochs {self.epochs} are given. Give one: the other follows from it."
            )
        if self.consume is not None and not self.follow:
            raise InputError(
                f"--consume {self.consume} removes data and is for a growing store only. Give --follow, too."
            )
        if self.consume is not None and self.epochs is not None:
            raise InputError(
                f"Both --consume {self.consume} and --epochs {self.epochs} say how often a sample is trained on. Give one."
            )
        if self.follow and self.more_stores:
            raise InputError(
                f"--follow is for one growing store, but {1 + len(self.more_stores)} are given. Name the one that grows, or "
                "train on several without --follow."
            )
        if not 0 < self.fraction <= 1:
            raise InputError(f"--fraction is {self.fraction}; it is a share above 0 and of at most 1.")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"--{_option(name)} is {value}, but at least {least} is needed.")
        if (self.evaluate_target is None) != (self.evaluate_prompts is None):
            given, missing = ("target", "prompts") if self.evaluate_prompts is None else ("prompts", "target")
            raise InputError(f"--evaluate-{given} needs --evaluate-{missing}; give both or neither.")
        if self.anchors > self.row_tokens:
            raise InputError(
                f"--anchors {self.anchors} is more than --row-tokens {self.row_tokens}: a row has at most one anchor a "
                "token. Lower --anchors."
            )
        for name, choices in (
            ("schedule", SCHEDULES),
            ("loss", LOSSES),
            ("optimizer", OPTIMIZERS),
            ("precision", PRECISIONS),
            ("anchors_by", ANCHORS_BY),
        ):
            if getattr(self, name) not in choices:
                raise InputError(f"--{_option(name)} is {getattr(self, name)!r}; choose one of {', '.join(choices)}.")
        for name in ("warmup_ratio", "decay_ratio", "min_lr_ratio", "dpace_alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"--{_option(name)} is {getattr(self, name)}; it is a share between 0 and 1.")
        if not 0 <= self.holdout < 1:
            raise InputError(f"--holdout is {self.holdout}; it is a share of at least 0 and below 1.")
        for name in ("lr", "clip", "gamma", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not ((value > 0 or name == "weight_decay") and math.isfinite(value)):
                raise InputError(
                    f"--{_option(name)} is {value}; it must be finite and {'at least' if name == 'weight_decay' else 'above'} 0."
                )
        if self.seed >= 2**63:
            raise InputError(f"--seed is {self.seed}, but must be below 2**63.")
        if not all(0 <= beta < 1 for beta in self.betas) or len(self.betas) != 2:
            raise InputError(f"--betas are {self.betas}; two numbers of at least 0 and below 1 are needed.")

    @property
    def num_epochs(self) -> int | None:
        """Passes over the store, or None where the number of steps is what ends the run."""
        return self.epochs if self.epochs is not None or self.steps is not None else PAPER_EPOCHS

    @property
    def store_folder(self) -> Path:
        """The store as a folder, which --follow, --consume and several stores imply."""
        assert isinstance(self.store, Path), f"{self.store} is a URL"
        return self.store

    def gamma_for(self, block_size: int) -> float:
        """The decay constant of the block weights: as given, else the paper's for this block size."""
        return self.gamma if self.gamma is not None else PAPER_GAMMA.get(block_size, (block_size - 1) / 2)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values, paths as text."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _json_value(value) for name, value in values.items()}

    def changes(self, recorded: Mapping[str, Any]) -> list[str]:
        """Options that differ from those a checkpoint recorded and would change what the run computes, in words."""
        lines = []
        for name, value in self.to_json().items():
            if name not in HARMLESS_FIELDS and name in recorded and recorded[name] != value:
                lines.append(f"--{_option(name)} is {value}, the checkpoint has {recorded[name]}")
        return lines


_LEAST = {
    "num_layers": 1,
    "block_size": 2,
    "row_tokens": 2,
    "anchors": 1,
    "rows_per_step": 1,
    "steps": 0,
    "epochs": 1,
    "consume": 1,
    "weight_decay": 0,
    "seed": 0,
    "evaluate_every": 1,
    "evaluate_rows": 1,
    "evaluate_prompts_limit": 1,
    "evaluate_new_tokens": 1,
    "save_every": 1,
    "keep": 1,
    "log_every": 1,
    "read_ahead": 1,
    "cache_bytes": 0,
    "bad_step_limit": 1,
}


def _option(name: str) -> str:
    return name.replace("_", "-")


def _json_value(value: Any) -> Any:
    if isinstance(value, Path | StoreUrl):
        return str(value)
    return [_json_value(item) for item in value] if isinstance(value, tuple) else value
