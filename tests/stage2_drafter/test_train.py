"""The whole trainer on tiny stores: the loss, one to three processes, stops, kills, resumes, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from dflash_train.errors import InputError
from dflash_train.stage2_drafter import rank as ranks
from dflash_train.stage2_drafter import train as training
from dflash_train.stage2_drafter.checkpoint import round_to_bfloat16
from dflash_train.stage2_drafter.collectives import Rank
from dflash_train.stage2_drafter.compiled import CompiledDrafter
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.drafter import Drafter, load_drafter
from dflash_train.stage2_drafter.loss import block_weights, dpace_weights
from dflash_train.stage2_drafter.preparation import (
    check_mask_token,
    check_resume,
    prepare_ahead,
    prepare_run,
    resolve_mask_token,
)
from dflash_train.stage2_drafter.rank import run_rank
from dflash_train.stage2_drafter.row_loader import Row, RowBuilder
from dflash_train.stage2_drafter.rows import RowKey
from dflash_train.stage2_drafter.run_checkpoints import list_checkpoints, newest_checkpoint
from dflash_train.stage2_drafter.run_folder import read_ledger, read_metrics
from dflash_train.stage2_drafter.train import RankDied, train
from dflash_train.stage2_drafter.trainer import Trainer
from dflash_train.store.calibration import Calibration
from dflash_train.store.direct import DirectFile
from dflash_train.store.manifest import StoreError
from dflash_train.store.reader import StoreReader
from dflash_train.store.segment import SegmentWriter

MakeConfig = Callable[..., TrainConfig]
MakeStore = Callable[..., Path]
RunRanks = Callable[..., list[Any]]
TIMES = ("tokens_per_second", "wait_share")


def run_here(config: TrainConfig, stop_after: int | None = None) -> list[str]:
    """Train in this process, as the one rank; stop_after asks to stop at that step of this run."""
    lines: list[str] = []
    asked: list[int] = []

    def stop_requested() -> bool:
        asked.append(1)
        return len(asked) == stop_after

    run_rank(config, 0, 1, "cpu", "", lines.append, stop_requested)
    return lines


def curve(run: Path) -> list[dict[str, Any]]:
    """All that metrics.jsonl says about the steps but for times."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in read_metrics(run)]


def masters(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    return checkpoint.masters()


def equal(one: Path, two: Path) -> bool:
    a, b = masters(one), masters(two)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- the loss ----------------------------------------------------------------------------------------------------------


NO_SCALES = (1.0, 1.0, None)
SCALES = (0.1, 0.4, 1.5)
"""Of a target that scales its embeddings, scales its logits and caps them, so hard that each of them is seen."""


def plain_losses(trainer: Trainer, key: RowKey | None, scales: tuple[float, float, float | None]) -> list[torch.Tensor]:
    """CE and weights [A,K] of a row, through full logits and autograd; scales are the target's, as make_store got them."""
    run, config = trainer.run, trainer.config
    embedding_scale, logit_scale, logit_softcap = scales
    row = trainer.builder.build(key, trainer._buffer())
    blocks = row.blocks
    features = run.reader.encoding.decode(
        row.buffer.features, row.buffer.scales, trainer.forward.calibration, torch.float32
    )
    hidden = trainer.forward.compiled(
        features,
        torch.from_numpy(row.positions),
        embedding_scale * trainer.forward.embed_tokens[torch.from_numpy(blocks.noise_ids).flatten()],
        torch.from_numpy(blocks.noise_positions),
        torch.from_numpy(blocks.start),
        torch.from_numpy(blocks.anchor),
    )
    labels, label_mask = torch.from_numpy(blocks.labels), torch.from_numpy(blocks.label_mask)
    assert isinstance(trainer.forward.lm_head, torch.Tensor)
    logits = logit_scale * (hidden @ trainer.forward.lm_head.T)
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    ce = F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)
    gamma = config.gamma_for(run.drafter_config.block_size)
    decays = config.loss == "decay"
    return [ce, block_weights(label_mask, gamma) if decays else dpace_weights(ce.detach(), label_mask, 0.5)]


@pytest.mark.parametrize(
    ("loss", "tied", "scales"), [("decay", True, NO_SCALES), ("dpace", False, NO_SCALES), ("decay", False, SCALES)]
)
def test_step_equals_one_plain_loss_over_all_its_rows(
    make_store: MakeStore,
    make_train_config: MakeConfig,
    loss: str,
    tied: bool,
    scales: tuple[float, float, float | None],
) -> None:
    """Σ w·CE / Σ w over the rows together, through full logits and autograd."""
    store = make_store(encoding_name="int8", tied=tied, scales=scales)
    config = make_train_config(store, loss=loss, rows_per_step=3, steps=1, holdout=0.0, gamma=2.0)
    run = prepare_run(config)
    twin = Trainer(run, Rank(), lambda line: None, lambda: False)
    rows = [plain_losses(twin, run.schedule.key(number), scales) for number in range(3)]
    all_ce, all_weights = (torch.cat(parts) for parts in zip(*rows, strict=True))
    total = (all_ce * all_weights).sum() / all_weights.sum()
    total.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters, 1e9)
    run_here(config)
    line = read_metrics(config.run)[0]
    assert line["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert line["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert line["slots"] == int((all_weights > 0).sum())


def test_the_draw_of_anchors_reaches_the_steps_and_not_the_evaluations(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    store = make_store()
    runs = [make_train_config(store, run=name, anchors_by=name, steps=1) for name in ("token", "conversation")]
    for config in runs:
        run_here(config)
    first, second = ([read_metrics(config.run, kind)[0] for kind in ("train", "evaluation")] for config in runs)
    assert first[0]["loss"] != second[0]["loss"] and first[0]["tokens"] == second[0]["tokens"]
    assert first[1]["loss"] == second[1]["loss"], "before the first step"


def test_evaluation_equals_one_plain_loss_over_all_held_out_rows(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    """Of a target whose embeddings are scaled and whose logits are scaled and capped."""
    config = make_train_config(make_store(tied=False, scales=SCALES), steps=0, holdout=0.5, row_tokens=40)
    run = prepare_run(config)
    trainer = Trainer(run, Rank(), lambda line: None, lambda: False)
    assert len(run.holdout.rows) > 1
    rows = [plain_losses(trainer, RowKey(0, place, holdout=True), SCALES) for place in range(len(run.holdout.rows))]
    all_ce, all_weights = (torch.cat(parts) for parts in zip(*rows, strict=True))
    found = trainer.evaluator.held_out()
    assert found is not None and found["rows"] == len(rows)
    assert found["loss"] == pytest.approx(((all_ce * all_weights).sum() / all_weights.sum()).item(), rel=1e-5)
    assert found["cross_entropy"] == pytest.approx(all_ce[all_weights > 0].mean().item(), rel=1e-5)
    assert trainer.evaluator.held_out() == found, "the same rows with the same anchors each time"
    assert len(found["accuracy"]) == 3, "by position: block size 4, without the anchor"


def test_overfitting_a_tiny_store_lowers_the_loss(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    config = make_train_config(make_store(), steps=160, lr=1e-2, evaluate_every=160, save_every=160, log_every=80)
    lines = run_here(config)
    steps = read_metrics(config.run)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert steps[-1]["acceptance_length"] > steps[0]["acceptance_length"] + 0.5
    assert len(steps[0]["accuracy"]) == 3
    assert [line["step"] for line in read_metrics(config.run, "evaluation")] == [0, 160]
    assert [line.split(":")[0] for line in lines if line.startswith("step")] == [
        "step 1 of 160",
        "step 80 of 160",
        "step 160 of 160",
    ]
    assert list((config.run / "tensorboard").iterdir())


def test_loss_does_not_depend_on_the_number_of_processes(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    """4 rows over 1, 2 and 3 ranks: dummies in the last turn, and rows without a single anchor."""
    store = make_store(lengths=(23, 31, 60, 40, 62, 28, 12, 61), unsupervised=(2, 4))
    configs = [
        make_train_config(store, run=f"run{world}", devices=f"cpu:{world}", rows_per_step=4, steps=3, save_every=99)
        for world in (1, 2, 3)
    ]
    run_here(configs[0])
    for config in configs[1:]:
        result = train(config, report=lambda line: None)
        assert (result.step, result.stopped) == (3, False)
    alone, *others = [curve(config.run) for config in configs]
    assert any(line["slots"] < 40 for line in alone)
    for other in others:
        for one, two in zip(alone, other, strict=True):
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
            assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-4)
            assert (two["slots"], two["tokens"]) == (one["slots"], one["tokens"])
    reference = masters(configs[0].run)
    for config in configs[1:]:
        for name, tensor in masters(config.run).items():
            torch.testing.assert_close(tensor, reference[name], rtol=1e-3, atol=1e-5)
    scores = [read_metrics(config.run, "evaluation")[0]["loss"] for config in configs]
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-5)


def test_the_order_in_which_a_store_has_its_samples_changes_no_step(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    """As other workers, or another encoding's pace, leave it; held-out rows are the same as well."""
    orders = {"one": range(8), "other": (6, 3, 0, 5, 7, 1, 4, 2)}
    configs = [
        make_train_config(make_store(f"{name}.zarr", order=order), run=name, evaluate_rows=2)
        for name, order in orders.items()
    ]
    stored = [StoreReader(config.store).samples["id"].tolist() for config in configs]
    assert stored[0] != stored[1] and sorted(stored[0]) == sorted(stored[1])
    for config in configs:
        run_here(config)
    assert curve(configs[0].run) == curve(configs[1].run)
    assert read_metrics(configs[0].run, "evaluation") == read_metrics(configs[1].run, "evaluation")


def test_a_store_without_any_label_trains_on_nothing_and_stays_finite(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    config = make_train_config(make_store(unsupervised=range(8)), steps=2)
    run_here(config)
    assert [(line["loss"], line["skipped"]) for line in read_metrics(config.run)] == [(None, "no label")] * 2
    assert all(torch.isfinite(tensor).all() for tensor in masters(config.run).values())


def test_steps_that_are_not_finite_are_skipped_and_then_stop_the_run(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    config = make_train_config(make_store(), steps=9, bad_step_limit=3, holdout=0.0)
    trainer = Trainer(prepare_run(config), Rank(), lambda line: None, lambda: False)
    before = {name: parameter.detach().clone() for name, parameter in trainer.named}
    trainer.forward.calibration = Calibration(trainer.forward.calibration.channel_scale * float("nan"))
    config.run.mkdir()
    with pytest.raises(InputError, match=r"The loss was not finite in 3 steps in a row, .* step 3, with samples 0{10}"):
        trainer.train()
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.named)
    assert [line["skipped"] for line in read_metrics(config.run)] == ["not finite"] * 2


def test_a_gradient_that_is_not_finite_is_skipped_and_said_at_once(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    """The loss is finite; between two lines of the log, a skipped step has one of its own."""
    config = make_train_config(make_store(), steps=9, bad_step_limit=2, holdout=0.0, log_every=100)
    lines: list[str] = []
    trainer = Trainer(prepare_run(config), Rank(), lines.append, lambda: False)
    config.run.mkdir()
    calls: list[int] = []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)  # two rows a step
        return gradient * float("inf") if len(calls) in (7, 11, 13) else gradient

    trainer.forward.drafter.norm.weight.register_hook(spoil)  # type: ignore[no-untyped-call]
    with pytest.raises(
        InputError, match=r"The gradient was not finite in 2 steps in a row, .* samples (0{13}\w{3}, ?)+"
    ):
        trainer.train()
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split(":")[0] for line in steps] == ["step 1 of 9", *[f"step {n} of 9 (skipped" for n in (3, 5)]]
    assert "(skipped: not finite, 1 in a row; the run ends at 2)" in steps[1]
    assert [line["skipped"] for line in read_metrics(config.run)] == [None, None, "not finite", None, "not finite"]


WAITS = """
import time
from dflash_train.stage2_drafter.row_loader import RowBuilder

build = RowBuilder.build


def build_slowly(*arguments):
    time.sleep(0.2)
    return build(*arguments)


RowBuilder.build = build_slowly
answer = run_rank(config(given[0]), rank, 2, "cpu", meet(0), lambda line: None, lambda: False)
"""


def test_the_log_has_the_share_of_the_time_that_a_step_waited_for_its_rows(
    make_store: MakeStore, make_train_config: MakeConfig, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that take 0.2 s each and steps that take less; over two ranks it is their mean."""
    store = make_store()
    alone, two = (make_train_config(store, run=name, steps=4, holdout=0.0, read_ahead=1) for name in ("alone", "two"))
    assert run_ranks(WAITS, two.to_json()) == [False, False]
    build = RowBuilder.build

    def build_slowly(*arguments: Any) -> Row:
        time.sleep(0.2)
        return build(*arguments)

    monkeypatch.setattr(RowBuilder, "build", build_slowly)
    lines = [line for line in run_here(alone) if line.startswith("step")]
    for config in (alone, two):
        assert all(0.5 < line["wait_share"] <= 1 for line in read_metrics(config.run)[2:])
    shares = [line["wait_share"] for line in read_metrics(alone.run)]
    assert all(f", {share:.0%} of the time waiting for data" in line for share, line in zip(shares, lines, strict=True))


def test_as_many_rows_are_read_ahead_as_asked_for(
    make_store: MakeStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_train_config(make_store(), steps=3, holdout=0.0, read_ahead=3)
    built: list[str] = []
    build, train_step = RowBuilder.build, Trainer._train_step

    def build_and_count(*arguments: Any) -> Row:
        built.append(threading.current_thread().name)
        return build(*arguments)

    def wait_and_step(self: Trainer, *arguments: Any) -> Any:
        deadline = time.monotonic() + (5 if self.step == 0 else 0)
        while built.count("row-loader") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.step == 0:
            time.sleep(0.1)  # no more than that
            assert built.count("row-loader") == 3
        return train_step(self, *arguments)

    monkeypatch.setattr(RowBuilder, "build", build_and_count)
    monkeypatch.setattr(Trainer, "_train_step", wait_and_step)
    run_here(config)
    assert built.count("row-loader") == 6


def test_the_log_ends_with_the_graphs_and_recompilations_of_the_steps_of_this_start(
    make_store: MakeStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where nothing is compiled, that line is none; here it is made up."""
    config = make_train_config(make_store(), steps=5)
    assert not any("recompilation" in line for line in run_here(config, stop_after=2))
    monkeypatch.setattr(CompiledDrafter, "closing_line", lambda self, steps: f"0 recompilations in {steps} steps")
    assert run_here(config)[-1] == "0 recompilations in 3 steps"


# -- checkpoints, stops, resumes ---------------------------------------------------------------------------------------


def test_no_steps_writes_the_untrained_drafter(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    config = make_train_config(make_store(), steps=0)
    run_here(config)
    run_here(config)
    checkpoints = list_checkpoints(config.run)
    assert [checkpoint.step for checkpoint in checkpoints] == [0]
    twin = Trainer(prepare_run(config), Rank(), lambda line: None, lambda: False)
    saved = checkpoints[0].masters()
    assert all(torch.equal(saved[name], parameter) for name, parameter in twin.named)


@pytest.mark.parametrize("encoding_name", ["projected-int8", "projected-int4"])
def test_a_projected_store_trains_resumes_and_exports_the_standard_format(
    make_store: MakeStore, make_train_config: MakeConfig, encoding_name: str
) -> None:
    store = make_store(encoding_name=encoding_name)
    whole, parts = make_train_config(store, steps=30), make_train_config(store, run="parts", steps=30)
    run_here(whole)
    run_here(parts, stop_after=4)
    run_here(parts)
    assert curve(parts.run) == curve(whole.run) and equal(parts.run, whole.run)
    losses = [line["loss"] for line in read_metrics(whole.run) if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.1
    checkpoint, reader = newest_checkpoint(whole.run), StoreReader(store)
    assert checkpoint is not None
    trained, drafter = checkpoint.masters()["fc.weight"], load_drafter(checkpoint.path)
    assert trained.shape == (16, 13) and drafter.fc.weight.shape == (16, 32)
    folded = reader.encoding.fold(trained, reader.calibration)
    assert torch.equal(drafter.fc.weight, round_to_bfloat16(folded))
    # what the engine computes from raw states is what was trained on, but for rounding to the stored steps and bf16
    sample = reader.read(0)
    scales = torch.from_numpy(sample.scales) if sample.scales is not None else None
    decoded = reader.encoding.decode(torch.from_numpy(sample.features), scales, reader.calibration, torch.float32)
    states = reader.encoding.scaled_states(decoded, reader.calibration) * reader.calibration.channel_scale
    engine, ours = states @ drafter.fc.weight.detach().float().T, decoded @ trained.T
    assert float((engine - ours).norm() / ours.norm()) < 0.01


@pytest.mark.parametrize("encoding_name", ["bf16", "int8"])
def test_direct_io_reaches_the_reader_and_changes_no_number(
    make_store: MakeStore, make_train_config: MakeConfig, encoding_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(encoding_name=encoding_name)
    plain, direct = make_train_config(store, steps=3), make_train_config(store, run="direct", steps=3, direct_io=True)
    run_here(plain)
    opened: list[Path] = []

    class Counted(DirectFile):
        def __init__(self, path: Path, straight: bool) -> None:
            opened.append(path)
            super().__init__(path, straight)

    monkeypatch.setattr("dflash_train.store.opened.DirectFile", Counted)
    run_here(direct)
    assert opened and all("features" in path.parts for path in opened)
    assert curve(direct.run) == curve(plain.run) and equal(direct.run, plain.run)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stopped_run_goes_on_exactly(make_store: MakeStore, make_train_config: MakeConfig, optimizer: str) -> None:
    """And whether the layers' activations are kept or computed again may change at every stop."""
    store = make_store()
    options: dict[str, Any] = {"steps": 10, "optimizer": optimizer, "weight_decay": 0.01}
    whole, parts = make_train_config(store, **options), make_train_config(store, run="parts", **options)
    run_here(whole)
    run_here(parts, stop_after=3)
    assert newest_checkpoint(parts.run).step == 3  # type: ignore[union-attr]
    run_here(replace(parts, activation_checkpointing=True), stop_after=4)
    run_here(parts)
    assert curve(parts.run) == curve(whole.run)
    assert equal(parts.run, whole.run)


RUNS = """
answer = []
for number, (values, stop_after) in enumerate(given):
    asked = []
    def stop_requested():
        asked.append(1)
        return rank == 1 and len(asked) == stop_after  # one rank is told, both stop
    answer.append(run_rank(config(values), rank, 2, "cpu", meet(number), lambda line: None, stop_requested))
"""


LEAVES = """
import gc
from torch.nn.parallel import DistributedDataParallel

answer, made, destroy = {"made": 0}, DistributedDataParallel.__init__, torch.distributed.destroy_process_group


def count_made(*arguments, **keywords):
    answer["made"] += 1
    made(*arguments, **keywords)


def count_left():
    answer["left"] = sum(type(thing) is DistributedDataParallel for thing in gc.get_objects())
    destroy()


DistributedDataParallel.__init__, torch.distributed.destroy_process_group = count_made, count_left
run_rank(config(given[0]), rank, 2, "cpu", meet(0), lambda line: None, lambda: False)
"""


def test_no_reducer_outlives_the_process_group(
    make_store: MakeStore, make_train_config: MakeConfig, run_ranks: RunRanks
) -> None:
    """As its last owner it may wait for ever for a thread that waits for the GIL."""
    config = make_train_config(make_store(), steps=1, rows_per_step=2)
    assert run_ranks(LEAVES, config.to_json()) == [{"made": 1, "left": 0}] * 2


def check_equal_to_rounding(run: Path, reference: Path) -> None:
    """Sums over the same rows in another order: the tolerances of other numbers of processes above."""
    for found, wanted in zip(curve(run), curve(reference), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-4)
        assert (found["step"], found["lr"], found["slots"]) == (wanted["step"], wanted["lr"], wanted["slots"])
    expected = masters(reference)
    for name, tensor in masters(run).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)


def test_stopped_run_goes_on_exactly_over_two_ranks_and_to_rounding_over_one(
    make_store: MakeStore, make_train_config: MakeConfig, run_ranks: RunRanks
) -> None:
    """Over two it is bit for bit: gloo adds two numbers a place, and a sum of two does not depend on their order."""
    store = make_store()
    names = ("whole", "same", "fewer", "more")
    whole, same, fewer, more = (make_train_config(store, run=n, steps=7, rows_per_step=4, holdout=0.0) for n in names)
    both = {name: config.to_json() for name, config in zip(names, (whole, same, fewer, more), strict=True)}
    assert run_ranks(RUNS, (both["whole"], None), (both["same"], 3)) == [[False, True]] * 2
    shutil.copytree(same.run, fewer.run)
    run_here(more, stop_after=3)
    for config in (same, fewer, more):
        newest = newest_checkpoint(config.run)
        assert newest is not None and newest.step == 3
    assert run_ranks(RUNS, (both["same"], None), (both["more"], None)) == [[False, False]] * 2  # processes of their own
    run_here(fewer)
    assert curve(same.run) == curve(whole.run)
    assert equal(same.run, whole.run)
    for config in (fewer, more):
        check_equal_to_rounding(config.run, whole.run)


def test_epochs_end_the_run_after_every_sample_was_seen(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    config = make_train_config(make_store(), steps=None, epochs=2, holdout=0.0)
    run_here(config)
    assert sum(line["tokens"] for line in read_metrics(config.run)) == 2 * (23 + 31 + 9 + 40 + 17 + 28 + 12 + 36)


def test_a_start_plans_every_epoch_once_and_its_ranks_only_what_they_read(
    make_store: MakeStore, make_train_config: MakeConfig, planned: list[int]
) -> None:
    """Epochs of 4 rows, 2 steps each; without a parent, as under torchrun, the first rank counts."""
    store = make_store(lengths=(40,) * 4)
    options: dict[str, Any] = {"steps": None, "epochs": 5, "holdout": 0.0, "read_ahead": 2}
    alone, told = make_train_config(store, **options), make_train_config(store, run="told", **options)
    run_here(alone, stop_after=1)
    assert sorted(planned) == [0, 1, 2, 3, 4]
    counted = prepare_ahead(told).counted()
    assert counted.epochs == [4] * 5
    del planned[:]
    stopped = run_rank(told, 0, 1, "cpu", "", lambda line: None, lambda: True, counted=counted)
    assert stopped and set(planned) <= {0, 1} and len(set(planned)) == len(planned), "the loader reads ahead"
    assert read_ledger(told.run) == counted.segments
    assert curve(told.run) == curve(alone.run)
    del planned[:]
    other = replace(counted, segments=["none"], epochs=[1] * 5)
    assert prepare_ahead(told, other).total_steps == 10 and len(planned) == 5, "counts of other segments are ignored"


def test_weights_are_drawn_only_where_none_are_loaded(
    make_store: MakeStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    initialize = Drafter.initialize

    def draw(drafter: Drafter, generator: torch.Generator) -> None:
        drawn.append(1)
        initialize(drafter, generator)

    monkeypatch.setattr(Drafter, "initialize", draw)
    config = make_train_config(make_store(), steps=4)
    run_here(config, stop_after=2)
    assert drawn == [1]
    run_here(config)
    run_here(make_train_config(config.store, run="later", init_from=config.run, mask_token=None, steps=1))
    assert drawn == [1]


def test_exported_checkpoint_keeps_nothing_frozen(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    config = make_train_config(make_store(tied=False), steps=2)
    trainer = Trainer(prepare_run(config), Rank(), lambda line: None, lambda: False)
    config.run.mkdir()
    assert isinstance(trainer.forward.lm_head, torch.Tensor)
    embed_tokens, lm_head = trainer.forward.embed_tokens.clone(), trainer.forward.lm_head.clone()
    trainer.train()
    assert torch.equal(trainer.forward.embed_tokens, embed_tokens) and not trainer.forward.embed_tokens.requires_grad
    assert torch.equal(trainer.forward.lm_head, lm_head) and not trainer.forward.lm_head.requires_grad
    checkpoint = newest_checkpoint(config.run)
    assert checkpoint is not None
    names = set(load_file(checkpoint.path / "model.safetensors"))
    assert names == {name for name, _ in trainer.named} == set(checkpoint.masters())
    scale = trainer.forward.calibration.channel_scale.double()
    exact = (checkpoint.masters()["fc.weight"].double() / scale).float().bfloat16()
    assert torch.equal(load_file(checkpoint.path / "model.safetensors")["fc.weight"], exact)


SCRIPT = """
import json, os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one thread, as in the tests' own process
from dflash_train.machine.launch import leave_process
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.train import train
train(TrainConfig(**json.loads(sys.argv[1])), report=lambda line: print(line, flush=True))
leave_process(0)
"""


def start(config: TrainConfig) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SCRIPT, json.dumps(config.to_json())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(process: "subprocess.Popen[str]", step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {step} of"):
            return
    raise AssertionError(f"the trainer ended before step {step}")


def test_killed_trainer_goes_on_exactly_and_a_signal_stops_it_cleanly(
    make_store: MakeStore, make_train_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL in mid-run, then SIGTERM in mid-run, then to the end: one curve, that of the uninterrupted run."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))  # of the processes that are killed and stopped
    store = make_store()
    options: dict[str, Any] = {"steps": 400, "save_every": 100, "evaluate_every": 100, "lr": 1e-3}
    whole, parts = make_train_config(store, **options), make_train_config(store, run="parts", **options)
    run_here(whole)
    killed = start(parts)
    wait_for_step(killed, 120)
    killed.kill()
    killed.communicate()
    newest = newest_checkpoint(parts.run)
    assert newest is not None and 100 <= newest.step < 400
    assert len(list(temporary.glob("dflash-rendezvous-*"))) == 1
    deadline = time.monotonic() + 20
    while True:  # the rank dies with its parent, and its lock with it
        try:
            stopped = start(parts)
            wait_for_step(stopped, newest.step + 50)
            break
        except AssertionError:
            assert time.monotonic() < deadline
    stopped.send_signal(signal.SIGTERM)
    out, _ = stopped.communicate()
    assert stopped.returncode == 0, out
    assert list(temporary.glob("dflash-rendezvous-*")) == [], "the killed one's is gone as well"
    last = newest_checkpoint(parts.run)
    assert last is not None
    assert out.splitlines()[-1] == f"stopped at step {last.step} of 400; run again to go on"
    run_here(parts)
    assert curve(parts.run) == curve(whole.run)
    assert equal(parts.run, whole.run)


def test_dead_rank_ends_the_run_with_its_last_words(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    config = make_train_config(make_store(), devices="cpu:2", steps=5000, save_every=5000, evaluate_every=5000)

    def kill_one(line: str) -> None:
        if line.startswith("step 2 of"):
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)

    with pytest.raises(RankDied, match=r"Rank \d died, and the run with it"):
        train(config, report=kill_one)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_ranks_wait_for_hours_while_the_first_one_saves_or_decodes(
    make_store: MakeStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """NCCL's own 10 minutes would end the run; that a dead rank is noticed without them has a test above."""

    class Met(Exception):
        pass

    def meet(backend: str, **options: Any) -> None:
        assert backend == ("gloo" if device == "cpu" else "nccl")
        assert options["timeout"] >= timedelta(hours=2)
        raise Met

    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    with pytest.raises(Met):
        run_rank(make_train_config(make_store()), 1, 2, device, "file:///nowhere", lambda line: None, lambda: False)


def test_torchrun_gives_the_ranks(make_store: MakeStore, make_train_config: MakeConfig, tmp_path: Path) -> None:
    store = make_store()
    config = make_train_config(store, steps=2, schedule="constant")
    alone = make_train_config(store, run="alone", steps=2, schedule="constant")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    said = []
    for steps in (1, 2):
        words = [*launcher, str(script), json.dumps(replace(config, steps=steps).to_json())]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert "samples to train on" in said[0] and "on 2 ranks of torchrun; mask token" in said[0]
    assert said[1].count("going on from") == said[1].count("step 2 of 2") == 1
    run_here(alone)
    for one, two in zip(curve(alone.run), curve(config.run), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)


# -- compile caches ----------------------------------------------------------------------------------------------------

RANKS = """
import os

def tell_cache(connection, rank, **arguments):
    connection.send(("line", f"{rank}: {os.environ['TORCHINDUCTOR_CACHE_DIR']} {os.environ['TRITON_CACHE_DIR']}"))
    connection.send(("done", False))

def train_as_if_compiling(**arguments):
    from dflash_train.stage2_drafter import rank as ranks
    ranks._compiles = lambda device: True
    ranks.train_rank(**arguments)
"""


@pytest.fixture
def ranks_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cache_test_ranks.py").write_text(RANKS)
    monkeypatch.syspath_prepend(tmp_path)
    return "cache_test_ranks"


def lines_of(config: TrainConfig) -> list[str]:
    lines: list[str] = []
    train(config, report=lines.append)
    return lines


def test_each_rank_compiles_into_a_folder_of_its_own_at_every_start(
    make_store: MakeStore, make_train_config: MakeConfig, ranks_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the run folder, or where --compile-cache says; never where the user's environment points to."""
    config = make_train_config(make_store(), steps=1, devices="cpu:2")
    run_here(config)
    monkeypatch.setattr(training, "RANK_FUNCTION", f"{ranks_module}.tell_cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somebody")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somebody/triton")
    own, elsewhere = config.run / "compile-cache", config.run.parent / "elsewhere"
    for folder, given in ((own, None), (elsewhere, elsewhere), (own, None)):
        lines = lines_of(replace(config, steps=2, compile_cache=given))
        told = [f"{rank}: {folder}/rank-{rank} {folder}/rank-{rank}/triton" for rank in (0, 1)]
        assert sorted(line for line in lines if "/triton" in line) == told


def test_a_rank_that_has_lost_its_compile_cache_says_so_when_the_run_goes_on(
    make_store: MakeStore, make_train_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_train_config(make_store(), steps=1, holdout=0.0)
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "rank-0"))  # as the process would be started

    def said(steps: int) -> list[str]:
        lines = run_here(replace(config, steps=steps, compile_cache=cache))
        return [line for line in lines if "compile cache" in line]

    assert said(1) == said(2) == [], "nothing is compiled on a CPU"
    monkeypatch.setattr(ranks, "_compiles", lambda device: True)
    (cache / "rank-0" / "triton").mkdir(parents=True)
    assert said(3) == [f"no compile cache of rank 0 in {cache}: kernels are compiled again, and last bits may differ"]
    (cache / "rank-0" / "triton" / "kernel.so").touch()
    assert said(4) == []
    shutil.rmtree(config.run)
    shutil.rmtree(cache)
    assert said(1) == [], "a new run has nothing to find"


def test_the_ranks_that_have_lost_their_compile_cache_are_named_once(
    make_store: MakeStore, make_train_config: MakeConfig, ranks_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_train_config(make_store(), steps=1, devices="cpu:2", holdout=0.0)
    run_here(config)
    cache = config.run / "compile-cache"
    monkeypatch.setattr(training, "RANK_FUNCTION", f"{ranks_module}.train_as_if_compiling")
    said = [line for line in lines_of(replace(config, steps=2)) if "compile cache" in line]
    assert said == [f"no compile cache of rank 0, 1 in {cache}: kernels are compiled again, and last bits may differ"]


def test_torchrun_names_the_ranks_that_have_lost_their_compile_cache(
    make_store: MakeStore, make_train_config: MakeConfig, ranks_module: str, tmp_path: Path
) -> None:
    config = make_train_config(make_store(), steps=1, holdout=0.0)
    run_here(config)
    kept = config.run / "compile-cache" / "rank-0" / "kernel.so"
    kept.parent.mkdir(parents=True)
    kept.touch()
    script = tmp_path / "script.py"
    before = "from dflash_train.machine.compile_cache import use_compile_cache\n"
    before += "from dflash_train.machine.torchrun import torchrun_place\n"
    before += f"use_compile_cache(Path({str(kept.parents[1])!r}), torchrun_place().rank)\n"  # as the command does
    before += "from dflash_train.stage2_drafter import rank\nrank._compiles = lambda device: True\n"
    script.write_text("from pathlib import Path\n" + before + SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = [str(script), json.dumps(replace(config, steps=2).to_json())]
    done = subprocess.run([*launcher, *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = f"no compile cache of rank 1 in {kept.parents[1]}: kernels are compiled again, and last bits may differ"
    assert done.stdout.count("compile cache") == 1 and said in done.stdout


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_changed_options_are_refused_by_name(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    store = make_store()
    run_here(make_train_config(store, steps=1))
    check_resume(prepare_run(make_train_config(store, steps=50, keep=9, log_every=7, compile_cache="elsewhere")))
    changed = make_train_config(store, steps=1, lr=0.5, seed=8)
    with pytest.raises(InputError, match=r"--lr is 0.5, the checkpoint has 0.003; --seed is 8, the checkpoint has 3"):
        check_resume(prepare_run(changed))
    with pytest.raises(InputError, match=r"options: --block-size is 2, the checkpoint has \d+\. Give"):
        check_resume(prepare_run(make_train_config(store, steps=1, block_size=2)))
    with pytest.raises(InputError, match=r"options: --num-layers is 7, the checkpoint has \d+\. Give"):
        check_resume(prepare_run(make_train_config(store, steps=1, num_layers=7)))


def test_store_that_grew_changes_nothing(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    store = make_store()
    config = make_train_config(store, steps=2)
    run_here(config)
    segments = read_ledger(config.run)
    run = prepare_run(config)
    writer = SegmentWriter(store, run.reader.encoding, {})
    sample = run.reader.read(0)
    writer.append(77, 77, sample.token_ids, sample.loss_mask, sample.features, sample.scales)
    writer.commit()
    assert len(prepare_run(config).reader.samples) == 9
    assert prepare_run(config, segments).reader.segment_ids == segments
    lines: list[str] = []
    result = train(make_train_config(config.store, steps=3), report=lines.append)
    assert result.step == 3
    assert any(line.startswith("1 segment came into the store after this run began") for line in lines)


def test_lost_ledger_is_taken_from_the_checkpoint_and_a_changed_one_refused(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    config = make_train_config(make_store(), steps=1)
    run_here(config)
    ledger = config.run / "ledger.jsonl"
    segments = read_ledger(config.run)
    assert segments is not None
    ledger.unlink()
    run_here(config)
    assert read_ledger(config.run) == segments
    with pytest.raises(InputError, match=r"cannot be resumed .* the ledger lists 0 segments, the checkpoint \d"):
        check_resume(replace(prepare_run(config), reader=StoreReader(config.store, segments=())))


def test_stop_at_an_evaluation_puts_it_off_and_one_at_the_last_step_does_not(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    config = make_train_config(make_store(), steps=3, holdout=0.5, evaluate_every=2)
    run_here(config, stop_after=2)
    assert [line["step"] for line in read_metrics(config.run, "evaluation")] == [0]
    stopped = newest_checkpoint(config.run)
    assert stopped is not None and stopped.state().evaluation is None
    run_here(config, stop_after=1)
    evaluations = read_metrics(config.run, "evaluation")
    assert [line["step"] for line in evaluations] == [0, 2, 3]
    assert evaluations[1] == {"kind": "evaluation", "step": 2, **(stopped.state().evaluation or {})}


def test_killed_before_its_first_checkpoint_a_run_logs_its_first_evaluation_once(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    config = make_train_config(make_store(), steps=1, holdout=0.5)
    run_here(config)
    shutil.rmtree(config.run / "checkpoints")
    run_here(config)
    assert [line["step"] for line in read_metrics(config.run, "evaluation")] == [0, 1]


def test_finished_run_says_so(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    config = make_train_config(make_store(), steps=1)
    run_here(config)
    lines: list[str] = []
    assert train(config, report=lines.append).step == 1
    assert lines == ["the run is complete at step 1; give more --steps or --epochs to go on"]


def test_machines_that_do_not_share_the_run_folder_are_refused(
    make_store: MakeStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has saved another checkpoint than the one that is seen here."""
    config = make_train_config(make_store(), steps=1)
    run_here(config)
    monkeypatch.setattr(Rank, "broadcast", lambda self, values: values | {"checkpoint": "step-00000007"})
    with pytest.raises(
        InputError, match=r"Rank 0 sees another newest checkpoint in .*run than rank 0\. Use a run folder"
    ):
        run_here(replace(config, steps=2))


def test_bad_input_is_refused_before_a_process_starts(
    make_store: MakeStore, make_train_config: MakeConfig, tmp_path: Path
) -> None:
    store = make_store()
    with pytest.raises(InputError, match="longest sample has 40 tokens, --row-tokens is 32"):
        train(make_train_config(store, row_tokens=32))
    with pytest.raises(InputError, match="is not there"):
        train(make_train_config(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="--mask-token 64 is no row of the embedding, which has 64 rows"):
        train(make_train_config(store, mask_token=64))
    with pytest.raises(InputError, match="(?s)tokenizer in .* cannot be loaded .*Give --mask-token"):
        train(make_train_config(store, mask_token=None))
    with pytest.raises(InputError, match="holds no sample yet"):
        train(make_train_config(make_store("empty.zarr", lengths=())))
    with pytest.raises(InputError, match="--gpus"):
        train(make_train_config(store, devices="gpu9"))


def test_drafter_for_other_layers_is_refused_naming_both(
    make_store: MakeStore, make_train_config: MakeConfig, tmp_path: Path
) -> None:
    store = make_store()
    values = prepare_run(make_train_config(store)).drafter_config.to_json()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert prepare_run(make_train_config(store, drafter_config=path)).drafter_config.to_json() == values
    values["dflash_config"]["target_layer_ids"] = [1, 4]
    values["hidden_size"] = 4096
    path.write_text(json.dumps(values))
    with pytest.raises(
        InputError,
        match=r"target_layer_ids of the store is \[1, 3\] but the drafter config has \[1, 4\]; "
        r"hidden_size of the store is 16 but the drafter config has 4096",
    ):
        prepare_run(make_train_config(store, drafter_config=path))
    path.write_text("{")
    with pytest.raises(InputError, match="--drafter-config .* cannot be read"):
        prepare_run(make_train_config(store, drafter_config=path))


def test_mask_token_is_the_tokenizers_own_or_its_first_unused_row(tiny_tokenizer_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    assert resolve_mask_token(None, 512, lambda: tiny_tokenizer_folder) == 3
    assert resolve_mask_token("<|im_end|>", 512, lambda: tiny_tokenizer_folder) == 2
    assert resolve_mask_token("17", 512, lambda: tiny_tokenizer_folder) == 17
    with pytest.raises(InputError, match="'<nothing>' is no token"):
        resolve_mask_token("<nothing>", 512, lambda: tiny_tokenizer_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_folder)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path)
    size = len(tokenizer)
    assert resolve_mask_token(None, size + 5, lambda: tmp_path) == size
    with pytest.raises(InputError, match=f"uses all {size} rows of the embedding. Give --mask-token"):
        resolve_mask_token(None, size, lambda: tmp_path)

    def damaged() -> Path:
        raise StoreError("tokenizer.json has crc32c 0, not 1; it is damaged.")

    assert resolve_mask_token("17", 512, damaged) == 17
    with pytest.raises(InputError, match=r"tokenizer.json .* is damaged\. Give --mask-token with the id"):
        resolve_mask_token(None, 512, damaged)


def test_a_mask_token_of_text_is_refused_at_the_start_where_the_tokenizer_can_be_asked(
    make_store: MakeStore,
    make_train_config: MakeConfig,
    tiny_tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By id, by text and by --drafter-config; a drafter to go on from keeps its own, and a damaged tokenizer stops nothing."""
    store = make_store(lengths=(9, 17, 5))

    def refuses(**options: Any) -> str | None:
        try:
            check_mask_token(prepare_run(make_train_config(store, **options)))
        except InputError as refusal:
            return str(refusal)
        return None

    assert refuses(mask_token=50) is None, "there is no tokenizer"
    monkeypatch.setattr(StoreReader, "tokenizer_path", lambda self: tiny_tokenizer_folder)
    assert refuses(mask_token="<|mask|>") is refuses(mask_token=None) is None
    for given, shown in ((1, "1"), ("<|im_start|>", "'<|im_start|>'")):
        said = (
            f"--mask-token {shown} cannot be the mask token: 1 is '<|im_start|>', which the chat template writes. Give"
        )
        assert (refuses(mask_token=given) or "").startswith(said)
    assert "50 is 'O', a token of ordinary text. Give --mask-token 3." in (refuses(mask_token=50) or "")
    path = tmp_path / "config.json"
    run = prepare_run(make_train_config(store, mask_token=50))
    check_mask_token(replace(run, config=replace(run.config, mask_token=None, init_from=tmp_path)))
    path.write_text(json.dumps(run.drafter_config.to_json()))
    assert (refuses(mask_token=None, drafter_config=path) or "").startswith(
        f"That of {path} cannot be the mask token: 50"
    )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text('{"version": 7}')
    monkeypatch.setattr(StoreReader, "tokenizer_path", lambda self: tmp_path / "broken")
    assert refuses(mask_token=1) is None


def test_fp8_on_a_cpu_is_refused_before_the_run_folder_is_made(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    config = make_train_config(make_store(), precision="fp8")
    with pytest.raises(InputError, match="--precision fp8 needs a GPU of the Hopper class"):
        train(config, report=lambda line: None)
    assert not config.run.exists()
