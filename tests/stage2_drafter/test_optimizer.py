"""Learning-rate schedules, the single scaling pass, and moments that survive a save."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.optimizer import (
    Optimizers,
    gradient_norm,
    learning_rate,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    scale_and_clip,
    set_learning_rate,
)


def make_config(**options: Any) -> TrainConfig:
    return TrainConfig(store=Path("store"), run=Path("run"), **options)


def rates(total: int, **options: Any) -> list[float]:
    config = make_config(lr=1.0, **options)
    return [learning_rate(step, total, config) for step in range(total)]


def test_warmup_rises_linearly_and_first_step_moves() -> None:
    assert rates(100, warmup_ratio=0.04)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, rates(100)[4]])


def test_cosine_ends_at_the_lowest_rate() -> None:
    values = rates(100, schedule="cosine", min_lr_ratio=0.1)
    assert values[-1] == pytest.approx(0.1)
    assert values[51] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 48 / 96)) / 2)
    assert all(a >= b for a, b in itertools.pairwise(values[4:]))


def test_wsd_is_flat_and_falls_over_the_last_fifth() -> None:
    values = rates(100, schedule="wsd", min_lr_ratio=0.0)
    assert values[4:80] == [1.0] * 76
    assert values[80] == pytest.approx(0.95)
    assert values[-1] == pytest.approx(0.0)


def test_constant_stays_and_tiny_runs_have_no_warmup() -> None:
    assert rates(7, schedule="constant") == [1.0] * 7
    assert learning_rate(0, 0, make_config()) > 0


def test_scale_and_clip_is_normalisation_then_clipping() -> None:
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
    for limit in (0.5, 100.0):
        parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        twins = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for parameter, twin, gradient in zip(parameters, twins, gradients, strict=True):
            parameter.grad, twin.grad = gradient.clone(), gradient / 5
        norm = float(gradient_norm(parameters))
        assert norm == pytest.approx(13)
        assert scale_and_clip(parameters, norm, 1 / 5, limit) == pytest.approx(13 / 5)
        torch.nn.utils.clip_grad_norm_(twins, limit)
        for parameter, twin in zip(parameters, twins, strict=True):
            torch.testing.assert_close(parameter.grad, twin.grad)


def test_gradient_norm_shows_what_is_not_finite() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
    parameters[0].grad, parameters[1].grad = torch.zeros(2), torch.tensor([0.0, math.inf, 0.0])
    assert not torch.isfinite(gradient_norm(parameters))


def take_steps(model: torch.nn.Module, optimizer: Optimizers, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def test_reloaded_moments_continue_bit_identically() -> None:
    torch.manual_seed(0)
    config = make_config(weight_decay=0.1)
    model, twin = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model.named_parameters(), config)
    take_steps(model, optimizer, range(3))
    twin.load_state_dict(model.state_dict())
    twin_optimizer = make_optimizer(twin.named_parameters(), config)
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model.named_parameters()).items()}
    load_optimizer_tensors(twin_optimizer, twin.named_parameters(), tensors)
    take_steps(model, optimizer, range(3, 6))
    take_steps(twin, twin_optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_moments_of_another_shape_are_refused() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model.named_parameters(), make_config())
    take_steps(model, optimizer, range(1))
    other = torch.nn.Linear(4, 2)
    with pytest.raises(InputError, match=r"exp_avg of weight .* \[2, 3\].* \[2, 4\]"):
        load_optimizer_tensors(
            make_optimizer(other.named_parameters(), make_config()),
            other.named_parameters(),
            optimizer_tensors(optimizer, model.named_parameters()),
        )


class TinyDrafter(torch.nn.Module):
    """Parameters with a drafter's names: fc, two layers of a matrix and a norm, and the last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(6, 4, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)) for _ in range(2))
        for layer in self.layers:
            layer.register_parameter("norm", torch.nn.Parameter(torch.ones(4)))
        self.norm = torch.nn.Parameter(torch.ones(4))


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    model = TinyDrafter()
    optimizer = make_optimizer(model.named_parameters(), make_config(optimizer="muon", weight_decay=0.1))
    owners = {name: type(optimizer.owner(parameter)).__name__ for name, parameter in model.named_parameters()}
    assert owners == {
        "fc.weight": "AdamW",
        "layers.0.0.weight": "Muon",
        "layers.0.norm": "AdamW",
        "layers.1.0.weight": "Muon",
        "layers.1.norm": "AdamW",
        "norm": "AdamW",
    }
    set_learning_rate(optimizer, 0.25)
    decays = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert decays == [(0.25, 0.1), (0.25, 0.0), (0.25, 0.1)]


def test_updates_of_muon_are_as_large_as_those_of_adamw() -> None:
    """So that one learning rate serves both: 0.2 · lr a weight, root mean square (arXiv 2502.16982)."""
    inner = torch.nn.Linear(64, 96, bias=False)
    model = torch.nn.ModuleDict({"layers": inner, "fc": torch.nn.Linear(2, 2)})
    before = inner.weight.detach().clone()
    optimizer = make_optimizer(model.named_parameters(), make_config(optimizer="muon", lr=1e-2))
    take_steps(model, optimizer, range(1))
    moved = (inner.weight - before).square().mean().sqrt().item()
    assert moved == pytest.approx(0.2 * 1e-2, rel=0.25)


def test_reloaded_momentum_of_muon_continues_bit_identically() -> None:
    torch.manual_seed(0)
    config = make_config(optimizer="muon", weight_decay=0.1, lr=1e-2)
    model, twin = TinyDrafter(), TinyDrafter()
    optimizer = make_optimizer(model.named_parameters(), config)
    assert optimizer_tensors(optimizer, model.named_parameters()) == {}
    take_steps(model, optimizer, range(3))
    twin.load_state_dict(model.state_dict())
    twin_optimizer = make_optimizer(twin.named_parameters(), config)
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model.named_parameters()).items()}
    assert {name for name in tensors if "layers.0" in name} == {
        "momentum_buffer.layers.0.0.weight",
        "exp_avg.layers.0.norm",
        "exp_avg_sq.layers.0.norm",
        "step.layers.0.norm",
    }
    load_optimizer_tensors(twin_optimizer, twin.named_parameters(), tensors)
    take_steps(model, optimizer, range(3, 6))
    take_steps(twin, twin_optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_norms_are_not_decayed() -> None:
    optimizer = make_optimizer(torch.nn.Linear(3, 2).named_parameters(), make_config(weight_decay=0.1))
    decays = {group["params"][0].ndim: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {2: 0.1, 1: 0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3, "epochs": 2}, "Both --steps 3 and --epochs 2"),
        ({"anchors": 9, "row_tokens": 8}, "--anchors 9 is more than --row-tokens 8"),
        ({"schedule": "linear"}, "choose one of cosine, wsd, constant"),
        ({"loss": "kl"}, "choose one of decay, dpace"),
        ({"optimizer": "sgd"}, "choose one of adamw, muon"),
        ({"holdout": 1.0}, "--holdout is 1.0"),
        ({"rows_per_step": 0}, "--rows-per-step is 0, but at least 1"),
        ({"lr": 0.0}, "--lr is 0.0"),
        ({"betas": (0.9, 1.0)}, "--betas"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_config(**options)


def test_gamma_follows_the_block_size() -> None:
    config = make_config()
    assert [config.gamma_for(size) for size in (16, 10, 8, 5)] == [7, 5, 4, 2]
    assert make_config(gamma=3.0).gamma_for(16) == 3


def test_changes_name_only_what_alters_the_run() -> None:
    recorded = make_config(lr=1e-3, steps=10).to_json()
    assert make_config(lr=1e-3, steps=20, keep=9).changes(recorded) == []
    assert make_config(lr=2e-3, seed=1, steps=10).changes(recorded) == [
        "--lr is 0.002, the checkpoint has 0.001",
        "--seed is 1, the checkpoint has 0",
    ]
