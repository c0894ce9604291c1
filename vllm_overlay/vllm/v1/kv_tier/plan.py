# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers for one step, and what they tell it.

Every step has a plan. Workers take the plans in the order of their `seq`. A copy
may still run when later plans arrive; the fences say which earlier copies and
forward passes must have ended before memory that they use is used again.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class SecondaryJob(NamedTuple):
    """What moves between host slots and the tier below them, in no hurry.

    Fences as in `StepPlan` say when it may begin; nothing says when it ends but the
    report of each rank.
    """

    number: int
    """Counts up from 1."""
    is_put: bool
    """From slots to the store. Else from the store to slots."""
    keys: list[bytes]
    """Names of the objects; pairs with `slots`."""
    slots: list[int]
    tier: int
    """Which tier below, in the order of the settings."""
    after_stores: int
    """Stores of plans up to this `seq` fill these slots, or filled them before."""
    after_loads: int
    """Loads of plans up to this `seq` read what was in these slots before."""


@dataclass
class StepPlan:
    """Copies of one step. `seq` starts at 1; a fence of 0 asks for nothing.

    The loads of a step end before its forward pass reads what they load. Loads
    ahead and stores end some time; later plans have fences for them. What no fence
    orders may run in any order, or at once; but stores run in the order of their
    plans, and those of blocks that the plan takes before the others of it. They do
    not wait for loads of the same plan, which may wait for them.
    """

    seq: int
    store_blocks: list[int] = field(default_factory=list)
    """Device block ids to copy from, before this plan overwrites them; pairs with
    `store_slots`."""
    store_slots: list[int] = field(default_factory=list)
    clean_blocks: list[int] = field(default_factory=list)
    """As above, of blocks that a later plan may overwrite; pairs with `clean_slots`.
    Fences of this plan for its own `seq` are not about them."""
    clean_slots: list[int] = field(default_factory=list)
    load_slots: list[int] = field(default_factory=list)
    """Host slots to copy from; pairs with `load_blocks`."""
    load_blocks: list[int] = field(default_factory=list)
    ahead_slots: list[int] = field(default_factory=list)
    """As above, for requests of later steps; pairs with `ahead_blocks`."""
    ahead_blocks: list[int] = field(default_factory=list)

    compute_after_stores: int = 0
    """The forward pass overwrites device blocks that stores of plans up to this
    `seq` (it may be this plan's own) still read."""
    compute_after_loads: int = 0
    """The forward pass uses device blocks that loads ahead of plans up to this
    `seq` fill."""
    connector_writes: bool = False
    """A KV connector may write to the same device blocks as the forward pass, when it
    likes: what the forward pass waits for must have ended before the step begins."""
    load_after_stores: int = 0
    """The loads, ahead or not, read slots, or overwrite device blocks, that stores
    of plans up to this `seq` use."""
    load_after_loads: int = 0
    """The loads overwrite device blocks that loads ahead of plans up to this `seq`
    fill."""
    load_after_compute: int = 0
    """The loads overwrite device blocks that forward passes up to this `seq` use."""
    store_after_compute: int = 0
    """The stores read what forward passes up to this `seq` wrote."""
    store_after_loads: int = 0
    """The stores overwrite slots that loads of plans up to this `seq` read, or read
    device blocks that they fill."""
    clean_after_compute: int = 0
    clean_after_loads: int = 0
    """As the two above, for `clean_blocks`."""

    secondary: list[SecondaryJob] = field(default_factory=list)
    """What the tier below is to write and to read."""
    asks_secondary: bool = False
    """The step runs nothing, and asks the tier below what a request lacks: writes leave
    the way to the answer, and to what is read then."""
    awaits_secondary: int = 0
    """The step runs nothing, and before so many jobs of tiers below have ended on a
    rank, of all that it was ever given, there is nothing to do: it may take a moment to
    see whether they do. 0: nobody waits for any."""

    tell_end: bool = False
    """Tell, in `StepReport.ended`, when the stores, loads and forward passes of plans
    up to this one have ended."""
    unmap_blocks: tuple[tuple[int, int], ...] = ()
    """Device blocks, each from one up to before another, whose memory goes back to the
    machine before anything else of the plan. Nothing that is under way touches them."""

    def check(self) -> None:
        """Assert what holds for every plan, in time that does not grow with it.

        Both ends call it: who makes a plan, and who carries it out.
        """
        for slots, blocks in self.pairs():
            assert len(slots) == len(blocks), f"Slots and blocks differ: {self}"
        fences = (
            self.compute_after_stores,
            self.compute_after_loads,
            self.load_after_stores,
            self.load_after_loads,
            self.load_after_compute,
            self.store_after_compute,
            self.store_after_loads,
            self.clean_after_compute,
            self.clean_after_loads,
        )
        later = min(fences) < 0 or max(fences) > self.seq
        assert not later, f"A fence for a later plan: {self}"

    def check_copies(self) -> None:
        """As `check`, for each copy: none to a place that another one writes to, and
        none from a block or slot that another one fills without a fence between."""
        stored, cleaned, loaded, ahead = map(list, self.pairs())
        filled_slots = [*stored[0], *cleaned[0]]
        filled_blocks = [*loaded[1], *ahead[1]]
        assert len({*filled_slots}) == len(filled_slots), "A slot is filled twice"
        assert len({*filled_blocks}) == len(filled_blocks), "A block is loaded twice"
        read_slots, read_blocks = {*loaded[0], *ahead[0]}, {*stored[1]}
        assert not read_slots & {*cleaned[0]}, "A load of what is stored after it"
        assert not {*cleaned[1]} & {*filled_blocks}, "A store of what is loaded"
        if read_slots & {*stored[0]} or read_blocks & {*filled_blocks}:
            assert self.load_after_stores == self.seq, "A load beside its store"

    def pairs(self) -> tuple[tuple[list[int], list[int]], ...]:
        """Slots and blocks of stores, of those of `clean_blocks`, of loads and of loads
        ahead."""
        return (
            (self.store_slots, self.store_blocks),
            (self.clean_slots, self.clean_blocks),
            (self.load_slots, self.load_blocks),
            (self.ahead_slots, self.ahead_blocks),
        )


class CopyTime(NamedTuple):
    """How long copies took that ended together."""

    num_blocks: int
    """0: the copies failed."""
    seconds: float


class PrefillTime(NamedTuple):
    """How long a step took that was mostly prefill."""

    num_tokens: int
    """0: there was none."""
    seconds: float


class SecondaryResult(NamedTuple):
    """What became of a `SecondaryJob` on one rank."""

    number: int
    done: list[bool]
    """For each of its slots whether the store, or the slot, has all of it."""
    seconds: float
    evicted_bytes: int = 0
    """That the store has removed to make room, and nobody has told yet."""
    changed: tuple[int, ...] = ()
    """Slots that turned out not to hold what filled them, see `verify`: they are of no
    use any more."""


Times = dict[tuple[str, int], CopyTime]
"""How long copies took that ended, by their kind and the `seq` of their plan. Kinds are
`store`, `clean`, `load`, `load_ahead`; and `stall`: the seconds that a forward pass
waited for loads."""


@dataclass
class StepReport:
    """What the scheduler must hear of. Absent from a step with nothing to tell."""

    failed_load_seq: int | None = None
    """Lowest `seq` of a plan with a failed load on some rank."""
    failed_store_slots: dict[int, int] = field(default_factory=dict)
    """Host slot to `seq` of the store that failed to fill it on some rank."""
    lost_blocks: list[int] | None = None
    """A copy hangs on some rank, and that rank copies no more: device blocks that its
    loads may still write to, at any time."""
    prefill: PrefillTime = PrefillTime(0, 0.0)
    """Of steps that waited for no load."""
    joins: dict[int, float] = field(default_factory=dict)
    """Seconds to launch a step in which requests joined with little to compute, which
    is less than it took, by the bit length of its number of tokens."""
    times: Times = field(default_factory=dict)
    """What a rank has not told of before."""
    secondary: list[SecondaryResult] = field(default_factory=list)
    """Jobs that ended, each as often as there are ranks that have told of it."""
    ended: list[int] = field(default_factory=list)
    """`seq` of plans with `tell_end`, each as often as there are ranks that have told:
    once this report has come, all is over that plans up to it touched."""
    failures: Counter[str] = field(default_factory=Counter)
    """Steps in which copies failed, by kind (`store`, `load`), or a layer did not
    wait for its loads (`layer_wait`), or that were given up (`hang`)."""


def merge_reports(reports: Iterable[StepReport | None]) -> StepReport | None:
    """One report for all ranks: a copy failed if it failed on any of them."""
    merged: StepReport | None = None
    for report in reports:
        if report is None:
            continue
        merged = merged or StepReport()
        seqs = (merged.failed_load_seq, report.failed_load_seq)
        merged.failed_load_seq = min((s for s in seqs if s is not None), default=None)
        merged.failed_store_slots.update(report.failed_store_slots)
        if report.lost_blocks is not None:
            merged.lost_blocks = (merged.lost_blocks or []) + report.lost_blocks
        # The slowest rank is what a step waits for.
        merged.prefill = _slower(merged.prefill, report.prefill)
        for size, seconds in report.joins.items():
            merged.joins[size] = max(seconds, merged.joins.get(size, 0.0))
        merge_times(merged.times, report.times)
        merged.secondary += report.secondary
        merged.ended += report.ended
        # Ranks mostly fail together.
        merged.failures |= report.failures
    return merged


def merge_times(times: Times, others: Times) -> None:
    """Take what `others` says into `times`: the slowest counts, and every failure."""
    for key, other in others.items():
        known = times.get(key, other)
        times[key] = CopyTime(
            min(known.num_blocks, other.num_blocks), max(known.seconds, other.seconds)
        )


def _slower(a: PrefillTime, b: PrefillTime) -> PrefillTime:
    if not a.num_tokens:
        return b
    a_takes_longer = a.seconds * max(b.num_tokens, 1) >= b.seconds * a.num_tokens
    return a if a_takes_longer else b
