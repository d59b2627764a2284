"""Are these the states of those layers of this target? A few samples are run again and compared with every layer.

Layer ids that are off by one train without a complaint and draft badly, and no file of another program says which layers
it holds. Adjacent layers differ by some ten per cent, the same layer in another engine's kernels by one to three in
bfloat16, so the best match tells them apart.

Shapes: T tokens, L tapped target layers, N decoder layers but the last, H hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_train.errors import InputError

if TYPE_CHECKING:
    from dflash_train.stage1_target.foreign import ForeignSample, Layout, StateFile
    from dflash_train.stage1_target.target import Target

CHECK_TOKENS = 512
"""From the start of a sample: what comes later cannot change their states."""
LARGEST_DIFFERENCE = 0.2
"""Of the best match: states that are further from every layer are not of this target."""


def layer_differences(target: Target, sample: ForeignSample) -> Tensor:
    """Median over tokens of |h - h'| / |h'| of each plane of a sample against each decoder layer but the last, [L, N]."""
    token_ids = torch.from_numpy(sample.token_ids[:CHECK_TOKENS]).long()
    every = replace(target, target_layer_ids=tuple(range(target.num_target_layers - 1)))
    ours = every.hidden_states(token_ids[None])[0].float().view(len(token_ids), -1, target.hidden_size)
    theirs = sample.states[:CHECK_TOKENS].to(ours.device).float().view(len(token_ids), -1, target.hidden_size)
    size = ours.norm(dim=2).clamp_min(1e-30)
    planes = [((theirs[:, plane, None] - ours).norm(dim=2) / size).median(0).values for plane in range(theirs.shape[1])]
    return torch.stack(planes).cpu()


def check_states(target: Target, layout: Layout, file: StateFile, sample: ForeignSample) -> float:
    """The largest difference of a plane of this sample from its layer; InputError where it is that of another, or of none."""
    differences = layer_differences(target, sample)
    wanted = target.target_layer_ids
    matches = differences.argmin(1).tolist()
    own = differences[torch.arange(len(wanted)), torch.tensor(wanted)]
    best = differences.min(1).values
    if (best > LARGEST_DIFFERENCE).any():
        plane = int(best.argmax())
        raise InputError(
            f"The states in {file.path} are not those of {target.config.name}: plane {plane} differs by {best[plane]:.0%} "
            f"from the most similar layer. Give the target that made them, or --check-samples 0 where you know better."
        )
    if tuple(matches) != tuple(wanted):
        plane = next(plane for plane, layer in enumerate(wanted) if matches[plane] != layer)
        raise InputError(
            f"Plane {plane} of {file.path} is the output of decoder layer {matches[plane]} (difference {best[plane]:.1%}), "
            f"not of {wanted[plane]} ({own[plane]:.0%}). What is in the file is --layers {layout.show_layers(matches)}, as "
            f"{layout.name} numbers them."
        )
    return float(own.max())
