"""Learning rate, AdamW or Muon over fp32 masters, and the one pass that normalises and clips the gradient.

The step's loss is Σ w·CE over all rows and ranks; only its denominator Σ w, known after the last row, makes it a mean.
So gradients are back-propagated unnormalised and scaled once, together with the clipping: one read of the gradient for
its norm and one write, instead of two of each.

Muon (Jordan 2024; arXiv 2502.16982 for the scale) orthogonalises the momentum of a matrix by five Newton-Schulz
iterations in bf16. It is meant for the matrices inside a network: `fc`, which reads the target's states, and the norms
stay with AdamW. Its updates are scaled to AdamW's usual size, 0.2 a weight, so one learning rate serves both. It keeps
one moment instead of two; every rank computes all iterations, for 5 layers of Qwen3-8B's size 94 TFLOP a step.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.config import TrainConfig

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_INNER = "layers."  # parameters inside the network, whose matrices Muon takes


class Optimizers:
    """One or two of torch's optimizers over disjoint parameters, used as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def owner(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        """The optimizer that updates a parameter."""
        return next(
            part
            for part in self.parts
            if any(parameter is own for group in part.param_groups for own in group["params"])
        )


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """The learning rate of optimizer step `step` (0-based) of `total`: linear warm-up, then the schedule.

    The first step already moves (lr / warm-up steps); the last step of cosine and wsd has min_lr_ratio · lr.
    """
    warmup = round(config.warmup_ratio * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    floor = config.min_lr_ratio
    if config.schedule == "cosine":
        progress = min(1.0, (step - warmup + 1) / max(1, total - warmup))
        return config.lr * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
    if config.schedule == "wsd":
        falling = max(1, round(config.decay_ratio * total))
        progress = min(1.0, max(0.0, (step - (total - falling) + 1) / falling))
        return config.lr * (1 - (1 - floor) * progress)
    return config.lr


def make_optimizer(parameters: Iterable[tuple[str, torch.nn.Parameter]], config: TrainConfig) -> Optimizers:
    """The optimizer of named fp32 parameters: matrices with weight decay, norms without; fused AdamW kernels on CUDA."""
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    by_muon = [
        parameter
        for name, parameter in named
        if config.optimizer == "muon" and parameter.ndim == 2 and name.startswith(_INNER)
    ]
    taken = {id(parameter) for parameter in by_muon}
    others = [parameter for _, parameter in named if id(parameter) not in taken]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in others if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in others if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    on_cuda = any(parameter.is_cuda for _, parameter in named)
    parts: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=1e-8, fused=on_cuda
        )
    ]
    if by_muon:
        muon = torch.optim.Muon(
            by_muon,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=0.95,
            nesterov=True,
            adjust_lr_fn="match_rms_adamw",
        )
        parts.append(muon)
    return Optimizers(parts)


def set_learning_rate(optimizer: Optimizers, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def gradient_norm(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """Norm of all gradients together as one fp32 scalar on their device; not finite where any of them is not."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch._foreach_norm(gradients)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))
    return total


def scale_and_clip(parameters: Sequence[torch.nn.Parameter], norm: float, scale: float, limit: float) -> float:
    """Multiply every gradient by `scale`, and further down to norm `limit`; returns the norm before clipping.

    `norm` is the norm before scaling. A host number on purpose: it is the same on all ranks, so they clip alike.
    """
    scaled_norm = norm * scale
    factor = scale * min(1.0, limit / (scaled_norm + 1e-6))
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)
    return scaled_norm


def optimizer_tensors(optimizer: Optimizers, named: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, Tensor]:
    """What the optimizer remembers, as named tensors: AdamW's `exp_avg.<parameter>`, `exp_avg_sq.<…>` and `step.<…>`,
    Muon's `momentum_buffer.<…>`.

    Parameters without a state yet (no step was taken) have no entry.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in named:
        state = optimizer.owner(parameter).state.get(parameter) or {}
        tensors.update({f"{key}.{name}": state[key].detach() for key in (*_MOMENTS, "step") if key in state})
    return tensors


def load_optimizer_tensors(
    optimizer: Optimizers, named: Iterable[tuple[str, torch.nn.Parameter]], tensors: dict[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave; raises InputError where a parameter's moments do not fit its shape."""
    for name, parameter in named:
        state: dict[str, Tensor] = {}
        for key in _MOMENTS:
            moment = tensors.get(f"{key}.{name}")
            if moment is None:
                continue
            if moment.shape != parameter.shape:
                raise InputError(
                    f"{key} of {name} in the checkpoint has shape {list(moment.shape)}, the drafter's parameter has "
                    f"{list(parameter.shape)}. Resume with the drafter that the run began with."
                )
            state[key] = moment.to(parameter.device, torch.float32, copy=True)
        if f"step.{name}" in tensors:
            on_device = parameter.device if parameter.is_cuda else torch.device("cpu")
            state["step"] = tensors[f"step.{name}"].to(on_device, torch.float32, copy=True)
        if state:
            optimizer.owner(parameter).state[parameter] = state
