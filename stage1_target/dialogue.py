"""Conversations whose answers the target gives anew: what is asked, how far one is, and how it ended.

A dialogue is a list of turns, each the messages before one answer (system and user messages as a rule). Answers of the
data are dropped: where one stood, and after a last question, the target answers. Its key is a hash of all that is asked
(turns and tools), so that a conversation is recognised whatever file it is in and whoever answered it before.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_train.errors import InputError
from dflash_train.stage1_target.conversations import (
    SURROGATE,
    Conversation,
    Message,
    RowError,
    message_text,
    parse_conversation,
    peek_columns,
    prompt_format,
)
from dflash_train.stage1_target.sources import Row, Source
from dflash_train.store.manifest import hash_json
from dflash_train.units import format_count

REASONING = ("reasoning_content", "reasoning", "thinking")
EMPTY_QUESTION = "a question is empty"
UNFINISHED_END = "the last answer had not ended at the limit of new tokens"
"""The reason of an Outcome that lacks no turn, but ends with an unfinished answer, which was to be kept."""


@dataclass(frozen=True)
class Dialogue:
    """All that is asked in one conversation."""

    key: str
    """16 hex digits."""
    turns: list[list[Message]]
    """The messages before each answer."""
    tools: list[dict[str, Any]] | None = None
    """Tools offered."""

    def asks(self, turn: int) -> bool:
        """Whether the user says anything in a turn, white space apart."""
        return any(one["role"] == "user" and message_text(one).strip() for one in self.turns[turn])

    def seed(self, seed: int, turn: int) -> int:
        """The seed of one answer, 63 bits: a function of the run's seed, the conversation and the turn alone."""
        digest = hashlib.blake2b(f"{seed}/{self.key}/{turn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Outcome:
    """How one dialogue ended."""

    key: str
    messages: list[Message]
    """Up to the last answer; empty where there is none."""
    tools: list[dict[str, Any]] | None = None
    num_tokens: int = 0
    """Tokens that the target wrote, dropped ones included."""
    num_changed: int = 0
    """Answers that the chat template does not render as they were written."""
    reason: str | None = None
    """Why turns, or all of it, are missing, or UNFINISHED_END."""
    failed: bool = False
    """Whether that may be otherwise next time (a server that does not answer), so that it is not recorded as done."""
    refused: bool = False
    """Whether the server refused the first question: that, or the settings, which the caller must tell apart."""

    def row(self) -> dict[str, Any]:
        """What the output file holds of it."""
        row: dict[str, Any] = {"id": self.key, "messages": self.messages}
        if self.tools:
            row["tools"] = self.tools
        return row | ({"cut": self.reason} if self.reason else {})


class Exchange:
    """A dialogue under way: which messages are put to the target next, and what it answered."""

    def __init__(self, dialogue: Dialogue, keep_unfinished: bool) -> None:
        self.dialogue = dialogue
        self.num_answers = self.num_tokens = self.num_changed = 0
        self.done = False
        self._keep_unfinished = keep_unfinished
        self._history: list[Message] = []
        self._reason: str | None = None
        self._failed = self._refused = False

    @property
    def asked(self) -> list[Message]:
        """The messages that wait for an answer, with all before them."""
        return [*self._history, *self.dialogue.turns[self.num_answers]]

    def answer(self, message: Message, num_tokens: int, finished: bool, changed: bool = False) -> None:
        """Take the target's answer; an unfinished one ends the conversation, as do an empty one and a tool call, and an
        empty question after it."""
        self.num_tokens += num_tokens
        unfinished = None if finished else "an answer had not ended at the limit of new tokens"
        if unfinished and not self._keep_unfinished:
            self.end(unfinished)
        elif not any(str(message.get(name) or "").strip() for name in ("content", "tool_calls", *REASONING)):
            self.end("an answer is empty")
        else:
            self._history = [*self.asked, message]
            self.num_answers += 1
            self.num_changed += changed
            more = self.num_answers < len(self.dialogue.turns)
            called = "the target called a tool, whose result is not known" if message.get("tool_calls") else None
            if unfinished and not more:
                self.end(UNFINISHED_END)
            elif unfinished or (called and more):
                self.end(unfinished or called)
            elif more and not self.dialogue.asks(self.num_answers):
                self.end(EMPTY_QUESTION)
            self.done = self.done or not more

    def drop(self, reason: str, num_tokens: int) -> None:
        """Take no answer, though the target wrote some of one; that ends the conversation."""
        self.num_tokens += num_tokens
        self.end(reason)

    def end(self, reason: str | None, failed: bool = False, refused: bool = False) -> None:
        """No more answers. `refused`: the server says that what is asked is the cause."""
        self.done, self._reason, self._failed = True, reason, failed
        self._refused = refused and not self.num_answers

    def outcome(self) -> Outcome:
        """What became of it."""
        dialogue, messages = self.dialogue, [] if self._failed else self._history
        return Outcome(
            dialogue.key,
            messages,
            dialogue.tools,
            num_tokens=self.num_tokens,
            num_changed=self.num_changed,
            reason=self._reason,
            failed=self._failed,
            refused=self._refused,
        )


@dataclass
class DialogueReader:
    """The dialogues of a data set, each once; counts what is left out, by reason."""

    source: Source
    limit: int | None = None
    """Stop after this many dialogues; None reads all."""
    num_rows: int = 0
    num_dialogues: int = 0
    num_duplicates: int = 0
    """Rows that ask what an earlier row asked."""
    unusable: Counter[str] = field(default_factory=Counter)

    def read(self) -> Iterator[Dialogue]:
        """Dialogues in the order of the data. Raises InputError where the format has no turns, or no row can be used."""
        columns, rows = peek_columns(self.source.name, self.source.rows())
        name = prompt_format(columns)
        if name is None:
            raise InputError(
                f"The columns of {self.source.name} are {', '.join(columns)}; questions need turns: `messages`, "
                f"`conversations`, `prompt` or `turns`. Give a data set that has one of them."
            )
        return self._read(name, rows)

    def _read(self, name: str, rows: Iterator[Row]) -> Iterator[Dialogue]:
        seen: set[str] = set()
        for row in rows:
            if self.limit is not None and self.num_dialogues >= self.limit:
                return
            self.num_rows += 1
            try:
                dialogue = make_dialogue(name, row)
                if not dialogue.asks(0):
                    raise RowError(EMPTY_QUESTION)
            except RowError as error:
                self.unusable[str(error)] += 1
                continue
            if dialogue.key in seen:
                self.num_duplicates += 1
                continue
            seen.add(dialogue.key)
            self.num_dialogues += 1
            yield dialogue
        if not seen:
            [(reason, count)] = self.unusable.most_common(1)
            raise InputError(
                f"No row of {self.source.name} ({name} format, {format_count(self.num_rows, 'row')}) can be answered; the commonest "
                f"reason ({format_count(count, 'time')}): {reason}. Give other rows, or mend these."
            )


def make_dialogue(format_name: str, row: Row) -> Dialogue:
    """What one row asks. Raises RowError where nothing is asked, or where tools were called."""
    if format_name == "turns":
        questions = row.get("turns")
        if not isinstance(questions, list) or not all(isinstance(one, str) for one in questions):
            raise RowError("turns is not a list of texts")
        conversation = Conversation([], None)
        turns: list[list[Message]] = [[{"role": "user", "content": question}] for question in questions]
    else:
        conversation = parse_conversation(format_name, row)
        turns = _turns(conversation.messages)
    if not turns:
        raise RowError("no user turn in this row")
    try:
        json.dumps(turns, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON may escape half a surrogate pair
        raise RowError(SURROGATE) from error
    key = hash_json({"turns": turns, "tools": conversation.tools})
    return Dialogue(key, turns, conversation.tools)


def _turns(messages: list[Message]) -> list[list[Message]]:
    turns: list[list[Message]] = []
    waiting: list[Message] = []
    for message in messages:
        if message["role"] == "tool" or message.get("tool_calls"):
            raise RowError("tools were called, and their results answer the calls of the data, not the target's")
        if message["role"] != "assistant":
            waiting.append(message)
        elif any(one["role"] == "user" for one in waiting):
            turns.append(waiting)
            waiting = []
    if any(one["role"] == "user" for one in waiting):
        turns.append(waiting)
    return turns
