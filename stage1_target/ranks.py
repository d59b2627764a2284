"""An extract's ranks under torchrun: what they tell each other, through the key-value store that torchrun runs anyway.

No process group and no collective: a rank that dies leaves nobody hanging, and none waits for another while it extracts.
Rank 0 holds the store's lock from before anybody writes until all have ended, makes the store, shows the progress of all
and reports how they ended; the others take their share of the batches. What a rank does not finish, the next start does.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from dflash_train.errors import InputError
from dflash_train.machine.torchrun import KeyValueStore, TorchrunPlace
from dflash_train.stage1_target.events import Progress, WorkerProgress
from dflash_train.stage1_target.preparation import Prepared
from dflash_train.store.location import StoreLocation
from dflash_train.store.manifest import hash_bytes
from dflash_train.store.upload import store_exists

POLL_SECONDS = 0.2
BEAT_SECONDS = 2.0
LOST_SECONDS = 60.0
"""A rank that has been silent for so long is taken for dead; its beat comes from a thread, whatever else it does."""
STOP_SECONDS = 20.0
"""Rank 0 waits so long for the others after a stop signal; torchrun kills everybody after 30."""
PUBLISH_SECONDS = 1.0
LEAVE_SECONDS = 5.0
"""Rank 0 stays so long after the end for the others to hear of it."""


@dataclass(kw_only=True)
class RankEnd:
    """How a rank ended."""

    num_new_samples: int = 0
    num_new_tokens: int = 0
    failures: list[str] = field(default_factory=list)


class Ranks:
    """One rank's view of all."""

    def __init__(self, place: TorchrunPlace, store: KeyValueStore) -> None:
        self.place = place
        self.others = [rank for rank in range(place.world) if rank != place.rank]
        self.stop: threading.Event | None = None
        """Set once rank 0 fails or is told to stop, as by `dflash stop`; a signal to torchrun reaches every rank itself."""
        self._store = store
        self._published = 0.0
        self._reserved = 0
        self._beats: dict[int, tuple[str | None, float]] = {}

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.place.rank == 0

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Tell the others that this rank lives, until the end of the block."""
        ended = threading.Event()

        def beat() -> None:
            count = 0
            while not ended.is_set():
                self._set(f"beat/{self.place.rank}", str(count))
                count += 1
                if self.stop is not None and (self._has("stop") or self._has("failures")):
                    self.stop.set()
                ended.wait(BEAT_SECONDS)

        thread = threading.Thread(target=beat, name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def prepare_in_turn(self, prepare: Callable[[], Prepared]) -> Prepared:
        """Rank 0 first, then one rank of each machine, then the rest, which find its tokenised samples in the cache.

        Raises InputError where a rank sees other samples, or another state of the store, than rank 0.
        """
        machine, prepared = f"machine/{self.place.group_rank}", None
        if not self.first:
            self._await("machine/0" if self.place.local_rank == 0 else machine, [0])
        prepared = prepare()
        digest = hash_bytes(prepared.table.ids.tobytes() + prepared.pending.tobytes())
        if self.first or self.place.local_rank == 0:
            self._set(machine, "prepared")
        self._set(f"digest/{self.place.rank}", digest)
        if not self.first:
            self._await("go", [0])
            return prepared
        for rank in self.others:
            self._await(f"digest/{rank}", [rank])
            if self._get(f"digest/{rank}") != digest:
                raise InputError(
                    f"Rank {rank} sees other samples, or another state of the store, than rank 0. Give all machines the "
                    "same data and a store folder that they share."
                )
        return prepared

    def share(self, prepared: Prepared) -> Prepared:
        """This rank's part of the work: every world-th batch, so that each part is a fair sample too."""
        batches = prepared.batches[self.place.rank :: self.place.world]
        samples = sum(len(batch.indices) for batch in batches)
        tokens = sum(batch.num_tokens for batch in batches)
        return replace(
            prepared,
            batches=batches,
            new_entries=prepared.new_entries if self.first else [],
            plan=prepared.plan if self.first else prepared.plan.silent(),
            forecast=replace(prepared.forecast, num_pending=samples, num_pending_tokens=tokens),
        )

    def go(self) -> None:
        """Rank 0: let the others begin, now that nothing of a dead run is in the way."""
        self._set("go", "")

    def store_is_there(self, store: StoreLocation) -> bool:
        """For ranks that wait for rank 0 to create the store. Raises InputError if it ended without."""
        if store_exists(store):
            return True
        if (self._has("ended/0") or self._silent(0)) and not store_exists(store):
            raise InputError(f"Rank 0 ended before {store} was created; its own message says why.")
        return False

    def publish(self, progress: Progress, last: bool = False) -> None:
        """Tell rank 0 how far this rank is; at most once a second, unless it is the last time."""
        now = time.monotonic()
        if now - self._published >= PUBLISH_SECONDS or last:
            self._published = now
            self._set(f"progress/{self.place.rank}", json.dumps(asdict(progress)))

    def reserve(self, num_bytes: int) -> int:
        """Say how many bytes are being written here; how many all ranks write, of ranks that died what they said last."""
        change, self._reserved = num_bytes - self._reserved, num_bytes
        with contextlib.suppress(RuntimeError):
            return self._store.add("reserved", change)
        return num_bytes

    def merge(self, own: Progress | None, num_pending: int, num_pending_tokens: int) -> Progress | None:
        """The progress of all ranks as one, of so many samples and tokens; None before any rank has begun."""
        parts = {} if own is None else {self.place.rank: own}
        for rank in self.others:
            if (text := self._get(f"progress/{rank}")) is not None:
                values = json.loads(text)
                workers = tuple(WorkerProgress(**worker) for worker in values.pop("workers"))
                parts[rank] = Progress(**values, workers=workers)
        if not parts:
            return None
        each = list(parts.values())
        speed = sum(part.tokens_per_second for part in each)
        num_tokens = sum(part.num_tokens for part in each)
        return Progress(
            num_samples=sum(part.num_samples for part in each),
            num_pending=num_pending,
            num_tokens=num_tokens,
            num_pending_tokens=num_pending_tokens,
            num_committed=sum(part.num_committed for part in each),
            num_committed_bytes=sum(part.num_committed_bytes for part in each),
            tokens_per_second=speed,
            # by the slowest rank, which the others do not help
            hours_left=max(part.hours_left for part in each),
            num_workers=sum(part.num_workers for part in each),
            workers=tuple(
                replace(worker, label=f"rank {rank}: {worker.label}")
                for rank, part in sorted(parts.items())
                for worker in part.workers
            ),
        )

    def end(self, end: RankEnd) -> None:
        """Tell the others that this rank is through."""
        self._set(f"ended/{self.place.rank}", json.dumps(asdict(end)))

    def fail(self, reason: str) -> None:
        """Tell the others that this rank ends by an error; rank 0's makes them commit what they have and end."""
        self.end(RankEnd(failures=[f"rank {self.place.rank}: {reason}"]))
        if self.first:
            self._set("failures", json.dumps([f"rank 0: {reason}"]))

    def await_others(self, stop: threading.Event, tick: Callable[[], None]) -> list[RankEnd]:
        """Rank 0: how each of the others ended, silent ones as failures; `tick` is called about once a second and last."""
        ends: dict[int, RankEnd] = {}
        deadline = ticked = None
        while waiting := [rank for rank in self.others if rank not in ends]:
            for rank in waiting:
                if (text := self._get(f"ended/{rank}")) is not None:
                    ends[rank] = RankEnd(**json.loads(text))
                elif self._silent(rank):
                    ends[rank] = RankEnd(failures=[f"rank {rank} has said nothing for {LOST_SECONDS:.0f} s"])
            now = time.monotonic()
            if ticked is None or now - ticked >= PUBLISH_SECONDS:
                ticked = now
                tick()
            if stop.is_set():
                if deadline is None:
                    self._set("stop", "")
                    deadline = now + STOP_SECONDS
                if now > deadline:
                    break
            if len(ends) < len(self.others):
                time.sleep(POLL_SECONDS)
        tick()  # with what the others published last
        return list(ends.values())

    def leave_together(self, failures: list[str], stop: threading.Event) -> list[str]:
        """The failures of all ranks, from rank 0, when it is through: all processes end alike, within some seconds.

        torchrun lets a machine whose processes have ended well wait minutes for one whose have not.
        """
        if self.first:
            self._set("failures", json.dumps(failures))
            until = time.monotonic() + LEAVE_SECONDS
            while time.monotonic() < until and not all(self._has(f"left/{rank}") for rank in self.others):
                time.sleep(POLL_SECONDS)
            return failures
        deadline = None
        while (text := self._get("failures")) is None:
            if stop.is_set():
                deadline = deadline or time.monotonic() + STOP_SECONDS
            if self._silent(0) or (deadline is not None and time.monotonic() > deadline):
                return [*failures, "rank 0 has not said how it ended"]
            time.sleep(POLL_SECONDS)
        self._set(f"left/{self.place.rank}", "")
        told: list[str] = json.loads(text)
        return told

    def _silent(self, rank: int) -> bool:
        """Whether a rank's beat has not changed for too long."""
        beat, now = self._get(f"beat/{rank}"), time.monotonic()
        if rank not in self._beats or self._beats[rank][0] != beat:
            self._beats[rank] = beat, now
        return now - self._beats[rank][1] > LOST_SECONDS

    def _await(self, key: str, ranks: list[int]) -> None:
        """Wait for a key that one of `ranks` sets. Raises InputError where one of them has ended or is lost before."""
        while not self._has(key):
            for rank in ranks:
                if self._has(f"ended/{rank}") or self._silent(rank):
                    raise InputError(f"Rank {rank} has ended; its own message says why. Start all ranks again.")
            time.sleep(POLL_SECONDS)

    def _has(self, key: str) -> bool:
        return self._get(key) is not None

    def _get(self, key: str) -> str | None:
        with contextlib.suppress(RuntimeError):  # the machine that runs torchrun's store is gone
            if self._store.check([key]):
                return bytes(self._store.get(key)).decode()
        return None

    def _set(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(key, value)
