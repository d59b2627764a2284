"""Answers in process: batches of conversations through transformers' `generate`, one worker a device.

Prompts are padded on the left. Sampling draws one uniform number per answer and step from a stream of its own and picks
the token by inverting the cumulative distribution, so what an answer becomes depends on its seed and its logits, not on
its neighbours (logits themselves differ by rounding with the shape of a batch). The conversations of a batch take their
turns together; a batch that does not fit into memory is run in halves. Padding goes through the state of recurrent
layers, and not every target hides it from them: there prompts share a batch only where they are equally long.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target import messages
from dflash_train.stage1_target.conversations import Message, RowError
from dflash_train.stage1_target.dialogue import Dialogue, Exchange, Outcome
from dflash_train.stage1_target.recurrence import is_recurrent, share_padding
from dflash_train.stage1_target.regenerate_config import RegenerateConfig
from dflash_train.stage1_target.target import Target, load_target, stop_token_ids
from dflash_train.stage1_target.target_config import text_config
from dflash_train.stage1_target.tokenization import ChatRenderer

logger = logging.getLogger(__name__)

OPENING, CLOSING = "<think>", "</think>"
_SAY_SECONDS = 10.0


@dataclass(frozen=True)
class Generate:
    """Parent: answer these."""

    number: int
    dialogues: list[Dialogue]


@dataclass(frozen=True)
class Generating:
    """Worker: how far the answers under way are."""

    num_answers: int
    num_tokens: int
    """Of the longest so far."""


@dataclass(frozen=True)
class Generated:
    """Worker: how they ended."""

    number: int
    outcomes: list[Outcome]


def run_generator(connection: Connection, config: RegenerateConfig, device: str) -> None:
    """Body of a worker process: load, then answer batches until told to finish."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        logger.info("Loading %s on %s.", config.target.name, device)
        said = time.monotonic()

        def watch(num_answers: int, num_tokens: int) -> None:
            nonlocal said
            if connection.poll():  # a worker is dealt one batch at a time, so this is the end
                raise Dropped
            if time.monotonic() - said >= _SAY_SECONDS:
                said = time.monotonic()
                connection.send(Generating(num_answers, num_tokens))

        generator = Generator(load_target(config.target, (0,), device), config, watch)
        connection.send(messages.Loaded())
        while isinstance(command := connection.recv(), Generate):
            try:
                outcomes = generator.run(command.dialogues)
            except Dropped:
                logger.info("Stopped; %d conversations under way are dropped.", len(command.dialogues))
                continue
            connection.send(Generated(command.number, outcomes))
    except InputError as error:
        logger.error("%s", error)
        connection.send(messages.Failed(error))
        raise SystemExit(1) from error


class Dropped(Exception):
    """The run ends before the answers under way do."""


class Watcher:
    """A logits processor that changes nothing: it tells before every step how far the answers are."""

    def __init__(self, watch: Callable[[int, int], None], prompt_length: int) -> None:
        self._watch, self._prompt_length = watch, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids [B, length], scores [B, V] → scores; nothing here waits for the device."""
        self._watch(input_ids.shape[0], input_ids.shape[1] - self._prompt_length)
        return scores


class SeededChoice:
    """A logits processor that samples: temperature, top-k, top-p, then one uniform number a row and step."""

    def __init__(self, config: RegenerateConfig, seeds: Sequence[int], num_steps: int) -> None:
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        self._warpers: list[Any] = [TemperatureLogitsWarper(config.temperature)]
        if config.top_k:
            self._warpers.append(TopKLogitsWarper(config.top_k))
        if config.top_p < 1:
            self._warpers.append(TopPLogitsWarper(config.top_p))
        self._uniform = torch.from_numpy(np.stack([np.random.default_rng(seed).random(num_steps) for seed in seeds]))
        self._step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores [B, V] → 0 for the token drawn, -inf for all others, so that the greedy choice takes it."""
        scores = scores.float()
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        cumulative = scores.double().softmax(-1).cumsum(-1)
        drawn = self._uniform[:, self._step, None].to(scores.device) * cumulative[:, -1:]
        self._step += 1
        chosen = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=scores.shape[-1] - 1)
        return torch.full_like(scores, float("-inf")).scatter_(-1, chosen, 0.0)


class Generator:
    """A loaded target that answers."""

    def __init__(
        self,
        target: Target,
        config: RegenerateConfig,
        watch: Callable[[int, int], None] = lambda num_answers, num_tokens: None,
    ) -> None:
        """`watch` gets the number of answers and of their tokens before every step; what it raises ends `run`."""
        self._watch = watch
        self._target, self._config = target, config
        self._renderer = ChatRenderer(target.tokenizer, config.chat_template_arguments)
        self._stop_ids = stop_token_ids(target)
        if not self._stop_ids:
            raise InputError(
                f"The target {target.config.name!r} names no token that ends an answer; set eos_token_id in its "
                f"generation_config.json."
            )
        self._recurrent = is_recurrent(target.model)
        self._num_positions = getattr(text_config(target.model_config), "max_position_embeddings", None)

    def run(self, dialogues: Sequence[Dialogue]) -> list[Outcome]:
        """Answer every turn of some dialogues, together."""
        exchanges = [Exchange(dialogue, self._config.keep_unfinished) for dialogue in dialogues]
        while waiting := [exchange for exchange in exchanges if not exchange.done]:
            prompts: list[tuple[Exchange, str, list[int]]] = []
            for exchange in waiting:
                try:
                    text = self._renderer.render(exchange.asked, exchange.dialogue.tools, add_generation_prompt=True)
                except RowError as error:
                    exchange.end(str(error))
                    continue
                prompts.append((exchange, text, self._target.tokenizer(text, add_special_tokens=False)["input_ids"]))
            self._take_turn(prompts)
        return [exchange.outcome() for exchange in exchanges]

    def _take_turn(self, prompts: list[tuple[Exchange, str, list[int]]]) -> None:
        """One answer for each. Prompts without room for all new tokens run alone, with a limit of their own."""
        limit = self._config.max_new_tokens
        together = []
        for prompt in prompts:
            room = limit if self._num_positions is None else self._num_positions - len(prompt[2])
            if room < 1:
                prompt[0].end("the conversation is longer than the target has positions")
            elif room < limit:
                self._generate([prompt], room)
            else:
                together.append(prompt)
        for group in share_padding(together, lambda prompt: len(prompt[2]), self._recurrent):
            self._generate(group, limit)

    def _generate(self, prompts: list[tuple[Exchange, str, list[int]]], limit: int) -> None:
        try:
            new = self._new_tokens(prompts, limit)
        except torch.OutOfMemoryError:
            new = None
        if new is None:  # outside the except clause, whose traceback would keep the tensors alive
            if self._target.device.type == "cuda":
                torch.cuda.empty_cache()
            if len(prompts) == 1:
                prompts[0][0].end("an answer does not fit into the memory of the device", failed=True)
                return
            half = len(prompts) // 2
            logger.warning(
                "Out of device memory with %d answers; going on in halves. Lower --batch-size.", len(prompts)
            )
            self._generate(prompts[:half], limit)
            self._generate(prompts[half:], limit)
            return
        for (exchange, prompt, _ids), row in zip(prompts, new, strict=True):
            end = next((place for place, token in enumerate(row) if token in self._stop_ids), None)
            # special tokens stay: of some targets the marks of thinking are such
            text = str(
                self._target.tokenizer.decode(row[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )
            message, changed = as_message(self._renderer, exchange.asked, exchange.dialogue.tools, prompt, text)
            exchange.answer(message, len(row) if end is None else end + 1, end is not None, changed)

    def _new_tokens(self, prompts: list[tuple[Exchange, str, list[int]]], limit: int) -> list[list[int]]:
        """New token ids of each prompt, with padding where a row ended before others."""
        config, longest = self._config, max(len(ids) for _, _, ids in prompts)
        processors: list[Any] = [Watcher(self._watch, longest)]
        if config.temperature > 0:
            seeds = [exchange.dialogue.seed(config.seed, exchange.num_answers) for exchange, _text, _ids in prompts]
            processors.append(SeededChoice(config, seeds, limit))
        return generate_tokens(self._target, [ids for _, _, ids in prompts], limit, self._stop_ids, processors)


def generate_tokens(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limit: int,
    stop_ids: Sequence[int],
    processors: Sequence[Any] = (),
) -> list[list[int]]:
    """At most `limit` new token ids of each prompt, all in one batch, greedily unless a processor chooses.

    A row that stopped before others is filled up after its stop token.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    model, padding = target.model, stop_ids[0] if stop_ids else 0
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), padding)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(prompts):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        attention_mask[row, longest - len(ids) :] = 1
    # The hub's own settings would come in where ours are silent.
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.inference_mode():
            output = model.generate(
                input_ids=input_ids.to(target.device),
                attention_mask=attention_mask.to(target.device),
                generation_config=GenerationConfig(
                    max_new_tokens=limit,
                    do_sample=False,
                    eos_token_id=list(stop_ids) or None,
                    pad_token_id=padding,
                ),
                logits_processor=LogitsProcessorList(processors),
            )
    finally:
        model.generation_config = own
    rows: list[list[int]] = output[:, longest:].tolist()
    return rows


def as_message(
    renderer: ChatRenderer, asked: list[Message], tools: Any, prompt: str, text: str
) -> tuple[Message, bool]:
    """An answer as the message that the template renders as it was written, and whether none does.

    The message is the text itself, or with the mark of thinking that the prompt ended in, or split into reasoning and
    content.
    """
    candidates: list[Message] = [{"role": "assistant", "content": text}]
    if prompt.rstrip().endswith(OPENING):
        candidates.append({"role": "assistant", "content": f"{OPENING}\n{text}"})
    if CLOSING in text:
        reasoning, _, content = text.partition(CLOSING)
        reasoning = re.sub(rf"^\s*{OPENING}", "", reasoning).strip("\n")
        candidates.append({"role": "assistant", "content": content.lstrip("\n"), "reasoning_content": reasoning})
    for message in candidates:
        try:
            rendered = renderer.render([*asked, message], tools)
        except RowError:
            continue
        if rendered.startswith(prompt) and rendered[len(prompt) :].lstrip().startswith(text.strip()):
            return message, False
    return candidates[0], True
