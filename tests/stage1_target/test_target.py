import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target import target as target_module
from dflash_train.stage1_target.identity import build_manifest, config_hash, frozen_target, weights_fingerprint
from dflash_train.stage1_target.target import Target, load_target, make_target
from dflash_train.stage1_target.target_config import (
    TargetConfig,
    from_pretrained,
    load_model_config,
)
from dflash_train.store.encoding import make_encoding

torch.set_num_threads(1)
TAPS = (0, 1, 3)
ROUNDING = float(torch.finfo(torch.float32).eps)


def load(folder: Path, layers: tuple[int, ...] = TAPS) -> Target:
    return load_target(TargetConfig(name=str(folder)), layers, "cpu")


def ragged_rows(vocab_size: int, lengths: tuple[int, ...] = (70, 33, 1, 64)) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(4, vocab_size, (length,), generator=generator) for length in lengths]
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), samples


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mixture_of_experts", "linear_attention"])
def test_tapped_states_equal_hidden_states_of_unpadded_forwards(tiny_target: Callable[..., Path], kind: str) -> None:
    target = load(tiny_target(kind))
    padded, samples = ragged_rows(target.vocab_size)
    states = target.hidden_states(padded)
    assert states.shape == (4, 70, 3 * 32) and states.dtype == torch.float32
    for row, sample in zip(states, samples, strict=True):
        with torch.no_grad():
            all_states = target.model(sample[None], output_hidden_states=True).hidden_states
        wanted = torch.cat([all_states[i + 1][0] for i in TAPS], dim=-1)
        # Other shapes take other matrix kernels, which add in another order: sums of up to 64 products, in 4 layers of
        # some 6 products each, each off by at most half a unit in the last place a step, which add up like a random
        # walk: sqrt(64 * 24) / 2 = 20 units of the largest value. A wrong layer or a visible pad is off by its size.
        torch.testing.assert_close(row[: len(sample)], wanted, rtol=0, atol=20 * ROUNDING * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_the_text_part_of_a_multimodal_target_is_tapped(kind: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    import transformers

    text = make_text_config(kind, len(tiny_tokenizer))
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.CONFIG_MAPPING[kind](text_config=text, vision_config=vision)
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    target = load(tmp_path, (0, 2))
    padded, samples = ragged_rows(target.vocab_size)
    states = target.hidden_states(padded)
    for row, sample in zip(states, samples, strict=True):
        with torch.no_grad():
            all_states = target.model(input_ids=sample[None], output_hidden_states=True).hidden_states
        wanted = torch.cat([all_states[i + 1][0] for i in (0, 2)], dim=-1)
        torch.testing.assert_close(row[: len(sample)], wanted, rtol=0, atol=20 * ROUNDING * float(wanted.abs().max()))
    assert config_hash(target.model_config) == config_hash(load_model_config(target.config))


def make_text_config(kind: str, vocab_size: int) -> dict[str, Any]:
    text: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 4}
    text |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    if kind == "qwen3_5":
        text |= {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2}
        text |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    return text


def test_layers_above_the_last_tap_never_run(tiny_target: Callable[..., Path]) -> None:
    target = load(tiny_target("llama"), (0, 2))
    calls: list[int] = []
    for i, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda *_, i=i: calls.append(i))
    target.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(-1))
    padded, _ = ragged_rows(target.vocab_size)
    for _ in range(2):
        calls.clear()
        target.hidden_states(padded)
        assert calls in ([0, 1, 2], [0, 1])  # the tap's own hook may end the forward before the counting one
    with torch.no_grad():
        target.model(padded)  # the model itself is untouched
    assert calls[-6:] == [0, 1, 2, 3, 4, -1]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_forward_looks_for_no_packed_sequences(
    tiny_target: Callable[..., Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search asks the GPU and so waits for the batch before."""
    from transformers import masking_utils

    searches: list[torch.Tensor] = []
    search = masking_utils.find_packed_sequence_indices

    def counted(position_ids: torch.Tensor) -> Any:
        searches.append(position_ids)
        return search(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", counted)
    target = load(tiny_target(kind), (0, 2))
    padded, _ = ragged_rows(target.vocab_size)
    searches.clear()
    target.hidden_states(padded)
    assert searches == []
    with torch.no_grad():
        target.model(padded, use_cache=False)
    assert searches, "outside it is as it was"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_forward_on_a_gpu_waits_for_nothing(tiny_target: Callable[..., Path], kind: str) -> None:
    target = load_target(TargetConfig(name=str(tiny_target(kind))), (0, 2), "cuda")
    padded, _ = ragged_rows(target.vocab_size)
    token_ids = padded.cuda()
    target.run_taps(token_ids, lambda _layer, _states: None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.run_taps(token_ids, lambda _layer, _states: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("kind", "embedding_scale", "logit_scale", "softcap", "tied"),
    [
        ("llama", 1.0, 1.0, None, True),
        ("qwen3", 1.0, 1.0, None, False),
        ("gpt2", 1.0, 1.0, None, True),
        ("gemma2", 32**0.5, 1.0, 5.0, True),
        ("cohere", 1.0, 0.25, None, True),
        ("granite", 12.0, 1 / 8, None, False),
    ],
)
def test_scales_and_softcap_reproduce_the_logits(
    tiny_target: Callable[..., Path],
    kind: str,
    embedding_scale: float,
    logit_scale: float,
    softcap: float | None,
    tied: bool,
) -> None:
    target = load(tiny_target(kind))
    assert target.embedding_scale == pytest.approx(embedding_scale, rel=1e-6)
    assert (target.logit_scale, target.logit_softcap) == (logit_scale, softcap)
    assert (target.lm_head is None) == tied
    padded, _ = ragged_rows(target.vocab_size, (40,))
    with torch.no_grad():
        final = target.decoder(input_ids=padded).last_hidden_state
        logits = final @ (target.embed_tokens if target.lm_head is None else target.lm_head).T * target.logit_scale
        if target.logit_softcap is not None:
            logits = target.logit_softcap * torch.tanh(logits / target.logit_softcap)
        torch.testing.assert_close(logits, target.model(padded).logits, rtol=1e-5, atol=1e-5)


def test_logit_scale_that_no_config_names_is_measured(tiny_target: Callable[..., Path]) -> None:
    target = load(tiny_target("qwen3"))
    target.model.lm_head.register_forward_hook(lambda _module, _arguments, output: output * 3.0)
    again = make_target(target.config, target.model, target.tokenizer, TAPS)
    assert again.logit_scale == pytest.approx(3.0, rel=1e-5)
    target.model.lm_head.register_forward_hook(lambda _module, _arguments, output: output.relu())
    with pytest.raises(InputError, match="no scaled .* product of its final states and its head"):
        make_target(target.config, target.model, target.tokenizer, TAPS)


def test_head_with_bias_is_refused(tiny_target: Callable[..., Path]) -> None:
    target = load(tiny_target("qwen3"))
    target.model.lm_head.bias = torch.nn.Parameter(torch.zeros(target.vocab_size))
    with pytest.raises(InputError, match="head of the target .* has a bias"):
        make_target(target.config, target.model, target.tokenizer, TAPS)


def test_checkpoint_without_all_weights_is_refused(tiny_target: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_target("qwen3")
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 of its weights \(lm_head.weight\)"):
        load(tmp_path)


def test_a_target_that_its_gpus_do_not_hold_is_refused(
    tiny_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def placed(auto_class: Any, config: TargetConfig, what: str, **keywords: Any) -> Any:
        if what != "weights":
            return from_pretrained(auto_class, config, what, **keywords)
        assert keywords.pop("device_map") == "balanced"
        model, loading = from_pretrained(auto_class, config, what, **keywords)
        model.hf_device_map = {"model.layers.0": 0, "": "cpu"}
        return model, loading

    monkeypatch.setattr(target_module, "from_pretrained", placed)
    with pytest.raises(InputError, match="does not fit into the free memory of 2 GPUs; give it more with --gpus-per-"):
        load_target(TargetConfig(name=str(tiny_target("llama"))), TAPS, "cpu", num_devices=2)


def test_model_without_a_stack_of_layers_is_refused(tiny_target: Callable[..., Path]) -> None:
    target = load(tiny_target("llama"))
    target.model.model.layers = torch.nn.ModuleList(list(target.layers)[:2])
    with pytest.raises(InputError, match="No list of 5 decoder layers was found in LlamaModel"):
        make_target(target.config, target.model, target.tokenizer, (0,))


def test_logits_that_are_not_finite_name_the_tensor_or_the_dtype(tiny_target: Callable[..., Path]) -> None:
    model = load_target(TargetConfig(name=str(tiny_target("llama"))), (1, 2), "cpu").model
    config, tokenizer = TargetConfig(name="t"), object()
    weight = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        weight[0, 0] = float("nan")
    damaged = (
        r"logits are not finite: model.layers.1.mlp.down_proj.weight has values that are not; the checkpoint is damaged"
    )
    with pytest.raises(InputError, match=damaged):
        make_target(config, model, tokenizer, (1, 2))
    with torch.no_grad():
        weight.fill_(1e38)
    with pytest.raises(InputError, match="all weights are, so it overflows even in float32"):
        make_target(config, model, tokenizer, (1, 2))
    with pytest.raises(InputError, match="all weights are, so it overflows in bfloat16; try --dtype float32"):
        make_target(config, model.bfloat16(), tokenizer, (1, 2))


def test_layers_that_run_twice_are_refused(tiny_target: Callable[..., Path]) -> None:
    target = load(tiny_target("llama"))
    target.model.model.layers[2] = target.model.model.layers[1]
    with pytest.raises(InputError, match="do not run once each, in order"):
        make_target(target.config, target.model, target.tokenizer, (0,))


def test_loading_prints_nothing(tiny_target: Callable[..., Path]) -> None:
    code = (
        "import sys; from dflash_train.stage1_target.target import load_target\n"
        "from dflash_train.stage1_target.target_config import TargetConfig\n"
        "import torch; target = load_target(TargetConfig(name=sys.argv[1]), (0,), 'cpu')\n"
        "target.hidden_states(torch.zeros(2, 3, dtype=torch.int64))"
    )
    command = [sys.executable, "-c", code, str(tiny_target("linear_attention"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_fingerprint_tells_weights_apart_and_survives_a_reload(tiny_target: Callable[..., Path]) -> None:
    first, again, other = load(tiny_target("llama")), load(tiny_target("llama")), load(tiny_target("llama", seed=1))
    assert weights_fingerprint(first.model) == weights_fingerprint(again.model)
    assert weights_fingerprint(first.model) != weights_fingerprint(other.model)
    with torch.no_grad():
        again.model.model.norm.weight[7] += 1e-3
    assert weights_fingerprint(first.model) != weights_fingerprint(again.model)


def test_manifest_and_frozen_tables_are_the_targets(tiny_target: Callable[..., Path], tiny_tokenizer: Any) -> None:
    from dflash_train.store.encoding import from_stored

    target = load(tiny_target("qwen3"))
    manifest = build_manifest(target, make_encoding("int8", 3, 32), "0" * 16)
    assert (manifest.target_name, manifest.target_dtype) == (tiny_target("qwen3").name, "float32")
    assert (manifest.num_target_layers, manifest.hidden_size, manifest.vocab_size) == (5, 32, len(tiny_tokenizer))
    assert (manifest.tied_embeddings, manifest.quantization, manifest.encoding) == (False, None, "int8")
    assert manifest.target_config_hash == config_hash(load_model_config(target.config))
    frozen = frozen_target(target)
    assert frozen.lm_head is not None
    assert torch.equal(from_stored(frozen.embed_tokens, frozen.dtype_view), target.model.get_input_embeddings().weight)
    assert torch.equal(from_stored(frozen.lm_head, frozen.dtype_view), target.model.lm_head.weight)
    assert frozen.config["hidden_size"] == 32 and "tokenizer.json" in frozen.files
