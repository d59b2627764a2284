"""Checkpoints: a drafter that engines load as it is, and beside it all that an exact resume needs. No pickle anywhere.

    run/checkpoints/step-00000120/
        model.safetensors, config.json   z-lab's format; fc folded back to raw hidden states in float64, rounded once
        trainer/masters.safetensors      fp32 parameters as trained (fc on D⁻¹h or P D⁻¹h)
        trainer/optimizer.safetensors    AdamW's moments
        trainer/state.json               step, options, segment ids, versions, last evaluation
        trainer/groups.npy               groups of the conversations trained on, so that none of them is evaluated on
        checksums.json                   size and crc32c of all of these, checked when one is read again
        trainer/evaluation.json          only where a stop came before the evaluation of this step: what the next start
                                         measured; written later than the rest, so checksums.json does not list it

A checkpoint is written under a temporary name, fsynced and renamed: a folder `step-…` is whole or absent. Tensors are
streamed one by one, so saving needs one tensor of extra memory, not a second copy of 16 bytes a parameter.
"""

import io
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_train.errors import InputError
from dflash_train.store.calibration import Calibration
from dflash_train.store.checksums import (
    CHECKSUMS_NAME,
    Checksum,
    check_sum,
    extend_crc,
    format_checksums,
    read_checksums,
    sum_file,
)
from dflash_train.store.encoding import Encoding
from dflash_train.store.files import Files, replace_file, write_directory

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
GROUPS = "trainer/groups.npy"
LATER_EVALUATION = "trainer/evaluation.json"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What a checkpoint records beside tensors; state.json."""

    step: int
    """Optimizer steps taken."""
    config: dict[str, Any]
    """TrainConfig.to_json()."""
    drafter: dict[str, Any]
    """config.json of the drafter, to refuse a resume with another one."""
    store: dict[str, Any]
    """The store's manifest: target, layers, encoding, calibration."""
    segments: list[str]
    """The ledger: segment ids in the order in which rows are planned from them."""
    total_steps: int
    random_state: dict[str, Any]
    """What every random draw follows from: the seed, and the rule that rows and anchors follow."""
    versions: dict[str, str]
    evaluation: dict[str, Any] | None
    """The held-out evaluation at this very step, with what was measured later; None where there was none."""
    rounds: int = 0
    """Under --follow, the position in the ledger: how many of its rounds hold at this step."""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "TrainerState":
        names = TrainerState.__dataclass_fields__
        return TrainerState(**{name: value for name, value in values.items() if name in names})


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int

    def state(self) -> TrainerState:
        name = "trainer/state.json"
        try:
            check_file(self.path, name)
            state = TrainerState.from_json(json.loads((self.path / name).read_text()))
            return replace(state, evaluation=self._later_evaluation() or state.evaluation)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self.path} cannot be resumed from: {str(error).rstrip('.')}. Delete this folder to go on from the one before it."
            ) from error

    def _later_evaluation(self) -> dict[str, Any] | None:
        path = self.path / LATER_EVALUATION
        if not path.exists():
            return None
        try:
            return dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no evaluation ({error}); remove it to go on without one") from error

    def masters(self) -> dict[str, Tensor]:
        return self._load("trainer/masters.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        return self._load("trainer/optimizer.safetensors")

    def _load(self, name: str) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            check_file(self.path, name)
            tensors: dict[str, Tensor] = load_file(self.path / name)
        except (OSError, SafetensorError, InputError) as error:
            raise InputError(
                f"{self.path / name} cannot be read: {str(error).rstrip('.')}. Delete {self.path} to go on from the checkpoint before it."
            ) from error
        return tensors


def save_checkpoint(
    run: Path,
    *,
    state: TrainerState,
    masters: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    encoding: Encoding,
    calibration: Calibration,
    groups: np.ndarray | None = None,
    files: Files | None = None,
) -> Checkpoint:
    """Write run/checkpoints/step-<step> in one transaction; one that is there already is the same and stays.

    masters: fp32 parameters under z-lab's names; calibration, on the CPU: folded into `fc.weight`; groups: int64, of the
    conversations that are trained on.
    """
    files = files or Files()
    final = run / "checkpoints" / f"step-{state.step:08d}"
    if final.exists():
        return Checkpoint(path=final, step=state.step)
    contents: dict[str, Iterable[bytes]] = {
        "model.safetensors": safetensors_bytes(export_tensors(masters, encoding, calibration), {"format": "pt"}),
        "config.json": [_json_bytes(state.drafter)],
        "trainer/masters.safetensors": safetensors_bytes(masters),
        "trainer/optimizer.safetensors": safetensors_bytes(optimizer),
        "trainer/state.json": [_json_bytes(state.to_json())],
    }
    if groups is not None:
        contents[GROUPS] = [_npy_bytes(groups)]
    sums: dict[str, Checksum] = {}
    summed = {name: _summed(name, parts, sums) for name, parts in contents.items()}
    write_directory(final, {**summed, CHECKSUMS_NAME: _format_when_summed(sums)}, files)
    return Checkpoint(path=final, step=state.step)


def record_evaluation(checkpoint: Checkpoint, evaluation: Mapping[str, Any], files: Files | None = None) -> None:
    """Give a checkpoint the evaluation of its step that it was saved without, whole or not at all."""
    replace_file(checkpoint.path / LATER_EVALUATION, _json_bytes(evaluation).decode(), files or Files())


def _summed(name: str, parts: Iterable[bytes], sums: dict[str, Checksum]) -> Iterator[bytes]:
    """The same parts, noting their checksum in `sums` as they are written."""
    size, crc = 0, 0
    for part in parts:
        size, crc = size + len(part), extend_crc(crc, part)
        sums[name] = Checksum(size, crc)
        yield part


def _format_when_summed(sums: Mapping[str, Checksum]) -> Iterator[bytes]:
    """The checksums file; written last, when `sums` is complete."""
    yield format_checksums(sums)


def read_groups(folder: Path) -> np.ndarray | None:
    """Groups (int64) of the conversations that the drafter in `folder` was trained on; None where it does not list them."""
    if not (folder / GROUPS).is_file():
        return None
    try:
        check_file(folder, GROUPS)
        groups: np.ndarray = np.load(folder / GROUPS, allow_pickle=False)
        if not isinstance(groups, np.ndarray) or groups.ndim != 1 or groups.dtype != np.int64:
            raise ValueError("it is no list of 64-bit integers")
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"{folder / GROUPS} cannot be read: {str(error).rstrip('.')}. Restore it, or remove it to go without the check "
            "that no prompt was trained on."
        ) from error
    return groups


def check_file(folder: Path, name: str) -> None:
    """Raise StoreError unless a file is as this package wrote it; a folder without checksums.json passes.

    Drafters of other programs have none, and a folder exported by hand may have lost it.
    """
    if (folder / CHECKSUMS_NAME).exists():
        check_sum(folder, name, sum_file(folder / name, lambda num_bytes: None), read_checksums(folder))


def export_tensors(masters: Mapping[str, Tensor], encoding: Encoding, calibration: Calibration) -> dict[str, Tensor]:
    """The drafter as engines read it: bf16, with `fc` acting on raw hidden states (fc · D⁻¹ or fc · P · D⁻¹, float64, rounded
    once)."""
    tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in masters.items() if name != "fc.weight"}
    folded = encoding.fold(masters["fc.weight"].detach().cpu().double(), calibration)
    return {"fc.weight": round_to_bfloat16(folded), **tensors}


def round_to_bfloat16(values: Tensor) -> Tensor:
    """float64 to bf16 with one rounding, to nearest, ties to even.

    torch's cast goes through float32 and may round twice; here the float32 step rounds to odd, which makes it harmless
    (Boldo and Melquiond 2008: the wider format has two bits more than needed).
    """
    nearest = values.float()
    exact = nearest.double() == values
    bits = nearest.view(torch.int32)
    toward_zero = torch.where(nearest.double().abs() > values.abs(), bits - 1, bits)
    return torch.where(exact, bits, toward_zero | 1).view(torch.float32).bfloat16()


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes]:
    """The bytes of a safetensors file, one tensor after the other; the format's own writer needs them all at once."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().tobytes()


def load_masters(named: Iterable[tuple[str, torch.nn.Parameter]], masters: Mapping[str, Tensor], source: Path) -> None:
    """Copy fp32 masters into parameters; raises InputError naming the first that is missing or of another shape."""
    with torch.no_grad():
        for name, parameter in named:
            tensor = masters.get(name)
            if tensor is None or tensor.shape != parameter.shape:
                found = "absent" if tensor is None else f"of shape {list(tensor.shape)}"
                raise InputError(
                    f"{name} is {found} in {source}, the drafter needs {list(parameter.shape)}. "
                    "Resume with the drafter that the run began with."
                )
            parameter.copy_(tensor)


def _json_bytes(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, default=_plain) + "\n").encode()


def _npy_bytes(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place in JSON")
