"""Loss masks: exactly what the target would generate, whatever the template does."""

from typing import Any

import numpy as np
import pytest

from dflash_train.errors import InputError
from dflash_train.stage1_target.conversations import Conversation, RowError
from dflash_train.stage1_target.tokenization import (
    ChatRenderer,
    MaskTokenizer,
    hash_chat_template,
    hash_tokenizer,
)

# Behaves like Qwen3's: thinking is kept in the last turn only (empty, if there is none), tool calls and tools are shown.
QWEN3_LIKE = """
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
            {{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<call>' + call.function.name + (call.function.arguments | tojson) + '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
WITH_BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Only the last answer is shown whole: the template with blocks rewrites earlier turns.
REWRITING_BLOCKS = WITH_BLOCKS.replace("{{ m.content +", "{{ (m.content if loop.last else m.content[:3]) +")
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris. "},
    {"role": "user", "content": "And the river?"},
    {"role": "assistant", "content": "The Seine."},
]


@pytest.fixture
def split(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """messages, template, tools, arguments → [(decoded sample, decoded supervised tokens)]."""

    def split(
        messages: list[dict[str, Any]], template: str | None = None, tools: Any = None, **arguments: Any
    ) -> list[tuple[str, list[str]]]:
        if template is not None:
            monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
        samples = ChatRenderer(tiny_tokenizer, arguments).split(Conversation(messages, tools))
        results = []
        for tokens in MaskTokenizer(tiny_tokenizer).tokenize(samples):
            edges = np.flatnonzero(np.diff(tokens.loss_mask, prepend=0, append=0))
            runs = [
                tiny_tokenizer.decode(tokens.token_ids[begin:end])
                for begin, end in zip(edges[::2], edges[1::2], strict=True)
            ]
            results.append((tiny_tokenizer.decode(tokens.token_ids), runs))
        return results

    return split


def test_answers_count_with_their_end_of_turn_and_without_the_template_around(split: Any) -> None:
    [(text, runs)] = split(TURNS)
    assert runs == ["Paris. <|im_end|>", "The Seine.<|im_end|>"]
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat")


def test_token_ids_are_those_of_the_plain_rendering(tiny_tokenizer: Any) -> None:
    [rendering] = ChatRenderer(tiny_tokenizer, {}).split(Conversation(TURNS))
    [tokens] = MaskTokenizer(tiny_tokenizer).tokenize([rendering])
    assert tokens.token_ids.tolist() == tiny_tokenizer.apply_chat_template(TURNS)["input_ids"]
    assert tokens.token_ids.dtype == np.int32 and tokens.loss_mask.dtype == np.uint8


def test_generation_blocks_and_prefixes_agree(split: Any) -> None:
    assert split(TURNS, WITH_BLOCKS) == split(
        TURNS, WITH_BLOCKS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    )


def test_turns_after_the_last_answer_are_left_out(split: Any) -> None:
    assert split([*TURNS, {"role": "user", "content": "Thanks"}]) == split(TURNS)


def test_rewritten_turns_become_one_sample_each(split: Any) -> None:
    first, second = split(TURNS, QWEN3_LIKE)
    assert first[1] == ["<think>\n\n</think>\n\nParis. <|im_end|>"]
    assert second[1] == ["<think>\n\n</think>\n\nThe Seine.<|im_end|>"]
    assert first[0] == second[0][: second[0].index("Paris")] + "<think>\n\n</think>\n\nParis. <|im_end|>\n"


def test_empty_thinking_of_the_generation_prompt_does_not_count(split: Any) -> None:
    assert [runs for _, runs in split(TURNS, QWEN3_LIKE, enable_thinking=False)] == [
        ["Paris. <|im_end|>"],
        ["The Seine.<|im_end|>"],
    ]


def test_blocks_of_a_rewriting_template_count_in_the_last_turn_only(split: Any) -> None:
    assert [runs for _, runs in split(TURNS, REWRITING_BLOCKS)] == [["Paris. <|im_end|>"], ["The Seine.<|im_end|>"]]


def test_tools_calls_and_reasoning_reach_the_template(split: Any) -> None:
    messages = [
        {"role": "user", "content": "Add 1 and 2"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "use the tool",
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
        },
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3.", "reasoning_content": "done"},
    ]
    [(text, runs)] = split(messages, QWEN3_LIKE, tools=[{"type": "function", "function": {"name": "add"}}])
    assert '"name": "add"' in text
    assert runs == [
        '<think>\nuse the tool\n</think>\n\n<call>add{"a": 1, "b": 2}</call><|im_end|>',
        "<think>\ndone\n</think>\n\n3.<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("changes", "tools", "reason"),
    [
        ({"reasoning_content": "hm"}, None, "drops reasoning_content of assistant messages"),
        ({"tool_calls": [{"function": {"name": "add"}}]}, None, "drops tool_calls of assistant messages"),
        ({}, [{"type": "function", "function": {"name": "add"}}], "the chat template drops tools"),
        ({"content": ""}, None, "an assistant turn is empty"),
    ],
)
def test_what_the_template_drops_is_named(split: Any, changes: dict[str, Any], tools: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        split([TURNS[1], {**TURNS[2], **changes}], tools=tools)


def test_dropped_tool_answer_is_named(split: Any) -> None:
    template = QWEN3_LIKE.replace("{%- else %}", "{%- elif m.role != 'tool' %}")
    with pytest.raises(RowError, match="drops content of tool messages"):
        split([TURNS[1], {"role": "tool", "content": "3"}, TURNS[2]], template)


def test_unsplittable_template_and_refused_rows_have_a_reason(split: Any) -> None:
    thinking = QWEN3_LIKE.replace("<think>\n\n</think>\n\n", "<ponder>")
    with pytest.raises(RowError, match="cannot be split: the generation prompt is not how a rendered answer begins"):
        split(TURNS, thinking, enable_thinking=False)
    with pytest.raises(RowError, match="the chat template refuses this row: no system please"):
        split(TURNS, "{{ raise_exception('no system please') }}")
    with pytest.raises(RowError, match="no assistant turn"):
        split(TURNS[:2])


def test_plain_text_counts_whole(tiny_tokenizer: Any) -> None:
    short, empty = MaskTokenizer(tiny_tokenizer).tokenize_text(["one two", ""])
    assert tiny_tokenizer.decode(short.token_ids) == "one two"
    assert short.loss_mask.all() and len(empty.token_ids) == 0


def test_tokenizer_without_chat_template_is_refused(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", None)
    with pytest.raises(InputError, match=r"no chat template.*`text` or `input_ids` \+ `loss_mask`"):
        ChatRenderer(tiny_tokenizer, {})


def test_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False
        name_or_path = "slow/model"

    with pytest.raises(InputError, match="slow/model has only a slow tokenizer"):
        MaskTokenizer(Slow())


def test_hashes_follow_content_not_state(tiny_tokenizer: Any, tiny_tokenizer_folder: Any) -> None:
    from transformers import AutoTokenizer

    before = hash_tokenizer(tiny_tokenizer)
    tiny_tokenizer(["one", "two three"], padding=True, truncation=True, max_length=2)
    loaded = AutoTokenizer.from_pretrained(tiny_tokenizer_folder)
    assert hash_tokenizer(tiny_tokenizer) == before == hash_tokenizer(loaded)
    assert hash_chat_template(tiny_tokenizer) == hash_chat_template(loaded)
