"""Quantised targets: what is loaded, what the manifest says, and which packages are asked for."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target.identity import build_manifest, known_without_weights, weights_fingerprint
from dflash_train.stage1_target.quantization import PACKAGES, check_quantization, quantization_name
from dflash_train.stage1_target.target import Target, load_target, make_target
from dflash_train.stage1_target.target_config import TargetConfig, load_model_config
from dflash_train.store.encoding import make_encoding

torch.set_num_threads(1)
CONFIG = TargetConfig(name="t")


def quantised(method: Any) -> Any:
    return SimpleNamespace(quantization_config={"quant_method": method})


def test_the_method_is_named_as_the_checkpoint_names_it() -> None:
    assert quantization_name(CONFIG, SimpleNamespace()) is None
    assert quantization_name(CONFIG, quantised("gptq")) == "gptq"
    method = SimpleNamespace(value="awq")  # transformers' enumeration
    assert quantization_name(CONFIG, SimpleNamespace(quantization_config=SimpleNamespace(quant_method=method))) == "awq"


@pytest.mark.parametrize("method", PACKAGES)
def test_missing_packages_are_named(method: str) -> None:
    packages = [package for _, package in PACKAGES[method]]
    with pytest.raises(InputError, match=f"quantised by {method}, .*: pip install {' '.join(packages)}, or take"):
        check_quantization(CONFIG, quantised(method), lambda module: False)
    check_quantization(CONFIG, quantised(method), lambda module: True)


@pytest.mark.parametrize("method", ["of tomorrow", None])
def test_a_method_that_transformers_would_pass_over_is_refused(method: str | None) -> None:
    with pytest.raises(
        InputError, match=f"quantised by '{method or ''}' by its config.json, which this transformers does"
    ):
        check_quantization(CONFIG, quantised(method), lambda module: True)
    check_quantization(CONFIG, SimpleNamespace(quantization_config={"load_in_8bit": True}), lambda module: True)


@pytest.fixture(scope="module")
def fp8_target(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as the hub has them: float8 matrices with a scale for each block of 128 x 128."""
    import transformers
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("fp8")
    shape = {"vocab_size": len(tiny_tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256}
    config = transformers.Qwen3Config(**shape, **heads, tie_word_embeddings=False)
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in transformers.AutoModelForCausalLM.from_config(config).state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor.to(torch.bfloat16)
            continue
        blocks = torch.randn_like(tensor).view(tensor.shape[0] // 128, 128, tensor.shape[1] // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scale[:, None, :, None]).view_as(tensor).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    written = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(written))
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(fp8_target: Path) -> Target:
    pytest.importorskip("accelerate")
    if torch.cuda.is_available():
        pytest.skip("where transformers sees a GPU it does not unpack FP8")
    return load_target(TargetConfig(name=str(fp8_target)), (1, 2), "cpu")


def test_an_fp8_target_is_unpacked_on_a_cpu_and_stays_fp8_in_the_manifest(loaded: Target, fp8_target: Path) -> None:
    from safetensors.torch import load_file

    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(fp8_target / "model.safetensors")
    wanted = tensors[name].float() * tensors[f"{name}_scale_inv"]
    torch.testing.assert_close(loaded.model.get_parameter(name), wanted, rtol=0, atol=0)
    states = loaded.hidden_states(torch.arange(7)[None])
    assert states.shape == (1, 7, 256) and bool(states.isfinite().all())
    encoding = make_encoding("int8", 2, 128)
    manifest = build_manifest(loaded, encoding, "0" * 16)
    assert manifest.quantization == "fp8"
    config = load_model_config(loaded.config)
    known = known_without_weights(loaded.config, config, loaded.tokenizer, loaded.target_layer_ids, encoding)
    assert known == {name: getattr(manifest, name) for name in known}, "the next start finds the same target"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_fp8_target_runs_on_a_gpu_or_names_what_its_kernels_need(fp8_target: Path) -> None:
    """Its kernels come from the hub through the package `kernels`: without one of them a sentence, no traceback."""
    pytest.importorskip("accelerate")
    try:
        target = load_target(TargetConfig(name=str(fp8_target)), (1, 2), "cuda")
    except InputError as error:
        assert "kernel" in str(error), error
        print("refused:", error)  # shown by pytest -rP
        return
    assert bool(target.hidden_states(torch.arange(7)[None]).isfinite().all())


def test_float8_weights_are_fingerprinted() -> None:
    layer = torch.nn.Linear(8, 300, bias=False)
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    before = weights_fingerprint(layer)
    layer.weight.data = (-layer.weight.float()).to(torch.float8_e4m3fn)
    assert weights_fingerprint(layer) != before


def test_kernels_that_are_missing_when_the_layers_run_are_one_sentence(
    loaded: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_arguments: Any, **_keywords: Any) -> Any:
        raise ImportError("finegrained-fp8 kernel unavailable: pip install\n kernels.")

    monkeypatch.setattr(loaded.model, "forward", forward)
    with pytest.raises(
        InputError, match="cannot run: finegrained-fp8 kernel unavailable: pip install kernels. Install"
    ):
        make_target(loaded.config, loaded.model, loaded.tokenizer, (1, 2))
