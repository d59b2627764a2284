"""Decoding with the target alone, and with a drafter: greedily the second gives what the first gives, and at a temperature
tokens of the same distribution (sampling.py).

One round of speculative decoding: the drafter fills a block [last token, mask, …] in one forward; the target reads the
block in one forward; the drafts that equal the target's own choices are kept, and its choice after them (the bonus
token) comes for free. That same forward supplies the context features of the kept tokens. Source: DFlash
(arXiv 2602.06036); round by round the same as z-lab's `dflash` 0.1.0, which a test compares.

One host synchronisation a round: drafts and choices come back together.

Shapes: P prompt tokens, K block size (anchor included), L tapped target layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_train.errors import InputError
from dflash_train.speculate.sampling import Chooser, Sampling, answer_seed
from dflash_train.speculate.target_cache import TargetCache
from dflash_train.stage1_target.target import Target
from dflash_train.stage2_drafter.drafter import Drafter, DrafterCache

GREEDY = Sampling()


class Interrupted(Exception):
    """Somebody asked to stop; the answer under way is dropped."""


def never() -> bool:
    return False


@dataclass(frozen=True)
class Round:
    """One verification forward of the target."""

    num_drafted: int  # drafts whose acceptance counts: at most K - 1, none after a stop token
    num_accepted: int
    num_produced: int  # the acceptance length: 1 to K, bonus token included


@dataclass(kw_only=True)
class DecodeResult:
    """New tokens (a stop token included) and what they cost."""

    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)  # empty in plain decoding
    anchor_lengths: list[int] | None = None  # of a round at each token but the last, begun or not; of a replay alone
    stopped: bool = False  # by a stop token, not by the length limit
    prefill_seconds: float = 0.0  # to the first token
    decode_seconds: float = 0.0  # all tokens after the first

    @property
    def acceptance_lengths(self) -> list[int]:
        return [round_.num_produced for round_ in self.rounds]


class HiddenStateTaps:
    """Forward hooks that hold the latest output of the tapped layers, inside a `with` block.

    `output_hidden_states` would hold every layer's.
    """

    def __init__(self, layers: nn.ModuleList, layer_ids: Sequence[int]) -> None:
        self._layers = [layers[i] for i in layer_ids]
        self._states: list[Tensor | None] = [None] * len(self._layers)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        for index, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_hook(self._hook(index)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, index: int) -> Any:
        def hold(module: nn.Module, inputs: Any, output: Any) -> None:
            self._states[index] = output[0] if isinstance(output, tuple) else output

        return hold

    def features(self, num_tokens: int) -> Tensor:
        """Context features [1, num_tokens, L·H] of the first tokens of the latest forward."""
        states = [state[:, :num_tokens] for state in self._states if state is not None]
        assert len(states) == len(self._states)
        return torch.cat(states, dim=-1)


def plain_decode(
    target: Target,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop: Callable[[], bool] = never,
) -> DecodeResult:
    """Decode with the target's cache, one token a forward. Raises Interrupted once `stop` says so."""
    _check_request(prompt_ids, max_new_tokens)
    result = DecodeResult()
    chooser = Chooser(sampling, answer_seed(seed, prompt_ids, "plain"), target.device)
    with torch.inference_mode():
        started = time.perf_counter()
        cache = TargetCache(target.model)
        token = chooser.choose(cache.run(_token_tensor(prompt_ids, target)))
        result.token_ids.append(int(token))
        result.prefill_seconds = time.perf_counter() - started
        started = time.perf_counter()
        while len(result.token_ids) < max_new_tokens and result.token_ids[-1] not in stop_ids:
            if stop():
                raise Interrupted
            token = chooser.choose(cache.run(token))
            result.token_ids.append(int(token))
        result.decode_seconds = time.perf_counter() - started
    result.stopped = result.token_ids[-1] in stop_ids
    return result


def speculative_decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    block_size: int | None = None,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop: Callable[[], bool] = never,
) -> DecodeResult:
    """Decode, drafting `block_size` - 1 tokens a round (default: the block size of the drafter's config).

    Near the length limit the block shrinks. Raises InputError for a block size below 2, and for a target whose cache
    can neither be cropped nor copied; Interrupted once `stop` says so.
    """
    _check_request(prompt_ids, max_new_tokens)
    block_size = drafter.config.block_size if block_size is None else block_size
    if block_size < 2:
        raise InputError(
            f"The block size is {block_size}; a block needs its anchor and at least one draft: use 2 or more."
        )
    result = DecodeResult()
    tokens = result.token_ids
    scale = drafter.config.input_embedding_scale
    chooser = Chooser(sampling, answer_seed(seed, prompt_ids, "speculative"), target.device)
    with torch.inference_mode(), HiddenStateTaps(target.layers, drafter.config.target_layer_ids) as taps:
        started = time.perf_counter()
        cache = TargetCache(target.model, rewindable=True)
        drafter_cache = DrafterCache(drafter.config)
        start = len(prompt_ids)  # position of the last known token, not yet read by the target
        last = chooser.choose(cache.run(_token_tensor(prompt_ids, target)))
        tokens.append(int(last))
        features = taps.features(start)
        mask_ids = torch.full((1, block_size - 1), drafter.config.mask_token_id, device=target.device)
        mask_noise = F.embedding(mask_ids, target.embed_tokens) * scale
        result.prefill_seconds = time.perf_counter() - started
        started = time.perf_counter()
        while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
            if stop():
                raise Interrupted
            remaining = max_new_tokens - len(tokens)
            size = num_slots(block_size, remaining)
            proposed = None
            if size > 1:
                noise = torch.cat((F.embedding(last, target.embed_tokens) * scale, mask_noise[:, : size - 1]), dim=1)
                positions = torch.arange(start - features.shape[1], start + size, device=target.device)[None]
                hidden = drafter.draft(features, noise, positions, drafter_cache)
                drafts, proposed = chooser.draft(draft_logits(target, drafter, hidden[:, 1:]))
            else:
                drafts = last[:, :0]
            choices = chooser.verify(drafts, proposed, cache.run_block(torch.cat((last, drafts), dim=1)))
            values = torch.cat((drafts, choices), dim=1)[0].tolist()
            round_, new = accept(values[: size - 1], values[size - 1 :], remaining, stop_ids)
            result.rounds.append(round_)
            tokens.extend(new)
            if len(tokens) == max_new_tokens or tokens[-1] in stop_ids:
                break
            start += len(new)
            last = choices[:, len(new) - 1 : len(new)]
            features = taps.features(len(new))
            cache.keep(len(new))
        result.decode_seconds = time.perf_counter() - started
    result.stopped = tokens[-1] in stop_ids
    return result


def draft_logits(target: Target, drafter: Drafter, hidden: Tensor) -> Tensor:
    """Logits [1, N, V] of hidden [1, N, H] under the target's head, scaled and capped as the drafter's config says."""
    head = target.embed_tokens if target.lm_head is None else target.lm_head
    logits = F.linear(hidden, head) * drafter.config.output_multiplier
    softcap = drafter.config.final_logit_softcapping
    return logits if not softcap else torch.tanh(logits / softcap) * softcap


def num_slots(block_size: int, remaining: int) -> int:
    """Slots of a block, anchor included, where so many tokens are still wanted.

    One slot more than these, as z-lab does; but nothing to draft for a single token.
    """
    return min(block_size, remaining + 1) if remaining > 1 else 1


def accept(
    drafts: Sequence[int], choices: Sequence[int], remaining: int, stop_ids: Collection[int]
) -> tuple[Round, list[int]]:
    """The tokens a round produces: choices[:n + 1] for n leading matches, cut at the limit and after a stop token."""
    num_accepted = next((i for i, draft in enumerate(drafts) if draft != choices[i]), len(drafts))
    new = list(choices[: num_accepted + 1][:remaining])
    for index, token in enumerate(new):
        if token in stop_ids:
            del new[index + 1 :]
            break
    if len(new) <= num_accepted:  # cut inside the accepted drafts: the rest was never asked for
        return Round(len(new), len(new), len(new)), new
    return Round(len(drafts), num_accepted, len(new)), new


def _token_tensor(token_ids: Sequence[int], target: Target) -> Tensor:
    return torch.tensor([list(token_ids)], dtype=torch.long, device=target.device)


def _check_request(prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    if not len(prompt_ids):
        raise InputError("The prompt has no token; decoding needs at least one.")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}; at least 1 is needed.")
