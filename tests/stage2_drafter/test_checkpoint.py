"""What a checkpoint holds, and that no crash leaves half of one."""

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.checkpoint import (
    TrainerState,
    export_tensors,
    load_masters,
    record_evaluation,
    round_to_bfloat16,
    safetensors_bytes,
    save_checkpoint,
)
from dflash_train.stage2_drafter.drafter import Drafter, DrafterConfig, load_drafter
from dflash_train.stage2_drafter.run_checkpoints import (
    Measure,
    best_checkpoint,
    evaluation_score,
    list_checkpoints,
    newest_checkpoint,
    prune_checkpoints,
    worse_than_best,
)
from dflash_train.stage2_drafter.run_folder import (
    Round,
    append_rounds,
    read_ledger,
    read_rounds,
    rewind_metrics,
    run_lock,
    start_ledger,
)
from dflash_train.store.calibration import Calibration
from dflash_train.store.encoding import is_projected, make_encoding
from dflash_train.store.files import Files

ENCODING = make_encoding("bf16", 2, 32)
SCALE = torch.from_numpy(np.exp(np.random.default_rng(0).standard_normal(64)).astype(np.float32))
CALIBRATION = Calibration(SCALE)


def save(
    run: Path,
    drafter: Drafter,
    step: int,
    acceptance: float | None = None,
    files: Files | None = None,
) -> None:
    masters = {name: tensor + step for name, tensor in drafter.named_parameters()}
    state = TrainerState(
        step=step,
        config={"lr": 1e-3},
        drafter=drafter.config.to_json(),
        store={},
        segments=["a", "b"],
        total_steps=9,
        random_state={"seed": 0},
        versions={},
        evaluation=None if acceptance is None else {"acceptance_length": acceptance},
    )
    moments = {f"exp_avg.{name}": tensor * 0.5 for name, tensor in masters.items()}
    save_checkpoint(
        run, state=state, masters=masters, optimizer=moments, encoding=ENCODING, calibration=CALIBRATION, files=files
    )


def check_whole(run: Path, drafter: Drafter) -> list[int]:
    """The steps of all checkpoints, each of which must be readable to the last byte."""
    for checkpoint in list_checkpoints(run):
        assert checkpoint.state().step == checkpoint.step
        masters, moments = checkpoint.masters(), checkpoint.optimizer()
        for name, parameter in drafter.named_parameters():
            assert torch.equal(masters[name], parameter + checkpoint.step)
            assert torch.equal(moments[f"exp_avg.{name}"], masters[name] * 0.5)
        assert load_drafter(checkpoint.path).config == drafter.config
    return [checkpoint.step for checkpoint in list_checkpoints(run)]


@pytest.fixture
def drafter(make_config: Callable[..., DrafterConfig]) -> Drafter:
    return Drafter(make_config(num_hidden_layers=1), seed=1)


def test_safetensors_stream_equals_the_library(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor([1.5, -2.0]).bfloat16(),
        "step": torch.tensor(7.0),
        "ids": torch.tensor([[2**40]]),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
    }
    (tmp_path / "x.safetensors").write_bytes(b"".join(safetensors_bytes(tensors, {"format": "pt"})))
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_rounding_is_to_nearest_once() -> None:
    tie = 1 + 2.0**-8
    values = torch.tensor(
        [tie + 2.0**-40, -tie - 2.0**-40, tie, 1 + 3 * 2.0**-8, 0.0, -0.0, 1e-42, 3.0], dtype=torch.float64
    )
    once = [1 + 2.0**-7, -1 - 2.0**-7, 1.0, 1 + 2.0**-6, 0.0, -0.0]
    assert round_to_bfloat16(values).double().tolist()[:6] == once
    assert values.float().bfloat16()[0] == 1.0  # torch's own cast rounds twice
    random = torch.from_numpy(np.random.default_rng(0).standard_normal(10_000) * np.logspace(-20, 20, 10_000))
    rounded = round_to_bfloat16(random)
    bits = rounded.view(torch.int16)
    error = (rounded.double() - random).abs()
    for neighbour in (bits - 1, bits + 1):
        assert (error <= (neighbour.view(torch.bfloat16).double() - random).abs()).all()


@pytest.mark.parametrize("encoding_name", ["bf16", "int8", "projected-int8", "projected-int4"])
def test_exported_fc_acts_on_raw_states_as_the_trained_one_on_its_features(
    encoding_name: str, make_config: Callable[..., DrafterConfig]
) -> None:
    rank = 23 if is_projected(encoding_name) else None
    encoding = make_encoding(encoding_name, 2, 32, rank)
    generator = torch.Generator().manual_seed(0)
    rows = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64)).Q[:, : rank or 64].T
    calibration = Calibration(SCALE, projection=None if rank is None else rows.float().contiguous())
    drafter = Drafter(make_config(num_hidden_layers=1), seed=1, num_features=encoding.num_features)
    masters = dict(drafter.named_parameters())
    assert masters["fc.weight"].shape == (32, encoding.num_features)
    exported = export_tensors(masters, encoding, calibration)
    assert exported.keys() == masters.keys()
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    trained = masters["fc.weight"].detach().double()
    exact = trained if calibration.projection is None else trained @ calibration.projection.double()
    exact = exact / SCALE.double()
    assert torch.equal(exported["fc.weight"], round_to_bfloat16(exact))
    states = torch.randn(5, 64, dtype=torch.float64, generator=generator) * SCALE
    features = states / SCALE.double()
    if calibration.projection is not None:
        features = features @ calibration.projection.double().T
    outputs = features @ trained.T
    torch.testing.assert_close(states @ exact.T, outputs, rtol=1e-12, atol=1e-12)
    # each of 64 products errs by at most 2^-9 of itself
    noise = 2**-9 * (states.abs() @ exact.abs().T)
    assert ((states @ exported["fc.weight"].double().T - outputs).abs() <= noise).all()


def test_checkpoint_holds_the_drafter_and_nothing_frozen(tmp_path: Path, drafter: Drafter) -> None:
    save(tmp_path, drafter, 3)
    folder = tmp_path / "checkpoints" / "step-00000003"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = ["masters.safetensors", "optimizer.safetensors", "state.json"]
    assert files == ["checksums.json", "config.json", "model.safetensors", *(f"trainer/{name}" for name in names)]
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == {name for name, _ in drafter.named_parameters()}
    assert not any("embed" in name or "lm_head" in name for name in tensors)
    assert json.loads((folder / "config.json").read_text()) == drafter.config.to_json()
    assert json.loads((folder / "trainer" / "state.json").read_text())["segments"] == ["a", "b"]


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path, drafter: Drafter) -> None:
    for step, acceptance in ((1, 1.5), (2, 2.5), (3, None), (4, 2.0), (5, None)):
        save(tmp_path, drafter, step, acceptance)
    prune_checkpoints(tmp_path, keep=2)
    assert check_whole(tmp_path, drafter) == [2, 4, 5]
    best, newest = best_checkpoint(tmp_path), newest_checkpoint(tmp_path)
    assert best is not None and newest is not None
    assert (best.step, newest.step) == (2, 5)


@pytest.mark.parametrize(
    ("scores", "found"),
    [
        ((2.0, 1.89), ("step 2, is worse than step 1: held-out estimate 1.890 against 2.000.", "step-00000001; more")),
        ((2.0, 1.91), None),
        ((1.5, 2.0), None),
        ((2.0, None), None),
        ((None, 2.0), None),
    ],
)
def test_a_newest_checkpoint_that_lost_is_named(
    tmp_path: Path, drafter: Drafter, scores: tuple[float | None, ...], found: tuple[str, str] | None
) -> None:
    assert worse_than_best(tmp_path) is None, "no checkpoint yet"
    for step, acceptance in enumerate(scores, 1):
        save(tmp_path, drafter, step, acceptance)
    told = worse_than_best(tmp_path)
    assert (told is None) == (found is None)
    assert told is None or found is None or all(part in text for part, text in zip(found, told, strict=True))
    assert worse_than_best(tmp_path / "checkpoints" / "step-00000001") is None, "a drafter's folder is what it is"


def test_an_estimate_is_not_held_against_a_real_acceptance_length(tmp_path: Path, drafter: Drafter) -> None:
    save(tmp_path, drafter, 1, 1.5)
    record_evaluation(list_checkpoints(tmp_path)[0], {"acceptance_length": 3.0, "real_acceptance_length": 2.5})
    save(tmp_path, drafter, 2, 1.5)
    assert worse_than_best(tmp_path) is None
    record_evaluation(list_checkpoints(tmp_path)[1], {"acceptance_length": 3.5, "real_acceptance_length": 2.0})
    told = worse_than_best(tmp_path)
    assert told is not None and "real acceptance length 2.000 against 2.500." in told[0]


def test_only_scores_of_one_kind_and_of_the_same_data_are_compared(tmp_path: Path, drafter: Drafter) -> None:
    for step in (1, 2):
        save(tmp_path, drafter, step, 1.5)
    first, second = list_checkpoints(tmp_path)
    record_evaluation(first, {"acceptance_length": 9.0})  # of before rounds were walked
    record_evaluation(second, {"acceptance_length": 2.0, "rounds": 5, "rows": 1})
    assert worse_than_best(tmp_path) is None and best_checkpoint(tmp_path) == second
    record_evaluation(first, {"acceptance_length": 9.0, "rounds": 5, "rows": 2})
    assert worse_than_best(tmp_path) is None and best_checkpoint(tmp_path) == first, "of other held-out rows"
    record_evaluation(first, {"acceptance_length": 9.0, "rounds": 5, "rows": 1})
    assert worse_than_best(tmp_path) is not None
    (tmp_path / "model.safetensors").touch()
    assert worse_than_best(tmp_path) is None, "then the folder is the drafter, and its checkpoints are not asked"


def test_an_evaluation_that_is_none_has_no_score(tmp_path: Path, drafter: Drafter) -> None:
    save(tmp_path, drafter, 1, 1.5)
    record_evaluation(list_checkpoints(tmp_path)[0], {"acceptance_length": "much"})
    assert evaluation_score(list_checkpoints(tmp_path)[0]) is None and worse_than_best(tmp_path) is None


def test_masters_of_another_drafter_are_refused(tmp_path: Path, drafter: Drafter, make_config: Any) -> None:
    other = Drafter(make_config(num_hidden_layers=1, intermediate_size=7), seed=1)
    with pytest.raises(InputError, match=r"mlp.gate_proj.weight is of shape \[48, 32\].* needs \[7, 32\]"):
        load_masters(other.named_parameters(), dict(drafter.named_parameters()), tmp_path)


def test_damaged_state_names_the_folder_and_the_way_out(tmp_path: Path, drafter: Drafter) -> None:
    save(tmp_path, drafter, 1)
    checkpoint = list_checkpoints(tmp_path)[0]
    (checkpoint.path / "trainer" / "state.json").write_text("{")
    with pytest.raises(InputError, match="step-00000001 cannot be resumed from.*Delete this folder"):
        checkpoint.state()
    (checkpoint.path / "trainer" / "masters.safetensors").write_bytes(b"short")
    with pytest.raises(InputError, match="masters.safetensors cannot be read"):
        checkpoint.masters()
    (checkpoint.path / "checksums.json").unlink()
    for text in ("[1]", "null", "{}"):
        (checkpoint.path / "trainer" / "state.json").write_text(text)
        with pytest.raises(InputError, match="step-00000001 cannot be resumed from.*Delete this folder"):
            checkpoint.state()


@pytest.mark.parametrize("name", ["model", "trainer/masters", "trainer/optimizer"])
def test_one_flipped_bit_of_a_tensor_is_refused(tmp_path: Path, drafter: Drafter, name: str) -> None:
    save(tmp_path, drafter, 1)
    checkpoint = list_checkpoints(tmp_path)[0]
    path = checkpoint.path / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"cannot be read.*has crc32c .*it is damaged"):
        {"model": lambda: load_drafter(checkpoint.path), "trainer/masters": checkpoint.masters}.get(
            name, checkpoint.optimizer
        )()


def test_evaluation_that_was_not_finite_has_no_score(tmp_path: Path, drafter: Drafter) -> None:
    save(tmp_path, drafter, 1, 1.5)
    save(tmp_path, drafter, 2, math.nan)
    state = tmp_path / "checkpoints" / "step-00000002" / "trainer" / "state.json"
    state.write_text(state.read_text().replace("NaN", "null"))
    (state.parent.parent / "checksums.json").unlink()
    best = best_checkpoint(tmp_path)
    assert best is not None and best.step == 1


class Crash(BaseException):
    """The power went: nothing of ours runs after it."""


class CrashingFiles(Files):
    """Stops before call `last` (counting from 0); `power_cut` then drops what was not fsynced."""

    def __init__(self, last: int) -> None:
        self.calls, self.last = 0, last
        self.unsynced: set[Path] = set()
        self.renamed: list[tuple[Path, Path]] = []
        self.paths: dict[int, Path] = {}

    def _call(self) -> None:
        if self.calls == self.last:
            raise Crash
        self.calls += 1

    def open(self, path: Path) -> int:
        self._call()
        descriptor = super().open(path)
        self.paths[descriptor] = path
        self.unsynced.add(path)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        self._call()
        return super().write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._call()
        self.unsynced.discard(self.paths[descriptor])

    def make_directory(self, path: Path) -> None:
        self._call()
        super().make_directory(path)

    def sync_directory(self, path: Path) -> None:
        self._call()
        self.renamed = [(old, new) for old, new in self.renamed if new.parent != path]

    def rename(self, source: Path, destination: Path) -> None:
        self._call()
        super().rename(source, destination)
        self.renamed.append((source, destination))
        moved = {path for path in self.unsynced if path.is_relative_to(source)}
        self.unsynced = self.unsynced - moved | {destination / path.relative_to(source) for path in moved}

    def remove_tree(self, path: Path) -> None:
        self._call()
        for file in [file for file in path.rglob("*") if file.is_file()]:  # half of it is gone when the power goes
            file.unlink()
            self._call()
        super().remove_tree(path)

    def power_cut(self) -> None:
        for path in self.unsynced:
            if path.exists():
                path.write_bytes(b"")
        for old, new in reversed(self.renamed):
            if new.exists() and not old.exists():
                new.rename(old)


@pytest.mark.parametrize("power_cut", [False, True])
def test_no_crash_point_leaves_half_a_checkpoint(tmp_path: Path, drafter: Drafter, power_cut: bool) -> None:
    last = 0
    while True:
        run = tmp_path / str(last)
        save(run, drafter, 1)
        files = CrashingFiles(last)
        try:
            save(run, drafter, 2, files=files)
            prune_checkpoints(run, 1, files)
        except Crash:
            if power_cut:
                files.power_cut()
            steps = check_whole(run, drafter)
            assert steps in ([1], [1, 2], [2])
            prune_checkpoints(run, 1)  # the next start, which then trains and saves again
            save(run, drafter, 2)
            prune_checkpoints(run, 1)
            assert check_whole(run, drafter) == [2]
            assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
            last += 1
        else:
            break
    assert last > 50
    assert check_whole(run, drafter) == [2]


@pytest.mark.parametrize("power_cut", [False, True])
def test_no_crash_point_leaves_half_an_evaluation_that_came_later(
    tmp_path: Path, drafter: Drafter, power_cut: bool
) -> None:
    last, found = 0, []
    while True:
        run = tmp_path / str(last)
        save(run, drafter, 1, acceptance=1.5)
        [checkpoint] = list_checkpoints(run)
        files = CrashingFiles(last)
        try:
            record_evaluation(checkpoint, {"acceptance_length": 1.5, "real_acceptance_length": 2.5}, files)
        except Crash:
            if power_cut:
                files.power_cut()
            found.append(evaluation_score(checkpoint))
            assert check_whole(run, drafter) == [1]
            record_evaluation(checkpoint, {"real_acceptance_length": 3.5})
            assert evaluation_score(checkpoint) == (Measure.DECODED, 3.5)
            last += 1
        else:
            break
    assert last >= 5 and set(found) <= {(Measure.ANCHORS, 1.5), (Measure.DECODED, 2.5)}
    assert evaluation_score(checkpoint) == (Measure.DECODED, 2.5)


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_damaged_evaluation_that_came_later_is_named(tmp_path: Path, drafter: Drafter, text: str) -> None:
    save(tmp_path, drafter, 1)
    [checkpoint] = list_checkpoints(tmp_path)
    (checkpoint.path / "trainer" / "evaluation.json").write_text(text)
    with pytest.raises(InputError, match="step-00000001 cannot be resumed from.*evaluation.json"):
        checkpoint.state()


def test_run_lock_refuses_a_second_trainer(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(InputError, match=r"in use by process \d+"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass


def test_a_file_system_without_locks_is_not_taken_for_a_second_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(InputError, match=r"lock cannot be locked: No locks available\. Choose"), run_lock(tmp_path):
        pass


def test_ledger_survives_a_torn_line(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) is None
    start_ledger(tmp_path, ["b", "a"])
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"step": 9, "segm')
    assert read_ledger(tmp_path) == ["b", "a"]


def test_rounds_are_durable_before_anything_of_theirs_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind the first ones too, which are written in place."""
    first, second = (
        Round(step=step, segments=("a",), rows=2, tokens=7, total_steps=9, held_out=(5,), last=False) for step in (0, 4)
    )
    append_rounds(tmp_path, [first])
    synced: list[bytes] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").read_bytes()))
    append_rounds(tmp_path, [second])
    assert synced == [(tmp_path / "ledger.jsonl").read_bytes()]
    assert read_rounds(tmp_path) == [first, second]


def test_rewinding_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    lines = [json.dumps({"kind": "train", "step": step}) for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "tr')
    rewind_metrics(tmp_path, 3, evaluated=False)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:3]
    rewind_metrics(tmp_path, 0, evaluated=False)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_rewinding_drops_an_evaluation_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    lines = [json.dumps({"kind": kind, "step": 2}) for kind in ("train", "evaluation")]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    rewind_metrics(tmp_path, 2, evaluated=True)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines
    rewind_metrics(tmp_path, 2, evaluated=False)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:1]


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"[1, 2]", b"null", b"{}", b'{"step": "x"}', b"[" * 100_000])
def test_damaged_lines_are_named_and_nothing_is_thrown_away(tmp_path: Path, damage: bytes) -> None:
    for name, read in (("metrics", lambda run: rewind_metrics(run, 1, True)), ("ledger", read_ledger)):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b'{"kind": "train", "step": 1, "segments": ["a"]}\n' + damage + b"\n")
        before = path.read_bytes()
        with pytest.raises(InputError, match=rf"{name}\.jsonl, line 2, is damaged: found .*move it away"):
            read(tmp_path)
        assert path.read_bytes() == before


def test_ledger_without_a_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(InputError, match=r"lists no segments.*Delete the file"):
        read_ledger(tmp_path)
