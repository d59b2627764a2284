"""Which encoding --encoding and --rank mean, for extract and import-store alike."""

from __future__ import annotations

from dflash_train.errors import InputError
from dflash_train.store.encoding import AUTO_RANK, Encoding, is_projected, make_encoding, resolve_rank
from dflash_train.store.manifest import Manifest


def check_encoding(encoding: str, rank: str) -> None:
    """Raise InputError where either is none, or the rank is for another encoding."""
    make_encoding(encoding, 1, 1, 1 if is_projected(encoding) else None)
    if not is_projected(encoding) and rank != AUTO_RANK:
        raise InputError(f"--rank {rank} is for the projected encodings, but --encoding is {encoding}.")
    resolve_rank(rank, 1)


def resolve_encoding(
    encoding: str, rank: str, num_layers: int, hidden_size: int, *manifests: Manifest | None
) -> Encoding:
    """The encoding of L tapped layers of H channels; a rank of auto is the first that one of the manifests has."""
    if not is_projected(encoding):
        return make_encoding(encoding, num_layers, hidden_size)
    ranks = [manifest.rank for manifest in manifests if manifest is not None and manifest.rank is not None]
    known = ranks[0] if ranks and rank == AUTO_RANK else resolve_rank(rank, hidden_size)
    return make_encoding(encoding, num_layers, hidden_size, known)
