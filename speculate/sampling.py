"""Choosing tokens from logits: greedily, or by true rejection sampling, whose output has the target's own distribution.

Drafts are drawn from the drafter's distribution q; the target accepts draft x with probability min(1, p(x) / q(x)), and
where it refuses, its token comes from what p has more than q, max(0, p - q) normalised. Then every token is distributed
as p says, whatever q is (Leviathan et al., arXiv 2211.17192, appendix A.1). Slots of a DFlash block are drawn
independently of each other, which the proof allows: q of a slot need not know the drafts before it. Temperature, top-k
and top-p shape p and q alike, so «the target» means the target under these settings.

One stream of random numbers an answer: what is drawn follows from its seed and the logits alone.

Shapes: B answers in parallel (1 in decoding, many in tests), N drafts, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_train.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen from logits."""

    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability; 1 is all."""
    top_k: int = 0
    """Only so many of the likeliest tokens; 0 is all."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k"):
            if not 0 <= getattr(self, name) < float("inf"):  # NaN is not
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}, but must be 0 or more.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top-p is {self.top_p}, but must be more than 0 and at most 1.")

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is random."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """float32 [..., V] of logits [..., V]: temperature first, then top-k, then top-p, as transformers orders them."""
        scaled = logits.float() / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, float("-inf"))
        probabilities = scaled.softmax(dim=-1)
        if self.top_p < 1:
            ordered, places = probabilities.sort(dim=-1, descending=True)
            before = ordered.cumsum(dim=-1) - ordered
            kept = torch.zeros_like(before, dtype=torch.bool).scatter(-1, places, before < self.top_p)
            probabilities = torch.where(kept, probabilities, 0.0)
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities


def answer_seed(seed: int, prompt_ids: Sequence[int], way: str) -> int:
    """63 bits for one answer; a function of the run's seed, the prompt and the way of decoding, not of order or process."""
    text = f"{seed}/{way}/{','.join(map(str, prompt_ids))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class Chooser:
    """Chooses the tokens of one answer, on the device of the logits and without waiting for it."""

    def __init__(self, sampling: Sampling, seed: int, device: torch.device) -> None:
        self.sampling = sampling
        self._generator = torch.Generator(device).manual_seed(seed)

    def choose(self, logits: Tensor) -> Tensor:
        """One token for each [..., V]: int64 [...]."""
        if self.sampling.is_greedy:
            return logits.argmax(dim=-1)
        return self._draw(self.sampling.probabilities(logits))

    def draft(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Drafts int64 [B, N] of the drafter's logits [B, N, V], and what they were drawn from (None: nothing is random)."""
        if self.sampling.is_greedy:
            return logits.argmax(dim=-1), None
        proposed = self.sampling.probabilities(logits)
        return self._draw(proposed), proposed

    def verify(self, drafts: Tensor, proposed: Tensor | None, logits: Tensor) -> Tensor:
        """The target's choice after each prefix of the drafts [B, N], from its logits [B, N + 1, V]: int64 [B, N + 1].

        A draft is accepted where the choice equals it, as long as all before it were; the choice after the last accepted
        one is the token that comes for free. A refused draft is never chosen again: where p < q, p - q leaves it nothing.
        """
        if self.sampling.is_greedy:
            return logits.argmax(dim=-1)
        wanted = self.sampling.probabilities(logits)
        if proposed is None:
            return self._draw(wanted)
        checked = wanted[:, :-1]
        wanted_of = checked.gather(-1, drafts[..., None])[..., 0]
        proposed_of = proposed.gather(-1, drafts[..., None])[..., 0]
        accepted = self._uniform(drafts.shape, drafts.device) * proposed_of < wanted_of
        rest = (checked - proposed).clamp_min(0.0)
        rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, checked)  # p = q but for rounding
        drawn = self._draw(torch.cat((rest, wanted[:, -1:]), dim=1))
        return torch.cat((torch.where(accepted, drafts, drawn[:, :-1]), drawn[:, -1:]), dim=1)

    def _draw(self, weights: Tensor) -> Tensor:
        """One token for each weights [..., V] (≥ 0, of any sum), by inverting the cumulative distribution."""
        cumulative = weights.double().cumsum(dim=-1)
        drawn = self._uniform(weights.shape[:-1], weights.device)[..., None] * cumulative[..., -1:]
        chosen = torch.searchsorted(cumulative, drawn, right=True)[..., 0]
        return chosen.clamp_max(weights.shape[-1] - 1)

    def _uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.rand(tuple(shape), generator=self._generator, dtype=torch.float64, device=device)
