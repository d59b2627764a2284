"""Small stores for the tests of the store: made through the public writers, with seeded values."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dflash_train.store.calibration import Calibration
from dflash_train.store.creation import FrozenTarget, create_store, manifest_encoding
from dflash_train.store.encoding import Encoding, is_projected, to_stored
from dflash_train.store.files import Files
from dflash_train.store.manifest import Manifest
from dflash_train.store.segment import SegmentWriter

NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE = 3, 8, 11
RANK = 7  # odd: two int4 share a byte
ODD_LENGTHS = (1, 7, 31, 32, 33, 100, 507)


@dataclass
class StoreMaker:
    """Makes stores of one encoding; sample number i is the same in each of them, with id 1000 + i."""

    encoding_name: str = "bf16"
    num_layers: int = NUM_LAYERS
    hidden_size: int = HIDDEN_SIZE
    tied: bool = True

    @property
    def channel_scale(self) -> NDArray[np.float32]:
        generator = np.random.default_rng(5)
        return np.exp(generator.normal(size=self.num_layers * self.hidden_size)).astype(np.float32)

    @property
    def calibration(self) -> Calibration:
        """D, and where the encoding projects P, whose directions have falling eigenvalues."""
        if not is_projected(self.encoding_name):
            return Calibration.from_arrays(self.channel_scale)
        generator = np.random.default_rng(6)
        rows = np.linalg.qr(generator.normal(size=(self.num_layers * self.hidden_size, RANK)))[0].T
        return Calibration.from_arrays(
            self.channel_scale,
            projection=np.ascontiguousarray(rows, np.float32),
            eigenvalues=np.linspace(2, 0.1, RANK, dtype=np.float32),
            layer_energy=np.ones(self.num_layers, np.float32),
        )

    @property
    def manifest(self) -> Manifest:
        return Manifest(
            target_name="org/target",
            target_revision="abc",
            target_config_hash="0" * 16,
            weights_fingerprint="1" * 16,
            target_dtype="bfloat16",
            quantization=None,
            tokenizer_hash="2" * 16,
            chat_template_hash="3" * 16,
            target_layer_ids=tuple(range(1, self.num_layers + 1)),
            num_target_layers=self.num_layers + 2,
            hidden_size=self.hidden_size,
            vocab_size=VOCAB_SIZE,
            tied_embeddings=self.tied,
            embedding_scale=1.0,
            logit_scale=1.0,
            logit_softcap=None,
            encoding=self.encoding_name,
            rank=RANK if is_projected(self.encoding_name) else None,
            calibration_hash=self.calibration.hash,
        )

    @property
    def encoding(self) -> Encoding:
        return manifest_encoding(self.manifest)

    def frozen(self) -> FrozenTarget:
        generator = torch.Generator().manual_seed(6)
        tables = [
            torch.randn(VOCAB_SIZE, self.hidden_size, generator=generator, dtype=torch.float32).bfloat16()
            for _ in range(1 if self.tied else 2)
        ]
        stored = [to_stored(table)[0] for table in tables]
        return FrozenTarget(
            embed_tokens=stored[0],
            lm_head=None if self.tied else stored[1],
            dtype_view="bfloat16",
            config={"model_type": "llama", "hidden_size": self.hidden_size},
            files={"tokenizer.json": b'{"version": "1.0"}', "chat_template.jinja": b"{{ messages }}"},
        )

    def create(self, path: Path, files: Files | None = None) -> Path:
        create_store(path, self.manifest, self.calibration, self.frozen(), files)
        return path

    def states(self, number: int, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(length, self.num_layers * self.hidden_size, generator=generator, dtype=torch.float32)

    def sample(self, number: int, length: int) -> dict[str, Any]:
        """The arguments of SegmentWriter.append."""
        generator = np.random.default_rng(number)
        features, scales = self.encoding.encode(self.states(number, length), self.calibration)
        return {
            "sample_id": 1000 + number,
            "group": number // 2,
            "token_ids": generator.integers(0, VOCAB_SIZE, length, dtype=np.int32),
            "loss_mask": generator.integers(0, 2, length, dtype=np.uint8),
            "features": features.numpy(),
            "scales": None if scales is None else scales.numpy(),
        }

    def add_segment(
        self, path: Path, numbers: Iterable[int], lengths: Iterable[int] = (), files: Files | None = None
    ) -> str | None:
        """Commit a segment of the numbered samples, of the given lengths or of odd ones."""
        attributes = {"source": "test", "store": self.manifest.origin}
        writer = SegmentWriter(path, self.encoding, attributes, files)
        lengths = list(lengths)
        for position, number in enumerate(numbers):
            length = lengths[position] if lengths else ODD_LENGTHS[number % len(ODD_LENGTHS)]
            writer.append(**self.sample(number, length))
        return writer.commit()

    def store(self, path: Path, segments: int = 2) -> Path:
        """A store with a few segments of odd sizes, the last with a quarantined sample."""
        self.create(path)
        for segment in range(segments):
            self.add_segment(path, range(7 * segment, 7 * segment + 7))
        writer = SegmentWriter(path, self.encoding, {})
        writer.quarantine({"id": None, "row": 3, "reason": "no supervised tokens"})
        writer.commit()
        return path


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quick_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real fsync takes 4 ms and proves nothing here: test_crashes.py models what is durable."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: making and removing ten thousand folders takes a minute on a disk."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(params=["bf16", "int8", "projected-int8", "projected-int4"])
def maker(request: pytest.FixtureRequest) -> StoreMaker:
    return StoreMaker(request.param)


@pytest.fixture
def bf16() -> StoreMaker:
    return StoreMaker("bf16")


@pytest.fixture
def with_(bf16: StoreMaker) -> Callable[..., StoreMaker]:
    """A StoreMaker with other settings: with_(encoding_name="int8", tied=False)."""
    return lambda **changes: replace(bf16, **changes)
