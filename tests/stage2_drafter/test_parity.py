"""Our drafter against z-lab's own package, which lies in tests/.oracle (see CONTRIBUTING) and is imported only here."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from dflash_train.stage2_drafter.compiled import CompiledDrafter
from dflash_train.stage2_drafter.drafter import Drafter, DrafterCache

ORACLE = Path(__file__).parents[1] / ".oracle"
SLIDING = {"layer_types": ("sliding_attention", "full_attention", "sliding_attention"), "sliding_window": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": SLIDING,
    "sliding causal": {**SLIDING, "is_causal": True},
    "sliding, causality left to the reader": {**SLIDING, "is_causal": None},
    "scaled logits": {"output_multiplier": 0.5, "final_logit_softcapping": 3.0},
}


@pytest.fixture(scope="module")
def oracle() -> Any:
    if not (ORACLE / "dflash" / "model.py").is_file():
        pytest.skip(
            "tests/.oracle is missing: pip install --no-deps --target tests/.oracle dflash==0.1.0 to compare with z-lab"
        )
    sys.path.insert(0, str(ORACLE))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield importlib.import_module("dflash.model")
    finally:
        sys.path.remove(str(ORACLE))
        for name in [name for name in sys.modules if name == "dflash" or name.startswith("dflash.")]:
            del sys.modules[name]


@pytest.fixture
def make_pair(oracle: Any, make_config: Any, tmp_path: Path) -> Any:
    """Our drafter and z-lab's, loaded from the folder that ours was written to."""

    def make(**changes: Any) -> Any:
        drafter = Drafter(make_config(initializer_range=0.2, **changes), seed=5)
        save_file(drafter.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(drafter.config.to_json()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs, report = oracle.DFlashDraftModel.from_pretrained(
                tmp_path, dtype=torch.float32, output_loading_info=True
            )
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        return drafter.eval(), theirs.eval()

    return make


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_training_and_generate_path_equal_z_labs_package(
    make_pair: Any, make_row: Any, oracle: Any, variant: str
) -> None:
    ours, theirs = make_pair(**VARIANTS[variant])
    config = ours.config
    assert theirs.block_size == config.block_size and theirs.mask_token_id == config.mask_token_id
    assert tuple(theirs.target_layer_ids) == config.target_layer_ids
    row = make_row(config)
    trained = CompiledDrafter(ours, device="cpu", row_tokens=row.num_tokens, num_anchors=12)(*row.inputs())
    trained = trained.unflatten(0, (12, config.block_size))
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    head.weight.data.copy_(row.table)
    compared = 0
    for n in range(int(row.blocks.valid.sum())):
        start, anchor = int(row.blocks.start[n]), int(row.blocks.anchor[n])
        features = row.features[None, start:anchor]
        noise = row.noise().unflatten(0, (12, config.block_size))[n][None]
        positions = torch.arange(anchor - start + config.block_size)[None]
        reference = theirs(target_hidden=features, noise_embedding=noise, position_ids=positions)
        drafted = ours.draft(features, noise, positions, DrafterCache(config))
        torch.testing.assert_close(drafted, reference, atol=1e-5, rtol=1e-5)
        open_slots = reference[:, 1:]  # training leaves the anchor's out: nothing is predicted there
        torch.testing.assert_close(trained[n, None, 1:], open_slots, atol=1e-5, rtol=1e-5)
        logits = trained[n, 1:] @ row.table.T * config.output_multiplier
        if cap := config.final_logit_softcapping:
            logits = cap * torch.tanh(logits / cap)
        torch.testing.assert_close(logits[None], theirs.compute_logits(open_slots, head), atol=1e-4, rtol=1e-4)
        compared += 1
    assert compared >= 8


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_drafting_round_by_round_equals_z_labs_cache(make_pair: Any, oracle: Any, variant: str) -> None:
    """Several rounds with each package's own cache, as in decoding: new context of varying length, then a block."""
    ours, theirs = make_pair(**VARIANTS[variant])
    config = ours.config
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 40, config.num_taps * config.hidden_size, generator=generator)
    cache, their_cache, length = DrafterCache(config), oracle._make_cache(theirs.config), 0
    for num_new in (11, 1, 4, 2, 3, 1):
        noise = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
        new = features[:, length : length + num_new]
        positions = torch.arange(length, length + num_new + config.block_size)[None]
        reference = theirs(
            target_hidden=new,
            noise_embedding=noise,
            position_ids=positions,
            past_key_values=their_cache,
            use_cache=True,
        )[:, -config.block_size :]
        length += num_new
        oracle._crop_to(their_cache, length)
        drafted = ours.draft(new, noise, positions, cache)
        torch.testing.assert_close(drafted, reference, atol=1e-5, rtol=1e-5)
        assert cache.length == length


def test_parameters_are_z_labs(make_pair: Any) -> None:
    ours, theirs = make_pair()
    found = {name: p.shape for name, p in ours.named_parameters()}
    assert found == {name: p.shape for name, p in theirs.named_parameters()}


def test_loss_of_both_gives_the_same_gradients(make_pair: Any, make_row: Any) -> None:
    ours, theirs = make_pair()
    row = make_row(ours.config, num_anchors=1, lengths=(40,))
    anchor = int(row.blocks.anchor[0])
    assert anchor > 0
    noise, labels = row.noise()[None], torch.from_numpy(row.blocks.labels[0])
    positions = torch.arange(anchor + ours.config.block_size)[None]
    trained = CompiledDrafter(ours, device="cpu", row_tokens=row.num_tokens, num_anchors=1)(*row.inputs())
    torch.autograd.backward(F.cross_entropy(trained[1:] @ row.table.T, labels[1:]))
    reference = theirs(target_hidden=row.features[None, :anchor], noise_embedding=noise, position_ids=positions)[0]
    torch.autograd.backward(F.cross_entropy(reference[1:] @ row.table.T, labels[1:]))
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5, rtol=1e-4, msg=name)
