# SPDX-License-Identifier: Apache-2.0
"""The queue of slots to write to a secondary tier."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import islice, takewhile
from operator import attrgetter

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.scheduling.slots import HostSlot

_store_seq = attrgetter("store_seq")


class Due:
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
