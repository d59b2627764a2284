"""`dflash check`: a good drafter passes, and each way of breaking one is found and named."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from dflash_train.cli import main
from dflash_train.errors import InputError
from dflash_train.speculate import parity
from dflash_train.speculate.check import CheckConfig, check_drafter
from dflash_train.speculate.drafter_folder import read_drafter_folder
from dflash_train.speculate.findings import ENGINES
from dflash_train.speculate.serving import serving_commands
from dflash_train.speculate.tensor_checks import wanted_shapes
from dflash_train.stage1_target.target import load_target
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.stage2_drafter.drafter import Drafter, DrafterConfig

Break = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
MASK_TOKEN = 3  # the tiny tokenizer's <|mask|>


def make_config(**changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 400,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "block_size": 4,
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": (1, 2),
        "num_target_layers": 5,
        "initializer_range": 0.3,
    }
    return DrafterConfig(**(values | changes))


def write_drafter(folder: Path, config: DrafterConfig) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    tensors = {name: tensor.bfloat16() for name, tensor in Drafter(config, seed=1).state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def break_drafter(folder: Path, change: Break) -> None:
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def check(folder: Path, target: Path, **fields: Any) -> dict[str, Any]:
    return check_drafter(
        CheckConfig(target=TargetConfig(name=str(target)), drafter=folder, **{"parity": False} | fields)
    )


def found(result: dict[str, Any], status: str) -> dict[str, str]:
    return {entry["name"]: entry["text"] for entry in result["checks"] if entry["status"] == status}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "granite"])
def test_a_good_drafter_passes(kind: str, tiny_target: Callable[..., Path], tmp_path: Path) -> None:
    scales = {"input_embedding_scale": 12.0, "output_multiplier": 0.125} if kind == "granite" else {}
    folder = write_drafter(tmp_path / "drafter", make_config(**scales))
    result = check(folder, tiny_target(kind), parity=True)
    assert result["ok"], found(result, "error")
    random_drafter = {"first drafts"}
    unread = {"embedding scale", "logit scale"} if scales else set()
    assert found(result, "warning").keys() <= random_drafter | unread
    assert {"parity", "target states", "head", "scales", "mask token"} <= found(result, "ok").keys()
    assert "num_speculative_tokens = 3" in found(result, "ok")["block size"]
    assert json.loads(json.dumps(result)) == result


def at(*path: str, to: Any) -> Break:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        table = config
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = to

    return change


def both(*changes: Break) -> Break:
    return lambda config, tensors: [change(config, tensors) for change in changes]


def transpose(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()


def prefix(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def infinite(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"][3] = float("inf")


def nan(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"][3, 4] = torch.nan


def whole_numbers(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"] = torch.ones(32, dtype=torch.int8)


def lose_a_layer(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("layers.1.")]:
        del tensors[name]


def drop(*path: str) -> Break:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        table = config
        for key in path[:-1]:
            table = table[key]
        del table[path[-1]]

    return change


def slide(**changes: Any) -> Break:
    """Sliding layers with a window, and no flag; changes may spoil them."""
    values = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True} | changes
    return both(*(at(name, to=value) for name, value in values.items()), *NO_FLAG)


NO_FLAG = (drop("is_causal"), drop("dflash_config", "causal"))
CAUSAL = both(at("is_causal", to=True), at("dflash_config", "causal", to=True))
BROKEN: dict[str, tuple[Break, str, str]] = {
    "the eos for the mask": (at("dflash_config", "mask_token_id", to=2), "mask token", "eos token"),
    "the pad for the mask": (at("dflash_config", "mask_token_id", to=0), "mask token", "pad token"),
    "a word for the mask": (at("dflash_config", "mask_token_id", to=100), "mask token", "ordinary text"),
    "a mask beyond the table": (at("dflash_config", "mask_token_id", to=400), "mask token", "no row"),
    "no mask": (lambda c, t: c["dflash_config"].pop("mask_token_id"), "mask token", "is missing"),
    "the last layer": (at("dflash_config", "target_layer_ids", to=[1, 4]), "target layers", "last layer, 4"),
    "a layer too many": (at("dflash_config", "target_layer_ids", to=[1, 5]), "target layers", "beyond"),
    "three layers for two": (at("dflash_config", "target_layer_ids", to=[0, 1, 2]), "tensor shapes", "fc.weight"),
    "no layers": (lambda c, t: c["dflash_config"].pop("target_layer_ids"), "target layers", "of their own"),
    "block size in one place": (at("dflash_config", "block_size", to=8), "block size", "is 4 but"),
    "no block size": (
        both(lambda c, t: c.pop("block_size"), lambda c, t: c["dflash_config"].pop("block_size")),
        "block size",
        "SGLang would take 16",
    ),
    "another rotary base": (
        both(at("rope_theta", to=1e6), at("rope_parameters", "rope_theta", to=1e6)),
        "rotary base",
        "1,000,000.0 is not the target's 10,000",
    ),
    "two rotary bases": (at("rope_theta", to=5e5), "rotary positions", "4 and 5 read different ones"),
    "a scaled rotation": (at("rope_parameters", "rope_type", to="yarn"), "rotary positions", "yarn"),
    "a missing tensor": (
        lambda c, t: t.pop("layers.1.self_attn.k_norm.weight"),
        "missing tensors",
        "layers.1.self_attn.k_norm.weight",
    ),
    "a tensor too many": (lambda c, t: t.update(extra=torch.ones(1)), "unknown tensors", "extra"),
    "names with a prefix": (prefix, "tensor names", "model."),
    "a transposed tensor": (transpose, "tensor shapes", r"fc.weight is [64, 32], its transpose, wanted [32, 64]"),
    "infinity": (infinite, "values", "norm.weight"),
    "causal flags that differ": (at("is_causal", to=True), "causality", "is_causal is true but"),
    "causal full layers": (CAUSAL, "causality", "SGLang"),
    "bidirectional sliding layers": (
        both(
            at("layer_types", to=["sliding_attention"] * 2),
            at("sliding_window", to=8),
            at("use_sliding_window", to=True),
        ),
        "causality",
        "SGLang, which reads no flag, would take sliding layers for causal",
    ),
    "causal full layers in one place": (
        at("dflash_config", "causal", to=True),
        "causality",
        "is_causal is false but dflash_config.causal is true",
    ),
    "causal full layers said to vLLM alone": (
        both(lambda c, t: c.pop("is_causal"), at("dflash_config", "causal", to=True)),
        "causality",
        "SGLang, which reads no flag, and z-lab's package, which reads is_causal alone, would take full layers for bidir",
    ),
    "a block of one": (
        both(at("block_size", to=1), at("dflash_config", "block_size", to=1)),
        "block size",
        "is 1; a block",
    ),
    "a tied head": (at("tie_word_embeddings", to=True), "tied head", "head of nothing"),
    "no head size": (lambda c, t: c.pop("head_dim"), "geometry", "engines would take 128"),
    "another architecture": (at("architectures", to=["LlamaForCausalLM"]), "architecture", "LlamaForCausalLM"),
    "drafts from the anchor": (
        at("dflash_config", "sample_from_anchor", to=True),
        "architecture",
        "sample_from_anchor",
    ),
    "another vocabulary": (at("vocab_size", to=128), "target sizes", "vocab_size is 128, the target has 400"),
    "another activation": (
        at("hidden_act", to="gelu"),
        "architecture",
        "hidden_act 'gelu' is set; DFlash drafters have silu",
    ),
    "biases": (at("attention_bias", to=True), "architecture", "attention_bias true"),
    "a mask where engines do not look": (
        both(lambda c, t: c["dflash_config"].pop("mask_token_id"), at("mask_token_id", to=MASK_TOKEN)),
        "mask token",
        "is not in dflash_config",
    ),
    "a target of other depth": (at("num_target_layers", to=6), "target sizes", "is 6, the target has 5"),
    "layers that do not ascend": (
        at("dflash_config", "target_layer_ids", to=[2, 1]),
        "target layers",
        "2,1 are not ascending",
    ),
    "two architectures": (
        at("architectures", to=["DFlashDraftModel", "LlamaForCausalLM"]),
        "architecture",
        "engines choose their code by it",
    ),
    "another model type": (at("model_type", to="llama"), "architecture", "model_type is 'llama'"),
    "a size that is a flag": (at("intermediate_size", to=True), "geometry", "intermediate_size is True, no number"),
    "a size that is text": (at("hidden_size", to="32"), "geometry", "hidden_size is '32', no number"),
    "a size of nothing": (at("intermediate_size", to=0), "geometry", "intermediate_size is 0, no number"),
    "no depth of the target": (drop("num_target_layers"), "geometry", "num_target_layers is missing"),
    "key heads that do not divide": (at("num_key_value_heads", to=3), "geometry", "must be a multiple"),
    "an odd head size": (at("head_dim", to=7), "geometry", "the size even"),
    "unknown layers": (
        at("layer_types", to=["full_attention", "chunked_attention"]),
        "layer types",
        "the types chunked_attention are unknown",
    ),
    "types of more layers": (at("layer_types", to=["full_attention"] * 3), "layer types", "3 types for 2 layers"),
    "sliding layers without a window": (slide(sliding_window=None), "layer types", "sliding_window is None"),
    "a window of nothing": (slide(sliding_window=0), "layer types", "sliding_window is 0"),
    "a window that is not used": (slide(use_sliding_window=False), "layer types", "use_sliding_window false"),
    "rotary parameters that are no table": (at("rope_parameters", to=[1]), "rotary positions", "no table"),
    "a rotary scaling that is no table": (at("rope_scaling", to="yarn"), "rotary positions", "no table"),
    "a scaling where transformers 4 looks": (at("rope_scaling", to={"type": "linear"}), "rotary positions", "linear"),
    "no rotary base": (
        both(drop("rope_theta"), drop("rope_parameters", "rope_theta")),
        "rotary positions",
        "rope_theta is missing",
    ),
    "another rotary base where transformers 5 looks": (
        both(drop("rope_theta"), at("rope_parameters", "rope_theta", to=1e6)),
        "rotary base",
        "1,000,000.0 is not the target's 10,000",
    ),
    "another rotary base where transformers 4 looks": (
        both(at("rope_theta", to=1e6), drop("rope_parameters")),
        "rotary base",
        "1,000,000.0 is not the target's 10,000",
    ),
    "a rotary base that is text": (
        both(at("rope_theta", to="1e4"), at("rope_parameters", "rope_theta", to="1e4")),
        "rotary base",
        "rope_theta is '1e4', no number",
    ),
    "a missing layer": (lose_a_layer, "missing tensors", "and 7 more"),
    "another MLP": (at("intermediate_size", to=40), "tensor shapes", "wanted [40, 32]; "),
    "many shapes": (at("intermediate_size", to=40), "tensor shapes", "and 2 more"),
    "integers": (whole_numbers, "tensor types", "I8 tensors are there"),
    "no number": (nan, "values", "fc.weight"),
    "another width": (at("hidden_size", to=64), "target sizes", "hidden_size is 64, the target has 32"),
    "an empty list of layers": (
        at("dflash_config", "target_layer_ids", to=[]),
        "target layers",
        "target_layer_ids is []; engines would choose",
    ),
    "a layer twice": (at("dflash_config", "target_layer_ids", to=[1, 1]), "target layers", "1,1 are not ascending"),
    "a layer before the first": (
        at("dflash_config", "target_layer_ids", to=[-1, 2]),
        "target layers",
        "-1,2 are not ascending",
    ),
    "three layers for the fc of two": (
        at("dflash_config", "target_layer_ids", to=[0, 1, 2]),
        "target layers",
        "3 layers are named, but fc takes 64 features, 2 layers of 32",
    ),
    "the bos for the mask": (at("dflash_config", "mask_token_id", to=1), "mask token", "bos token"),
    "a mask before the table": (at("dflash_config", "mask_token_id", to=-1), "mask token", "-1 is no row"),
    "a mask that is text": (at("dflash_config", "mask_token_id", to="3"), "mask token", "it is '3'"),
    "two masks": (at("mask_token_id", to=4), "mask token", "is 4 at the top but 3 in dflash_config"),
    "junk in a list": (at("layer_types", to=7), "config.json", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_is_found_and_named(name: str, tiny_target: Callable[..., Path], tmp_path: Path) -> None:
    change, check_name, text = BROKEN[name]
    folder = write_drafter(tmp_path / "drafter", make_config())
    break_drafter(folder, change)
    result = check(folder, tiny_target("llama"))
    errors = found(result, "error")
    assert not result["ok"]
    assert text in errors[check_name], errors
    assert all(entry["way_out"] for entry in result["checks"] if entry["status"] != "ok")


WARNED: dict[str, tuple[Break, str, str]] = {
    "block size at the top alone": (drop("dflash_config", "block_size"), "block size", "is not in dflash_config"),
    "block size in the table alone": (drop("block_size"), "block size", "is not in the top of config.json"),
    "no flag": (both(*NO_FLAG), "causality", "take full layers for bidirectional."),
    "no flag of sliding layers": (slide(), "causality", "sliding ones for causal inside the block"),
    "the flag at the top alone": (drop("dflash_config", "causal"), "causality", "but dflash_config.causal is missing"),
    "the flag in the table alone": (drop("is_causal"), "causality", "but is_causal is missing"),
    "the rotary base at the top alone": (drop("rope_parameters"), "rotary positions", "rope_parameters is missing"),
    "the rotary base in the table alone": (drop("rope_theta"), "rotary positions", "rope_theta is missing"),
    "an embedding scale": (
        at("dflash_config", "input_embedding_scale", to=12.0),
        "embedding scale",
        "is 12.0, which SGLang and vLLM did not read",
    ),
    "a logit scale": (at("dflash_config", "output_multiplier", to=0.5), "logit scale", "which vLLM did not read"),
    "a softcap": (at("dflash_config", "final_logit_softcapping", to=5.0), "logit scale", "which vLLM did not read"),
    "float32": (
        lambda config, tensors: tensors.update({name: tensor.float() for name, tensor in tensors.items()}),
        "tensor types",
        "the tensors are F32",
    ),
    "no number of positions": (drop("max_position_embeddings"), "positions", "engines would take 32,768"),
}


@pytest.mark.parametrize("name", WARNED)
def test_what_some_engines_misread_is_warned_of(name: str, tiny_target: Callable[..., Path], tmp_path: Path) -> None:
    change, check_name, text = WARNED[name]
    folder = write_drafter(tmp_path / "drafter", make_config())
    break_drafter(folder, change)
    result = check(folder, tiny_target("llama"))
    warnings = found(result, "warning")
    assert result["ok"], found(result, "error")
    assert warnings.keys() == {check_name} and text in warnings[check_name], warnings
    assert all(entry["way_out"] for entry in result["checks"] if entry["status"] != "ok")


def changed_target(target: Path, folder: Path, **changes: Any) -> Path:
    """A target's config and tokenizer without its weights; a change of None takes the entry out."""
    shutil.copytree(target, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        values |= {key: value for key, value in changes.items() if key in values}
        (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("target_changes", "drafter_changes", "status", "name", "text"),
    [
        ({}, {}, "ok", "target layers", "1,2 of 5, z-lab's choice"),
        (
            {"num_hidden_layers": 3},
            {"num_target_layers": 3, "target_layer_ids": (0, 1)},
            "error",
            "target layers",
            "4 at l",
        ),
        ({"num_hidden_layers": 4}, {"num_target_layers": 4, "target_layer_ids": (0, 1)}, "ok", "target layers", "of 4"),
        ({"head_dim": 16}, {}, "warning", "head size", "head_dim is 8, the target's heads have 16"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            {},
            "ok",
            "rotary base",
            "Its linear scaling is not inherited",
        ),
        ({"eos_token_id": [2, 5]}, {"mask_token_id": 5}, "error", "mask token", "5 is the target's eos token"),
        ({"pad_token_id": None}, {"mask_token_id": 0}, "error", "mask token", "0 is the target's pad token"),
        ({"bos_token_id": 0}, {"mask_token_id": 1}, "error", "mask token", "'<|im_start|>', which the chat template"),
        ({"mask_token": None}, {}, "warning", "mask token", "'<|mask|>', an added token"),
        ({}, {}, "ok", "mask token", "the tokenizer's own mask token '<|mask|>'"),
        ({"vocab_size": 500}, {"vocab_size": 500, "mask_token_id": 450}, "ok", "mask token", "450, a row that the tok"),
    ],
)
def test_a_drafter_is_held_against_the_facts_of_its_target(
    target_changes: dict[str, Any],
    drafter_changes: dict[str, Any],
    status: str,
    name: str,
    text: str,
    tiny_target: Callable[..., Path],
    tmp_path: Path,
) -> None:
    target = changed_target(tiny_target("llama"), tmp_path / "target", **target_changes)
    result = check(write_drafter(tmp_path / "drafter", make_config(**drafter_changes)), target)
    assert text in found(result, status)[name], result["checks"]


def shown_reports() -> tuple[tuple[Any, ...], list[str]]:
    """The five breaks that docs/screens/check.md shows, and its sections, of the good drafter first."""
    folder = Path(__file__).parents[2] / "docs" / "screens"
    module = runpy.run_path(str(folder / "check_reports.py"))
    return module["BREAKS"], (folder / "check.md").read_text(encoding="utf-8").split("\n## ")[1:]


@pytest.mark.parametrize("number", range(5))
def test_a_shown_break_has_the_errors_that_are_shown(
    number: int, tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    breaks, sections = shown_reports()
    folder = write_drafter(tmp_path / "drafter", make_config())
    assert len(breaks) == len(sections) - 1 and sections[number + 1].startswith(breaks[number].title)
    break_drafter(folder, breaks[number].change)
    result = CliRunner().invoke(main, ["check", str(folder), "--target", str(tiny_target("llama")), "--gpus", "cpu"])
    pattern = r"^error    (.+?): "
    errors = re.findall(pattern, result.stdout, re.MULTILINE)
    assert errors and errors == re.findall(pattern, sections[number + 1], re.MULTILINE)
    assert result.exit_code == 1 and "vllm serve" not in result.stdout


def test_the_good_drafter_that_is_shown_has_every_line_of_a_good_one(
    tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    _, sections = shown_reports()
    folder = write_drafter(tmp_path / "drafter", make_config())
    result = CliRunner().invoke(main, ["check", str(folder), "--target", str(tiny_target("llama")), "--gpus", "cpu"])
    pattern = r"^(?:ok|warning) +(.+?): "
    shown = re.findall(pattern, sections[0], re.MULTILINE)
    assert re.findall(pattern, result.stdout, re.MULTILINE) == shown
    assert result.exit_code == 0 and all(f"\n{engine}:\n  " in result.stdout for engine in ("sglang", "vllm", "z-lab"))


def test_reversed_layers_are_not_to_be_sorted_without_the_columns_of_fc(
    tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_drafter(tmp_path / "drafter", make_config())
    break_drafter(folder, at("dflash_config", "target_layer_ids", to=[2, 1]))
    [entry] = [entry for entry in check(folder, tiny_target("llama"))["checks"] if entry["name"] == "target layers"]
    assert entry["text"].endswith("the columns of fc stand in the order of training.")
    assert "if their order was another than ascending, sort fc's columns with them" in entry["way_out"]


def test_layers_counted_from_1_are_pointed_out(tiny_target: Callable[..., Path], tmp_path: Path) -> None:
    """z-lab's rule gives 1,2 for two taps of five layers; 2,3 are the same as vLLM and speculators count them."""
    folder = write_drafter(tmp_path / "drafter", make_config(target_layer_ids=(2, 3)))
    assert "each plus 1" in found(check(folder, tiny_target("llama")), "warning")["target layers"]


def test_head_size_and_positions_that_are_not_the_targets_are_warned_of(
    tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_drafter(tmp_path / "drafter", make_config(head_dim=16, max_position_embeddings=128))
    result = check(folder, tiny_target("llama"))
    warnings = found(result, "warning")
    assert result["ok"] and "head_dim is 16, the target's heads have 8" in warnings["head size"]
    assert "is 128, the target has 256" in warnings["positions"]


MIXED = both(
    at("layer_types", to=["sliding_attention", "full_attention"]),
    at("sliding_window", to=8),
    at("use_sliding_window", to=True),
    *NO_FLAG,
)


@pytest.mark.parametrize(
    ("change", "status", "name", "blind", "seeing"),
    [
        (CAUSAL, "error", "causality", ("sglang",), ("vllm", "z-lab")),
        (
            both(drop("is_causal"), at("dflash_config", "causal", to=True)),
            "error",
            "causality",
            ("z-lab",),
            ("vllm",),
        ),
        (MIXED, "warning", "layer types", ("vllm",), ("sglang", "z-lab")),
        (at("dflash_config", "input_embedding_scale", to=2.0), "warning", "embedding scale", ("sglang",), ("z-lab",)),
        (at("dflash_config", "output_multiplier", to=2.0), "warning", "logit scale", ("vllm",), ("sglang", "z-lab")),
    ],
)
def test_what_only_another_engine_misreads_is_left_out(
    change: Break,
    status: str,
    name: str,
    blind: tuple[str, ...],
    seeing: tuple[str, ...],
    tiny_target: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = write_drafter(tmp_path / "drafter", make_config())
    break_drafter(folder, change)
    assert name in found(check(folder, tiny_target("llama"), engines=blind), status)
    result = check(folder, tiny_target("llama"), engines=seeing)
    assert result["ok"] and name not in found(result, status)
    assert tuple(sorted(result["commands"])) == seeing


def test_a_target_of_few_layers_is_for_other_engines_than_sglang(
    tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    target = changed_target(tiny_target("llama"), tmp_path / "target", num_hidden_layers=3)
    folder = write_drafter(tmp_path / "drafter", make_config(num_target_layers=3, target_layer_ids=(0, 1)))
    assert found(check(folder, target), "error").keys() == {"target layers"}
    assert check(folder, target, engines=("vllm", "z-lab"))["ok"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (both(at("block_size", to=8), at("dflash_config", "block_size", to=8)), "block_size is 8, trained with 4"),
        (drop("dflash_config", "causal"), "dflash_config.causal is None, trained with False"),
        (drop("is_causal"), "is_causal is None, trained with False"),
        (at("dflash_config", "extra", to=1), "dflash_config.extra is 1, trained with None"),
    ],
)
def test_the_trainers_record_shows_a_flag_that_was_changed(
    change: Break, text: str, tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config()
    folder = write_drafter(tmp_path / "drafter", config)
    break_drafter(folder, change)
    (folder / "trainer").mkdir()
    names = ("config", "store", "random_state", "versions")
    state = {name: {} for name in names} | {"step": 1, "drafter": config.to_json(), "segments": [], "total_steps": 1}
    (folder / "trainer" / "state.json").write_text(json.dumps(state | {"evaluation": None}))
    errors = found(check(folder, tiny_target("llama")), "error")
    assert errors.keys() == {"training record"}
    assert text in errors["training record"]


def test_a_drafter_without_a_training_record_is_said_to_have_none(
    tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_drafter(tmp_path / "drafter", make_config())
    text = found(check(folder, tiny_target("llama")), "ok")["training record"]
    assert text.startswith("there is no trainer/state.json to read, ")
    assert text.endswith("block size and mask token cannot be compared with the training.")


def test_a_damaged_checkpoint_is_named(tiny_target: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", make_config())
    (folder / "checksums.json").write_text("{}")
    assert "files" in found(check(folder, tiny_target("llama")), "error")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # a tied head, and one of its own
@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
def test_a_head_or_an_embedding_that_is_not_the_targets_is_named(
    name: str, kind: str, tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    target = load_target(TargetConfig(name=str(tiny_target(kind))), (1, 2), "cpu")
    head = target.embed_tokens if target.lm_head is None else target.lm_head
    own = (head if name == "lm_head.weight" else target.embed_tokens).clone()
    folder = write_drafter(tmp_path / "drafter", make_config())
    for tensor, status in ((own, "ok"), (own[:-1], "error"), (own.roll(1, 0), "error")):
        break_drafter(folder, lambda config, tensors, tensor=tensor: tensors.update({name: tensor.contiguous()}))  # type: ignore[misc]
        head_check = parity.check_head(target, read_drafter_folder(folder))
        said = f"{name} in the file is not the target's" if status == "error" else "carries the same"
        assert head_check.status == status and said in head_check.text
    break_drafter(folder, lambda config, tensors: tensors.update({name: own}))
    assert check(folder, tiny_target(kind), parity=True)["ok"], "the file may carry the target's own"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("granite", "input_embedding_scale is 1, the target has 12; output_multiplier is 1, the target has 0.125"),
        ("gemma2", "final_logit_softcapping is 0, the target has 5"),
    ],
)
def test_scales_that_the_target_has_and_the_drafter_not_are_named(
    kind: str, text: str, tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    result = check(write_drafter(tmp_path / "drafter", make_config()), tiny_target(kind), parity=True)
    assert text in found(result, "error")["scales"]


def test_first_drafts_that_are_never_right_are_warned_of() -> None:
    served = torch.zeros(40, 3, 5)
    served[:, 0, 2], served[:, 1:, 4] = 1.0, 1.0
    for right, status in ((40, "ok"), (3, "ok"), (2, "warning"), (0, "warning")):
        labels = torch.tensor([2] * right + [4] * (40 - right))
        first_drafts = parity._first_drafts(served, labels)
        assert first_drafts.status == status and first_drafts.text.startswith(f"{right} of 40 ")


def test_a_target_whose_cache_cannot_be_rewound_is_warned_of(
    tiny_target: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise InputError("its cache can neither be cropped nor copied.")

    monkeypatch.setattr(parity, "check_parity", refuse)
    result = check(write_drafter(tmp_path / "drafter", make_config()), tiny_target("llama"), parity=True)
    assert result["ok"] and "neither be cropped" in found(result, "warning")["parity"]


def test_parity_is_not_compared_after_an_error(tiny_target: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", make_config(mask_token_id=2))
    assert "not compared" in found(check(folder, tiny_target("llama"), parity=True), "warning")["parity"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6, "block_size": 7},
    ],
    ids=["full", "causal", "sliding"],
)
def test_parity_holds_and_a_path_that_sees_other_keys_breaks_it(
    changes: dict[str, Any], tiny_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(TargetConfig(name=str(tiny_target("qwen3"))), (1, 2), "cpu")
    drafter = Drafter(make_config(**changes), seed=1).requires_grad_(False).eval()
    prompts = parity.encode_texts(target)
    status = {entry.name: entry.status for entry in parity.check_parity(target, drafter, prompts)}
    assert (status["target states"], status["parity"]) == ("ok", "ok")
    other = None if changes else torch.ones(4, 1, dtype=torch.bool)

    def see_less(self: Drafter, index: int, context: torch.Tensor, block: torch.Tensor) -> torch.Tensor | None:
        return None if other is None else torch.ones(4, context.shape[1] + 4, dtype=torch.bool).tril(context.shape[1])

    monkeypatch.setattr(Drafter, "_draft_mask", see_less)
    status = {entry.name: entry.status for entry in parity.check_parity(target, drafter, prompts)}
    assert status["parity"] == "error"


def test_states_of_another_layer_are_named(tiny_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    target = load_target(TargetConfig(name=str(tiny_target("llama"))), (1, 2), "cpu")
    answers = parity.answer_prompts(target, parity.encode_texts(target)[:1], 4)
    wrong = [replace(answer, served_features=answer.served_features.roll(32, dims=1)) for answer in answers]
    assert parity._check_states(target, answers).status == "ok"
    assert parity._check_states(target, wrong).status == "error"


def test_wanted_tensors_are_the_drafters(tmp_path: Path) -> None:
    config = make_config(num_attention_heads=6, num_key_value_heads=3)
    folder = read_drafter_folder(write_drafter(tmp_path / "drafter", config))
    shapes = {name: tuple(parameter.shape) for name, parameter in Drafter(config).named_parameters()}
    assert wanted_shapes(folder) == shapes


def test_commands_are_what_a_shell_takes(tiny_target: Callable[..., Path], tmp_path: Path) -> None:
    config = make_config(
        is_causal=None, layer_types=("sliding_attention", "full_attention"), sliding_window=6, block_size=16
    )
    folder = write_drafter(tmp_path / "the drafter's", config)
    result = check(folder, tiny_target("llama"))
    assert result["ok"], found(result, "error")
    vllm, sglang = shlex.split(result["commands"]["vllm"]), shlex.split(result["commands"]["sglang"])
    assert vllm[:3] == ["VLLM_USE_V2_MODEL_RUNNER=1", "vllm", "serve"]
    assert json.loads(vllm[5]) == {"method": "dflash", "model": str(folder), "num_speculative_tokens": 15}
    assert sglang[-1] == str(folder)
    assert "V2 model runner" in found(result, "warning")["layer types"]


def test_commands_name_revision_code_and_whole_paths(
    tiny_target: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = read_drafter_folder(write_drafter(Path("drafter"), make_config()))
    hub = serving_commands(folder, TargetConfig(name="org/t", revision="v1", trust_remote_code=True), ENGINES)
    vllm = {"method": "dflash", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 3}
    assert shlex.split(hub["vllm"]) == [
        *("vllm", "serve", "org/t", "--speculative-config", json.dumps(vllm)),
        *("--revision", "v1", "--trust-remote-code"),
    ]
    assert hub["sglang"].endswith(f"-draft-model-path {tmp_path / 'drafter'} --revision v1 --trust-remote-code")
    Path("t").mkdir()
    local = serving_commands(folder, TargetConfig(name="t"), ENGINES)
    assert all(f" {tmp_path / 't'} " in line and "--revision" not in line for line in local.values())
    break_drafter(folder.path, both(at("block_size", to=1), at("dflash_config", "block_size", to=1)))
    assert serving_commands(read_drafter_folder(folder.path), TargetConfig(name="t"), ENGINES) == {}


def test_what_is_no_drafter_is_refused(tiny_target: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", make_config())
    with pytest.raises(InputError, match="engine 'trt' is unknown"):
        check(folder, tiny_target("llama"), engines=("trt",))
    shutil.copytree(folder, tmp_path / "other")
    break_drafter(tmp_path / "other", at("speculators_model_type", to="dflash"))
    with pytest.raises(InputError, match="is in the speculators format.* give the drafter in z-lab's format"):
        check(tmp_path / "other", tiny_target("llama"))
