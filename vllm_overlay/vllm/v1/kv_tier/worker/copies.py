# SPDX-License-Identifier: Apache-2.0
"""The copies of a plan: what they do, and what must come before what.

`StepPlan` has the copies of a step, and fences: which earlier copies and forward passes
must have ended first. A `CopyOrder` enforces them, by running one copy after the other
or with the streams of a GPU (`worker.streams`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from vllm.logger import init_logger
from vllm.v1.kv_tier.copying.engine import CopyEngine, CopyEngines, Transfer
from vllm.v1.kv_tier.memory.regions import Region
from vllm.v1.kv_tier.plan import CopyTime, PrefillTime, StepPlan, Times
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.report import StepReportBuilder
from vllm.v1.kv_tier.worker.sharing import Peers
from vllm.v1.kv_tier.worker.slots import RankSlots

logger = init_logger(__name__)

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
            if num_blocks:
                begun = time.perf_counter()
                copy(_nothing)
                time_taken = CopyTime(num_blocks, time.perf_counter() - begun)
                self._times[kind, plan.seq] = time_taken
                if kind == "load":
                    self._times["stall", plan.seq] = time_taken
            if self._peers is not None:
                self._peers.publish_end(kind, plan.seq)

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


_T = TypeVar("_T")


class Copier:
    """Copies what plans ask for. Failures are reported, not raised.

    Loads that a step waits for are split by regions (parts), in the order of the
    layers. Other copies are split by blocks (chunks).

    Args:
        regions: KV memory of the rank, in the order of the layers.
        engines: Copy engines.
        report: Receives failures.
        slots: State of the slots.
        tuning: Sizes of parts and chunks.
        peers: The ranks that share the slots, if any.

    """

    def __init__(
        self,
        regions: Sequence[Region],
        engines: CopyEngines,
        report: StepReportBuilder,
        slots: RankSlots,
        tuning: RankTuning,
        peers: Peers | None = None,
    ) -> None:
        self.engines = engines
        self._peers = peers
        self._regions = regions
        self._report = report
        self._slots = slots
        self._tuning = tuning

    def copies(self, plan: StepPlan) -> Copies:
        """The copies of `plan`, for a `CopyOrder` to run."""
        num_loads = len(plan.load_slots)
        parts = self._parts(num_loads) if num_loads else []
        return Copies(
            partial(self.store, plan),
            partial(self.load, plan, parts),
            partial(self.load_ahead, plan),
            partial(self.clean, plan),
            parts,
            self._launches_long(num_loads),
        )

    def store(self, plan: StepPlan, between_parts: Callable[[], None]) -> None:
        """Store the blocks that the plan overwrites."""
        blocks, slots = plan.store_blocks, plan.store_slots
        after = plan.store_after_loads
        self._store_blocks("store", plan, blocks, slots, after, between_parts)

    def clean(self, plan: StepPlan, between_parts: Callable[[], None]) -> None:
        """Store blocks that later plans may overwrite."""
        blocks, slots = plan.clean_blocks, plan.clean_slots
        after = plan.clean_after_loads
        self._store_blocks("clean", plan, blocks, slots, after, between_parts)

    def load(
        self, plan: StepPlan, parts: list[range], between_parts: Callable[[], None]
    ) -> None:
        """Load what the plan's own step reads."""
        blocks, slots = plan.load_blocks, plan.load_slots
        if not slots:
            return
        with self._loading("load", plan.seq, slots):
            self._await_owner(plan)
            self._slots.check(slots)
            groups = _groups(plan, slots)
            transfer = self.engines.step_loads.loads(slots, blocks, *groups)
            for part in _each(parts, between_parts):
                transfer.copy(part)

    def load_ahead(self, plan: StepPlan, between_parts: Callable[[], None]) -> None:
        """Load what later steps read."""
        blocks, slots = plan.ahead_blocks, plan.ahead_slots
        if not slots:
            return
        with self._loading("load_ahead", plan.seq, slots):
            self._await_owner(plan)
            engine, size = self.engines.loads, self._tuning.load_chunk_bytes
            for chunk in _each(self._chunks(engine, len(slots), size), between_parts):
                self._slots.check(slots[chunk])
                groups = _groups(plan, slots[chunk])
                self._copy(engine.loads(slots[chunk], blocks[chunk], *groups))

    # ------------------------------------------------------------------ failures

    def _store_blocks(
        self,
        kind: str,
        plan: StepPlan,
        blocks: list[int],
        slots: list[int],
        after_loads: int,
        between_parts: Callable[[], None],
    ) -> None:
        if self._peers is not None and not self._peers.is_owner:
            return
        try:
            if slots and self._peers is not None:
                self._peers.wait_for_loads(after_loads)
            self._slots.begin_store(slots, *_groups(plan, slots))
            engine, size = self.engines.stores, self._tuning.store_chunk_bytes
            for chunk in _each(self._chunks(engine, len(slots), size), between_parts):
                groups = _groups(plan, slots[chunk])
                self._copy(engine.stores(blocks[chunk], slots[chunk], *groups))
                self._slots.mark_stored(slots[chunk])
        except Exception:
            logger.exception("KV tier: storing %d blocks failed.", len(slots))
            self._slots.mark_bad(slots)
            self._report.record_store_failure(kind, plan.seq, slots)

    @contextmanager
    def _loading(self, kind: str, seq: int, slots: list[int]) -> Iterator[None]:
        try:
            yield
        except Exception:
            logger.exception(
                "KV tier: loading %d blocks failed. What depends on them is "
                "computed again.",
                len(slots),
            )
            self._report.record_load_failure(kind, seq)

    def _await_owner(self, plan: StepPlan) -> None:
        """Wait until the slots of `plan` are filled, if another rank fills them."""
        if self._peers is not None:
            self._peers.wait_for_stores(plan)

    # ------------------------------------------------------------------ sizes

    def _copy(self, transfer: Transfer) -> None:
        transfer.copy(range(len(self._regions)))

    def _parts(self, num_blocks: int) -> list[range]:
        """Ranges of regions that a step waits for together, in layer order."""
        sizes = [num_blocks * region.block_bytes for region in self._regions]
        part_bytes = max(self._tuning.part_bytes, sum(sizes) // self._tuning.max_parts)
        parts, start, size = [], 0, 0
        for i, region_bytes in enumerate(sizes):
            size += region_bytes
            if size >= part_bytes or i + 1 == len(self._regions):
                parts.append(range(start, i + 1))
                start, size = i + 1, 0
        return parts

    def _chunks(
        self, engine: CopyEngine, num_blocks: int, num_bytes: int
    ) -> Iterator[slice]:
        """Slices of blocks that are copied together where no step waits."""
        block_bytes = sum(region.block_bytes for region in self._regions)
        launch_s = engine.launch_s(len(self._regions))
        size = num_bytes // max(block_bytes, 1)
        if launch_s:
            size = min(size, int(self._tuning.chunk_launch_s / launch_s))
        size = max(size, 1)
        return (slice(i, i + size) for i in range(0, num_blocks, size))

    def _launches_long(self, num_blocks: int) -> bool:
        if self._slots.checksums is not None:
            # They are compared before the load.
            return True
        if not num_blocks:
            return False
        pieces = num_blocks * len(self._regions)
        launch_s = self.engines.step_loads.launch_s(pieces)
        return launch_s > self._tuning.long_launch_s


def _groups(plan: StepPlan, slots: Sequence[int]) -> tuple[list[int], ...]:
    """The argument for an engine that says of which group each block is, if any."""
    if not plan.groups:
        return ()
    return ([plan.groups.get(slot, -1) for slot in slots],)


def _each(parts: Iterable[_T], between_parts: Callable[[], None]) -> Iterator[_T]:
    """Yield `parts`, and call `between_parts` between them."""
    for i, part in enumerate(parts):
        if i:
            between_parts()
        yield part
