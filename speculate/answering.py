"""One prompt at a time: every turn decoded with the drafter, without it, and, if asked for, by z-lab's own package.

Turn by turn the target's own answer goes into the conversation, that of speculative decoding, which is the one that a
server would have given. A prompt ends early where the next turn would not leave room within the target's positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_train.errors import InputError
from dflash_train.speculate.agreement import first_difference
from dflash_train.speculate.decode import DecodeResult, never, plain_decode, speculative_decode
from dflash_train.speculate.loading import check_drafter_fits_target
from dflash_train.speculate.prompts import Prompt, encode
from dflash_train.speculate.sampling import Sampling
from dflash_train.speculate.target_cache import TargetCache, check_continuation
from dflash_train.speculate.zlab import ZlabDrafter
from dflash_train.stage1_target.conversations import RowError
from dflash_train.stage1_target.generator import as_message
from dflash_train.stage1_target.target import Target, stop_token_ids
from dflash_train.stage1_target.target_config import text_config
from dflash_train.stage1_target.tokenization import ChatRenderer
from dflash_train.stage2_drafter.drafter import Drafter


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How prompts are answered."""

    max_new_tokens: int = 256
    """Tokens of each answer."""
    block_size: int | None = None
    """K, anchor included; None takes the drafter's."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Of what is drawn at a temperature above 0."""
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)
    compare_plain: bool = True
    """Whether each turn is decoded without the drafter too."""


@dataclass(frozen=True, kw_only=True)
class TurnResult:
    """One answer."""

    num_prompt_tokens: int
    speculative: DecodeResult
    plain: DecodeResult | None = None
    difference: dict[str, Any] | None = None
    """Where plain and speculative part (agreement.py); None where they are equal, or were not or cannot be compared."""
    reference_difference: dict[str, Any] | None = None
    """The same against z-lab's package."""


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """All answers of a prompt."""

    index: int
    """Position among the prompts."""
    source: str
    turns: list[TurnResult]


class Asking:
    """A prompt's conversation: its turns, with the target's own answers between them."""

    def __init__(self, target: Target, prompt: Prompt, renderer: ChatRenderer, max_new_tokens: int) -> None:
        self.token_ids: list[int] | None = prompt.token_ids
        """What is asked next; None after the last turn, and where a turn leaves no room for an answer."""
        self._target, self._renderer, self._tools = target, renderer, prompt.tools
        self._messages, self._rest = list(prompt.turns[0]), prompt.turns[1:]
        most = getattr(text_config(target.model_config), "max_position_embeddings", None)
        self._most = None if most is None else most - max_new_tokens

    def answer(self, answer: DecodeResult) -> None:
        """Put the answer into the conversation, and the next turn after it."""
        self.token_ids = None
        if not self._rest:
            return
        # special tokens stay: of some targets the marks of thinking are such
        text = str(
            self._target.tokenizer.decode(
                answer.token_ids[:-1] if answer.stopped else answer.token_ids,
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )
        asked = self._renderer.render(self._messages, self._tools, add_generation_prompt=True)
        message, _ = as_message(self._renderer, self._messages, self._tools, asked, text)
        self._messages, self._rest = [*self._messages, message, *self._rest[0]], self._rest[1:]
        with suppress(RowError):
            token_ids = encode(self._renderer, self._messages, self._tools)
            if self._most is None or len(token_ids) <= self._most:
                self.token_ids = token_ids


class PromptDecoder:
    """A loaded target and drafter that answer prompts; may be pointed at another drafter of the same shape."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        decoding: Decoding,
        reference: ZlabDrafter | None = None,
    ) -> None:
        """Raises InputError where target and drafter do not fit, or the target's cache cannot forget a token."""
        check_drafter_fits_target(drafter.config, target)
        check_continuation(target.model, target.vocab_size, target.device)
        self.target, self.drafter, self.decoding = target, drafter, decoding
        self.block_size = decoding.block_size or drafter.config.block_size
        self.is_recurrent = TargetCache(target.model).is_recurrent
        self.stop: Callable[[], bool] = never
        """Asked once a forward."""
        self._reference = reference
        self._stop_ids = stop_token_ids(target)
        self._renderer = ChatRenderer(target.tokenizer, decoding.chat_template_arguments)

    def warm_up(self, prompt: Prompt) -> None:
        """Decode a few tokens, so that no measured round loads kernels; on a CPU there is nothing to warm."""
        if self.target.device.type == "cuda":
            few = min(2 * self.block_size, self.decoding.max_new_tokens)
            plain_decode(self.target, prompt.token_ids, min(8, few), sampling=self.decoding.sampling)
            speculative_decode(
                self.target,
                self.drafter,
                prompt.token_ids,
                few,
                block_size=self.block_size,
                sampling=self.decoding.sampling,
            )

    def run(self, index: int, prompt: Prompt) -> PromptResult:
        """Answer all turns. Raises Interrupted where `stop` says so."""
        turns: list[TurnResult] = []
        asking = Asking(self.target, prompt, self._renderer, self.decoding.max_new_tokens)
        while asking.token_ids is not None:
            turns.append(self._turn(asking.token_ids))
            asking.answer(turns[-1].speculative)
        return PromptResult(index=index, source=prompt.source, turns=turns)

    def run_all(self, indices: Sequence[int], prompts: Sequence[Prompt]) -> list[PromptResult]:
        """Answer the prompts at `indices`, one after the other."""
        return [self.run(index, prompts[index]) for index in indices]

    def answer(self, token_ids: list[int]) -> DecodeResult:
        """Speculative decoding of one prompt."""
        decoding = self.decoding
        return speculative_decode(
            self.target,
            self.drafter,
            token_ids,
            decoding.max_new_tokens,
            self._stop_ids,
            self.block_size,
            sampling=decoding.sampling,
            seed=decoding.seed,
            stop=self.stop,
        )

    def _turn(self, token_ids: list[int]) -> TurnResult:
        decoding, target = self.decoding, self.target
        limit, stop_ids = decoding.max_new_tokens, self._stop_ids
        speculative = self.answer(token_ids)
        plain, difference, reference_difference = None, None, None
        if decoding.compare_plain:
            plain = plain_decode(
                target,
                token_ids,
                limit,
                stop_ids,
                sampling=decoding.sampling,
                seed=decoding.seed,
                stop=self.stop,
            )
            if decoding.sampling.is_greedy:
                found = first_difference(target, token_ids, plain.token_ids, speculative.token_ids)
                difference = None if found is None else found.to_json()
        if self._reference is not None:
            theirs = self._reference.decode(target, token_ids, limit, stop_ids, self.block_size)
            found = first_difference(target, token_ids, theirs, speculative.token_ids)
            reference_difference = None if found is None else found.to_json()
        return TurnResult(
            num_prompt_tokens=len(token_ids),
            speculative=speculative,
            plain=plain,
            difference=difference,
            reference_difference=reference_difference,
        )


def run_facts(target: Target, is_recurrent: bool) -> dict[str, Any]:
    """What an evaluation records about the place it ran in; JSON-able."""
    import platform

    import transformers

    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else str(target.device),
        "threads": torch.get_num_threads(),
        "recurrent_target": is_recurrent,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def check_reference_target(decoder: PromptDecoder) -> None:
    """z-lab's package crops every cache, which leaves recurrent states wrong without a word: refuse to compare with that."""
    if decoder.is_recurrent:
        raise InputError(
            "--reference cannot be compared on a target with recurrent layers: z-lab's package crops their state, which "
            "undoes nothing (z-lab/dflash #172); leave --reference out."
        )
