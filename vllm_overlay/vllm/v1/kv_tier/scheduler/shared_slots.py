# SPDX-License-Identifier: Apache-2.0
"""The slots of an engine in a pool: neighbours find what it has stored, and it reuses
no slot that they read.

    stored ── all ranks report the end, and it cannot turn out to be void ──▶ published
    published ── next victim, and no neighbour reads it ──▶ withdrawn, then reused
    withdrawn ── used by its own engine before it is reused ──▶ published again
    published ── next victim, but read ──▶ held, as slots that a secondary tier writes
    published by an earlier engine ── all ranks open it ──▶ adopted: published and found

Withdrawing a slot and looking at its pins is one critical section of the partition, as
is finding and pinning it for a neighbour. Both this and publishing cost nearly the same
for one slot and for hundreds, so few steps do them, for many slots.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.eviction.base import EvictionPolicy
from vllm.v1.kv_tier.keeper.client import Membership
from vllm.v1.kv_tier.keeper.partition import Claim, Partition
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.scheduler.slots import HostSlot, SlotTable, index_of
from vllm.v1.kv_tier.tuning import SchedulingTuning

# Stands for all neighbours among those for whom slots are held.
_NEIGHBOURS = -1
# Most slots that a step publishes, and that it looks at for the end of a read.
_MAX_PUBLISHED = 512
_MAX_LOOKS = 512
# Most slots that are withdrawn ahead of their eviction.
_MAX_CLAIMED = 256
# Most slots that a step opens, as long as some may hold what it adopts. That takes some
# microseconds for each.
_MAX_ADOPTED = 512
# Most victims of a plan that neighbours read. Each takes some microseconds.
_MAX_REFUSED = 1024
# Most slots that a step looks at for uses by neighbours, and most of these uses, each
# of which takes a microsecond.
_MAX_USE_LOOKS = 1 << 16
_MAX_USES = 512


class Copy(NamedTuple):
    """A block that a neighbour has, too."""

    key: BlockHashWithGroupId
    partition: Partition
    slot: int
    """Its number there."""


FindCopies = Callable[[Sequence[BlockHashWithGroupId]], list[Copy]]
"""Says which blocks neighbours have as well, each once."""


class PlanEnds:
    """Which plans have ended on all ranks.

    Args:
        num_ranks: Ranks that report.

    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._num_reported: Counter[int] = Counter()

    def take(self, seqs: Iterable[int]) -> list[int]:
        """Take in reports. Returns the plans that have ended with them."""
        self._num_reported.update(seqs)
        ended = [s for s, num in self._num_reported.items() if num >= self._num_ranks]
        for seq in ended:
            del self._num_reported[seq]
        return ended


class SharedSlotTable(SlotTable):
    """A `SlotTable` whose slots lie in a partition of a pool.

    Slots of neighbours have indices behind its own.

    Args:
        policy: As in `SlotTable`.
        member: The engine's partition, and what it holds already.
        tuning: How many slots a step publishes, or claims, at least.
        num_open: Number of slots that all ranks have open, with those of neighbours;
            None for all.

    """

    def __init__(
        self,
        policy: EvictionPolicy,
        member: Membership,
        tuning: SchedulingTuning,
        num_open: int | None = None,
    ) -> None:
        super().__init__(member.num_slots, policy, num_open=0)
        self._tuning = tuning
        self.num_own = member.num_slots
        self._partition = member.own
        self.has_left = False
        """Whether nothing is published any more."""
        self._is_leaving = False
        self._num_refused = 0
        # The next slot to look at for uses, and whether this step has looked.
        self._use_cursor, self._has_looked = 0, False
        # Keys that the policy evicted, with slots that are not published until they
        # are used again or evicted.
        self._claimed: set[BlockHashWithGroupId] = set()
        # Plans with stores since the last one whose end is to be reported, and their
        # stores.
        self._num_unasked = self._num_unasked_stores = 0
        # Slots by the plan that stores them, until it has ended and is settled.
        self._stored: dict[int, list[int]] = {}
        self._last_ended = -1
        # Complete slots that are to be published, and the plans that have stored them;
        # 0 for what came from a secondary tier.
        self._complete: dict[int, int] = {}
        # Slots that neighbours read, with the keys under which they are held.
        self._read: dict[int, list[BlockHashWithGroupId]] = {}
        # What an earlier engine has stored, and its place there by slots that are not
        # open yet. Then others of these that neighbours may still read.
        self._left = member.adopted
        self._to_adopt = {slot: i for i, slot in enumerate(self._left.slots)}
        self._read_later = {*range(self.num_own)} - {*member.unread}
        self._open(self.num_own if num_open is None else min(num_open, self.num_own))

    def open(self, num_slots: int) -> None:
        """As `SlotTable.open`. Opens some of them for now, while it adopts blocks."""
        if self._to_adopt:
            num_slots = min(num_slots, self.num_slots + _MAX_ADOPTED)
        self._open(num_slots)

    def _open(self, end: int) -> None:
        opened = range(self.num_slots, end)
        used = self._adopt(opened)
        # Else it can be found, but was stored again, or is still to be withdrawn. Or
        # neighbours read what was withdrawn.
        held = {*self._partition.published(opened.start, end)} - used
        if self._read_later:
            held |= self._read_later.intersection(opened) - used
            self._read_later.difference_update(opened)
        taken = used | held
        self._free += (
            [slot for slot in reversed(opened) if slot not in taken]
            if taken
            else reversed(opened)
        )
        self.num_slots = max(self.num_slots, end)
        for slot in held:
            self._hold_read(slot, [])
            self._free_after_hold.add(slot)

    def _adopt(self, opened: range) -> set[int]:
        """Take over what an earlier engine has stored in slots. Returns these."""
        if not self._to_adopt:
            return set()
        # In the order in which they are to be evicted.
        places = sorted(
            self._to_adopt.pop(slot) for slot in opened if slot in self._to_adopt
        )
        used = set()
        for i in places:
            slot, key = self._left.slots[i], BlockHashWithGroupId(self._left.keys[i])
            if not self.has(key):
                used.add(slot)
                num_tokens = self._left.num_tokens[i]
                self._fill((slot,), (key,), (num_tokens,), store_seq=0, is_new=False)
        return used

    def is_own(self, slot: HostSlot) -> bool:
        """Whether a slot is one of this engine, not of a neighbour."""
        return slot.index < self.num_own

    # ------------------------------------------------------------------ of each step

    def record_stores(self, plan: StepPlan, is_idle: bool) -> bool:
        """Note what a plan stores. Returns whether its end must be reported.

        A report covers all plans before it, so not every step needs one.
        """
        if self.has_left:
            return False
        if stores := [*plan.store_slots, *plan.clean_slots]:
            self._stored[plan.seq] = stores
            self._num_unasked_stores += len(stores)
        self._num_unasked += self._num_unasked_stores > 0
        is_due = (
            self._num_unasked >= (1 if is_idle else self._tuning.plans_per_report)
            or self._num_unasked_stores >= self._tuning.stores_per_report
        )
        if is_due:
            self._num_unasked = self._num_unasked_stores = 0
        return is_due

    def record_ended(self, seqs: Iterable[int]) -> None:
        """All ranks have ended these plans, and so all before them."""
        self._last_ended = max(self._last_ended, *seqs)

    def share(
        self, settled: int, find_copies: FindCopies | None = None
    ) -> Sequence[Copy]:
        """Publish what is complete, and take back what is no longer read.

        Args:
            settled: Nothing that plans up to this one have stored turns out to be void.
            find_copies: Says which blocks neighbours have published meanwhile. This
                engine's slots of these are evicted first, and not published. None: all
                are published.

        Returns:
            These blocks.

        """
        copies: Sequence[Copy] = ()
        self._num_refused = 0
        self._has_looked = False
        if self._is_leaving:
            self._leave()
        stored, complete = self._stored, self._complete
        last = min(settled, self._last_ended)
        while stored and (seq := next(iter(stored))) <= last:
            complete.update(dict.fromkeys(stored.pop(seq), seq))
        # All that the last report covers is published together.
        if complete and (
            settled >= self._last_ended
            or len(complete) >= self._tuning.stores_per_report
        ):
            copies = self._publish(find_copies)
        if self._read:
            self._end_reads()
        return copies

    def fill(
        self, index: int, key: BlockHashWithGroupId, num_tokens: int | None
    ) -> None:
        """As `SlotTable.fill`: all ranks have the block, so others may find it."""
        super().fill(index, key, num_tokens)
        if not self.has_left:
            self._complete[index] = 0

    def _publish(self, find_copies: FindCopies | None) -> list[Copy]:
        due = [*islice(self._complete.items(), _MAX_PUBLISHED)]
        of_slots, store_seq = self.places.keys, self._store_seq
        # What was stored over them since is not complete.
        slots = [
            index
            for index, seq in due
            if store_seq[index] == seq and of_slots[index] is not None
        ]
        keys = [of_slots[index] for index in slots]
        if self._several or not self._claimed.isdisjoint(keys):
            # Neighbours do not look for blocks with several keys.
            slots = [
                index
                for index, key in zip(slots, keys)
                if index not in self._several and key not in self._claimed
            ]
            keys = [of_slots[index] for index in slots]
        copies = find_copies(keys) if keys and find_copies is not None else []
        if copies:
            spare = {copy.key for copy in copies}
            for slot in map(self.get, spare):
                assert slot is not None
                self.release(slot)
            slots = [index for index, key in zip(slots, keys) if key not in spare]
            keys = [of_slots[index] for index in slots]
        num_tokens = [*map(self._num_tokens.__getitem__, slots)]
        if not slots or self._partition.publish(slots, keys, num_tokens):
            for index, _ in due:
                del self._complete[index]
        return copies

    def _end_reads(self) -> None:
        looked = list(self._read)[:_MAX_LOOKS]
        for slot in self._partition.unpinned(looked) or ():
            if (
                self.places.keys[slot] is None
                and self._partition.is_published(slot)
                and self._partition.withdraw(slot) is not Claim.FREE
            ):
                # Its content is gone, but could not be withdrawn yet.
                continue
            self.end_hold(_NEIGHBOURS, [slot], self._read.pop(slot))
        for slot in looked:
            if slot in self._read:
                # Look at others first in the next step.
                self._read[slot] = self._read.pop(slot)

    @property
    def is_sharing(self) -> bool:
        """Whether further steps publish something."""
        return bool(self._stored or self._complete or self._is_leaving)

    def leave(self) -> None:
        """Publish nothing from now on, and withdraw everything."""
        if not self.has_left:
            self.has_left = self._is_leaving = True
            self._stored.clear()
            self._complete.clear()
            # What is found there when they are open is withdrawn.
            self._to_adopt.clear()
            self._leave()

    def _leave(self) -> None:
        read = self._partition.withdraw_all()
        self._is_leaving = read is None
        for index in read or ():
            if index >= self.num_slots:
                self._read_later.add(index)
                continue
            key = self.places.keys[index]
            self._hold_read(index, [] if key is None else [key])

    # ------------------------------------------------------------------ of neighbours

    def pin(self, slots: Sequence[HostSlot]) -> None:
        """As `SlotTable.pin`; slots of neighbours are pinned since they were found."""
        super().pin(self._own(slots))

    def mark_loaded(self, slots: Sequence[HostSlot], seq: int) -> None:
        """As `SlotTable.mark_loaded`, without slots of neighbours."""
        super().mark_loaded(self._own(slots), seq)

    def _own(self, slots: Collection[HostSlot]) -> Sequence[HostSlot]:
        """Those of `slots` that are not of neighbours."""
        # A hot path: each block of each prefix. Mostly all are.
        indices = list(map(index_of, slots))
        if not indices or max(indices) < self.num_own:
            return [*slots]
        return [slot for slot in slots if self.is_own(slot)]

    def _evict(self, num_slots: int) -> list[int]:
        if not self._released:
            return super()._evict(num_slots)
        indices: list[int] = []
        while len(indices) < num_slots and self._claim_released():
            if not (evicted := super()._evict(1)):
                break
            indices += evicted
        return indices

    def _claim_released(self) -> bool:
        """Claim the next released slot, if there is any. False if that must wait."""
        while self._released:
            key = next(reversed(self._released))
            index = self.places.place(key)
            (claim,) = self._partition.claim([index])
            if claim is Claim.BUSY:
                return False
            if claim is Claim.FREE:
                break
            if claim is Claim.PINNED:
                self._hold_read(index, [key])
        return True

    def _record_uses(self) -> None:
        """Let the policy know what neighbours have used: before it chooses victims,
        once in a step."""
        self._has_looked = True
        first = self._use_cursor if self._use_cursor < self.num_slots else 0
        self._use_cursor = end = min(first + _MAX_USE_LOOKS, self.num_slots)
        slots = self._partition.take_uses(first, end, _MAX_USES)
        if len(slots) == _MAX_USES:
            self._use_cursor = first
        keys = [key for slot in slots if (key := self.places.keys[slot]) is not None]
        if keys:
            self.keep_passed(keys)
            self._policy.hits([key for key in keys if key not in self._aside])

    def _victims(self, num_keys: int) -> list[BlockHashWithGroupId]:
        if not self._has_looked:
            self._record_uses()
        victims: list[BlockHashWithGroupId] = []
        parts, num_parts = self._parts, self._num_parts
        while (num := num_keys - len(victims)) > 0:
            if len(self._next) < num:
                num = max(num, self._num_claimed_at_once)
            if not (found := super()._victims(num)):
                break
            if self._claimed.issuperset(found):
                # A hot path: mostly all are.
                victims += found
                continue
            indices = [parts[hash(key) % num_parts][key] for key in found]
            claims = self._partition.claim(indices)
            if claims.count(Claim.FREE) == len(claims):
                victims += found
                continue
            for victim, index, claim in zip(found, indices, claims):
                if claim is Claim.FREE:
                    victims.append(victim)
                elif claim is Claim.BUSY:
                    # Still the next ones: they were not used.
                    self._next[victim] = None
                else:
                    self._num_refused += 1
                    self._hold_read(index, [victim])
                    self._passed[victim] = None
            if Claim.BUSY in claims or self._num_refused >= _MAX_REFUSED:
                break
        if rest := victims[num_keys:]:
            self._next.update(dict.fromkeys(rest))
            self._claimed.update(rest)
        self._claimed.difference_update(victims := victims[:num_keys])
        return victims

    @property
    def _num_claimed_at_once(self) -> int:
        return min(_MAX_CLAIMED, int(self._tuning.claim_part * self.num_slots))

    def _forget_passed(self, key: BlockHashWithGroupId) -> bool:
        if key in self._claimed:
            self._claimed.remove(key)
            index = self.places.place(key)
            seq = self._store_seq[index]
            if not (self.has_left or seq in self._stored):
                self._complete[index] = seq
        return super()._forget_passed(key)

    def _forget(self, key: BlockHashWithGroupId) -> None:
        index, partition = self.places.place(key), self._partition
        if partition.is_published(index) and (
            partition.withdraw(index) is not Claim.FREE
        ):
            self._hold_read(index, [key])
        super()._forget(key)

    def _hold_read(self, index: int, keys: list[BlockHashWithGroupId]) -> None:
        if index not in self._read:
            self._read[index] = keys
            self.hold(_NEIGHBOURS, [index], keys)
