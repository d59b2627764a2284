"""benchmarks/peer_training.py: SpecForge's step gets our rows, as many anchors, and, asked to, our loss to the last digit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_train.benchmarks.peer_training import (
    RULES,
    PeerTrainer,
    TokenBlocks,
    make_parser,
    train,
    unpack,
    until_first_masked,
    write_whole,
)
from dflash_train.errors import InputError
from dflash_train.stage2_drafter.blocks import make_blocks, sample_anchors
from dflash_train.stage2_drafter.checkpoint import read_groups
from dflash_train.stage2_drafter.collectives import Rank
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.drafter import load_drafter
from dflash_train.stage2_drafter.loss import block_weights
from dflash_train.stage2_drafter.metrics import StepSums
from dflash_train.stage2_drafter.preparation import prepare_run
from dflash_train.stage2_drafter.rows import RowKey
from dflash_train.stage2_drafter.trainer import Trainer

needs_specforge = pytest.mark.skipif(find_spec("specforge") is None, reason="wants SpecForge 0.2.0")


def blocks_of(lengths: tuple[int, ...], loss_mask: np.ndarray, row_tokens: int, num_anchors: int) -> TokenBlocks:
    documents = np.full(row_tokens, -1, np.int32)
    documents[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    token_ids = np.arange(row_tokens, dtype=np.int32)
    drawn = sample_anchors(loss_mask, documents, num_anchors, np.random.default_rng(0))
    blocks = make_blocks(token_ids, loss_mask, documents, *drawn, block_size=4, mask_token_id=99)
    return TokenBlocks(**vars(blocks), token_ids=token_ids, loss_mask=loss_mask, document_ids=documents)


def test_each_conversation_is_a_row_of_the_batch() -> None:
    loss_mask = np.ones(24, np.uint8)
    loss_mask[5:9] = [0, 1, 0, 1]  # no two in a row: left out
    blocks = blocks_of((5, 4, 7, 1), loss_mask, 24, num_anchors=8)
    batch = unpack(blocks, multiple=4)
    assert batch is not None
    assert batch.index.shape == (2, 8)
    assert blocks.token_ids[batch.index][0][batch.inside[0]].tolist() == [0, 1, 2, 3, 4]
    assert blocks.token_ids[batch.index][1][batch.inside[1]].tolist() == [9, 10, 11, 12, 13, 14, 15]
    assert batch.num_anchors.sum() == 8
    assert unpack(blocks_of((5, 4), np.zeros(24, np.uint8), 24, num_anchors=8), multiple=4) is None


def test_rule_of_ours_is_that_of_our_blocks() -> None:
    rng = np.random.default_rng(1)
    loss_mask = (rng.random(60) < 0.7).astype(np.uint8)
    blocks = blocks_of((60,), loss_mask, 60, num_anchors=20)
    place = np.minimum(blocks.anchor[:, None] + np.arange(4), 59)
    counted = loss_mask[place] * (blocks.anchor[:, None] + np.arange(4) < 60) * blocks.valid[:, None]
    counted[:, 0] = 0
    found = until_first_masked(torch.from_numpy(counted).float()[None])[0].numpy()
    assert (counted != blocks.label_mask).any(), "the rules would not differ here"
    np.testing.assert_array_equal(found.astype(bool), blocks.label_mask)


def test_weights_that_are_cut_short_are_not_there(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "model.safetensors", parts())
    assert not (tmp_path / "model.safetensors").exists()
    write_whole(tmp_path / "model.safetensors", [b"wh", b"ole"])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def options_of(config: TrainConfig, *more: str) -> Any:
    words = ["--store", str(config.store), "--run", str(config.run), "--device", "cpu", "--mask-token", "63"]
    for name in (
        "steps",
        "seed",
        "row_tokens",
        "anchors",
        "rows_per_step",
        "num_layers",
        "block_size",
        "lr",
        "holdout",
    ):
        words += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    return make_parser().parse_args([*words, *more])


def loss_and_gradients(trainer: Trainer, key: RowKey) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ w·CE over Σ w of one row, and the gradients of Σ w·CE."""
    sums = StepSums(trainer.forward.compiled.block_size, 1, torch.device("cpu"))
    row = trainer.builder.build(key, trainer._buffer())
    loss = trainer.forward.loss(row, 0, sums)
    torch.autograd.backward(loss)
    gradients = {name: parameter.grad.clone() for name, parameter in trainer.named if parameter.grad is not None}
    return loss.detach() / sums.reduced(1).weight, gradients


def dense_flex(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, scale: float, **_: Any) -> Tensor:
    """What compiled flex_attention computes on a GPU; on a CPU it has no backward pass."""
    batch, heads, num_queries, _size = query.shape
    places = [torch.arange(size) for size in (batch, 1, num_queries, key.shape[2])]
    grid = torch.meshgrid(*places, indexing="ij")
    mask = block_mask.mask_mod(*grid)
    groups = heads // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask, -1e30)
    attended: Tensor = torch.softmax(scores, dim=-1) * mask @ value
    return attended


@needs_specforge
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_with_our_rule_and_all_anchors_the_step_is_ours(
    make_store: Callable[..., Path],
    make_train_config: Callable[..., TrainConfig],
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
) -> None:
    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", dense_flex)
    config = make_train_config(make_store(encoding_name="int8", tied=False), anchors=64, loss="decay")
    run, key = prepare_run(config), RowKey(0, 0)
    ours_loss, ours = loss_and_gradients(
        Trainer(run, Rank(), lambda line: None, lambda: False),
        key,
    )
    options = options_of(config, "--rule", "ours", "--features", "scaled", "--attention", attention)
    peer_loss, peers = loss_and_gradients(PeerTrainer(run, torch.device("cpu"), options), key)
    torch.testing.assert_close(peer_loss, ours_loss, rtol=1e-5, atol=0, check_dtype=False)
    assert peers.keys() == ours.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(peers[name], gradient, rtol=1e-3, atol=2e-5 * float(gradient.abs().max()))


@needs_specforge
def test_as_many_anchors_as_ours_are_trained(
    make_store: Callable[..., Path], make_train_config: Callable[..., TrainConfig]
) -> None:
    config = make_train_config(make_store(), anchors=13)
    run, key = prepare_run(config), RowKey(0, 1)
    trainer = PeerTrainer(run, torch.device("cpu"), options_of(config))
    row = trainer.builder.build(key, trainer._buffer())
    kept = []
    draw = trainer.forward.peer._sample_anchor_positions

    def counted(*arguments: Any) -> Any:
        anchors, keep = draw(*arguments)
        kept.append(int(keep.sum()))
        assert (keep.sum(1) == trainer.forward.peer.anchors_of_each).all()
        return anchors, keep

    trainer.forward.peer._sample_anchor_positions = counted
    trainer.forward.loss(row, 0, StepSums(config.block_size, 1, torch.device("cpu")))
    assert kept == [int(row.blocks.valid.sum())] == [13] == [trainer.forward.anchors_trained]


@needs_specforge
def test_the_rules_count_what_they_say(
    make_store: Callable[..., Path], make_train_config: Callable[..., TrainConfig]
) -> None:
    config = make_train_config(make_store(), anchors=64)
    run, weights = prepare_run(config), {}
    for rule in RULES:
        trainer = PeerTrainer(run, torch.device("cpu"), options_of(config, "--rule", rule))
        row = trainer.builder.build(RowKey(0, 0), trainer._buffer())
        assert isinstance(row.blocks, TokenBlocks)
        punched = row.blocks.loss_mask.copy()
        punched[7::5] = 0
        given = (row.blocks.token_ids, punched, row.blocks.document_ids)
        drawn = sample_anchors(*given[1:], 64, np.random.default_rng(0))
        blocks = make_blocks(*given, *drawn, config.block_size, 63)
        row.blocks = TokenBlocks(**vars(blocks), token_ids=given[0], loss_mask=punched, document_ids=given[2])
        sums = StepSums(config.block_size, 1, torch.device("cpu"))
        trainer.forward.loss(row, 0, sums)
        weights[rule] = sums.reduced(1).weight
        place = np.minimum(blocks.anchor[:, None] + np.arange(config.block_size), len(punched) - 1)
        supervised = (
            (punched[place] != 0) & (given[2][place] == given[2][blocks.anchor][:, None]) & blocks.valid[:, None]
        )
        supervised[:, 0] = False
        counted = torch.from_numpy(supervised if rule == "specforge" else blocks.label_mask)
        wanted = block_weights(counted, config.gamma_for(config.block_size)).sum()
        assert weights[rule] == pytest.approx(float(wanted), rel=1e-5)
    assert weights["specforge"] > weights["ours"]


@needs_specforge
@pytest.mark.parametrize("features", ["raw", "scaled"])
def test_the_drafter_is_written_for_raw_states_with_its_groups(
    make_store: Callable[..., Path], make_train_config: Callable[..., TrainConfig], features: str
) -> None:
    config = make_train_config(make_store(encoding_name="int8"), steps=2, rows_per_step=1)
    options = options_of(config, "--features", features)
    result = train(options)
    run = prepare_run(config)
    drafter = load_drafter(config.run, torch.float32)
    again = PeerTrainer(run, torch.device("cpu"), options)
    first = dict(again.named)["fc.weight"].detach()  # two small steps away
    scale = torch.ones(first.shape[1]) if features == "raw" else run.reader.calibration.channel_scale
    assert (drafter.fc.weight * scale - first).abs().max() < 4 * config.lr
    np.testing.assert_array_equal(read_groups(config.run), run.training_groups())
    assert json.loads((config.run / "config.json").read_text()) == run.drafter_config.to_json()
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(config.run / "model.safetensors").values())
    assert result["anchors_trained"] == 2 * config.anchors
    with pytest.raises(InputError, match="Give another --run"):
        train(options)


@needs_specforge
def test_raw_features_are_the_targets_states(
    make_store: Callable[..., Path], make_train_config: Callable[..., TrainConfig]
) -> None:
    config = make_train_config(make_store())
    run = prepare_run(config)
    trainer = PeerTrainer(run, torch.device("cpu"), options_of(config))
    row = trainer.builder.build(RowKey(0, 0), trainer._buffer())
    seen: dict[str, Tensor] = {}
    trainer.forward.peer.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    trainer.forward.loss(row, 0, StepSums(config.block_size, 1, torch.device("cpu")))
    stored = row.buffer.features.view(torch.bfloat16).float()
    batch = unpack(row.blocks, 1)  # type: ignore[arg-type]
    assert batch is not None
    wanted = stored[torch.from_numpy(batch.index)] * torch.from_numpy(batch.inside)[..., None]
    torch.testing.assert_close(seen["hidden_states"], wanted, rtol=1e-6, atol=0)


@needs_specforge
def test_a_projected_store_is_refused(
    make_store: Callable[..., Path], make_train_config: Callable[..., TrainConfig]
) -> None:
    config = make_train_config(make_store(encoding_name="projected-int8"))
    with pytest.raises(InputError, match="bf16 or int8"):
        PeerTrainer(prepare_run(config), torch.device("cpu"), options_of(config))
