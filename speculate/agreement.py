"""Does speculative output equal plain greedy output, and if not, is it rounding?

Verification computes the same logits as one-token decoding in another order of summation. In bf16 that moves them by
about their last bit, or by much more where it flips a mixture's choice of an expert; if the two best tokens are that
close, the argmax flips, and from there on the texts differ and mean nothing. So only the first difference of a prompt
is judged, and by measurement: the target reads the text up to there without any cache, once as it is and eight times
with every layer's output disturbed by its last bit. The gap between the two tokens is held against how far the
disturbed logits stray. No code of speculative decoding takes part in the judgement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_train.speculate.target_cache import TargetCache
from dflash_train.stage1_target.target import Target

NUM_DISTURBED = 8
FLOAT32_BITS = 8.0  # fp32 sums leave several last bits of error, where bf16 products are rounded once


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
    """Between the logits of the two tokens; infinite where one is None."""
    top2_gap: float
    """Best logit less the second best there."""
    rounding: float
    """How much of a gap rounding explains: twice how far disturbed logits stray, at least two last bits of the best."""
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
        logits = TargetCache(target.model).run(read)[0, -1].float()
        best = logits.topk(2).values
        last_bit = torch.finfo(target.dtype).eps * float(best[0].abs())
        stray = max(float((disturbed - logits).abs().max()) for disturbed in _disturbed_logits(target, read))
        rounding = 2 * max(stray, last_bit)
        gap = float("inf")
        if position < shorter:  # either may be the wrong one
            gap = abs(float(logits[plain[position]] - logits[speculative[position]]))
    return Difference(
        position=position,
        plain_token=plain[position] if position < len(plain) else None,
        speculative_token=speculative[position] if position < len(speculative) else None,
        gap=gap,
        top2_gap=float(best[0] - best[1]),
        rounding=rounding,
        within_rounding=gap <= rounding,
    )


def _disturbed_logits(target: Target, token_ids: Tensor) -> list[Tensor]:
    """Logits fp32 [V] after token_ids [1, T], several times, each layer's output disturbed by seeded noise."""
    generator = torch.Generator(target.device).manual_seed(0)
    size = torch.finfo(target.dtype).eps * (FLOAT32_BITS if target.dtype == torch.float32 else 1.0)

    def disturb(module: nn.Module, inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        noise = torch.rand(states.shape, generator=generator, device=states.device) * 2 - 1
        states = (states * (1 + size * noise)).to(states.dtype)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handles = [layer.register_forward_hook(disturb) for layer in target.layers]
    try:
        return [TargetCache(target.model).run(token_ids)[0, -1].float() for _ in range(NUM_DISTURBED)]
    finally:
        for handle in handles:
            handle.remove()
