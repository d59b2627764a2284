"""Speculative decoding gives the target's own greedy output, whatever the drafter says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_train.errors import InputError
from dflash_train.speculate import decode
from dflash_train.speculate.decode import DecodeResult, HiddenStateTaps, Round, plain_decode, speculative_decode
from dflash_train.stage1_target.target import Target
from dflash_train.stage2_drafter.checkpoint import export_tensors
from dflash_train.stage2_drafter.drafter import Drafter, load_drafter
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import is_projected, make_encoding

MakeTarget = Callable[[str], Target]
MakeDrafter = Callable[..., Drafter]
KINDS = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "qwen3_next", "qwen3_5"]


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return tokens


def script_drafts(
    monkeypatch: pytest.MonkeyPatch, drafter: Drafter, vocab_size: int, draft_at: Callable[[int], int]
) -> None:
    """Make the drafter propose draft_at(position in the whole text), whatever it is given."""

    def draft(features: Tensor, noise: Tensor, positions: Tensor, cache: Any) -> Tensor:
        assert positions.shape[1] == features.shape[1] + noise.shape[1]
        return positions[:, -noise.shape[1] :, None]

    def draft_logits(target: Target, drafter: Drafter, hidden: Tensor) -> Tensor:
        tokens = [draft_at(position) for position in hidden[0, :, 0].tolist()]
        return F.one_hot(torch.tensor([tokens], dtype=torch.long), vocab_size)

    monkeypatch.setattr(drafter, "draft", draft)
    monkeypatch.setattr(decode, "draft_logits", draft_logits)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_decode_equals_recomputing_everything(kind: str, make_tiny_target: MakeTarget) -> None:
    target = make_tiny_target(kind)
    prompt = random_prompt(5, target.vocab_size, 1)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(20):
            tokens.append(int(target.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    result = plain_decode(target, prompt, 20)
    assert result.token_ids == tokens[5:]
    assert not result.stopped
    assert not result.rounds


@pytest.mark.parametrize("block_size", [2, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_lossless_with_a_drafter_that_is_often_right(
    kind: str, block_size: int, make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter, monkeypatch: Any
) -> None:
    target = make_tiny_target(kind)
    drafter = make_tiny_drafter(target)
    prompt = random_prompt(4, target.vocab_size, block_size)
    expected = plain_decode(target, prompt, 40).token_ids
    text = prompt + expected + [0] * block_size
    wrong = torch.rand(len(text), generator=torch.Generator().manual_seed(block_size)) < 0.3

    script_drafts(monkeypatch, drafter, 11, lambda position: (text[position] + int(wrong[position])) % 11)
    result = speculative_decode(target, drafter, prompt, 40, block_size=block_size)
    assert result.token_ids == expected
    assert sum(result.acceptance_lengths) == 39
    assert min(result.acceptance_lengths) == 1
    assert max(result.acceptance_lengths) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_lossless_for_any_random_drafter(
    kind: str, make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter
) -> None:
    target = make_tiny_target(kind)

    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(
        block_size=st.integers(2, 8),
        prompt_length=st.integers(1, 12),
        max_new_tokens=st.integers(1, 24),
        seed=st.integers(0, 1000),
        stop_ids=st.sets(st.integers(0, target.vocab_size - 1), max_size=2),
        fields=st.fixed_dictionaries(
            {},
            optional={
                "is_causal": st.booleans(),
                "input_embedding_scale": st.just(3.0),
                "final_logit_softcapping": st.just(5.0),
                "target_layer_ids": st.just((0, 2, 4)),
            },
        ),
    )
    def check(
        block_size: int, prompt_length: int, max_new_tokens: int, seed: int, stop_ids: set[int], fields: dict[str, Any]
    ) -> None:
        drafter = make_tiny_drafter(target, seed, **fields)
        prompt = random_prompt(prompt_length, target.vocab_size, seed)
        plain = plain_decode(target, prompt, max_new_tokens, stop_ids)
        result = speculative_decode(target, drafter, prompt, max_new_tokens, stop_ids, block_size)
        assert result.token_ids == plain.token_ids
        assert result.stopped == plain.stopped
        assert 1 + sum(result.acceptance_lengths) == len(result.token_ids)
        for round_ in result.rounds:
            assert 1 <= round_.num_produced <= block_size
            assert 0 <= round_.num_accepted <= round_.num_drafted < block_size
            assert round_.num_accepted <= round_.num_produced <= round_.num_accepted + 1

    check()


@pytest.mark.parametrize("block_size", [2, 4, 7])
def test_a_perfect_drafter_reaches_the_block_size(
    block_size: int, make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter, monkeypatch: Any
) -> None:
    target = make_tiny_target("llama")
    drafter = make_tiny_drafter(target, block_size=block_size)
    expected = plain_decode(target, [3, 1, 4], 1 + 5 * block_size).token_ids
    text = [3, 1, 4, *expected, *([0] * block_size)]
    script_drafts(monkeypatch, drafter, target.vocab_size, lambda position: text[position])
    result = speculative_decode(target, drafter, [3, 1, 4], 1 + 5 * block_size)
    assert result.token_ids == expected
    assert result.acceptance_lengths == [block_size] * 5


def test_a_drafter_that_is_always_wrong_reaches_exactly_one(
    make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter, monkeypatch: Any
) -> None:
    target = make_tiny_target("qwen3")
    drafter = make_tiny_drafter(target)
    expected = plain_decode(target, [3, 1, 4], 20).token_ids
    text = [3, 1, 4, *expected, *([0] * 4)]
    script_drafts(monkeypatch, drafter, 11, lambda position: (text[position] + 1) % 11)
    result = speculative_decode(target, drafter, [3, 1, 4], 20)
    assert result.token_ids == expected
    assert result.acceptance_lengths == [1] * 19
    assert all(round_.num_accepted == 0 for round_ in result.rounds)


def test_a_stop_token_inside_a_block_ends_the_output(
    make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter, monkeypatch: Any
) -> None:
    target = make_tiny_target("gpt2")
    drafter = make_tiny_drafter(target, block_size=8)
    text = [5, *plain_decode(target, [5], 40).token_ids]
    position = next(i for i in range(4, 9) if text[i] not in text[1:i])  # new token, inside the first block
    script_drafts(monkeypatch, drafter, target.vocab_size, lambda position: text[position])
    result = speculative_decode(target, drafter, [5], 40, {text[position]})
    assert result.token_ids == text[1 : position + 1]
    assert result.stopped
    assert result.rounds == [Round(position - 1, position - 1, position - 1)]


def slow_speculative_decode(
    target: Target, drafter: Drafter, prompt: list[int], max_new_tokens: int, block_size: int
) -> tuple[list[int], list[int]]:
    """The same algorithm without any cache: everything is recomputed from token ids. Tokens and acceptance lengths."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def choices(tokens: list[int]) -> list[int]:
        found: list[int] = target.model(torch.tensor([tokens]), use_cache=False).logits[0].argmax(dim=-1).tolist()
        return found

    head = target.embed_tokens if target.lm_head is None else target.lm_head
    tokens, lengths = list(prompt), []
    tokens.append(choices(tokens)[-1])
    limit = len(prompt) + max_new_tokens
    while len(tokens) < limit:
        start = len(tokens) - 1
        size = min(block_size, limit - start)
        states = target.model(torch.tensor([tokens[:-1]]), use_cache=False, output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
        ids = torch.tensor([[tokens[-1]] + [drafter.config.mask_token_id] * (size - 1)])
        hidden = drafter(
            drafter.project_context(features),
            F.embedding(ids, target.embed_tokens),
            torch.arange(start)[None],
            torch.arange(start, start + size)[None],
            attend,
        )
        drafts = (hidden[0, 1:] @ head.T).argmax(dim=-1).tolist()
        after = choices(tokens + drafts)[start:]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == after[accepted]:
            accepted += 1
        new = after[: accepted + 1][: limit - len(tokens)]
        tokens += new
        lengths.append(len(new))
    return tokens[len(prompt) :], lengths


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_caches_change_no_round(kind: str, make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter) -> None:
    target = make_tiny_target(kind)
    seen: set[int] = set()
    for seed in range(4):
        drafter = make_tiny_drafter(target, seed, block_size=4)
        prompt = random_prompt(seed + 1, target.vocab_size, seed)
        result = speculative_decode(target, drafter, prompt, 25)
        assert (result.token_ids, result.acceptance_lengths) == slow_speculative_decode(target, drafter, prompt, 25, 4)
        seen.update(result.acceptance_lengths)
    assert len(seen) > 1  # some drafts were accepted


def test_taps_are_hidden_states_after_the_layer(make_tiny_target: MakeTarget) -> None:
    target = make_tiny_target("gemma3")
    tokens = torch.tensor([random_prompt(9, target.vocab_size, 0)])
    with torch.inference_mode():
        states = target.model(tokens, output_hidden_states=True).hidden_states  # leaves hooks of transformers' own
        num_hooks = [len(layer._forward_hooks) for layer in target.layers]
        with HiddenStateTaps(target.layers, (1, 4)) as taps:
            target.model(tokens)
            assert torch.equal(taps.features(7), torch.cat((states[2], states[5]), dim=-1)[:, :7])
    assert [len(layer._forward_hooks) for layer in target.layers] == num_hooks


def test_bad_requests_are_refused(make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter) -> None:
    target = make_tiny_target("llama")
    drafter = make_tiny_drafter(target)
    with pytest.raises(InputError, match="The prompt has no token"):
        plain_decode(target, [], 5)
    with pytest.raises(InputError, match="max_new_tokens is 0"):
        speculative_decode(target, drafter, [1], 0)
    with pytest.raises(InputError, match="The block size is 1"):
        speculative_decode(target, drafter, [1], 5, block_size=1)


def test_one_new_token_needs_no_round(make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter) -> None:
    target = make_tiny_target("llama")
    result: DecodeResult = speculative_decode(target, make_tiny_drafter(target), [2, 7], 1)
    assert result.token_ids == plain_decode(target, [2, 7], 1).token_ids
    assert result.rounds == []


class FcOnStored(nn.Module):
    """`fc` as it is trained on a store: on D⁻¹h or P D⁻¹h, not on the raw states h [..., L·H]."""

    def __init__(self, weight: Tensor, calibration: Calibration) -> None:
        super().__init__()
        self.weight, self.calibration = weight, calibration

    def forward(self, states: Tensor) -> Tensor:
        features = states / self.calibration.channel_scale
        projection = self.calibration.projection
        return F.linear(features if projection is None else features @ projection.T, self.weight)


@pytest.mark.parametrize("encoding_name", ["int8", "projected-int8", "projected-int4"])
def test_acceptance_is_the_same_through_the_exported_checkpoint(
    encoding_name: str, make_tiny_target: MakeTarget, make_tiny_drafter: MakeDrafter, tmp_path: Path
) -> None:
    """D and P, folded into fc and rounded to bf16, change no round against the drafter as it was trained."""
    target = make_tiny_target("llama")
    rank = 23 if is_projected(encoding_name) else None
    encoding = make_encoding(encoding_name, len(target.target_layer_ids), target.hidden_size, rank)
    generator = torch.Generator().manual_seed(4)
    scale = torch.exp(2 * torch.randn(encoding.num_states, generator=generator))
    rows = torch.linalg.qr(torch.randn(len(scale), len(scale), generator=generator)).Q[: rank or 0].contiguous()
    calibration = Calibration(scale, projection=None if rank is None else rows)
    trained = make_tiny_drafter(target, seed=1)
    weight = torch.randn(target.hidden_size, encoding.num_features, generator=generator)
    masters = {**trained.state_dict(), "fc.weight": weight}
    (tmp_path / "config.json").write_text(json.dumps(trained.config.to_json()))
    save_file(export_tensors(masters, encoding, calibration), tmp_path / "model.safetensors")
    exported = load_drafter(tmp_path, torch.float32)
    trained.load_state_dict(exported.state_dict())  # all else as exported, so that only fc differs
    trained.fc = FcOnStored(weight, calibration)  # type: ignore[assignment]
    lengths: list[int] = []
    for seed in range(12):
        prompt = random_prompt(5 + seed, target.vocab_size, seed)
        ours, engines = (speculative_decode(target, drafter, prompt, 40) for drafter in (trained, exported))
        assert ours.rounds == engines.rounds
        lengths += ours.acceptance_lengths
    assert 1.05 < sum(lengths) / len(lengths) < 4, "a number that could have differed"
    trained.fc = FcOnStored(-weight, calibration)  # type: ignore[assignment]
    assert speculative_decode(target, trained, prompt, 40).rounds != engines.rounds, "fc matters here"
