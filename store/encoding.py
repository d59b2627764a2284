"""Encodings: how the tapped states of a token lie on disk, and what `fc` is trained on.

Shapes: T tokens, L tapped target layers, H hidden size, F = L * H features, G scale groups, D channel scale [F]. Every
encoding decodes to D^-1 h, never to raw h, whose channels span four orders of magnitude (store-format.md section 6);
`fold` turns an fc trained on D^-1 h into one for h, so a checkpoint knows nothing of the store. Bytes a token at
L * H = 20,480: bf16 40,960, exact for bfloat16 targets; int8 20,500, relative rms error 0.75-0.97 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.errors import InputError

if TYPE_CHECKING:
    import torch

ENCODINGS = ("bf16", "int8")
INT8_LIMIT = 127
ALIGN_BYTES = 512  # O_DIRECT wants row offsets on a disk sector, store-format.md section 2.1


@dataclass(frozen=True)
class Encoding:
    """One way to store features; see `make_encoding`."""

    name: str
    num_layers: int
    hidden_size: int

    @property
    def num_features(self) -> int:
        """F, values per token as stored."""
        return self.num_layers * self.hidden_size

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """Numpy dtype of the zarr array `features`."""
        return np.dtype("uint16" if self.name == "bf16" else "int8")

    @property
    def dtype_view(self) -> str | None:
        """What the stored bits mean where zarr has no such type."""
        return "bfloat16" if self.name == "bf16" else None

    @property
    def num_scales(self) -> int:
        """G, float32 scales per token (0: none are stored)."""
        return 0 if self.name == "bf16" else self.num_layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all arrays of a segment: features, scales, token id and loss mask."""
        return self.num_features * self.storage_dtype.itemsize + 4 * self.num_scales + 4 + 1

    @property
    def align_tokens(self) -> int:
        """Every sample's first row is a multiple of this, so that its features start on a disk sector."""
        return ALIGN_BYTES // math.gcd(ALIGN_BYTES, self.num_features * self.storage_dtype.itemsize)

    def encode(self, states: torch.Tensor, channel_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode raw states h [..., F] with the float32 channel scale [F].

        Returns features [..., F] (bf16: int16 bit view; int8) and float32 scales [..., G] or None. The states must be
        finite. int8: q = round(D^-1 h / s), s = absmax / 127 per token and layer, so the error is at most s / 2.
        """
        import torch

        if self.name == "bf16":
            return states.to(torch.bfloat16).contiguous().view(torch.int16), None
        layers = (*states.shape[:-1], self.num_layers, self.hidden_size)
        scaled = (states.float() / channel_scale).view(layers)
        scales = scaled.abs().amax(dim=-1) / INT8_LIMIT
        steps = torch.where(scales > 0, scales, torch.ones_like(scales))
        features = (scaled / steps[..., None]).round_().clamp_(-INT8_LIMIT, INT8_LIMIT).to(torch.int8)
        return features.flatten(-2), scales

    def decode(
        self,
        features: torch.Tensor,
        scales: torch.Tensor | None,
        channel_scale: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Decode stored features [..., F] to D^-1 h [..., F] in dtype: computed in float32, rounded once."""
        import torch

        result = torch.empty(features.shape, dtype=dtype, device=features.device)
        if self.name == "bf16":
            return torch.div(features.view(torch.bfloat16), channel_scale, out=result)
        assert scales is not None, "int8 features come with scales"
        layers = (*features.shape[:-1], self.num_layers, self.hidden_size)
        torch.mul(features.view(layers), scales[..., None], out=result.view(layers))
        return result

    def fold(self, weight: torch.Tensor, channel_scale: torch.Tensor) -> torch.Tensor:
        """Turn fc's weight [out, F] for D^-1 h into the float64 weight for raw h; the caller rounds it once."""
        return weight.double() / channel_scale.double()

    def unfold(self, weight: torch.Tensor, channel_scale: torch.Tensor) -> torch.Tensor:
        """Turn a weight for raw h [out, F] into the float64 weight for D^-1 h, the inverse of `fold`."""
        return weight.double() * channel_scale.double()


def make_encoding(name: str, num_layers: int, hidden_size: int) -> Encoding:
    """Make an encoding by name for L tapped layers of H channels; an unknown name raises InputError."""
    if name not in ENCODINGS:
        raise InputError(f"Encoding '{name}' is unknown. Choose one of: {', '.join(ENCODINGS)}.")
    return Encoding(name, num_layers, hidden_size)


def to_stored(tensor: torch.Tensor) -> tuple[NDArray[Any], str | None]:
    """View a CPU tensor as (numpy array, dtype_view), without a copy; bfloat16, which zarr lacks, becomes uint16."""
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16), "bfloat16"
    return tensor.numpy(), None


def from_stored(array: NDArray[Any], dtype_view: str | None) -> torch.Tensor:
    """View a stored array as a tensor, without a copy: the inverse of `to_stored`."""
    import torch

    if dtype_view == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
