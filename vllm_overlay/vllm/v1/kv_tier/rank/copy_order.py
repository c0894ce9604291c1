# SPDX-License-Identifier: Apache-2.0
"""What must come before what: copies and compute of one rank, in any place.

`StepPlan` says which copies a step asks for, and its fences which earlier copies and
forward passes must have ended before. A `CopyOrder` makes that true: by running one
copy after the other here, or on the streams of a GPU (`rank.streams`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.kv_tier.plan import CopyTime, PrefillTime, StepPlan, Times
from vllm.v1.kv_tier.rank.peers import Peers

Copy = Callable[[Callable[[], None]], None]
"""Queues copies on the current stream, part by part, and calls its argument between
one part and the next. Never raises: a failure is the business of whoever wrote it."""


@dataclass
class Copies:
    """What the copies of one plan do, in the order of their names."""

    store: Copy
    load: Copy
    load_ahead: Copy
    clean: Copy
    load_parts: Sequence[range] = ()
    """Regions of each part of `load`."""
    load_launches_long: bool = False
    """Whether the launch of `load` takes the CPU as long as that of many layers."""


class CopyHangs(Exception):
    """A copy does not end, and nothing can make it."""


class CopyOrder(ABC):
    """Runs the copies of a plan so that its fences hold."""

    @abstractmethod
    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        """Queue the copies, before this step's compute.

        Args:
            plan: Whose copies to run.
            copies: How.
            layerwise: Let the attention layers wait for the loads, not the step.

        Raises:
            CopyHangs: A copy of this plan or of an earlier one. Nothing but
                `give_up` may be called then, and `end_step`.

        """

    def give_up(self) -> dict[int, list[int]]:
        """Launch no more copies.

        Returns:
            Device blocks that loads may still write to, at any time, by plan.

        """
        return {}

    def end_step(self) -> bool:
        """The step's compute is queued.

        Returns:
            Whether all layers waited for what they had to.

        """
        return True

    @abstractmethod
    def have_ended(self, stores: int, loads: int) -> bool:
        """Whether all copies that began have ended, of these plans.

        Args:
            stores: Stores of plans up to this `seq`.
            loads: Loads, ahead or not, of plans up to this `seq`.

        """

    @abstractmethod
    def finish(self) -> None:
        """Wait for the end of all copies that were queued."""

    def take_prefill_time(self, num_tokens: int) -> PrefillTime:
        """How long a step took that has ended since the last call, if one has.

        Args:
            num_tokens: Of this step, if it is one that says what prefill costs.

        """
        return PrefillTime(0, 0.0)

    def take_copy_times(self) -> Times:
        """Of the copies, and of the waits for loads, that ended since the last call."""
        return {}


def _nothing() -> None:
    pass


class InOrder(CopyOrder):
    """For devices without streams: every copy ends before the next begins.

    Args:
        peers: Who is told of the ends, if anybody.

    """

    def __init__(self, peers: Peers | None = None) -> None:
        self._peers = peers
        self._times: Times = {}
        self._prefill = PrefillTime(0, 0.0)
        # Tokens of the step that is being computed, and when it began.
        self._begun: tuple[int, float] | None = None

    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        for kind, copy, num_blocks in (
            ("store", copies.store, len(plan.store_slots)),
            ("load", copies.load, len(plan.load_slots)),
            ("load_ahead", copies.load_ahead, len(plan.ahead_slots)),
            ("clean", copies.clean, len(plan.clean_slots)),
        ):
            begun = time.perf_counter()
            copy(_nothing)
            seconds = time.perf_counter() - begun
            if self._peers is not None:
                self._peers.ended(kind, plan.seq)
            if num_blocks:
                time_taken = CopyTime(num_blocks, seconds)
                self._times[kind, plan.seq] = time_taken
                if kind == "load":
                    self._times["stall", plan.seq] = time_taken

    def end_step(self) -> bool:
        # Nothing is queued here: the step has been computed.
        if self._begun is not None:
            (num_tokens, begun), self._begun = self._begun, None
            self._prefill = PrefillTime(num_tokens, time.perf_counter() - begun)
        return True

    def have_ended(self, stores: int, loads: int) -> bool:
        return True

    def finish(self) -> None:
        pass

    def take_prefill_time(self, num_tokens: int) -> PrefillTime:
        taken, self._prefill = self._prefill, PrefillTime(0, 0.0)
        self._begun = (num_tokens, time.perf_counter()) if num_tokens else None
        return taken

    def take_copy_times(self) -> Times:
        times, self._times = self._times, {}
        return times
