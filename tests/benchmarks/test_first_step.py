"""The benchmark of a start runs the calls that a start makes."""

from pathlib import Path

import torch

from dflash_train.benchmarks.drafter_step import drafter_config
from dflash_train.benchmarks.first_step import NO_INDEX, SEGMENT_SAMPLES, make_config, measure, write_store
from dflash_train.benchmarks.peers import StepShape
from dflash_train.store.reader import StoreReader

TINY = StepShape(
    hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=64
)


def test_phases_of_a_start_over_a_made_up_store(tmp_path: Path) -> None:
    write_store(tmp_path / "s.zarr", 3 * SEGMENT_SAMPLES + 7)
    reader = StoreReader(tmp_path / "s.zarr")
    assert (len(reader.samples), len(reader.segment_ids)) == (307, 4)
    phases = measure(make_config(tmp_path, tmp_path / "s.zarr"), drafter_config(TINY), torch.device("cpu"))
    assert [phase.name.split(":")[0] for phase in phases] == ["parent"] * 2 + ["rank"] * 4
    assert phases[0].name == NO_INDEX and all(phase.seconds > 0 for phase in phases)
