# SPDX-License-Identifier: Apache-2.0
"""Writes slots to a secondary tier, behind the requests and before their eviction."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from operator import attrgetter

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.plan import SecondaryJob
from vllm.v1.kv_tier.scheduler.admission import Admission, admission_from
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs
from vllm.v1.kv_tier.scheduler.secondary.tier import PoolView, Tier
from vllm.v1.kv_tier.scheduler.slots import HostSlot

_store_seq = attrgetter("store_seq")
_LAST = sys.maxsize
"""Deeper than any prompt."""


class WriteQueue:
    """Slots to write, beginnings of prompts first.

    A block is useless without all blocks before it in its prompt. A store that cannot
    keep up should therefore store the same part of each prompt, and not prompts with
    holes. In order of age, the oldest slots would also be evicted first, so such a
    store would get every other block.

    Args:
        span: Tokens of a prompt within which blocks rank equally, oldest first.

    """

    def __init__(self, span: int) -> None:
        self._span = span
        self.depths: dict[BlockHashWithGroupId, int] = {}
        """Depth by key of these slots. Each block of each hit is looked up in it."""
        self._slots: defaultdict[int, dict[BlockHashWithGroupId, HostSlot]]
        self._slots = defaultdict(dict)

    def __len__(self) -> int:
        return len(self.depths)

    def add(self, slots: Mapping[BlockHashWithGroupId, HostSlot]) -> None:
        """Add slots that are not queued yet.

        Slots with several keys, of blocks that were hashed before they were full, are
        left out.
        """
        span, depths, at_depth = self._span, self.depths, self._slots
        for key, slot in slots.items():
            # A hot path: each block that is used again passes here.
            if len(slot.keys) > 1:
                continue
            depths[key] = depth = (slot.num_tokens or 0) // span
            at_depth[depth][key] = slot

    def remove(self, key: BlockHashWithGroupId) -> bool:
        """Remove `key`. Returns whether it was queued."""
        if (depth := self.depths.pop(key, None)) is None:
            return False
        slots = self._slots[depth]
        del slots[key]
        if not slots:
            del self._slots[depth]
        return True

    def put_last(self, key: BlockHashWithGroupId) -> None:
        """Write `key` after all others, if it is queued."""
        if (depth := self.depths.get(key)) is not None:
            slot = self._slots[depth][key]
            self.remove(key)
            self.depths[key] = _LAST
            self._slots[_LAST][key] = slot

    def clear(self) -> None:
        """Remove all slots."""
        self.depths.clear()
        self._slots.clear()

    def take(self, num: int, settled: int) -> dict[BlockHashWithGroupId, HostSlot]:
        """Remove and return the next slots to write.

        Args:
            num: Most slots to take.
            settled: The last plan whose stores may be written. At each depth, slots are
                taken up to the first that was stored later.

        """
        taken: dict[BlockHashWithGroupId, HostSlot] = {}
        for depth in sorted(self._slots):
            if len(taken) == num:
                break
            slots = self._slots[depth]
            seqs = map(_store_seq, islice(slots.values(), num - len(taken)))
            num_settled = len(list(takewhile(settled.__ge__, seqs)))
            some = dict(islice(slots.items(), num_settled))
            for key in some:
                del slots[key], self.depths[key]
            taken |= some
            if not slots:
                del self._slots[depth]
        return taken


_MAX_BEGUN = 2_048
"""Most slots that a step begins to write to a tier: each takes some microseconds."""


class SecondaryWriter:
    """Chooses slots to write, and keeps them until all ranks have written them.

    Observes the slot table. It does not wait for a store that cannot keep up: slots
    that are evicted before their turn are not written.
    """

    def __init__(self, tier: Tier, pool: PoolView, jobs: SecondaryJobs) -> None:
        self.tier = tier
        self._layout = layout = pool.layout
        self._table = pool.table
        self._jobs = jobs
        self._admission: Admission | None = None
        if (from_use := tier.settings.store_from_use) > 1:
            # Also counts uses of blocks that the host has evicted and that are computed
            # again.
            self._admission = admission_from(from_use, layout.max_known)
        self.due = WriteQueue(layout.max_job * max(layout.block_sizes))
        """Slots that wait to be written. Others only look at it."""
        self.writing: set[BlockHashWithGroupId] = set()
        """Keys that are being written. Others only look at it."""
        # What the tier has is not due.
        self._known = tier.presence.keys
        tier.presence.listeners.append(self._on_changed)
        pool.table.listeners.append(self)

    # ----------------------------------------------------------- what is due

    def on_filled(self, slot: HostSlot) -> None:
        """A slot was filled. Its block was computed, which is a use."""
        key = slot.keys[0]
        if not (key in self._known or key in self.writing or self._jobs.is_detached):
            if (admission := self._admission) is not None:
                admission.record_use(key)
                if not admission.admits(key):
                    return
            self.due.add({key: slot})

    def on_loaded(self, slots: Sequence[HostSlot]) -> None:
        """Loads count as uses when their request is admitted, see `record_hit`."""

    def on_forgotten(self, slot: HostSlot) -> None:
        """The content of a slot is gone."""
        if self.due.remove(slot.keys[0]):
            self.tier.stats.dropped_blocks += 1

    def record_hit(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Record that a request is admitted with device blocks of `keys`.

        Their slots, if any, may be due now.
        """
        if self._jobs.is_detached:
            return
        get, due, known = self._table.get, self.due.depths, self._known
        writing = self.writing
        # A hot path: each block of each hit.
        used = {
            key: slot
            for key in keys
            if not (key in known or key in due or key in writing)
            and (slot := get(key)) is not None
        }
        if used and self._admission is not None:
            admitted = self._admission.record_uses(used)
            if len(admitted) < len(used):
                used = {key: used[key] for key in admitted}
        self.due.add(used)

    def put_last(self, key: BlockHashWithGroupId) -> None:
        """Write `key` after all others, if it is due."""
        self.due.put_last(key)

    def _on_changed(self, key: BlockHashWithGroupId) -> None:
        if key in self._known:
            self.due.remove(key)

    # ---------------------------------------------------------------- writing

    def _make_jobs(
        self, slots: Sequence[HostSlot]
    ) -> Iterator[tuple[SecondaryJob, list[BlockHashWithGroupId]]]:
        """Jobs that write these slots, each with its keys."""
        size = self._layout.max_job
        for i in range(0, len(slots), size):
            part = slots[i : i + size]
            keys = [slot.keys[0] for slot in part]
            indices = [slot.index for slot in part]
            yield self._jobs.make(True, self.tier.index, keys, indices), keys

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
            lacking.sort(key=lambda slot: -admission.num_uses(slot.keys[0]))
        return [job for job, _ in self._make_jobs(lacking)]

    def write(self, settled: int) -> None:
        """Add jobs to write what is due to the next plan.

        Args:
            settled: Last plan whose stores will not turn out to be void.

        """
        room = min(_MAX_BEGUN, self._layout.max_writing - len(self.writing))
        if self.due and room > 0:
            slots = list(self.due.take(room, settled).values())
            for job, keys in self._make_jobs(slots):
                self._begin(job, keys)

    def _begin(self, job: SecondaryJob, keys: list[BlockHashWithGroupId]) -> None:
        tier = self.tier
        self._table.hold(tier.index, job.slots, keys)
        self.writing.update(keys)

        def ended(done: Sequence[bool], seconds: float) -> None:
            self.writing.difference_update(keys)
            self._table.end_hold(tier.index, job.slots, keys)
            tier.record_writes(keys, done, seconds)

        self._jobs.add(job, ended)
