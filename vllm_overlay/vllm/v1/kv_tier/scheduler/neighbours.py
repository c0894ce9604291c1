# SPDX-License-Identifier: Apache-2.0
"""What the neighbours of an engine in a pool have of the prompts that it is to compute.

A block of a neighbour stands in a prefix hit as a `HostSlot` whose index lies behind
the engine's own slots. All ranks have it open. It is pinned from the look on: until the
end of the step, if it is not loaded, else until all ranks have ended the plan that
loads it.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.keeper.client import Membership
from vllm.v1.kv_tier.keeper.partition import Partition, Rows, Slots, mix, rows_of
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.scheduler.host_writer import HostWriter
from vllm.v1.kv_tier.scheduler.secondary.lookup import LoadFilter, PromptLookup
from vllm.v1.kv_tier.scheduler.secondary.tier import Wanted
from vllm.v1.kv_tier.scheduler.shared_slots import Copy
from vllm.v1.kv_tier.scheduler.slots import HostSlot
from vllm.v1.request import Request

# Steps in a row in which a look may find a neighbour's lock busy before it is a miss.
_MAX_BUSY = 3
# Blocks of a prompt that are looked for at once.
_PART = 512
# Device blocks that a step looks at, if some were loaded from neighbours.
_MAX_FORGOTTEN = 64
# Slots whose loads have failed and that are remembered, 8 MiB or so.
_MAX_FAILED = 1 << 16


class Neighbours:
    """Finds, pins and unpins slots of neighbours.

    Args:
        member: The partitions.
        lookup: Finds what the engine itself lacks of a prompt.
        max_looks: Most blocks of prompts that a step looks up.

    """

    def __init__(
        self, member: Membership, lookup: PromptLookup, max_looks: int
    ) -> None:
        self._identity, self._reader = member.identity, member.number
        # Their first slots, and they themselves.
        self._partitions = member.neighbours
        self._stride = member.stride
        self.num_open = member.end
        """Number of slots that all ranks have open, the first ones."""
        self._lookup = lookup
        self._max_looks = self._num_left = max_looks
        self.found: dict[BlockHashWithGroupId, HostSlot] = {}
        """What this step has found, by key."""
        # Pinned slots by index, and for how many plans and looks.
        self._pinned: dict[int, int] = {}
        # By partition, what is to be unpinned, if there is some.
        self._over: dict[Partition, set[int]] = {}
        # By plan, what it reads.
        self._reads: dict[int, list[int]] = {}
        # Slots that could not be read, with the keys that they had then.
        self._failed: dict[int, bytes] = {}
        self._num_busy = 0
        self._has_left = False

    def look_up(self, request: Request, loadable: LoadFilter | None) -> bool:
        """Look for the blocks of a prompt that the engine itself lacks.

        Looks up no more of it than a step may, and nothing behind a part of which
        there is no block.

        Args:
            request: A request in the queue.
            loadable: Says what may be loaded for it; None for everything.

        Returns:
            Whether it must wait for the next step, since this one has looked enough, or
            a neighbour is busy.

        """
        if self._has_left or not self._partitions or not request.block_hashes:
            return False
        begin, end = 0, self._lookup.num_tokens(request)
        is_whole = self._num_left == self._max_looks
        is_busy = False
        while begin < end:
            if self._num_left <= 0:
                return not is_whole
            most = min(self._num_left, _PART)
            begin, num, missing = self._lookup.find_missing(
                request, begin, most, loadable
            )
            self._num_left -= num
            wanted = [each for each in missing if each[0] not in self.found]
            num_found = 0
            if wanted:
                num_found, was_busy = self._find(wanted)
                is_busy |= was_busy
            if num and num_found == 0 and len(wanted) == num:
                break
        self._num_busy = self._num_busy + 1 if is_busy else 0
        return is_busy and self._num_busy <= _MAX_BUSY

    def _find(self, wanted: Sequence[Wanted]) -> tuple[int, bool]:
        """Pin what neighbours have of `wanted`. Returns how many that are, and whether
        one was busy."""
        rows, is_busy = rows_of([key for key, _ in wanted]), False
        missing, mixed = np.arange(len(wanted)), mix(rows)
        for first, partition in self._shared():
            candidates, slots = self._seen(
                first, partition, rows[missing], mixed[missing]
            )
            if not len(slots):
                continue
            # A block may be there twice for a while.
            candidates, firsts = np.unique(candidates, return_index=True)
            places, slots = missing[candidates], slots[firsts]
            pinned = partition.pin(rows[places], slots, self._reader, self._identity)
            if pinned is None:
                is_busy = True
                continue
            places, slots = places[pinned], slots[pinned]
            self._over.get(partition, set()).difference_update(slots.tolist())
            found = [wanted[i] for i in places.tolist()]
            self._add(found, (slots + first).tolist())
            missing = np.setdiff1d(missing, places, assume_unique=True)
        return len(wanted) - len(missing), is_busy

    def _shared(self) -> Iterator[tuple[int, Partition]]:
        """Neighbours of the same identity that all ranks have open, at least in part,
        and their first slots."""
        for first, partition in self._partitions:
            if first >= self.num_open:
                break
            if partition.identity == self._identity:
                partition.open()
                yield first, partition

    def _seen(
        self, first: int, partition: Partition, rows: Rows, mixed: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], Slots]:
        """What a neighbour seems to have that can be loaded: indices of `rows`, and
        slots."""
        found, slots = partition.find(rows, mixed)
        are_good = slots < self.num_open - first
        if self._failed:
            are_good &= ~self._have_failed(slots + first, rows[found])
        return found[are_good], slots[are_good]

    def find_copies(self, keys: Sequence[BlockHashWithGroupId]) -> list[Copy]:
        """Which blocks neighbours seem to have, each once. Pins nothing."""
        rows = rows_of(keys)
        mixed, copies = mix(rows), dict[int, Copy]()
        for first, partition in self._shared():
            found, slots = self._seen(first, partition, rows, mixed)
            for i, slot in zip(found.tolist(), slots.tolist()):
                copies[i] = Copy(keys[i], partition, slot)
        return [*copies.values()]

    def _have_failed(self, indices: Slots, rows: Rows) -> NDArray[np.bool_]:
        had = map(self._failed.get, indices.tolist())
        return np.array([key == row.tobytes() for key, row in zip(had, rows)], np.bool_)

    def mark_failed(self, seq: int) -> None:
        """A load of plan `seq` or of a later one failed: stop finding the neighbours'
        blocks that these plans read."""
        for since, indices in self._reads.items():
            if since < seq:
                continue
            for index in indices:
                partition, number = self.place_of(index)
                self._failed[index] = partition.key_of(number)
        for index in [*islice(self._failed, max(len(self._failed) - _MAX_FAILED, 0))]:
            del self._failed[index]

    def _add(
        self,
        wanted: Sequence[tuple[BlockHashWithGroupId, int]],
        indices: Sequence[int],
    ) -> None:
        for (key, num_tokens), index in zip(wanted, indices):
            self.found[key] = HostSlot(index, (key,), num_tokens, store_seq=0)
            self._pinned[index] = self._pinned.get(index, 0) + 1

    def record_plan(self, plan: StepPlan, num_own: int) -> int:
        """Note what a plan loads. Returns how many slots of neighbours it reads.

        Args:
            plan: The plan of this step.
            num_own: Slots from 0 to this one are of the engine itself.

        """
        loaded = (*plan.load_slots, *plan.ahead_slots)
        if not loaded or max(loaded) < num_own:
            # A hot path: mostly all are.
            return 0
        read = [index for index in loaded if index >= num_own]
        for index in read:
            self._pinned[index] += 1
        if read:
            self._reads[plan.seq] = read
        return len(read)

    def end_step(self) -> None:
        """Unpin what is not read any more, as far as locks are free."""
        if self.found:
            self._release([slot.index for slot in self.found.values()])
            self.found.clear()
        self._num_left = self._max_looks
        for partition in [*self._over]:
            if partition.unpin([*self._over[partition]], self._reader):
                del self._over[partition]

    def record_ended(self, seqs: Iterable[int]) -> None:
        """All ranks have ended these plans."""
        for seq in seqs:
            self._release(self._reads.pop(seq, ()))

    def _release(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._pinned[index] -= 1
            if not self._pinned[index]:
                del self._pinned[index]
                partition, number = self.place_of(index)
                self._over.setdefault(partition, set()).add(number)

    @property
    def is_reading(self) -> bool:
        """Whether further steps unpin something."""
        return bool(self._reads or self._over)

    def leave(self) -> None:
        """Find nothing from now on."""
        self._has_left = True
        self._release([slot.index for slot in self.found.values()])
        self.found.clear()

    def place_of(self, index: int) -> tuple[Partition, int]:
        """The partition of a neighbour's slot, and its number there."""
        number, slot = divmod(index, self._stride)
        return self._partitions[number - 1][1], slot


class SharedHostWriter(HostWriter):
    """A `HostWriter` that stores no second copy of what a neighbour has."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        # By device block, that of a neighbour.
        self._elsewhere: dict[int, Copy] = {}
        self._num_looked = 0

    def record_loads(self, plan: StepPlan, neighbours: Neighbours) -> None:
        """Note which blocks a plan loads from neighbours."""
        slots = (*plan.load_slots, *plan.ahead_slots)
        for index, block_id in zip(slots, (*plan.load_blocks, *plan.ahead_blocks)):
            if index >= self._table.num_slots:
                key = self._pool.blocks[block_id].block_hash
                if key is not None:
                    self._elsewhere[block_id] = Copy(key, *neighbours.place_of(index))

    def record_copies(self, copies: Iterable[Copy]) -> None:
        """Note that neighbours have these blocks, so that the device's are not stored
        again."""
        for copy in copies:
            block = self._pool.cached_block_hash_to_block.get_one_block(copy.key)
            if block is not None:
                self._elsewhere[block.block_id] = copy

    def forget_overwritten(self) -> None:
        """Forget the copies of blocks that have been overwritten, some in each step. A
        late removal only costs time."""
        if not self._elsewhere:
            return
        blocks = self._pool.blocks
        first = self._num_looked % len(blocks)
        self._num_looked = first + _MAX_FORGOTTEN
        for block_id in self._elsewhere.keys() & range(first, self._num_looked):
            if blocks[block_id].block_hash != self._elsewhere[block_id].key:
                del self._elsewhere[block_id]

    def forget_elsewhere(self) -> None:
        """Forget all copies."""
        self._elsewhere.clear()

    @property
    def admits_all(self) -> bool:
        return not self._elsewhere and super().admits_all

    def is_admitted(self, block: KVCacheBlock) -> bool:
        copy = self._elsewhere.get(block.block_id)
        if copy is not None:
            if block.block_hash == copy.key and copy.partition.seems_to_hold(
                copy.slot, rows_of([copy.key])
            ):
                return False
            del self._elsewhere[block.block_id]
        return super().is_admitted(block)
