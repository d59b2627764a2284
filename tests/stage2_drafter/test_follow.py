"""Training while the store grows: rounds, waits, resumes from the ledger, and segments that are consumed."""

import errno
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_train.errors import InputError
from dflash_train.stage2_drafter import follow, growth, round_planner
from dflash_train.stage2_drafter import train as train_module
from dflash_train.stage2_drafter import trainer as trainer_module
from dflash_train.stage2_drafter.checkpoint import read_groups
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.preparation import prepare_run
from dflash_train.stage2_drafter.rank import run_rank
from dflash_train.stage2_drafter.row_forward import RowForward
from dflash_train.stage2_drafter.rows import GrowingSchedule, hash_place, in_fraction
from dflash_train.stage2_drafter.run_checkpoints import newest_checkpoint
from dflash_train.stage2_drafter.run_folder import read_metrics, read_rounds, run_lock
from dflash_train.store import consumed
from dflash_train.store.consumed import consumer_lock, read_consumed
from dflash_train.store.creation import is_locked, store_lock
from dflash_train.store.files import Files
from dflash_train.store.manifest import StoreError
from dflash_train.store.opened import list_segments
from dflash_train.store.plan import PLAN_NAME, SILENT_SECONDS, Plan, write_plan
from dflash_train.store.reader import StoreReader
from dflash_train.store.verify import verify_store

MakeConfig = Callable[..., TrainConfig]
MakeStore = Callable[..., Path]
LENGTHS = (23, 31, 9, 40, 17, 28, 12, 36, 30, 21, 44, 13, 19, 27, 38, 11, 25, 33, 16, 29, 22, 35, 18, 26)
TIMES = ("tokens_per_second", "wait_share", "store_wait_seconds")


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_planner, "LOOK_SECONDS", 0.0)


class GrowingStore:
    """A store of 24 samples in 8 segments, which come in one by one: moving a segment folder is how stores are merged."""

    def __init__(self, make_store: MakeStore, name: str = "growing.zarr") -> None:
        self.path = make_store(name, lengths=LENGTHS, segment_samples=3)
        self.ids = StoreReader(self.path).stored_ids()
        self._waiting = self.path.with_name(f"{name}.waiting")
        self._waiting.mkdir()
        for segment in list_segments(self.path):
            (self.path / "segments" / segment).rename(self._waiting / segment)
        self.beat = 0
        self.say("running")

    @property
    def left(self) -> list[Path]:
        return sorted(self._waiting.iterdir())

    def say(self, state: str) -> None:
        self.beat += 1
        write_plan(
            self.path, Plan(samples=24, tokens=sum(LENGTHS), longest=44, state=state, beat=self.beat, run="extract")
        )

    def grow(self, count: int = 1) -> None:
        for segment in self.left[:count]:
            segment.rename(self.path / "segments" / segment.name)
        if not self.left:
            self.say("finished")


@pytest.fixture
def growing(make_store: MakeStore) -> GrowingStore:
    return GrowingStore(make_store)


@pytest.fixture
def grow_while_waiting(growing: GrowingStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Another segment comes whenever the trainer has to wait; the list gets every line of the waits."""
    said: list[str] = []
    say = round_planner.RoundPlanner._say

    def say_and_grow(self: round_planner.RoundPlanner, plan: Plan | None, live: Any) -> None:
        say(self, plan, live)
        growing.grow()

    monkeypatch.setattr(round_planner.RoundPlanner, "_say", say_and_grow)
    yield said


def run_here(config: TrainConfig, stop_after: int | None = None, crash_after: int | None = None) -> list[str]:
    lines: list[str] = []
    asked: list[int] = []

    def stop_requested() -> bool:
        asked.append(1)
        if len(asked) == crash_after:
            raise KeyboardInterrupt
        return stop_after is not None and len(asked) >= stop_after  # the request stays, as a signal does

    run_rank(config, 0, 1, "cpu", "", lines.append, stop_requested)
    return lines


def curve(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMES} for line in read_metrics(run)]


def trained_ids(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Counts, from now on, how often each sample is trained on in steps that are taken."""
    counts: Counter[int] = Counter()
    original = trainer_module.Trainer._train_step

    def counting(self: trainer_module.Trainer, loader: Any, rows: Any) -> Any:
        first = self.step * config.rows_per_step
        keys = [self.run.schedule.key(place) for place in range(first, first + config.rows_per_step)]
        ids = self.run.reader.samples["id"]
        counts.update(int(ids[i]) for key in keys if key is not None for i in self.run.schedule.samples(key).tolist())
        return original(self, loader, rows)

    monkeypatch.setattr(trainer_module.Trainer, "_train_step", counting)
    return counts


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_a_growing_store_is_trained_on_exactly_as_often_as_epochs_say(
    growing: GrowingStore, grow_while_waiting: list[str], make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_train_config(
        growing.path, follow=True, steps=None, epochs=2, save_every=99, evaluate_every=99, holdout=0.3
    )
    counts = trained_ids(config, monkeypatch)
    lines = run_here(config)
    reader = StoreReader(growing.path)
    held_out = hash_place(reader.samples["group"]) < config.holdout
    wanted = dict.fromkeys(reader.samples["id"][~held_out].tolist(), 2)
    assert held_out.any() and counts == wanted
    assert lines[0] == "waiting for the store: 0 of 24 samples stored"
    steps = read_metrics(config.run)
    rounds = read_rounds(config.run)
    assert rounds[-1].last and rounds[-1].total_steps == len(steps) == newest_checkpoint(config.run).step  # type: ignore[union-attr]
    assert len({entry.total_steps for entry in rounds}) > 1, "the total is corrected as the store becomes known"
    assert read_metrics(config.run, "evaluation")[-1]["rows"] > 0
    assert all(line["store_wait_seconds"] >= 0 for line in steps)


def test_resume_while_the_store_grows_repeats_the_uninterrupted_run_of_its_ledger(
    growing: GrowingStore, grow_while_waiting: list[str], make_train_config: MakeConfig
) -> None:
    options: dict[str, Any] = {"follow": True, "steps": 14, "save_every": 3, "evaluate_every": 2, "holdout": 0.5}
    parts = make_train_config(growing.path, run="parts", **options)
    run_here(parts, stop_after=5)
    growing.grow(2)
    with pytest.raises(KeyboardInterrupt):
        run_here(parts, crash_after=7)
    growing.grow(1)
    run_here(parts)
    whole = make_train_config(growing.path, run="whole", **options)
    whole.run.mkdir()
    (whole.run / "ledger.jsonl").write_bytes((parts.run / "ledger.jsonl").read_bytes())
    run_here(whole)
    assert read_metrics(whole.run, "evaluation")[-1]["rows"] > 0
    assert len(curve(whole.run)) == 14 and curve(parts.run) == curve(whole.run)
    assert read_metrics(parts.run, "evaluation") == read_metrics(whole.run, "evaluation")
    names = newest_checkpoint(parts.run), newest_checkpoint(whole.run)
    assert all(checkpoint is not None and checkpoint.state().rounds for checkpoint in names)
    one, two = (checkpoint.masters() for checkpoint in names if checkpoint is not None)
    assert all((one[name] == two[name]).all() for name in one)


def test_a_stop_while_waiting_saves_and_the_next_start_goes_on(
    growing: GrowingStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_train_config(growing.path, follow=True, steps=5, save_every=99, evaluate_every=99, holdout=0.3)
    run_here(config, stop_after=3)
    assert newest_checkpoint(config.run).step == 0  # type: ignore[union-attr]
    growing.grow(1)  # 3 samples: 2 rows at most
    lines = run_here(config, stop_after=40)
    stopped = newest_checkpoint(config.run)
    assert stopped is not None and 0 < stopped.step < 5
    assert any(line.startswith("waiting for the store: 3 of 24 samples stored") for line in lines)
    growing.grow(9)
    run_here(config)
    assert newest_checkpoint(config.run).step == 5  # type: ignore[union-attr]


@pytest.mark.parametrize("share", [1e-9, 0.3])
def test_that_nothing_was_held_out_is_said(growing: GrowingStore, make_train_config: MakeConfig, share: float) -> None:
    growing.grow(9)
    config = make_train_config(growing.path, follow=True, steps=2, save_every=99, evaluate_every=99, holdout=share)
    said = f"--holdout {share} has held out none of these samples, so nothing was evaluated" in run_here(config)
    assert said == (share == 1e-9) == (not read_metrics(config.run, "evaluation"))


def test_the_end_of_an_extract_is_noticed_and_said(growing: GrowingStore, make_train_config: MakeConfig) -> None:
    config = make_train_config(growing.path, follow=True)
    lines: list[str] = []
    now = [0.0]
    following = follow.Following(config, StoreReader(growing.path), [], 0)
    planner = round_planner.RoundPlanner(following, lines.append, clock=lambda: now[0])
    for state, seconds in (("running", 1), ("running", 40), ("running", 1), ("stopped", 1), ("failed", 1)):
        now[0] += seconds
        if seconds == 1 and state != "running":
            growing.say(state)
        assert planner.look(0, urgent=True) == []
    assert [line.partition(";")[2].strip() for line in lines] == [
        "",
        "the extract has given no sign of life for 30 s: start it again to go on, or Ctrl-C to stop here with a checkpoint",
        "the extract was stopped: start it again to go on, or Ctrl-C to stop here with a checkpoint",
        "the extract failed: start it again to go on, or Ctrl-C to stop here with a checkpoint",
    ]


def test_a_store_without_a_plan_is_done_after_30_seconds(growing: GrowingStore, make_train_config: MakeConfig) -> None:
    """As one that was copied, or made by a version of before; a new one gets its plan at once."""
    growing.grow(8)
    (growing.path / PLAN_NAME).unlink()
    config = make_train_config(growing.path, follow=True, steps=None, epochs=1)
    following = follow.Following(config, StoreReader(growing.path), [], 0)
    now = [100.0]
    planner = round_planner.RoundPlanner(following, lambda line: None, clock=lambda: now[0])
    first = planner.look(0, urgent=False)
    assert [(len(entry.segments), entry.last) for entry in first] == [(8, False)]
    following.extend(first)
    now[0] += SILENT_SECONDS
    assert planner.look(1, urgent=False) == []
    now[0] += 1
    closing = planner.look(1, urgent=False)
    assert [(entry.segments, entry.last) for entry in closing] == [((), True)]
    assert closing[0].total_steps == first[0].rows // config.rows_per_step


def test_steps_that_need_several_passes_get_them_while_the_store_grows(
    growing: GrowingStore, make_train_config: MakeConfig
) -> None:
    """18 steps of 2 rows over a plan of some 7.9 rows to train on: 5 passes, and no sixth before the extract has ended."""
    growing.grow(2)
    config = make_train_config(growing.path, follow=True, steps=18)
    following = follow.Following(config, StoreReader(growing.path), [], 0)
    planner = round_planner.RoundPlanner(following, lambda line: None)
    while rounds := planner.look(0, urgent=False):
        following.extend(rounds)
    assert Counter(name for entry in following.rounds for name in entry.segments) == dict.fromkeys(
        list_segments(growing.path), 5
    )


def test_the_log_says_how_long_a_step_waited_for_the_store(
    growing: GrowingStore, grow_while_waiting: list[str], make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.grow(5)
    grow = round_planner.RoundPlanner._say

    def say_late(*given: Any) -> None:
        time.sleep(0.6)
        grow(*given)

    monkeypatch.setattr(round_planner.RoundPlanner, "_say", say_late)
    config = make_train_config(growing.path, follow=True, steps=None, epochs=1, save_every=99, evaluate_every=99)
    lines = [line for line in run_here(config) if line.startswith("step")]
    waits = [line["store_wait_seconds"] for line in read_metrics(config.run)]
    assert any(wait >= 0.6 for wait in waits) and any(wait < 0.5 for wait in waits)
    assert ["for the store to grow" in line for line in lines] == [wait >= 0.5 for wait in waits]


def test_evaluation_is_compiled_at_the_warm_up_though_nothing_is_held_out_yet(
    growing: GrowingStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.grow(2)
    evaluates: list[bool] = []
    monkeypatch.setattr(RowForward, "warm_up", lambda self, row, evaluation: evaluates.append(evaluation))
    for share in (1e-9, 0.0):
        run_here(make_train_config(growing.path, run=f"run{share}", follow=True, steps=1, holdout=share))
    assert evaluates == [True, False]


def test_an_evaluation_that_a_stop_put_off_leaves_out_what_came_into_the_store_since(
    growing: GrowingStore, make_train_config: MakeConfig
) -> None:
    options: dict[str, Any] = {"follow": True, "steps": 12, "save_every": 99, "evaluate_every": 1, "holdout": 0.5}
    growing.grow(3)
    parts = make_train_config(growing.path, run="parts", **options)
    run_here(parts, stop_after=3)
    stopped = newest_checkpoint(parts.run)
    assert stopped is not None and stopped.step > 0 and stopped.state().evaluation is None
    growing.grow(9)
    run_here(parts)
    assert any(entry.step == stopped.step and entry.held_out for entry in read_rounds(parts.run))
    whole = make_train_config(growing.path, run="whole", **options)
    whole.run.mkdir()
    (whole.run / "ledger.jsonl").write_bytes((parts.run / "ledger.jsonl").read_bytes())
    run_here(whole)
    evaluations = read_metrics(parts.run, "evaluation")
    assert evaluations == read_metrics(whole.run, "evaluation")
    rows = {line["step"]: line["rows"] for line in evaluations}
    assert rows[stopped.step] < rows[stopped.step + 1]


@pytest.mark.parametrize("rows_per_step", [1, 2, 5, 7])
def test_a_round_ends_with_a_step_so_that_a_full_store_can_be_consumed(
    growing: GrowingStore, make_train_config: MakeConfig, rows_per_step: int
) -> None:
    growing.grow(8)
    config = make_train_config(growing.path, follow=True, rows_per_step=rows_per_step)
    reader = StoreReader(growing.path)
    following = follow.Following(config, reader, [], 0)
    plan = following.plan(tuple(reader.segment_ids))
    full = [row for row in plan if len(row)]
    assert len(plan) % rows_per_step == 0 and len(plan) - len(full) < rows_per_step
    assert not any(len(row) for row in plan[len(full) :]), "the empty ones are last"
    trained = np.concatenate(full)
    assert len(trained) == len(np.unique(trained)), "each sample once"


def test_growing_schedule_has_the_rows_of_its_rounds_in_order() -> None:
    schedule = GrowingSchedule(seed=1, row_tokens=8)
    schedule.add(3, last=False)
    schedule.add([np.array([4]), np.array([5, 6])], last=False)
    schedule.add([], last=False)
    assert (schedule.covers(5), schedule.covers(6)) == (True, False)
    schedule.add([np.array([7])], last=True)
    assert [schedule.key(place) for place in range(3, 7)] == [(1, 0, False), (1, 1, False), (3, 0, False), None]
    assert schedule.samples(schedule.key(4)).tolist() == [5, 6]  # type: ignore[arg-type]
    assert schedule.ends() == [3, 5, 5, 6]
    schedule.forget(5)
    assert schedule.samples(schedule.key(5)).tolist() == [7]  # type: ignore[arg-type]


def test_what_a_growing_store_holds_out_is_what_its_rounds_leave_out(
    growing: GrowingStore, make_train_config: MakeConfig
) -> None:
    """A share that no group falls into holds out nothing there, where a store that stays holds out one group."""
    growing.grow(8)
    names = list_segments(growing.path)
    for share in (1e-9, 0.3):
        run = prepare_run(make_train_config(growing.path, follow=True, holdout=share), names)
        assert run.following is not None
        _lengths, training, held_out = run.following.split(names)
        assert np.flatnonzero(run.held_out()).tolist() == sorted(held_out.tolist())
        groups = run.reader.samples["group"][training]
        assert run.training_groups().tolist() == sorted(set(groups.tolist()))
    assert prepare_run(make_train_config(growing.path, holdout=1e-9)).held_out().any()


# -- consumption -------------------------------------------------------------------------------------------------------


def test_consumed_segments_go_once_a_checkpoint_is_behind_their_passes(
    growing: GrowingStore, grow_while_waiting: list[str], make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_train_config(
        growing.path, follow=True, consume=2, steps=None, save_every=4, evaluate_every=99, holdout=0.3
    )
    counts = trained_ids(config, monkeypatch)
    groups = {}
    most = [0]
    remove = follow.remove_consumed

    def remove_and_look(following: follow.Following, due: Any) -> None:
        newest = newest_checkpoint(config.run)
        assert newest is not None
        done = newest.step * config.rows_per_step
        ends = following.schedule.ends()
        for name in due:
            last = [end for entry, end in zip(following.rounds, ends, strict=True) if name in entry.segments][1]
            assert last <= done, "both passes lie before the checkpoint"
            table = following.reader.entry(name).samples
            groups.update(dict(zip(table[:, 0].tolist(), table[:, 1].tolist(), strict=True)))
        most[0] = max(most[0], len(list_segments(config.store_folder)))
        remove(following, due)

    monkeypatch.setattr(growth, "remove_consumed", remove_and_look)
    run_here(config)
    record = read_consumed(growing.path)
    assert record.ids == growing.ids, "every sample counts as done"
    assert most[0] <= 6, "the store stayed bounded"
    held_out = {identity for identity, group in groups.items() if hash_place(np.array([group]))[0] < 0.3}
    assert held_out and counts == dict.fromkeys(growing.ids - held_out, 2)
    newest = newest_checkpoint(config.run)
    listed = None if newest is None else read_groups(newest.path)
    assert listed is not None and set(listed.tolist()) == {groups[identity] for identity in counts}, "removed or not"
    left = StoreReader(growing.path)
    assert left.stored_ids() == held_out, "held-out samples were copied"
    assert {source.get("copied") for source in left.sources()} == {consumed.COPY_SOURCE}
    assert verify_store(growing.path).problems == []
    evaluations = read_metrics(config.run, "evaluation")
    assert evaluations[-1]["rows"] >= evaluations[0]["rows"] > 0


@pytest.mark.parametrize("crash", ["copy_held_out", "write_file", "rename", "remove_tree", "remove_consumed"])
def test_a_kill_around_a_removal_loses_and_doubles_nothing(
    growing: GrowingStore,
    grow_while_waiting: list[str],
    make_train_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    crash: str,
) -> None:
    """The process ends at the second call of a step of the removal; then the run goes on."""
    config = make_train_config(
        growing.path, follow=True, consume=2, steps=None, save_every=2, evaluate_every=99, holdout=0.3
    )

    class Killed(BaseException):
        pass

    calls = [0]

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                raise Killed
            return original(*arguments, **keywords)

        return call

    with monkeypatch.context() as patched:
        if crash == "copy_held_out":
            patched.setattr(follow.Following, crash, dying(follow.Following.copy_held_out))
        elif crash == "remove_consumed":
            patched.setattr(growth, "remove_consumed", dying(follow.remove_consumed))
        else:
            patched.setattr(consumed, "Files", type("Files", (Files,), {crash: dying(getattr(Files, crash))}))
        with pytest.raises(Killed):
            run_here(config)
    counts = trained_ids(config, monkeypatch)
    before = newest_checkpoint(config.run)
    assert before is not None
    run_here(config)
    assert read_consumed(growing.path).ids == growing.ids
    rounds = read_rounds(config.run)
    passes = Counter(name for entry in rounds for name in entry.segments)
    assert set(passes.values()) == {2}
    assert sum(line["tokens"] for line in read_metrics(config.run)) == sum(entry.tokens for entry in rounds)
    assert max(counts.values()) <= 2
    assert verify_store(growing.path).problems == []
    finished = newest_checkpoint(config.run)
    assert finished is not None and finished.step == len(read_metrics(config.run)) == rounds[-1].total_steps


def test_groups_trained_on_stay_listed_after_their_segments_are_gone_and_the_run_goes_on(
    growing: GrowingStore, grow_while_waiting: list[str], make_train_config: MakeConfig
) -> None:
    config = make_train_config(
        growing.path, follow=True, consume=1, steps=None, save_every=1, evaluate_every=99, holdout=0.0
    )
    listed: list[set[int]] = []
    for stop_after in (14, None):
        run_here(config, stop_after=stop_after)
        newest = newest_checkpoint(config.run)
        groups = None if newest is None else read_groups(newest.path)
        assert groups is not None
        listed.append(set(groups.tolist()))
        assert read_consumed(growing.path).ids
    assert set() < listed[0] < listed[1]


def test_a_checkpoint_of_more_rounds_than_the_ledger_has_is_refused(
    growing: GrowingStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.grow(8)
    config = make_train_config(growing.path, follow=True, steps=2)
    run_here(config)
    (config.run / "ledger.jsonl").unlink()
    with pytest.raises(
        InputError, match=r"the ledger has 0 rounds, the checkpoint 1 \(restore .*ledger\.jsonl from a copy"
    ):
        train_here(replace(config, steps=4), monkeypatch)


def test_a_run_killed_after_its_last_checkpoint_still_removes_what_it_consumed(
    growing: GrowingStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.grow(8)
    config = make_train_config(growing.path, follow=True, consume=1, steps=None, save_every=99, evaluate_every=99)
    with monkeypatch.context() as patched:
        patched.setattr(growth, "remove_consumed", lambda *_arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_here(config)
    assert len(list_segments(growing.path)) >= 8 and newest_checkpoint(config.run) is not None

    def follow_here(config: TrainConfig, *_rest: Any) -> bool:  # in place of a process
        run_here(config)
        return False

    monkeypatch.setattr(train_module, "_follow", follow_here)
    lines: list[str] = []
    train_module.train(config, report=lines.append)
    assert read_consumed(growing.path).ids == growing.ids
    assert not any("is complete" in line for line in lines)
    train_module.train(config, report=lines.append)
    assert "is complete" in lines[-1], "and then there is nothing left to do"


def test_a_run_whose_steps_end_within_a_pass_is_complete_and_keeps_its_segments(
    growing: GrowingStore, make_train_config: MakeConfig
) -> None:
    growing.grow(8)
    config = make_train_config(growing.path, follow=True, consume=1, steps=2)
    run_here(config)
    lines: list[str] = []
    train_module.train(config, report=lines.append)
    assert "is complete" in lines[-1] and len(list_segments(growing.path)) == 8


CLOSED = (
    "its rounds over the store are done and closed, which more --steps or --epochs do not change: to train on, give "
    "another --run and --init-from"
)


def train_here(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[train_module.TrainResult, list[str]]:
    """`train` with the one rank in this process; what it returns, and its lines."""
    lines: list[str] = []

    def follow_here(config: TrainConfig, *_rest: Any) -> bool:
        lines.extend(run_here(config))
        return False

    monkeypatch.setattr(train_module, "_follow", follow_here)
    return train_module.train(config, report=lines.append), lines


@pytest.mark.parametrize("consume", [None, 1])
def test_more_steps_go_on_with_a_followed_store(
    growing: GrowingStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, consume: int | None
) -> None:
    """With --consume the ledger is closed at once: as many steps as its rows make, whatever --steps was then."""
    growing.grow(8)
    config = make_train_config(growing.path, follow=True, consume=consume, steps=2)
    run_here(config)
    assert [entry.last for entry in read_rounds(config.run)] == [consume is not None]
    _result, lines = train_here(config, monkeypatch)
    assert lines == ["the run is complete at step 2; give more --steps to go on"]
    result, lines = train_here(replace(config, steps=4), monkeypatch)
    assert (result.step, result.total_steps, result.stopped) == (4, 4, False)
    assert any(line.startswith("step 3 of 4: ") for line in lines)


def test_more_steps_than_rows_train_on_and_consume_the_rest_of_an_older_ledger_too(
    growing: GrowingStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.grow(8)
    config = make_train_config(growing.path, follow=True, consume=1, steps=2, holdout=0.0)
    run_here(config)
    ledger = config.run / "ledger.jsonl"
    entry = read_rounds(config.run)[0]
    assert entry.total_steps == entry.rows // 2 > 4
    of_before = json.loads(ledger.read_text()) | {"total_steps": 2}  # min(--steps, what the rows make)
    ledger.write_text(json.dumps(of_before) + "\n")
    result, _lines = train_here(replace(config, steps=4), monkeypatch)
    assert result.step == 4 and len(list_segments(growing.path)) == 8
    result, _lines = train_here(replace(config, steps=99), monkeypatch)
    assert result.step == result.total_steps == entry.rows // 2
    assert sum(line["tokens"] for line in read_metrics(config.run)) == sum(LENGTHS)
    assert read_consumed(growing.path).ids == growing.ids
    _result, lines = train_here(replace(config, steps=999), monkeypatch)
    assert lines == [f"the run is complete at step {result.step}; {CLOSED} {config.run}"]


def test_a_stop_names_the_steps_that_are_asked_for_now(
    growing: GrowingStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.grow(4)
    config = make_train_config(growing.path, follow=True, steps=3)
    run_here(config, stop_after=2)
    monkeypatch.setattr(train_module, "_follow", lambda config, *_rest: bool(run_here(config, stop_after=1)))
    lines: list[str] = []
    result = train_module.train(replace(config, steps=5), report=lines.append)
    assert result.stopped and lines[-1] == f"stopped at step {result.step} of 5; run again to go on"


def test_more_epochs_do_not_reopen_the_rounds_of_a_store_that_is_done(
    growing: GrowingStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.grow(8)
    config = make_train_config(growing.path, follow=True, steps=None, epochs=1)
    run_here(config)
    rounds = read_rounds(config.run)
    result, lines = train_here(replace(config, epochs=2), monkeypatch)
    assert lines == [f"the run is complete at step {result.step}; {CLOSED} {config.run}"]
    assert read_rounds(config.run) == rounds and rounds[-1].last


def test_a_run_that_failed_before_its_first_checkpoint_may_start_with_other_options(
    growing: GrowingStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the GPU's memory was too small for the rows."""
    growing.grow(8)
    options: dict[str, Any] = {"follow": True, "epochs": 1, "steps": None}
    with monkeypatch.context() as patched:
        patched.setattr(trainer_module.Trainer, "_warm_up", lambda self: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            run_here(make_train_config(growing.path, **options))
    config = make_train_config(growing.path, row_tokens=48, holdout=0.4, **options)
    assert read_rounds(config.run)
    run_here(config)
    rounds = read_rounds(config.run)
    assert sum(line["tokens"] for line in read_metrics(config.run)) == sum(entry.tokens for entry in rounds)
    ledger = config.run / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace(f'"tokens": {rounds[0].tokens}', '"tokens": 7'))
    with pytest.raises(InputError, match=r"line 1, has \d+ rows of 7 tokens, but its segments make \d+ of"):
        follow.Following(config, StoreReader(growing.path), read_rounds(config.run), 0)


@pytest.mark.parametrize("steps", [None, 5])
def test_a_store_that_ends_without_a_sample_to_train_on_is_refused(
    growing: GrowingStore, make_train_config: MakeConfig, steps: int | None
) -> None:
    growing.grow(8)
    config = make_train_config(growing.path, follow=True, fraction=1e-9, steps=steps)
    with pytest.raises(InputError, match=r"has no sample to train on, .* --fraction 1e-09 leave none\. Extract more"):
        run_here(config)
    assert newest_checkpoint(config.run) is None


def test_nobody_else_consumes_a_store_while_a_run_does(growing: GrowingStore, make_train_config: MakeConfig) -> None:
    growing.grow(8)
    refused: list[str] = []

    def stop_requested() -> bool:
        with pytest.raises(StoreError, match="is consumed by process") as caught, consumer_lock(growing.path):
            pass
        refused.append(str(caught.value))
        return False

    config = make_train_config(growing.path, follow=True, consume=1, steps=2)
    run_rank(config, 0, 1, "cpu", "", lambda line: None, stop_requested)
    assert len(refused) >= 2
    with consumer_lock(growing.path):
        pass


def test_only_one_consumes_a_store(growing: GrowingStore) -> None:
    with (
        consumer_lock(growing.path),
        pytest.raises(StoreError, match="is consumed by process"),
        consumer_lock(growing.path),
    ):
        pass


def test_a_second_consumer_is_refused_before_its_ranks_start(
    growing: GrowingStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.grow(8)
    monkeypatch.setattr(train_module, "_follow", lambda *_arguments: pytest.fail("ranks were started"))
    lines: list[str] = []
    config = make_train_config(growing.path, follow=True, consume=1, steps=None)
    with consumer_lock(growing.path), pytest.raises(StoreError, match="is consumed by process"):
        train_module.train(config, report=lines.append)
    assert not config.run.exists() and lines == []


def test_a_run_on_a_store_that_was_consumed_from_says_how_many_samples_it_lacks(
    growing: GrowingStore, make_train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.grow(8)
    monkeypatch.setattr(train_module, "_follow", lambda *_arguments: (_ for _ in ()).throw(KeyboardInterrupt))

    def described() -> str:
        lines: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            train_module.train(make_train_config(growing.path), report=lines.append)
        return "\n".join(lines)

    assert "consume" not in described()
    reader = StoreReader(growing.path)
    gone = list_segments(growing.path)[:2]
    with consumer_lock(growing.path):
        consumed.remove_segments(
            growing.path, {name: (reader.entry(name).samples, reader.entry(name).quarantined) for name in gone}
        )
    assert "this run lacks the 6 samples that a run with --consume removed" in described()
    (growing.path / "consumed" / f"{gone[0]}.json").write_text("{}")
    assert f"{gone[0]}.json is damaged" in described(), "which is not in the way of training on the rest"


def test_locks_hold_on_a_full_disk(growing: GrowingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a consumer is what makes room again."""

    def full(*_arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with consumer_lock(growing.path), pytest.raises(StoreError, match="consumed by process"):
        consumer_lock(growing.path).__enter__()
    with run_lock(tmp_path / "run"), pytest.raises(InputError, match="in use by process"):
        run_lock(tmp_path / "run").__enter__()
    with store_lock(growing.path), pytest.raises(StoreError, match="in use by process"):
        store_lock(growing.path).__enter__()


def test_a_record_of_consumed_samples_guards_itself(growing: GrowingStore) -> None:
    growing.grow(1)
    reader = StoreReader(growing.path)
    name = reader.segment_ids[0]
    entry = reader.entry(name)
    consumed.remove_segments(growing.path, {name: (entry.samples, [{"id": None, "row": 3, "reason": "empty"}])})
    assert list_segments(growing.path) == []
    found = read_consumed(growing.path)
    assert found.ids == set(entry.samples[:, 0].tolist()) and found.quarantined[0]["row"] == 3
    path = growing.path / "consumed" / f"{name}.json"
    path.write_bytes(path.read_bytes().replace(b"empty", b"emptx"))
    with pytest.raises(StoreError, match=r"json is damaged \(its own crc32c does not fit\)"):
        read_consumed(growing.path)


# -- fraction ----------------------------------------------------------------------------------------------------------


def test_fractions_are_nested_and_leave_the_held_out_alone(
    make_store: MakeStore, make_train_config: MakeConfig
) -> None:
    ids = np.random.default_rng(0).integers(0, 2**63, 4000)
    small, large = in_fraction(ids, 0.2), in_fraction(ids, 0.5)
    assert (large >= small).all() and in_fraction(ids, 1.0).all()
    assert abs(small.mean() - 0.2) < 0.02 and abs(large.mean() - 0.5) < 0.03
    store = make_store(lengths=LENGTHS)
    whole, half = (prepare_run(make_train_config(store, fraction=share)) for share in (1.0, 0.5))
    assert 0 < half.num_training < whole.num_training
    assert [row.tolist() for row in half.holdout.rows] == [row.tolist() for row in whole.holdout.rows]
    with pytest.raises(InputError, match=r"--fraction 1e-09 leaves none of the 24 samples"):
        prepare_run(make_train_config(store, fraction=1e-9))


def test_two_stores_train_as_their_merger_does(make_store: MakeStore, make_train_config: MakeConfig) -> None:
    whole = make_store("whole.zarr", lengths=LENGTHS, segment_samples=3)
    half = make_store("half.zarr", lengths=LENGTHS, segment_samples=3)
    first, second = make_train_config(whole, run="merged", steps=4), whole.with_name("second.zarr")
    run_here(first)
    for number, (mine, other) in enumerate(zip(list_segments(whole), list_segments(half), strict=True)):
        gone = whole / "segments" / mine if number >= 4 else half / "segments" / other
        gone.rename(whole.with_name(f"gone-{number}"))
    half.rename(second)
    joined = make_train_config(whole, run="joined", steps=4, more_stores=(second,))
    run_here(joined, stop_after=2)
    run_here(joined)
    assert curve(joined.run) == curve(first.run)
    with pytest.raises(InputError, match="--follow is for one growing store, but 2 are given"):
        make_train_config(whole, more_stores=(second,), follow=True)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_run_does_not_change_between_following_and_not(
    growing: GrowingStore, grow_while_waiting: list[str], make_train_config: MakeConfig
) -> None:
    growing.grow(9)
    run_here(make_train_config(growing.path, steps=2))
    with pytest.raises(InputError, match="began without --follow"):
        run_here(make_train_config(growing.path, steps=4, follow=True))
    run_here(make_train_config(growing.path, run="other", steps=2, follow=True))
    with pytest.raises(InputError, match="--follow is False, the checkpoint has True"):
        run_here(make_train_config(growing.path, run="other", steps=4))


def test_a_store_that_nobody_makes_is_not_waited_for(
    make_train_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "GRACE_SECONDS", 0.0)
    config = make_train_config(tmp_path / "nowhere", follow=True)
    with pytest.raises(StoreError, match="nowhere is not there"):
        train_module.train(config, report=lambda line: None)
    assert not config.run.exists()
    (tmp_path / "nowhere.lock").write_text("12345\n")  # what an extract leaves that was killed before it made the store
    with pytest.raises(StoreError, match="nowhere is not there"):
        train_module.train(config, report=lambda line: None)
    with store_lock(tmp_path / "nowhere"):
        assert is_locked(tmp_path / "nowhere")
    assert not is_locked(tmp_path / "nowhere")


def test_options_that_do_not_fit_are_refused(make_train_config: MakeConfig, growing: GrowingStore) -> None:
    with pytest.raises(InputError, match="--consume 2 removes data"):
        make_train_config(growing.path, consume=2)
    with pytest.raises(InputError, match="Both --consume 2 and --epochs 3"):
        make_train_config(growing.path, consume=2, epochs=3, steps=None, follow=True)
    with pytest.raises(InputError, match="The longest sample has 44 tokens, --row-tokens is 40"):
        run_here(make_train_config(growing.path, follow=True, row_tokens=40))
