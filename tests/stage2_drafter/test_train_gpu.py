"""The trainer on CUDA: compiled once, bf16, resumed, and over two GPUs where there are two. About a minute on an H200."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.drafter import Drafter, DrafterConfig, load_drafter
from dflash_train.stage2_drafter.run_checkpoints import newest_checkpoint
from dflash_train.stage2_drafter.run_folder import read_metrics
from dflash_train.stage2_drafter.train import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU_OPTIONS = {"row_tokens": 128, "anchors": 32, "rows_per_step": 4, "save_every": 20, "evaluate_every": 20, "lr": 1e-2}


@pytest.fixture
def wide_store(make_store: Callable[..., Path]) -> Path:
    """Heads of 16, the least that flex_attention's kernels take."""
    return make_store(lengths=(23, 31, 9, 40, 17, 28, 12, 36) * 3, head_dim=16)


def test_trains_compiled_once_and_goes_on(wide_store: Path, make_train_config: Callable[..., TrainConfig]) -> None:
    lines: list[str] = []
    half = make_train_config(wide_store, devices="0", steps=40, schedule="constant", **GPU_OPTIONS)
    train(half, report=lines.append)
    assert any(line.startswith("compiled 6 graphs in") and line.endswith(" s") for line in lines), lines
    assert lines[-1].startswith("compiled 6 graphs in") and lines[-1].endswith(", 0 recompilations in 40 steps")
    config = make_train_config(wide_store, devices="0", steps=80, schedule="constant", **GPU_OPTIONS)
    train(config, report=lines.append)
    steps = read_metrics(config.run)
    assert [line["step"] for line in steps] == list(range(1, 81))
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    checkpoint = newest_checkpoint(config.run)
    assert checkpoint is not None
    load_drafter(checkpoint.path)
    assert {tensor.dtype for tensor in checkpoint.masters().values()} == {torch.float32}


def test_first_weights_are_drawn_on_the_gpu_by_the_seed(make_config: Callable[..., DrafterConfig]) -> None:
    one, two, other = (Drafter(make_config(), seed=seed, device="cuda") for seed in (7, 7, 8))
    assert all(parameter.is_cuda for parameter in one.parameters())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert one.fc.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_follow_the_curve_of_one(wide_store: Path, make_train_config: Callable[..., TrainConfig]) -> None:
    curves = []
    for devices in ("0", "0-1"):
        config = make_train_config(wide_store, run=f"run-{devices}", devices=devices, steps=20, **GPU_OPTIONS)
        train(config, report=print)
        curves.append([line["loss"] for line in read_metrics(config.run)])
    assert curves[1] == pytest.approx(curves[0], rel=3e-2)  # bf16 reduction


def test_muon_goes_on_from_a_drafter_with_layers_checkpointed(
    wide_store: Path, make_train_config: Callable[..., TrainConfig]
) -> None:
    options = {**GPU_OPTIONS, "devices": "0", "schedule": "constant", "lr": 2e-3}
    first = make_train_config(wide_store, steps=40, **options)
    train(first, report=print)
    new = {**options, "steps": 10, "optimizer": "muon", "activation_checkpointing": True, "init_from": first.run}
    whole, parts = (make_train_config(wide_store, run=name, **new) for name in ("whole", "parts"))
    lines: list[str] = []
    train(whole, report=lines.append)
    assert any(line.startswith("starting from the weights of ") for line in lines)
    assert any(line.endswith(", 0 recompilations in 10 steps") for line in lines)
    train(replace(parts, steps=4), report=print)
    train(parts, report=print)
    before, after = read_metrics(first.run, "evaluation")[-1], read_metrics(whole.run, "evaluation")[0]
    assert after["loss"] == pytest.approx(before["loss"], rel=3e-2)  # its weights were rounded to bf16
    ours, theirs = ([line["loss"] for line in read_metrics(config.run)] for config in (whole, parts))
    assert len(theirs) == 10 and theirs == pytest.approx(ours, rel=1e-3)


def test_fp8_learns_is_saved_and_goes_on_in_fp8_alone(
    wide_store: Path, make_train_config: Callable[..., TrainConfig]
) -> None:
    # no warm-up: its length follows from the number of steps, which is another for the run that is cut
    options = {**GPU_OPTIONS, "devices": "0", "schedule": "constant", "warmup_ratio": 0.0}
    bf16 = make_train_config(wide_store, run="bf16", steps=40, **options)
    whole, parts = (
        make_train_config(wide_store, run=name, steps=40, precision="fp8", **options) for name in ("a", "b")
    )
    for config in (bf16, whole, replace(parts, steps=15), parts):
        train(config, report=print)
    curves = [[line["loss"] for line in read_metrics(config.run)] for config in (bf16, whole, parts)]
    assert curves[1] == pytest.approx(curves[0], rel=0.1) and curves[1] != curves[0]
    # not bit for bit: the two part some steps before the cut, where kernels differ that are chosen by timing them, and
    # drift apart at this learning rate: 1.8 % at step 20, 5 % at step 31
    assert curves[2][:20] == pytest.approx(curves[1][:20], rel=0.04)
    assert curves[2] == pytest.approx(curves[1], rel=0.1)
    checkpoint = newest_checkpoint(whole.run)
    assert checkpoint is not None
    load_drafter(checkpoint.path)
    with pytest.raises(InputError, match="--precision is bf16, the checkpoint has fp8"):
        train(replace(parts, precision="bf16", steps=50), report=print)
