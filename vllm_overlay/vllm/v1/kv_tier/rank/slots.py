# SPDX-License-Identifier: Apache-2.0
"""What each host slot of a rank holds, and the only owner of that fact here.

    EMPTY ──▶ FILLING ──▶ FILLED        a store is queued, or a fetch has ended well
                 └──────▶ BAD           it failed, or the slot was found changed

Only what is FILLED is loaded, or written to a secondary tier. With `verify` it has a
checksum. It is taken when the slot has been filled, from wherever, and compared before
the slot is loaded, before it is written to a secondary tier, and after that.

No content needs a version. The fences of the plans put the loads of a slot between its
store and the next one, and what waits for a copy waits for its launch: so a load finds
what the store before it left here. What a secondary tier moves has no fence at its end:
until then the slot is taken, and nothing else fills it.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm.logger import init_logger
from vllm.v1.kv_tier.memory.checksums import SlotChecksums

logger = init_logger(__name__)

EMPTY, FILLING, FILLED, BAD = range(4)


class SlotChanged(RuntimeError):
    """Host slots do not hold what filled them. The message names them."""

    def __init__(self, slots: Sequence[int]) -> None:
        super().__init__(
            f"Host slots {list(slots)} do not hold what was stored in them. Bad "
            "memory, or a write of another program part, has changed them. Check "
            "the machine's memory (EDAC or MCE messages of the kernel) when this "
            "comes again."
        )


class RankSlots:
    """The slots of one rank. Threads of copies and of secondary tiers call it.

    Args:
        num_slots: How many.
        checksums: Of what fills them (`verify`), if they are checked.
        states: `[num_slots]`, uint8, zeros: where ranks that share the slots find what
            they hold. Only the rank that stores fills any.

    """

    def __init__(
        self,
        num_slots: int,
        checksums: SlotChecksums | None = None,
        states: NDArray[np.uint8] | None = None,
    ) -> None:
        self.checksums = checksums
        self._states = np.zeros(num_slots, np.uint8) if states is None else states
        self._lock = threading.Lock()
        # How many jobs of secondary tiers each slot is taken by.
        self._taken: Counter[int] = Counter()

    # ------------------------------------------------------- device and slots

    def begin_store(self, slots: Sequence[int]) -> None:
        """`slots` are overwritten from now on.

        Raises:
            RuntimeError: A secondary tier still reads or writes one of them.

        """
        with self._lock:
            if self._taken and (taken := [s for s in slots if s in self._taken]):
                raise RuntimeError(f"Secondary tiers still use host slots {taken}.")
            self._fill(slots)

    def stored(self, slots: Sequence[int]) -> None:
        """The stores of `slots` are on the current stream, or done where there is
        none."""
        if self.checksums is not None:
            self.checksums.take_after_copies(slots)
        with self._lock:
            self._states[slots] = FILLED

    def store_failed(self, slots: Sequence[int]) -> None:
        """The scheduler takes `slots` for holding what they do not hold."""
        known = [slot for slot in slots if 0 <= slot < len(self._states)]
        with self._lock:
            self._states[known] = BAD

    def check(self, slots: Sequence[int]) -> None:
        """Before `slots` are loaded, while that can still be refused. With checksums
        it waits for the end of their stores.

        Raises:
            RuntimeError: One was never filled, or the last attempt failed.
            SlotChanged: Some do not hold what filled them.

        """
        if not (self._states[slots] == FILLED).all():
            raise RuntimeError("The slot was never filled.")
        if changed := self._changed(slots):
            raise SlotChanged(changed)

    def are_checked(self, slots: Sequence[int]) -> bool:
        """Whether other ranks find all that they need to check `slots`."""
        return self.checksums is None or self.checksums.are_taken(slots)

    # ----------------------------------------------- secondary tiers and slots

    def begin_put(self, slots: Sequence[int]) -> list[int]:
        """A secondary tier is to read `slots`, which nothing overwrites until
        `end_put`. Returns the places of those that hold something."""
        with self._lock:
            self._taken.update(slots)
            return np.flatnonzero(self._states[slots] == FILLED).tolist()

    def changed(self, slots: Sequence[int]) -> set[int]:
        """Which of `slots`, that a secondary tier reads, do not hold what filled them.
        They are bad from now on."""
        if changed := self._changed(slots):
            logger.error(
                "KV tier: %s They are not kept for others.", SlotChanged(changed)
            )
        return {*changed}

    def end_put(self, slots: Sequence[int]) -> None:
        """The secondary tier has read `slots`."""
        with self._lock:
            self._release(slots)

    def begin_fetch(self, slots: Sequence[int]) -> list[int]:
        """A secondary tier is to fill `slots`, which nothing else does until
        `end_fetch`. Returns the places of those that no other one uses."""
        with self._lock:
            free = [i for i, slot in enumerate(slots) if slot not in self._taken]
            self._taken.update(slots)
            self._fill([slots[i] for i in free])
            return free

    def end_fetch(self, slots: Sequence[int], came: Sequence[int]) -> set[int]:
        """Nothing writes to `slots` any more.

        Args:
            slots: As of `begin_fetch`.
            came: Those that have all of what was to fill them.

        Returns:
            Those that hold it.

        """
        filled: set[int] = set()
        try:
            if self.checksums is not None:
                self.checksums.take(came)
            filled.update(came)
        finally:
            with self._lock:
                self._release(slots)
                # A store that was refused meanwhile was to fill the others.
                filling = {slot for slot in slots if self._states[slot] == FILLING}
                filled &= filling
                self._states[[*filling - filled]] = BAD
                self._states[[*filled]] = FILLED
        return filled

    # ------------------------------------------------------------------ own

    def _fill(self, slots: Sequence[int]) -> None:
        self._states[slots] = FILLING
        if self.checksums is not None:
            self.checksums.forget(slots)

    def _release(self, slots: Iterable[int]) -> None:
        self._taken.subtract(slots)
        self._taken = +self._taken

    def _changed(self, slots: Sequence[int]) -> list[int]:
        if self.checksums is None:
            return []
        are_right = self.checksums.are_right(slots)
        changed = [slot for slot, is_right in zip(slots, are_right) if not is_right]
        if changed:
            with self._lock:
                self._states[changed] = BAD
        return changed
