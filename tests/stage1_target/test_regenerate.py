"""Answers of the target itself: in process with a tiny target, and by a real server process that misbehaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

from dflash_train.cli import main
from dflash_train.errors import InputError
from dflash_train.stage1_target import answering, asking, chat_server, generator, generator_pool, messages, preparation
from dflash_train.stage1_target.answer_file import AnswerFile
from dflash_train.stage1_target.answering import Run
from dflash_train.stage1_target.chat_server import BadRequest, ChatServer, Refused
from dflash_train.stage1_target.conversations import RowError
from dflash_train.stage1_target.dialogue import DialogueReader, Exchange, Outcome, make_dialogue
from dflash_train.stage1_target.events import Answering, Note
from dflash_train.stage1_target.extract_config import ExtractConfig
from dflash_train.stage1_target.generation import settings_path
from dflash_train.stage1_target.generator import (
    Generate,
    Generated,
    Generating,
    Generator,
    SeededChoice,
    as_message,
    run_generator,
)
from dflash_train.stage1_target.regenerate import RegenerateConfig, RegenerateResult, make_settings, regenerate
from dflash_train.stage1_target.samples import DataConfig, prepare_samples
from dflash_train.stage1_target.sources import open_source
from dflash_train.stage1_target.target import Target, load_target, make_target
from dflash_train.stage1_target.target_config import TargetConfig, load_tokenizer
from dflash_train.stage1_target.tokenization import ChatRenderer, hash_chat_template

torch.set_num_threads(1)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with many tokens that end an answer, so that some answers end."""
    folder = tmp_path_factory.mktemp("target") / "target"
    shutil.copytree(tiny_target("qwen3"), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *range(350, 400)]}))
    return folder


@pytest.fixture
def config(target: Path, tmp_path: Path) -> RegenerateConfig:
    rows = [{"messages": [user(f"question {n} " + "one two " * (n % 7)), assistant("other")]} for n in range(14)]
    rows += [
        {"messages": [{"role": "system", "content": "Be short."}, user(f"a {n}"), assistant("b"), user("c")]}
        for n in range(6)
    ]
    rows += [rows[3], {"messages": [assistant("nobody asks")]}]
    return RegenerateConfig(
        target=TargetConfig(name=str(target)),
        source=str(write_rows(tmp_path / "questions.jsonl", rows)),
        output=tmp_path / "answers.jsonl",
        devices="cpu",
        temperature=1.0,
        max_new_tokens=12,
        batch_size=4,
    )


# Dialogues


def test_where_the_data_answers_the_target_answers() -> None:
    system = {"role": "system", "content": "Be short."}
    messages = [system, user("a"), assistant("A"), user("b"), assistant("B"), assistant("B2"), user("c")]
    dialogue = make_dialogue("messages", {"messages": messages})
    assert dialogue.turns == [[system, user("a")], [user("b")], [user("c")]]
    other = make_dialogue("messages", {"messages": [*messages[:2], assistant("Z"), *messages[3:5], messages[6]]})
    assert other.key == dialogue.key, "the key is of what is asked, not of what was answered"
    assert make_dialogue("turns", {"turns": ["x", "y"]}).turns == [[user("x")], [user("y")]]
    assert make_dialogue("prompt+response", {"prompt": "x", "response": "r"}).turns == [[user("x")]]
    assert make_dialogue("messages", {"messages": [assistant("hello"), user("x")]}).turns == [[user("x")]]


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([assistant("hello")], "no user turn"),
        ([user("a"), {"role": "tool", "content": "4"}, assistant("b")], "tools were called"),
        ([user("half \ud800")], "half a surrogate pair"),
    ],
)
def test_rows_that_ask_nothing_answerable_are_named(messages: Any, match: str) -> None:
    with pytest.raises(RowError, match=match):
        make_dialogue("messages", {"messages": messages})


def test_an_unfinished_or_empty_answer_or_a_tool_call_ends_a_conversation() -> None:
    dialogue = make_dialogue("turns", {"turns": ["x", "y", "z"]})

    def after(*answers: tuple[dict[str, Any], bool], keep: bool = False) -> tuple[int, str]:
        exchange = Exchange(dialogue, keep)
        for message, finished in answers:
            assert not exchange.done
            exchange.answer(message, 5, finished)
        assert exchange.done and exchange.outcome().num_tokens == 5 * len(answers)
        return len(exchange.outcome().messages), str(exchange.outcome().reason)

    good = (assistant("A"), True)
    assert after(good, good, good) == (6, "None")
    assert after(good, (assistant("B"), False)) == (2, "an answer had not ended at the limit of new tokens")
    assert after(good, (assistant("B"), False), keep=True) == (4, "an answer had not ended at the limit of new tokens")
    last = (6, "the last answer had not ended at the limit of new tokens")
    assert after(good, good, (assistant("C"), False), keep=True) == last
    assert after((assistant(""), True)) == after((assistant(" \n\n"), True)) == (0, "an answer is empty")
    assert after(good, (assistant("\t") | {"reasoning_content": " "}, True)) == (2, "an answer is empty")
    call = {**assistant(""), "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert after((call, True)) == (2, "the target called a tool, whose result is not known")


def test_empty_questions_are_not_asked_nor_the_turns_after_them(tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": [{"role": "user"}]}, {"messages": [user(" \n\t ")]}, {"messages": [user("")]}]
    rows += [{"messages": [user("a"), assistant("A"), user("   "), assistant("B"), user("c")]}]
    reader = DialogueReader(open_source(str(write_rows(tmp_path / "rows.jsonl", rows))))
    [dialogue] = reader.read()
    assert reader.unusable == {"a question is empty": 3}
    exchange = Exchange(dialogue, False)
    exchange.answer(assistant("A"), 5, True)
    assert exchange.done and exchange.outcome().messages == [user("a"), assistant("A")]
    assert (exchange.outcome().reason, exchange.outcome().failed) == ("a question is empty", False)
    assert make_dialogue("messages", {"messages": [user(" "), user("a")]}).asks(0)
    with pytest.raises(InputError, match=r"commonest reason \(1 time\): a question is empty\."):
        list(DialogueReader(open_source(str(write_rows(tmp_path / "empty.jsonl", [{"prompt": ""}])))).read())


def test_the_seed_of_an_answer_is_of_run_conversation_and_turn_alone() -> None:
    first, other = (make_dialogue("turns", {"turns": [text, "and"]}) for text in ("x", "y"))
    seeds = [one.seed(run, turn) for one in (first, other) for run in (0, 1) for turn in (0, 1)]
    assert len(set(seeds)) == 8 and all(0 <= seed < 2**63 for seed in seeds)
    again = make_dialogue("messages", {"messages": [user("x"), assistant("of another"), user("and")]})
    assert [again.seed(run, turn) for run in (0, 1) for turn in (0, 1)] == seeds[:4]
    assert first.seed(0, 0) == 3863385837217498480, "files of earlier versions are filled up with the same draws"


# In process


def decode_greedily(target: Target, ids: list[int], stop_ids: Collection[int]) -> tuple[list[int], bool]:
    """At most 12 new tokens, everything computed again for each; whether the last of them ends the answer."""
    new: list[int] = []
    while len(new) < 12 and not (new and new[-1] in stop_ids):
        new.append(int(target.model(torch.tensor([[*ids, *new]])).logits[0, -1].argmax()))
    return new, new[-1] in stop_ids


def test_answers_are_those_of_plain_greedy_decoding(config: RegenerateConfig) -> None:
    target = load_target(config.target, (0,), "cpu")
    generator = Generator(target, replace(config, temperature=0.0, keep_unfinished=True))
    dialogues = [make_dialogue("prompt", {"prompt": "one two " * n + "three"}) for n in (1, 9, 4)]
    for dialogue, outcome in zip(dialogues, generator.run(dialogues), strict=True):
        ids = target.tokenizer.apply_chat_template(dialogue.turns[0], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        new, finished = decode_greedily(target, ids, generator._stop_ids)
        assert outcome.messages[-1]["content"] == target.tokenizer.decode(new[: len(new) - finished])
        assert outcome.num_tokens == len(new) and outcome.num_changed == 0


def test_a_second_turn_is_asked_with_the_targets_own_first_answer(config: RegenerateConfig) -> None:
    """In process, greedily, in a batch with conversations of another length; thinking is off, as the template is told."""
    target = load_target(config.target, (0,), "cpu")
    template = target.tokenizer.chat_template
    target.tokenizer.chat_template = template + (
        "{% if add_generation_prompt and enable_thinking is false %}{{ '<think></think>' }}{% endif %}"
    )
    try:
        config = replace(
            config, temperature=0.0, keep_unfinished=True, chat_template_arguments={"enable_thinking": False}
        )
        texts = [["Count from one to ten.", "and"], ["one two three", "Which river?"], ["alone"]]
        dialogues = [make_dialogue("turns", {"turns": turns}) for turns in texts]
        generator, num_two = Generator(target, config), 0
        for turns, outcome in zip(texts, generator.run(dialogues), strict=True):
            for number in range(len(outcome.messages) // 2):
                asked = [*outcome.messages[: 2 * number], user(turns[number])]
                text = target.tokenizer.apply_chat_template(
                    asked, tokenize=False, add_generation_prompt=True, enable_thinking=False
                )
                assert text.endswith("<think></think>")
                prompt = target.tokenizer(text, add_special_tokens=False)["input_ids"]
                new, finished = decode_greedily(target, prompt, generator._stop_ids)
                answer = target.tokenizer.decode(new[: len(new) - finished])
                assert outcome.messages[2 * number + 1] == assistant(answer)
                num_two += number
        assert num_two, "some conversation got to its second turn"
    finally:
        target.tokenizer.chat_template = template


@pytest.mark.parametrize("kind", ["recurrent", "attention"])
def test_prompts_of_a_recurrent_target_share_a_batch_only_where_they_are_equally_long(
    kind: str, config: RegenerateConfig, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding would go through the RG-LRU layers of RecurrentGemma, which take no mask."""
    target = load_target(config.target, (0,), "cpu")
    if kind == "recurrent":
        shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
        shape |= {
            "num_key_value_heads": 1,
            "intermediate_size": 96,
            "attention_window_size": 16,
            "logits_soft_cap": 1e6,
        }
        torch.manual_seed(0)
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.RecurrentGemmaConfig(vocab_size=len(tiny_tokenizer), **shape, **ids)
        ).eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False).normal_(std=0.5)
        target = make_target(TargetConfig(name="tiny-recurrent"), model, tiny_tokenizer, (0,))
    answerer = Generator(target, replace(config, temperature=0.0, keep_unfinished=True))
    texts = ["one", "one two three four", "two", "ten nine eight seven", "three four five six seven eight nine"]
    dialogues = [make_dialogue("prompt", {"prompt": text}) for text in texts]
    alone = [outcome for dialogue in dialogues for outcome in answerer.run([dialogue])]
    assert len({str(outcome.messages[-1]["content"]) for outcome in alone}) == len(texts)
    sizes: list[int] = []
    generate_tokens = generator.generate_tokens

    def counting(target: Target, prompts: Any, *arguments: Any) -> list[list[int]]:
        sizes.append(len(prompts))
        return generate_tokens(target, prompts, *arguments)

    monkeypatch.setattr(generator, "generate_tokens", counting)
    assert answerer.run(dialogues) == alone
    assert sizes == ([2, 2, 1] if kind == "recurrent" else [5])


def test_draws_follow_the_distribution_and_only_their_own_seed(config: RegenerateConfig) -> None:
    torch.manual_seed(0)
    scores = torch.randn(1, 8)
    config = replace(config, temperature=0.8, top_k=5, top_p=0.9)
    rows = scores.expand(4000, 8).clone()
    drawn = SeededChoice(config, range(4000), 1)(torch.zeros(4000, 1), rows).argmax(-1)
    probabilities = (scores[0] / 0.8).softmax(0)
    best = probabilities.argsort(descending=True)[:5]
    kept = probabilities[best] / probabilities[best].sum()
    kept = kept * ((kept.cumsum(0) - kept) < 0.9)
    kept = kept / kept.sum()
    counts = torch.bincount(drawn, minlength=8) / 4000
    assert set(drawn.tolist()) == set(best[kept > 0].tolist())
    torch.testing.assert_close(counts[best], kept, atol=0.03, rtol=0)  # four standard deviations
    alone = SeededChoice(config, [77], 1)(torch.zeros(1, 1), scores).argmax(-1)
    assert int(alone) == int(drawn[77])


def test_every_turn_draws_with_its_own_seed(config: RegenerateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[int], int]] = []

    class Noting(SeededChoice):
        def __init__(self, config: RegenerateConfig, seeds: Sequence[int], num_steps: int) -> None:
            asked.append((list(seeds), num_steps))
            super().__init__(config, seeds, num_steps)

    monkeypatch.setattr(generator, "SeededChoice", Noting)
    # at so low a temperature the draws are the greedy ones, which end some first answers
    config = replace(config, seed=5, temperature=1e-6, max_new_tokens=40)
    dialogues = [make_dialogue("turns", {"turns": turns}) for turns in (["one", "two"], ["three", "four"], ["five"])]
    outcomes = Generator(load_target(config.target, (0,), "cpu"), config).run(dialogues)
    two = [dialogue for dialogue, outcome in zip(dialogues, outcomes, strict=True) if len(outcome.messages) == 4]
    assert two, "some conversation got to its second turn"
    (first, num_steps), (second, _) = asked
    assert num_steps == 40
    assert set(first) == {dialogue.seed(5, 0) for dialogue in dialogues}
    assert {dialogue.seed(5, 1) for dialogue in two} <= set(second)


def answer_here(config: RegenerateConfig, limit: int | None = None, batch_size: int = 100) -> list[dict[str, Any]]:
    """Answer the data in this very process and write it as `regenerate` does; the rows."""
    generator = Generator(load_target(config.target, (0,), "cpu"), config)
    dialogues = list(DialogueReader(open_source(config.source), limit).read())
    file = AnswerFile(config.output, make_settings(config, None))
    for first in range(0, len(dialogues), batch_size):
        file.add(generator.run(dialogues[first : first + batch_size]))
    file.close()
    return read_rows(config.output)


def by_id(rows: list[dict[str, Any]]) -> dict[str, Any]:
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_batches_workers_resumption_and_a_killed_worker_change_nothing(
    config: RegenerateConfig, tmp_path: Path
) -> None:
    wanted = by_id(answer_here(replace(config, output=tmp_path / "whole.jsonl")))
    assert 5 < len(wanted) < 20, "the tiny target ends some answers and not others"
    assert all(row["messages"][-1]["role"] == "assistant" for row in wanted.values())
    answer_here(config, limit=5, batch_size=2)
    killed: list[int] = []

    def kill(event: Any) -> None:
        if not killed and not isinstance(event, Note):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            killed.append(
                next(int(one) for one in children if b"run_process" in Path(f"/proc/{one}/cmdline").read_bytes())
            )
            os.kill(killed[0], signal.SIGKILL)

    result = regenerate(replace(config, devices="cpu:2", batch_size=2), kill)
    assert result.exit_status == 1 and "was killed by SIGKILL" in result.failures[0]
    assert result.num_new == 15 and result.num_duplicates == 1, "the other worker did the rest"
    assert result.left_out["no user turn in this row"] == 1
    assert result.num_conversations + result.left_out.total() == 21
    assert by_id(read_rows(config.output)) == wanted
    again = regenerate(config)
    assert (again.outcome, again.num_new, again.num_conversations) == ("finished", 0, len(wanted))
    assert again.lines()[-1] == f"{config.output} holds {len(wanted)} conversations"


def test_extract_takes_the_answers_and_warns_of_what_differs(
    config: RegenerateConfig, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    config = replace(config, chat_template_arguments={"enable_thinking": False})
    rows = answer_here(config)
    data = DataConfig(source=str(config.output), chat_template_arguments=config.chat_template_arguments)
    table = prepare_samples(data, tiny_tokenizer, tmp_path / "cache")
    assert len(table) == len(rows) and not table.quarantined

    def warnings(**changes: Any) -> list[str]:
        notes: list[Any] = []
        values: dict[str, Any] = {"target": config.target, "data": data, "store": tmp_path / "s", "devices": "cpu"}
        extract = ExtractConfig(**{**values, **changes}, num_taps=2, sample_cache=tmp_path / "cache", dry_run=True)
        prepared = preparation.prepare(extract, notes.append)
        [made] = preparation.segment_attributes(prepared)["generation"]
        assert (made["temperature"], made["target"]) == (1.0, config.target.name)
        return [note.text for note in notes if isinstance(note, Note) and "regenerated" in note.text]

    assert warnings() == []
    assert warnings(data=DataConfig(source=str(tmp_path), chat_template_arguments={"enable_thinking": False})) == []
    [text] = warnings(data=replace(data, chat_template_arguments={}))
    assert """with --chat-template-arguments '{"enable_thinking": false}', not '{}'""" in text
    revised = json.loads(settings_path(config.output).read_text()) | {"revision": "v1"}
    settings_path(config.output).write_text(json.dumps(revised))
    assert warnings() == [] and warnings(target=replace(config.target, revision="v1")) == []
    [text] = warnings(target=replace(config.target, revision="v2"))
    assert "were regenerated by revision 'v1' of the target, not by 'v2'" in text and "give the same --revision" in text
    copy = tmp_path / "copy"
    shutil.copytree(config.target.name, copy)
    [text] = warnings(target=TargetConfig(name=str(copy)))
    assert "were regenerated by the target" in text and str(copy) in text


def test_an_edited_chat_template_is_refused_at_a_resume_and_warned_of_by_extract(
    config: RegenerateConfig, tmp_path: Path
) -> None:
    copy = tmp_path / "target"
    shutil.copytree(config.target.name, copy)
    config = replace(config, target=TargetConfig(name=str(copy)), keep_unfinished=True)
    assert regenerate(replace(config, max_conversations=2)).num_new == 2
    record = settings_path(config.output)
    made = json.loads(record.read_text())
    assert made["chat_template_hash"] == hash_chat_template(load_tokenizer(config.target))
    template = copy / "chat_template.jinja"
    template.write_text("{{ '' }}" + template.read_text())
    edited = hash_chat_template(load_tokenizer(config.target))
    with pytest.raises(
        InputError, match=f"chat_template_hash: found '{made['chat_template_hash']}', wanted '{edited}'"
    ):
        regenerate(config)

    def warnings() -> list[str]:
        notes: list[Any] = []
        data = DataConfig(source=str(config.output))
        extract = ExtractConfig(target=config.target, data=data, store=tmp_path / "s", devices="cpu", num_taps=2)
        preparation.prepare(replace(extract, sample_cache=tmp_path / "cache", dry_run=True), notes.append)
        return [note.text for note in notes if isinstance(note, Note) and "regenerated" in note.text]

    [text] = warnings()
    assert f"another chat template than this target's (hash {made['chat_template_hash']}, here {edited})" in text
    unknown = {**made, "chat_template_hash": None}
    earlier = {name: value for name, value in made.items() if name != "chat_template_hash"}
    for values in (unknown, earlier):
        record.write_text(json.dumps(values))
        assert warnings() == []
        assert regenerate(replace(config, max_conversations=2)).num_conversations == 2


class OneBatch:
    """A worker's pipe: a batch, and after so many steps the end."""

    def __init__(self, batch: Generate, num_steps: int) -> None:
        self._commands, self._num_steps = [batch, messages.Finish()], num_steps
        self.sent: list[Any] = []

    def recv(self) -> Any:
        return self._commands.pop(0)

    def poll(self) -> bool:
        self._num_steps -= 1
        return self._num_steps < 0

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_a_batch_tells_how_far_it_is_and_is_dropped_at_a_stop(
    config: RegenerateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "_SAY_SECONDS", 0.0)
    batch = Generate(0, list(DialogueReader(open_source(config.source), 4).read()))
    stopped, whole = OneBatch(batch, 3), OneBatch(batch, 1000)
    for connection in (stopped, whole):
        run_generator(connection, config, "cpu")  # type: ignore[arg-type]
    assert stopped.sent == [messages.Loaded(), *(Generating(4, step) for step in (0, 1, 2))]
    assert whole.sent[:4] == stopped.sent
    assert isinstance(whole.sent[-1], Generated) and len(whole.sent[-1].outcomes) == 4


def test_answers_under_way_are_told_not_too_often(config: RegenerateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        popen = type("Popen", (), {"returncode": 0})

        def send(self, message: Any) -> None:
            if isinstance(message, Generate):
                rounds[2] = [(self, Generated(message.number, outcomes(message.dialogues)))]

    worker = Worker()

    class Group:
        def __init__(self) -> None:
            self.running = [worker]

        def wait(self, seconds: float) -> list[Any]:
            found = rounds.pop(0)
            if not rounds:
                self.running = []
            return found

    def outcomes(dialogues: list[Any]) -> list[Any]:
        return [Exchange(dialogue, False).outcome() for dialogue in dialogues]

    told = [(worker, Generating(4, step)) for step in (5, 6)]
    rounds: list[list[Any]] = [[(worker, messages.Loaded())], told, [], [(worker, None)]]
    monkeypatch.setattr(generator_pool, "start_processes", lambda *_arguments: nullcontext(Group()))
    notes: list[str] = []
    config = replace(config, batch_size=100)
    regenerate(config, lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    assert [note for note in notes if "under way" in note] == ["4 answers under way: 5 of at most 12 tokens"]


def test_prompts_without_room_for_all_new_tokens_have_a_limit_of_their_own(config: RegenerateConfig) -> None:
    target = load_target(config.target, (0,), "cpu")  # 256 positions
    generator = Generator(target, replace(config, keep_unfinished=True, max_new_tokens=200))
    texts = ["short", "one two " * 30, "one two " * 400]
    short, long, endless = generator.run([make_dialogue("prompt", {"prompt": text}) for text in texts])
    assert len(long.messages) == len(short.messages) == 2
    assert endless.messages == [] and endless.reason == "the conversation is longer than the target has positions"


def test_out_of_memory_goes_on_in_halves(config: RegenerateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(load_target(config.target, (0,), "cpu"), replace(config, keep_unfinished=True))
    dialogues = [make_dialogue("prompt", {"prompt": f"question {n}"}) for n in range(5)]
    wanted = generator.run(dialogues)
    new_tokens, sizes, most = Generator._new_tokens, [], 2

    def small(self: Generator, prompts: list[Any], limit: int) -> list[list[int]]:
        sizes.append(len(prompts))
        if len(prompts) > most:
            raise torch.OutOfMemoryError
        return new_tokens(self, prompts, limit)

    monkeypatch.setattr(Generator, "_new_tokens", small)
    assert generator.run(dialogues) == wanted
    assert sizes == [5, 2, 3, 1, 2]
    most = 0
    outcomes = generator.run(dialogues)
    assert {(outcome.failed, outcome.reason) for outcome in outcomes} == {
        (True, "an answer does not fit into the memory of the device")
    }


@pytest.mark.parametrize(
    ("opening", "text", "wanted"),
    [
        ("", "Hello.", {"content": "Hello."}),
        ("<think>\n", "hm\n</think>\n\nHello.", {"content": "<think>\nhm\n</think>\n\nHello."}),
    ],
)
def test_an_answer_becomes_the_message_that_renders_to_it(
    opening: str, text: str, wanted: dict[str, str], tiny_tokenizer: Any
) -> None:
    renderer = ChatRenderer(tiny_tokenizer, {})
    prompt = renderer.render([user("x")], add_generation_prompt=True) + opening
    message, changed = as_message(renderer, [user("x")], None, prompt, text)
    assert (message, changed) == ({"role": "assistant", **wanted}, False)
    assert as_message(renderer, [user("x")], None, "another prompt", text)[1]


THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message.reasoning_content %}"
    "{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ message['content'].split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("opening", "text", "wanted"),
    [
        ("", "<think>\nhm,\nso\n</think>\n\nHello.", {"content": "Hello.", "reasoning_content": "hm,\nso"}),
        ("<think>\n", "hm\n</think>\n\nHello.", {"content": "Hello.", "reasoning_content": "hm"}),
        ("", "<think>\na <think> b\n</think>\n\nHello.", {"content": "Hello.", "reasoning_content": "a <think> b"}),
        ("<think>\n", "a <think> b\n</think>\n\nHello.", {"content": "Hello.", "reasoning_content": "a <think> b"}),
        ("", "Hello.", {"content": "Hello."}),
    ],
)
def test_thinking_is_split_off_where_the_template_renders_it_apart(
    opening: str, text: str, wanted: dict[str, str], target: Path
) -> None:
    tokenizer = load_tokenizer(TargetConfig(name=str(target)))
    tokenizer.chat_template = THINKING
    renderer = ChatRenderer(tokenizer, {})
    prompt = renderer.render([user("x")], add_generation_prompt=True) + opening
    message, changed = as_message(renderer, [user("x")], None, prompt, text)
    assert (message, changed) == ({"role": "assistant", **wanted}, False)
    assert renderer.render([user("x"), message]) == f"{prompt}{text}<|im_end|>\n"


def test_an_answer_that_the_template_rewrites_is_kept_as_it_is_and_counted(
    config: RegenerateConfig, tiny_tokenizer: Any
) -> None:
    target = load_target(config.target, (0,), "cpu")
    template, target.tokenizer.chat_template = target.tokenizer.chat_template, THINKING.replace("'content']", "'role']")
    try:
        answerer = Generator(target, replace(config, keep_unfinished=True))
        [outcome] = answerer.run([make_dialogue("prompt", {"prompt": "one"})])
    finally:
        target.tokenizer.chat_template = template
    assert outcome.num_changed == 1 and outcome.messages[-1]["content"]


# By a server


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., str]]:
    processes = []

    def start(seconds: float = 0.0, *key_and_models: str) -> str:
        folder = tmp_path / "server"
        folder.mkdir()
        script = Path(__file__).with_name("flaky_server.py")
        words = [sys.executable, str(script), str(folder), str(seconds), *key_and_models]
        processes.append(subprocess.Popen(words))
        wait_for(lambda: (folder / "port").exists())
        return f"http://127.0.0.1:{(folder / 'port').read_text()}"

    yield start
    for process in processes:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.02)


@pytest.fixture
def by_server(config: RegenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RegenerateConfig:
    monkeypatch.setattr(chat_server, "FIRST_WAIT", 0.02)
    rows = [{"prompt": f"question {n}"} for n in range(60)]
    rows += [{"prompt": "endless"}, {"prompt": "please think"}]
    return replace(
        config,
        source=str(write_rows(tmp_path / "prompts.jsonl", rows)),
        target=TargetConfig(name="org/name"),
        devices=None,
        requests=6,
        request_seconds=1.0,
        top_k=20,
        chat_template_arguments={"enable_thinking": False},
    )


def test_a_flaky_server_loses_no_answer(
    by_server: RegenerateConfig, start_server: Callable[..., str], tmp_path: Path
) -> None:
    result = regenerate(replace(by_server, server=start_server(0.005)))
    assert result.failures == [] and result.outcome == "finished"
    assert result.num_retries > 10 and f"{result.num_retries} requests repeated" in result.lines()
    rows = read_rows(by_server.output)
    answers = {row["messages"][0]["content"]: row["messages"][1] for row in rows}
    assert len(rows) == len(answers) == 61
    assert all(answers[f"question {n}"] == assistant(f"answer to question {n}") for n in range(60))
    assert answers["please think"]["reasoning_content"] == "hm"
    assert result.left_out == {"an answer had not ended at the limit of new tokens": 1}
    assert int((tmp_path / "server" / "most_in_flight").read_text()) <= 6 + 5  # abandoned tries may still sleep there
    requests = read_rows(tmp_path / "server" / "requests.jsonl")
    assert all(request["chat_template_kwargs"] == {"enable_thinking": False} for request in requests)
    assert {request["model"] for request in requests} == {"the-model"}
    assert len({request["seed"] for request in requests}) == 62, "a seed a conversation, the same when tried again"
    made = json.loads(settings_path(by_server.output).read_text())
    assert (made["target"], made["server_model"], made["top_k"]) == ("org/name", "the-model", 20)
    assert made["chat_template_hash"] is None, "a name says nothing of a template"
    with pytest.raises(InputError, match=r"other settings \(temperature: found 1.0, wanted 0.5\); give the same"):
        regenerate(replace(by_server, server=result_server(tmp_path), temperature=0.5))


def result_server(tmp_path: Path) -> str:
    return f"127.0.0.1:{(tmp_path / 'server' / 'port').read_text()}/v1/"


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def test_every_setting_of_the_command_reaches_the_server(start_server: Callable[..., str], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": [user(text)]} for text in ("fine", "also fine", "endless")]
    rows[0]["tools"] = TOOLS
    (tmp_path / "key.txt").write_text("sesame\n")
    words = ["--target", "org/name", "--data", str(write_rows(tmp_path / "rows.jsonl", rows))]
    words += ["--output", str(tmp_path / "answers.jsonl"), "--server", start_server(0.0, "sesame", "one", "other")]
    words += ["--temperature", "0.3", "--top-p", "0.8", "--top-k", "5", "--max-new-tokens", "99", "--seed", "3"]
    words += ["--chat-template-arguments", '{"enable_thinking": false}', "--api-key-file", str(tmp_path / "key.txt")]
    nameless = CliRunner().invoke(main, ["regenerate", *words])
    assert nameless.exit_code == 1 and "serves one, other; name one with --server-model." in nameless.output
    done = CliRunner().invoke(main, ["regenerate", *words, "--server-model", "other"])
    assert done.exit_code == 0, done.output
    dialogues = [make_dialogue("messages", row) for row in rows]
    wanted = {
        dialogue.turns[0][0]["content"]: {
            "model": "other",
            "messages": dialogue.turns[0],
            "max_tokens": 99,
            "temperature": 0.3,
            "top_p": 0.8,
            "top_k": 5,
            "seed": dialogue.seed(3, 0) & 0x7FFFFFFF,
            "repetition_penalty": 1.0,
            "min_p": 0.0,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        for dialogue in dialogues
    }
    wanted["fine"]["tools"] = TOOLS
    asked = {one["messages"][0]["content"]: one for one in read_rows(tmp_path / "server" / "requests.jsonl")}
    assert asked == wanted
    answers = {row["messages"][0]["content"]: row for row in read_rows(tmp_path / "answers.jsonl")}
    assert answers["fine"]["tools"] == TOOLS and "tools" not in answers["also fine"]
    made = json.loads(settings_path(tmp_path / "answers.jsonl").read_text())
    assert made["server_model"] == "other"
    assert done.output.splitlines()[-1].startswith(
        f"{tmp_path / 'answers.jsonl'} holds 2 conversations (3 done in this run, 21 tokens in "
    )


def test_silent_settings_are_not_sent_and_all_tokens_are_sampled_from(
    by_server: RegenerateConfig, start_server: Callable[..., str], tmp_path: Path
) -> None:
    config = replace(by_server, server=start_server(), top_k=0, chat_template_arguments={}, max_conversations=1)
    assert regenerate(config).num_new == 1
    asked = read_rows(tmp_path / "server" / "requests.jsonl")[-1]
    assert asked["top_k"] == -1 and not {"tools", "chat_template_kwargs"} & asked.keys()
    heads = read_rows(tmp_path / "server" / "heads.jsonl")
    assert heads[0] == {"request": "GET /v1/models", "key": None}
    assert heads[-1] == {"request": "POST /v1/chat/completions", "key": None}


@pytest.mark.parametrize(
    ("ending", "path"),
    [("", "/v1"), ("/", "/v1"), ("/v1", "/v1"), ("/v1/", "/v1"), ("/a/proxy/v2/", "/a/proxy/v2")],
)
def test_the_address_may_end_in_v1_or_not(
    ending: str, path: str, start_server: Callable[..., str], tmp_path: Path
) -> None:
    address = start_server()
    for url in (address + ending, address.removeprefix("http://") + ending):
        assert ChatServer(url, None, 5.0, 0).models() == ["the-model"]
    assert read_rows(tmp_path / "server" / "heads.jsonl") == [{"request": f"GET {path}/models", "key": None}] * 2


@pytest.mark.parametrize(("model", "request_line"), [(None, "GET /v1/models"), ("m", "POST /v1/chat/completions")])
def test_a_wrong_key_ends_the_run_at_once(
    model: str | None,
    request_line: str,
    by_server: RegenerateConfig,
    start_server: Callable[..., str],
    tmp_path: Path,
) -> None:
    key = tmp_path / "key.txt"
    key.write_text("guessed")
    config = replace(by_server, server=start_server(0.0, "sesame"), server_model=model, api_key_file=key)
    wanted = (
        rf"refuses {request_line}: HTTP 401 \(not with this key\)\. Check --server, --server-model and --api-key-file\."
    )
    with pytest.raises(InputError, match=wanted):
        regenerate(config)
    assert not config.output.exists()
    assert len(read_rows(tmp_path / "server" / "heads.jsonl")) <= (1 if model is None else 2 * config.requests)
    key.write_text("sesame")
    assert regenerate(replace(config, max_conversations=2)).num_new == 2


class Waits(threading.Event):
    """A stop that never comes, and notes how long it was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        return False


def ask(server: ChatServer, question: str) -> Any:
    return server.complete({"messages": [user(question)]})["message"]["content"]


def test_statuses_that_pass_are_tried_again_and_others_are_not(
    start_server: Callable[..., str], tmp_path: Path
) -> None:
    stop = Waits()
    server = ChatServer(start_server(), None, 5.0, 1, stop)
    passing = (408, 409, 425, 429, 500, 502, 503, 504)
    assert [ask(server, f"status {status}") for status in passing] == [f"answer to status {one}" for one in passing]
    assert server.num_retries == len(stop.seconds) == len(passing)
    for error, statuses in ((InputError, (401, 403, 404, 405)), (BadRequest, (400, 413, 422)), (Refused, (402, 501))):
        for status in statuses:
            with pytest.raises(error, match=f"HTTP {status}") as caught:
                ask(server, f"status {status}")
            assert type(caught.value) is error
    assert server.num_retries == len(passing)
    with pytest.raises(Refused, match="the server failed 2 times, at last: HTTP 503$"):
        ask(server, "status 503 always")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b'{"choices": []}', "its answer holds no choice with a message"),
        (b'{"choices": [{"message": "text"}]}', "its answer holds no choice with a message"),
        (b"[]", "its answer holds no choice with a message"),
        (b"<html>", "its answer is no JSON"),
        (None, "the connection ended within an answer"),
        (b"", "Remote end closed connection without response"),
        (b"SSH", "its answer is no HTTP"),
    ],
)
def test_what_a_server_sends_instead_of_an_answer_is_named_in_words(sent: bytes | None, reason: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    reply = head % 99 + b"{" if sent is None else sent if sent in (b"", b"SSH") else head % len(sent) + sent
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for _ in range(2):
                connection, _address = listening.accept()
                with connection:
                    connection.sendall(reply)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):  # closed with the request unread, it would be reset
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        server = ChatServer(f"127.0.0.1:{listening.getsockname()[1]}", None, 5.0, 0)
        with pytest.raises(Refused, match=f"^the server failed 1 time, at last: {reason}$"):
            ask(server, "a")
        listed = "its answer is no list of models" if "choice" in reason else reason
        with pytest.raises(InputError, match=rf"models \({listed}\); name|does not answer: {listed}\. Start"):
            server.models()
        thread.join()


def test_the_end_says_one_and_many(config: RegenerateConfig) -> None:
    counts: dict[str, Any] = dict.fromkeys(
        ("num_cut", "num_unfinished", "num_duplicates", "num_changed", "num_retries"), 1
    )
    one = RegenerateResult(
        outcome="finished", output=config.output, num_conversations=1, left_out=Counter(a=1), **counts
    ).lines()
    assert one == [
        "left out: a (1 time)",
        "1 conversation kept without the last turns (field `cut` says why)",
        "1 conversation kept with an unfinished last answer (field `cut` says so)",
        "1 row not answered again: an earlier row asks the same",
        "1 answer not rendered by the chat template as written; extract may set such aside",
        "1 request repeated",
        f"{config.output} holds 1 conversation",
    ]


def test_only_whole_seconds_of_retry_after_are_obeyed() -> None:
    waits = {"7": 7.0, " 0 ": 0.0, "²": None, "-1": None, "Wed, 21 Oct 2026 07:28:00 GMT": None, None: None}
    assert {value: chat_server._retry_after(value) for value in waits} == waits


def test_waits_double_unless_the_server_says_how_long(start_server: Callable[..., str]) -> None:
    stop = Waits()
    server = ChatServer(start_server(), None, 5.0, 8, stop)
    with pytest.raises(Refused, match="the server failed 9 times, at last: HTTP 500"):
        ask(server, "always broken")
    for seconds, longest in zip(stop.seconds, (0.5, 1, 2, 4, 8, 16, 30, 30), strict=True):
        assert longest / 2 <= seconds <= longest
    stop.seconds.clear()
    assert ask(server, "status 503 after 7") == "answer to status 503 after 7"
    assert ask(server, "status 429 after 3600") and ask(server, "status 429 after Friday")
    assert stop.seconds[:2] == [7.0, 60.0] and 0.25 <= stop.seconds[2] <= 0.5
    asked = (
        "the server asks to be left alone for 3,600 s (HTTP 429): requests are tried again after 60 s, 8 times at most"
    )
    assert server.long_wait == asked
    stop.seconds.clear()
    short = ChatServer(server.url, None, 5.0, 8, stop)
    assert ask(short, "status 429 after 60") and (stop.seconds, short.long_wait) == ([60.0], None)


def test_that_the_server_asks_for_a_long_wait_is_said_once(
    by_server: RegenerateConfig, start_server: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_server, "LONGEST_WAIT", 0.5)
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"status 429 after {wait}"} for wait in (3600, 7200, 0)])
    notes: list[str] = []
    config = replace(by_server, source=str(source), server=start_server())
    result = regenerate(config, lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    assert result.failures == []
    [told] = [note for note in notes if "left alone" in note]
    assert told.endswith(" s (HTTP 429): requests are tried again after 1 s, 6 times at most")


def test_reasoning_of_either_name_and_tool_calls_are_kept(
    by_server: RegenerateConfig, start_server: Callable[..., str], tmp_path: Path
) -> None:
    rows = [
        {"turns": turns} for turns in (["think", "fine"], ["ponder"], ["ponder and think"], ["call", "never asked"])
    ]
    config = replace(by_server, source=str(write_rows(tmp_path / "rows.jsonl", rows)), server=start_server())
    result = regenerate(config)
    answers = {row["messages"][0]["content"]: row["messages"][1:] for row in read_rows(config.output)}
    thought = assistant("answer to think") | {"reasoning_content": "hm"}
    assert answers["think"] == [thought, user("fine"), assistant("answer to fine")]
    assert answers["ponder"] == [assistant("answer to ponder") | {"reasoning_content": "well"}]
    assert answers["ponder and think"][0]["reasoning_content"] == "hm"
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    assert answers["call"] == [assistant("") | {"tool_calls": [call]}]
    assert result.num_cut == 1 and result.failures == []
    requests = read_rows(tmp_path / "server" / "requests.jsonl")
    assert [user("think"), thought, user("fine")] in [request["messages"] for request in requests]


def test_turns_are_asked_one_after_another_with_the_targets_own_answers(
    by_server: RegenerateConfig, start_server: Callable[..., str], tmp_path: Path
) -> None:
    rows = [{"messages": [user("a"), assistant("never seen"), user("b"), assistant("nor this")]}]
    source = write_rows(tmp_path / "two.jsonl", rows)
    regenerate(replace(by_server, source=str(source), server=start_server()))
    wanted = [user("a"), assistant("answer to a"), user("b"), assistant("answer to b")]
    assert [row["messages"] for row in read_rows(by_server.output)] == [wanted]
    asked = [request["messages"] for request in read_rows(tmp_path / "server" / "requests.jsonl")]
    assert asked[0] == wanted[:1] and asked[-1] == wanted[:3]
    seeds = [request["seed"] for request in read_rows(tmp_path / "server" / "requests.jsonl")]
    dialogue = make_dialogue("messages", rows[0])
    assert seeds[0] == dialogue.seed(0, 0) & 0x7FFFFFFF and seeds[-1] == dialogue.seed(0, 1) & 0x7FFFFFFF


@pytest.mark.parametrize("whole", [True, False])
def test_beside_a_server_the_template_of_a_local_target_is_recorded_where_it_has_one(
    by_server: RegenerateConfig, start_server: Callable[..., str], target: Path, tmp_path: Path, whole: bool
) -> None:
    folder = target if whole else tmp_path / "empty"
    folder.mkdir(exist_ok=True)
    config = replace(by_server, target=TargetConfig(name=str(folder)), server=start_server(), max_conversations=1)
    assert regenerate(config).num_new == 1
    wanted = hash_chat_template(load_tokenizer(config.target)) if whole else None
    assert json.loads(settings_path(config.output).read_text())["chat_template_hash"] == wanted


def test_what_a_content_filter_stopped_is_left_out_with_the_turns_after_it(
    by_server: RegenerateConfig, start_server: Callable[..., str], tmp_path: Path
) -> None:
    rows = [{"turns": turns} for turns in (["filtered", "never asked"], ["fine", "filtered", "never asked"], ["fine"])]
    source = write_rows(tmp_path / "filtered.jsonl", rows)
    config = replace(by_server, source=str(source), server=start_server(), keep_unfinished=True)
    result = regenerate(config)
    reason = "the server's content filter stopped an answer"
    assert (result.failures, result.left_out, result.num_cut, result.num_tokens) == ([], {reason: 1}, 1, 4 * 7)
    cut, whole = sorted(read_rows(config.output), key=lambda row: "cut" not in row)
    assert cut["cut"] == reason and cut["messages"] == whole["messages"] == [user("fine"), assistant("answer to fine")]
    [left_out] = read_rows(config.output.with_name(f"{config.output.name}.left-out"))
    assert left_out["reason"] == reason
    assert f"left out: {reason} (1 time)" in result.lines()


@pytest.mark.parametrize("keep", [False, True])
def test_an_answer_is_whole_only_where_the_server_says_that_it_ended_of_itself(
    keep: bool, by_server: RegenerateConfig, start_server: Callable[..., str], tmp_path: Path
) -> None:
    whole = ["stop", "tool_calls", "eos", "eos_token", "end_turn", "stop_sequence"]
    unfinished, unknown = ["length", "max_tokens"], ["function_call", "STOP?"]
    rows = [{"prompt": f"ends {reason}"} for reason in (*whole, *unfinished, *unknown)]
    source = write_rows(tmp_path / "ends.jsonl", rows)
    config = replace(by_server, source=str(source), server=start_server(), keep_unfinished=keep)
    result = regenerate(config)
    wanted = {f"the server ended an answer as '{reason}', which may not be whole": 1 for reason in unknown}
    if not keep:
        wanted["an answer had not ended at the limit of new tokens"] = 2
    assert (result.failures, result.left_out, result.num_unfinished) == ([], wanted, 2 if keep else 0)
    kept = {row["messages"][0]["content"].removeprefix("ends "): "cut" in row for row in read_rows(config.output)}
    assert kept == dict.fromkeys(whole, False) | (dict.fromkeys(unfinished, True) if keep else {})


def test_what_ends_with_a_kept_unfinished_answer_is_told_from_what_lacks_turns(
    by_server: RegenerateConfig, start_server: Callable[..., str], tmp_path: Path
) -> None:
    rows = [{"turns": turns} for turns in (["endless"], ["fine", "endless 2"], ["endless 3", "never asked"], ["fine"])]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    config = replace(by_server, source=str(source), server=start_server(), keep_unfinished=True)
    for result in (regenerate(config), regenerate(config)):
        assert (result.num_conversations, result.num_cut, result.num_unfinished) == (4, 1, 2)
        assert "2 conversations kept with an unfinished last answer (field `cut` says so)" in result.lines()


def test_what_fails_is_named_and_asked_again_by_the_next_run(
    by_server: RegenerateConfig, start_server: Callable[..., str], tmp_path: Path
) -> None:
    rows = [{"prompt": f"{kind} {n}"} for n in range(4) for kind in ("fine", "always broken")]
    source = write_rows(tmp_path / "bad.jsonl", rows)
    config = replace(by_server, source=str(source), server=start_server(), retries=2)
    result = regenerate(config)
    assert (result.outcome, result.exit_status, result.num_conversations) == ("failed", 1, 4)
    assert result.failures == ["4 failed: the server failed 3 times, at last: HTTP 500 (out of order)"]
    assert result.lines()[-1].endswith("holds 4 conversations; run again to go on")
    before = len(read_rows(tmp_path / "server" / "requests.jsonl"))
    assert regenerate(replace(config, retries=0)).num_new == 0
    assert len(read_rows(tmp_path / "server" / "requests.jsonl")) == before + 4


def test_what_the_server_refuses_is_left_out_with_its_words_and_not_asked_again(
    by_server: RegenerateConfig, start_server: Callable[..., str], tmp_path: Path
) -> None:
    """Although refusals are back before any answer, and more are refused than may be before the first answer."""
    long = [["refuse, for long is " + "x" * n] for n in range(20)]
    rows = [{"turns": turns} for turns in (["refuse"], ["fine", "refuse"], ["fine"], *long)]
    source = write_rows(tmp_path / "refused.jsonl", rows)
    config = replace(by_server, source=str(source), server=start_server(1.0), request_seconds=30.0)
    result = regenerate(config)
    assert (result.outcome, result.failures, result.num_cut, result.num_conversations) == ("finished", [], 1, 2)
    refusal = "the server refuses the request: HTTP 400 (I will not)"
    assert result.left_out == {"the server refuses the request: HTTP 413 (… letters are too many)": 20, refusal: 1}
    assert {row.get("cut") for row in read_rows(config.output)} == {None, refusal}
    left_out = {row["reason"] for row in read_rows(config.output.with_name(f"{config.output.name}.left-out"))}
    assert len(left_out) == 21 and "the server refuses the request: HTTP 413 (25 letters are too many)" in left_out
    before = len(read_rows(tmp_path / "server" / "requests.jsonl"))
    again = regenerate(config)
    assert (again.exit_status, again.num_new, again.left_out) == (0, 0, result.left_out)
    assert len(read_rows(tmp_path / "server" / "requests.jsonl")) == before
    source = write_rows(tmp_path / "second.jsonl", rows[1:2])
    second = regenerate(replace(config, source=str(source), output=tmp_path / "second-answers.jsonl"))
    assert (second.failures, second.num_cut) == ([], 1), "its own first turn tells that the settings are right"


def test_where_all_questions_are_refused_nothing_is_left_out(
    by_server: RegenerateConfig, start_server: Callable[..., str], tmp_path: Path
) -> None:
    """Then the settings are wrong, such as a parameter that the server does not know, and the run ends early."""
    source = write_rows(tmp_path / "refused.jsonl", [{"prompt": f"refuse {n}"} for n in range(200)])
    config = replace(by_server, source=str(source), server=start_server())
    result = regenerate(config)
    assert (result.outcome, result.exit_status, result.left_out) == ("failed", 1, {})
    given_up, reason = result.failures
    num_refused = int(reason.partition(" ")[0])
    assert 16 <= num_refused < 16 + 6
    assert given_up == f"given up: the server refused {num_refused} conversations and answered none"
    assert reason == f"{num_refused} failed: the server refuses the request: HTTP 400 (I will not)"
    assert not config.output.with_name(f"{config.output.name}.left-out").exists()
    few = regenerate(replace(config, max_conversations=3))
    assert few.failures == ["3 failed: the server refuses the request: HTTP 400 (I will not)"]


def test_a_server_that_dies_ends_the_run_early_and_the_next_goes_on(
    by_server: RegenerateConfig, start_server: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "FAILURES_IN_A_ROW", 8)
    config = replace(by_server, server="127.0.0.1:9", server_model="the-model", retries=1)
    result = regenerate(config)
    assert result.exit_status == 1 and result.num_conversations == 0 and not config.output.exists()
    assert any("conversations failed one after another" in failure for failure in result.failures)
    assert sum("failed: the server failed 2 times" in failure for failure in result.failures) == 1
    with pytest.raises(InputError, match=r"The server 127.0.0.1:9 does not answer: Connection refused"):
        regenerate(replace(config, server_model=None))
    again = replace(config, server=start_server(), retries=6)
    assert regenerate(again).num_conversations == 61


def test_a_stop_keeps_what_is_under_way_and_the_next_run_goes_on(
    by_server: RegenerateConfig, start_server: Callable[..., str]
) -> None:
    config = replace(by_server, server=start_server(0.01))
    stopped: list[int] = []

    def stop(event: Any) -> None:
        if not stopped and not isinstance(event, Note) and event.num_done >= 10:
            stopped.append(event.num_done)
            os.kill(os.getpid(), signal.SIGINT)

    result = regenerate(config, stop)
    assert (result.outcome, result.exit_status) == ("stopped", 0)
    assert stopped[0] <= result.num_conversations < 40
    events: list[Any] = []
    assert regenerate(config, events.append).num_conversations == 61 and len(by_id(read_rows(config.output))) == 61
    notes = [event.text for event in events if isinstance(event, Note)]
    assert notes[0] == f"{config.output} holds {result.num_conversations} conversations already"


@pytest.mark.parametrize("way", ["server", "in process"])
def test_kill_dash_nine_and_resume_lose_and_double_nothing(
    way: str, by_server: RegenerateConfig, start_server: Callable[..., str], target: Path, tmp_path: Path
) -> None:
    words = ["--data", by_server.source, "--output", str(by_server.output), "--max-new-tokens", "12"]
    if way == "server":
        words += ["--server", start_server(0.03), "--target", "org/name", "--requests", "3"]
    else:
        words += ["--gpus", "cpu", "--target", str(target), "--batch-size", "1", "--keep-unfinished"]
    command = [sys.executable, "-m", "dflash_train.cli", "regenerate", *words]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    output = by_server.output
    wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5)
    process.kill()
    process.wait()
    if way == "server":
        assert (tmp_path / "server" / "most_in_flight").read_text() in ("2", "3"), "--requests bounds what is in flight"
    whole = output.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    assert 5 <= kept.count(b"\n") < 60
    output.write_bytes(kept + b'{"id": "0123456789abcdef", "messages": [{"role": "us')  # a torn line
    config = by_server
    if way == "server":
        config = replace(config, server=words[words.index("--server") + 1])
    else:
        config = replace(config, target=TargetConfig(name=str(target)), devices="cpu")
    config = replace(
        config, temperature=0.7, top_k=0, batch_size=8, chat_template_arguments={}, keep_unfinished=way != "server"
    )
    assert regenerate(config).failures == []
    assert output.read_bytes().startswith(kept)
    counts = Counter(row["messages"][0]["content"] for row in read_rows(output))
    left_out = output.with_name(f"{output.name}.left-out")
    num_left_out = len(read_rows(left_out)) if left_out.exists() else 0
    assert set(counts.values()) == {1} and len(counts) + num_left_out == 62
    if way == "server":
        assert num_left_out == 1
    else:
        wanted = answer_here(replace(config, output=tmp_path / "whole.jsonl"))
        assert by_id(read_rows(output)) == by_id(wanted)


def test_sums_and_speed_are_of_this_run_and_tell_left_out_from_failed(
    config: RegenerateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "time", SimpleNamespace(monotonic=lambda: 104.0))
    file = AnswerFile(config.output, make_settings(config, None))
    reader = DialogueReader(open_source(config.source))
    told: list[Any] = []
    answered = [user("x"), assistant("y")]
    Run(config, file, reader, told.append).add([Outcome("1" * 16, answered, num_tokens=1000)])
    assert told[-1].tokens_per_second == 0.0, "nothing is known before it has started"
    run = Run(config, file, reader, told.append)
    run.started = 100.0
    outcomes = [
        Outcome("2" * 16, answered, num_tokens=30, num_changed=1),
        Outcome("3" * 16, [], num_tokens=8, reason="a"),
    ]
    run.add([*outcomes, Outcome("4" * 16, [], num_tokens=2, reason="b", failed=True)])
    assert told[-1] == Answering(
        num_done=3, num_rows=22, num_left_out=1, num_failed=1, num_tokens=40, tokens_per_second=10.0
    )
    run.add([Outcome("4" * 16, answered, num_tokens=5)])
    assert (told[-1].num_done, told[-1].num_tokens, told[-1].tokens_per_second) == (4, 45, 11.25)
    assert (run.num_new, run.num_tokens, run.num_changed, run.failed) == (3, 45, 1, {"b": 1})
    file.close()


# The file


def test_a_file_of_a_server_is_not_filled_up_in_process_nor_the_reverse(config: RegenerateConfig) -> None:
    here, served, other = (make_settings(config, model) for model in (None, "my-model", "other"))
    of_server, in_process = "answers of --server (model 'my-model')", "answers in process"
    assert served.differences(here) == [f"found {of_server}, wanted {in_process}"]
    assert here.differences(served) == [f"found {in_process}, wanted {of_server}"]
    assert served.differences(other) == ["server_model: found 'my-model', wanted 'other'"]
    assert here.differences(replace(served, seed=1)) == [
        f"found {in_process}, wanted {of_server}",
        "seed: found 0, wanted 1",
    ]
    assert here.differences(here) == served.differences(served) == []


def test_a_file_is_refused_where_it_is_not_ours_or_in_use(config: RegenerateConfig) -> None:
    config.output.write_text('{"messages": []}\n')
    with pytest.raises(InputError, match=r"but no answers.jsonl.generation.json that says how it was made"):
        regenerate(config)
    config.output.unlink()
    answer_here(config, limit=4)
    settings = make_settings(config, None)
    lines = config.output.read_bytes()
    held = AnswerFile(config.output, settings)
    with pytest.raises(InputError, match="is being written by another process"):
        AnswerFile(config.output, settings)
    held.close()
    config.output.write_bytes(b"what is this\n" + lines)
    with pytest.raises(InputError, match="line 1, is not one that regenerate wrote"):
        AnswerFile(config.output, settings)
