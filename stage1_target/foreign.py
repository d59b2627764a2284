"""Hidden states that other trainers wrote, one file a sample: what is in their files, read without their packages.

speculators (0.9.0): a data set that `datasets` saved, with columns input_ids and loss_mask, and for its row i a file
`hidden_states/hs_<i>.safetensors` with token_ids [T] and hidden_states [T, P, H]. Plane p is layer ids[p] of the ids that
vLLM was launched with, counted as in `hidden_states` of transformers: id n is the output of decoder layer n - 1. One more
plane, the last, is the output of the last layer (`--include-last-layer`, its default).

SpecForge (0.2.0): `rows_<a>-<b>/data_<i>.ckpt` or `.ckpt.gz`, a dictionary of tensors by torch.save: input_ids [T],
loss_mask [T], aux_hidden_state [1, T, L * H], or hidden_states where it was captured for DFlash. Layers count from 0 by
decoder layer, as here. The last plane is a tensor of its own (hidden_state, target_last_hidden_states) and not looked at.

No file says which layers it holds; `check_states` (import_check.py) finds out. Pickles are read by torch's weights_only
loader alone, which runs no code.

Shapes: T tokens, L tapped target layers, P planes in a file, H hidden size.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_train.errors import InputError

STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class UnusableFile(Exception):
    """Why a file cannot be stored: the reason that goes into quarantine."""


@dataclass(frozen=True)
class StateFile:
    """One file of a layout."""

    number: int
    """Of the sample, as in the file's name."""
    path: Path
    name: str
    """Relative to the folder of all of them."""


@dataclass(frozen=True)
class ForeignSample:
    """One sample as another program wrote it."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    states: Tensor
    """[T, L * H] of the tapped layers in order, in the file's dtype."""


class Layout(ABC):
    """How one program lays out its files."""

    name: str
    first_layer: int
    """What the program calls the output of the first decoder layer."""
    pattern: re.Pattern[str]
    """Of the names of its files, with the sample's number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = self._list(folder)

    @classmethod
    def _list(cls, folder: Path) -> list[StateFile]:
        found = [(cls.pattern.fullmatch(path.name), path) for path in folder.rglob("*")]
        files = [
            StateFile(int(match[1]), path, path.relative_to(folder).as_posix())
            for match, path in found
            if match is not None
        ]
        return sorted(files, key=lambda file: (file.number, file.name))

    def layer_ids(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Decoder layers, 0 is the first, of layers as the program numbers them."""
        return tuple(number - self.first_layer for number in numbers)

    def show_layers(self, layer_ids: Sequence[int]) -> str:
        """The reverse, as one gives it on the command line."""
        return ",".join(str(layer_id + self.first_layer) for layer_id in layer_ids)

    def read_tokens(self, file: StateFile) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids and loss mask of a file, without its states where that is quicker; UnusableFile says why not."""
        tokens: tuple[NDArray[np.int32], NDArray[np.uint8]] = _guarded(self._read_tokens, file)
        return tokens

    def read(self, file: StateFile, num_layers: int, hidden_size: int) -> ForeignSample:
        """Read a file whole; UnusableFile says why it cannot be stored."""
        token_ids, loss_mask, states = _guarded(self._read, file, num_layers, hidden_size)
        if states.dtype not in STATE_DTYPES:
            raise UnusableFile(f"its states are {states.dtype}; wanted bfloat16, float16 or float32")
        if len(states) != len(token_ids):
            raise UnusableFile(f"it has states of {len(states)} tokens but {len(token_ids)} token ids")
        return ForeignSample(token_ids, loss_mask, states)

    def row_version(self, file: StateFile) -> str | None:
        """What tells one content of a file's row of the data set from another; None where all is in the file."""
        return None

    @abstractmethod
    def _read_tokens(self, file: StateFile) -> tuple[NDArray[np.int32], NDArray[np.uint8]]: ...

    @abstractmethod
    def _read(
        self, file: StateFile, num_layers: int, hidden_size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8], Tensor]: ...


class Speculators(Layout):
    """A data set saved by `datasets`, and one safetensors file a row."""

    name = "speculators"
    first_layer = 1
    pattern = re.compile(r"hs_(\d+)\.safetensors")

    def __init__(self, folder: Path, hidden_states: Path | None = None) -> None:
        super().__init__(hidden_states or folder / "hidden_states")
        import datasets

        try:
            loaded = datasets.load_from_disk(str(folder))
            self._rows: Any = loaded.select_columns(["input_ids", "loss_mask"]).with_format("numpy")
            self._num_rows = len(self._rows)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(
                f"{folder} holds no prepared data set of speculators with input_ids and loss_mask ({first}), but its loss "
                "masks are nowhere else. Give the folder that its prepare-data wrote, and --hidden-states where the states "
                "lie elsewhere."
            ) from error

    def _read_tokens(self, file: StateFile) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        from safetensors import safe_open

        with safe_open(file.path, framework="pt") as opened:
            return self._tokens(file, opened.get_tensor("token_ids"))

    def row_version(self, file: StateFile) -> str | None:
        try:
            row = _guarded(self._row, file)
        except UnusableFile as error:
            return str(error)
        values = [np.asarray(row[name]).tolist() for name in ("input_ids", "loss_mask")]
        return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()

    def _row(self, file: StateFile) -> Any:
        if file.number >= self._num_rows:
            raise UnusableFile(f"the data set has no row {file.number}, only {self._num_rows}")
        return self._rows[file.number]

    def _tokens(self, file: StateFile, token_ids: Tensor) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        row = self._row(file)
        if not np.array_equal(token_ids.numpy(), row["input_ids"]):
            raise UnusableFile("its token ids are not those of its row of the data set")
        return _tokens(row["input_ids"], row["loss_mask"])

    def _read(
        self, file: StateFile, num_layers: int, hidden_size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8], Tensor]:
        from safetensors import safe_open

        with safe_open(file.path, framework="pt") as opened:
            token_ids, loss_mask = self._tokens(file, opened.get_tensor("token_ids"))
            states = opened.get_tensor("hidden_states")
        if states.ndim != 3 or states.shape[1] not in (num_layers, num_layers + 1) or states.shape[2] != hidden_size:
            raise UnusableFile(
                f"its states have shape {list(states.shape)}, but tokens x {num_layers} layers, or one more, x "
                f"{hidden_size} channels are wanted"
            )
        return token_ids, loss_mask, states[:, :num_layers].flatten(1)


class SpecForge(Layout):
    """One file of torch.save a sample, in folders of some thousands."""

    name = "specforge"
    first_layer = 0
    pattern = re.compile(r"data_(\d+)\.ckpt(?:\.gz)?")

    def _read_tokens(self, file: StateFile) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        content = self._load(file, mmap=not file.name.endswith(".gz"))
        return _tokens(*(_flat(content, name).numpy() for name in ("input_ids", "loss_mask")))

    def _load(self, file: StateFile, mmap: bool) -> dict[str, Any]:
        source: Any = file.path
        if file.name.endswith(".gz"):
            source = io.BytesIO(gzip.decompress(file.path.read_bytes()))
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
        if not isinstance(content, dict):
            raise UnusableFile(f"it holds a {type(content).__name__}, not a dictionary of tensors")
        return content

    def _read(
        self, file: StateFile, num_layers: int, hidden_size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8], Tensor]:
        content = self._load(file, mmap=False)
        name = next((name for name in ("aux_hidden_state", "hidden_states") if content.get(name) is not None), None)
        if name is None:
            raise UnusableFile("it has neither aux_hidden_state nor hidden_states: only the last layer was captured")
        states = content[name]
        if not isinstance(states, Tensor):
            raise UnusableFile(f"its {name} is a {type(states).__name__}, no tensor")
        states = states.squeeze(0) if states.ndim == 3 else states
        if states.ndim != 2 or states.shape[1] != num_layers * hidden_size:
            raise UnusableFile(
                f"its {name} has shape {list(content[name].shape)}, but tokens x {num_layers} layers of {hidden_size} "
                "channels are wanted"
            )
        token_ids, loss_mask = (_flat(content, name).numpy() for name in ("input_ids", "loss_mask"))
        return *_tokens(token_ids, loss_mask), states


def open_layout(folder: Path, layout: str | None, hidden_states: Path | None = None) -> Layout:
    """The files below a folder, of the given layout or of the one whose files are there; InputError where there are none."""
    for path in (folder, hidden_states):
        if path is not None and not path.is_dir():
            raise InputError(
                f"{path} is {'a file' if path.exists() else 'not there'}, but a folder of states is wanted."
            )
    if layout is None:
        states = hidden_states or folder
        found = [kind.name for kind in (Speculators, SpecForge) if kind._list(states)]
        if len(found) != 1:
            what = "files of both speculators and SpecForge" if found else "no hs_….safetensors and no data_….ckpt"
            raise InputError(f"{states} holds {what}. Give the folder of one of them, or --layout.")
        layout = found[0]
    if layout == SpecForge.name and hidden_states is not None:
        raise InputError(
            "--hidden-states is for speculators, whose loss masks lie apart; give SpecForge's folder alone."
        )
    opened = SpecForge(folder) if layout == SpecForge.name else Speculators(folder, hidden_states)
    if not opened.files:
        raise InputError(f"{opened.folder} holds no file of {layout}. Give the folder of the hidden states.")
    return opened


def _guarded(function: Any, *arguments: Any) -> Any:
    """Call a reader; whatever a damaged file makes its library raise becomes a reason in one line."""
    try:
        return function(*arguments)
    except (UnusableFile, MemoryError):
        raise
    except Exception as error:  # zip, gzip, zlib, json, torch and safetensors raise their own
        if type(error).__name__ == "UnpicklingError":
            raise UnusableFile("it is damaged, or holds more than tensors, which could run code") from error
        first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        raise UnusableFile(f"it cannot be read: {type(error).__name__}{f': {first[:200]}' if first else ''}") from error


def _flat(content: dict[str, Any], name: str) -> Tensor:
    value = content.get(name)
    if not isinstance(value, Tensor):
        raise UnusableFile(f"it has no tensor {name}")
    return value.reshape(-1) if value.ndim == 2 and len(value) == 1 else value


def _tokens(token_ids: Any, loss_mask: Any) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    ids, mask = np.asarray(token_ids), np.asarray(loss_mask)
    if ids.ndim != 1 or mask.shape != ids.shape or not len(ids):
        raise UnusableFile(f"its token ids and loss mask have shapes {list(ids.shape)} and {list(mask.shape)}")
    if ids.dtype.kind not in "iu" or not ((ids >= 0) & (ids < 2**31)).all():
        raise UnusableFile("its token ids are no whole numbers from 0 on")
    if not np.isin(mask, (0, 1)).all():
        raise UnusableFile("its loss mask holds something else than 0 and 1")
    return ids.astype(np.int32), mask.astype(np.uint8)
