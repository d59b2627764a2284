"""`--init-from`: a new run that starts from the weights of an existing drafter.

An exported drafter's `fc` acts on raw hidden states h, a run's on what the store holds: D⁻¹h, or y = P D⁻¹h. So its
weight W becomes W · D, which is the same function, or W · D · Pᵀ, which is the same function of what P keeps. How much
of fc's output is lost there depends on the data: along the rows p_i of P the calibration knows the energy λ_i; what is
left of each layer's energy is taken to lie evenly in the directions that P leaves out (each has less than the smallest λ).

Shapes: L tapped target layers, H hidden size, F features per token, D channel scale [L·H], P projection [F, L·H].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.checkpoint import WEIGHTS_FILE
from dflash_train.stage2_drafter.drafter import Drafter, load_drafter
from dflash_train.stage2_drafter.drafter_config import DrafterConfig
from dflash_train.stage2_drafter.run_checkpoints import find_drafter, load_drafter_config
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import Encoding

MAX_LOST_ENERGY = 0.05
"""Largest share of fc's output that a projection may drop: beyond it, training would begin from another drafter."""


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Where a run starts."""

    folder: Path
    """The drafter's folder; of a run, its newest checkpoint."""
    masters: Mapping[str, Tensor]
    """fp32 parameters as the trainer keeps them."""
    lost_energy: float
    """Share of fc's output that the store's projection drops, 0 without one."""

    def describe(self) -> str:
        """One line for the log."""
        lost = f"; the store's projection drops {self.lost_energy:.2%} of fc's output" if self.lost_energy else ""
        return f"starting from the weights of {self.folder}{lost}"


def read_initial_config(path: Path) -> DrafterConfig:
    """The config of the drafter at `path`; raises InputError where its tensors are not those that the config wants.

    Only the header of the weights is read.
    """
    from safetensors import SafetensorError, safe_open

    config, folder = load_drafter_config(path), find_drafter(path)
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / WEIGHTS_FILE} cannot be read ({error}); copy or export it again.") from error
    wanted = {name: tuple(tensor.shape) for name, tensor in Drafter(config, seed=None).named_parameters()}
    wrong = [
        f"{name} is {list(found[name]) if name in found else 'missing'}, "
        f"wanted {list(wanted[name]) if name in wanted else 'none'}"
        for name in sorted(wanted.keys() | found.keys())
        if found.get(name) != wanted.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise InputError(
            f"--init-from {folder} does not fit its config.json: {'; '.join(wrong[:3])}{more}. Give a drafter that was "
            "exported whole."
        )
    return config


def initial_weights(
    path: Path, encoding: Encoding, calibration: Calibration, device: torch.device | str = "cpu"
) -> InitialWeights:
    """The weights of the drafter at `path` for a store with this encoding and calibration (on the CPU).

    fc's float64 product runs on `device`. Raises InputError for a drafter that cannot be read, and where the projection
    drops more than `MAX_LOST_ENERGY` of fc's output.
    """
    folder = find_drafter(path)
    masters = {name: tensor.detach() for name, tensor in load_drafter(folder, torch.float32).named_parameters()}
    if bad := [name for name, tensor in masters.items() if not tensor.isfinite().all()]:
        raise InputError(f"--init-from {folder} has values in {bad[0]} that are not finite. Give another drafter.")
    weight, calibration = masters["fc.weight"].to(device), calibration.to(device)
    lost = lost_energy(weight, calibration) if encoding.is_projected else 0.0
    if lost > MAX_LOST_ENERGY:
        raise InputError(
            f"--init-from {folder} would lose {lost:.1%} of fc's output under the store's {encoding.name} of rank "
            f"{encoding.rank}; at most {MAX_LOST_ENERGY:.0%} may be lost. Extract with a higher --rank, with --encoding "
            "int8 or bf16, or train from first weights."
        )
    masters["fc.weight"] = encoding.unfold(weight, calibration).float().cpu()
    return InitialWeights(folder=folder, masters=masters, lost_energy=lost)


def lost_energy(weight: Tensor, calibration: Calibration) -> float:
    """Share of E‖W h‖² that the projection drops: weight W [H, L·H] for raw hidden states, energies of the calibration.

    Without the layers' energies the bound is returned: every direction left out has at most the smallest λ.
    """
    assert calibration.projection is not None and calibration.eigenvalues is not None
    projection, eigenvalues = calibration.projection.double(), calibration.eigenvalues.double()
    scaled = weight.double() * calibration.channel_scale.double()
    inside = scaled @ projection.T
    kept = (inside.square().sum(0) * eigenvalues).sum()
    left = (scaled - inside @ projection).square().sum(0)  # [L·H]
    if calibration.layer_energy is None:
        lost = left.sum() * eigenvalues.min()
    else:
        layers = len(calibration.layer_energy)
        kept_energy = (projection.square() * eigenvalues[:, None]).sum(0).view(layers, -1).sum(1)
        layer_energy = calibration.layer_energy.double() * (len(left) // layers)
        directions = (1.0 - projection.square().sum(0)).view(layers, -1).sum(1)
        rest = (layer_energy - kept_energy).clamp_min(0.0) / directions.clamp_min(1e-9)
        lost = (left.view(layers, -1).sum(1) * rest).sum()
    return float(lost / (kept + lost).clamp_min(1e-300))
