from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target.calibration import ChannelMedians, calibrate, channel_scale, draw_samples
from dflash_train.stage1_target.extract_config import ExtractConfig
from dflash_train.stage1_target.import_config import ImportConfig
from dflash_train.stage1_target.target import Target, load_target
from dflash_train.stage1_target.target_config import TargetConfig

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Path]) -> Target:
    return load_target(TargetConfig(name=str(tiny_target("llama"))), (1, 2), "cpu")


def batch(seed: int) -> tuple[torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 300, (3, 50), generator=generator), [50, 31, 7]


def test_channel_scale_matches_plain_medians_without_padding(target: Target) -> None:
    batches = [batch(seed) for seed in range(3)]
    states = torch.cat(
        [
            row[:length]
            for token_ids, lengths in batches
            for row, length in zip(target.hidden_states(token_ids), lengths, strict=True)
        ]
    ).double()
    normalised = states / states.square().mean(dim=1, keepdim=True).sqrt()
    wanted = 1.4826 * np.median(normalised.abs().numpy(), axis=0)
    found = calibrate(target, batches)
    assert found.shape == (64,) and found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=0.03)  # half a bin of 2.0 %, and gaps between 264 values


def test_histogram_median_is_within_a_percent_of_the_exact_one() -> None:
    values = torch.randn(20_001, 7, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 7)
    medians = ChannelMedians(7, torch.device("cpu"))
    for piece in torch.split(values, 1000):
        medians.add(piece)
    np.testing.assert_allclose(medians.medians(), np.median(values.abs().numpy(), axis=0), rtol=0.01)


def test_sinks_and_broken_tokens_do_not_move_the_scale(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(1, 1000, 64, generator=torch.Generator().manual_seed(0))
    spoiled = states.clone()
    spoiled[0, :300] *= 1000.0
    spoiled[0, :300, 5] *= 1000.0  # another direction, which a median over them would see
    spoiled[0, 300] = float("nan")

    def scale_of(states: torch.Tensor) -> np.ndarray:
        monkeypatch.setattr(Target, "hidden_states", lambda _self, _ids: states)
        return calibrate(target, [(torch.zeros(1, states.shape[1], dtype=torch.int64), [states.shape[1]])])

    np.testing.assert_allclose(scale_of(spoiled), scale_of(states[:, 301:]), rtol=1e-6)
    with pytest.raises(
        InputError, match="No calibration token has finite states: all weights are, so it overflows even in float32"
    ):
        scale_of(torch.full((1, 3, 64), float("inf")))


def test_floor_is_a_thousandth_of_the_layers_median() -> None:
    medians = np.array([1.0, 2.0, 3.0, 0.0] + [10.0, 20.0, 30.0, 0.001])
    scale = channel_scale(medians, 2)
    np.testing.assert_allclose(scale[:3], 1.4826 * medians[:3], rtol=1e-6)
    assert scale[3] == pytest.approx(1e-3 * 1.4826 * 1.5) and scale[7] == pytest.approx(1e-3 * 1.4826 * 15)
    assert (channel_scale(np.zeros(4), 1) > 0).all()


def test_draw_is_seeded_and_just_large_enough() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 507)
    drawn = draw_samples(lengths, 1000, seed=0)
    assert lengths[drawn].sum() >= 1000 > lengths[drawn[:-1]].sum()
    assert (
        drawn.tolist() == draw_samples(lengths, 1000, seed=0).tolist() != draw_samples(lengths, 1000, seed=1).tolist()
    )
    assert sorted(draw_samples(lengths, 10**9, seed=0)) == list(range(507))


@pytest.mark.parametrize("config", [ExtractConfig, ImportConfig])
def test_calibration_takes_64_k_tokens_where_nothing_else_is_said(config: type) -> None:
    """The eigenvectors of a projection need them; the tests are content with fewer."""
    assert config.calibration_tokens >= 2**16  # type: ignore[attr-defined]


def test_calibration_that_is_out_of_memory_goes_on_with_halves_and_leaves_out_what_does_not_fit(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden_states = Target.hidden_states
    room = 31
    shapes: list[tuple[int, ...]] = []

    def small(self: Target, token_ids: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(token_ids.shape))
        if token_ids.numel() > room:
            raise torch.OutOfMemoryError
        return hidden_states(self, token_ids)

    token_ids, lengths = batch(0)
    wanted = calibrate(target, [(token_ids[row : row + 1, :length], [length]) for row, length in ((1, 31), (2, 7))])
    monkeypatch.setattr(Target, "hidden_states", small)
    np.testing.assert_array_equal(calibrate(target, [(token_ids, lengths)]), wanted)
    assert shapes == [(3, 50), (1, 50), (2, 31), (1, 31), (1, 7)], "the sample of 50 tokens does not fit"
    room = 1
    with pytest.raises(InputError, match="None of the 3 samples drawn for calibration fits into the memory"):
        calibrate(target, [(token_ids, lengths)])


def test_tokens_from_twenty_times_the_median_on_are_sinks(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(1, 1000, 64, generator=torch.Generator().manual_seed(0))

    def scale_with(factor: float) -> np.ndarray:
        other = states.clone()
        other[0, :100] *= factor
        other[0, :100, 5] *= 3.0  # so that it shows whether they count
        monkeypatch.setattr(Target, "hidden_states", lambda _self, _ids: other)
        return calibrate(target, [(torch.zeros(1, 1000, dtype=torch.int64), [1000])])

    kept, left_out = scale_with(10.0), scale_with(30.0)
    assert kept[5] != pytest.approx(left_out[5], rel=1e-3)
    monkeypatch.setattr(Target, "hidden_states", lambda _self, _ids: states[:, 100:])
    np.testing.assert_allclose(
        left_out, calibrate(target, [(torch.zeros(1, 900, dtype=torch.int64), [900])]), rtol=1e-6
    )
