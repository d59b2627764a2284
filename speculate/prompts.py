"""Prompts to evaluate with: rows of data sets, the benchmarks by their names, and never what was trained on.

A prompt is the turns of a conversation without its answers: the target answers the first, and its own answer stands
before the second. A benchmark's name stands for its data set on the Hugging Face hub and the wording that z-lab's package
asks it in (dflash 0.1.0, benchmark.py), so that numbers can be compared; `gsm8k=FILE` takes a copy with the same columns.

«Trained on» is decided by group, the hash of the first user turn that `dflash extract` stores with every sample and
every checkpoint lists: so another answer to a trained question counts as trained on, too.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dflash_train.errors import InputError
from dflash_train.stage1_target.conversations import (
    SURROGATE,
    Message,
    RowError,
    first_turn_group,
    parse_conversation,
    peek_columns,
    prompt_format,
)
from dflash_train.stage1_target.dialogue import make_dialogue
from dflash_train.stage1_target.sample_table import hash_tokens
from dflash_train.stage1_target.sources import Row, Source, hub_source, open_source
from dflash_train.stage1_target.tokenization import ChatRenderer
from dflash_train.store.manifest import hash_id

REASON = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
NUM_NAMED = 3
"""Prompts that a message quotes."""
SPARE = 16
"""Times the limit: candidates that are kept, more where these are used up. Rows may repeat one another, and data given as
token ids are known as trained on only once rendered."""
Rows = Iterator[tuple[list[list[Message]], Any, str | None]]


@dataclass(frozen=True)
class Benchmark:
    """A data set on the hub, and how its rows are asked."""

    hub_name: str
    configuration: str | None
    split: str
    column: str
    wording: str = "{}"

    def turns(self, row: Row) -> list[str]:
        """The questions of one row: of mt-bench two, else one."""
        value = row.get(self.column)
        questions = value if isinstance(value, list) else [value]
        if not questions or not all(isinstance(question, str) for question in questions):
            raise RowError(f"no text in {self.column}")
        return [self.wording.format(question) for question in questions]


BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", "main", "test", "question", REASON),
    "math500": Benchmark("HuggingFaceH4/MATH-500", None, "test", "problem", REASON),
    "humaneval": Benchmark(
        "openai/openai_humaneval",
        None,
        "test",
        "prompt",
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```",
    ),
    "mbpp": Benchmark("google-research-datasets/mbpp", "sanitized", "test", "prompt"),
    "mt-bench": Benchmark("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
}


@dataclass(frozen=True)
class Prompt:
    """What is asked in one conversation."""

    source: str
    """The data set, as the user named it."""
    turns: list[list[Message]]
    """The messages before each answer."""
    tools: list[dict[str, Any]] | None
    token_ids: list[int]
    """The first turn under the chat template, with the opening of the answer."""
    bare: str | None = None
    """The question of a benchmark without the benchmark's wording, as other data hold it."""

    @property
    def text(self) -> str:
        """The first user turn, to name the prompt by."""
        message = next(message for message in self.turns[0] if message["role"] == "user")
        return str(message.get("content", ""))

    @property
    def groups(self) -> list[int]:
        """The groups of training samples that ask the same: of conversations, and of data given as token ids."""
        of_tokens = [hash_tokens(np.asarray(self.token_ids, np.int32))] if self.token_ids else []
        of_bare = [hash_id(self.bare.encode())] if self.bare is not None else []
        return [first_turn_group(self.turns[0]), *of_bare, *of_tokens]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of all data sets, and what was left out."""

    prompts: list[Prompt]
    num_trained: int
    """Left out, or, where that is allowed, taken all the same: they are in the training data."""
    trained: list[Prompt]
    """The first of these, to name them by."""
    num_skipped: int
    """Refused by the chat template, or too long."""


def read_prompts(
    sources: Sequence[str],
    renderer: Callable[[], ChatRenderer],
    *,
    split: str = "train",
    limit: int | None = None,
    max_turns: int | None = None,
    max_tokens: int | None = None,
    trained_groups: Collection[int] = (),
    allow_trained: bool = False,
    way_out: str = "",
) -> PromptSet:
    """Of each source at most `limit` prompts with at most `max_turns` turns; the first turn has at most `max_tokens`.

    `limit` prompts are a sample of all, by a hash of what they ask: the same each time, whatever the order of the rows,
    which in many files is one of length or topic. They stand in the order of the rows, and none is there twice.

    Prompts of `trained_groups` are left out before the limit counts, unless allowed (`way_out` says how); rows that ask
    nothing count nowhere. Raises InputError for sources that cannot be read, and where no prompt is left of one.
    """
    found: list[Prompt] = []
    trained: list[Prompt] = []
    num_trained = num_skipped = 0
    opened = {source: _open(source, split) for source in dict.fromkeys(sources)}
    chat = renderer()
    for source, rows in opened.items():
        held_back = () if allow_trained else trained_groups
        spare = SPARE
        while True:
            out = _LeftOut()
            candidates = _candidates(source, rows, max_turns, held_back, out)
            chosen = list(candidates) if limit is None else heapq.nsmallest(spare * limit, candidates)
            taken = _take(chosen, chat, limit, max_tokens, trained_groups, allow_trained, out)
            if limit is None or len(taken) + out.refused >= limit or len(chosen) < spare * limit:
                break
            spare *= SPARE
            rows = _open(source, split)
        if not taken:
            raise InputError(_nothing_left(way_out, source, out, max_tokens))
        found += taken
        trained += out.trained
        num_trained += out.num_trained
        num_skipped += out.unread + out.refused
    return PromptSet(found, num_trained, trained[:NUM_NAMED], num_skipped)


def _take(
    chosen: Sequence[tuple[int, int, Prompt]],
    chat: ChatRenderer,
    limit: int | None,
    max_tokens: int | None,
    trained_groups: Collection[int],
    allow_trained: bool,
    out: _LeftOut,
) -> list[Prompt]:
    """Those candidates that can be asked, rendered, in the order of the rows; at most `limit` with those that cannot."""
    taken: list[tuple[int, Prompt]] = []
    before = None
    for place, number, bare in chosen:
        if limit is not None and (place == before or len(taken) + out.refused >= limit):
            continue
        before = place
        try:
            prompt = replace(bare, token_ids=encode(chat, bare.turns[0], bare.tools))
        except (RowError, UnicodeEncodeError) as error:
            out.refusal, out.refused = error, out.refused + 1
            continue
        if max_tokens is not None and len(prompt.token_ids) > max_tokens:
            out.refused, out.longest = out.refused + 1, max(out.longest, len(prompt.token_ids))
            continue
        if any(group in trained_groups for group in prompt.groups):
            out.note_trained(prompt)
            if not allow_trained:
                continue
        taken.append((number, prompt))
    return [prompt for _number, prompt in sorted(taken, key=lambda entry: entry[0])]


@dataclass
class _LeftOut:
    """What of a source is not asked."""

    num_trained: int = 0
    """In the training data."""
    trained: list[Prompt] = field(default_factory=list)
    """The first of these; all of a large training file would not fit into memory."""
    unread: int = 0
    """Whose question is no text."""
    refused: int = 0
    """By the chat template, or too long."""
    longest: int = 0
    """Tokens of the longest that was too long."""
    refusal: ValueError | None = None

    def note_trained(self, prompt: Prompt) -> None:
        self.num_trained += 1
        if len(self.trained) < NUM_NAMED:
            self.trained.append(prompt)


def _candidates(
    source: str, rows: Rows, max_turns: int | None, trained_groups: Collection[int], out: _LeftOut
) -> Iterator[tuple[int, int, Prompt]]:
    """Place in the sample, number of the row, and the prompt, not rendered yet; those of `trained_groups` are noted alone."""
    for number, (turns, tools, bare) in enumerate(rows):
        prompt = Prompt(source, turns[:max_turns], tools, [], bare)
        try:
            groups = prompt.groups
        except (RowError, UnicodeEncodeError) as error:  # JSON may escape half a surrogate pair
            out.refusal, out.unread = error, out.unread + 1
            continue
        if any(group in trained_groups for group in groups):
            out.note_trained(prompt)
        else:
            yield hash_id(json.dumps([prompt.turns, tools], default=str).encode()), number, prompt


def encode(renderer: ChatRenderer, messages: list[Message], tools: Any) -> list[int]:
    """Token ids of messages under the chat template, with the opening of an answer.

    Raises RowError, and UnicodeEncodeError for half a surrogate pair, on which tokenizers panic.
    """
    text = renderer.render(messages, tools, add_generation_prompt=True)
    text.encode()
    return list(map(int, renderer.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))


def name_prompts(prompts: Sequence[Prompt], count: int) -> str:
    """«first words of one», «of another» and 5 more, of `count` prompts of which the first are given."""
    texts = [" ".join(prompt.text.split()) for prompt in prompts[:NUM_NAMED]]
    named = ", ".join(f"«{text if len(text) <= 50 else text[:49] + '…'}»" for text in texts)
    more = f" and {count - len(texts):,} more" if count > len(texts) else ""
    return named + more


def _nothing_left(way_out: str, source: str, out: _LeftOut, max_tokens: int | None) -> str:
    skipped = out.unread + out.refused
    if out.num_trained:
        others = f" ({skipped:,} others cannot be used)" if skipped else ""
        named = name_prompts(out.trained, out.num_trained)
        return (
            f"All prompts of {source} are in the drafter's training data{others}: {named}; give prompts that were not "
            f"trained on{way_out}."
        )
    if out.longest:
        return (
            f"None of the {skipped:,} prompts of {source} leaves room for the new tokens within the target's positions: the "
            f"longest prompt has {out.longest:,} tokens, {max_tokens:,} would do; give shorter prompts or lower "
            "--max-new-tokens."
        )
    if out.refusal is not None:
        reason = SURROGATE if isinstance(out.refusal, UnicodeEncodeError) else out.refusal
        return f"No prompt of {source} can be put to the target: {reason}. Give other prompts or template arguments."
    return f"No row of {source} has a user turn to answer. Give other data."


def _open(source: str, split: str) -> Rows:
    """The turns, tools and bare question of each row; what can be said against the source is said before the first one."""
    name, file = _parse(source)
    if name is not None:
        benchmark = BENCHMARKS[name]
        data = open_source(file) if file else _benchmark_source(source, benchmark)
        columns, rows = peek_columns(source, data.rows())
        if benchmark.column not in columns:
            raise InputError(
                f"The columns of {file or benchmark.hub_name} are {', '.join(columns)}; {name} has a column "
                f"{benchmark.column!r}. Give a copy of {benchmark.hub_name}."
            )
        return _benchmark_rows(benchmark, rows)
    columns, rows = peek_columns(source, open_source(source, split).rows())
    format_name = prompt_format(columns)
    if format_name is None:
        raise InputError(
            f"The columns of {source} are {', '.join(columns)}; prompts need turns: `messages`, `conversations`, "
            f"`prompt` or `turns`. Give a data set that has one of them, or {', '.join(BENCHMARKS)}."
        )
    return _conversation_rows(format_name, rows)


def _benchmark_source(name: str, benchmark: Benchmark) -> Source:
    try:
        return hub_source(benchmark.hub_name, benchmark.split, benchmark.configuration)
    except InputError as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            f"{name} is {benchmark.hub_name} on the Hugging Face hub, which could not be loaded: {reason}. Run once with "
            f"network, or give a copy of it: --data {name}=FILE."
        ) from error


def _benchmark_rows(benchmark: Benchmark, rows: Iterator[Row]) -> Rows:
    for row in rows:
        try:
            value = row.get(benchmark.column)
            turns = [[{"role": "user", "content": question}] for question in benchmark.turns(row)]
            yield turns, None, value if isinstance(value, str) else None
        except RowError:
            continue


def _conversation_rows(format_name: str, rows: Iterator[Row]) -> Rows:
    for row in rows:
        try:
            dialogue = make_dialogue(format_name, row)
            yield dialogue.turns, dialogue.tools, None
        except RowError:  # perhaps tools were called: then only the first question is the same for this target
            try:
                conversation = parse_conversation(format_name, row)
            except RowError:
                continue
            roles = [message["role"] for message in conversation.messages]
            if "user" in roles:
                yield [conversation.messages[: roles.index("user") + 1]], conversation.tools, None


def source_labels(sources: Sequence[str]) -> list[str]:
    """Short names for tables and pictures, no two alike: gsm8k, or as many last parts of a path as tell it from the others."""
    names = [_names(source) for source in sources]
    labels = []
    for own in names:
        others = {name for other in names if other is not own for name in other}
        labels.append(next((name for name in own if name not in others), own[-1]))
    return labels


def _names(source: str) -> list[str]:
    """What a source may be called, the shortest first."""
    benchmark, _file = _parse(source)
    if benchmark is not None:
        return list(dict.fromkeys((benchmark, source)))
    parts = [part for part in re.split(r"[/\\]", source) if part]
    return [*("/".join(parts[-count:]) for count in range(1, len(parts) + 1)), source]


def source_file(source: str) -> str:
    """The file of gsm8k=FILE; any other source as it is."""
    return _parse(source)[1] or source


def _parse(source: str) -> tuple[str | None, str]:
    """Benchmark and FILE of gsm8k=FILE; FILE is empty where the hub's copy is meant, and all of another source."""
    name, _, file = source.partition("=")
    return (name, file) if name in BENCHMARKS else (None, source)
