import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dflash_train.stage1_target.compiled_target import compile_layers
from dflash_train.stage1_target.target import Target, load_target
from dflash_train.stage1_target.target_config import TargetConfig

torch.set_num_threads(1)


@pytest.fixture
def target(tiny_target: Callable[..., Path]) -> Iterator[Target]:
    yield load_target(TargetConfig(name=str(tiny_target("qwen3"))), (1, 3), "cpu")
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def test_two_graphs_serve_all_layers_and_shapes_and_no_third_is_made(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = [(4, 37), (1, 11), (2, 2), (7, 64), (1, 200)]
    batches = [torch.randint(4, 300, shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
    wanted = [target.hidden_states(batch) for batch in batches]
    with caplog.at_level(logging.INFO):
        assert compile_layers(target, 400, 200, backend="aot_eager") == 2
    assert "Compiled 2 graphs for 4 layers of the target in" in caplog.text
    for batch, states in zip(batches, wanted, strict=True):
        torch.testing.assert_close(target.hidden_states(batch), states, rtol=1e-5, atol=1e-5)
    target.model.double()  # there is no graph for that
    states = target.hidden_states(batches[1])
    assert states.dtype == target.dtype and torch.allclose(states, wanted[1], rtol=1e-3, atol=1e-3)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["No graph fits states [1, 11, 32], torch.float64; such batches run uncompiled."]


def test_layers_that_cannot_be_traced_run_uncompiled(
    target: Target, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = torch.arange(4, 30)[None]
    wanted = target.hidden_states(token_ids)
    layer_class = type(target.layers[0])
    forward = layer_class.forward

    def broken(self: torch.nn.Module, hidden_states: torch.Tensor, *arguments: object, **keywords: object) -> object:
        print(float(hidden_states.sum()) and "")  # a number on the host: no graph can hold that
        return forward(self, hidden_states, *arguments, **keywords)

    monkeypatch.setattr(layer_class, "forward", broken)
    assert compile_layers(target, 400, 200, backend="aot_eager") == 0
    assert "The target could not be compiled and runs uncompiled: " in caplog.text
    monkeypatch.undo()
    torch.testing.assert_close(target.hidden_states(token_ids), wanted, rtol=0, atol=0)


def test_a_target_on_several_devices_is_not_compiled(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    target.layers[0]._hf_hook = object()  # type: ignore[assignment]
    assert compile_layers(target, 400, 200, backend="aot_eager") == 0
    assert "lie on several devices; they run uncompiled" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_states_differ_by_bfloat16_noise(tiny_target: Callable[..., Path]) -> None:
    def load(dtype: str) -> Target:
        return load_target(TargetConfig(name=str(tiny_target("qwen3")), dtype=dtype), (1, 3), "cuda")

    token_ids = torch.randint(4, 300, (5, 61), generator=torch.Generator().manual_seed(0))
    exact = load("float32").hidden_states(token_ids)
    target = load("bfloat16")
    plain = target.hidden_states(token_ids).float()
    try:
        assert compile_layers(target, 400, 200) == 2
        compiled = target.hidden_states(token_ids).float()
        for shape in ((1, 7), (2, 200), (6, 33)):
            target.hidden_states(torch.zeros(shape, dtype=torch.int64))
    finally:
        torch.compiler.set_stance("default")
        torch.compiler.reset()
    error, noise = (compiled - exact).norm() / exact.norm(), (plain - exact).norm() / exact.norm()
    assert float(error) < 1.5 * float(noise) < 0.05
