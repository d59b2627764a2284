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

Symbols: N tokens, n = L · H, L tapped target layers, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_train.errors import InputError
from dflash_train.stage1_target.calibration import ordinary_tokens
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import Encoding

if TYPE_CHECKING:
    from dflash_train.stage1_target.target import Target

logger = logging.getLogger(__name__)

PIECE_TOKENS = 2048
WHOLE_CHANNELS = 6144
MAX_TURNS = 60
ENERGY_TOLERANCE = 1e-5
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
) -> Calibration:
    """D with P, its eigenvalues and the energy of each layer, on the CPU; batches and D as of `calibrate`.

    Raises InputError where there are fewer ordinary tokens than the encoding has features: P would be made up.
    """
    moment = SecondMoment(encoding.num_states, target.device)
    scale = channel_scale.to(target.device)
    for tokens, _ in ordinary_tokens(target, batches):
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
    eigenvalues, vectors = leading_eigenvectors(matrix, rank, seed)
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
