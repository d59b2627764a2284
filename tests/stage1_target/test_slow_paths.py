"""Fast paths that a target lacks are said once each, with cost and fix, and are an error where that is asked for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.machine.devices import Device
from dflash_train.stage1_target import messages, preparation, slow_paths
from dflash_train.stage1_target.extract import ExtractConfig
from dflash_train.stage1_target.samples import DataConfig
from dflash_train.stage1_target.slow_paths import (
    SlowPath,
    missing_kernels,
    slow_paths_of_files,
    slow_paths_of_model,
    slow_tokenizer,
)
from dflash_train.stage1_target.supervisor import Supervisor
from dflash_train.stage1_target.target import load_target
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.stage1_target.target_files import TargetFiles

HYBRID = TargetFiles(
    name="t",
    config={"text_config": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}},
    has_fast_tokenizer=False,
)
CONVERSATION = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]}


def names(found: list[SlowPath]) -> list[str]:
    return [slow.name for slow in found]


def test_each_names_its_cost_and_its_fix() -> None:
    kernels = missing_kernels(HYBRID, lambda module: False)
    assert str(kernels) == (
        "fast kernels: t has linear-attention layers (3 of 4), which run in plain torch, many times slower, without "
        "flash-linear-attention and causal-conv1d. pip install flash-linear-attention causal-conv1d"
    )
    assert missing_kernels(HYBRID, lambda module: True) is None
    assert slow_tokenizer(replace(HYBRID, has_fast_tokenizer=None)) is None, "not known"


def test_a_cpu_has_neither_kernels_nor_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_paths, "find_spec", lambda module: None)
    assert names(slow_paths_of_files(HYBRID, on_gpu=False, dtype="float32")) == ["tokenizer"]
    assert names(slow_paths_of_files(HYBRID, on_gpu=True, dtype="bfloat16")) == ["tokenizer", "fast kernels"]
    found = slow_paths_of_files(TargetFiles(name="t", has_fast_tokenizer=True), on_gpu=True, dtype="float32")
    assert names(found) == ["weights"] and "Leave --dtype at auto" in str(found[0])


def test_the_loaded_model_tells_its_attention(tiny_target: Callable[..., Path]) -> None:
    target = load_target(TargetConfig(name=str(tiny_target("llama"))), (1,), "cpu")
    assert slow_paths_of_model(target) == []
    target.model.set_attn_implementation("eager")
    [slow] = slow_paths_of_model(target)
    assert slow.name == "attention" and "LlamaForCausalLM is told by its config to take eager attention" in slow.text
    assert slow.way_out.startswith("Remove attn_implementation from its config.json")
    type(target.model)._supports_sdpa, supports = False, type(target.model)._supports_sdpa
    try:
        [slow] = slow_paths_of_model(target)
    finally:
        type(target.model)._supports_sdpa = supports
    assert "LlamaForCausalLM fell back to eager attention" in slow.text and "supports sdpa" in slow.way_out


def test_float32_weights_on_a_gpu_are_found_in_the_model_itself() -> None:
    model = torch.nn.Linear(3, 3).bfloat16()
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(num_attention_heads=4))
    target: Any = SimpleNamespace(
        model=model,
        decoder=SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa")),
        model_config=config,
        device=torch.device("cuda"),
    )
    assert slow_paths_of_model(target) == []
    target.model = model.float()
    assert names(slow_paths_of_model(target)) == ["weights"]


def prepared(
    tiny_target: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str = "auto",
    row: dict[str, Any] = CONVERSATION,
    **fields: Any,
) -> tuple[preparation.Prepared, list[str]]:
    """An extract of a hybrid target that believes in a GPU without kernels."""
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(slow_paths, "find_spec", lambda module: None)
    monkeypatch.setattr(preparation, "parse_devices", lambda text: [Device("GPU 0", "cuda:0")])
    notes: list[str] = []
    config = ExtractConfig(
        target=TargetConfig(name=str(tiny_target("linear_attention")), dtype=dtype),
        data=DataConfig(source=str(data)),
        store=tmp_path / "store",
        num_taps=2,
        sample_cache=tmp_path / "cache",
        **fields,
    )
    return preparation.prepare(config, lambda event: notes.append(getattr(event, "text", ""))), notes


def test_extract_says_each_once_however_many_workers(
    tiny_target: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, notes = prepared(tiny_target, tmp_path, monkeypatch)
    assert [note.split(":")[1] for note in notes if note.startswith("warning")] == [" fast kernels"]
    group: Any = SimpleNamespace(running=[], processes=[])
    run = Supervisor(known, group, lambda event: notes.append(event.text), SimpleNamespace())  # type: ignore[arg-type,union-attr]
    attention = SlowPath("attention", "it is eager.", "Do something.")
    loaded = messages.Loaded((attention, SlowPath("fast kernels", "said before", "")))
    first: Any = SimpleNamespace(index=0)
    run._handle([(first, loaded), (first, loaded)])
    assert notes[-1] == "warning: attention: it is eager. Do something." and notes.count(notes[-1]) == 1
    assert not any("said before" in note for note in notes)


def test_extract_warns_of_a_tokenizer_in_python_and_of_float32_weights(
    tiny_target: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any
) -> None:
    monkeypatch.setattr(type(tiny_tokenizer), "is_fast", False)
    tokens = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}  # of messages it could not mark the answers
    _, notes = prepared(tiny_target, tmp_path, monkeypatch, dtype="float32", row=tokens)
    warned = [note.split(":")[1] for note in notes if note.startswith("warning")]
    assert warned == [" tokenizer", " fast kernels", " weights"]


def test_require_fast_kernels_makes_each_an_error(
    tiny_target: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"linear-attention layers \(3 of 5\)[^\n]*\nNothing was stored, because of"):
        prepared(tiny_target, tmp_path, monkeypatch, require_fast_kernels=True)
    monkeypatch.setattr(preparation, "refused", lambda found: InputError("not asked"))
    known, _ = prepared(tiny_target, tmp_path, monkeypatch)
    known = replace(known, config=replace(known.config, require_fast_kernels=True))
    group: Any = SimpleNamespace(running=[], processes=[])
    run = Supervisor(known, group, lambda event: None, SimpleNamespace(is_set=lambda: False))  # type: ignore[arg-type]
    run._handle([(SimpleNamespace(index=0), messages.Loaded((SlowPath("attention", "eager.", "Fix."),)))])  # type: ignore[list-item]
    with pytest.raises(InputError, match="attention: eager. Fix.\nNothing was stored"):
        run.run()
