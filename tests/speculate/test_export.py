"""`dflash export`: both formats say what the drafter is, and what a format cannot say is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_train.errors import InputError
from dflash_train.speculate.export import export_drafter, format_export
from dflash_train.stage1_target.target import load_target
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.stage2_drafter.drafter import Drafter, DrafterConfig, load_drafter

SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        values: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 400,
            "block_size": 4,
            "mask_token_id": 3,
            "target_layer_ids": (1, 3),
            "num_target_layers": 5,
        }
        config, folder = DrafterConfig(**(values | changes)), tmp_path / "drafter"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config.to_json()))
        save_file(Drafter(config, seed=2).state_dict(), folder / "model.safetensors", {"format": "pt"})
        return folder

    return write


def read_as_vllm(config: Mapping[str, Any]) -> dict[str, Any]:
    """z-lab's config.json as vLLM makes it from the speculators format (configs/speculators/algos.py, August 2026)."""
    causal = not config["sliding_window_non_causal"]
    layers = {
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": [i - 1 for i in config["aux_hidden_state_layer_ids"]],
    }
    number = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    added = {"block_size": number + 1, "num_target_layers": 5, "architectures": ["DFlashDraftModel"]}
    return {**config["transformer_layer_config"], **added, "dflash_config": {**layers, "causal": causal}}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("changes", [{}, {**SLIDING, "is_causal": True}, SLIDING], ids=["full", "causal", "sliding"])
def test_the_speculators_format_says_the_same(
    changes: dict[str, Any], kind: str, write: Callable[..., Path], tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    folder, target = write(**changes), TargetConfig(name=str(tiny_target(kind)))
    result = export_drafter(folder, tmp_path / "out", format_name="speculators", target=target)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 4]
    assert (config["draft_vocab_size"], config["sample_from_anchor"]) == (400, False)
    assert config["speculators_config"]["verifier"]["name_or_path"] == target.name
    original = DrafterConfig.from_json(json.loads((folder / "config.json").read_text()))
    assert DrafterConfig.from_json(read_as_vllm(config)) == original
    tensors, loaded = load_file(tmp_path / "out" / "model.safetensors"), load_target(target, (1, 3), "cpu")
    head = loaded.embed_tokens if loaded.lm_head is None else loaded.lm_head
    assert (loaded.lm_head is None) == (kind == "llama")
    assert torch.equal(tensors.pop("embed_tokens.weight"), loaded.embed_tokens.bfloat16())
    assert torch.equal(tensors.pop("lm_head.weight"), head.bfloat16())
    assert tensors.keys() == load_file(folder / "model.safetensors").keys()
    assert (result["num_tensors"], result["num_speculative_tokens"]) == (27, 3)
    assert f"loads the target {target.name}" in format_export(result)
    assert "export with --target" in format_export({**result, "verifier": "target"})


def test_zlabs_format_is_the_drafter_in_bf16(write: Callable[..., Path], tmp_path: Path) -> None:
    folder = write(is_causal=None)
    export_drafter(folder, tmp_path / "out", format_name="z-lab")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((folder / "config.json").read_text())
    ours = load_drafter(tmp_path / "out")
    for name, tensor in load_drafter(folder).state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor.bfloat16()), name


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"is_causal": True}, "has causal layers"),
        (
            {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6, "is_causal": None},
            "has causal",
        ),
        ({"input_embedding_scale": 2.0}, "no input_embedding_scale"),
        ({"final_logit_softcapping": 5.0}, "no final_logit_softcapping"),
        ({"vocab_size": 500}, "does not fit the target"),
    ],
)
def test_what_the_format_cannot_say_is_refused_and_leaves_nothing(
    changes: dict[str, Any], text: str, write: Callable[..., Path], tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    target = TargetConfig(name=str(tiny_target("llama")))
    with pytest.raises(InputError, match=text):
        export_drafter(write(**changes), tmp_path / "out", format_name="speculators", target=target)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_failed_write_leaves_nothing(write: Callable[..., Path], tmp_path: Path) -> None:
    from dflash_train.store.files import Files, StoreError

    class Full(Files):
        def fsync(self, descriptor: int) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="disk is full"):
        export_drafter(write(), tmp_path / "out", format_name="z-lab", files=Full())
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
