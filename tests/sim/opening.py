# SPDX-License-Identifier: Apache-2.0
"""Ranks that open and close host slots, each at its own pace.

A plan may use a slot only while every rank has it open, and a rank closes none that a
copy in flight uses. Some ranks are refused memory beyond a limit.
"""

from collections.abc import Collection
from random import Random

from vllm.v1.kv_tier.keeper.client import Membership
from vllm.v1.kv_tier.plan import HostAim, OpenSlots, StepPlan
from vllm.v1.kv_tier.worker.report import StepReportBuilder

from .content import Violation


class Opening:
    """The slots that ranks have open.

    Args:
        seed: Of their pace and luck.
        num_slots: Slots that are reserved.
        num_ranks: How many ranks there are.

    """

    def __init__(self, seed: int, num_slots: int, num_ranks: int = 3) -> None:
        self.num_ended = num_ranks
        """Ranks that end a plan with the one whose copies are simulated, and it."""
        self.num_closed = self.num_opened = 0
        self._rng = rng = Random(seed)
        self._num_slots = num_slots
        self._pieces = [rng.randint(1, 4) for _ in range(num_ranks)]
        self._limits = [
            rng.randint(1, num_slots) if rng.random() < 0.2 else num_slots
            for _ in range(num_ranks)
        ]
        self._aims = [HostAim(0, num_slots)] * num_ranks
        self.open = [min(size, num_slots) for size in self._pieces]
        self._states = [
            OpenSlots(0, num_open, num_open == num_slots) for num_open in self.open
        ]

    def begin_step(self, plan: StepPlan, in_flight: Collection[int]) -> None:
        """Check a plan, and take its aim.

        Args:
            plan: It is about to be carried out.
            in_flight: Slots that copies and jobs of earlier plans still use.

        """
        used = {slot for slots, _ in plan.pairs() for slot in slots}
        used.update(slot for job in plan.secondary for slot in job.slots)
        if max(used, default=0) >= min(self.open):
            raise Violation("open", f"{plan} with {self.open} slots open")
        aim = plan.host_aim
        if aim is not None:
            if max({*used, *in_flight}, default=0) >= aim.num_slots:
                raise Violation("open", f"{plan} closes what {in_flight} uses")
            self._aims = [aim] * len(self._aims)

    def run(self, rush: bool) -> set[int]:
        """Let ranks open and close. Returns slots that lost content."""
        lost: set[int] = set()
        for rank, aim in enumerate(self._aims):
            while rush or self._rng.random() < 0.3:
                if not self._move(rank, aim, lost):
                    break
        return lost

    def report(self, report: StepReportBuilder) -> None:
        """Let ranks report, if something has changed."""
        for rank, aim in enumerate(self._aims):
            state = self._state(rank, aim)
            if state != self._states[rank] and self._rng.random() < 0.5:
                self._states[rank] = state
                report.record_open(rank, state)

    def _move(self, rank: int, aim: HostAim, lost: set[int]) -> bool:
        """A rank opens or closes one piece. Returns whether it did."""
        size, num_open = self._pieces[rank], self.open[rank]
        if num_open < aim.num_slots:
            end = self._end_of(num_open, size)
            if end > self._limits[rank]:
                return False
            self.num_opened += 1
        else:
            end = (num_open - 1) // size * size
            if end < aim.num_slots:
                return False
            lost.update(range(end, num_open))
            self.num_closed += 1
        self.open[rank] = end
        return True

    def _end_of(self, first: int, size: int) -> int:
        """Where the next piece ends, if so many slots are open."""
        return min(first + size, self._num_slots)

    def _state(self, rank: int, aim: HostAim) -> OpenSlots:
        size, num_open = self._pieces[rank], self.open[rank]
        if num_open < aim.num_slots:
            is_done = self._end_of(num_open, size) > self._limits[rank]
        else:
            is_done = (num_open - 1) // size * size < aim.num_slots
        return OpenSlots(aim.number, num_open, is_done)


class RingOpening(Opening):
    """The same for ranks of an engine in a pool, which open its own slots first, and
    then those of its neighbours.

    Args:
        seed: Of their pace and luck.
        member: The engine's part of the pool.
        num_ranks: How many ranks there are. All of them are simulated.

    """

    def __init__(self, seed: int, member: Membership, num_ranks: int) -> None:
        self._of_each, self._stride = member.num_slots, member.stride
        super().__init__(seed, member.end, num_ranks)
        self.num_ended = 1
        self.open = [min(num_open, self._of_each) for num_open in self.open]
        self._states = [OpenSlots(0, n, n == member.end) for n in self.open]

    def _end_of(self, first: int, size: int) -> int:
        number, slot = divmod(first, self._stride)
        if slot == self._of_each:
            number, slot = number + 1, 0
        return number * self._stride + min(slot + size, self._of_each)
