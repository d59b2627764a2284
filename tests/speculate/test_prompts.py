"""Prompts: benchmarks by name, turns of conversations, and never what was trained on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_train.errors import InputError
from dflash_train.speculate.prompts import BENCHMARKS, SPARE, PromptSet, name_prompts, read_prompts, source_labels
from dflash_train.stage1_target.conversations import first_turn_group
from dflash_train.stage1_target.sample_table import hash_tokens
from dflash_train.stage1_target.tokenization import ChatRenderer
from dflash_train.store.manifest import hash_id

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]}
    for text in ("one", "two", "three")
]
BENCHMARK_ROWS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "gsm8k": (("main", "test"), [{"question": "Two {apples}?", "answer": "#### 2"}]),
    "math500": ((None, "test"), [{"problem": "What is $\\frac{1}{2}$?", "solution": "", "answer": "", "level": 1}]),
    "humaneval": ((None, "test"), [{"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "pass"}]),
    "mbpp": (("sanitized", "test"), [{"task_id": 2, "prompt": "Write a function.", "code": "", "test_list": ["a"]}]),
    "mt-bench": ((None, "train"), [{"prompt_id": 1, "category": "writing", "prompt": ["first", "second"]}]),
}
ASKED = {
    "gsm8k": ["Two {apples}?\nPlease reason step by step, and put your final answer within \\boxed{}."],
    "math500": ["What is $\\frac{1}{2}$?\nPlease reason step by step, and put your final answer within \\boxed{}."],
    "humaneval": [
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n\n```"
    ],
    "mbpp": ["Write a function."],
    "mt-bench": ["first", "second"],
}

Read = Callable[..., PromptSet]


@pytest.fixture
def read(tiny_tokenizer: Any) -> Read:
    def read(*sources: object, **settings: Any) -> PromptSet:
        return read_prompts([str(source) for source in sources], lambda: ChatRenderer(tiny_tokenizer, {}), **settings)

    return read


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(prompt_set: PromptSet) -> list[list[str]]:
    return [[turn[-1]["content"] for turn in prompt.turns] for prompt in prompt_set.prompts]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_read_from_the_hub_in_z_labs_words(
    name: str, read: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets

    (configuration, split), rows = BENCHMARK_ROWS[name]
    asked: list[Any] = []

    def load(hub_name: str, name: str | None = None, *, split: str) -> Any:
        asked.append((hub_name, name, split))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = read(name)
    assert asked == [(BENCHMARKS[name].hub_name, configuration, split)]
    assert questions(found) == [ASKED[name]]
    assert [prompt.source for prompt in found.prompts] == [name]
    copy = f"{name}={write_lines(tmp_path / 'copy.jsonl', rows)}"
    monkeypatch.undo()
    assert questions(read(copy)) == [ASKED[name]]
    assert source_labels([copy]) == [name]


@pytest.mark.parametrize(
    ("sources", "labels"),
    [
        (["runs/data.jsonl", "org/name", "folder/", "gsm8k"], ["data.jsonl", "name", "folder", "gsm8k"]),
        (["a/x/test.jsonl", "b/x/test.jsonl", "b/y/test.jsonl"], ["a/x/test.jsonl", "b/x/test.jsonl", "y/test.jsonl"]),
        (["test.jsonl", "a/test.jsonl", "./test.jsonl"], ["test.jsonl", "a/test.jsonl", "./test.jsonl"]),
        (["gsm8k", "gsm8k=a.jsonl", "gsm8k=b.jsonl"], ["gsm8k", "gsm8k=a.jsonl", "gsm8k=b.jsonl"]),
        (["a\\test.jsonl", "b\\test.jsonl"], ["a/test.jsonl", "b/test.jsonl"]),
    ],
)
def test_data_sets_of_one_base_name_have_labels_of_their_own(sources: list[str], labels: list[str]) -> None:
    assert source_labels(sources) == labels


def test_a_benchmarks_wording_is_z_labs(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parents[1] / ".oracle"
    if not (folder / "dflash").is_dir():
        pytest.skip("needs z-lab's dflash 0.1.0 in tests/.oracle")
    pytest.importorskip("requests")
    pytest.importorskip("tqdm")
    monkeypatch.syspath_prepend(str(folder))
    from dflash.benchmark import DATASETS

    for name, benchmark in BENCHMARKS.items():
        theirs, row = DATASETS[name], BENCHMARK_ROWS[name][1][0]
        configuration = () if benchmark.configuration is None else (benchmark.configuration,)
        assert theirs["load_args"] == (benchmark.hub_name, *configuration)
        assert theirs["load_kwargs"] == {"split": benchmark.split}
        said = theirs["format"](row)
        assert benchmark.turns(row) == (said if isinstance(said, list) else [said])


def test_without_network_a_benchmark_says_the_way_out(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*arguments: Any, **settings: Any) -> Any:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    wanted = (
        r"^gsm8k is openai/gsm8k on the Hugging Face hub, which could not be loaded: Couldn't reach [^\n]*. Run once "
    )
    with pytest.raises(InputError, match=wanted + "with network, or give a copy of it: --data gsm8k=FILE.$"):
        read("gsm8k")


def test_a_copy_with_other_columns_is_refused(read: Read, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gsm8k has a column 'question'. Give a copy of openai/gsm8k"):
        read(f"gsm8k={write_lines(tmp_path / 'a.jsonl', ROWS)}")


def test_turns_are_the_questions_and_tools_leave_the_first(read: Read, tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "assistant", "content": "no user"}]},
        {"messages": [{"role": "system", "content": "s"}, *ROWS[0]["messages"], *ROWS[1]["messages"]]},
        {"messages": [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "1"}]},
    ]
    found = read(write_lines(tmp_path / "a.jsonl", rows))
    assert questions(found) == [["one", "two"], ["q"]]
    assert found.prompts[0].turns[0][0] == {"role": "system", "content": "s"}
    assert questions(read(tmp_path / "a.jsonl", max_turns=1)) == [["one"], ["q"]]


def test_prompts_need_no_answers_but_turns(read: Read, tmp_path: Path) -> None:
    asked = write_lines(tmp_path / "asked.jsonl", [{"prompt": "half \ud800"}, {"prompt": "q"}])
    bench = write_lines(tmp_path / "bench.jsonl", [{"question_id": 1, "turns": ["q", "q2"]}])
    assert questions(read(asked)) == [["q"]]
    assert questions(read(bench)) == [["q", "q2"]]
    both = read(bench, write_lines(tmp_path / "other.jsonl", ROWS), limit=1)
    assert questions(both)[0] == ["q", "q2"] and len(questions(both)) == 2, "one of each"
    with pytest.raises(InputError, match="prompts need turns"):
        read(write_lines(tmp_path / "text.jsonl", [{"text": "a"}]))
    with pytest.raises(InputError, match="No row of .* has a user turn"):
        read(write_lines(tmp_path / "none.jsonl", [{"conversations": []}]))
    with pytest.raises(InputError, match="holds no rows"):
        read(write_lines(tmp_path / "empty.jsonl", []))


def test_a_limit_takes_a_sample_that_the_order_of_the_rows_does_not_change(read: Read, tmp_path: Path) -> None:
    rows = [{"prompt": "word " * number} for number in range(1, 41)]
    data = [write_lines(tmp_path / f"{name}.jsonl", some) for name, some in (("up", rows), ("down", rows[::-1]))]
    up, down = ([asked for [asked] in questions(read(path, limit=10))] for path in data)
    assert len(up) == 10 and up == down[::-1], "in the order of the rows"
    assert set(up) > {asked for [asked] in questions(read(data[0], limit=5))}
    assert 5 < sum(len(asked.split()) for asked in up) / 10 < 36, "neither the first nor the last"
    assert questions(read(data[0], limit=40)) == questions(read(data[0]))


def test_a_sample_is_filled_up_where_data_of_token_ids_turns_out_to_be_trained_on(read: Read, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", [{"prompt": f"question {number}"} for number in range(60)])
    everything = read(data).prompts
    trained = {hash_tokens(np.asarray(prompt.token_ids, np.int32)) for prompt in everything[3:]}
    found = read(data, limit=3, trained_groups=trained)
    assert 3 * SPARE < 57, "more than are kept at first"
    assert [prompt.text for prompt in found.prompts] == [prompt.text for prompt in everything[:3]]
    assert found.num_trained >= len(found.trained) == 3, "those that were rendered on the way"


def test_a_sample_has_no_prompt_twice_and_knows_follow_ups_apart(read: Read, tmp_path: Path) -> None:
    again = [{"turns": ["again", f"and {number}"]} for number in range(100)]
    data = write_lines(tmp_path / "a.jsonl", [*again, {"turns": ["other", "?"]}])
    assert len({tuple(asked) for asked in questions(read(data, limit=8))}) == 8
    assert sorted(questions(read(data, limit=2, max_turns=1))) == [["again"], ["other"]]
    assert len(read(data, max_turns=1).prompts) == 101, "all are asked where all are wanted"


def test_what_was_trained_on_is_left_out_before_the_limit_counts(read: Read, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", ROWS)
    trained = {first_turn_group(ROWS[0]["messages"]), first_turn_group(ROWS[2]["messages"])}
    found = read(data, limit=1, trained_groups=trained)
    assert questions(found) == [["two"]]
    assert name_prompts(found.trained, found.num_trained) == "«one», «three»"
    allowed = read(data, trained_groups=trained, allow_trained=True)
    assert len(allowed.prompts) == 3
    assert name_prompts(allowed.trained, allowed.num_trained) == "«one», «three»"
    with pytest.raises(
        InputError, match="All prompts of .* are in the drafter's training data: «one»; give prompts that were not"
    ):
        read(write_lines(tmp_path / "b.jsonl", ROWS[:1]), trained_groups=trained)


def test_a_benchmarks_question_is_recognised_without_its_wording(read: Read, tmp_path: Path) -> None:
    copy = write_lines(tmp_path / "copy.jsonl", [{"question": "two apples"}, {"question": "three"}])
    trained = {first_turn_group([{"role": "user", "content": "two apples"}])}
    found = read(f"gsm8k={copy}", trained_groups=trained)
    assert (len(found.prompts), found.num_trained) == (1, 1)


def test_training_data_given_as_token_ids_is_recognised(read: Read, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", ROWS)
    prompt = read(data).prompts[1]
    group = hash_id(np.asarray(prompt.token_ids, "<i4").tobytes())  # as `dflash extract` makes it of input_ids
    assert questions(read(data, trained_groups={group})) == [["one"], ["three"]]


def test_prompts_without_room_are_skipped(read: Read, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", [*ROWS, {"messages": [{"role": "user", "content": "a b " * 99}]}])
    found = read(data, max_tokens=60)
    assert (len(found.prompts), found.num_skipped) == (3, 1)
    with pytest.raises(InputError, match="None of the 4 prompts .* leaves room for the new tokens"):
        read(data, max_tokens=3)
