# SPDX-License-Identifier: Apache-2.0
"""How many host slots the scheduler may fill.

Ranks open slots while the engine serves requests, each at its own pace, from the first
slot on. The slot table has those that every rank has open, but not more than an
operator wants. A rank that cannot open the next ones says so, and the engine goes on
with what all have.

With a pool, slots of neighbours follow the engine's own. The table has none of them.

To shrink, the table closes its last slots, some in each step. Their content is evicted.
When all ranks have reported the end of all work that may use them, a plan lets the
ranks give their memory back.
"""

from collections.abc import Callable

from vllm.v1.kv_tier.eviction.base import EvictionPolicy
from vllm.v1.kv_tier.eviction.policies import make_policy
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.plan import HostAim, OpenSlots, StepReport
from vllm.v1.kv_tier.scheduler.plan_builder import StepPlanBuilder
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.stats import KVTierStats

_MAX_OPENED = 65_536
"""Most slots that a step opens: a millisecond."""
_MAX_CLOSED = 512
"""Most slots that a step closes. Each may be evicted, in some microseconds."""

MakeTable = Callable[[KVTierLayout, EvictionPolicy, int], SlotTable]
"""Layout, policy, and the number of open slots."""


class HostSize:
    """Opens and closes slots of the slot table.

    Args:
        table: The slot table, with the slots open that every rank has open.
        builder: The plan that is being built.
        layout: The slots of the ranks.

    """

    def __init__(
        self, table: SlotTable, builder: StepPlanBuilder, layout: KVTierLayout
    ) -> None:
        num_slots, open_slots = layout.all_slots, layout.open_slots
        self.pause_s = layout.tuning.idle_pause_s
        """Seconds between steps of an engine that only waits for memory."""
        self._num_reserved = layout.num_slots
        self._can_shrink = not layout.are_shared and layout.pool is None
        # Idle steps open what a pool has, so that the first request finds it.
        self._moves_at_start = layout.pool is not None
        self.is_due = False
        """Whether `end_step` has something to do."""
        self._table = table
        self._builder = builder
        self._wanted = num_slots
        # What the ranks were last asked for, and what they said since.
        self._aim = HostAim(0, num_slots)
        self._ranks = {
            rank: OpenSlots(0, num, num == num_slots)
            for rank, num in enumerate(open_slots)
        }
        self.num_open = min(open_slots, default=num_slots)
        """Slots that all ranks have open, at least: the first ones."""
        # The plan after which ranks no longer use closed slots, and how many of them
        # have not reported its end yet.
        self._fence, self._num_awaited = 0, 0
        self._is_closed = False

    @property
    def is_moving(self) -> bool:
        """Whether a change of the size is under way. The start is one with a pool."""
        if self._is_closed or self._wanted != self._aim.num_slots:
            return not self._is_closed
        states = self._ranks.values()
        is_asked = self._aim.number > 0 or self._moves_at_start
        return is_asked and (self.is_due or not all(map(self._is_done, states)))

    def resize(self, num_slots: int) -> dict[str, int]:
        """Let the host have so many slots from now on, as far as ranks can open them.

        Args:
            num_slots: Less than 1 is 1, and more than were reserved as many as these.

        Returns:
            The slots that it should have, and those that are open now; `refused` if
            several ranks map the memory.

        """
        if not self._can_shrink:
            return {"refused": 1}
        self._wanted = max(1, min(num_slots, self._num_reserved))
        self._fence = self._num_awaited = 0
        self._table.expect(self._wanted)
        self.is_due = not self._is_closed
        return {"host_slots": self._wanted, "open_slots": self._table.num_slots}

    def take_report(self, report: StepReport) -> None:
        """Take in how many slots ranks have open, and which plans have ended."""
        if not (report.open_slots or self._num_awaited):
            return
        self._ranks.update(report.open_slots)
        states = self._ranks.values()
        if all(each.number == self._aim.number for each in states):
            # They may have more that they are about to close.
            num_open = min(each.num_slots for each in states)
            self.num_open = min(num_open, self._aim.num_slots)
        if self._num_awaited:
            self._num_awaited -= report.ended.count(self._fence)
        self.is_due = not self._is_closed

    def end_step(self) -> None:
        """Open or close slots, after the plan of the step."""
        table = self._table
        end = min(self._wanted, self.num_open, self._num_reserved)
        if table.num_slots < end:
            table.open(min(end, table.num_slots + _MAX_OPENED))
        elif table.num_slots > end:
            table.close_down(end, _MAX_CLOSED)
        self.is_due = table.num_slots != end
        if not self.is_due and self._wanted != self._aim.num_slots:
            self.is_due = self._wanted < self._aim.num_slots and not self._may_give()
            if not self.is_due:
                self._ask()

    def _may_give(self) -> bool:
        """Whether no rank uses closed slots any more."""
        if not self._fence:
            self._fence, self._num_awaited = self._builder.seq, len(self._ranks)
            self._builder.report_end()
        return self._num_awaited <= 0

    def _ask(self) -> None:
        """Let the ranks open or close slots, with the next plan."""
        self._aim = HostAim(self._aim.number + 1, self._wanted)
        self.num_open = min(self.num_open, self._wanted)
        self._builder.aim_host(self._aim)

    def _is_done(self, state: OpenSlots) -> bool:
        return state.number == self._aim.number and state.is_done

    def close(self) -> None:
        """Close all slots for ever, since a rank copies no more."""
        self._table.close()
        self._is_closed, self.is_due = True, False

    def report(self, stats: KVTierStats) -> None:
        """Write what is in the slot table now to `stats`."""
        table = self._table
        stats.slots_total, stats.slots_used = table.num_slots, len(table)
        stats.reserved_slots = self._num_reserved
        stats.evicted_slots, table.num_evicted = table.num_evicted, 0


def make_host(
    layout: KVTierLayout, builder: StepPlanBuilder, make_table: MakeTable
) -> tuple[SlotTable, HostSize]:
    """The slot table of a tier, and who changes its size."""
    policy = make_policy(layout.config.eviction_policy, layout.num_slots)
    num_open = min(layout.open_slots, default=layout.num_slots)
    table = make_table(layout, policy, num_open)
    return table, HostSize(table, builder, layout)
