"""On CUDA: the check of the first batch, and one target over two GPUs. About a minute on two H200."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_train.stage1_target.extract import ExtractConfig, Note, extract
from dflash_train.stage1_target.forward import pad_right
from dflash_train.stage1_target.identity import frozen_target, weights_fingerprint
from dflash_train.stage1_target.samples import DataConfig
from dflash_train.stage1_target.self_check import self_check
from dflash_train.stage1_target.target import load_target
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.store.reader import StoreReader
from dflash_train.store.verify import verify_store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixture_of_experts", "linear_attention", "gemma2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_honest_targets_pass_the_check_of_their_first_batch(
    tiny_target: Callable[..., Path], kind: str, dtype: str
) -> None:
    target = load_target(TargetConfig(name=str(tiny_target(kind)), dtype=dtype), (0, 1, 3), "cuda")
    rng = np.random.default_rng(0)
    samples = [rng.integers(4, 300, length).astype(np.int32) for length in (250, 249, 131, 100, 64, 17, 5)]
    result = self_check(target, samples, torch.ones(3 * 32), pad_right)
    assert result is not None
    result.stop_if_wrong()


@two_gpus
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixture_of_experts"])
def test_a_target_over_two_gpus_has_the_states_of_one(tiny_target: Callable[..., Path], kind: str) -> None:
    pytest.importorskip("accelerate")
    config, taps = TargetConfig(name=str(tiny_target(kind)), dtype="float32"), (0, 1, 3)
    one, two = load_target(config, taps, "cuda:0"), load_target(config, taps, "cuda:0", num_devices=2)
    assert {str(parameter.device) for parameter in two.model.parameters()} == {"cuda:0", "cuda:1"}
    assert (two.device, two.embedding_scale, two.logit_scale) == (one.device, one.embedding_scale, one.logit_scale)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(4, 300, (5, 77), generator=generator)
    for _ in range(3):  # a copy that were not waited for would differ now and then
        states = two.hidden_states(token_ids)
        assert states.device == torch.device("cuda:0")
        torch.testing.assert_close(states, one.hidden_states(token_ids), rtol=1e-4, atol=1e-4)
    assert weights_fingerprint(one.model) == weights_fingerprint(two.model)
    np.testing.assert_array_equal(frozen_target(one).embed_tokens, frozen_target(two).embed_tokens)


@two_gpus
def test_extract_over_two_gpus_fills_a_store_that_one_gpu_began(
    tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    data = tmp_path / "rows.jsonl"
    rows = [
        [{"role": "user", "content": f"Question {row}"}, {"role": "assistant", "content": "Paris " * (row % 30 + 1)}]
        for row in range(100)
    ]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    config = ExtractConfig(
        target=TargetConfig(name=str(tiny_target("qwen3"))),
        data=DataConfig(source=str(data), max_samples=40),
        store=tmp_path / "store",
        devices="0",
        num_taps=2,
        batch_tokens=400,
        sample_cache=tmp_path / "cache",
    )
    assert extract(config).outcome == "finished"
    notes: list[str] = []
    wide = replace(config, devices="0,1", gpus_per_target=2, data=replace(config.data, max_samples=None))
    result = extract(wide, lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    assert (result.outcome, result.num_new_samples) == ("finished", 60)
    assert any(note.startswith("1 worker will load the target") for note in notes)
    assert verify_store(config.store).problems == [] and len(StoreReader(config.store).samples) == 100
