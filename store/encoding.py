"""Encodings: how the tapped states of a token lie on disk, and what `fc` is trained on.

Shapes: T tokens, L tapped target layers, H hidden size, F features a token, G scale groups, D channel scale [L * H],
P projection [F, L * H], λ its eigenvalues [F]. `fc` is never trained on raw h, whose channels span four orders of
magnitude (store-format.md section 6), but on D^-1 h (bf16, int8; F = L * H) or on y = P D^-1 h (projected; F = rank);
`fold` turns its weight into one for h, so a checkpoint knows nothing of the store.

Bytes of features and scales a token at L * H = 20,480 and, where projected, F = H = 4,096: bf16 40,960, exact for
bfloat16 targets; int8 20,500, relative rms error 0.75-0.97 %; projected-int8 4,100; projected-int4 2,052. The last two
lose what P leaves out (on SmolLM2 22 % of the energy at F = H, 10 % at 2H), then round in steps of s √λ_i: components
are as coarse as they are large. The product with P is in float32: 2.7 TFLOP a 16,384 tokens at these sizes, about a
tenth of the target's forward.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.errors import InputError

if TYPE_CHECKING:
    import torch

    from dflash_train.store.calibration import Calibration

ENCODINGS = ("bf16", "int8", "projected-int8", "projected-int4")
AUTO_RANK = "auto"
INT8_LIMIT = 127
INT4_LIMIT = 7
LARGEST_STATE = 1e10
"""Of |h| that is stored. What is beyond comes of a fault: the largest known states, of attention sinks, are some 1e6 (float16,
65,504, is too small for Gemma 3). No less than 1e-9 is D, so D^-1 h stays below 1e19, whose square float32 still holds."""
ALIGN_BYTES = 512  # O_DIRECT wants row offsets on a disk sector, store-format.md section 2.1


@dataclass(frozen=True)
class Encoding:
    """One way to store features; see `make_encoding`."""

    name: str
    num_layers: int
    hidden_size: int
    rank: int | None = None

    @property
    def is_projected(self) -> bool:
        """Whether features are y = P D^-1 h."""
        return is_projected(self.name)

    @property
    def num_states(self) -> int:
        """L * H, values of a token's raw states."""
        return self.num_layers * self.hidden_size

    @property
    def num_features(self) -> int:
        """F, values per token that `fc` is trained on."""
        return self.num_states if self.rank is None else self.rank

    @property
    def num_columns(self) -> int:
        """Columns of the array `features`: F, or half as many bytes of two int4 each (the last half empty if F is odd)."""
        return (self.num_features + 1) // 2 if self.name == "projected-int4" else self.num_features

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """Numpy dtype of the zarr array `features`."""
        return np.dtype({"bf16": "uint16", "projected-int4": "uint8"}.get(self.name, "int8"))

    @property
    def dtype_view(self) -> str | None:
        """What the stored bits mean where zarr has no such type."""
        return {"bf16": "bfloat16", "projected-int4": "int4"}.get(self.name)

    @property
    def num_scales(self) -> int:
        """G, float32 scales per token (0: none are stored)."""
        return {"bf16": 0, "int8": self.num_layers}.get(self.name, 1)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all arrays of a segment: features, scales, token id and loss mask."""
        return self.num_columns * self.storage_dtype.itemsize + 4 * self.num_scales + 4 + 1

    @property
    def align_tokens(self) -> int:
        """Every sample's first row is a multiple of this, so that its features start on a disk sector."""
        return ALIGN_BYTES // math.gcd(ALIGN_BYTES, self.num_columns * self.storage_dtype.itemsize)

    @property
    def rounding(self) -> float:
        """Half a step over the largest value that has the same scale: the relative error that rounding alone makes."""
        return {"bf16": 2.0**-8, "projected-int4": 0.5 / INT4_LIMIT}.get(self.name, 0.5 / INT8_LIMIT)

    def fc_input(self, states: torch.Tensor, calibration: Calibration) -> torch.Tensor:
        """What `fc` is trained on, unquantised, float32 [..., F]: D^-1 h or y = P D^-1 h of raw states [..., L * H].

        On CUDA y is a TF32 product of h, which bf16 and fp16 leave exact there, and P D^-1 rounded to 11 bits.
        """
        if not self.is_projected:
            return states.float() / calibration.channel_scale
        assert calibration.projection is not None, "projected encodings come with a projection"
        with _tf32_products(states.is_cuda):
            return states.float() @ (calibration.projection / calibration.channel_scale).T

    def scaled_states(self, features: torch.Tensor, calibration: Calibration) -> torch.Tensor:
        """D^-1 h [..., L * H] of decoded float32 features [..., F]; of a projected encoding what it kept, P^T y."""
        if not self.is_projected:
            return features
        assert calibration.projection is not None, "projected encodings come with a projection"
        return features @ calibration.projection

    def encode(self, states: torch.Tensor, calibration: Calibration) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode raw states h [..., L * H].

        Returns features as stored [..., columns] (bf16: int16 bit view; int8; int4: uint8) and float32 scales [..., G] or
        None. The states must be sound (`are_sound`). int8: q = round(D^-1 h / s), s = absmax / 127 per token and layer, so the error is
        at most s / 2. Projected: q_i = round(y_i / (s √λ_i)), s = max_i(|y_i| / √λ_i) / 127 (int4: 7) per token.
        """
        import torch

        if self.name == "bf16":
            return states.to(torch.bfloat16).contiguous().view(torch.int16), None
        if self.name == "int8" and has_kernels(states):
            from dflash_train.store.tap_encoder import TapEncoder

            encoder = TapEncoder(self, calibration, torch.arange(states.shape[:-1].numel(), device=states.device))
            for layer, layer_states in enumerate(
                states.reshape(*states.shape[:-1], self.num_layers, self.hidden_size).unbind(-2)
            ):
                encoder.add(layer, layer_states)
            features, scales, _ = encoder.finish()
            assert scales is not None
            return features.view(states.shape), scales.view(*states.shape[:-1], self.num_layers)
        values = self.fc_input(states, calibration)
        if self.is_projected:
            values = values / calibration.component_sizes()
        groups = values.view(*values.shape[:-1], self.num_scales, self.num_features // self.num_scales)
        limit = INT4_LIMIT if self.name == "projected-int4" else INT8_LIMIT
        largest = groups.abs().amax(dim=-1)
        scales = largest / torch.full_like(largest, limit)  # CUDA would multiply by the reciprocal of a plain number
        steps = torch.where(scales > 0, scales, torch.ones_like(scales))
        features = (groups / steps[..., None]).round_().clamp_(-limit, limit).to(torch.int8).flatten(-2)
        return _pack_int4(features) if self.name == "projected-int4" else features, scales

    def decode(
        self, features: torch.Tensor, scales: torch.Tensor | None, calibration: Calibration, dtype: torch.dtype
    ) -> torch.Tensor:
        """Decode stored features [..., columns] (or an int8 view of them) to what `fc` is trained on, [..., F] in dtype.

        Computed in float32, rounded once. P is not needed: `Calibration.for_decoding`.
        """
        import torch

        shape = (*features.shape[:-1], self.num_features)
        result = torch.empty(shape, dtype=dtype, device=features.device)
        if self.name == "bf16":
            return torch.div(features.view(torch.bfloat16), calibration.channel_scale, out=result)
        assert scales is not None, f"{self.name} features come with scales"
        if self.is_projected:
            values = _unpack_int4(features, self.num_features) if self.name == "projected-int4" else features
            return torch.mul(values * scales, calibration.component_sizes(), out=result)
        if has_kernels(features) and dtype in (torch.bfloat16, torch.float16, torch.float32):
            from dflash_train.store import kernels

            kernels.decode_int8(features.contiguous(), scales.contiguous(), result)
            return result
        layers = (*features.shape[:-1], self.num_layers, self.hidden_size)
        torch.mul(features.view(layers), scales[..., None], out=result.view(layers))
        return result

    def rounding_error(self, scales: torch.Tensor, calibration: Calibration) -> torch.Tensor:
        """Mean square error of D^-1 h, [L, H], that tokens with these float32 scales [T, G] have from rounding alone.

        Rounding to a grid of step s errs by s / sqrt(12), root mean square of a uniform error of at most s / 2.
        """
        squares = (scales.double().square() / 12).mean(0)
        if not self.is_projected:
            return squares[:, None].expand(self.num_layers, self.hidden_size)
        assert calibration.projection is not None and calibration.eigenvalues is not None
        spread = (calibration.projection.square() * calibration.eigenvalues[:, None]).sum(0).double()
        return (squares * spread).view(self.num_layers, self.hidden_size)

    def fold(self, weight: torch.Tensor, calibration: Calibration) -> torch.Tensor:
        """Turn fc's weight [out, F] into the float64 weight for raw h [out, L * H]; the caller rounds it once."""
        weight = weight.double()
        if self.is_projected:
            assert calibration.projection is not None, "projected encodings come with a projection"
            weight = weight @ calibration.projection.double()
        return weight / calibration.channel_scale.double()

    def unfold(self, weight: torch.Tensor, calibration: Calibration) -> torch.Tensor:
        """Turn a weight for raw h [out, L * H] into the float64 weight [out, F] that `fc` starts from.

        The inverse of `fold`; of a projected encoding the part that acts within the rows of P, the closest there is.
        """
        weight = weight.double() * calibration.channel_scale.double()
        if not self.is_projected:
            return weight
        assert calibration.projection is not None, "projected encodings come with a projection"
        return weight @ calibration.projection.double().T


def are_sound(states: torch.Tensor) -> torch.Tensor:
    """Whether the states [..., H] of a token and layer may be stored, bool [...]: finite and none beyond LARGEST_STATE."""
    return states.abs().amax(dim=-1).float() <= LARGEST_STATE  # NaN goes through amax, and is not below anything


def unsound_state(layer_id: int, token: int, num_tokens: int) -> str:
    """Why a sample is quarantined: the first of its states that may not be stored."""
    limit = f"{LARGEST_STATE:.0e}"
    return f"hidden state of layer {layer_id} is not finite, or beyond {limit}, at token {token} of {num_tokens}"


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels can work on a tensor: CUDA builds of torch come with triton, on Linux."""
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None


@contextmanager
def _tf32_products(on: bool) -> Iterator[None]:
    """Let fp32 products on CUDA use tensor cores: both factors rounded to 11 bits, sums in fp32."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Pack int8 values of -8 ... 7, [..., F], two a byte: value 2i in the low half of byte i, 2i + 1 in the high half."""
    import torch

    odd = values.new_zeros((*values.shape[:-1], values.shape[-1] % 2))
    halves = torch.cat((values, odd), dim=-1).view(torch.uint8) & 15
    return halves[..., 0::2] | (halves[..., 1::2] << 4)


def _unpack_int4(packed: torch.Tensor, num_values: int) -> torch.Tensor:
    """The int8 values [..., F] of packed bytes."""
    import torch

    packed = packed.view(torch.uint8)
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :num_values]
    return (halves ^ 8).to(torch.int8) - 8  # two's complement of 4 bits


def is_projected(name: str) -> bool:
    """Whether an encoding, by name, stores y = P D^-1 h."""
    return name.startswith("projected-")


def make_encoding(name: str, num_layers: int, hidden_size: int, rank: int | None = None) -> Encoding:
    """Make an encoding by name for L tapped layers of H channels; InputError for an unknown name or a wrong rank.

    rank is F of the projected encodings, at most L * H, and None for the others.
    """
    if name not in ENCODINGS:
        raise InputError(f"Encoding '{name}' is unknown. Choose one of: {', '.join(ENCODINGS)}.")
    if not is_projected(name) and rank is not None:
        raise InputError(f"A rank of {rank} was given, but only the projected encodings have one, not {name}.")
    if is_projected(name) and not (rank is not None and 1 <= rank <= num_layers * hidden_size):
        raise InputError(
            f"The rank of {name} is {rank}, but must be from 1 to {num_layers * hidden_size:,}, the channels of "
            f"{num_layers} tapped layers. Give another --rank."
        )
    return Encoding(name, num_layers, hidden_size, rank)


def resolve_rank(text: str, hidden_size: int) -> int:
    """The rank that --rank means: a number, a multiple of H such as 2H or 0.5H, or auto, which is H; InputError if none.

    H is where the first measurements stand (docs/encodings.md): a tenth (int8) or a twentieth (int4) of bf16's bytes.
    """
    match = re.fullmatch(r"(\d+)|(\d*\.?\d*)H", "H" if text == AUTO_RANK else text)
    try:
        if match is None:
            raise ValueError
        return int(match[1]) if match[1] else round(float(match[2] or 1) * hidden_size)
    except ValueError as error:
        raise InputError(
            f"--rank is '{text}'. Give a number of features, a multiple of the hidden size such as 2H or 0.5H, or auto."
        ) from error


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
