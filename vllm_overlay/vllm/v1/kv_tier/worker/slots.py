# SPDX-License-Identifier: Apache-2.0
"""The state of each host slot of a rank. `RankSlots` is its only owner.

    EMPTY ──▶ FILLING ──▶ FILLED        a store is queued, or a fetch succeeded
                 └──────▶ BAD           it failed, or the content has changed

Only FILLED slots are loaded or written to a secondary tier. With `verify` each has a
checksum, taken when the slot has been filled, and compared before the slot is loaded,
before it is written to a secondary tier, and after that.

Content needs no version. Fences put the loads of a slot between its store and the next
one, and waiting for a copy includes waiting for its launch, so a load sees the state
that the last store left. Jobs of secondary tiers have no fence at their end; they
reserve their slots until then.
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
    """Host slots have changed since they were filled. The message names them."""

    def __init__(self, slots: Sequence[int]) -> None:
        super().__init__(
            f"Host slots {list(slots)} do not hold what was stored in them. Bad "
            "memory, or a stray write of another part of the program, or of an engine "
            "of the same pool, has changed them. If this happens again, check the "
            "machine's memory (EDAC or MCE messages of the kernel)."
        )


class RankSlots:
    """The slots of one rank. Used by the threads of copies and of secondary tiers.

    Args:
        num_slots: Number of slots.
        checksums: Checksums of the slots, with `verify`.
        states: `[num_slots]`, uint8, zeros: states in memory that ranks share. Only the
            rank that stores fills slots.
        group_bytes: By KV cache group, how many of the first bytes of a slot count;
            empty if all do for all groups.
        num_own: Slots from this one on are of other engines, whose states are not
            known; None if there are none.

    """

    def __init__(
        self,
        num_slots: int,
        checksums: SlotChecksums | None = None,
        states: NDArray[np.uint8] | None = None,
        group_bytes: Sequence[int] = (),
        num_own: int | None = None,
    ) -> None:
        self.checksums = checksums
        self._num_own = num_slots if num_own is None else num_own
        self.group_bytes = group_bytes
        self._states = np.zeros(num_slots, np.uint8) if states is None else states
        self._lock = threading.Lock()
        # Number of secondary tiers' jobs that reserve each slot.
        self._taken: Counter[int] = Counter()

    def num_bytes(self, group: int, slot_bytes: int) -> int:
        """How many of the first bytes of a slot a KV cache group needs.

        Args:
            group: Its number; -1 if it is unknown.
            slot_bytes: Bytes of a slot.

        """
        known = 0 <= group < len(self.group_bytes)
        return self.group_bytes[group] if known else slot_bytes

    # ------------------------------------------------------- device and slots

    def begin_store(self, slots: Sequence[int], groups: Sequence[int] = ()) -> None:
        """Mark `slots` as being overwritten.

        Args:
            slots: Slots that are overwritten.
            groups: KV cache group of each; empty if whole slots are.

        Raises:
            RuntimeError: A secondary tier still reads or writes one of them.

        """
        with self._lock:
            if self._taken and (taken := [s for s in slots if s in self._taken]):
                raise RuntimeError(f"Secondary tiers still use host slots {taken}.")
            self._fill(slots, groups)

    def mark_stored(self, slots: Sequence[int]) -> None:
        """Mark `slots` as filled: their stores are on the current stream, or done."""
        if self.checksums is not None:
            self.checksums.compute_after_copies(slots)
        with self._lock:
            self._states[slots] = FILLED

    def mark_bad(self, slots: Sequence[int]) -> None:
        """Mark `slots` as bad, since the scheduler believes them to be filled."""
        known = [slot for slot in slots if 0 <= slot < len(self._states)]
        with self._lock:
            self._states[known] = BAD

    def check(self, slots: Sequence[int]) -> None:
        """Check `slots` before they are loaded. With checksums, waits for their stores.

        Raises:
            RuntimeError: A slot was never filled, or the last attempt failed.
            SlotChanged: Some slots do not match their checksums.

        """
        if not (self._states[slots] == FILLED).all():
            raise RuntimeError("The slot was never filled.")
        if changed := self._changed(slots):
            raise SlotChanged(changed)

    def are_checked(self, slots: Sequence[int]) -> bool:
        """Whether the checksums of `slots` exist, so other ranks can compare them."""
        return self.checksums is None or self.checksums.are_computed(slots)

    # ----------------------------------------------- secondary tiers and slots

    def begin_put(self, slots: Sequence[int]) -> list[int]:
        """Reserve `slots` for a secondary tier to read, until `end_put`.

        Returns:
            Indices of the slots that hold content.

        """
        with self._lock:
            self._taken.update(slots)
            return np.flatnonzero(self._states[slots] == FILLED).tolist()

    def mark_changed(self, slots: Sequence[int]) -> set[int]:
        """Compare `slots` that a secondary tier reads with their checksums.

        Returns:
            Those that have changed. They are bad from now on.

        """
        if changed := self._changed(slots):
            logger.error(
                "KV tier: %s They are not written to secondary tiers.",
                SlotChanged(changed),
            )
        return {*changed}

    def end_put(self, slots: Sequence[int]) -> None:
        """Release `slots` after a secondary tier has read them."""
        with self._lock:
            self._release(slots)

    def begin_fetch(
        self, slots: Sequence[int], groups: Sequence[int] = ()
    ) -> list[int]:
        """Reserve `slots` for a secondary tier to fill, until `end_fetch`.

        Args:
            slots: Slots to fill.
            groups: KV cache group of each; empty if whole slots are filled.

        Returns:
            Indices of the slots that no other job uses.

        """
        with self._lock:
            free = [i for i, slot in enumerate(slots) if slot not in self._taken]
            self._taken.update(slots)
            self._fill(
                [slots[i] for i in free], [groups[i] for i in free] if groups else ()
            )
            return free

    def end_fetch(self, slots: Sequence[int], came: Sequence[int]) -> set[int]:
        """Release `slots` after a fetch, and set their states.

        Args:
            slots: As given to `begin_fetch`.
            came: Those that were filled completely.

        Returns:
            Those that are valid now.

        """
        filled: set[int] = set()
        try:
            if self.checksums is not None:
                self.checksums.compute(came)
            filled.update(came)
        finally:
            with self._lock:
                self._release(slots)
                # A store of the others was refused meanwhile (`mark_bad`): they
                # stay bad.
                filling = {slot for slot in slots if self._states[slot] == FILLING}
                filled &= filling
                self._states[[*filling - filled]] = BAD
                self._states[[*filled]] = FILLED
        return filled

    # ------------------------------------------------------------------ own

    def _fill(self, slots: Sequence[int], groups: Sequence[int]) -> None:
        self._states[slots] = FILLING
        if (sums := self.checksums) is not None:
            groups = groups or [-1] * len(slots)
            sizes = [self.num_bytes(group, sums.slot_bytes) for group in groups]
            sums.forget(slots, sizes)

    def _release(self, slots: Iterable[int]) -> None:
        self._taken.subtract(slots)
        self._taken = +self._taken

    def _changed(self, slots: Sequence[int]) -> list[int]:
        if self.checksums is None:
            return []
        are_right = self.checksums.are_right(slots)
        changed = [slot for slot, is_right in zip(slots, are_right) if not is_right]
        if own := [slot for slot in changed if slot < self._num_own]:
            with self._lock:
                self._states[own] = BAD
        return changed
