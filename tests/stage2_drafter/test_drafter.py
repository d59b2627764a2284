from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.blocks import dense_block_mask, document_positions
from dflash_train.stage2_drafter.drafter import Drafter, DrafterCache, DrafterConfig, load_drafter
from dflash_train.stage2_drafter.loss import block_weights, frozen_head_cross_entropy, weighted_loss

SLIDING = {"layer_types": ("sliding_attention", "full_attention", "sliding_attention"), "sliding_window": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": SLIDING,
    "sliding causal": {**SLIDING, "is_causal": True},
    "sliding, causality left to the reader": {**SLIDING, "is_causal": None},
    "window below the block": {**SLIDING, "sliding_window": 2},
    "one key head": {"num_key_value_heads": 1},
}


def all_blocks(drafter: Any, row: Any) -> Any:
    """Training path: every block of the row at once, dense masks, [A,K,H]."""
    config = drafter.config
    start, anchor = torch.from_numpy(row.blocks.start), torch.from_numpy(row.blocks.anchor)

    def attend_in(index: int) -> Any:
        mask = dense_block_mask(
            start, anchor, row.num_tokens, config.block_size, config.layer_window(index), config.layer_is_causal(index)
        )
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    hidden = drafter(
        drafter.project_context(row.features[None]),
        row.noise()[None],
        torch.from_numpy(document_positions(row.document_ids))[None],
        torch.from_numpy(row.blocks.noise_positions).flatten()[None],
        [attend_in(i) for i in range(config.num_hidden_layers)],
    )
    return hidden[0].unflatten(0, (-1, config.block_size))


def one_block(drafter: Any, row: Any, n: int, steps: Any = (1,)) -> Any:
    """Generate path: the context arrives in pieces, as it does between verifications; [K,H]."""
    start, anchor = int(row.blocks.start[n]), int(row.blocks.anchor[n])
    size, cache = drafter.config.block_size, DrafterCache(drafter.config)
    ends = sorted({start + round((anchor - start) * share) for share in steps})
    for end in ends:
        new = row.features[None, start + cache.length : end]
        positions = torch.arange(cache.length, end - start + size)[None]
        noise = row.noise().unflatten(0, (-1, size))[n][None]
        hidden = drafter.draft(new, noise, positions, cache)
        assert cache.length == end - start
    return hidden[0]


@pytest.fixture
def make_drafter(make_config: Any) -> Any:
    def make(seed: int = 3, **changes: Any) -> Any:
        # Larger weights than at the start of training, so that attention is far from uniform.
        return Drafter(make_config(initializer_range=0.2, **changes), seed=seed)

    return make


def test_parameters_have_z_labs_names_and_shapes(make_config: Any) -> None:
    config = make_config(num_hidden_layers=5)
    drafter = Drafter(config)
    names = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    assert len(names) == 58 == len(drafter.state_dict())
    assert names["fc.weight"] == (32, 64) and names["hidden_norm.weight"] == names["norm.weight"] == (32,)
    layer = {name.removeprefix("layers.4."): shape for name, shape in names.items() if name.startswith("layers.4.")}
    assert layer == {
        "input_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (64, 32),
        "self_attn.k_proj.weight": (32, 32),
        "self_attn.v_proj.weight": (32, 32),
        "self_attn.o_proj.weight": (32, 64),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "post_attention_layernorm.weight": (32,),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }


def test_weights_depend_on_the_seed_alone(make_config: Any) -> None:
    torch.manual_seed(1)
    first = Drafter(make_config(), seed=7).state_dict()
    state = torch.get_rng_state()
    torch.rand(5)
    second = Drafter(make_config(), seed=7).state_dict()
    other = Drafter(make_config(), seed=8).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert first["fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"


def test_weights_are_made_on_their_device(make_config: Any) -> None:
    """`meta` stands for a GPU: it shows the place, and the CPU the numbers."""
    drafter = Drafter(make_config(), seed=None, device="meta")
    assert {parameter.device.type for parameter in drafter.parameters()} == {"meta"}
    twin = Drafter(make_config(), seed=None)
    twin.initialize(torch.Generator().manual_seed(7))
    made = Drafter(make_config(), seed=7, device=torch.device("cpu"))
    assert all(torch.equal(one, two) for one, two in zip(twin.parameters(), made.parameters(), strict=True))


def test_rotary_positions_survive_a_cast_to_bf16(make_config: Any) -> None:
    drafter = Drafter(make_config(rope_theta=1e6))
    positions = torch.tensor([[0, 1, 40_000]])
    before = drafter.rotary(positions)
    after = drafter.to(torch.bfloat16).rotary(positions)
    assert all(torch.equal(b, a) and a.dtype == torch.float32 for b, a in zip(before, after, strict=True))
    angle = 40_000 / 1e6 ** (2 / 16)
    assert before[0][0, 2, 1].item() == pytest.approx(torch.tensor(angle, dtype=torch.float64).cos().item(), abs=2e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_path_equals_generate_path(make_drafter: Any, make_row: Any, variant: str) -> None:
    drafter = make_drafter(**VARIANTS[variant])
    row = make_row(drafter.config)
    trained = all_blocks(drafter, row)
    assert row.blocks.valid.sum() >= 8
    for n in range(int(row.blocks.valid.sum())):
        for steps in ((1,), (0.3, 0.6, 1), (0, 1)):
            torch.testing.assert_close(one_block(drafter, row, n, steps), trained[n], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_features_at_or_after_the_anchor_change_no_bit(make_drafter: Any, make_row: Any, variant: str) -> None:
    drafter = make_drafter(**VARIANTS[variant])
    row = make_row(drafter.config, num_anchors=6)
    logits = all_blocks(drafter, row) @ row.table.T
    for n in range(6):
        start, anchor = int(row.blocks.start[n]), int(row.blocks.anchor[n])
        clean = row.features.clone()
        row.features[anchor:] = row.features[anchor:].flip(0) * 50 + 3
        row.features[:start] *= -7  # nor does another document
        changed = all_blocks(drafter, row) @ row.table.T
        assert torch.equal(changed[n], logits[n])
        if anchor > start:
            row.features.copy_(clean)
            row.features[anchor - 1] += 1
            assert not torch.equal((all_blocks(drafter, row) @ row.table.T)[n], logits[n])
        row.features.copy_(clean)


def test_blocks_do_not_see_one_another(make_drafter: Any, make_row: Any) -> None:
    drafter = make_drafter()
    row = make_row(drafter.config)
    before = all_blocks(drafter, row)
    row.blocks.noise_ids[3] = 5
    after = all_blocks(drafter, row)
    others = [n for n in range(12) if n != 3]
    assert torch.equal(before[others], after[others]) and not torch.equal(before[3], after[3])


@pytest.mark.parametrize("variant", ["full", "sliding causal"])
@pytest.mark.parametrize(
    "lengths, supervised",
    [((48,), 0.0), ((2, 3, 2, 1, 3), 1.0), ((1, 1, 1), 1.0), ((0,), 0.5)],
    ids=["no anchor", "documents shorter than a block", "documents of one token", "padding alone"],
)
def test_odd_rows_give_finite_values_and_gradients(
    make_drafter: Any, make_row: Any, lengths: Any, supervised: float, variant: str
) -> None:
    drafter = make_drafter(**VARIANTS[variant])
    row = make_row(drafter.config, lengths=lengths, supervised=supervised)
    if lengths == (2, 3, 2, 1, 3):
        assert 0 in row.blocks.anchor[row.blocks.valid], "an anchor at a document's start sees no context"
    hidden = all_blocks(drafter, row).flatten(0, 1)
    out = frozen_head_cross_entropy(hidden.detach(), row.table, torch.from_numpy(row.blocks.labels).flatten())
    weights = block_weights(torch.from_numpy(row.blocks.label_mask), 4.0).flatten()
    loss = weighted_loss(hidden, out.dhidden, out.ce, weights)
    torch.autograd.backward(loss)
    assert hidden.isfinite().all() and loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())
    if not row.blocks.valid.any():
        assert loss.item() == 0 and not any(p.grad.any() for p in drafter.parameters())


def test_nothing_frozen_gets_a_gradient_or_is_saved(make_drafter: Any, make_row: Any) -> None:
    drafter = make_drafter()
    row = make_row(drafter.config)
    row.table.requires_grad_()
    noise = row.noise().detach()
    row.noise = lambda table=None: noise
    hidden = all_blocks(drafter, row).flatten(0, 1)
    out = frozen_head_cross_entropy(hidden.detach(), row.table, torch.from_numpy(row.blocks.labels).flatten())
    torch.autograd.backward(weighted_loss(hidden, out.dhidden, out.ce, torch.ones(len(hidden))))
    assert row.table.grad is None
    assert not any("embed" in name or "head" in name or "rotary" in name for name in drafter.state_dict())


def test_context_skips_the_input_norm_and_enters_every_layer(make_drafter: Any, make_row: Any) -> None:
    drafter = make_drafter()
    row = make_row(drafter.config)
    seen = []
    for layer in drafter.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    all_blocks(drafter, row)
    assert seen == [12 * 4] * 3, "input_layernorm sees noise tokens alone"


# --- config.json -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_survives_json(make_config: Any, variant: str) -> None:
    config = make_config(final_logit_softcapping=30.0, output_multiplier=0.5, **VARIANTS[variant])
    assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_config_writes_what_every_engine_reads(make_config: Any) -> None:
    written = make_config(rope_theta=1e6, is_causal=False, **SLIDING).to_json()
    assert written["block_size"] == written["dflash_config"]["block_size"] == 4
    assert written["is_causal"] is False and written["dflash_config"]["causal"] is False
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e6
    assert written["architectures"] == ["DFlashDraftModel"] and written["model_type"] == "qwen3"
    assert written["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    assert written["dflash_config"]["mask_token_id"] == 60 and written["dflash_config"]["target_layer_ids"] == [1, 3]
    assert written["num_target_layers"] == 6 and written["dtype"] == "bfloat16"
    assert written["use_sliding_window"] is True and written["sliding_window"] == 5
    assert written["tie_word_embeddings"] is False


def test_config_of_a_released_checkpoint_is_read(make_config: Any) -> None:
    """The older layout: block_size at the top, causality and rope_parameters not said."""
    written = make_config(**SLIDING).to_json()
    for name in ("is_causal", "rope_parameters", "rope_scaling"):
        del written[name]
    del written["dflash_config"]["block_size"], written["dflash_config"]["causal"]
    config = DrafterConfig.from_json(written)
    assert config.block_size == 4
    assert [config.layer_is_causal(i) for i in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dflash_config": None}, r"has no dflash_config"),
        ({"hidden_size": None}, r"lacks hidden_size"),
        ({"num_target_layers": None}, r"lacks num_target_layers"),
        ({"rope_theta": None, "rope_parameters": None}, r"lacks rope_theta"),
        ({"architectures": ["DFlash2DraftModel"]}, r"is for DFlash2DraftModel; only DFlashDraftModel"),
        ({"attention_bias": True}, r"attention_bias"),
        ({"hidden_act": "gelu"}, r"hidden_act of the drafter is 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, r"asks for 'yarn' rotary positions"),
        ({"selector_rank": 8}, r"sets selector_rank"),
        ({"block_size": 8}, r"says block_size 8 but dflash_config.block_size 4"),
        ({"is_causal": True}, r"says is_causal True but dflash_config.causal False"),
        ({"rope_theta": 1e6}, r"says rope_theta 1000000.0 but rope_parameters.rope_theta 10000.0"),
        ({"hidden_size": "32"}, r"hidden_size of the drafter's config.json is '32'; it must be a number \(int\)"),
        ({"vocab_size": 61.5}, r"vocab_size of the drafter's config.json is 61.5"),
        ({"num_key_value_heads": 3}, r"4 query heads of the drafter cannot share 3"),
        ({"layer_types": ["full_attention"]}, r"layer_types names 1 layers but the drafter has 3"),
        ({"layer_types": ["mamba"] * 3}, r"layer type 'mamba' is unknown"),
        ({"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True}, r"sliding_window is None"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 4}, r"use_sliding_window is false"),
    ],
)
def test_config_that_would_be_misread_is_refused(make_config: Any, change: Any, message: str) -> None:
    written = {k: v for k, v in (make_config().to_json() | change).items() if v is not None}
    with pytest.raises(InputError, match=message):
        DrafterConfig.from_json(written)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_size": 1}, r"block_size is 1; a block holds the anchor"),
        ({"mask_token_id": 61}, r"mask_token_id 61 is no row .* has 61 rows"),
        ({"target_layer_ids": (3, 1)}, r"\[3, 1\] must be ascending"),
        ({"target_layer_ids": (1, 6)}, r"within 0 to 5"),
        ({"head_dim": 15}, r"head_dim of the drafter is 15"),
        ({"hidden_size": 0}, r"hidden_size of the drafter is 0"),
    ],
)
def test_impossible_geometry_is_refused(make_config: Any, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_config(**change)


def manifest(**changes: Any) -> Any:
    values = {
        "hidden_size": 64,
        "vocab_size": 100,
        "target_layer_ids": (1, 4),
        "num_target_layers": 8,
        "embedding_scale": 1.0,
        "logit_scale": 1.0,
        "logit_softcap": None,
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(
    "target, expected",
    [
        (
            {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 160, "rope_theta": 5e5},
            (8, 2, 8, 160, 5e5),
        ),
        (
            {
                "text_config": {
                    "num_attention_heads": 4,
                    "head_dim": 32,
                    "intermediate_size": 128,
                    "rope_parameters": {
                        "full_attention": {"rope_theta": 1e6},
                        "sliding_attention": {"rope_theta": 1e4},
                    },
                }
            },
            (4, 4, 32, 128, 1e6),
        ),
        ({"n_head": 4, "n_inner": None, "n_positions": 128}, (4, 4, 16, 256, 1e4)),
        (
            {
                "num_attention_heads": 4,
                "intermediate_size": 96,
                "num_local_experts": 8,
                "rope_parameters": {"rope_theta": 1e7},
            },
            (4, 4, 16, 192, 1e7),
        ),
        (
            {"num_attention_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 24, "num_experts": 8},
            (4, 4, 16, 96, 1e4),
        ),
    ],
    ids=["llama", "multimodal", "gpt2", "mixtral", "qwen3-moe"],
)
def test_drafter_takes_the_shape_of_its_target(target: Any, expected: Any) -> None:
    config = DrafterConfig.from_target(target, manifest=manifest(), mask_token_id=99, num_layers=2)
    found = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        config.rope_theta,
    )
    assert found == expected
    assert config.is_causal is False and config.target_layer_ids == (1, 4) and config.block_size == 16


def test_drafter_takes_the_scales_of_its_target() -> None:
    config = DrafterConfig.from_target(
        {"num_attention_heads": 4},
        manifest=manifest(embedding_scale=8.0, logit_scale=0.25, logit_softcap=30.0),
        mask_token_id=99,
    )
    nested = config.to_json()["dflash_config"]
    assert nested["input_embedding_scale"] == 8.0
    assert nested["output_multiplier"] == 0.25 and nested["final_logit_softcapping"] == 30.0


# --- loading -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(make_config: Any, tmp_path: Path) -> Any:
    drafter = Drafter(make_config())
    save_file(drafter.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(drafter.config.to_json()))
    return drafter, tmp_path


def test_loaded_drafter_equals_the_saved_one(saved: Any) -> None:
    drafter, folder = saved
    loaded = load_drafter(folder)
    assert loaded.config == drafter.config
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    assert load_drafter(folder, torch.bfloat16).fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("norm.weight"), r"norm.weight is missing, wanted \(32,\)"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32)}), r"model.norm.weight is \(32,\), wanted none"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 96)}), r"fc.weight is \(32, 96\), wanted \(32, 64\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved: Any, change: Any, message: str) -> None:
    drafter, folder = saved
    tensors = dict(drafter.state_dict())
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=message):
        load_drafter(folder)


def test_folders_that_hold_no_drafter_are_refused(saved: Any) -> None:
    _, folder = saved
    with pytest.raises(InputError, match=r"has no config.json; give a folder"):
        load_drafter(folder / "nowhere")
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match=r"cannot be read as a drafter"):
        load_drafter(folder)
