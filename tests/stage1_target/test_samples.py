"""The sample table: ids, groups, counts, quarantine and the cache."""

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_train.errors import InputError
from dflash_train.stage1_target import samples
from dflash_train.stage1_target.conversations import SURROGATE, first_turn_group
from dflash_train.stage1_target.samples import DataConfig, SampleTable, prepare_samples
from dflash_train.store.manifest import format_id, hash_id


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]}


@pytest.fixture
def prepare(tmp_path: Path, tiny_tokenizer: Any) -> Any:
    """Rows → sample table."""

    def prepare(rows: list[dict[str, Any]], **settings: Any) -> SampleTable:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return prepare_samples(DataConfig(source=str(path), **settings), tiny_tokenizer, tmp_path / "cache")

    return prepare


def test_sample_ids_and_groups_follow_content(prepare: Any, tiny_tokenizer: Any) -> None:
    rows = [chat("one", "two"), chat("one", "three"), chat("four", "five", "six", "seven")]
    table = prepare(rows)
    assert len(table) == table.num_rows == 3 and table.quarantined == []
    for index, row in enumerate(rows):
        sample_id, group, token_ids, loss_mask = table.sample(index)
        assert token_ids.tolist() == tiny_tokenizer.apply_chat_template(row["messages"])["input_ids"]
        assert sample_id == hash_id(token_ids.tobytes() + loss_mask.tobytes()) == table.ids[index]
        assert group == first_turn_group(row["messages"]) == table.groups[index]
        assert (len(token_ids), loss_mask.sum()) == (table.lengths[index], table.supervised[index])
        assert token_ids.dtype == np.int32 and loss_mask.dtype == np.uint8
    assert table.groups[0] == table.groups[1] != table.groups[2]
    assert table.lengths.dtype == table.supervised.dtype == np.int32 and not table.counts_all_tokens
    with pytest.raises(IndexError):
        table.sample(3)


def test_samples_are_found_across_arrow_batches(prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [chat(f"q{n}", "a" * (1 + n % 5)) for n in range(7)]
    whole = prepare(rows)
    monkeypatch.setattr(samples, "BATCH_ROWS", 2)
    monkeypatch.setattr(samples, "CACHE_VERSION", 0)
    cut = prepare(rows)
    assert cut.path != whole.path and len(cut._tokens) == 4
    for index in range(7):
        assert [part.tolist() for part in cut.sample(index)[2:]] == [part.tolist() for part in whole.sample(index)[2:]]


def test_identical_samples_are_kept_once_and_counted(prepare: Any) -> None:
    table = prepare([chat("a", "b"), chat("c", "d"), chat("a", "b")])
    assert (len(table), table.num_duplicates, table.num_rows) == (2, 1, 3)


def test_long_samples_are_cut_at_the_tail_and_counted(prepare: Any) -> None:
    table = prepare([chat("a", "one two three"), chat("one two three four five six seven", "b")], max_tokens=12)
    assert (len(table), table.num_truncated, table.lengths.tolist()) == (1, 1, [12])
    [lost] = table.quarantined
    assert lost["row"] == 1 and lost["reason"] == "no supervised tokens within the first 12"
    assert len(lost["id"]) == 16


def test_unusable_rows_are_quarantined_by_row_and_reason(prepare: Any) -> None:
    table = prepare([chat("a", "b"), {"messages": None}, chat("only a question"), {"other": 1}, chat("c", "")])
    assert [(entry["row"], entry["reason"]) for entry in table.quarantined] == [
        (1, "no messages in this row"),
        (2, "no assistant turn in this row"),
        (3, "no messages in this row"),
        (4, "an assistant turn is empty"),
    ]


def test_half_a_surrogate_pair_is_quarantined(prepare: Any) -> None:
    assert [
        entry["reason"] for entry in prepare([chat("a", "b"), chat("\ud800", "b"), chat("a", "\udfff")]).quarantined
    ] == [SURROGATE] * 2
    table = prepare([{"text": "a"}, {"text": "\ud800"}])
    assert len(table) == 1 and table.quarantined == [{"row": 1, "id": None, "reason": SURROGATE}]


def test_every_row_unusable_is_an_error(prepare: Any, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"No row of .* \(messages format, 2 rows\) can be used; .* \(2 times\): no as"
    ):
        prepare([chat("a"), chat("b")])
    assert list((tmp_path / "cache").iterdir()) == []


def test_mask_that_counts_everything_is_refused(prepare: Any, tiny_tokenizer: Any, monkeypatch: Any) -> None:
    everything = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", everything)
    with pytest.raises(InputError, match="every token would count"):
        prepare([chat("a", "b")])
    monkeypatch.setattr(tiny_tokenizer, "chat_template", everything.replace("m.content", "''") + "hello")
    with pytest.raises(InputError, match="no supervised tokens"):
        prepare([chat("a", "b")])


def test_empty_data_set_and_unknown_columns_are_refused(prepare: Any) -> None:
    with pytest.raises(InputError, match="holds no rows"):
        prepare([])
    with pytest.raises(InputError, match="columns of .* are question, answer; wanted `messages`"):
        prepare([{"question": "a", "answer": "b"}])
    with pytest.raises(InputError, match="--max-tokens is 1"):
        prepare([chat("a", "b")], max_tokens=1)


def test_prompt_and_response_equal_messages(prepare: Any) -> None:
    wanted = prepare([chat("a", "b")]).ids.tolist()
    assert prepare([{"prompt": "a", "response": "b"}]).ids.tolist() == wanted
    assert prepare([{"prompt": chat("a")["messages"], "completion": "b"}]).ids.tolist() == wanted
    assert prepare([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]).ids == wanted


def test_text_counts_every_token_and_says_so(prepare: Any) -> None:
    table = prepare([{"text": "one two three"}, {"text": ""}, {"text": None}])
    assert table.counts_all_tokens and len(table) == 1
    assert table.supervised.tolist() == table.lengths.tolist()
    assert table.groups.tolist() == table.ids.tolist()
    assert [entry["reason"] for entry in table.quarantined] == ["no text in this row", "no supervised tokens"]


def test_ready_tokens_are_checked_and_grouped_by_prompt(prepare: Any) -> None:
    good = [([5, 6, 7, 8], [0, 0, 1, 1]), ([5, 6, 9], [False, False, True]), ([7, 8], [1, 1])]
    bad = [([1], [1, 0]), ([400], [1]), ([1, 2], [0, 0]), ([1], [2]), ([], []), ([1.5], [1])]
    table = prepare([{"input_ids": ids, "loss_mask": mask} for ids, mask in good + bad])
    assert [table.sample(index)[2].tolist() for index in range(3)] == [ids for ids, _ in good]
    assert table.groups[0] == table.groups[1] == hash_id(np.array([5, 6], "<i4").tobytes())
    assert table.groups[2] == table.ids[2]
    assert len(table.quarantined) == len(bad) and table.source["format"] == "input_ids+loss_mask"


def test_samples_stop_at_the_limit(prepare: Any) -> None:
    assert len(prepare([chat(f"q{n}", "a") for n in range(9)], max_samples=4)) == 4


def test_second_call_maps_the_cache(prepare: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [chat(f"q{n}", "a") for n in range(300)]
    first = prepare(rows)
    source = Path(first.source["name"])
    config = DataConfig(source=str(source))
    monkeypatch.setattr(samples, "peek_columns", None)  # reading again would fail
    begin = time.monotonic()
    second = prepare_samples(config, tiny_tokenizer, first.path.parent)
    assert time.monotonic() - begin < 0.5
    assert second.path == first.path and second.ids.tolist() == first.ids.tolist()
    assert second.source == first.source and len(second.source["fingerprint"]) == 16


@pytest.mark.parametrize("change", ["file", "template", "arguments", "max_tokens", "split"])
def test_cache_key_covers_what_decides_the_tokens(
    prepare: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    table = prepare([chat("a", "b")])
    source = Path(table.source["name"])
    settings: dict[str, Any] = {}
    if change == "file":
        os.utime(source, ns=(1, 1))
    elif change == "template":
        monkeypatch.setattr(tiny_tokenizer, "chat_template", "{{ '' }}" + tiny_tokenizer.chat_template)
    elif change == "arguments":
        settings = {"chat_template_arguments": {"enable_thinking": False}}
    elif change == "max_tokens":
        settings = {"max_tokens": 100}
    else:
        source.rename(source.with_name("test.jsonl"))
        source, settings = source.parent, {"split": "test"}
    other = prepare_samples(DataConfig(source=str(source), **settings), tiny_tokenizer, table.path.parent)
    assert other.path != table.path and other.num_rows == 1


def test_unwritable_cache_folder_is_named(prepare: Any, tiny_tokenizer: Any) -> None:
    source = Path(prepare([chat("a", "b")]).source["name"])
    with pytest.raises(InputError, match=r"cannot be cached in .*data\.jsonl/cache: .*Free space"):
        prepare_samples(DataConfig(source=str(source)), tiny_tokenizer, source / "cache")


def test_progress_counts_rows(tmp_path: Path, tiny_tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(chat(f"q{n}", "a")) + "\n" for n in range(300)), encoding="utf-8")
    seen: list[tuple[int, int | None]] = []
    prepare_samples(
        DataConfig(source=str(path)), tiny_tokenizer, tmp_path / "cache", lambda *counts: seen.append(counts)
    )
    assert seen == [(256, 300), (300, 300)]
    assert capfd.readouterr() == ("", "")


def _load_in_worker(path: Path, index: int) -> tuple[int, list[int]]:
    sample_id, _, token_ids, _ = SampleTable.load(path).sample(index)
    return sample_id, token_ids.tolist()


def test_worker_process_loads_the_table(prepare: Any) -> None:
    table = prepare([chat("a", "b"), chat("c", "d")])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        sample_id, token_ids = pool.apply(_load_in_worker, (table.path, 1))
    assert (sample_id, token_ids) == (table.ids[1], table.sample(1)[2].tolist())
    assert format_id(sample_id) == f"{sample_id:016x}"


def test_table_opens_with_datasets(prepare: Any) -> None:
    import datasets

    table = prepare([chat("a", "b")])
    assert datasets.Dataset.from_file(str(table.path / "samples.arrow"))[0]["token_ids"] == table.sample(0)[2].tolist()
