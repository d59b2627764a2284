"""A block that is read and partly forgotten must leave the cache as if only the kept tokens had been read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.speculate.target_cache import TargetCache, check_continuation
from dflash_train.stage1_target.target import Target

KINDS = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "qwen3_next", "qwen3_5"]


@pytest.mark.parametrize("num_kept", [1, 3, 4])
@pytest.mark.parametrize("num_read", [2, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_rejected_tokens_leave_no_trace(
    kind: str, num_read: int, num_kept: int, make_tiny_target: Callable[[str], Target]
) -> None:
    target = make_tiny_target(kind)
    generator = torch.Generator().manual_seed(num_read + num_kept)
    tokens = torch.randint(target.vocab_size, (1, num_read), generator=generator)
    block = torch.randint(target.vocab_size, (1, 4), generator=generator)
    with torch.inference_mode():
        cache = TargetCache(target.model, rewindable=True)
        cache.run(tokens)
        for _ in range(3):
            cache.run_block(block)
            cache.keep(num_kept)
            tokens = torch.cat((tokens, block[:, :num_kept]), dim=1)
        found = cache.run_block(block)
        expected = target.model(torch.cat((tokens, block), dim=1), use_cache=False).logits[:, -4:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_only_hybrid_targets_are_recurrent(make_tiny_target: Callable[[str], Target]) -> None:
    recurrent = {kind: TargetCache(make_tiny_target(kind).model).is_recurrent for kind in KINDS}
    assert recurrent == {kind: kind in ("qwen3_next", "qwen3_5") for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_targets_that_continue_correctly_pass(kind: str, make_tiny_target: Callable[[str], Target]) -> None:
    target = make_tiny_target(kind)
    check_continuation(target.model, target.vocab_size, target.device)


def test_a_target_that_loses_its_state_is_refused(forgetful_target: Target) -> None:
    with pytest.raises(InputError, match="lose their state when several tokens are read at once"):
        check_continuation(forgetful_target.model, forgetful_target.vocab_size, forgetful_target.device)


def test_a_cache_that_cannot_be_copied_is_refused(make_tiny_target: Callable[[str], Target]) -> None:
    class Uncopyable:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("it holds a device handle")

    target = make_tiny_target("qwen3_next")
    with torch.inference_mode():
        cache = TargetCache(target.model, rewindable=True)
        cache.run(torch.tensor([[3, 4, 5]]))
        cache.cache.layers[0].handle = Uncopyable()
        with pytest.raises(InputError, match="neither be cropped nor copied .it holds a device handle"):
            cache.run_block(torch.tensor([[6, 7]]))


def test_a_target_with_a_cache_of_its_own_is_refused(make_tiny_target: Callable[[str], Target]) -> None:
    target = make_tiny_target("qwen3_next")

    def refuse(module: Any, arguments: Any) -> None:
        raise ValueError("MiniMax uses cache of its own")

    handle = target.model.register_forward_pre_hook(refuse)
    try:
        with pytest.raises(InputError, match="does not take transformers' DynamicCache .MiniMax uses cache of its own"):
            check_continuation(target.model, target.vocab_size, target.device)
    finally:
        handle.remove()


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(InputError, match="Linear.forward takes none of cache, past_key_values, cache_params"):
        TargetCache(torch.nn.Linear(2, 2))
