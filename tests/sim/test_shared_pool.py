# SPDX-License-Identifier: Apache-2.0
"""Random scripts of several engines that share a pool, some of which die.

`KV_TIER_POOL_EXAMPLES` sets how many, `KV_TIER_SIM_SEED` draws others.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm.v1.kv_tier.keeper.partition import Claim, Partition, Published, Rows, Slots
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.scheduler.neighbours import Neighbours
from vllm.v1.kv_tier.scheduler.shared_pool import SharedBlockPool
from vllm.v1.kv_tier.scheduler.shared_slots import PlanEnds, SharedSlotTable

from .content import Violation
from .layouts import LAYOUTS
from .scheduler import Setup
from .scripts import Action, Add, Reset, Steps, random_action, random_setup
from .shared_pool import Machine, OldLooks, play, turns

EXAMPLES = int(os.environ.get("KV_TIER_POOL_EXAMPLES", "120"))
SEED = int(os.environ.get("KV_TIER_SIM_SEED", "0"))


@pytest.fixture(autouse=True)
def _without_logs() -> Iterator[None]:
    """Traces of the failures that are simulated take as long as the scripts."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def play_random(
    seed: int,
    make: type[Partition] = Partition,
    is_pressed: bool | None = None,
    make_machine: type[Machine] = Machine,
    num_ranks: int | None = None,
    num_kills: int | None = None,
    fails: float | None = None,
    has_below: bool | None = None,
    resets: bool | None = None,
    opens: bool | None = None,
) -> Counter[str]:
    """Play a script. What is given is not drawn.

    Args:
        seed: Of what is drawn.
        make: The class of partitions.
        is_pressed: Slots are reused while neighbours load them.
        make_machine: The class of machines.
        num_ranks: Of each engine.
        num_kills: How many engines die.
        fails: Part of the steps whose loads fail.
        has_below: There is a store below the pool.
        resets: Engines may be reset.
        opens: Ranks open most slots while their engines run.

    """
    rng = Random(seed)
    drawn = random_setup(rng)
    tuning = replace(
        drawn.tuning,
        plans_per_report=rng.choice([1, 1, 2, 8]),
        stores_per_report=rng.choice([1, 4, 256]),
        claim_part=rng.choice([0, 0.2, 0.5]),
        settled_outputs=rng.choice([0, 1, 3]),
        # Of prompts, so that a step has looked enough.
        max_looks=rng.choice([1, 4, 8192, 8192]),
    )
    setup = replace(
        drawn,
        quotas=(),
        num_slots=rng.randint(1, 24),
        tuning=tuning,
        num_ranks=num_ranks or rng.choice([1, 1, 2, 3]),
    )
    if is_pressed is None:
        is_pressed = rng.random() < 0.7
    if is_pressed:
        setup = press(setup, rng)
    if make is Partition and rng.random() < 0.3:
        make = OldLooks
    draws_below = keys_are_bytes() and rng.random() < 0.3
    if draws_below if has_below is None else has_below:
        setup = with_store(setup, rng)
    if rng.random() < 0.5 if opens is None else opens:
        setup = replace(setup, opens=0)
    busy = rng.choice([0, 0, 0.1, 0.5])
    num_engines = rng.randint(2, 4)
    scripts = [draw_script(rng, is_pressed, fails, resets) for _ in range(num_engines)]
    machine = make_machine(setup, num_engines, make, busy, rng)
    deaths = rng.choice([0, 1, 3]) if num_kills is None else num_kills
    events = play(machine, turns(rng, scripts, deaths))
    events[f"{setup.num_ranks} ranks"] += 1
    events["below"] += setup.below is not None
    events[f"{tuning.plans_per_report} plans a report"] += 1
    return events


def play_flood(seed: int, make: type[Partition] = Partition) -> Counter[str]:
    """One of two engines reads what the other has, which needs these slots then."""
    rng = Random(seed)
    setup = replace(
        press(random_setup(rng), rng),
        layout=LAYOUTS[0],
        quotas=(),
        num_slots=rng.randint(6, 12),
        num_stages=1,
    )
    actions: list[tuple[int, Action | bool]] = []

    def ask(number: int, document: int, num_steps: int, rush: bool) -> None:
        suffix = rng.randint(0, 6)
        actions.append((number, Add(document, 24, suffix, max_tokens=2)))
        actions.extend([(number, Steps(1, rush=rush))] * num_steps)

    for _ in range(4):
        owner, document = rng.randint(0, 1), rng.randint(0, 2)
        ask(owner, document, 12, rush=True)
        ask(1 - owner, document, rng.randint(1, 3), rush=False)
        ask(owner, (document + 1) % 3, 0, rush=True)
        ask(owner, (document + 2) % 3, rng.randint(5, 20), rush=rng.random() < 0.5)
        actions.extend([(1 - owner, Steps(1))] * 8)
    return play(Machine(setup, 2, make, 0, rng), actions)


def draw_script(
    rng: Random, is_pressed: bool, fails: float | None, resets: bool | None
) -> list[Action]:
    """The actions of an engine. Arguments as in `play_random`."""
    script = [random_action(rng) for _ in range(20)]
    # After a reset an engine shares nothing.
    keeps = rng.random() < 0.8 if resets is None else not resets
    script = [a for a in script if not (keeps and isinstance(a, Reset))]
    if resets:
        script[rng.randrange(len(script))] = Reset(running=True)
    part = rng.choice([0, 0, 0.2]) if fails is None else fails
    return single_steps(rng, script, is_pressed, part)


def press(setup: Setup, rng: Random) -> Setup:
    """The device forgets soon, and slots are reused while neighbours load them."""
    return replace(
        setup,
        num_slots=rng.randint(3, 16),
        spare_blocks=0,
        is_async=True,
        store_policy="write_through",
        store_from_use=1,
        load_time=rng.choice([0, 0.5]),
        max_stall=0,
    )


def with_store(setup: Setup, rng: Random) -> Setup:
    """Few slots, so that much comes back from below."""
    tuning = replace(
        setup.tuning,
        fetch_part=1.0,
        assumed_prefill_s=1e3,
        max_fetches=rng.choice([1, 2, 4096]),
        max_ended=rng.choice([1, 2, 4096]),
    )
    return replace(
        setup,
        below=(rng.randrange(1 << 16), rng.choice([0, 2, 5])),
        num_ranks=1,
        num_slots=4 + setup.num_slots // 4,
        store_from_use=1,
        tuning=tuning,
    )


def single_steps(
    rng: Random, script: list[Action], is_pressed: bool, fails: float
) -> list[Action]:
    """The script with one action for each step, so that others act between them."""
    actions: list[Action] = []
    for action in script:
        count = action.count if isinstance(action, Steps) else 1
        for _ in range(count):
            if isinstance(action, Add) and is_pressed:
                base = rng.randint(0, 1)
                action = replace(action, base=base, hints=None, has_salt=False)
            if isinstance(action, Steps):
                rush = action.rush and not is_pressed
                fail = "load" if rng.random() < fails else action.fail
                action = replace(action, count=1, rush=rush, fail=fail)
            actions.append(action)
    return actions


def test_scripts_of_engines_that_share_a_pool() -> None:
    events: Counter[str] = Counter()
    for seed in range(SEED * EXAMPLES, (SEED + 1) * EXAMPLES):
        try:
            events += play_random(seed)
        except BaseException as e:
            e.add_note(f"play_random({seed})")
            raise
    some = ["from neighbours", "adopted", "read", "stored", "loaded", "failed"]
    some += ["fetched", "written"] if keys_are_bytes() else []
    some += ["adopted later", "opening"]
    for event in (*some, "2 ranks", "3 ranks", "8 plans a report"):
        assert events[event], event
    print(dict(events))


def test_no_slot_is_reused_while_a_neighbour_reads_it() -> None:
    events: Counter[str] = Counter()
    for seed in range(20):
        events += play_flood(SEED * 20 + seed)
    assert events["from neighbours"] > 100


@pytest.mark.parametrize("reads", [False, True])
def test_what_two_engines_compute_is_kept_once_if_they_share_anything(
    reads: bool,
) -> None:
    rng = Random(0)
    drawn = press(random_setup(rng), rng)
    tuning = replace(
        drawn.tuning, plans_per_report=1, settled_outputs=0, claim_part=0.0
    )
    setup = replace(drawn, layout=LAYOUTS[0], quotas=(), num_slots=40, tuning=tuning)
    machine = Machine(setup, 2, Partition, 0, rng)

    def ask(document: int, *numbers: int) -> None:
        for number in numbers:
            machine.act(number, Add(document, length=24, suffix=0, max_tokens=1))
        for _ in range(16):
            for number in (0, 1):
                machine.act(number, Steps(1, rush=True))

    if reads:
        ask(0, 0)
        ask(0, 1)
    ask(1, 0, 1)
    published = [len(each.published(0, 40)) for each in machine.partitions]
    num_keys = len(
        {key for each in machine.engines for key, _ in each._pool.host.places.items()}
    )
    assert sum(published) == num_keys * (1 if reads else 2)
    machine.drain()
    assert bool(machine.events["from neighbours"]) == reads


# ----------------------------------------------------------------- planted bugs


class _IgnoresPins(Partition):
    """The owner reuses slots that neighbours read."""

    def _are_pinned(self, slots: Slots) -> NDArray[np.bool_]:
        return np.zeros(len(slots), np.bool_)


class _PinsUnseen(OldLooks):
    """A neighbour trusts its look without the lock."""

    def pin(
        self, rows: Rows, slots: Slots, reader: int, identity: bytes
    ) -> NDArray[np.bool_]:
        self._pins[slots, reader] = 1
        return np.ones(len(slots), np.bool_)


class _ForgetsEntries(Partition):
    """The owner reuses slots that neighbours still find."""

    def is_published(self, slot: int) -> bool:
        return False

    def claim(self, slots: Sequence[int]) -> list[Claim]:
        return [Claim.FREE] * len(slots)


class _StaleAfterDeath(Partition):
    """An heir takes over nothing, but what was published can still be found."""

    def take_over(self, num_empty: int, num_first: int) -> Published | None:
        found = super().take_over(num_empty, num_first)
        return None if found is None else Published([], [], [])

    def is_published(self, slot: int) -> bool:
        return False

    def published(self, first: int, end: int) -> list[int]:
        return []

    def claim(self, slots: Sequence[int]) -> list[Claim]:
        return [Claim.FREE] * len(slots)


def publish_at_once(patch: pytest.MonkeyPatch) -> None:
    """Before the ranks have ended the stores."""

    def record(self: SharedSlotTable, plan: StepPlan, is_idle: bool) -> bool:
        stores = [*plan.store_slots, *plan.clean_slots]
        slots = [slot for index in stores if (slot := self.at(index)) is not None]
        if slots and not self.has_left:
            self._partition.publish(
                [slot.index for slot in slots],
                [slot.keys[0] for slot in slots],
                [slot.num_tokens for slot in slots],
            )
        return False

    patch.setattr(SharedSlotTable, "record_stores", record)


def publish_later_plans(patch: pytest.MonkeyPatch) -> None:
    """A report covers the plans after it, too."""

    def record(self: SharedSlotTable, seqs: Iterable[int]) -> None:
        for seq, stores in self._stored.items():
            self._complete |= dict.fromkeys(stores, seq)
        self._stored.clear()

    patch.setattr(SharedSlotTable, "record_ended", record)


class _Unseen(set[Any]):
    def __contains__(self, key: object) -> bool:
        return False

    def isdisjoint(self, keys: Iterable[Any]) -> bool:
        return True


def publish_next_victims(patch: pytest.MonkeyPatch) -> None:
    """What was withdrawn ahead of its eviction is published, and evicted then."""
    init = SharedSlotTable.__init__

    def make(self: SharedSlotTable, *args: Any) -> None:
        init(self, *args)
        self._claimed = _Unseen()

    patch.setattr(SharedSlotTable, "__init__", make)


def publish_again_at_once(patch: pytest.MonkeyPatch) -> None:
    """A victim that is used again is published before its store has ended."""
    forget = SharedSlotTable._forget_passed

    def publish(self: SharedSlotTable, key: Any) -> bool:
        stored, self._stored = self._stored, {}
        try:
            return forget(self, key)
        finally:
            self._stored = stored

    patch.setattr(SharedSlotTable, "_forget_passed", publish)


def count_one_rank(patch: pytest.MonkeyPatch) -> None:
    """A plan has ended when one rank says so."""
    patch.setattr(PlanEnds, "take", lambda self, seqs: [*dict.fromkeys(seqs)])


class _HeirAtOnce(Machine):
    """A partition has another engine while a rank of the last one still runs."""

    def kill(self, number: int, keeps_stores: bool) -> None:
        super().kill(number, keeps_stores)
        dead = self.engines[number]
        self._dying[number] = True
        self._replace(number)
        self._left = dead

    def act(self, number: int, action: Action) -> None:
        if dead := vars(self).get("_left"):
            self._run_left(dead)
        super().act(number, action)


def unpin_at_once(patch: pytest.MonkeyPatch) -> None:
    """Before the ranks have ended the loads."""
    patch.setattr(Neighbours, "record_plan", lambda self, plan, num_own: 0)


def share_after_reset(patch: pytest.MonkeyPatch) -> None:
    """Publish what other weights have computed."""
    patch.setattr(SharedBlockPool, "leave", lambda self, reason: None)


def find_what_is_not_open(patch: pytest.MonkeyPatch) -> None:
    """Blocks of neighbours whose slots not all ranks have open."""
    every = property(lambda self: 10_000, lambda self, num_open: None)
    patch.setattr(Neighbours, "num_open", every, raising=False)


def adopt_what_is_not_open(patch: pytest.MonkeyPatch) -> None:
    """An heir finds, and reuses, all slots at once."""
    init = SharedSlotTable.__init__
    patch.setattr(SharedSlotTable, "__init__", lambda *args: init(*args[:4]))


def fill_what_is_to_be_adopted(patch: pytest.MonkeyPatch) -> None:
    """Slots of adopted blocks are free."""
    adopt = SharedSlotTable._adopt

    def forget(self: SharedSlotTable, opened: range) -> set[int]:
        adopt(self, opened)
        return set()

    patch.setattr(SharedSlotTable, "_adopt", forget)


def lose_what_is_to_be_adopted(patch: pytest.MonkeyPatch) -> None:
    """What an earlier engine has left is withdrawn when its slot is opened."""
    patch.setattr(SharedSlotTable, "_adopt", lambda self, opened: set())


def keep_what_is_to_be_adopted(patch: pytest.MonkeyPatch) -> None:
    """What other weights have computed is adopted after a reset."""
    leave = SharedSlotTable.leave

    def keep(self: SharedSlotTable) -> None:
        to_adopt = dict(self._to_adopt)
        leave(self)
        self._to_adopt = to_adopt

    patch.setattr(SharedSlotTable, "leave", keep)


OPENS = {"opens": True, "num_kills": 3}
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.plants
@pytest.mark.parametrize(
    "make",
    [_PinsUnseen, _ForgetsEntries, _StaleAfterDeath],
    ids=lambda make: make.__name__,
)
def test_bug_of_a_partition_is_found(make: type[Partition]) -> None:
    assert finds(make=make, opens=False)


@pytest.mark.plants
@pytest.mark.parametrize("ends", [False, True])
def test_reuse_of_slots_that_neighbours_read_is_found(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pins are ignored, or end too soon."""
    if ends:
        unpin_at_once(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(100):
            play_flood(seed, Partition if ends else _IgnoresPins)


@pytest.mark.plants
@pytest.mark.parametrize(
    "plant, sure",
    [
        (publish_at_once, {}),
        (publish_later_plans, {}),
        (publish_next_victims, {}),
        (publish_again_at_once, {"first": 137}),
        (count_one_rank, {}),
        (share_after_reset, {}),
        (find_what_is_not_open, OPENS),
        (adopt_what_is_not_open, OPENS),
        (fill_what_is_to_be_adopted, OPENS),
        (lose_what_is_to_be_adopted, OPENS),
        (keep_what_is_to_be_adopted, {**OPENS, "resets": True}),
    ],
)
def test_bug_of_an_engine_is_found(
    plant: Plant, sure: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert finds(**sure)


@pytest.mark.plants
def test_heir_of_an_engine_that_still_copies_is_found() -> None:
    sure: dict[str, Any] = {"num_ranks": 2, "num_kills": 4, "opens": False}
    assert finds(first=75, make_machine=_HeirAtOnce, **sure)


def finds(first: int = 0, **sure: Any) -> bool:
    """Whether a script finds a bug. The search begins where it was found before."""
    for seed in range(first, first + 1000):
        try:
            play_random(seed, is_pressed=True, **sure)
        except Violation:
            return True
    return False
