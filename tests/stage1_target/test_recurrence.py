"""Targets whose state padding may change are told from those of attention alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from dflash_train.stage1_target.recurrence import is_recurrent

TINY = {"vocab_size": 11, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("make_config", "wanted"),
    [
        (transformers.LlamaConfig, False),
        (transformers.MistralConfig, False),  # its windows slide
        (transformers.MambaConfig, True),
        (transformers.RecurrentGemmaConfig, True),
        (transformers.RwkvConfig, True),  # takes no cache
        (transformers.xLSTMConfig, True),  # takes one, and keeps another
    ],
)
def test_a_state_that_is_no_attention_cache_is_recurrent(make_config: Any, wanted: bool) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(make_config(**TINY, num_heads=4, pad_token_id=0))
    assert is_recurrent(model) is wanted


def test_layers_of_a_kind_that_transformers_does_not_know_count_as_recurrent() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY))
    own: Any = SimpleNamespace(forward=model.forward, config=transformers.LlamaConfig(**TINY))
    assert not is_recurrent(own)
    own.config.layer_types = ["full_attention", "retention"]
    assert is_recurrent(own)
    own.config = transformers.LlamaConfig(**TINY)
    own.forward = lambda input_ids: input_ids
    assert is_recurrent(own), "without a cache of transformers' the state is elsewhere"
