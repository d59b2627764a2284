"""On CUDA: an extract that is short of device memory. About 20 seconds on an H200.

PyTorch's allocator is held to 2.8 GiB of the device, so the target's own kernels run out of memory, through the real command.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_train.benchmarks.random_target import make_samples
from dflash_train.store.reader import StoreReader
from dflash_train.store.verify import verify_store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROOM = 2.8 * 2**30
NUM_SHORT, TOO_LONG = 96, 12_288


@pytest.fixture
def wide_target(tiny_tokenizer: Any, tmp_path: Path) -> Path:
    """Its feed-forward layers take 400 KB a token: 1.6 GB for 4,096 tokens, 4.8 GB for 12,288."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=65_536,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=16_384,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_out_of_memory_halves_the_batches_and_a_sample_too_long_is_quarantined(
    wide_target: Path, tmp_path: Path
) -> None:
    lengths = np.append(np.random.default_rng(0).integers(300, 512, NUM_SHORT), TOO_LONG)
    data, store = make_samples(tmp_path / "samples.parquet", lengths), tmp_path / "store.zarr"
    words = ["extract", "--target", wide_target, "--data", data, "--store", store, "--gpus", "0", "--allow-busy-gpus"]
    words += ["--target-layers", "1,3", "--max-tokens", "16384", "--sample-cache", tmp_path / "cache"]
    fraction = ROOM / torch.cuda.get_device_properties(0).total_memory
    ended = subprocess.run(
        [sys.executable, "-m", "dflash_train.cli", *map(str, words)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{fraction:.4f}",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    log = "".join(path.read_text() for path in sorted(tmp_path.glob("store.zarr.logs/**/worker-*.log")))
    print(ended.stdout, ended.stderr, log, sep="\n---\n")
    assert ended.returncode == 0
    assert re.search(r"Out of device memory with \d+ samples: calibrating on batches of at most \d+ tokens", log)
    assert re.search(rf"A sample of {TOO_LONG} tokens does not fit into the device's memory: not calibrated on", log)
    assert re.search(r"Out of device memory with \d+ samples: batches have at most \d+ tokens from here on", log)
    reader = StoreReader(store)
    assert sorted(reader.samples["length"].tolist()) == sorted(lengths[:-1].tolist())
    assert [entry["reason"] for entry in reader.quarantined()] == [
        f"{TOO_LONG} tokens do not fit into the device's memory, even alone"
    ]
    assert verify_store(store).problems == []
