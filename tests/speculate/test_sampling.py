"""Rejection sampling gives the target's own distribution; each test's p-value is that of a fixed seed, so none is flaky."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_train.errors import InputError
from dflash_train.speculate.decode import plain_decode, speculative_decode
from dflash_train.speculate.sampling import Chooser, Sampling, answer_seed
from dflash_train.stage1_target.target import Target
from dflash_train.stage2_drafter.drafter import Drafter

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LEAST_P = 1e-3
"""A right sampler falls below it once in a thousand seeds, a wrong one always with these counts."""


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Pearson's chi-square test of counts [V] against probabilities [V]; what is impossible must not occur."""
    total = counts.sum()
    assert not counts[expected <= 1e-12].any()
    rare = expected * total < 5  # cells for which the approximation is none; together they are one
    merged = torch.cat((expected[~rare], expected[rare].sum()[None])).double() * total
    found = torch.cat((counts[~rare], counts[rare].sum()[None])).double()
    used = merged > 0
    statistic = ((found - merged)[used].square() / merged[used]).sum()
    degrees = int(used.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), statistic / 2))


def test_the_test_itself_sees_a_wrong_distribution() -> None:
    expected = torch.tensor([0.5, 0.3, 0.2])
    counts = torch.bincount(torch.multinomial(expected, 20_000, True, generator=torch.Generator().manual_seed(0)))
    assert p_value(counts, expected) > LEAST_P
    assert p_value(counts, torch.tensor([0.48, 0.32, 0.2])) < LEAST_P


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.8),
        Sampling(temperature=1.3, top_k=4),
        Sampling(temperature=0.9, top_k=6, top_p=0.9),
    ],
    ids=["plain", "top-p", "top-k", "both"],
)
@pytest.mark.parametrize("drafter_is_near", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_verified_tokens_have_the_targets_distribution(sampling: Sampling, drafter_is_near: bool, device: str) -> None:
    """Two drafts, the second position's target distribution depending on the first draft, 60,000 times at once."""
    num, vocab = 60_000, 9
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(vocab, generator=generator)
    table = torch.randn(vocab, vocab, generator=generator)  # of the second token, by the first
    last = torch.randn(vocab, generator=generator)
    noise = 0.3 if drafter_is_near else 2.0
    proposal = torch.stack((first, table.mean(0))) + noise * torch.randn(2, vocab, generator=generator)
    chooser = Chooser(sampling, 3, torch.device(device))
    drafts, proposed = chooser.draft(proposal.expand(num, 2, vocab).to(device))
    logits = torch.stack((first.expand(num, vocab), table[drafts[:, 0].cpu()], last.expand(num, vocab)), dim=1)
    choices = chooser.verify(drafts, proposed, logits.to(device)).cpu()
    drafts = drafts.cpu()

    wanted = sampling.probabilities(first)
    assert p_value(torch.bincount(choices[:, 0], minlength=vocab), wanted) > LEAST_P
    accepted = choices[:, 0] == drafts[:, 0]
    overlap = torch.minimum(wanted, sampling.probabilities(proposal[0])).sum()
    assert float(accepted.double().mean()) == pytest.approx(float(overlap), abs=0.01)  # as often as can be
    for token in sorted(set(drafts[accepted, 0].tolist())):
        of_token = accepted & (drafts[:, 0] == token)
        counts = torch.bincount(choices[of_token, 1], minlength=vocab)
        assert p_value(counts, sampling.probabilities(table[token])) > LEAST_P
    both = accepted & (choices[:, 1] == drafts[:, 1])
    assert p_value(torch.bincount(choices[both, 2], minlength=vocab), sampling.probabilities(last)) > LEAST_P


def test_decoded_answers_have_the_targets_distribution(
    make_tiny_target: Callable[[str], Target], make_tiny_drafter: Callable[..., Drafter]
) -> None:
    """Tokens two and three of real answers against all the 121 probabilities of the target, computed without a cache."""
    target = make_tiny_target("gpt2")
    drafter = make_tiny_drafter(target, seed=4, block_size=3)
    sampling, prompt, vocab, num = Sampling(temperature=2.0), [3, 1, 4], target.vocab_size, 500
    counts = torch.zeros(vocab, vocab, dtype=torch.long)
    lengths: list[int] = []
    for seed in range(num):
        result = speculative_decode(target, drafter, prompt, 3, sampling=sampling, seed=seed)
        counts[result.token_ids[1], result.token_ids[2]] += 1
        lengths += result.acceptance_lengths
    assert len(set(lengths)) > 1  # some drafts were accepted, some were not
    with torch.inference_mode():

        def probabilities(rows: Tensor) -> Tensor:
            return sampling.probabilities(target.model(rows, use_cache=False).logits[:, -1])

        start, every = torch.tensor([prompt]), torch.arange(vocab)
        one = torch.cat((start.expand(vocab, -1), every[:, None]), dim=1)
        two = torch.cat((one.repeat_interleave(vocab, 0), every.repeat(vocab)[:, None]), dim=1)
        p_one, p_two, p_three = probabilities(start)[0], probabilities(one), probabilities(two)
    joint = torch.einsum("a,ab,abc->bc", p_one, p_two, p_three.view(vocab, vocab, vocab))
    assert p_value(counts.sum(1), joint.sum(1)) > LEAST_P
    assert p_value(counts.sum(0), joint.sum(0)) > LEAST_P
    assert p_value(counts.flatten(), joint.flatten()) > LEAST_P


def test_answers_follow_from_seed_and_prompt_alone(
    make_tiny_target: Callable[[str], Target], make_tiny_drafter: Callable[..., Drafter]
) -> None:
    target = make_tiny_target("llama")
    drafter, hot = make_tiny_drafter(target), Sampling(temperature=1.0)

    def decode(seed: int) -> list[int]:
        return speculative_decode(target, drafter, [1, 2], 12, sampling=hot, seed=seed).token_ids

    assert decode(5) == decode(5) != decode(6)
    assert plain_decode(target, [1, 2], 12, sampling=hot, seed=5).token_ids != decode(5)  # streams of their own
    assert (
        answer_seed(0, [1, 23], "plain") != answer_seed(0, [12, 3], "plain") != answer_seed(0, [12, 3], "speculative")
    )


def test_a_tiny_temperature_is_greedy_but_for_its_arithmetic(
    make_tiny_target: Callable[[str], Target], make_tiny_drafter: Callable[..., Drafter]
) -> None:
    target = make_tiny_target("qwen3")
    drafter = make_tiny_drafter(target)
    cold = speculative_decode(target, drafter, [3, 5], 20, sampling=Sampling(temperature=1e-4))
    assert cold.token_ids == plain_decode(target, [3, 5], 20).token_ids


def test_probabilities_equal_those_of_transformers() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    found = Sampling(temperature=0.7, top_p=0.85, top_k=12).probabilities(logits)
    warped: Any = logits
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.85)):
        warped = warper(None, warped)
    torch.testing.assert_close(found, warped.softmax(-1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "--temperature is -1.0, but must be 0 or more"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"top_p": 0.0}, "--top-p is 0.0, but must be more than 0 and at most 1"),
        ({"top_k": -3}, "--top-k is -3"),
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**fields)
