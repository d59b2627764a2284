"""Messages → text with supervised spans → token ids and loss mask.

Only what the target itself would generate counts: the answer and its end-of-turn token, not the generation prompt before
it, nor the template's text after it. Two ways to know: the template marks it with {% generation %}, or the conversation
is rendered up to each answer, with and without it, and the difference is the answer (2 renderings a turn, some 0.2 ms
each). The full text is tokenised once and spans are mapped to tokens by the fast tokenizer's offsets, so token ids are
those of the plain rendering.

Where a template rewrites earlier turns (Qwen3 strips old thinking, gpt-oss ends the last turn with another token), the
states of an earlier answer in the full rendering are not those the target had when it gave that answer: such a
conversation becomes one sample per assistant turn, with only that turn supervised.
Legend: T tokens of a sample.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from dflash_train.errors import InputError
from dflash_train.stage1_target.conversations import Conversation, Message, RowError
from dflash_train.store.manifest import hash_bytes, hash_json

Span = tuple[int, int]
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
UNSPLITTABLE = (
    "the chat template cannot be split: the generation prompt is not how a rendered answer begins "
    "(set template arguments such as enable_thinking to match the data, or mark answers with generation blocks in the "
    "template)"
)


@dataclass(frozen=True)
class Rendering:
    """Text of one sample and the character spans of it that count in the loss, ascending."""

    text: str
    spans: list[Span]


@dataclass(frozen=True)
class Tokens:
    """token_ids int32 [T]; loss_mask uint8 [T], 1 where the token counts."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


class ChatRenderer:
    """The chat template of one tokenizer, with fixed template arguments."""

    def __init__(self, tokenizer: Any, template_arguments: dict[str, Any]) -> None:
        """Raises InputError if the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise InputError(
                f"The tokenizer of {tokenizer.name_or_path or 'the target'} has no chat template, which conversations "
                f"need. Add a chat_template.jinja to its folder, or give `text` or `input_ids` + `loss_mask` columns."
            )
        self.tokenizer = tokenizer
        self.arguments = template_arguments

    def split(self, conversation: Conversation) -> list[Rendering]:
        """Samples of one conversation, together supervising every assistant turn once.

        Raises RowError if there is no assistant turn, or the template refuses, drops or hides what is there.
        """
        messages, tools = conversation.messages, conversation.tools
        answers = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise RowError("no assistant turn in this row")
        for position in answers:
            if not any(messages[position].get(field) for field in ("content", "tool_calls", *REASONING_FIELDS)):
                raise RowError("an assistant turn is empty")
        messages = messages[: answers[-1] + 1]  # what follows the last answer can never count
        template = self.tokenizer.get_chat_template(tools=tools)
        if GENERATION_BLOCK.search(template):
            samples = self._split_by_blocks(template, messages, tools, answers)
        else:
            samples = self._split_by_prefixes(messages, tools, answers)
        self._check_nothing_dropped(messages, tools)
        return samples

    def _split_by_prefixes(self, messages: list[Message], tools: Any, answers: list[int]) -> list[Rendering]:
        turns: list[Rendering] = []
        for position in answers:
            prompt = self.render(messages[:position], tools, add_generation_prompt=True)
            text = self.render(messages[: position + 1], tools)
            if not text.startswith(prompt):
                raise RowError(UNSPLITTABLE)
            turns.append(Rendering(text, [(len(prompt), len(text))]))
        full = turns[-1].text
        if all(full.startswith(turn.text) for turn in turns):
            return [Rendering(full, [turn.spans[0] for turn in turns])]
        return turns

    def _split_by_blocks(
        self, template: str, messages: list[Message], tools: Any, answers: list[int]
    ) -> list[Rendering]:
        turns = [self._render_blocks(template, messages[: position + 1], tools) for position in answers]
        full = turns[-1]
        if all(full.text.startswith(turn.text) for turn in turns):
            return [full]
        samples = []
        for position, turn in zip(answers, turns, strict=True):
            before = self.render(messages[:position], tools)
            if not turn.text.startswith(before):
                raise RowError(UNSPLITTABLE)
            samples.append(Rendering(turn.text, [span for span in turn.spans if span[0] >= len(before)]))
        return samples

    def render(self, messages: list[Message], tools: Any = None, add_generation_prompt: bool = False) -> str:
        """The template's text. Raises RowError with the template's own words if it refuses."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self.arguments,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise _refusal(error) from error

    def _render_blocks(self, template: str, messages: list[Message], tools: Any) -> Rendering:
        # apply_chat_template gives the same spans only as a mask of tokens, one conversation at a time.
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments = {**self.tokenizer.special_tokens_map, **self.arguments}
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **arguments,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise _refusal(error) from error
        return Rendering(texts[0], [(int(start), int(end)) for start, end in spans[0]])

    def _check_nothing_dropped(self, messages: list[Message], tools: Any) -> None:
        """Render without each thing that simple templates ignore: where the text stays the same, it was dropped."""
        if tools and self._renders_to(self.render(messages, tools), messages, None):
            raise RowError("the chat template drops tools")
        for position, message in enumerate(messages):
            fields = [field for field in ("tool_calls", *REASONING_FIELDS) if field in message]
            if message["content"].strip() and (message["role"] == "tool" or "tool_calls" in message):
                fields.append("content")
            if not fields:
                continue
            text = self.render(messages[: position + 1], tools)
            for field in fields:
                other: Any = {**message, "content": "-"} if field == "content" else _without(message, field)
                if self._renders_to(text, [*messages[:position], other], tools):
                    raise RowError(f"the chat template drops {field} of {message['role']} messages")

    def _renders_to(self, text: str, messages: list[Message], tools: Any) -> bool:
        try:
            return self.render(messages, tools) == text
        except RowError:
            return False  # the template misses what was left out, so it reads it


def _refusal(error: Exception) -> RowError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return RowError(f"the chat template refuses this row: {lines[0]}")


def _without(message: Message, field: str) -> Message:
    return {key: value for key, value in message.items() if key != field}


class MaskTokenizer:
    """Texts with spans → token ids and loss masks; batches run on all cores (Rust threads)."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises InputError if the tokenizer has no offsets (a slow one)."""
        if not tokenizer.is_fast:
            raise InputError(
                f"{tokenizer.name_or_path or 'The target'} has only a slow tokenizer ({type(tokenizer).__name__}), which "
                f"cannot say where a token lies in the text. Give a tokenizer.json, or `input_ids` + `loss_mask`."
            )
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        special = [token_id for token_id, token in added if token.special] + list(tokenizer.all_special_ids)
        self.special_ids = np.unique(np.array(special, dtype=np.int32))

    def tokenize(self, renderings: list[Rendering]) -> list[Tokens]:
        """Rendered conversations; a token counts if it starts inside a span."""
        if not renderings:
            return []
        texts = [rendering.text for rendering in renderings]
        batch = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [
            self._mask(rendering, np.array(token_ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2))
            for rendering, token_ids, offsets in zip(
                renderings, batch["input_ids"], batch["offset_mapping"], strict=True
            )
        ]

    def tokenize_text(self, texts: list[str]) -> list[Tokens]:
        """Plain texts, with the tokenizer's own special tokens; every token counts."""
        if not texts:
            return []
        batch = self.tokenizer(texts, add_special_tokens=True, verbose=False)
        rows = [np.array(token_ids, np.int32) for token_ids in batch["input_ids"]]
        return [Tokens(row, np.ones(len(row), np.uint8)) for row in rows]

    def _mask(self, rendering: Rendering, token_ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> Tokens:
        loss_mask = np.zeros(len(token_ids), np.uint8)
        special = np.isin(token_ids, self.special_ids)
        for begin, end in rendering.spans:
            inside = np.flatnonzero((offsets[:, 0] >= begin) & (offsets[:, 0] < end))
            # The template's white space after the end-of-turn token is never generated: the target has stopped there.
            last = len(inside)
            while last and not special[inside[last - 1]] and not _token_text(rendering, offsets, inside[last - 1]):
                last -= 1
            if last and special[inside[last - 1]]:
                inside = inside[:last]
            loss_mask[inside] = 1
        return Tokens(token_ids, loss_mask)


def _token_text(rendering: Rendering, offsets: NDArray[np.int64], position: int) -> str:
    start, end = offsets[position]
    return rendering.text[start:end].strip()


def mark_supervised(tokenizer: Any, token_ids: Sequence[int], loss_mask: Sequence[int]) -> str:
    """The text of a sample with each run of supervised tokens between ⟦ and ⟧."""
    runs = itertools.groupby(zip(token_ids, loss_mask, strict=True), key=lambda pair: bool(pair[1]))
    texts = ((counts, tokenizer.decode([token for token, _ in run], skip_special_tokens=False)) for counts, run in runs)
    return "".join(f"⟦{text}⟧" if counts else text for counts, text in texts)


def hash_tokenizer(tokenizer: Any) -> str:
    """Hash of everything that decides how text becomes token ids: the fast tokenizer's JSON, without padding state."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return hash_bytes(backend.to_str().encode())


def hash_chat_template(tokenizer: Any) -> str:
    """Hash of the chat template (or of the dict of named templates; of nothing, where there is none)."""
    return hash_json(tokenizer.chat_template)
