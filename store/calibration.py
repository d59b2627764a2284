"""The calibration of a store: what turns raw states h into what `fc` is trained on, measured once and shared by all segments.

Shapes: L tapped target layers, H hidden size, F rank: features per token of a projected encoding. All float32: P in
bfloat16 would take half of its 4 * F * L * H bytes (335 MB for Qwen3-8B at F = H, 0.02 % of a store of 2 TB), but its rows
would be orthonormal to 3 digits only, and a fold must undo exactly what was stored.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.manifest import hash_calibration

if TYPE_CHECKING:
    import torch

CALIBRATION = "calibration"


@dataclass(frozen=True)
class Calibration:
    """The arrays below `calibration/`; those that an encoding does not need are None."""

    channel_scale: torch.Tensor
    """D [L * H], positive."""
    projection: torch.Tensor | None = None
    """P [F, L * H]: orthonormal rows, by descending eigenvalue."""
    eigenvalues: torch.Tensor | None = None
    """Of the second moment of D^-1 h, tokens normalised to rms 1: [F], positive."""
    layer_energy: torch.Tensor | None = None
    """Mean square of D^-1 h of each layer over the same tokens, [L]; its sum is L. For reports, no part of the hash."""

    @staticmethod
    def from_arrays(channel_scale: NDArray[np.float32], **others: NDArray[np.float32]) -> Calibration:
        """The same over numpy arrays, without a copy."""
        import torch

        return Calibration(
            torch.from_numpy(channel_scale), **{name: torch.from_numpy(array) for name, array in others.items()}
        )

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """The arrays by name, in the order of the hash."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor.numpy() for name, tensor in named.items() if tensor is not None}

    @property
    def hash(self) -> str:
        """The manifest's calibration_hash: of D, then P and the eigenvalues where there are some."""
        return hash_calibration(*(array for name, array in self.arrays().items() if name != "layer_energy"))

    def to(self, device: Any) -> Calibration:
        """The same on another device."""
        others = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        moved = {name: None if tensor is None else tensor.to(device) for name, tensor in others.items()}
        return Calibration(self.channel_scale.to(device), **moved)

    def for_decoding(self) -> Calibration:
        """The same without P, which `Encoding.decode` does not need."""
        return Calibration(self.channel_scale, eigenvalues=self.eigenvalues)

    def component_sizes(self) -> torch.Tensor:
        """√λ [F] float32, correctly rounded: torch's own float32 square root on a CPU is off by a bit now and then."""
        assert self.eigenvalues is not None, "projected encodings come with eigenvalues"
        return self.eigenvalues.double().sqrt().float()

    def energy_kept(self) -> NDArray[np.float64] | None:
        """Share of each layer's energy that the projection keeps, [L]; None without one.

        The error of a layer is (1 - P^T P) x restricted to it; as P's rows are eigenvectors of the second moment C,
        what is kept of layer l is the trace of (P^T diag(eigenvalues) P) over its channels, of tr C over them. Where P
        begins with a drafter's rows, this is the energy of P^T P x in the layer: only the sum over layers is exact.
        """
        if self.projection is None or self.eigenvalues is None or self.layer_energy is None:
            return None
        energy = self.layer_energy.double()
        kept = (self.projection.square() * self.eigenvalues[:, None]).sum(0).double().view(len(energy), -1)
        share: NDArray[np.float64] = (kept.mean(1) / energy.clamp_min(1e-30)).clamp_max(1.0).numpy()
        return share
