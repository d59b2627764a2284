"""Everything a user can set of an extract, with the reasons for the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_train.errors import InputError
from dflash_train.machine.disks import remote_stores_folder
from dflash_train.stage1_target.encoding_choice import check_encoding, resolve_encoding
from dflash_train.stage1_target.samples import DataConfig
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.store.encoding import AUTO_RANK, Encoding, is_projected
from dflash_train.store.location import StoreLocation, StoreUrl, located
from dflash_train.store.manifest import Manifest
from dflash_train.units import parse_size


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """One extract: which target over which data into which store."""

    target: TargetConfig
    """The frozen target."""
    data: DataConfig
    """The conversations."""
    store: StoreLocation
    """Folder or URL (`parse_store`) of the store; made if it is missing, filled up if it is there."""
    devices: str | None = None
    """GPU numbers like 0-4 or 5,7, or cpu, or cpu:3; None is every GPU, or one CPU worker where there is none."""
    gpus_per_target: int = 1
    """GPUs that hold one copy of the target, layers in turn; more than one only where it does not fit one."""
    encoding: str = "int8"
    """How features are stored: bf16 is exact, int8 takes half the bytes, projected-int8 and -int4 fewer by far."""
    rank: str = AUTO_RANK
    """Features a token of a projected encoding: a number, a multiple of the hidden size such as 2H, or auto, which is that
    of the store or of `calibration_from` where they have one, else H."""
    target_layer_ids: tuple[int, ...] | None = None
    """Decoder layers to tap, 0 is the first; None takes `num_taps` by z-lab's rule."""
    num_taps: int = 5
    """How many layers z-lab's rule taps; 5 in its released drafters."""
    batch_tokens: int = 16_384
    """Tokens of one forward, padding included; more saves little beyond this (30,000 tokens/s at 16 x 2048 and 8 x 2048
    alike on one H200)."""
    compile_target: bool = False
    """Compile the target's decoder layers; quicker batches for some 20 s at each worker's start, so it is for runs of
    some millions of tokens a GPU, and states differ by bfloat16 noise from those of a run without."""
    segment_bytes: int = 2_000_000_000
    """A segment is committed at this size; bytes."""
    segment_seconds: float = 300.0
    """… or at this age: what a killed worker loses at most."""
    max_store_size: str | None = None
    """Pause while the store would be larger than this («2TB», «500GiB», or bytes): for a trainer that consumes it."""
    calibration_tokens: int = 65_536
    """Tokens of the random draw that channel scale and projection are measured on; all, if there are fewer."""
    calibration_from: StoreLocation | None = None
    """Take channel scale and projection of this store instead, so that both can be trained on together."""
    projection_from: Path | None = None
    """Let the projection begin with the row space of this drafter's `fc`, so that nothing it looks at is lost; counts when
    the store is made."""
    seed: int = 0
    """Of the schedule's shuffle and the calibration draw."""
    sample_cache: Path | None = None
    """Where tokenised samples are kept; None is dflash-train/samples in the user's cache folder."""
    log_folder: Path | None = None
    """Where each run puts its workers' logs; None is `<store>.logs`."""
    require_fast_kernels: bool = False
    """Whether a fast path that is missing (kernels of linear attention, sdpa, bf16 weights, tokenizer) is an error."""
    cache_folder: Path | None = None
    """Where what goes to a store at a URL waits for its upload, a segment a worker; None is dflash-train/stores in the
    user's cache folder."""
    dry_run: bool = False
    """Forecast only; nothing but the sample cache is written."""

    @property
    def max_store_bytes(self) -> int | None:
        """`max_store_size` as a number."""
        return parse_size(self.max_store_size)

    def __post_init__(self) -> None:
        try:
            parse_size(self.max_store_size)
        except (ValueError, KeyError, OverflowError):
            raise InputError(
                f"--max-store-size is {self.max_store_size!r}; write a size like 2TB, 500GiB, or a number of bytes."
            ) from None
        for name in (
            "num_taps",
            "gpus_per_target",
            "batch_tokens",
            "segment_bytes",
            "segment_seconds",
            "calibration_tokens",
        ):
            if not getattr(self, name) > 0:  # NaN is not
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}, but must be more than 0.")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed is {self.seed}, but must be at least 0 and below 2**63.")
        stores = remote_stores_folder(self.cache_folder)
        object.__setattr__(self, "store", located(self.store, stores))
        if self.max_store_size is not None and isinstance(self.store, StoreUrl):
            raise InputError(f"--max-store-size is for local folders, and {self.store} is a URL. Leave it out.")
        if self.calibration_from is not None:
            object.__setattr__(self, "calibration_from", located(self.calibration_from, stores))
        folders = {name: getattr(self, name) for name in ("log_folder", "sample_cache")}
        for name, folder in folders.items():
            if folder is not None and folder.exists() and not folder.is_dir():
                raise InputError(
                    f"--{name.replace('_', '-')} is {folder}, a file, but must be a folder; name another path."
                )
        check_encoding(self.encoding, self.rank)
        if self.projection_from is not None and not is_projected(self.encoding):
            raise InputError(
                f"--projection-from {self.projection_from} is for the projected encodings, but --encoding is {self.encoding}."
            )
        if self.projection_from is not None and self.calibration_from is not None:
            raise InputError(
                "--projection-from and --calibration-from both say where the projection comes from; give one of them."
            )

    def resolve_encoding(self, num_layers: int, hidden_size: int, *manifests: Manifest | None) -> Encoding:
        """The encoding of L tapped layers of H channels; a rank of auto is the first that one of the manifests has."""
        return resolve_encoding(self.encoding, self.rank, num_layers, hidden_size, *manifests)
