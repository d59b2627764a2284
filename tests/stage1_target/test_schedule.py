import numpy as np
import pytest

from dflash_train.stage1_target.dealer import BATCHES_IN_FLIGHT, Dealer
from dflash_train.stage1_target.schedule import Batch, padding_share, plan_batches

LENGTHS = np.random.default_rng(0).integers(1, 300, 507).astype(np.int32)


def test_every_pending_sample_is_in_one_batch_within_the_budget() -> None:
    pending = np.arange(0, 507, 3)
    batches = plan_batches(LENGTHS, pending, 1000, seed=0, window=64)
    assert sorted(index for batch in batches for index in batch.indices) == pending.tolist()
    for batch in batches:
        lengths = LENGTHS[list(batch.indices)]
        assert batch.num_padded_tokens == lengths.max() * len(lengths) <= 1000
        assert batch.num_tokens == lengths.sum()


def test_windows_are_fair_samples_sorted_only_inside() -> None:
    batches = plan_batches(LENGTHS, range(507), 1000, seed=0, window=100)
    order = [index for batch in batches for index in batch.indices]
    shuffled = np.random.default_rng(0).permutation(507)
    for first in range(0, 507, 100):
        assert set(order[first : first + 100]) == set(shuffled[first : first + 100].tolist())
    assert padding_share(batches) < padding_share(plan_batches(LENGTHS, range(507), 1000, seed=0, window=4)) < 0.5


def test_schedule_is_a_function_of_the_seed_and_goes_on_in_the_same_order() -> None:
    def order(pending: list[int], seed: int) -> list[int]:
        return [index for batch in plan_batches(LENGTHS, pending, 1, seed, window=1) for index in batch.indices]

    everything = order(list(range(507)), 3)
    assert everything == order(list(range(507)), 3) != order(list(range(507)), 4)
    assert order(everything[200:], 3) == everything[200:]


def test_sample_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    batches = plan_batches(np.array([5, 100, 5], np.int32), [0, 1, 2], 10, seed=0)
    assert sorted(batch.indices for batch in batches if 1 in batch.indices) == [(1,)]
    assert plan_batches(np.array([5], np.int32), [], 10, seed=0) == []
    assert padding_share([]) == 0.0


def batches_of(*indices: tuple[int, ...]) -> list[Batch]:
    return [Batch(group, len(group), len(group)) for group in indices]


def drain(dealer: Dealer, worker: int) -> list[int]:
    """Run and commit all that is left with one worker; the samples in order."""
    done: list[int] = []
    while (deal := dealer.deal(worker)) is not None:
        indices = deal.indices
        dealer.ran(worker, deal.number)
        dealer.committed(worker, indices)
        done += indices
    return done


def test_a_dead_workers_uncommitted_batches_are_dealt_again() -> None:
    dealer = Dealer(batches_of((0, 1), (2, 3), (4, 5), (6,)))
    first = dealer.deal(0)
    second = dealer.deal(0)
    assert first and second and dealer.deal(0) is None, f"at most {BATCHES_IN_FLIGHT} in flight"
    dealer.ran(0, first.number)
    dealer.committed(0, [0])  # the segment was full in the middle of the batch
    third = dealer.deal(0)
    assert third and not dealer.done
    assert dealer.lost(0) == 5
    assert drain(dealer, 1) == [1, 2, 3, 4, 5, 6]
    assert dealer.done and not dealer.given_up


def test_samples_committed_just_before_the_death_are_not_dealt_again() -> None:
    dealer = Dealer(batches_of((0, 1), (2, 3)))
    first = dealer.deal(0)
    assert first
    dealer.ran(0, first.number)
    assert dealer.lost(0, stored=[0, 1]) == 0
    assert drain(dealer, 1) == [2, 3]


def test_commit_before_the_word_that_the_batch_has_run() -> None:
    dealer = Dealer(batches_of((0, 1)))
    deal = dealer.deal(0)
    assert deal
    dealer.committed(0, [0, 1])
    assert not dealer.done
    dealer.ran(0, deal.number)
    assert dealer.done and not dealer.wants_commit(0)


def test_a_batch_that_kills_workers_is_given_up() -> None:
    dealer = Dealer(batches_of((0,), (1,)))
    for worker in (0, 1):
        assert dealer.deal(worker) is not None
        dealer.deal(worker)
        dealer.lost(worker)
    assert [deal.indices for deal in dealer.given_up] == [(0,)]
    assert drain(dealer, 2) == [1]
    assert dealer.done


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_deaths_stores_each_sample_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dealer = Dealer(batches_of(*[tuple(range(start, start + 3)) for start in range(0, 60, 3)]))
    stored: list[int] = []
    running: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    opened: dict[int, list[int]] = {}
    for _ in range(10_000):
        worker = int(rng.integers(4))
        action = rng.random()
        if action < 0.5 and (deal := dealer.deal(worker)) is not None:
            running.setdefault(worker, []).append((deal.number, deal.indices))
        elif action < 0.9 and running.get(worker):
            number, indices = running[worker].pop(0)
            dealer.ran(worker, number)
            opened.setdefault(worker, []).extend(indices)
        elif action < 0.98 and opened.get(worker):
            stored += opened[worker]
            dealer.committed(worker, opened.pop(worker))
        elif action >= 0.99 and not running.get(worker):  # a death between batches, so that none is given up
            opened.pop(worker, None)
            dealer.lost(worker)
        if dealer.done:
            break
    assert dealer.done and sorted(stored) == list(range(60))
