# SPDX-License-Identifier: Apache-2.0
"""The interface that orders the copies and the compute of one rank.

`StepPlan` has the copies of a step, and fences: which earlier copies and forward passes
must have ended first. A `CopyOrder` enforces them, by running one copy after the other
or with the streams of a GPU (`rank.streams`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.kv_tier.plan import CopyTime, PrefillTime, StepPlan, Times
from vllm.v1.kv_tier.rank.peers import Peers

Copy = Callable[[Callable[[], None]], None]
"""Queues copies on the current stream, part by part, and calls its argument between
parts. Never raises; it reports failures itself."""


@dataclass
class Copies:
    """The copies of one plan, in the order in which they take effect."""

    store: Copy
    load: Copy
    load_ahead: Copy
    clean: Copy
    load_parts: Sequence[range] = ()
    """Regions of each part of `load`."""
    load_launches_long: bool = False
    """Whether launching `load` takes the CPU longer than a step should be held up."""


class CopyHangs(Exception):
    """A copy does not end, and cannot be stopped."""


class CopyOrder(ABC):
    """Runs the copies of plans so that their fences hold."""

    @abstractmethod
    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        """Queue the copies of a step before its compute.

        Args:
            plan: The step's plan.
            copies: Its copies.
            layerwise: Let attention layers wait for their loads, instead of the step
                for all.

        Raises:
            CopyHangs: A copy of this or an earlier plan does not end. Then only
                `give_up` and `end_step` may be called.

        """

    def give_up(self) -> dict[int, list[int]]:
        """Launch no more copies.

        Returns:
            By plan, device blocks that loads may still write to at any time.

        """
        return {}

    def end_step(self) -> bool:
        """Note that the step's compute is queued.

        Returns:
            Whether all layers waited for their loads.

        """
        return True

    @abstractmethod
    def have_ended(self, stores: int, loads: int) -> bool:
        """Whether all copies of these plans that began have ended.

        Args:
            stores: Last plan whose stores count.
            loads: Last plan whose loads count, loads ahead included.

        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until all queued copies have ended."""

    def take_prefill_time(self, num_tokens: int) -> PrefillTime:
        """Start timing a step; return the time of one that ended since the last call.

        Args:
            num_tokens: Tokens of the new step if its time tells what prefill costs,
                else 0.

        """
        return PrefillTime(0, 0.0)

    def take_copy_times(self) -> Times:
        """Times of copies and of waits for loads that ended since the last call."""
        return {}


def _nothing() -> None:
    pass


class InOrder(CopyOrder):
    """For devices without streams: each copy ends before the next begins.

    Args:
        peers: The ranks that share the slots, if any.

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
        # Without streams, the step has been computed by now.
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
