# SPDX-License-Identifier: Apache-2.0
"""Which slots are to be written to a tier below, and which of them next."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import islice, takewhile
from operator import attrgetter

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.scheduling.slots import HostSlot

_store_seq = attrgetter("store_seq")


class Due:
    """Slots that are to be written: the begins of prompts before what follows them.

    A block is of no use without all that comes before it in its prompt. So a store that
    takes only a part of what is computed should have the same part of each prompt, and
    not prompts with holes, as it would if the oldest were always next: these are the
    next to be evicted, too, so that a store which cannot keep up gets every other one.

    Args:
        span: Tokens of a prompt whose blocks are equal here: the oldest is the first.

    """

    def __init__(self, span: int) -> None:
        self._span = span
        self.depths: dict[BlockHashWithGroupId, int] = {}
        """Of the keys of these slots: each block of each hit is looked for in it."""
        self._slots: defaultdict[int, dict[BlockHashWithGroupId, HostSlot]]
        self._slots = defaultdict(dict)

    def __len__(self) -> int:
        return len(self.depths)

    def add(self, slots: Mapping[BlockHashWithGroupId, HostSlot]) -> None:
        """These are to be written, of which none is here. Those whose block has several
        keys, since it was hashed before it was full, are left out."""
        span, depths, at_depth = self._span, self.depths, self._slots
        for key, slot in slots.items():
            # Each block that is used again comes by here.
            if len(slot.keys) > 1:
                continue
            depths[key] = depth = (slot.num_tokens or 0) // span
            at_depth[depth][key] = slot

    def remove(self, key: BlockHashWithGroupId) -> bool:
        """`key` is not to be written. Returns whether it was."""
        if (depth := self.depths.pop(key, None)) is None:
            return False
        slots = self._slots[depth]
        del slots[key]
        if not slots:
            del self._slots[depth]
        return True

    def clear(self) -> None:
        """Nothing is to be written."""
        self.depths.clear()
        self._slots.clear()

    def take(self, num: int, settled: int) -> dict[BlockHashWithGroupId, HostSlot]:
        """The next slots to be written, and no more than `num`, which are not due then.

        Args:
            num: How many at most.
            settled: The last plan whose stores may be written. At each depth the oldest
                are taken up to the first that was stored later.

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
