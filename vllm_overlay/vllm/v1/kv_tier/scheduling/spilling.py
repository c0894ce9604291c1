# SPDX-License-Identifier: Apache-2.0
"""Writes slots to the tier below, behind the requests and before their eviction."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.scheduling.below import SecondaryLayout
from vllm.v1.kv_tier.scheduling.jobs import Jobs
from vllm.v1.kv_tier.scheduling.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning
from vllm.v1.kv_tier.stats import KVTierStats


class Spiller:
    """Chooses slots to write, and keeps them until all ranks have written them.

    Listens to the slot table. A store that cannot keep up is not waited for: what is
    due and evicted before its turn is not written.

    Args:
        layout: The tier below.
        table: The slots.
        jobs: Carries out.
        stats: Counts.
        tuning: When a slot is settled.

    """

    def __init__(
        self,
        layout: SecondaryLayout,
        table: SlotTable,
        jobs: Jobs,
        stats: KVTierStats,
        tuning: SchedulingTuning,
    ) -> None:
        self._layout = layout
        self._table = table
        self._jobs = jobs
        self._stats = stats
        self._tuning = tuning
        self._num_writing = 0
        # Keys that are to be written, and those that are there or were lately; the
        # oldest first.
        self._due: OrderedDict[BlockHashWithGroupId, None] = OrderedDict()
        self._written: OrderedDict[BlockHashWithGroupId, None] = OrderedDict()
        table.listeners.append(self)

    # ----------------------------------------------------------- what is due

    def filled(self, slot: HostSlot) -> None:
        """A slot has content, which is its first use."""
        if self._layout.store_from_use <= 1:
            self._is_due(slot)

    def loaded(self, slots: Sequence[HostSlot]) -> None:
        """Slots are used again."""
        for slot in slots:
            self._is_due(slot)

    def forgotten(self, slot: HostSlot) -> None:
        """The content of a slot is gone."""
        self._due.pop(slot.keys[0], None)

    def hit(self, blocks: Iterable[KVCacheBlock]) -> None:
        """A request is admitted with device blocks that it hit: so their slots, if they
        have some, are of use, too."""
        get = self._table.get
        for block in blocks:
            if (slot := get(block.block_hash)) is not None:  # type: ignore[arg-type]
                self._is_due(slot)

    def is_below(self, key: BlockHashWithGroupId) -> None:
        """The tier below has `key`."""
        self._due.pop(key, None)
        self._written[key] = None
        self._written.move_to_end(key)
        if len(self._written) > self._layout.max_known:
            self._written.popitem(last=False)

    def _is_due(self, slot: HostSlot) -> None:
        key = slot.keys[0]
        # A block with several keys was hashed before it was full.
        is_of_use = len(slot.keys) == 1 and not self._jobs.is_detached
        if is_of_use and key not in self._written:
            self._due[key] = None

    def forget(self) -> None:
        """Nothing is due any more."""
        self._due.clear()

    # ---------------------------------------------------------------- writing

    def write(self, seq: int) -> None:
        """Let plan `seq` begin to write what is due."""
        room = self._layout.max_writing - self._num_writing
        if not self._due or room <= 0:
            return
        # Until the outputs of all steps before have come, a load of theirs may turn
        # out to have failed, and what was computed since to be void.
        settled = seq - self._tuning.settled_steps
        slots = []
        for key in list(self._due)[:room]:
            slot = self._table.get(key)
            assert slot is not None, "what is forgotten is not due"
            if slot.store_seq <= settled and not self._table.is_held(slot):
                del self._due[key]
                slots.append(slot)
        if not slots:
            return
        for slot in slots:
            self._table.hold(slot)
        self._num_writing += len(slots)
        keys, indices = [s.keys[0] for s in slots], [s.index for s in slots]

        def ended(done: Sequence[bool], seconds: float) -> None:
            self._num_writing -= len(done)
            for index, key, is_there in zip(indices, keys, done):
                self._table.end_hold(index)
                if is_there:
                    self.is_below(key)
            self._stats.secondary_stored_blocks += sum(done)
            self._stats.secondary_refused_blocks += len(done) - sum(done)

        self._jobs.add(True, keys, indices, ended)
