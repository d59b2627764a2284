"""What a user can set of an import, with the reasons for the defaults, and how it ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from dflash_train.errors import InputError
from dflash_train.stage1_target.encoding_choice import check_encoding
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.store.encoding import AUTO_RANK


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """One import: which files of which layers of which target into which store."""

    source: Path
    """Folder that another program wrote."""
    store: Path
    """Folder of the store; made if it is missing, filled up if it is there."""
    target: TargetConfig
    """The target that made the states; dtype «auto» is that of the states."""
    layers: tuple[int, ...]
    """Layers in the files, in their order, as the program that wrote them numbers them; without the extra last one."""
    layout: str | None = None
    """«speculators» or «specforge»; None is told from the names of the files."""
    hidden_states: Path | None = None
    """Where speculators' safetensors files lie if not in `hidden_states` below the source."""
    device: str = "cpu"
    """Where the samples are checked and encoded."""
    encoding: str = "int8"
    """As in an extract."""
    rank: str = AUTO_RANK
    """As in an extract."""
    segment_bytes: int = 2_000_000_000
    """A segment is committed at this size; bytes."""
    segment_seconds: float = 300.0
    """… or at this age: what a kill loses at most."""
    calibration_tokens: int = 65_536
    """Tokens of a random draw of files that channel scale and projection are measured on."""
    calibration_from: Path | None = None
    """Take channel scale and projection of this store instead."""
    check_samples: int = 2
    """Files to run again before anything is stored, to prove the layers; 0 trusts them."""
    seed: int = 0
    """Of the order of the files and the calibration draw."""

    def __post_init__(self) -> None:
        for name in ("segment_bytes", "segment_seconds", "calibration_tokens"):
            if not getattr(self, name) > 0:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}, but must be more than 0.")
        for name in ("check_samples", "seed"):
            if not 0 <= getattr(self, name) < 2**63:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}, but must be at least 0.")
        check_encoding(self.encoding, self.rank)


@dataclass(kw_only=True)
class ImportResult:
    """How an import ended."""

    num_files: int
    num_stored: int = 0
    """Files whose sample was stored before this run."""
    num_new: int = 0
    num_new_tokens: int = 0
    num_duplicates: int = 0
    """Files whose sample this run had from another file."""
    num_padding: int = 0
    """Tokens of padding that were cut off."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why files went into quarantine in this run; num_known more did before."""
    num_known: int = 0
    stopped: bool = False
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """The result as text, the summary last."""
        lines = [f"quarantined: {count:,} x {reason}" for reason, count in self.reasons.most_common(5)]
        if self.num_padding:
            lines.append(f"cut off: {self.num_padding:,} tokens of padding")
        if self.num_duplicates:
            lines.append(f"{self.num_duplicates:,} files hold a sample that another file holds, too")
        quarantined = self.num_known + self.reasons.total()
        done = self.num_stored + self.num_new + self.num_duplicates + quarantined
        if not self.num_new and not self.reasons and not self.stopped:
            return [
                *lines,
                f"nothing to do: all {self.num_files:,} files are stored or in quarantine ({quarantined:,})",
            ]
        text = f"imported {self.num_new:,} of {self.num_files:,} files ({self.num_new_tokens:,} tokens); "
        text += f"{self.num_stored:,} were stored before, {quarantined:,} are in quarantine"
        return [*lines, f"{text}; run again to go on" if done < self.num_files else text]
