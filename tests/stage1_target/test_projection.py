"""The projection against numpy's eigenvectors, and what may not tilt it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target.calibration import calibrate
from dflash_train.stage1_target.projection import (
    SecondMoment,
    fit_projection,
    fit_states,
    leading_eigenvectors,
    read_fc,
    row_space,
    subspace_iteration,
    whole_decomposition,
)
from dflash_train.stage1_target.target import Target, load_target
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.store.encoding import make_encoding

torch.set_num_threads(1)
ENCODING = make_encoding("projected-int8", 2, 32, 13)


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Path]) -> Target:
    return load_target(TargetConfig(name=str(tiny_target("llama"))), (1, 2), "cpu")


def batch(seed: int) -> tuple[torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 300, (3, 50), generator=generator), [50, 31, 7]


def numpy_moment(scaled: Any) -> Any:
    """The mean of x x^T over tokens [N, n] normalised to rms 1, in float64."""
    tokens = scaled / np.sqrt(np.square(scaled).mean(1, keepdims=True))
    return tokens.T @ tokens / len(tokens)


def test_projection_is_the_leading_eigenvectors_of_the_second_moment(target: Target) -> None:
    batches = [batch(seed) for seed in range(3)]
    states = [
        row[:length]
        for token_ids, lengths in batches
        for row, length in zip(target.hidden_states(token_ids), lengths, strict=True)
    ]
    scale = torch.from_numpy(calibrate(target, batches))
    moment = numpy_moment(torch.cat(states).double().numpy() / scale.double().numpy())
    values, vectors = np.linalg.eigh(moment)
    found = fit_projection(target, batches, scale, ENCODING)
    assert found.projection is not None and found.eigenvalues is not None and found.layer_energy is not None
    assert found.projection.dtype == torch.float32 and torch.equal(found.channel_scale, scale)
    np.testing.assert_allclose(found.eigenvalues.numpy(), values[::-1][:13], rtol=1e-4)
    cosines = np.abs((found.projection.double().numpy() * vectors.T[::-1][:13]).sum(1))
    np.testing.assert_allclose(cosines, 1, atol=1e-4)
    np.testing.assert_allclose(found.layer_energy.numpy(), np.diag(moment).reshape(2, 32).mean(1), rtol=1e-4)
    # the energy that inspect-store reports, from the error itself
    tokens = torch.cat(states).double() / scale.double()
    tokens = (tokens / tokens.square().mean(1, keepdim=True).sqrt()).view(-1, 64)
    rows = found.projection.double()
    error = (tokens - tokens @ rows.T @ rows).square().view(-1, 2, 32).sum((0, 2))
    wanted = 1 - error / tokens.square().view(-1, 2, 32).sum((0, 2))
    kept = found.energy_kept()
    assert kept is not None
    np.testing.assert_allclose(kept, wanted.numpy(), rtol=1e-4)


@pytest.mark.parametrize(("size", "rank"), [(300, 40), (97, 97), (200, 1), (128, 120)])
def test_subspace_iteration_finds_what_numpy_finds(size: int, rank: int) -> None:
    rng = np.random.default_rng(size)
    spectrum = np.arange(1, 2001) ** -0.7  # slow, as of real states: half of the energy is in a tenth
    tokens = (
        rng.standard_normal((2000, size))
        @ np.linalg.qr(rng.standard_normal((size, size)))[0]
        * np.sqrt(spectrum[:size])
    )
    matrix = tokens.T @ tokens / 2000
    values = np.linalg.eigh(matrix)[0][::-1][:rank]
    found, vectors = subspace_iteration(torch.from_numpy(matrix).float(), rank, 0)
    np.testing.assert_allclose(found.numpy(), values, rtol=0.03)
    rows = vectors.double().numpy()
    np.testing.assert_allclose(rows @ rows.T, np.eye(rank), atol=1e-5)
    assert np.trace(rows @ matrix @ rows.T) >= 0.999 * values.sum()
    exact, whole = whole_decomposition(torch.from_numpy(matrix), rank, 0)
    np.testing.assert_allclose(exact.numpy(), values, rtol=1e-9)
    assert np.trace(whole.numpy() @ matrix @ whole.numpy().T) == pytest.approx(values.sum())


def test_directions_that_the_draw_never_took_get_a_small_eigenvalue() -> None:
    """It divides, so it cannot be 0; but one that is there, however small, is kept as it is."""
    states = torch.zeros(1000, 64)
    states[:, 0] = 1.0
    states[:, 1:3] = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.03, 0.005])
    fitted = fit_states([states], torch.ones(64), ENCODING, torch.device("cpu"))
    assert fitted.eigenvalues is not None
    values = fitted.eigenvalues.double().numpy()
    wanted = np.linalg.eigvalsh(numpy_moment(states.double().numpy()))[::-1]
    assert 2e-6 < wanted[2] / wanted[0] < 1e-4
    np.testing.assert_allclose(values[:3], wanted[:3], rtol=0.01)
    np.testing.assert_allclose(values[3:], 1e-6 * values[0], rtol=1e-6)


def test_large_matrices_are_iterated_on_and_signs_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.diag(torch.tensor([1.0, 9.0, 4.0, 0.5]))
    for limit in (0, 10):
        monkeypatch.setattr("dflash_train.stage1_target.projection.WHOLE_CHANNELS", limit)
        values, vectors = leading_eigenvectors(matrix, 2)
        torch.testing.assert_close(values.float(), torch.tensor([9.0, 4.0]))
        torch.testing.assert_close(vectors.float(), torch.eye(4)[[1, 2]], rtol=0, atol=1e-3)


def test_every_token_counts_the_same_and_the_trace_is_the_number_of_channels() -> None:
    tokens = torch.randn(5007, 24, generator=torch.Generator().manual_seed(0))
    moments = []
    for factor in (torch.ones(5007, 1), torch.logspace(-3, 3, 5007)[:, None]):
        moment = SecondMoment(24, torch.device("cpu"))
        for piece in torch.split(tokens * factor, 1000):
            moment.add(piece)
        moment.add(torch.zeros(3, 24))
        assert moment.num_tokens == 5007
        moments.append(moment.matrix())
    torch.testing.assert_close(moments[0], moments[1], rtol=1e-4, atol=1e-5)
    assert float(moments[0].trace()) == pytest.approx(24, rel=1e-4)
    np.testing.assert_allclose(moments[0].numpy(), numpy_moment(tokens.double().numpy()), rtol=1e-3, atol=1e-5)


def test_sinks_and_broken_tokens_do_not_tilt_the_projection(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(1, 1000, 64, generator=torch.Generator().manual_seed(0))
    spoiled = states.clone()
    spoiled[0, :300, 5] *= 1e6
    spoiled[0, 300] = float("nan")

    def fit(states: torch.Tensor) -> torch.Tensor:
        monkeypatch.setattr(Target, "hidden_states", lambda _self, _ids: states)
        batches = [(torch.zeros(1, states.shape[1], dtype=torch.int64), [states.shape[1]])]
        projection = fit_projection(target, batches, torch.ones(64), ENCODING).projection
        assert projection is not None
        return projection

    torch.testing.assert_close(fit(spoiled), fit(states[:, 301:]), rtol=0, atol=1e-4)
    with pytest.raises(InputError, match="to 13 features cannot be fitted on 12 tokens. Give more data, more"):
        fit(states[:, :12])


def test_projection_keeps_all_that_a_drafters_fc_looks_at(target: Target, tmp_path: Path) -> None:
    batches = [batch(seed) for seed in range(3)]
    states = torch.cat(
        [
            row[:length]
            for token_ids, lengths in batches
            for row, length in zip(target.hidden_states(token_ids), lengths, strict=True)
        ]
    ).double()
    scale = torch.from_numpy(calibrate(target, batches))
    fc = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    fc[6] = fc[5] - 2 * fc[0]  # of rank 6
    found = fit_projection(target, batches, scale, ENCODING, fc=fc)
    plain = fit_projection(target, batches, scale, ENCODING)
    assert found.projection is not None and found.eigenvalues is not None and plain.eigenvalues is not None
    rows = found.projection.double()
    torch.testing.assert_close(rows @ rows.T, torch.eye(13, dtype=torch.float64), rtol=0, atol=1e-5)
    # fc sees the same of what is kept as of the states themselves
    scaled = states / scale
    torch.testing.assert_close(
        (scaled @ rows.T @ rows * scale) @ fc.double().T, states @ fc.double().T, rtol=1e-3, atol=1e-3
    )
    # components are uncorrelated over the tokens, with the eigenvalues as their energy, descending
    moment = rows.numpy() @ numpy_moment(scaled.numpy()) @ rows.numpy().T
    np.testing.assert_allclose(moment, np.diag(found.eigenvalues.numpy()), atol=2e-4 * float(found.eigenvalues[0]))
    assert (found.eigenvalues.diff() <= 0).all()
    # the seven other directions are the best there are: those of numpy, of the moment outside of fc's rows
    seen = fc[:6].double().numpy() * scale.double().numpy()
    outside = np.eye(64) - np.linalg.pinv(seen) @ seen
    best = np.linalg.eigvalsh(outside @ numpy_moment(scaled.numpy()) @ outside)[::-1][:7].sum()
    basis = row_space(fc * scale)
    assert basis.shape == (64, 6)
    first = float(torch.trace(basis.T.double() @ torch.from_numpy(numpy_moment(scaled.numpy())) @ basis.double()))
    assert float(found.eigenvalues.sum()) == pytest.approx(first + best, rel=1e-3)
    assert float(found.eigenvalues.sum()) < float(plain.eigenvalues.sum())


def test_projection_of_a_low_rank_is_the_best_part_of_fcs_rows(target: Target) -> None:
    batches, encoding = [batch(seed) for seed in range(3)], make_encoding("projected-int8", 2, 32, 3)
    fc = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    found = fit_projection(target, batches, torch.ones(64), encoding, fc=fc)
    plain = fit_projection(target, batches, torch.ones(64), encoding).projection
    assert found.projection is not None and plain is not None and not torch.equal(found.projection, plain)
    inside = found.projection @ row_space(fc)
    torch.testing.assert_close(inside.square().sum(1), torch.ones(3), rtol=1e-4, atol=0)


def save_drafter(folder: Path, weight: torch.Tensor, layer_ids: list[int]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({"fc.weight": weight, "norm.weight": torch.ones(3)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dflash_config": {"target_layer_ids": layer_ids}}))
    return folder


def test_fc_of_a_drafter_is_read_and_checked(tmp_path: Path) -> None:
    weight = torch.randn(7, 64).bfloat16()
    drafter = save_drafter(tmp_path / "drafter", weight, [1, 2])
    assert torch.equal(read_fc(drafter, (1, 2), 32), weight.float())
    with pytest.raises(
        InputError, match=r"taps the layers \[1, 2\], but \[0, 2\] are to be stored. Give another drafter"
    ):
        read_fc(drafter, (0, 2), 32)
    with pytest.raises(
        InputError, match=r"has shape \[7, 64\], but finite weights for 2 layers of 16 channels are wanted"
    ):
        read_fc(drafter, (1, 2), 16)
    broken = save_drafter(tmp_path / "broken", torch.full((7, 64), float("nan")), [1, 2])
    with pytest.raises(InputError, match="finite weights"):
        read_fc(broken, (1, 2), 32)
    for damage in (b"[]", b"{", b""):
        (drafter / "config.json").write_bytes(damage)
        with pytest.raises(InputError, match="cannot be read .* Give a drafter's folder in z-lab's format"):
            read_fc(drafter, (1, 2), 32)
    with pytest.raises(InputError, match="cannot be read"):
        read_fc(tmp_path / "none", (1, 2), 32)
