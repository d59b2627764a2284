"""The trainer over two ranks, asked in their own processes: rows that are not finite, and one reduction a step."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.preparation import prepare_run
from dflash_train.stage2_drafter.row_forward import _distribute
from dflash_train.stage2_drafter.run_checkpoints import list_checkpoints
from dflash_train.stage2_drafter.run_folder import read_metrics

MakeConfig = Callable[..., TrainConfig]
MakeStore = Callable[..., Path]
RunRanks = Callable[..., list[Any]]

NOT_FINITE = """
import hashlib
from dflash_train.errors import InputError

digests, message = [], None
torch.distributed.init_process_group("gloo", init_method=meet(0), rank=rank, world_size=2)


def digest():
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trainer.parameters)).hexdigest()


def stop_requested():
    digests.append(digest())  # each step asks once, before its update
    return False


trainer = Trainer(prepare_run(config(given[0])), Rank(rank=rank, world=2), lambda line: None, stop_requested)
try:
    trainer.train()
except InputError as error:
    message = str(error)
answer = {"digests": [*digests, digest()], "message": message}
"""


def test_row_that_is_not_finite_on_one_rank_is_skipped_by_both_and_named(
    make_store: MakeStore, make_train_config: MakeConfig, run_ranks: RunRanks
) -> None:
    """Eight rows of one sample each, four a step, one of them poisoned: every second step, until two come together."""
    store = make_store(lengths=(60,) * 8, not_finite=(5,))
    config = make_train_config(store, rows_per_step=4, steps=40, bad_step_limit=2, holdout=0.0, seed=49)
    schedule, ids = prepare_run(config).schedule, prepare_run(config).reader.samples["id"]

    def poisoned(step: int) -> list[int]:
        """Places of the step's rows that hold the sample."""
        keys = [schedule.key(step * 4 + place) for place in range(4)]
        return [place for place, key in enumerate(keys) if key and ids[schedule.samples(key)[0]] == 1005]

    bad = [bool(poisoned(step)) for step in range(40)]
    end = next(step for step in range(1, 40) if bad[step - 1] and bad[step])
    assert {place % 2 for step in range(end + 1) for place in poisoned(step)} == {0, 1}, "rows of either rank"
    assert poisoned(end) == [1], "the last one is the first row of the rank that does not write"
    config.run.mkdir()
    first, second = run_ranks(NOT_FINITE, config.to_json())
    assert first == second
    assert (
        f"loss was not finite in 2 steps in a row, the last of them step {end + 1}, with samples {1005:016x}. "
        in (first["message"])
    )
    skipped = [line["skipped"] for line in read_metrics(config.run)]
    assert skipped == ["not finite" if bad[step] else None for step in range(end)]
    digests = first["digests"]
    assert [one == two for one, two in itertools.pairwise(digests)] == bad[: end + 1]


REDUCTIONS = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

answer = []
for number, values in enumerate(given):
    torch.distributed.init_process_group("gloo", init_method=meet(number), rank=rank, world_size=2)
    reduced, seen = [], []

    def hook(group, bucket):
        reduced.append(bucket.is_last())  # one a pass over all buckets, however many there are
        return allreduce_hook(group, bucket)

    def stop_requested():
        seen.append(sum(reduced))  # each step asks once, after its last backward
        return False

    trainer = Trainer(prepare_run(config(values)), Rank(rank=rank, world=2), lambda line: None, stop_requested)
    trainer.forward.model.register_comm_hook(None, hook)
    trainer.train()
    answer.append([after - before for before, after in zip(seen, seen[1:])])
    torch.distributed.barrier()
    trainer.forward.leave_group()
    torch.distributed.destroy_process_group()
"""


def test_gradients_are_reduced_once_a_step_however_many_rows_a_rank_has(
    make_store: MakeStore, make_train_config: MakeConfig, run_ranks: RunRanks
) -> None:
    """One, two and three rows a rank, the last of them a dummy on one."""
    store = make_store(lengths=(60,) * 8)
    configs = [
        make_train_config(store, run=f"run{rows}", rows_per_step=rows, steps=5, holdout=0.0) for rows in (2, 4, 5)
    ]
    for config in configs:
        config.run.mkdir()
    assert run_ranks(REDUCTIONS, *(config.to_json() for config in configs)) == [[[1] * 4] * 3] * 2


CUT_SHORT = """
import time


class Measurement:
    started = 0

    def measure(self, run, tensors, device, estimate, report, stop):
        self.started += 1
        time.sleep(0.5)  # the other rank would be a step further by now
        return {} if stop() else {"real_acceptance_length": 2.0, "real_prompts": 1, "real_rounds": 1, "real_seconds": 0.0}


answer = []
for number in range(2):
    measurement = Measurement()  # the first rank's alone is asked
    def stop_requested():
        return measurement.started == 2 and number == 0
    answer.append(
        run_rank(config(given[0]), rank, 2, "cpu", meet(number), lambda line: None, stop_requested, measurement=measurement)
    )
"""


def test_a_stop_in_a_measurement_ends_all_ranks_at_its_step(
    make_store: MakeStore, make_train_config: MakeConfig, run_ranks: RunRanks
) -> None:
    """And the next start measures again before all of them go on."""
    config = make_train_config(
        make_store(), steps=4, save_every=2, evaluate_every=2, evaluate_target="t", evaluate_prompts="p", holdout=0.5
    )
    assert run_ranks(CUT_SHORT, config.to_json()) == [[True, False]] * 2
    evaluations = read_metrics(config.run, "evaluation")
    assert [(line["step"], line["real_acceptance_length"]) for line in evaluations] == [(0, 2.0), (2, 2.0), (4, 2.0)]
    assert [checkpoint.step for checkpoint in list_checkpoints(config.run)] == [2, 4]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_gradients_travel_as_bf16_on_gpus_alone(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    class Recorder(torch.nn.Module):
        """In DDP's place, which would need the device and another rank."""

        def __init__(self, module: torch.nn.Module, **options: Any) -> None:
            super().__init__()
            self.module, self.options, self.hooks = module, options, list[Any]()

        def register_comm_hook(self, state: object, hook: object) -> None:
            self.hooks.append((state, hook))

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Recorder)
    module: Any = torch.nn.Linear(2, 2)
    with torch._dynamo.config.patch(optimize_ddp=True):  # which ends with what it began with
        model: Any = _distribute(module, torch.device(device))
        assert not torch._dynamo.config.optimize_ddp, "or it would cut a layer's graph"
    on_gpu = device != "cpu"
    assert model.module is module
    assert model.hooks == ([(None, bf16_compress_hook)] if on_gpu else [])
    assert model.options == {"device_ids": [1] if on_gpu else None, "gradient_as_bucket_view": True}
