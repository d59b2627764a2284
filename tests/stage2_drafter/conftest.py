"""A tiny drafter and packed rows of random tokens and features, made on the spot."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_train.stage2_drafter import rows
from dflash_train.stage2_drafter.blocks import Blocks, document_positions, make_blocks, sample_anchors
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.drafter import DrafterConfig
from dflash_train.store.calibration import Calibration
from dflash_train.store.creation import FrozenTarget, create_store
from dflash_train.store.encoding import is_projected, make_encoding
from dflash_train.store.manifest import Manifest, hash_id
from dflash_train.store.segment import SegmentWriter


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compiler_left_as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that train in their own process: what training sets for its process is taken back."""
    from dflash_train.stage2_drafter import compiled
    from dflash_train.stage2_drafter.flex_door import forbid_dense_flex

    undo: list[Callable[[], None]] = []
    monkeypatch.setattr(compiled, "forbid_dense_flex", lambda: undo.append(forbid_dense_flex()))
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    for function in reversed(undo):
        function()
    torch._functorch.config.activation_memory_budget = 1.0
    torch._dynamo.reset()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs that this process has planned since the test began."""
    epochs: list[int] = []
    plan_epoch = rows.plan_epoch

    def plan(lengths: np.ndarray, training: np.ndarray, seed: int, epoch: int, row_tokens: int) -> list[np.ndarray]:
        epochs.append(epoch)
        return plan_epoch(lengths, training, seed, epoch, row_tokens)

    monkeypatch.setattr(rows, "plan_epoch", plan)
    return epochs


@dataclass
class PackedRow:
    """What one training step sees: S tokens, A anchors; `table` is the target's embedding and, tied, its head."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    document_ids: np.ndarray
    blocks: Blocks
    features: Tensor
    table: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def noise(self, table: Tensor | None = None) -> Tensor:
        table = self.table if table is None else table
        return table[torch.from_numpy(self.blocks.noise_ids).flatten()]

    def inputs(self, device: str = "cpu") -> tuple[Tensor, ...]:
        """The arguments of CompiledDrafter.forward."""
        positions = torch.from_numpy(document_positions(self.document_ids))
        tensors = (
            self.features,
            positions,
            self.noise(),
            torch.from_numpy(self.blocks.noise_positions),
            torch.from_numpy(self.blocks.start),
            torch.from_numpy(self.blocks.anchor),
        )
        return tuple(tensor.to(device) for tensor in tensors)


@pytest.fixture
def make_config() -> Callable[..., DrafterConfig]:
    def make(**changes: Any) -> DrafterConfig:
        values: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 61,
            "block_size": 4,
            "mask_token_id": 60,
            "target_layer_ids": (1, 3),
            "num_target_layers": 6,
        }
        return DrafterConfig(**(values | changes))

    return make


@pytest.fixture
def make_row() -> Callable[..., PackedRow]:
    def make(
        config: DrafterConfig,
        lengths: Sequence[int] = (17, 3, 1, 22),
        row_tokens: int = 48,
        num_anchors: int = 12,
        seed: int = 0,
        supervised: float = 0.7,
    ) -> PackedRow:
        rng = np.random.default_rng(seed)
        document_ids = np.full(row_tokens, -1, dtype=np.int32)
        document_ids[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        loss_mask = ((rng.random(row_tokens) < supervised) & (document_ids >= 0)).astype(np.uint8)
        token_ids = rng.integers(0, config.mask_token_id, row_tokens).astype(np.int32)
        anchor, valid = sample_anchors(loss_mask, document_ids, num_anchors, rng)
        blocks = make_blocks(token_ids, loss_mask, document_ids, anchor, valid, config.block_size, config.mask_token_id)
        generator = torch.Generator().manual_seed(seed)
        return PackedRow(
            token_ids,
            loss_mask,
            document_ids,
            blocks,
            torch.randn(row_tokens, config.num_taps * config.hidden_size, generator=generator),
            torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(99)),
        )

    return make


TINY_TARGET: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., Path]:
    """A store of a made-up target whose text can be learned: every conversation steps through a cycle of 48 tokens."""

    def make(
        name: str = "tiny.zarr",
        lengths: Sequence[int] = (23, 31, 9, 40, 17, 28, 12, 36),
        encoding_name: str = "bf16",
        segment_samples: int = 5,
        unsupervised: Sequence[int] = (),
        tied: bool = True,
        head_dim: int = 8,
        order: Sequence[int] | None = None,
        scales: tuple[float, float, float | None] = (1.0, 1.0, None),
        not_finite: Sequence[int] = (),
    ) -> Path:
        """`scales`: the target's embedding_scale, logit_scale, logit_softcap; features of `not_finite` samples are nan."""
        path = tmp_path / name
        embedding_scale, logit_scale, logit_softcap = scales
        vocab_size, hidden_size, layer_ids = 64, 16, (1, 3)
        rank = 13 if is_projected(encoding_name) else None
        encoding = make_encoding(encoding_name, len(layer_ids), hidden_size, rank)
        rng = np.random.default_rng(5)
        table = 0.3 * rng.standard_normal((vocab_size, hidden_size)).astype(np.float32)
        head = None if tied else rng.standard_normal((vocab_size, hidden_size)).astype(np.float32)
        channel_scale = np.exp(rng.standard_normal(encoding.num_states)).astype(np.float32)
        calibration = Calibration.from_arrays(channel_scale)
        mixing = rng.standard_normal((hidden_size, encoding.num_states)).astype(np.float32)
        if rank is not None:
            values, directions = np.linalg.eigh(mixing.T @ mixing)
            calibration = Calibration.from_arrays(
                channel_scale,
                projection=np.ascontiguousarray(directions.T[::-1][:rank]),
                eigenvalues=np.ascontiguousarray(values[::-1][:rank]),
                layer_energy=np.ones(len(layer_ids), np.float32),
            )
        manifest = Manifest(
            target_name="tiny",
            target_revision=None,
            target_config_hash="0" * 16,
            weights_fingerprint="1" * 16,
            target_dtype="float32",
            quantization=None,
            tokenizer_hash="2" * 16,
            chat_template_hash="3" * 16,
            target_layer_ids=layer_ids,
            num_target_layers=6,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            tied_embeddings=tied,
            embedding_scale=embedding_scale,
            logit_scale=logit_scale,
            logit_softcap=logit_softcap,
            encoding=encoding_name,
            rank=rank,
            calibration_hash=calibration.hash,
        )
        config = TINY_TARGET | {"head_dim": head_dim}
        frozen = FrozenTarget(embed_tokens=table, lm_head=head, dtype_view=None, config=config)
        create_store(path, manifest, calibration, frozen)
        writer = SegmentWriter(path, encoding, {"source": "made up"})
        for index in range(len(lengths)) if order is None else order:
            length = lengths[index]
            token_ids = ((np.arange(length) * (1 + index % 3) + index) % 48).astype(np.int32)
            loss_mask = np.zeros(length, dtype=np.uint8)
            loss_mask[min(3, length - 1) :] = index not in unsupervised
            states = torch.from_numpy(table[token_ids] @ mixing * channel_scale)
            if index in not_finite:
                states *= math.nan
            features, feature_scales = encoding.encode(states, calibration)
            writer.append(
                1000 + index,
                hash_id(f"group {index // 2}".encode()),
                token_ids,
                loss_mask,
                features.numpy().view(encoding.storage_dtype),
                None if feature_scales is None else feature_scales.numpy(),
            )
            if writer.num_samples == segment_samples:
                writer.commit()
                writer = SegmentWriter(path, encoding, {"source": "made up"})
        writer.commit()
        return path

    return make


@pytest.fixture
def make_train_config(tmp_path: Path) -> Callable[..., TrainConfig]:
    """Options of a run of seconds over `make_store`."""

    def make(store: Path, run: str = "run", **options: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "devices": "cpu",
            "num_layers": 2,
            "block_size": 4,
            "mask_token": 63,
            "row_tokens": 64,
            "anchors": 12,
            "rows_per_step": 2,
            "steps": 6,
            "lr": 3e-3,
            "holdout": 0.2,
            "evaluate_every": 3,
            "save_every": 4,
            "log_every": 1,
            "seed": 3,
        }
        return TrainConfig(store=store, run=tmp_path / run, **(values | options))

    return make


RANKS_BEGIN = """
import json, sys
import torch
from dflash_train.machine.launch import leave_process
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.rank import run_rank
from dflash_train.stage2_drafter.preparation import prepare_run
from dflash_train.stage2_drafter.collectives import Rank
from dflash_train.stage2_drafter.trainer import Trainer

rank, folder, answer = int(sys.argv[1]), sys.argv[2], None
torch.set_num_threads(1)


def config(values):
    return TrainConfig(**values)


def meet(number):
    return f"file://{folder}/rendezvous-{number}"
"""
RANKS_END = """
print(json.dumps(answer))
leave_process(0)
"""


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a script as two ranks, so that a test can ask each of them what no log says: what they left in `answer`.

    The script finds `rank`, `given` (the JSON of the arguments), config(values) and meet(number), which names a
    rendezvous.
    """

    def run(script: str, *given: Any) -> list[Any]:
        folder = tmp_path / "rendezvous"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        text = f"{RANKS_BEGIN}\ngiven = json.loads({json.dumps(given)!r})\n{script}\n{RANKS_END}"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", text, str(rank), str(folder)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        deadline = time.monotonic() + 120
        while {rank.poll() for rank in ranks} in ({None}, {None, 0}) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in ranks:
            process.kill()  # the one that waits for one that died
        ended = [process.communicate() for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors for _, errors in ended)
        return [json.loads(out.splitlines()[-1]) for out, _ in ended]

    return run
