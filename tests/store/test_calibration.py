"""What tells one calibration from another: stores of equal hashes may be merged."""

import hashlib
from dataclasses import replace

import pytest
import torch

from dflash_train.store.calibration import Calibration

CALIBRATION = Calibration(
    torch.tensor([1.0, 2.0, 3.0, 4.0]),
    projection=torch.eye(4)[:2],
    eigenvalues=torch.tensor([2.0, 1.0]),
    layer_energy=torch.tensor([1.5, 0.5]),
)


@pytest.mark.parametrize("part", ["channel_scale", "projection", "eigenvalues"])
def test_another_scale_projection_or_eigenvalue_is_another_hash(part: str) -> None:
    other = getattr(CALIBRATION, part).clone()
    other.view(-1)[-1] += 0.5
    assert replace(CALIBRATION, **{part: other}).hash != CALIBRATION.hash


def test_the_hash_is_that_of_the_format_and_leaves_reports_out() -> None:
    parts = (CALIBRATION.channel_scale, CALIBRATION.projection, CALIBRATION.eigenvalues)
    written = b"".join(part.numpy().astype("<f4").tobytes() for part in parts if part is not None)
    assert CALIBRATION.hash == hashlib.blake2b(written, digest_size=8).hexdigest()
    assert replace(CALIBRATION, layer_energy=None).hash == CALIBRATION.hash


def test_decoding_takes_no_projection() -> None:
    """P of a wide target is gigabytes, and `Encoding.decode` gives z."""
    decoding = CALIBRATION.for_decoding()
    assert decoding.projection is None and decoding.eigenvalues is CALIBRATION.eigenvalues
