from typing import Any

import pytest
import torch

from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import LARGEST_STATE, make_encoding
from dflash_train.store.tap_encoder import TapEncoder

L, H, RANK = 3, 8, 11


@pytest.fixture
def calibration() -> Calibration:
    generator = torch.Generator().manual_seed(2)
    rows = torch.linalg.qr(torch.randn(L * H, RANK, generator=generator, dtype=torch.float64)).Q.T.float().contiguous()
    return Calibration(
        torch.exp(torch.randn(L * H, generator=generator)), projection=rows, eigenvalues=torch.linspace(2, 0.1, RANK)
    )


def encode(name: str, calibration: Calibration, states: torch.Tensor, rows: torch.Tensor) -> tuple[TapEncoder, Any]:
    encoding = make_encoding(name, L, H, RANK if name.startswith("projected") else None)
    encoder = TapEncoder(encoding, calibration, rows)
    for layer in range(L):
        output = states[..., layer * H : (layer + 1) * H].clone()
        encoder.add(layer, output)
        output.zero_()  # the next layer may work in place
    return encoder, encoder.finish()


@pytest.mark.parametrize("name", ["bf16", "int8", "projected-int8", "projected-int4"])
def test_layer_by_layer_gives_what_all_layers_at_once_give(name: str, calibration: Calibration) -> None:
    states = torch.randn(4, 33, L * H, generator=torch.Generator().manual_seed(0))
    rows = (torch.arange(33)[None, :] < torch.tensor([33, 32, 7, 1])[:, None]).flatten().nonzero()[:, 0]
    states[1, 5, 9] = float("nan")
    states[0, 17, 20] = -2e10  # finite, but beyond what any target has
    states[0, 18, 20] = 9e9
    states[3, 20, 0] = float("inf")  # padding
    encoder, (features, scales, sound_states) = encode(name, calibration, states, rows)
    real = states.flatten(0, 1)[rows]
    assert sound_states.tolist() == (real.view(-1, L, H).abs() <= LARGEST_STATE).all(-1).tolist()
    assert (~sound_states).nonzero().tolist() == [[17, 2], [38, 1]]
    wanted, wanted_scales = encoder.encoding.encode(real, calibration)
    sound = sound_states.all(1)
    assert torch.equal(features[sound], wanted[sound])
    assert (scales is None) == (wanted_scales is None)
    if scales is not None and wanted_scales is not None:
        assert torch.equal(scales[sound], wanted_scales[sound])


@pytest.mark.parametrize("name", ["int8", "projected-int8", "projected-int4"])
@pytest.mark.parametrize("num_tokens", [1, 50, 200])
def test_errors_are_those_of_the_decoded_states(name: str, num_tokens: int, calibration: Calibration) -> None:
    states = torch.randn(1, num_tokens, L * H, generator=torch.Generator().manual_seed(1)) * calibration.channel_scale
    states[0, -1] = 0
    encoder, (features, scales, _) = encode(name, calibration, states, torch.arange(num_tokens))
    errors = encoder.errors(features, scales)
    assert errors is not None and errors.shape == (L,)
    decoded = encoder.encoding.decode(features, scales, calibration, torch.float32)
    wanted = states[0] / calibration.channel_scale
    lost = (encoder.encoding.scaled_states(decoded, calibration) - wanted).view(-1, L, H)[:-1].square().sum(-1)
    exact = (lost / wanted.view(-1, L, H)[:-1].square().sum(-1)).mean(0) if num_tokens > 1 else torch.zeros(L)
    torch.testing.assert_close(errors, exact, rtol=1e-4 if num_tokens <= 64 else 0.5, atol=1e-12)


def test_errors_are_measured_over_the_whole_batch(calibration: Calibration) -> None:
    """Batches are sorted by length, and later samples may be of another kind."""
    states = torch.randn(1, 512, L * H, generator=torch.Generator().manual_seed(1)) * calibration.channel_scale
    states[0, 256:, ::H] *= 100  # which makes the steps of these tokens coarse
    encoder, (features, scales, _) = encode("int8", calibration, states, torch.arange(512))
    halves = [encode("int8", calibration, half, torch.arange(256)) for half in torch.split(states, 256, dim=1)]
    first, second = (one.errors(*given[:2]) for one, given in halves)
    errors = encoder.errors(features, scales)
    assert errors is not None and first is not None and second is not None
    assert (second > 2 * first).all() or (first > 2 * second).all()
    torch.testing.assert_close(errors, (first + second) / 2, rtol=0.2, atol=0)


def test_bf16_has_no_error_to_measure(calibration: Calibration) -> None:
    encoder, (features, scales, _) = encode("bf16", calibration, torch.ones(1, 3, L * H), torch.arange(3))
    assert encoder.errors(features, scales) is None
