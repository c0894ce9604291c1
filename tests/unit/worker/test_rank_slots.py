# SPDX-License-Identifier: Apache-2.0
"""What host slots of a rank hold: whatever fills them, in any order, with a tier below
that fails, hangs and is late, and memory that changes."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
import torch

from vllm.v1.kv_tier.memory.checksums import SlotChecksums
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepReport
from vllm.v1.kv_tier.stores.base import BlockStore, ReadOnlyStore
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.slots import BAD, RankSlots

from ..rank import NUM_SLOTS, Rank, fail_once, output, same, step

CPU = torch.device("cpu")
NUM_SEEDS, NUM_STEPS = 8, 80


def nothing() -> None:
    pass


@dataclass
class Memory(BlockStore):
    """Objects in memory. A test says what its calls do."""

    objects: dict[bytes, bytes] = field(default_factory=dict)
    fails: str | None = None
    """What the next call does: `missing` (half of a row is there), `raises`."""
    goes_on: threading.Event = field(default_factory=threading.Event)
    """Calls wait for it."""
    has_begun: threading.Event = field(default_factory=threading.Event)
    before: Callable[[], None] = nothing
    """Called before rows are read, once."""

    def __post_init__(self) -> None:
        self.goes_on.set()

    def _begin(self) -> str | None:
        self.has_begun.set()
        assert self.goes_on.wait(30)
        fails, self.fails = self.fails, None
        if fails == "raises":
            raise RuntimeError("planned")
        return fails

    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        fails = self._begin()
        before, self.before = self.before, nothing
        before()
        if fails is None:
            self.objects.update(zip(keys, map(bytes, rows)))
        return [fails is None] * len(keys)

    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        fails = self._begin()
        for key, row in zip(keys, rows):
            size = len(row) // 2 if fails else len(row)
            row[:size] = self.objects.get(key, bytes(len(row)))[:size]
        return [fails is None and key in self.objects for key in keys]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.objects for key in keys]

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def close(self) -> None:
        pass


class Ranked(Rank):
    """A rank with a tier below."""

    def __init__(self, verify: bool, store: BlockStore | None = None) -> None:
        super().__init__()
        self.tier = HostTier.allocate(self.regions, NUM_SLOTS, CPU, verify=verify)
        self.store = Memory()
        self.tier.open_secondary([store or self.store])
        self._seq = self._num_jobs = 0
        # Of jobs, by number: one may end in the step that begins it.
        self.results: dict[int, SecondaryResult] = {}

    def go(self, **plan: object) -> StepReport | None:
        """A step. Returns what it reports."""
        self._seq += 1
        self.tier.begin_step(step(self._seq, **plan))
        report: StepReport | None = self.tier.end_step(output()).kv_tier_report
        for result in report.secondary if report is not None else []:
            self.results[result.number] = result
        return report

    def begin(self, is_put: bool, key: bytes, slot: int) -> int:
        self._num_jobs += 1
        job = SecondaryJob(self._num_jobs, is_put, [key], [slot], 0, 0, 0)
        self.go(secondary=[job])
        return self._num_jobs

    def told(self, number: int) -> SecondaryResult:
        limit = time.monotonic() + 30
        while number not in self.results:
            assert time.monotonic() < limit, "nobody tells"
            time.sleep(0.001)
            self.go()
        return self.results[number]

    def move(self, is_put: bool, key: bytes, slot: int) -> bool:
        return self.told(self.begin(is_put, key, slot)).done[0]

    def loads(self, slot: int, block: int, kind: str = "load") -> bool:
        """Whether the load of a slot is not refused."""
        report = self.go(**{f"{kind}_slots": [slot], f"{kind}_blocks": [block]})
        return report is None or report.failed_load_seq is None

    def flip(self, slot: int) -> None:
        """As bad memory does."""
        self.tier.buffer.slots[slot, 3] ^= 4


@pytest.fixture(params=[False, True], ids=["plain", "verify"])
def rank(request: pytest.FixtureRequest) -> Ranked:
    return Ranked(request.param)


@pytest.fixture
def verifying() -> Ranked:
    return Ranked(verify=True)


LOADS = pytest.mark.parametrize("kind", ["load", "ahead"])


@LOADS
def test_what_came_from_below_is_loaded(rank: Ranked, kind: str) -> None:
    right = rank.block(1)
    rank.go(store_blocks=[1], store_slots=[0])
    assert rank.move(True, b"key", 0) and rank.move(False, b"key", 2)
    assert rank.loads(2, 5, kind) and same(rank.block(5), right)
    # It goes to another tier, too.
    assert rank.move(True, b"again", 2)
    assert rank.store.objects[b"again"] == rank.store.objects[b"key"]


def test_a_store_that_failed_says_nothing_of_what_comes_from_below(
    rank: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = rank.block(1)
    rank.go(store_blocks=[1], store_slots=[0])
    assert rank.move(True, b"key", 0)
    fail_once(monkeypatch, rank, "stores")
    report = rank.go(store_blocks=[2], store_slots=[1])
    assert report is not None and 1 in report.failed_store_slots
    assert not rank.loads(1, 5) and not rank.move(True, b"bad", 1)
    assert rank.move(False, b"key", 1)
    assert rank.loads(1, 5) and same(rank.block(5), right)


@pytest.mark.parametrize("fails", ["missing", "raises"])
def test_a_slot_that_was_read_half_is_neither_loaded_nor_written(
    rank: Ranked, fails: str
) -> None:
    rank.go(store_blocks=[1, 2], store_slots=[0, 1])
    assert rank.move(True, b"key", 0)
    rank.store.fails = fails
    assert not rank.move(False, b"key", 1)
    before = rank.block(5)
    assert not rank.loads(1, 5) and same(rank.block(5), before)
    assert not rank.move(True, b"bad", 1) and b"bad" not in rank.store.objects
    rank.go(store_blocks=[3], store_slots=[1])
    assert rank.loads(1, 5) and same(rank.block(5), rank.block(3))


def test_a_slot_that_was_never_filled_is_not_loaded(rank: Ranked) -> None:
    assert not rank.loads(3, 5) and not rank.move(True, b"bad", 3)


@pytest.mark.parametrize("is_put", [True, False])
def test_nothing_is_stored_in_a_slot_that_a_tier_below_still_uses(
    rank: Ranked, is_put: bool
) -> None:
    """No scheduler asks for it: what is late there would come into the new content, or
    the new content would be kept under the old key."""
    rank.go(store_blocks=[1], store_slots=[0])
    assert rank.move(True, b"key", 0)
    rank.store.goes_on.clear()
    rank.store.has_begun.clear()
    number = rank.begin(is_put, b"key", 0)
    assert rank.store.has_begun.wait(30)
    report = rank.go(store_blocks=[2], store_slots=[0])
    assert report is not None and report.failed_store_slots == {0: rank._seq}
    # The scheduler, which has not heard, takes it for holding block 2.
    assert not rank.loads(0, 5)
    rank.store.goes_on.set()
    assert rank.told(number).done == [is_put]
    assert not rank.loads(0, 5)
    rank.go(store_blocks=[2], store_slots=[0])
    assert rank.loads(0, 5) and same(rank.block(5), rank.block(2))


def test_two_fetches_into_one_slot(rank: Ranked) -> None:
    """The second one is refused, and the first one comes."""
    right = rank.block(1)
    rank.go(store_blocks=[1, 2], store_slots=[0, 1])
    assert rank.move(True, b"one", 0) and rank.move(True, b"two", 1)
    rank.store.goes_on.clear()
    first, second = rank.begin(False, b"one", 3), rank.begin(False, b"two", 3)
    rank.store.goes_on.set()
    assert rank.told(first).done == [True] and rank.told(second).done == [False]
    assert rank.loads(3, 5) and same(rank.block(5), right)


# ------------------------------------------------------------------- verify


@pytest.mark.compat("faults", "a slot that changed since its store (`verify`)")
@LOADS
def test_a_bit_of_what_came_from_below_never_reaches_the_device(
    verifying: Ranked, kind: str
) -> None:
    rank = verifying
    rank.go(store_blocks=[1], store_slots=[0])
    assert rank.move(True, b"key", 0) and rank.move(False, b"key", 2)
    rank.flip(2)
    before = rank.block(5)
    assert not rank.loads(2, 5, kind) and same(rank.block(5), before)
    # Nor is it loaded when it happens to be right again.
    rank.flip(2)
    assert not rank.loads(2, 5, kind)
    assert rank.move(False, b"key", 2) and rank.loads(2, 5, kind)


@pytest.mark.compat("faults", "a slot that changed since its store (`verify`)")
@pytest.mark.parametrize("is_fetched", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_slot_that_changed_is_not_kept_for_others(
    verifying: Ranked,
    is_fetched: bool,
    is_late: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Late: after it was checked, and before the store takes its own checksum."""
    rank, slot = verifying, 0
    rank.go(store_blocks=[1], store_slots=[0])
    if is_fetched:
        assert rank.move(True, b"key", 0) and rank.move(False, b"key", 2)
        slot = 2
    if is_late:
        rank.store.before = lambda: rank.flip(slot)
    else:
        rank.flip(slot)
    result = rank.told(rank.begin(True, b"bad", slot))
    assert result.done == [False] and result.changed == (slot,)
    assert b"bad" not in rank.store.objects
    assert f"Host slots [{slot}] do not hold what was stored in them" in caplog.text
    assert not rank.loads(slot, 5)


def test_without_verify_it_is_kept() -> None:
    """The test above could fail."""
    rank = Ranked(verify=False)
    rank.go(store_blocks=[1], store_slots=[0])
    rank.flip(0)
    assert rank.move(True, b"bad", 0)


def test_a_rank_that_leaves_writing_to_another_deletes_nothing_of_it() -> None:
    store = Memory()
    rank = Ranked(True, ReadOnlyStore(store))
    store.objects[b"key"] = b"of the other one"
    rank.go(store_blocks=[1], store_slots=[0])
    number = rank.begin(True, b"key", 0)
    assert rank.told(number).done == [True]
    rank.flip(0)
    assert rank.told(rank.begin(True, b"key", 0)).changed == (0,)
    ReadOnlyStore(store).delete([b"key"])
    assert store.objects == {b"key": b"of the other one"}


@pytest.mark.parametrize("verify", [False, True])
def test_an_engine_that_ends_writes_what_is_right(
    verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Ranked(verify)
    rank.go(store_blocks=[1, 2], store_slots=[0, 1])
    assert rank.move(True, b"key", 0)
    fail_once(monkeypatch, rank, "stores")
    rank.go(store_blocks=[3], store_slots=[2])
    rank.store.fails = "missing"
    assert not rank.move(False, b"key", 3)
    rank.flip(1)
    jobs = [SecondaryJob(9, True, [b"a", b"b", b"c", b"d"], [0, 1, 2, 3], 0, 0, 0)]
    assert rank.tier.flush([(10.0, jobs)]) == 2 - verify
    assert rank.store.exists([b"a", b"b", b"c", b"d"]) == [
        True,
        not verify,
        False,
        False,
    ]


def test_a_store_whose_count_fails_goes_on(rank: Ranked) -> None:
    def fails() -> int:
        raise RuntimeError("planned")

    rank.store.take_evicted_bytes = fails  # type: ignore[method-assign]
    rank.go(store_blocks=[1], store_slots=[0])
    assert rank.move(True, b"key", 0) and rank.move(False, b"key", 1)


def test_a_checksum_that_comes_late_is_not_that_of_what_came_after() -> None:
    """Where ranks share slots, and threads take checksums."""
    memory = torch.zeros(NUM_SLOTS, 64, dtype=torch.uint8)
    shared = torch.zeros(NUM_SLOTS, 8, dtype=torch.uint8).numpy()
    owner = SlotChecksums(memory, CPU, shared)
    late = owner._begin(0)
    memory[0] = 1
    owner.compute([0])
    owner._set(0, late, b"whatever")
    assert SlotChecksums(memory, CPU, shared).are_right([0]) == [True]


@pytest.mark.parametrize("verify", [False, True])
def test_a_rank_without_kv_memory_takes_part_in_all_plans(verify: bool) -> None:
    tier = HostTier.allocate([], NUM_SLOTS, CPU, verify=verify)
    for seq, plan in enumerate(
        [
            {"store_slots": [0], "store_blocks": [1]},
            # Others have fetched what is in slot 2.
            {"load_slots": [0, 2], "load_blocks": [1, 2]},
            {"ahead_slots": [2], "ahead_blocks": [3]},
        ],
        1,
    ):
        tier.begin_step(step(seq, **plan))
        report = tier.end_step(output()).kv_tier_report
        assert report is None or report.failed_load_seq is None


# ----------------------------------------------------------------- random orders


class Play:
    """A scheduler's view of a rank: what each slot must hold."""

    def __init__(self, seed: int, verify: bool, patch: pytest.MonkeyPatch) -> None:
        self.rng = Random(seed)
        self.rank = Ranked(verify)
        self.verify, self.patch = verify, patch
        # Values with which blocks are full, by slot; and slots that changed since.
        self.held: dict[int, int] = {}
        self.changed: set[int] = set()
        self.counts: Counter[str] = Counter()
        # By value, what a slot has then.
        self._rows: dict[int, bytes] = {}

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            slot = self.rng.randrange(NUM_SLOTS)
            self.rng.choice(
                [self.store, self.store, self.load, self.put, self.put, self.get]
            )(slot)
            if self.verify and self.held and self.rng.random() < 0.1:
                self.rank.flip(slot := self.rng.choice([*self.held]))
                self.changed ^= {slot}
        for key, row in self.rank.store.objects.items():
            assert row == self._rows[int(key)], "what changed is kept for others"

    def store(self, slot: int) -> None:
        value = len(self._rows)
        for cache in (self.rank.caches[0][:, 0], self.rank.caches[1][0]):
            cache.fill_(value)
        if fails := self.rng.random() < 0.2:
            fail_once(self.patch, self.rank, "stores")
        report = self.rank.go(store_blocks=[0], store_slots=[slot])
        assert fails == (report is not None and slot in report.failed_store_slots)
        self._now(slot, None if fails else value)
        self._rows[value] = self.rank.tier.buffer.slots[slot].numpy().tobytes()

    def load(self, slot: int) -> None:
        before = self.rank.block(5)
        is_right = slot in self.held and slot not in self.changed
        kind = self.rng.choice(["load", "ahead"])
        assert self.rank.loads(slot, 5, kind) == is_right, "refused, or not"
        if not is_right:
            assert same(self.rank.block(5), before)
            self._now(slot, None)
        else:
            assert all((t == self.held[slot]).all() for t in self.rank.block(5))
        self.counts["loaded" if is_right else "refused"] += 1

    def put(self, slot: int) -> None:
        is_right = slot in self.held and slot not in self.changed
        key = b"%d" % self.held.get(slot, -1)
        fails = self._fails()
        if is_flipped := self.verify and self.rng.random() < 0.2:
            # On its way, so late that the store has it.
            self.rank.store.before = lambda: self.rank.flip(slot)
        done = self._move(True, key, slot)
        self.rank.store.before = nothing
        if is_right and is_flipped and fails != "raises":
            is_right = False
            self._now(slot, None)
        elif slot in self.changed:
            self._now(slot, None)
        assert done == (is_right and not fails)
        self.counts["put"] += done

    def get(self, slot: int) -> None:
        key = self.rng.choice([*self.rank.store.objects] or [b"none"])
        fails = self._fails()
        # While it is under way nobody takes the slot for anything.
        during = self.rng.choice([*[None] * 4, self.load, self._store_refused])
        before = key in self.rank.store.objects
        self._now(slot, None)
        done = self._move(False, key, slot, during)
        is_refused = during == self._store_refused
        assert done == (before and not fails and not is_refused)
        self._now(slot, int(key) if done else None)
        self.counts["got"] += done

    def _store_refused(self, slot: int) -> None:
        report = self.rank.go(store_blocks=[1], store_slots=[slot])
        assert report is not None and slot in report.failed_store_slots
        assert not self.rank.loads(slot, 5)

    def _fails(self) -> str | None:
        self.rank.store.fails = self.rng.choice([*[None] * 4, "missing", "raises"])
        return self.rank.store.fails

    def _move(
        self,
        is_put: bool,
        key: bytes,
        slot: int,
        during: Callable[[int], None] | None = None,
    ) -> bool:
        self.rank.store.goes_on.clear()
        number = self.rank.begin(is_put, key, slot)
        if during is not None:
            during(slot)
        self.rank.store.goes_on.set()
        done = self.rank.told(number).done[0]
        self.rank.store.fails = None
        return done

    def _now(self, slot: int, value: int | None) -> None:
        self.changed.discard(slot)
        self.held.pop(slot, None)
        if value is not None:
            self.held[slot] = value


@pytest.fixture
def no_logs() -> Iterator[None]:
    """Each failure has a traceback, which takes longer than all else."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("no_logs")
@pytest.mark.parametrize("verify", [False, True])
def test_random_orders(verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        play = Play(seed, verify, monkeypatch)
        play.run(NUM_STEPS)
        counts += play.counts
    least = NUM_SEEDS // 2
    kinds = ("loaded", "refused", "put", "got")
    assert all(counts[kind] >= least for kind in kinds), counts


def no_checksum_of_what_is_fetched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotChecksums, "compute", lambda self, slots: self.forget(slots))


def serve_what_did_not_come(patch: pytest.MonkeyPatch) -> None:
    end = RankSlots.end_fetch
    patch.setattr(RankSlots, "end_fetch", lambda self, s, came: end(self, s, s))


def only_stores_clear_what_is_bad(patch: pytest.MonkeyPatch) -> None:
    fill = RankSlots._fill

    def fill_others(
        self: RankSlots, slots: Sequence[int], groups: Sequence[int]
    ) -> None:
        fill(self, [slot for slot in slots if self._states[slot] != BAD], ())

    patch.setattr(RankSlots, "_fill", fill_others)


def forget_what_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankSlots, "mark_bad", RankSlots.mark_stored)


def store_over_what_is_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        RankSlots, "begin_store", lambda self, slots, *_: self._fill(slots, ())
    )


def write_what_changed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankSlots, "mark_changed", lambda self, slots: set())


def check_before_writing_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "delete", lambda self, keys: None)


BUGS = [
    no_checksum_of_what_is_fetched,
    serve_what_did_not_come,
    only_stores_clear_what_is_bad,
    forget_what_failed,
    store_over_what_is_late,
    write_what_changed,
    check_before_writing_only,
]


@pytest.mark.usefixtures("no_logs")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    for seed in range(NUM_SEEDS):
        try:
            Play(seed, True, monkeypatch).run(NUM_STEPS)
        except AssertionError:
            return
    pytest.fail(f"{NUM_SEEDS} plays did not find it")
