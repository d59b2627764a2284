"""Sources and formats: what is read, and what bad input says."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from dflash_train.errors import InputError
from dflash_train.stage1_target.conversations import (
    RowError,
    detect_format,
    parse_conversation,
)
from dflash_train.stage1_target.sources import open_source

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
    {
        "messages": [
            {"role": "user", "content": "three"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "four", "reasoning_content": "hm"},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    },
]


def make_table() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"tools": None, **ROWS[0]}, ROWS[1]])  # from_list takes columns from the first


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(source: Path | str, split: str = "train") -> list[dict[str, Any]]:
    return list(open_source(str(source), split).rows())


def test_jsonl_rows_keep_their_own_keys(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", ROWS)
    assert read(path) == ROWS
    assert open_source(str(path)).count() == 2


def test_blank_lines_are_no_rows_and_the_last_line_needs_no_end(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n \r\n\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    assert read(path) == ROWS
    assert open_source(str(path)).count() == 2


def test_jsonl_rows_may_mix_types(tmp_path: Path) -> None:
    rows = [{"text": "a", "meta": 1}, {"text": "b", "meta": {"x": [1, "y"]}}]
    assert read(write_lines(tmp_path / "data.jsonl", rows)) == rows


def test_json_file_may_hold_a_list_or_lines(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(ROWS, indent=1), encoding="utf-8-sig")
    assert read(tmp_path / "list.json") == ROWS
    assert read(write_lines(tmp_path / "lines.json", ROWS)) == ROWS


@pytest.mark.parametrize("form", ["parquet", "arrow", "saved"])
def test_tables_lose_the_nulls_that_arrow_fills_in(tmp_path: Path, form: str) -> None:
    table = make_table()
    path = tmp_path / f"data.{form}"
    if form == "parquet":
        table.to_parquet(path)
    else:
        table.save_to_disk(tmp_path / "saved")
        path = tmp_path / "saved" if form == "saved" else next((tmp_path / "saved").glob("*.arrow"))
    assert read(path) == ROWS


def test_folder_is_read_whole_and_its_splits_are_kept_apart(tmp_path: Path) -> None:
    write_lines(tmp_path / "train-00000-of-00002.jsonl", ROWS[:1])
    write_lines(tmp_path / "train-00001-of-00002.jsonl", ROWS[1:])
    write_lines(tmp_path / "test.jsonl", ROWS[:1])
    (tmp_path / "README.md").write_text("about", encoding="utf-8")
    assert read(tmp_path) == ROWS
    assert read(tmp_path, "test") == ROWS[:1]
    with pytest.raises(InputError, match="no split validation; found test, train"):
        read(tmp_path, "validation")


def test_saved_splits_are_found(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": make_table()}).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == ROWS
    with pytest.raises(InputError, match="no split test; found train"):
        read(tmp_path / "saved", "test")


def test_broken_json_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"data\.jsonl, line 3: not valid JSON"):
        read(path)
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(InputError, match=r"data\.jsonl, line 2: not valid UTF-8"):
        read(path)
    path.write_text('{"text": "a"}\n"b"\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"line 2: found a JSON str, wanted one object a line"):
        read(path)
    cut_off = tmp_path / "cut.json"
    cut_off.write_text(json.dumps(ROWS, indent=1)[:-40], encoding="utf-8")
    with pytest.raises(InputError, match=r"cut\.json, line \d+: not valid JSON"):
        read(cut_off)
    for text in ("[" * 100_000, '{"a":' * 100_000):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match="nested too deeply"):
            read(path)
    pretty = tmp_path / "pretty.json"
    pretty.write_text(json.dumps({"data": ROWS}, indent=1), encoding="utf-8")
    with pytest.raises(InputError, match="several lines that is not a list"):
        read(pretty)


@pytest.mark.parametrize("text", ["{", "{}", "[]", "7"])
def test_damaged_list_of_saved_splits_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(text)
    with pytest.raises(InputError, match=r"dataset_dict\.json is damaged \(.*Save the data set again"):
        read(tmp_path)


def test_broken_table_names_the_file(tmp_path: Path) -> None:
    for name in ("data.parquet", "data.arrow"):
        (tmp_path / name).write_bytes(b"not a table")
        with pytest.raises(InputError, match=f"{name} cannot be read"):
            read(tmp_path / name)


def test_missing_and_unknown_sources_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (str(tmp_path / "none"), "none.jsonl", "./none", "a/b/c", str(tmp_path / "none.parquet")):
        with pytest.raises(InputError, match="does not exist"):
            open_source(source)
    (tmp_path / "data.csv").write_text("text\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"is a \.csv file; wanted a \.json"):
        open_source(str(tmp_path / "data.csv"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"No \.json, \.jsonl, \.parquet or \.arrow file"):
        open_source(str(tmp_path / "empty"))
    write_lines(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(InputError, match="has only the split train, not test"):
        open_source(str(tmp_path / "data.jsonl"), "test")

    def unreachable(*arguments: Any, **keywords: Any) -> None:
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub (offline)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(InputError, match=r"owner/name is no local path, and loading it from the hub failed: Couldn't"):
        open_source("owner/name")


def test_hub_data_set_is_identified_by_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table()
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: table)
    source = open_source("owner/name")
    assert list(source.rows()) == ROWS
    assert source.identity == {"hub": "owner/name", "split": "train", "fingerprint": table._fingerprint}


def test_format_is_detected_by_columns() -> None:
    assert detect_format("x", ["id", "messages", "text"]) == "messages"
    assert detect_format("x", ["prompt", "completion"]) == "prompt+completion"
    assert detect_format("x", ["loss_mask", "input_ids"]) == "input_ids+loss_mask"
    with pytest.raises(InputError, match=r"columns of x are question, answer; wanted `messages`.*`text`.*`input_ids`"):
        detect_format("x", ["question", "answer"])


def test_sharegpt_roles_and_leading_answers() -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "gpt", "value": "lost question"},
            {"from": "human", "value": "q"},
            {"from": "bing", "value": "a"},
            {"from": "user", "value": "q2"},
            {"from": "chatgpt", "value": "a2"},
        ]
    }
    messages = parse_conversation("conversations", row).messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages] == ["s", "q", "a", "q2", "a2"]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "no user turn"),
        ([{"from": "gpt", "value": "a"}], "no user turn"),
        (
            [{"from": "human", "value": "a"}, {"from": "user", "value": "b"}],
            "two user turns in a row",
        ),
        ([{"from": "robot", "value": "a"}], "a turn is from 'robot', wanted one of human"),
        ([{"from": "human"}], "a turn has no text"),
        (None, "no conversations in this row"),
        ("text", "found a str where a list of turns was wanted"),
    ],
)
def test_unusable_sharegpt_rows_have_a_reason(turns: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        parse_conversation("conversations", {"conversations": turns})


def test_messages_are_normalised_without_changing_what_is_said() -> None:
    row = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "add "}, {"type": "text", "text": "1"}],
                "name": None,
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "",
                "tool_calls": [{"id": "7", "function": {"name": "add", "arguments": '{"a": 1}'}}],
            },
        ],
        "tools": '[{"type": "function"}]',
    }
    conversation = parse_conversation("messages", row)
    assert conversation.messages == [
        {"role": "user", "content": "add 1"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "7", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
    ]
    assert conversation.tools == [{"type": "function"}]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ([{"role": "critic", "content": "a"}], "a message has the role 'critic', wanted one of system"),
        (["a"], "found a str as a message"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a message has content that is not text"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "a tool call has no function name"),
    ],
)
def test_unusable_messages_have_a_reason(messages: list[Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        parse_conversation("messages", {"messages": messages})


def test_sequence_of_structs_is_read_as_turns() -> None:
    row = {"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}
    assert parse_conversation("conversations", row).messages[1] == {"role": "assistant", "content": "a"}
