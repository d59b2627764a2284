"""Does speculative output equal plain greedy output, and if not, is it rounding?

Verification computes the same logits as one-token decoding in another order of summation. In bf16 that moves them by
about their last bit, so where the two best tokens are that close, the argmax may flip; from there on the texts differ
and mean nothing. So only the first difference of a prompt is judged, against a measurement: the target computes the
logits at that position twice, by one long forward and by its cache, and the gap between the two tokens is held against
how far those two disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dflash_train.speculate.target_cache import TargetCache
from dflash_train.stage1_target.target import Target


@dataclass(frozen=True)
class Difference:
    """The first place where speculative and plain output part."""

    position: int
    """Index among the new tokens."""
    plain_token: int | None
    """What plain decoding gave; None where it had ended."""
    speculative_token: int | None
    """What speculative decoding gave; None where it had ended."""
    gap: float
    """Logit of the plain token less that of the speculative one, by the target's cache; infinite where one is None."""
    top2_gap: float
    """Best logit less the second best there."""
    rounding: float
    """How much of a gap rounding explains: twice the larger of the measured disagreement and one bit of the best logit."""
    within_rounding: bool
    """Whether gap is at most rounding: a tie that flipped, not an error."""

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {name: None if value == float("inf") else value for name, value in fields.items()}


def first_difference(
    target: Target, prompt_ids: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Difference | None:
    """Compare the new tokens of both; None where they are equal."""
    if list(plain) == list(speculative):
        return None
    shorter = min(len(plain), len(speculative))
    position = next((i for i in range(shorter) if plain[i] != speculative[i]), shorter)
    read = torch.tensor([[*prompt_ids, *plain[:position]]], dtype=torch.long, device=target.device)
    with torch.inference_mode():
        whole = TargetCache(target.model).run(read)[0, -1].float()
        cached = whole
        if position:
            cache = TargetCache(target.model)
            cache.run(read[:, : len(prompt_ids)])
            for index in range(len(prompt_ids), read.shape[1]):
                cached = cache.run(read[:, index : index + 1])[0, -1].float()
        best = cached.topk(2).values
        last_bit = torch.finfo(target.dtype).eps * float(best[0].abs())
        rounding = 2 * max(float((whole - cached).abs().max()), last_bit)
        gap = float("inf")
        if position < shorter:
            gap = float(cached[plain[position]] - cached[speculative[position]])
    return Difference(
        position=position,
        plain_token=plain[position] if position < len(plain) else None,
        speculative_token=speculative[position] if position < len(speculative) else None,
        gap=gap,
        top2_gap=float(best[0] - best[1]),
        rounding=rounding,
        within_rounding=gap <= rounding,
    )
