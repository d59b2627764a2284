"""Replay of the target's own answers gives the rounds of real speculative decoding."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from dflash_train.errors import InputError
from dflash_train.speculate import replay as replaying
from dflash_train.speculate.answering import Decoding
from dflash_train.speculate.decode import Interrupted, Round, draft_logits, plain_decode, speculative_decode
from dflash_train.speculate.prompts import Prompt
from dflash_train.speculate.replay import (
    ReadAnswer,
    Replayer,
    answer_greedily,
    check_one_rotation,
    draft_everywhere,
    read_answers,
    replay,
    rounds_everywhere,
    walk,
)
from dflash_train.stage1_target.generator import generate_tokens
from dflash_train.stage1_target.target import Target, make_target, stop_token_ids
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.stage2_drafter.blocks import dense_block_mask
from dflash_train.stage2_drafter.drafter import Drafter

MakeTarget = Callable[[str], Target]
MakeDrafter = Callable[..., Drafter]
KINDS = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "qwen3_next", "qwen3_5"]
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
DRAFTERS = [
    {},
    {"is_causal": True},
    SLIDING,
    {**SLIDING, "is_causal": None},
    {**SLIDING, "sliding_window": 2},
    {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 5.0},
]


def random_prompts(vocab_size: int, num_prompts: int = 5, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + 3 * n % 11 for n in range(num_prompts)]
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def train(target: Target, drafter: Drafter, answer: ReadAnswer, num_steps: int) -> None:
    """Overfit to blocks of one answer, under the mask of training on a CPU."""
    block_size, num_prompt = drafter.config.block_size, len(answer.prompt_ids)
    text = torch.tensor([*answer.prompt_ids, *answer.answer_ids])
    anchor = torch.arange(num_prompt, len(text) - block_size)
    positions = anchor[:, None] + torch.arange(block_size)
    ids = torch.full_like(positions, drafter.config.mask_token_id)
    ids[:, 0] = text[anchor]
    mask = dense_block_mask(torch.zeros_like(anchor), anchor, len(text), block_size)
    parameters = [parameter.requires_grad_() for parameter in drafter.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(num_steps):
        hidden = drafter(
            drafter.project_context(answer.features[None]),
            F.embedding(ids.flatten(), target.embed_tokens)[None],
            torch.arange(len(text))[None],
            positions.flatten()[None],
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        ).unflatten(1, positions.shape)[0, :, 1:]
        optimizer.zero_grad()
        F.cross_entropy(
            draft_logits(target, drafter, hidden).flatten(0, 1), text[positions[:, 1:]].flatten()
        ).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    drafter.requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
def test_batched_answers_are_those_of_plain_decoding(kind: str, make_tiny_target: MakeTarget) -> None:
    target = make_tiny_target(kind)
    prompts, own = random_prompts(target.vocab_size), target.model.generation_config
    for stop_ids, batch_size in (((), 2), ((3, 7), 64)):
        answers = answer_greedily(target, prompts, 16, stop_ids, batch_size=batch_size)
        assert answers == [plain_decode(target, prompt, 16, stop_ids).token_ids for prompt in prompts]
    assert len({len(answer) for answer in answers}) > 1  # some stopped early
    assert target.model.generation_config is own


@pytest.mark.parametrize(
    ("kind", "fields"), [*((kind, {}) for kind in KINDS), *(("llama", fields) for fields in DRAFTERS[1:])]
)
def test_rounds_are_those_of_speculative_decoding(
    kind: str, fields: dict[str, Any], make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter
) -> None:
    target = make_tiny_target(kind)
    prompts = random_prompts(target.vocab_size, 2, 5)
    for number, (limit, stop_ids) in enumerate(((19, ()), (23, (3, 7)), (1, ()), (2, ()))):
        answers = answer_greedily(target, prompts, limit, stop_ids)
        for answer in read_answers(target, prompts, answers):
            for block_size in (None, 2, 3, 9):
                drafter = make_tiny_drafter(target, number, block_size=6, **fields)
                result = replay(target, drafter, answer, limit, stop_ids, block_size)
                real = speculative_decode(target, drafter, answer.prompt_ids, limit, stop_ids, block_size)
                assert (result.token_ids, result.rounds, result.stopped) == (real.token_ids, real.rounds, real.stopped)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_trained_drafter_accepts_as_much_as_when_it_decodes(
    is_causal: bool, make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_tiny_target("qwen3")
    prompts, seen = random_prompts(target.vocab_size, 4, 9), set()
    answers = list(read_answers(target, prompts, answer_greedily(target, prompts, 40)))
    drafters = [make_tiny_drafter(target, block_size=5, is_causal=is_causal) for _ in range(2)]
    train(target, drafters[0], answers[0], 12)
    train(target, drafters[1], answers[0], 60)
    for most in (2**26, 2**12):  # at once, and a few anchors at a time
        monkeypatch.setattr(replaying, "MOST_CELLS", most)
        for drafter in drafters:
            for answer in answers:
                for block_size in (3, 5):
                    result = replay(target, drafter, answer, 40, (), block_size)
                    real = speculative_decode(target, drafter, answer.prompt_ids, 40, (), block_size)
                    assert result.rounds == real.rounds
                    seen.update(result.acceptance_lengths)
    assert seen == {1, 2, 3, 4, 5}


def test_cutting_anchors_into_parts_changes_no_draft(
    make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_tiny_target("llama")
    drafter = make_tiny_drafter(target, block_size=4, **SLIDING)
    prompts = [[3, 1, 4, 1, 5]]
    (answer,) = read_answers(target, prompts, answer_greedily(target, prompts, 30))
    whole = draft_everywhere(target, drafter, answer, 30, 4)
    assert (len(whole), {len(drafts) for drafts in whole}) == (29, {3})
    for name in ("MOST_CELLS", "MOST_LOGITS"):
        monkeypatch.setattr(replaying, name, 1)
        assert draft_everywhere(target, drafter, answer, 30, 4) == whole


def test_answers_read_in_groups_have_the_same_features(
    make_tiny_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_tiny_target("qwen3_next")
    prompts = random_prompts(target.vocab_size, 6)
    answers = [[2] * n for n in (5, 1, 9, 2, 2, 7)]
    whole = list(read_answers(target, prompts, answers, (0, 2, 4)))
    monkeypatch.setattr(replaying, "FORWARD_TOKENS", 1)
    alone = list(read_answers(target, prompts, answers, (0, 2, 4)))
    for first, second, prompt, answer in zip(whole, alone, prompts, answers, strict=True):
        assert first.features.shape == (len(prompt) + len(answer), 3 * target.hidden_size)
        assert first.prompt_ids == second.prompt_ids == prompt
        torch.testing.assert_close(first.features, second.features, rtol=1e-4, atol=1e-4)


def test_the_walk_ends_as_decoding_does() -> None:
    right = [[5, 6, 7], [6, 7, 8], [7, 8, 9], [8, 9, 0]]

    def walked(answer: list[int], limit: int, stop_ids: tuple[int, ...] = ()) -> list[Round]:
        return walk(rounds_everywhere(right, answer, limit, stop_ids, 4))

    assert walked([4, 5, 6, 7, 8], 5) == [Round(3, 3, 4)]
    assert walked([4, 5, 6], 3) == [Round(2, 2, 2)]  # cut by the limit
    assert walked([4, 5, 6], 9, (6,)) == [Round(2, 2, 2)]  # by the stop token
    assert walked([4, 5, 1, 7, 8], 5) == [Round(3, 1, 2), Round(2, 2, 2)]
    assert walked([4, 5], 2) == [Round(0, 0, 1)]
    assert walked([4], 9, (4,)) == []


def test_random_anchors_weigh_text_by_its_length_and_rounds_by_how_often_drafts_fail() -> None:
    """Four tokens drafted wrong and then eight right: half of the anchors, but a fifth of the rounds."""
    answer, right = list(range(13)), [list(range(place + 1, place + 4)) for place in range(12)]
    drafts = [[-1] * 3 if place < 4 else right[place] for place in range(12)]
    at_anchors = rounds_everywhere(drafts, answer, 100, (12,), 4)
    assert [round_.num_produced for round_ in at_anchors] == [1] * 4 + [4] * 5 + [3, 2, 1]
    assert [round_.num_produced for round_ in walk(at_anchors)] == [1] * 4 + [4, 4]


def test_features_of_other_layers_are_refused(make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter) -> None:
    target = make_tiny_target("llama")
    prompts = [[3, 1, 4]]
    (answer,) = read_answers(target, prompts, answer_greedily(target, prompts, 6))
    with pytest.raises(InputError, match=r"of target layers \[1, 3\], but the drafter takes \[0, 2\]"):
        replay(target, make_tiny_drafter(target, target_layer_ids=(0, 2)), answer, 6)


def test_it_can_be_stopped_between_two_tokens(make_tiny_target: MakeTarget) -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(0)
        return len(asked) > 3

    with pytest.raises(Interrupted):
        answer_greedily(make_tiny_target("llama"), [[3, 1, 4]], 100, stop=stop)
    assert len(asked) == 4


def test_a_batch_that_does_not_fit_is_halved(make_tiny_target: MakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sizes = make_tiny_target("llama"), []
    prompts = random_prompts(target.vocab_size, 5)
    wanted = answer_greedily(target, prompts, 8)

    def short(target: Target, prompts: Any, *arguments: Any) -> list[list[int]]:
        sizes.append(len(prompts))
        if len(prompts) > most:
            raise torch.OutOfMemoryError
        return generate(target, prompts, *arguments)

    generate, most = generate_tokens, 2
    monkeypatch.setattr(replaying, "generate_tokens", short)
    assert answer_greedily(target, prompts, 8) == wanted
    assert sizes == [5, 2, 3, 1, 2]
    most = 0
    with pytest.raises(InputError, match="An answer of 8 tokens does not fit"):
        answer_greedily(target, prompts, 8)


@pytest.mark.parametrize(("kind", "lengths"), [("llama", [[1, 1, 2], [2, 4]]), ("qwen3_next", [[1, 1], [2, 2], [4]])])
def test_only_prompts_of_one_length_share_a_batch_of_a_recurrent_target(
    kind: str, lengths: list[list[int]], make_tiny_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[int]] = []

    def watched(target: Target, prompts: Any, *arguments: Any) -> list[list[int]]:
        batches.append([len(prompt) for prompt in prompts])
        return generate_tokens(target, prompts, *arguments)

    monkeypatch.setattr(replaying, "generate_tokens", watched)
    prompts = [[3, 5], [4], [2, 6, 4, 7], [8, 9], [6]]
    assert len(answer_greedily(make_tiny_target(kind), prompts, 2, batch_size=3)) == 5
    assert batches == lengths


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_that_changes_with_the_length_is_refused(
    kind: str, make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 24, **factors}
    config = make_tiny_target("llama").model_config.to_dict() | {"rope_parameters": rope}
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval().requires_grad_(False)
    target = make_target(TargetConfig(name=kind), model, None, (1, 3))
    drafter = make_tiny_drafter(target)
    monkeypatch.setattr(replaying, "ChatRenderer", lambda *arguments: None)
    token_ids = ([3, 1, 4, 1], [5, 9, 2, 6, 5, 3, 5, 8])
    prompts = [Prompt("data", [[{"role": "user", "content": "?"}]], None, list(ids)) for ids in token_ids]
    for index, result in enumerate(Replayer(target, drafter, Decoding(max_new_tokens=16)).run_all((0, 1), prompts)):
        real = speculative_decode(target, drafter, token_ids[index], 16, stop_token_ids(target))
        assert result.turns[0].speculative.rounds == real.rounds  # up to the border all is well
    with pytest.raises(InputError, match=f"{kind} rotation changes after 24 positions, .* may have 25"):
        Replayer(target, drafter, Decoding(max_new_tokens=17)).run_all((0, 1), prompts)


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 256),  # from max_position_embeddings on, as in transformers
        ({"rope_type": "yarn", "original_max_position_embeddings": 24}, None),
        (
            {
                "sliding_attention": {"rope_type": "default"},
                "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 24},
            },
            24,
        ),
        (None, None),
    ],
)
def test_rotations_that_change_are_found_in_every_table(
    rope: dict[str, Any] | None, most: int | None, make_tiny_target: MakeTarget
) -> None:
    config = copy.deepcopy(make_tiny_target("llama").model_config)
    config.rope_parameters = rope
    target = dataclasses.replace(make_tiny_target("llama"), model_config=config)
    if most is None:
        check_one_rotation(target, 10**6)
        return
    check_one_rotation(target, most)
    with pytest.raises(InputError, match=f"changes after {most} positions"):
        check_one_rotation(target, most + 1)
