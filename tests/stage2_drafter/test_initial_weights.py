"""--init-from: the same function to begin with, what a projection loses, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_train.errors import InputError
from dflash_train.stage2_drafter import initial_weights as module
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.initial_weights import (
    InitialWeights,
    initial_weights,
    lost_energy,
    read_initial_config,
)
from dflash_train.stage2_drafter.preparation import check_resume, prepare_run
from dflash_train.stage2_drafter.rank import run_rank
from dflash_train.stage2_drafter.run_checkpoints import newest_checkpoint
from dflash_train.stage2_drafter.run_folder import read_metrics
from dflash_train.stage2_drafter.train import train
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import make_encoding
from dflash_train.store.reader import StoreReader

MakeConfig = Callable[..., TrainConfig]
MakeStore = Callable[..., Path]


def run_here(config: TrainConfig) -> list[str]:
    lines: list[str] = []
    run_rank(config, 0, 1, "cpu", "", lines.append, lambda: False)
    return lines


def checkpoint_of(config: TrainConfig) -> Path:
    checkpoint = newest_checkpoint(config.run)
    assert checkpoint is not None
    return checkpoint.path


@pytest.mark.parametrize("encoding_name", ["bf16", "int8"])
def test_a_drafter_comes_back_bit_for_bit(
    make_store: MakeStore, make_train_config: MakeConfig, encoding_name: str
) -> None:
    """Trained, exported, started from, exported again: the same bytes of every tensor, and the same config.json."""
    store = make_store(encoding_name=encoding_name)
    first = make_train_config(store, steps=4, num_layers=1, block_size=3)
    run_here(first)
    again = make_train_config(store, run="again", steps=0, mask_token=None, init_from=first.run)  # geometry is theirs
    lines = run_here(again)
    assert f"starting from the weights of {checkpoint_of(first)}" in lines
    one, two = (load_file(checkpoint_of(config) / "model.safetensors") for config in (first, again))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    one_config, two_config = ((checkpoint_of(c) / "config.json").read_text() for c in (first, again))
    assert one_config == two_config


def test_the_first_evaluation_is_the_last_of_the_run_it_starts_from(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    store = make_store(encoding_name="int8")
    first = make_train_config(store, steps=30, lr=1e-2, evaluate_every=30)
    run_here(first)
    again = make_train_config(store, run="again", steps=3, lr=1e-3, init_from=checkpoint_of(first))
    run_here(again)
    before, after = read_metrics(first.run, "evaluation"), read_metrics(again.run, "evaluation")
    assert after[0]["loss"] == pytest.approx(before[-1]["loss"], rel=1e-2)  # bf16 weights
    assert before[0]["loss"] > 1.1 * before[-1]["loss"]


@pytest.mark.parametrize("encoding_name", ["bf16", "int8", "projected-int8"])
def test_fc_computes_the_same_from_what_the_store_holds(
    make_store: MakeStore, make_train_config: MakeConfig, encoding_name: str
) -> None:
    """W h = W_r · (D⁻¹h or P D⁻¹h) in float64, for hidden states that the projection keeps."""
    store = make_store(encoding_name=encoding_name)
    config = make_train_config(store, steps=1)
    run_here(config)
    reader = StoreReader(store)
    initial = initial_weights(config.run, reader.encoding, reader.calibration)
    exported = load_file(checkpoint_of(config) / "model.safetensors")["fc.weight"].double()
    scale = reader.calibration.channel_scale.double()
    inputs = torch.randn(50, reader.encoding.num_features, generator=torch.Generator().manual_seed(0)).double()
    projection = reader.calibration.projection
    states = inputs * scale if projection is None else inputs @ projection.double() * scale
    wanted, found = states @ exported.T, inputs @ initial.masters["fc.weight"].double().T
    assert (wanted - found).norm() < 1e-6 * wanted.norm()
    assert initial.lost_energy < 1e-4


def projected_calibration(rank: int, rest: float, layers: int = 2, hidden: int = 8) -> tuple[Calibration, Tensor]:
    """A calibration whose second moment has `rest` in every direction that P leaves out, and that moment of D⁻¹h."""
    generator = torch.Generator().manual_seed(rank)
    size = layers * hidden
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    values = torch.cat((torch.linspace(6.0, 2.0, rank).double(), torch.full((size - rank,), rest).double()))
    moment = basis @ torch.diag(values) @ basis.T
    calibration = Calibration(
        torch.rand(size, generator=generator) + 0.5,
        projection=basis.T[:rank].float(),
        eigenvalues=values[:rank].float(),
        layer_energy=moment.diag().view(layers, hidden).mean(1).float(),
    )
    return calibration, moment


@pytest.mark.parametrize("rank, rest", [(5, 0.3), (13, 0.3), (16, 1.0), (3, 0.0)])
def test_lost_energy_is_that_of_the_output_over_the_data(rank: int, rest: float) -> None:
    calibration, moment = projected_calibration(rank, rest)
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    scaled = weight.double() * calibration.channel_scale.double()
    assert calibration.projection is not None
    projection = calibration.projection.double()
    outside = scaled - scaled @ projection.T @ projection
    wanted = torch.trace(outside @ moment @ outside.T) / torch.trace(scaled @ moment @ scaled.T)
    assert lost_energy(weight, calibration) == pytest.approx(wanted.item(), rel=1e-4, abs=1e-6)
    bound = Calibration(calibration.channel_scale, calibration.projection, calibration.eigenvalues)
    assert lost_energy(weight, bound) >= lost_energy(weight, calibration) - 1e-6


def test_a_projection_that_loses_too_much_is_refused_before_anything_is_made(
    make_store: MakeStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_train_config(make_store(), steps=0)
    run_here(first)
    encoding, (calibration, _) = make_encoding("projected-int8", 2, 16, 5), projected_calibration(5, 1.9, hidden=16)
    with pytest.raises(
        InputError, match=r"would lose \d\d\.\d% of fc's output under .* rank 5; at most 5% may be lost"
    ):
        initial_weights(first.run, encoding, calibration)
    monkeypatch.setattr(module, "MAX_LOST_ENERGY", -1.0)
    store = make_store("projected.zarr", encoding_name="projected-int8")
    config = make_train_config(store, run="new", steps=1, init_from=first.run)
    with pytest.raises(InputError, match=r"would lose 0.0% of fc's output"):
        train(config, report=lambda line: None)
    assert not config.run.exists()


def test_what_a_projection_drops_is_in_the_log() -> None:
    initial = InitialWeights(folder=Path("old"), masters={}, lost_energy=0.0123)
    assert initial.describe() == "starting from the weights of old; the store's projection drops 1.23% of fc's output"


# -- going on, and what is refused -------------------------------------------------------------------------------------


def test_a_run_goes_on_without_the_drafter_it_started_from(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    store = make_store()
    first = make_train_config(store, steps=1, num_layers=1)
    run_here(first)
    run_here(make_train_config(store, run="again", steps=2, init_from=first.run, schedule="constant"))
    shutil.rmtree(first.run)
    longer = make_train_config(store, run="again", steps=3, init_from=first.run, schedule="constant")
    lines = run_here(longer)
    assert not any(line.startswith("starting from") for line in lines)
    assert [line["step"] for line in read_metrics(longer.run)] == [1, 2, 3]
    config = json.loads((checkpoint_of(longer) / "trainer" / "state.json").read_text())["config"]
    assert config["init_from"] == str(first.run)
    other = make_train_config(store, run="again", steps=3, schedule="constant", num_layers=1)
    with pytest.raises(InputError, match="--init-from is None, the checkpoint has .*run"):
        check_resume(prepare_run(other))


def test_tensors_that_do_not_fit_are_named(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    store = make_store()
    first = make_train_config(store, steps=0)
    run_here(first)
    path = checkpoint_of(first)
    (path / "checksums.json").unlink()
    whole = load_file(path / "model.safetensors")
    bent = {name: tensor for name, tensor in whole.items() if name != "norm.weight"}
    bent["layers.9.bias"] = torch.zeros(3)
    bent["fc.weight"] = torch.zeros(16, 48)
    save_file(bent, path / "model.safetensors")
    with pytest.raises(
        InputError,
        match=r"fc.weight is \[16, 48\], wanted \[16, 32\]; layers.9.bias is \[3\], wanted none; norm.weight is missing, "
        r"wanted \[16\]. Give a drafter",
    ):
        read_initial_config(path)
    config = make_train_config(store, run="new", steps=1, init_from=path)
    with pytest.raises(InputError, match="does not fit its config.json"):
        train(config, report=lambda line: None)
    assert not config.run.exists()


def test_a_drafter_that_is_damaged_is_refused_before_anything_is_trained(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    store = make_store()
    first = make_train_config(store, steps=0)
    run_here(first)
    path = checkpoint_of(first)
    config = make_train_config(store, run="new", steps=1, init_from=path)
    groups = (path / "trainer" / "groups.npy").read_bytes()
    (path / "trainer" / "groups.npy").write_bytes(groups[:-1])
    with pytest.raises(InputError, match=r"groups.npy cannot be read: .* is damaged"):
        train(config, report=lambda line: None)
    (path / "checksums.json").unlink()
    np.save(path / "trainer" / "groups.npy", np.array(["a", "b"]))
    with pytest.raises(InputError, match=r"groups.npy cannot be read: it is no list of 64-bit integers"):
        train(config, report=lambda line: None)
    (path / "trainer" / "groups.npy").write_bytes(b"")
    with pytest.raises(InputError, match=r"groups.npy cannot be read: No data left in file"):
        train(config, report=lambda line: None)
    (path / "trainer" / "groups.npy").write_bytes(groups)
    whole = load_file(path / "model.safetensors")
    save_file({**whole, "norm.weight": whole["norm.weight"] * torch.nan}, path / "model.safetensors")
    with pytest.raises(InputError, match=r"has values in norm.weight that are not finite. Give another drafter"):
        train(config, report=lambda line: None)
    assert not config.run.exists()
    save_file(whole, path / "model.safetensors")
    (path / "trainer" / "groups.npy").write_bytes(b"")
    with pytest.raises(InputError, match=r"groups.npy cannot be read"):
        run_here(config)  # as under torchrun
    assert not (config.run / "checkpoints").exists() and not (config.run / "metrics.jsonl").exists()


def test_a_drafter_of_another_target_is_refused(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    store = make_store()
    first = make_train_config(store, steps=0)
    run_here(first)
    path = checkpoint_of(first)
    config = json.loads((path / "config.json").read_text())
    config["num_target_layers"] = 9
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="num_target_layers of the store is 6 but the drafter config has 9"):
        prepare_run(make_train_config(store, run="new", init_from=path))


def test_two_sources_of_a_geometry_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Both --drafter-config a.json and --init-from b are given"):
        TrainConfig(store=tmp_path, run=tmp_path, drafter_config=Path("a.json"), init_from=Path("b"))
