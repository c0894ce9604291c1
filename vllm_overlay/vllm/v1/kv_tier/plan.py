# SPDX-License-Identifier: Apache-2.0
"""The messages between scheduler and workers: the plan of a step, and its report.

Every step has a plan. Workers take the plans in the order of their `seq`. A copy may
still run when later plans arrive. Fences say which earlier copies and forward passes
must have ended before a plan may use the same memory.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class SecondaryJob(NamedTuple):
    """A transfer between host slots and a secondary tier, without a deadline.

    Fences as in `StepPlan` say when it may begin. It has ended when all ranks report
    so.
    """

    number: int
    """Counts up from 1."""
    is_put: bool
    """True: from slots to the store. False: from the store to slots."""
    keys: list[bytes]
    """Keys of the objects; pairs with `slots`."""
    slots: list[int]
    tier: int
    """Index of the secondary tier, in the order of the settings."""
    after_stores: int
    """Stores of plans up to this `seq` fill these slots, or filled them before."""
    after_loads: int
    """Loads of plans up to this `seq` read the slots' earlier content."""
    groups: tuple[int, ...] = ()
    """KV cache group by slot, where groups need less than all of some; else empty."""


class HostAim(NamedTuple):
    """How many host slots a rank should have open. It works on it while steps run."""

    number: int
    """Counts up from 1."""
    num_slots: int
    """The first ones. Others are closed, and their memory is given back."""


@dataclass
class StepPlan:
    """The copies of one step. `seq` starts at 1; a fence of 0 requires nothing.

    The loads of a step end before its forward pass reads their blocks. Loads ahead and
    stores end later; fences of later plans refer to them. Copies without a fence
    between them may run in any order, or at the same time, except that stores run in
    the order of their plans, and `store_blocks` before `clean_blocks`. Stores do not
    wait for loads of the same plan, but those may wait for them.
    """

    seq: int
    store_blocks: list[int] = field(default_factory=list)
    """Device block ids to copy from before this plan overwrites them; pairs with
    `store_slots`."""
    store_slots: list[int] = field(default_factory=list)
    clean_blocks: list[int] = field(default_factory=list)
    """The same for blocks that a later plan may overwrite; pairs with `clean_slots`.
    Fences of this plan on its own `seq` exclude them."""
    clean_slots: list[int] = field(default_factory=list)
    load_slots: list[int] = field(default_factory=list)
    """Host slots to copy from; pairs with `load_blocks`."""
    load_blocks: list[int] = field(default_factory=list)
    ahead_slots: list[int] = field(default_factory=list)
    """The same for requests of later steps; pairs with `ahead_blocks`."""
    ahead_blocks: list[int] = field(default_factory=list)
    groups: dict[int, int] | None = None
    """KV cache group by slot, for all slots above, where groups need less than all
    bytes of a block. Slots that are missing are copied whole; None: all."""

    compute_after_stores: int = 0
    """The forward pass overwrites device blocks that stores of plans up to this `seq`,
    possibly this plan's, still read."""
    compute_after_loads: int = 0
    """The forward pass uses device blocks that loads ahead of plans up to this `seq`
    fill."""
    connector_writes: bool = False
    """A KV connector may write to the forward pass's blocks at any time, so what the
    forward pass waits for must have ended before the step begins."""
    load_after_stores: int = 0
    """Loads and loads ahead use slots or device blocks that stores of plans up to this
    `seq` use."""
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
    """The two fences above, for `clean_blocks`."""

    secondary: list[SecondaryJob] = field(default_factory=list)
    """Jobs for secondary tiers."""
    asks_secondary: bool = False
    """The step runs nothing, and asks secondary tiers for a request's blocks: writes
    pause for the answer, and for the reads that follow."""
    awaits_secondary: int = 0
    """The step runs nothing, and may wait a moment until this many jobs of secondary
    tiers, counted from the start, have ended on a rank. 0: do not wait."""

    jumped: set[str] = field(default_factory=set)
    """Ids of requests that skip tokens in this step, for a model runner that counts
    computed tokens itself."""
    report_end: bool = False
    """Report in `StepReport.ended` when all work of plans up to this one has ended."""
    host_aim: HostAim | None = None
    """A change of the number of host slots. No copy in flight uses those that are
    closed."""
    unmap_blocks: tuple[tuple[int, int], ...] = ()
    """(first, end) of device blocks whose memory is given back before the rest of the
    plan. No copy or forward pass in flight uses them."""

    @classmethod
    def empty(cls, seq: int) -> "StepPlan":
        """As `StepPlan(seq)` in a tenth of the time, since every step makes one.

        The caller must assign the slots and blocks of copies, which plans made here
        have in common.
        """
        plan: StepPlan = object.__new__(cls)
        plan.__dict__.update(_EMPTY.__dict__, seq=seq, secondary=[], jumped=set())
        return plan

    def check(self) -> None:
        """Assert the invariants of every plan that take constant time.

        Called by the scheduler and by the workers.
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
        """Assert the invariants of each copy.

        No two copies write to the same place, and none reads what another one fills
        without a fence between them.
        """
        stored, cleaned, loaded, ahead = map(list, self.pairs())
        filled_slots = [*stored[0], *cleaned[0]]
        filled_blocks = [*loaded[1], *ahead[1]]
        assert len({*filled_slots}) == len(filled_slots), "A slot is filled twice"
        assert len({*filled_blocks}) == len(filled_blocks), "A block is loaded twice"
        read_slots, read_blocks = {*loaded[0], *ahead[0]}, {*stored[1]}
        assert not read_slots & {*cleaned[0]}, "A load from a slot that is stored later"
        assert not {*cleaned[1]} & {*filled_blocks}, "A store from a loaded block"
        if read_slots & {*stored[0]} or read_blocks & {*filled_blocks}:
            assert self.load_after_stores == self.seq, "No fence between store and load"

    def pairs(self) -> tuple[tuple[list[int], list[int]], ...]:
        """Slots and blocks of stores, clean stores, loads and loads ahead."""
        return (
            (self.store_slots, self.store_blocks),
            (self.clean_slots, self.clean_blocks),
            (self.load_slots, self.load_blocks),
            (self.ahead_slots, self.ahead_blocks),
        )


_EMPTY = StepPlan(0)


class CopyTime(NamedTuple):
    """Duration of copies that ended together."""

    num_blocks: int
    """0 if the copies failed."""
    seconds: float


class OpenSlots(NamedTuple):
    """How many host slots a rank has open."""

    number: int
    """Of the plan's `HostAim` that it follows; 0 from the start."""
    num_slots: int
    """The first ones. All that was open stays so until the next `HostAim`."""
    is_done: bool
    """Whether it opens no more: all are open, or the next ones cannot be."""


class PrefillTime(NamedTuple):
    """Duration of a step that was mostly prefill."""

    num_tokens: int
    """0 if there was none."""
    seconds: float


class SecondaryResult(NamedTuple):
    """Result of a `SecondaryJob` on one rank."""

    number: int
    done: list[bool]
    """For each slot, whether the object, or the slot, is complete."""
    seconds: float
    evicted_bytes: int = 0
    """Bytes that the store evicted since the last report."""
    changed: tuple[int, ...] = ()
    """Slots that have changed since they were filled (see `verify`), and are
    unusable."""


Times = dict[tuple[str, int], CopyTime]
"""Durations of copies by kind and `seq` of their plan. Kinds are `store`, `clean`,
`load`, `load_ahead`, and `stall`: seconds that a forward pass waited for loads."""


@dataclass
class StepReport:
    """What the ranks report about a step; absent if there is nothing to report."""

    failed_load_seq: int | None = None
    """Lowest `seq` of a plan with a failed load on any rank."""
    failed_store_slots: dict[int, int] = field(default_factory=dict)
    """Host slot to `seq` of the store that failed to fill it on any rank."""
    lost_blocks: list[int] | None = None
    """A copy hangs on some rank, which copies no more: device blocks that its loads may
    still write to at any time."""
    prefill: PrefillTime = PrefillTime(0, 0.0)
    """From steps that waited for no load."""
    joins: dict[int, float] = field(default_factory=dict)
    """Seconds to launch a step in which requests joined with little to compute, by the
    bit length of its number of tokens. A lower bound for the duration of the step."""
    times: Times = field(default_factory=dict)
    """Times that were not reported before."""
    secondary: list[SecondaryResult] = field(default_factory=list)
    """Jobs that ended, once for each rank that reports it."""
    ended: list[int] = field(default_factory=list)
    """`seq` of plans with `report_end` whose work has ended, once for each rank that
    reports it."""
    open_slots: dict[int, OpenSlots] = field(default_factory=dict)
    """By rank: the host slots that it has open, if that has changed."""
    failures: Counter[str] = field(default_factory=Counter)
    """Steps in which copies failed, by kind (`store`, `load`), a layer did not wait for
    its loads (`layer_wait`), or that were given up (`hang`)."""


def merge_reports(reports: Iterable[StepReport | None]) -> StepReport | None:
    """One report for all ranks: a copy failed if it failed on any rank."""
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
        # A step takes as long as its slowest rank.
        merged.prefill = _slower(merged.prefill, report.prefill)
        for size, seconds in report.joins.items():
            merged.joins[size] = max(seconds, merged.joins.get(size, 0.0))
        merge_times(merged.times, report.times)
        merged.secondary += report.secondary
        merged.ended += report.ended
        merged.open_slots.update(report.open_slots)
        # Ranks usually fail in the same step.
        merged.failures |= report.failures
    return merged


def merge_times(times: Times, others: Times) -> None:
    """Merge `others` into `times`: the slowest time, and any failure."""
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
