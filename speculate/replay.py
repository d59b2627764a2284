"""The acceptance length at temperature 0 without decoding round by round, from the target's own answers.

Greedy speculative decoding gives the target's own greedy answer, so once that answer is known the rounds follow from it.
The target answers plainly, many prompts at once; one forward of prompt and answer gives the context features of every
position; the drafter drafts at every token of the answer at once, under the mask that training uses on a CPU; then a walk
from anchor to anchor counts what would have been accepted, by the same rules for stop tokens and the length limit.

What is replayed is the answer of batched decoding. In fp32 it is that of decoding round by round; in bf16 rounding
differs with the shape of a batch, so that a tie may fall the other way and an answer take another, equally good course.

Nothing is compiled: scores are a dense table in fp32, whose size bounds the anchors of a forward (`MOST_CELLS`).

Shapes: P prompt tokens, T tokens of prompt and answer, F features per token, A anchors, K block size (anchor included),
Q = A · K noise tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from dflash_train.errors import InputError
from dflash_train.speculate.answering import Asking, Decoding, PromptResult, TurnResult
from dflash_train.speculate.decode import DecodeResult, Interrupted, Round, accept, draft_logits, never, num_slots
from dflash_train.speculate.loading import check_drafter_fits_target
from dflash_train.speculate.prompts import Prompt
from dflash_train.speculate.target_cache import TargetCache
from dflash_train.stage1_target.generator import Watcher, generate_tokens
from dflash_train.stage1_target.recurrence import share_padding
from dflash_train.stage1_target.target import Target, stop_token_ids
from dflash_train.stage1_target.target_config import text_config
from dflash_train.stage1_target.tokenization import ChatRenderer
from dflash_train.stage2_drafter.blocks import dense_block_mask
from dflash_train.stage2_drafter.drafter import Attend, Drafter

logger = logging.getLogger(__name__)

FORWARD_TOKENS = 16_384
"""Padded tokens that the target reads at once for the features."""
MOST_CELLS = 2**26
"""Attention scores of one forward of the drafter: 256 MiB in fp32, of which three copies live at once."""
MOST_LOGITS = 2**27
"""Logits of one forward: 256 MiB in bf16."""
CHANGING_ROTATIONS = ("dynamic", "longrope")
"""Kinds of rotary embedding in transformers whose angles depend on the length of the forward."""


@dataclass(frozen=True, kw_only=True)
class ReadAnswer:
    """A greedy answer with the context features of all its tokens: all that a drafter needs to be measured on it."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    """The stop token included."""
    features: Tensor
    """[T, F] in the target's dtype, on its device."""
    target_layer_ids: tuple[int, ...]
    """Whose features they are."""


def answer_greedily(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    *,
    batch_size: int = 64,
    stop: Callable[[], bool] = never,
) -> list[list[int]]:
    """The target's own answer to each prompt, a stop token included; `batch_size` at once, the shortest prompts first.

    A batch for which the device's memory is short is run in halves. Prompts of a target with recurrent layers share a batch
    only where they are equally long: what padding does to such a state depends on the target. Raises Interrupted.
    """

    def watch(_num_answers: int, _num_tokens: int) -> None:
        if stop():
            raise Interrupted

    recurrent = TargetCache(target.model).is_recurrent
    answers: dict[int, list[int]] = {}
    for together in share_padding(range(len(prompts)), lambda index: len(prompts[index]), recurrent):
        for first in range(0, len(together), batch_size):
            batch = together[first : first + batch_size]
            rows = _generate(target, [prompts[index] for index in batch], max_new_tokens, stop_ids, Watcher(watch, 0))
            for index, row in zip(batch, rows, strict=True):
                end = next((place for place, token in enumerate(row) if token in stop_ids), len(row))
                answers[index] = row[: end + 1]
    return [answers[index] for index in range(len(prompts))]


def read_answers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    target_layer_ids: tuple[int, ...] | None = None,
    *,
    stop: Callable[[], bool] = never,
) -> Iterator[ReadAnswer]:
    """Read each prompt with its answer, in order: plain forwards of rows that are padded on the right, as `extract` runs them.

    target_layer_ids None: those that the target was loaded with.
    """
    layer_ids = target.target_layer_ids if target_layer_ids is None else target_layer_ids
    tapped = replace(target, target_layer_ids=layer_ids)
    pairs = list(zip(prompts, answers, strict=True))
    while pairs:
        if stop():
            raise Interrupted
        fitting = (n for n in range(len(pairs), 0, -1) if n * max(map(_length, pairs[:n])) <= FORWARD_TOKENS)
        group = pairs[: next(fitting, 1)]
        pairs = pairs[len(group) :]
        rows = [torch.tensor([*prompt, *answer], dtype=torch.long) for prompt, answer in group]
        states = tapped.hidden_states(pad_sequence(rows, batch_first=True))
        for (prompt, answer), row, features in zip(group, rows, states, strict=True):
            yield ReadAnswer(
                prompt_ids=prompt, answer_ids=answer, features=features[: len(row)], target_layer_ids=layer_ids
            )


def replay(
    target: Target,
    drafter: Drafter,
    answer: ReadAnswer,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    block_size: int | None = None,
) -> DecodeResult:
    """What `speculative_decode` would give at temperature 0, without times; any number of drafters can take an answer.

    The answer must be the target's under the same limit and stop tokens. Raises InputError for features of other layers
    than the drafter's.
    """
    ids = list(answer.answer_ids)
    assert ids and (len(ids) == max_new_tokens or ids[-1] in stop_ids), "the answer is cut short"
    if drafter.config.target_layer_ids != answer.target_layer_ids:
        raise InputError(
            f"The features are of target layers {list(answer.target_layer_ids)}, but the drafter takes "
            f"{list(drafter.config.target_layer_ids)}; read the answers with the drafter's."
        )
    block_size = drafter.config.block_size if block_size is None else block_size
    drafts = draft_everywhere(target, drafter, answer, max_new_tokens, block_size)
    at_anchors = rounds_everywhere(drafts, ids, max_new_tokens, stop_ids, block_size)
    return DecodeResult(
        token_ids=ids,
        rounds=walk(at_anchors),
        anchor_lengths=[round_.num_produced for round_ in at_anchors],
        stopped=ids[-1] in stop_ids,
    )


def rounds_everywhere(
    drafts: Sequence[Sequence[int]],
    answer_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    block_size: int,
) -> list[Round]:
    """The round that would begin at each token of an answer but the last, given the drafts there."""
    rounds = []
    for place in range(len(answer_ids) - 1):
        remaining = max_new_tokens - place - 1
        size = num_slots(block_size, remaining)
        choices = [*answer_ids[place + 1 : place + 1 + size]]
        choices += [-1] * (size - len(choices))  # after the answer's end, where nothing is accepted or produced
        rounds.append(accept(drafts[place][: size - 1], choices, remaining, stop_ids)[0])
    return rounds


def walk(at_anchors: Sequence[Round]) -> list[Round]:
    """The rounds that decoding takes: from the first token, each begins where the one before it ends."""
    rounds, place = [], 0
    while place < len(at_anchors):
        rounds.append(at_anchors[place])
        place += at_anchors[place].num_produced
    return rounds


@torch.inference_mode()
def draft_everywhere(
    target: Target, drafter: Drafter, answer: ReadAnswer, max_new_tokens: int, block_size: int
) -> list[list[int]]:
    """What the drafter proposes with each token of the answer but the last as its anchor: A lists of K - 1 tokens.

    Of a block that the length limit cuts only the first drafts mean anything; its other slots are seen by no slot.
    """
    device, num_prompt, num_anchors = target.device, len(answer.prompt_ids), len(answer.answer_ids) - 1
    size = [num_slots(block_size, max_new_tokens - place - 1) for place in range(num_anchors)]
    sizes = torch.tensor(size, device=device)
    ids = torch.full((num_anchors, block_size), drafter.config.mask_token_id, device=device)
    ids[:, 0] = torch.tensor(answer.answer_ids[:num_anchors], device=device)
    context = drafter.project_context(answer.features[None])
    most = _anchors_at_once(drafter, num_prompt + num_anchors, block_size)
    drafts: list[list[int]] = []
    for first in range(0, num_anchors, most):
        last = min(first + most, num_anchors)
        anchor = torch.arange(num_prompt + first, num_prompt + last, device=device)
        num_context = num_prompt + last - 1  # the last anchor sees no more
        positions = anchor[:, None] + torch.arange(block_size, device=device)
        hidden = drafter(
            context[:, :num_context],
            F.embedding(ids[first:last].flatten(), target.embed_tokens)[None] * drafter.config.input_embedding_scale,
            torch.arange(num_context, device=device)[None],
            positions.flatten()[None],
            _attend_layers(drafter, anchor, sizes[first:last], num_context, block_size),
        ).unflatten(1, (last - first, block_size))[0]
        drafts += draft_logits(target, drafter, hidden[:, 1:]).argmax(dim=-1).tolist()
    return drafts


def _attend_layers(drafter: Drafter, anchor: Tensor, sizes: Tensor, num_context: int, block_size: int) -> list[Attend]:
    """The attention of each layer: dense, with each layer's window and causality, and without slots that are cut off."""
    slot = torch.arange(block_size, device=anchor.device)
    cut = (slot >= sizes[:, None]).flatten()  # [Q]
    masks: dict[Any, Tensor] = {}

    def attend_layer(index: int) -> Attend:
        kind = (drafter.config.layer_window(index), drafter.config.layer_is_causal(index))
        if kind not in masks:
            mask = dense_block_mask(torch.zeros_like(anchor), anchor, num_context, block_size, *kind)
            own = mask[:, num_context:]
            own &= ~cut | torch.eye(len(cut), dtype=torch.bool, device=cut.device)  # a slot cut off sees itself: no NaN
            masks[kind] = mask

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(
                SDPBackend.MATH
            ):  # fp32 inside, and no other backend takes both a mask and fewer key heads
                return F.scaled_dot_product_attention(q, k, v, attn_mask=masks[kind], enable_gqa=True)

        return attend

    return [attend_layer(index) for index in range(drafter.config.num_hidden_layers)]


def _anchors_at_once(drafter: Drafter, num_context: int, block_size: int) -> int:
    """Anchors of one forward: Q · (num_context + Q) scores a head, and V logits a draft."""
    cells = MOST_CELLS // drafter.config.num_attention_heads
    num_queries = (isqrt(num_context**2 + 4 * cells) - num_context) // 2
    return max(1, min(num_queries // block_size, MOST_LOGITS // (block_size * drafter.config.vocab_size)))


class Replayer:
    """A loaded target and drafter that replay the answers of many prompts at once, as PromptDecoder decodes them."""

    def __init__(self, target: Target, drafter: Drafter, decoding: Decoding, batch_size: int = 64) -> None:
        """Raises InputError where target and drafter do not fit."""
        check_drafter_fits_target(drafter.config, target)
        self.target, self.drafter, self.decoding = target, drafter, decoding
        self.block_size = decoding.block_size or drafter.config.block_size
        self.num_together = batch_size
        self.is_recurrent = TargetCache(target.model).is_recurrent
        self.stop: Callable[[], bool] = never
        """Asked once a forward of the target."""
        self._stop_ids = stop_token_ids(target)
        self._renderer = ChatRenderer(target.tokenizer, decoding.chat_template_arguments)

    def warm_up(self, prompt: Prompt) -> None:
        """Nothing is timed here."""

    def run_all(self, indices: Sequence[int], prompts: Sequence[Prompt]) -> list[PromptResult]:
        """Answer the prompts at `indices`, turn by turn together. Raises Interrupted where `stop` says so."""
        limit, target = self.decoding.max_new_tokens, self.target
        asking = {index: Asking(target, prompts[index], self._renderer, limit) for index in indices}
        turns: dict[int, list[TurnResult]] = {index: [] for index in indices}
        while waiting := {index: one.token_ids for index, one in asking.items() if one.token_ids is not None}:
            asked = list(waiting.values())
            check_one_rotation(target, max(map(len, asked)) + limit)
            answers = answer_greedily(
                target, asked, limit, self._stop_ids, batch_size=self.num_together, stop=self.stop
            )
            for index, answer in zip(waiting, read_answers(target, asked, answers, stop=self.stop), strict=True):
                result = replay(target, self.drafter, answer, limit, self._stop_ids, self.block_size)
                turns[index].append(TurnResult(num_prompt_tokens=len(answer.prompt_ids), speculative=result))
                asking[index].answer(result)
        return [PromptResult(index=index, source=prompts[index].source, turns=turns[index]) for index in indices]


def check_one_rotation(target: Target, num_positions: int) -> None:
    """Raise InputError where a target turns its keys by other angles once a forward reaches so many positions.

    Then the states of a token depend on how long the forward is, and on what else is in its batch: the features of a
    whole answer, read at once, are not those of decoding.
    """
    config = text_config(target.model_config)
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):  # of some targets a table for each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") in CHANGING_ROTATIONS:
            most = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            if num_positions > most:
                raise InputError(
                    f"The target's {rope['rope_type']} rotation changes after {most:,} positions, and a prompt and its answer "
                    f"may have {num_positions:,}: leave out --replay, lower --max-new-tokens or give shorter prompts."
                )


def _length(pair: tuple[Sequence[int], Sequence[int]]) -> int:
    return len(pair[0]) + len(pair[1])


def _generate(
    target: Target, prompts: Sequence[Sequence[int]], limit: int, stop_ids: Sequence[int], watcher: Watcher
) -> list[list[int]]:
    try:
        return generate_tokens(target, prompts, limit, stop_ids, [watcher])
    except torch.OutOfMemoryError:
        pass
    # outside the except clause, whose traceback would keep the tensors alive
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
    if len(prompts) == 1:
        raise InputError(
            f"An answer of {limit} tokens does not fit into the memory of the device; lower --max-new-tokens."
        )
    half = len(prompts) // 2
    logger.warning("Out of device memory with %d answers; going on in halves. Lower --batch-size.", len(prompts))
    return [
        *_generate(target, prompts[:half], limit, stop_ids, watcher),
        *_generate(target, prompts[half:], limit, stop_ids, watcher),
    ]
