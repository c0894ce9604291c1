# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers for one step, and what they tell it.

Every step has a plan. Workers take the plans in the order of their `seq`. A copy
may still run when later plans arrive; the fences say which earlier copies and
forward passes must have ended before memory that they use is used again.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


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


Times = dict[tuple[str, int], tuple[int, float]]
"""By kind and `seq` of the plan: blocks of copies that ended (0: they failed), and the
seconds that they took. Kinds are `store`, `clean`, `load`, `load_ahead`; and `stall`:
the seconds that a forward pass waited for loads."""


@dataclass
class StepReport:
    """What the scheduler must hear of. Absent from a step with nothing to tell."""

    failed_load_seq: int | None = None
    """Lowest `seq` of a plan with a failed load on some rank."""
    failed_store_slots: dict[int, int] = field(default_factory=dict)
    """Host slot to `seq` of the store that failed to fill it on some rank."""
    loads: tuple[int, float] = (0, 0.0)
    """Blocks of loads ahead that ended, and the seconds that they took."""
    lost_blocks: list[int] | None = None
    """A copy hangs on some rank, and that rank copies no more: device blocks that its
    loads may still write to, at any time."""
    prefill: tuple[int, float] = (0, 0.0)
    """Tokens of steps that were mostly prefill and waited for no load, and the
    seconds that they took."""
    joins: dict[int, float] = field(default_factory=dict)
    """Seconds to launch a step in which requests joined with little to compute, which
    is less than it took, by the bit length of its number of tokens."""
    times: Times = field(default_factory=dict)
    """What a rank has not told of before."""
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
        merged.loads = _slower(merged.loads, report.loads)
        merged.prefill = _slower(merged.prefill, report.prefill)
        for size, seconds in report.joins.items():
            merged.joins[size] = max(seconds, merged.joins.get(size, 0.0))
        merge_times(merged.times, report.times)
        # Ranks mostly fail together.
        merged.failures |= report.failures
    return merged


def merge_times(times: Times, others: Times) -> None:
    """Take what `others` says into `times`: the slowest counts, and every failure."""
    for key, (num_blocks, seconds) in others.items():
        known = times.get(key, (num_blocks, seconds))
        times[key] = min(known[0], num_blocks), max(known[1], seconds)


def _slower(a: tuple[int, float], b: tuple[int, float]) -> tuple[int, float]:
    return a if a[1] * max(b[0], 1) >= b[1] * max(a[0], 1) and a[0] else b
