"""Packing, who takes which row, the holdout, and the thread that reads ahead."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.compiled import compiled_graphs
from dflash_train.stage2_drafter.row_loader import Row, RowBuffer, RowBuilder, RowLoader
from dflash_train.stage2_drafter.rows import (
    HoldoutRows,
    RowKey,
    RowSchedule,
    check_lengths,
    plan_rows,
    split_holdout,
)
from dflash_train.store.encoding import from_stored
from dflash_train.store.reader import StoreReader


def random_lengths(count: int = 507, longest: int = 100, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, longest + 1, count)


def make_schedule(count: int = 507, seed: int = 0, epochs: int | None = None) -> RowSchedule:
    return RowSchedule(random_lengths(count), np.arange(count), seed=seed, row_tokens=256, epochs=epochs)


def test_every_sample_is_in_exactly_one_row_and_rows_are_full() -> None:
    lengths = random_lengths()
    rows = plan_rows(lengths, np.random.default_rng(1).permutation(len(lengths)), 256)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
    filled = np.array([lengths[row].sum() for row in rows])
    assert filled.max() <= 256
    assert lengths.sum() / (256 * len(rows)) > 0.95


def first_fit(lengths: np.ndarray, order: np.ndarray, row_tokens: int) -> list[list[int]]:
    """The slow twin: every open row is looked at, oldest first; of 16 the fullest is closed, of equal ones the oldest."""
    rows: list[list[int]] = []
    open_rows: list[list[int]] = []

    def room(row: list[int]) -> int:
        return row_tokens - int(lengths[row].sum())

    for index in order.tolist():
        fitting = [row for row in open_rows if lengths[index] <= room(row)]
        if fitting:
            fitting[0].append(index)
            continue
        if len(open_rows) == 16:
            rows.append(open_rows.pop(int(np.argmin([room(row) for row in open_rows]))))
        open_rows.append([index])
    return rows + open_rows


@pytest.mark.parametrize(("longest", "row_tokens"), [(100, 100), (100, 256), (7, 256), (30, 31), (1, 5)])
def test_rows_are_those_of_the_plain_first_fit(longest: int, row_tokens: int) -> None:
    for seed, count in enumerate((1, 15, 16, 17, 100, 507)):
        rng = np.random.default_rng(seed)
        lengths, order = rng.integers(0, longest + 1, count), rng.permutation(count)
        rows = plan_rows(lengths, order, row_tokens)
        assert [row.tolist() for row in rows] == first_fit(lengths, order, row_tokens)
        assert all(row.dtype == np.int64 for row in rows)


@pytest.mark.parametrize("lengths", [[], [7], [256, 256, 1], [100, 100, 100, 7, 49, 156]])
def test_packing_of_odd_sets(lengths: list[int]) -> None:
    rows = plan_rows(np.array(lengths, dtype=np.int64), np.arange(len(lengths)), 256)
    assert sorted(int(index) for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 256 for row in rows)


def test_rows_follow_from_seed_and_epoch_alone() -> None:
    one, two = make_schedule(), make_schedule()
    two.epoch(3)  # asking for another epoch first changes nothing
    for epoch in (0, 1, 5):
        assert [row.tolist() for row in one.epoch(epoch)] == [row.tolist() for row in two.epoch(epoch)]
    assert [row.tolist() for row in one.epoch(0)] != [row.tolist() for row in one.epoch(1)]
    assert [row.tolist() for row in one.epoch(0)] != [row.tolist() for row in make_schedule(seed=1).epoch(0)]


def test_the_epoch_that_is_read_first_is_not_planned_again(planned: list[int]) -> None:
    schedule, twin = make_schedule(epochs=6), make_schedule(epochs=None)
    assert schedule.num_rows() == sum(len(twin.epoch(epoch)) for epoch in range(6))
    del planned[:]
    key = schedule.key(0)
    assert key is not None and schedule.samples(key).tolist() == twin.epoch(0)[0].tolist()
    assert planned == [0], "by the twin"


def test_who_is_told_the_counts_plans_only_what_it_reads(planned: list[int]) -> None:
    schedule = make_schedule(epochs=6)
    total, counts = schedule.num_rows(), schedule.counted()
    assert sorted(planned) == list(range(6)) and sum(counts) == total
    told = RowSchedule(random_lengths(), np.arange(507), seed=0, row_tokens=256, epochs=7, counted=counts[:3])
    del planned[:]
    place = counts[0] + counts[1] + 5
    assert told.key(place) == schedule.key(place) == RowKey(2, 5) and planned == []
    assert told.samples(RowKey(2, 5)).tolist() == make_schedule().samples(RowKey(2, 5)).tolist()
    assert planned == [2, 2]
    assert told.num_rows() == total + len(schedule.epoch(6)) and told.counted()[:6] == counts


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_each_step_without_overlap_and_in_lock_step(world: int) -> None:
    schedule, alone = make_schedule(epochs=2), make_schedule(epochs=2)
    rows_per_step = 4
    steps = -(-schedule.num_rows() // rows_per_step)
    seen: list[RowKey] = []
    for step in range(steps):
        shares = [schedule.step_keys(step, rows_per_step, rank, world) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1
        keys = [key for share in shares for key in share if key is not None]
        assert set(keys) == {key for key in alone.step_keys(step, rows_per_step, 0, 1) if key is not None}
        seen += keys
    assert len(seen) == len(set(seen)) == schedule.num_rows()
    for epoch in (0, 1):
        samples = np.concatenate([schedule.samples(key) for key in seen if key.epoch == epoch])
        assert sorted(samples.tolist()) == list(range(507))


def test_dummies_fill_what_does_not_divide_and_what_follows_the_last_epoch() -> None:
    schedule = make_schedule(count=3, epochs=1)
    assert schedule.num_rows() == 1
    assert schedule.step_keys(0, 2, 0, 1) == [RowKey(0, 0), None]
    assert [schedule.step_keys(0, 2, rank, 3) for rank in range(3)] == [[RowKey(0, 0)], [None], [None]]
    endless = make_schedule(count=3)
    assert endless.step_keys(0, 2, 0, 1) == [RowKey(0, 0), RowKey(1, 0)]


def test_short_rows_name_the_longest_sample() -> None:
    with pytest.raises(InputError, match=r"longest sample has 100 tokens, --row-tokens is 64.*--crop"):
        check_lengths(np.array([3, 100, 7]), 64, crop=False)
    assert check_lengths(np.array([3, 100, 7]), 64, crop=True).tolist() == [3, 64, 7]


def test_holdout_takes_whole_groups_and_a_growing_store_moves_none() -> None:
    groups = np.random.default_rng(0).integers(0, 2**63 - 1, 1000).repeat(3)
    held = split_holdout(groups, 0.1)
    assert 0.07 < held.mean() < 0.13
    assert all(len(set(held[groups == group])) == 1 for group in np.unique(groups)[:50])
    half = split_holdout(groups[:1500], 0.1)
    assert (half == held[:1500]).all()


@pytest.mark.parametrize(
    ("count", "share", "held"), [(0, 0.5, 0), (1, 0.5, 0), (2, 0.001, 1), (2, 0.999, 1), (9, 0, 0)]
)
def test_holdout_of_few_groups_leaves_something_on_both_sides(count: int, share: float, held: int) -> None:
    assert split_holdout(np.arange(count) * 7919, share).sum() == held


@pytest.fixture
def builder(make_store: Callable[..., Path]) -> RowBuilder:
    reader = StoreReader(make_store(encoding_name="int8"))
    lengths = np.asarray(reader.samples["length"])
    schedule = RowSchedule(lengths, np.arange(len(lengths)), seed=0, row_tokens=64, epochs=None)
    holdout = HoldoutRows(lengths, np.arange(0), seed=0, row_tokens=64, limit=4)
    return RowBuilder(
        reader=reader,
        row_tokens=64,
        num_anchors=12,
        block_size=4,
        mask_token_id=63,
        seed=0,
        sources=(schedule, holdout),
    )


def fresh(builder: RowBuilder) -> RowBuffer:
    return RowBuffer.allocate(builder.reader, builder.row_tokens, pinned=False)


def same(one: Row, two: Row) -> bool:
    arrays = [
        (one.positions, two.positions),
        (one.slots, two.slots),
        (one.labels, two.labels),
        (one.buffer.features.numpy(), two.buffer.features.numpy()),
        *((getattr(one.blocks, f.name), getattr(two.blocks, f.name)) for f in dataclasses.fields(one.blocks)),
    ]
    return all(np.array_equal(a, b) for a, b in arrays)


def test_row_holds_its_samples_one_after_the_other(builder: RowBuilder) -> None:
    buffer = fresh(builder)
    buffer.features.fill_(77)  # what an earlier row left
    row = builder.build(RowKey(0, 0), buffer)
    first = 0
    for index in row.samples.tolist():
        sample = builder.reader.read(index)
        span = slice(first, first + len(sample.token_ids))
        assert np.array_equal(buffer.features[span].numpy(), from_stored(sample.features, None).numpy())
        assert buffer.scales is not None and sample.scales is not None
        assert np.array_equal(buffer.scales[span].numpy(), sample.scales)
        assert row.positions[span].tolist() == list(range(len(sample.token_ids)))
        first = span.stop
    assert row.num_tokens == first
    assert not buffer.features[first:].any()
    assert np.array_equal(row.labels, row.blocks.labels.reshape(-1)[row.slots])
    assert len(row.slots) == row.blocks.label_mask.sum() > 0


def test_anchors_are_a_function_of_seed_epoch_and_row(builder: RowBuilder) -> None:
    one, two = builder.build(RowKey(0, 1), fresh(builder)), builder.build(RowKey(0, 1), fresh(builder))
    assert same(one, two)
    other = dataclasses.replace(builder, seed=1).build(RowKey(0, 1), fresh(builder))
    assert not np.array_equal(one.blocks.anchor, other.blocks.anchor)


def test_by_conversation_a_training_row_is_shared_equally_and_a_held_out_one_is_not(builder: RowBuilder) -> None:
    lengths = np.asarray(builder.reader.samples["length"])
    holdout = HoldoutRows(lengths, np.arange(len(lengths)), seed=0, row_tokens=64, limit=4)
    by_token = dataclasses.replace(builder, sources=(builder.sources[0], holdout))
    by_conversation = dataclasses.replace(by_token, anchors_by="conversation")
    differ = 0
    for number in range(len(builder.sources[0].epoch(0))):
        one, two = (maker.build(RowKey(0, number), fresh(builder)) for maker in (by_token, by_conversation))
        shares = [np.unique(row.blocks.start[row.blocks.valid], return_counts=True)[1] for row in (one, two)]
        assert shares[0].sum() == shares[1].sum()
        differ += shares[0].tolist() != shares[1].tolist()
        assert shares[1].max() - shares[1].min() <= 1 or shares[1].min() < 12 // len(shares[1])
    assert differ, "rows of unequal conversations were there"
    for number in range(len(holdout.rows)):
        key = RowKey(0, number, True)
        assert same(by_token.build(key, fresh(builder)), by_conversation.build(key, fresh(builder)))


def test_mask_token_that_the_target_emits_is_refused(builder: RowBuilder) -> None:
    sample = builder.reader.read(0)
    emitted = int(sample.token_ids[sample.loss_mask != 0][0])
    wrong = dataclasses.replace(builder, mask_token_id=emitted)
    with pytest.raises(
        InputError, match=f"mask token {emitted} is a supervised token of sample .* Give a --mask-token"
    ):
        for number in range(len(builder.sources[0].epoch(0))):
            wrong.build(RowKey(0, number), fresh(wrong))


def test_dummy_row_has_no_slot(builder: RowBuilder) -> None:
    row = builder.build(None, fresh(builder))
    assert (row.num_tokens, len(row.slots), int(row.blocks.valid.sum())) == (0, 0, 0)


def test_crop_keeps_the_head_of_a_long_sample(make_store: Callable[..., Path]) -> None:
    reader = StoreReader(make_store(lengths=(50, 7)))
    lengths = check_lengths(np.asarray(reader.samples["length"]), 32, crop=True)
    schedule = RowSchedule(lengths, np.arange(2), seed=0, row_tokens=32, epochs=None)
    holdout = HoldoutRows(lengths, np.arange(0), seed=0, row_tokens=32, limit=1)
    builder = RowBuilder(
        reader=reader, row_tokens=32, num_anchors=8, block_size=4, mask_token_id=63, seed=0, sources=(schedule, holdout)
    )
    rows = [builder.build(RowKey(0, number), fresh(builder)) for number in range(2)]
    cropped = next(row for row in rows if 0 in row.samples)
    assert cropped.num_tokens == 32
    assert np.array_equal(cropped.buffer.features.numpy().view(np.uint16), reader.read(0).features[:32])


def test_loader_gives_the_rows_of_a_plain_loop(builder: RowBuilder) -> None:
    keys = [RowKey(0, 0), None, RowKey(0, 2), RowKey(1, 0), RowKey(0, 1)]
    with RowLoader(builder, keys, [fresh(builder), fresh(builder)]) as loader:
        for key, row in zip(keys, loader, strict=True):
            assert row.key == key
            assert same(row, builder.build(key, fresh(builder)))
            loader.release(row.buffer)
        assert loader.wait_seconds > 0


def test_loaders_thread_compiles_nothing(builder: RowBuilder) -> None:
    """torch counts graphs for the whole process; an eager flex_attention call compiles as well, and would be one."""
    before = compiled_graphs()
    with RowLoader(builder, [RowKey(0, 0), None, RowKey(1, 0)], [fresh(builder)]) as loader:
        for row in loader:
            loader.release(row.buffer)
    assert compiled_graphs() == before


def test_loader_raises_what_its_thread_met_and_closes_unread(builder: RowBuilder) -> None:
    def keys() -> Iterator[RowKey]:
        yield RowKey(0, 0)
        raise OSError("the disk went away")

    with RowLoader(builder, keys(), [fresh(builder), fresh(builder)]) as loader:
        rows = iter(loader)
        next(rows)
        with pytest.raises(OSError, match="the disk went away"):
            next(rows)
    with RowLoader(builder, [RowKey(0, 0)] * 9, [fresh(builder)]) as loader:
        pass
    assert not loader._thread.is_alive()
