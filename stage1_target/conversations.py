"""Formats: which columns a data set has, and how one row becomes OpenAI-style messages.

The format is detected by columns, once for the data set. A row that does not fit it raises RowError: the caller puts the
row into quarantine with that reason. Nothing is repaired that would change what a model is taught; only what cannot
matter is normalised (nulls, text given in parts, tool-call arguments given as a JSON string, leading ShareGPT answers).
"""

import itertools
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from dflash_train.errors import InputError
from dflash_train.stage1_target.sources import Row
from dflash_train.store.manifest import hash_id

Message = dict[str, Any]

# Format → columns it needs, in order of precedence.
FORMATS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt+response": ("prompt", "response"),
    "prompt+completion": ("prompt", "completion"),
    "text": ("text",),
    "input_ids+loss_mask": ("input_ids", "loss_mask"),
}
# Prompts alone are enough to regenerate and to evaluate; `turns` is the question file of MT-bench.
PROMPT_FORMATS = {"prompt": ("prompt",), "turns": ("turns",)}
CONVERSATION_FORMATS = ("messages", "conversations", "prompt+response", "prompt+completion")
ACCEPTED_COLUMNS = (
    "`messages` (OpenAI, with `tools` if there are any), `conversations` (ShareGPT), `prompt` + `response` (or "
    "`completion`), `text`, or `input_ids` + `loss_mask`"
)
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
    "system": "system",
}
SURROGATE = "the text holds half a surrogate pair, which no Unicode text can hold"
PEEKED_ROWS = 100  # rows of one jsonl file may have different keys


class RowError(ValueError):
    """One row cannot be used; the text is its reason in the quarantine list.

    Reasons name no positions, so that a report can count them.
    """


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them (keys without a value left out), and the tools offered."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def detect_format(source: str, columns: list[str]) -> str:
    """Name of the first of FORMATS whose columns are all there. Raises InputError naming what is there instead."""
    for name, needed in FORMATS.items():
        if set(needed) <= set(columns):
            return name
    raise InputError(f"The columns of {source} are {', '.join(columns)}; wanted {ACCEPTED_COLUMNS}. Rename them.")


def peek_columns(source: str, rows: Iterator[Row]) -> tuple[list[str], Iterator[Row]]:
    """Columns of the first rows, and the rows from the start. Raises InputError if there is no row."""
    first = list(itertools.islice(rows, PEEKED_ROWS))
    if not first:
        raise InputError(f"{source} holds no rows. Give a data set with at least one conversation.")
    return list(dict.fromkeys(column for row in first for column in row)), itertools.chain(first, rows)


def prompt_format(columns: Collection[str]) -> str | None:
    """The format of data whose user turns are to be answered: the first that has its columns, None where none has."""
    formats = {name: FORMATS[name] for name in CONVERSATION_FORMATS} | PROMPT_FORMATS
    return next((name for name, needed in formats.items() if set(needed) <= set(columns)), None)


def parse_conversation(format_name: str, row: Row) -> Conversation:
    """One row of a conversation format as messages. Raises RowError."""
    for column in (FORMATS | PROMPT_FORMATS)[format_name]:
        if row.get(column) is None:
            raise RowError(f"no {column} in this row")
    if format_name == "messages":
        messages = _parse_messages(row["messages"])
    elif format_name == "conversations":
        messages = _parse_sharegpt(row["conversations"])
    elif format_name == "turns":
        messages = _parse_messages([{"role": "user", "content": row["turns"][0]}] if row["turns"] else [])
    else:
        messages = _as_messages(row["prompt"], "user")
        if format_name != "prompt":
            messages += _as_messages(row[FORMATS[format_name][1]], "assistant")
    return Conversation(messages, _parse_tools(row.get("tools")))


def message_text(message: Message) -> str:
    """The content of a normalised message; empty where it has none (a bare tool call)."""
    return str(message.get("content", ""))


def first_turn_group(messages: list[Message]) -> int:
    """Hash of the text of the first user turn (of the first message, where no user speaks).

    Conversations that start alike share it, so holdout by group keeps them on one side.
    """
    first = next((message for message in messages if message["role"] == "user"), messages[0])
    return hash_id(message_text(first).encode())


def _parse_messages(value: Any) -> list[Message]:
    turns = [_normalise_message(turn) for turn in _as_turns(value)]
    if not turns:
        raise RowError("no messages in this row")
    return turns


def _as_turns(value: Any) -> list[Any]:
    if isinstance(value, dict) and all(isinstance(column, list) for column in value.values()):
        # a `Sequence` of structs: older `datasets` give a dict of lists
        return [dict(zip(value, turn, strict=False)) for turn in zip(*value.values(), strict=False)]
    if not isinstance(value, list):
        raise RowError(f"found a {type(value).__name__} where a list of turns was wanted")
    return value


def _normalise_message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RowError(f"found a {type(turn).__name__} as a message, not an object with role and content")
    message = {key: item for key, item in turn.items() if item is not None and item != []}
    role = message.get("role")
    if role not in ROLES:
        raise RowError(f"a message has the role {role!r}, wanted one of {', '.join(ROLES)}")
    message["content"] = _plain_content(message.get("content", ""))
    for field in ("reasoning_content", "reasoning", "thinking"):
        if message.get(field) == "":
            del message[field]
    if "tool_calls" in message:
        message["tool_calls"] = [_normalise_call(call) for call in _as_turns(message["tool_calls"])]
    return message


def _plain_content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise RowError("a message has content that is not text; only text can be used")
        texts.append(text)
    return "".join(texts)


def _normalise_call(call: Any) -> Any:
    """Arguments as an object: OpenAI gives a JSON string, templates expect an object and would quote it twice."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("a tool call has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return call
        if isinstance(parsed, dict):
            return {**call, "function": {**function, "arguments": parsed}}
    return call


def _parse_tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError("tools is a string but not JSON") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("tools is not a list of objects")
    return value


def _parse_sharegpt(value: Any) -> list[Message]:
    turns: list[Message] = []
    for turn in _as_turns(value):
        if not isinstance(turn, dict):
            raise RowError(f"found a {type(turn).__name__} as a turn, not an object with from and value")
        speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        role = SHAREGPT_ROLES.get(str(speaker))
        if role is None:
            raise RowError(f"a turn is from {speaker!r}, wanted one of {', '.join(SHAREGPT_ROLES)}")
        if not isinstance(text, str):
            raise RowError("a turn has no text")
        # Many ShareGPT files are cut from longer chats and begin with an answer whose question is lost.
        if role == "assistant" and not any(earlier["role"] == "user" for earlier in turns):
            continue
        if turns and turns[-1]["role"] == role:
            raise RowError(f"two {role} turns in a row")
        turns.append({"role": role, "content": text})
    if not any(turn["role"] == "user" for turn in turns):
        raise RowError("no user turn in this row")
    return turns


def _as_messages(value: Any, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _parse_messages(value)
