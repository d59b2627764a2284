"""The projection P: in which directions the scaled states of the tapped layers have their energy.

Its rows are the leading eigenvectors of the uncentred second moment C = E[x xᵀ], where x is D⁻¹h of a token normalised to
rms 1: every token counts the same, whatever its size. Nothing is centred or whitened, and attention sinks are left out, as
for D (calibration.py).

Affordable for L · H up to 40,000: C, float32, is summed on the target's device from batches that are run once more, so
memory is 4 · (L · H)² bytes (1.7 GB for Qwen3-8B, 6.7 GB at 40,960) however many tokens are drawn, and the sum is one
product a batch (5.5e13 FLOP for 65,536 tokens at 20,480). Up to 6,144 channels C is decomposed whole in float64 (0.9 GB).
Above, subspace iteration needs products with and QR factors of a basis of 9/8 · rank columns only (0.4 GB and 4e12 FLOP a
turn at rank 4,096 of 20,480), where a full decomposition would take some 9 · (L · H)³ FLOP and three times the memory. It
stops when a turn finds less than 1e-5 more energy: neighbouring directions of equal energy may then still be mixed, which
costs nothing, because only their span and their energy matter.

With the `fc` of a drafter that there is already (`read_fc`), P begins with the row space of fc · D, so nothing that this
drafter looks at is lost; the rest of the rank goes to the leading eigenvectors of what C has outside of it. Within the
whole span the rows are then turned such that components are uncorrelated, E[y yᵀ] = diag λ, as eigenvectors are by
themselves. Where fc has more rows than the rank, its row space is cut to the directions of most energy.

Symbols: N tokens, n = L · H, L tapped target layers, H hidden size.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_train.errors import InputError
from dflash_train.stage1_target.calibration import ordinary_tokens, states_of
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import Encoding

if TYPE_CHECKING:
    from dflash_train.stage1_target.target import Target

logger = logging.getLogger(__name__)

PIECE_TOKENS = 2048
WHOLE_CHANNELS = 6144
MAX_TURNS = 60
ENERGY_TOLERANCE = 1e-5
RANK_FLOOR = 1e-5
"""Of the largest singular value of fc · D: directions below it are the rounding of its bfloat16 weights."""
EIGENVALUE_FLOOR = 1e-6
"""Of the largest: an eigenvalue divides, and one of a direction that the draw never took would be 0."""


class SecondMoment:
    """C [n, n] of tokens that come in pieces, float32 on their device."""

    def __init__(self, num_channels: int, device: torch.device) -> None:
        self._sum = torch.zeros((num_channels, num_channels), dtype=torch.float32, device=device)
        self.num_tokens = 0

    def add(self, scaled: Tensor) -> None:
        """Count D⁻¹h, float32 [N, n]; each token is normalised to rms 1 here, and one that is all 0 is left out."""
        for piece in torch.split(scaled, PIECE_TOKENS):
            rms = piece.square().mean(dim=1, keepdim=True).sqrt()
            tokens = (piece / rms)[rms[:, 0] > 0]
            self._sum.addmm_(tokens.T, tokens)
            self.num_tokens += len(tokens)

    def matrix(self) -> Tensor:
        """C; its trace is n. It takes the place of the sum: add nothing after it."""
        return self._sum.div_(max(1, self.num_tokens))


def fit_projection(
    target: Target,
    batches: Iterable[tuple[Tensor, list[int]]],
    channel_scale: Tensor,
    encoding: Encoding,
    seed: int = 0,
    fc: Tensor | None = None,
) -> Calibration:
    """D with P, its eigenvalues and the energy of each layer, on the CPU; batches and D as of `calibrate`, fc of `read_fc`.

    Raises InputError where there are fewer ordinary tokens than the encoding has features: P would be made up.
    """
    return fit_states(states_of(target, batches), channel_scale, encoding, target.device, seed, fc)


def fit_states(
    states: Iterable[Tensor],
    channel_scale: Tensor,
    encoding: Encoding,
    device: torch.device,
    seed: int = 0,
    fc: Tensor | None = None,
) -> Calibration:
    """The same from raw states [N, L * H] that are there already, on `device`."""
    moment = SecondMoment(encoding.num_states, device)
    scale = channel_scale.to(device)
    for tokens, _ in ordinary_tokens(states):
        for piece in torch.split(tokens, PIECE_TOKENS):
            moment.add(piece.float() / scale)
    rank = encoding.num_features
    if moment.num_tokens < rank:
        raise InputError(
            f"A projection to {rank:,} features cannot be fitted on {moment.num_tokens:,} tokens. Give more data, more "
            "--calibration-tokens, or a lower --rank."
        )
    matrix = moment.matrix()
    layer_energy = matrix.diagonal().double().view(encoding.num_layers, -1).mean(1)
    if fc is None:
        eigenvalues, vectors = leading_eigenvectors(matrix, rank, seed)
    else:
        eigenvalues, vectors = directions_with(row_space(fc.to(device).float() * scale), matrix, rank, seed)
    calibration = Calibration(
        channel_scale.cpu(),
        projection=vectors.float().cpu().contiguous(),
        eigenvalues=eigenvalues.clamp_min(EIGENVALUE_FLOOR * float(eigenvalues[0])).float().cpu(),
        layer_energy=layer_energy.float().cpu(),
    )
    logger.info(
        "Fitted a projection of %d channels to %d features on %d tokens; it keeps %.1f %% of their energy.",
        encoding.num_states,
        rank,
        moment.num_tokens,
        100 * float(eigenvalues.sum()) / encoding.num_states,
    )
    return calibration


def leading_eigenvectors(matrix: Tensor, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The `rank` largest eigenvalues, descending, and their eigenvectors as rows [rank, n], of a symmetric matrix [n, n].

    A vector's sign is such that its largest entry is positive. Whole decomposition up to WHOLE_CHANNELS, else iteration.
    """
    decompose = whole_decomposition if len(matrix) <= WHOLE_CHANNELS else subspace_iteration
    eigenvalues, vectors = decompose(matrix, rank, seed)
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    return eigenvalues, torch.where(largest < 0, -vectors, vectors)


def row_space(weight: Tensor) -> Tensor:
    """An orthonormal basis of a matrix's row space as columns [n, k], k its rank, of weight [m, n]."""
    basis, triangle = torch.linalg.qr(weight.T)
    squares, rotation = _eigenvectors_descending(triangle.double() @ triangle.double().T)
    directions: Tensor = basis @ rotation[:, squares > RANK_FLOOR**2 * squares[0]].to(basis.dtype)
    return directions


def directions_with(basis: Tensor, matrix: Tensor, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows [rank, n], orthonormal, that span a basis [n, k] first and then what has most energy in `matrix`, which is used up.

    Returns what E[y_i^2] is by the matrix, descending, and the rows; E[y yT] is diagonal. If k exceeds the rank, the
    rows are the directions of most energy within the basis.
    """
    product = matrix @ basis
    values, rotation = _eigenvectors_descending(basis.T @ product)
    basis, product = basis @ rotation.to(basis.dtype), product @ rotation.to(basis.dtype)
    num_first = basis.shape[1]
    if num_first >= rank:
        return values[:rank], basis[:, :rank].T
    matrix.addmm_(product, basis.T, alpha=-1).addmm_(basis, product.T, alpha=-1)  # C - C B B^T - B B^T C
    matrix.addmm_(basis * values.to(basis.dtype), basis.T)  # + B B^T C B B^T: nothing is left in the basis
    others = leading_eigenvectors(matrix, rank - num_first, seed)[1].to(basis.dtype).T
    others = torch.linalg.qr(others - basis @ (basis.T @ others)).Q
    small = torch.zeros((rank, rank), dtype=torch.float64, device=basis.device)
    small[:num_first, :num_first] = torch.diag(values)
    small[num_first:, num_first:] = (others.T @ (matrix @ others)).double()
    small[:num_first, num_first:] = (product.T @ others).double()
    small[num_first:, :num_first] = small[:num_first, num_first:].T
    values, rotation = _eigenvectors_descending(small)
    return values, (torch.cat([basis, others], dim=1) @ rotation.to(basis.dtype)).T


def _eigenvectors_descending(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors (columns) of a small symmetric matrix, in float64, the largest first."""
    matrix = matrix.double()
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return values.flip(0), vectors.flip(1)


def read_fc(drafter: Path, layer_ids: Sequence[int], hidden_size: int) -> Tensor:
    """The weight of fc, float32 [m, L * H], of a drafter's folder in z-lab's format; InputError where it is for other states."""
    from safetensors import SafetensorError, safe_open

    way_out = "Give a drafter's folder in z-lab's format, such as a checkpoint of `dflash train-drafter`."
    try:
        config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
        nested = config.get("dflash_config") or {}
        found = nested.get("target_layer_ids", config.get("target_layer_ids"))
        with safe_open(drafter / "model.safetensors", framework="pt") as file:
            name = next((name for name in ("fc.weight", "model.fc.weight") if name in file.keys()), "fc.weight")  # noqa: SIM118
            weight: Tensor = file.get_tensor(name)
    except (OSError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        raise InputError(f"The fc of the drafter {drafter} cannot be read ({error}). {way_out}") from error
    if found != list(layer_ids):
        raise InputError(
            f"The drafter {drafter} taps the layers {found}, but {list(layer_ids)} are to be stored. Give another drafter, "
            "or --target-layers."
        )
    if weight.ndim != 2 or weight.shape[1] != len(layer_ids) * hidden_size or not weight.isfinite().all():
        raise InputError(
            f"The fc of the drafter {drafter} has shape {list(weight.shape)}, but finite weights for {len(layer_ids)} layers "
            f"of {hidden_size} channels are wanted. Give a drafter of this target."
        )
    return weight.float()


def whole_decomposition(matrix: Tensor, rank: int, _seed: int) -> tuple[Tensor, Tensor]:
    """`leading_eigenvectors` in float64, exact: the slow twin of `subspace_iteration`."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return values[-rank:].flip(0), vectors[:, -rank:].flip(1).T


def subspace_iteration(matrix: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """`leading_eigenvectors` by orthogonal iteration on a basis an eighth wider, then Rayleigh and Ritz within it.

    Source: Halko, Martinsson and Tropp, «Finding structure with randomness», 2011, sections 4.5 and 5.3.
    """
    num_channels = len(matrix)
    width = min(num_channels, rank + max(16, rank // 8))
    generator = torch.Generator(matrix.device).manual_seed(seed)
    basis = torch.randn((num_channels, width), generator=generator, dtype=matrix.dtype, device=matrix.device)
    energy = 0.0
    for turn in range(MAX_TURNS):
        basis = torch.linalg.qr(basis).Q
        product = matrix @ basis
        found = float((basis * product).sum(dtype=torch.float64))
        if turn and found - energy <= ENERGY_TOLERANCE * found:
            break
        energy, basis = found, product
    else:
        basis = torch.linalg.qr(basis).Q
        product = matrix @ basis
    small = (basis.T @ product).double()
    values, rotation = torch.linalg.eigh((small + small.T) / 2)
    vectors = (basis @ rotation[:, -rank:].flip(1).to(basis.dtype)).T
    return values[-rank:].flip(0), vectors
