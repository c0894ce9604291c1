# SPDX-License-Identifier: Apache-2.0
"""Writes slots to a secondary tier, in the background and before they are evicted."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import not_

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.plan import SecondaryJob
from vllm.v1.kv_tier.scheduling.admission import Admission, admission_from
from vllm.v1.kv_tier.scheduling.below import (
    SecondaryLayout,
    SecondaryTier,
    object_keys,
)
from vllm.v1.kv_tier.scheduling.due import Due
from vllm.v1.kv_tier.scheduling.jobs import Jobs
from vllm.v1.kv_tier.scheduling.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.stats import SecondaryStats

_MAX_BEGUN = 2_048
"""Most slots that a step begins to write to a tier: each takes some microseconds."""


class Spiller:
    """Chooses slots to write, and keeps them until all ranks have written them.

    Observes the slot table. It does not wait for a store that cannot keep up: slots
    that are evicted before their turn are not written.

    Args:
        index: Index of the tier.
        tier: The tier.
        layout: Limits.
        table: The slot table.
        jobs: Runs the jobs.
        stats: Counts blocks.

    """

    def __init__(
        self,
        index: int,
        tier: SecondaryTier,
        layout: SecondaryLayout,
        table: SlotTable,
        jobs: Jobs,
        stats: SecondaryStats,
    ) -> None:
        self._index = index
        self._layout = layout
        self._table = table
        self._jobs = jobs
        self.changed: Callable[[BlockHashWithGroupId], None] | None = None
        """Called with keys that the tier has from now on, or no longer, or whose write
        failed."""
        self._stats = stats
        self._asker = tier.asker
        self._admission: Admission | None = None
        if tier.store_from_use > 1:
            # Also counts uses of blocks that the host has evicted and that are computed
            # again.
            self._admission = admission_from(tier.store_from_use, layout.max_known)
        self._due = Due(layout.max_job * max(layout.block_sizes))
        # Keys that are being written, and keys that the tier has, or had recently;
        # oldest first.
        self._writing: set[BlockHashWithGroupId] = set()
        self._known: OrderedDict[BlockHashWithGroupId, None] = OrderedDict()
        table.listeners.append(self)

    # ----------------------------------------------------------- what is due

    def filled(self, slot: HostSlot) -> None:
        """A slot was filled. Its block was computed, which is a use."""
        key = slot.keys[0]
        if not (key in self._known or key in self._writing or self._jobs.is_detached):
            if (admission := self._admission) is not None:
                admission.use(key)
                if not admission.admits(key):
                    return
            self._due.add({key: slot})

    def loaded(self, slots: Sequence[HostSlot]) -> None:
        """Loads count as uses when their request is admitted, see `hit`."""

    def forgotten(self, slot: HostSlot) -> None:
        """The content of a slot is gone."""
        if self._due.remove(slot.keys[0]):
            self._stats.dropped_blocks += 1

    def hit(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Record that a request is admitted with device blocks of `keys`.

        Their slots, if any, may be due now.
        """
        if self._jobs.is_detached:
            return
        get, due, known = self._table.get, self._due.depths, self._known
        writing = self._writing
        # A hot path: each block of each hit.
        used = {
            key: slot
            for key in keys
            if not (key in known or key in due or key in writing)
            and (slot := get(key)) is not None
        }
        if used and self._admission is not None:
            admitted = self._admission.used(used)
            if len(admitted) < len(used):
                used = {key: used[key] for key in admitted}
        self._due.add(used)

    def is_below(self, key: BlockHashWithGroupId) -> None:
        """Record that the tier has `key`."""
        if self._jobs.is_detached:
            # Jobs in flight still end, but their results are not used.
            return
        self._due.remove(key)
        if key in self._known:
            self._known.move_to_end(key)
            return
        self._known[key] = None
        self._tell((key,))
        if len(self._known) > self._layout.max_known:
            self._tell(self._known.popitem(last=False)[:1])

    def is_gone(self, key: BlockHashWithGroupId) -> None:
        """Record that the tier does not have `key`, so it may be written again."""
        self._known.pop(key, None)
        self._tell((key,))

    def are_missing(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Record that the tier does not have these keys.

        A restarted server has lost everything, which must be written again.
        """
        known = self._known
        for key in keys:
            # A hot path: each new block of each prompt.
            if key in known:
                self.is_gone(key)

    def is_writing(self, key: BlockHashWithGroupId) -> bool:
        """Whether `key` is being written to the tier."""
        return key in self._writing

    def knows(self, key: BlockHashWithGroupId) -> bool:
        """Whether the tier is known to have `key`."""
        return key in self._known

    @property
    def num_due(self) -> int:
        """Number of slots that wait to be written."""
        return len(self._due)

    @property
    def num_writing(self) -> int:
        """Number of slots that are being written."""
        return len(self._writing)

    def _tell(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        if self.changed is not None:
            for key in keys:
                self.changed(key)

    def forget(self) -> None:
        """Forget everything, since the tier is not used any more."""
        self._due.clear()
        self._known.clear()

    # ---------------------------------------------------------------- writing

    def last_jobs(self, slots: Sequence[HostSlot], settled: int) -> list[SecondaryJob]:
        """Jobs for all that the tier is not known to have, at the end of an engine.

        Slots with the most uses come first.

        Args:
            slots: The host's slots, most valuable first.
            settled: As in `write`.

        """
        lacking = [
            slot
            for slot in slots
            if slot.store_seq <= settled
            and len(slot.keys) == 1
            and slot.keys[0] not in self._known
        ]
        if (admission := self._admission) is not None:
            lacking.sort(key=lambda slot: -admission.uses(slot.keys[0]))
        size = self._layout.max_job
        parts = [lacking[i : i + size] for i in range(0, len(lacking), size)]
        return [
            self._jobs.make(
                True, self._index, [s.keys[0] for s in part], [s.index for s in part]
            )
            for part in parts
        ]

    def write(self, settled: int) -> None:
        """Add jobs to write what is due to the next plan.

        Args:
            settled: Last plan whose stores will not turn out to be void.

        """
        room = min(_MAX_BEGUN, self._layout.max_writing - len(self._writing))
        if not self._due or room <= 0:
            return
        due = self._due.take(room, settled)
        keys, indices = list(due), [slot.index for slot in due.values()]
        size = self._layout.max_job
        for i in range(0, len(keys), size):
            self._write(keys[i : i + size], indices[i : i + size])

    def _write(self, keys: list[BlockHashWithGroupId], indices: list[int]) -> None:
        self._table.hold(self._index, indices, keys)
        self._writing.update(keys)

        def ended(done: Sequence[bool], seconds: float) -> None:
            self._writing.difference_update(keys)
            self._table.end_hold(self._index, indices, keys)
            # Requests that asked for these keys before got a negative answer.
            if written := list(compress(keys, done)):
                self._asker.has(object_keys(written))
                for key in written:
                    self.is_below(key)
            self._tell(compress(keys, map(not_, done)))
            self._stats.record_job("put", len(done), seconds)
            self._stats.stored_blocks += sum(done)
            self._stats.refused_blocks += len(done) - sum(done)

        self._jobs.add(True, self._index, keys, indices, ended)
