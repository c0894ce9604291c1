# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers for one step, and what they tell it.

Workers carry out the plans in the order of their `seq`, each before the forward
pass of its step: first the stores, then the loads. A copy may still run when
later plans arrive; the three fences say which earlier copies must have ended
before memory that they use is used again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class StepPlan:
    """Copies of one step. `seq` starts at 1; a fence of 0 asks for nothing."""

    seq: int
    store_blocks: list[int] = field(default_factory=list)
    """Device block ids to copy from; pairs with `store_slots`."""
    store_slots: list[int] = field(default_factory=list)
    load_slots: list[int] = field(default_factory=list)
    """Host slots to copy from; pairs with `load_blocks`."""
    load_blocks: list[int] = field(default_factory=list)

    compute_after_stores: int = 0
    """The forward pass overwrites device blocks that stores of plans up to this
    `seq` (it may be this plan's own) still read."""
    load_after_stores: int = 0
    """The loads read slots, or overwrite device blocks, that stores of plans up
    to this `seq` use."""
    store_after_loads: int = 0
    """The stores overwrite slots that loads of plans up to this `seq` read."""


@dataclass
class StepReport:
    """Copies that failed on some rank. Absent from a step without failures."""

    failed_load_seq: int | None = None
    """Lowest `seq` of a plan with a failed load."""
    failed_store_slots: dict[int, int] = field(default_factory=dict)
    """Host slot to `seq` of the store that failed to fill it."""


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
    return merged
