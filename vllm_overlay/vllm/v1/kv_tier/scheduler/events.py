# SPDX-License-Identifier: Apache-2.0
"""KV cache events of all tiers, in one stream, and the block pool that publishes them.

Upstream's pool emits events while it has the request. Blocks move to the host and back
without one, so the data of an event is kept for each key, encoded, as long as any tier
has the key.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, groupby, islice
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import asdict

from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    KVCacheEvent,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.scheduler.block_pool import TieredBlockPool
from vllm.v1.kv_tier.scheduler.kv_groups import UsedBlocks, hashes_of_blocks
from vllm.v1.kv_tier.scheduler.secondary.manager import SecondaryTierManager
from vllm.v1.kv_tier.scheduler.slots import HostSlot, SlotTable
from vllm.v1.request import Request


def chains(events: list[BlockStored]) -> list[BlockStored]:
    """Merge events of one block each where one continues another.

    Returns:
        The events, each after the one that stores its parent.

    """
    ends = {_place(event, event.block_hashes[-1]) for event in events}
    children: dict[Any, list[BlockStored]] = {}
    heads = []
    for event in reversed(events):
        parent = _place(event, event.parent_block_hash)
        if parent in ends:
            children.setdefault(parent, []).append(event)
        else:
            heads.append(event)
    chains = []
    while heads:
        chain = heads.pop()
        chains.append(chain)
        while following := children.pop(_place(chain, chain.block_hashes[-1]), None):
            # All but one start their own chains, after this one.
            longer = next((e for e in following if _append(chain, e)), None)
            heads += [event for event in following if event is not longer]
    return chains


def _place(event: BlockStored, block_hash: Any) -> tuple[int, Any]:
    """Identifies a block among those of all groups."""
    return releases.event_group(event), block_hash


def by_block(event: BlockStored) -> dict[str, list[Any]]:
    """Fields of `event` with one entry for each of its blocks."""
    return {
        name: value
        for name, value in asdict(event).items()
        if isinstance(value, list)
        and name != "token_ids"
        and len(value) == len(event.block_hashes)
    }


_other_fields = attrgetter(
    *(
        name
        for name in BlockStored.__struct_fields__
        if name not in ("block_hashes", "parent_block_hash", "token_ids")
    )
)


def _append(event: BlockStored, other: BlockStored) -> bool:
    """Append `other`, a child of `event`'s last block, if all other fields agree.

    Returns:
        Whether it was appended.

    """
    # A hot path: each block that moves. A dict of the fields takes three times as long.
    num_blocks = len(other.block_hashes)
    lists = []
    for ours, theirs in zip(_other_fields(event), _other_fields(other)):
        if isinstance(theirs, list) and len(theirs) == num_blocks:
            if not isinstance(ours, list):
                return False
            lists.append((ours, theirs))
        elif ours != theirs:
            return False
    event.block_hashes.extend(other.block_hashes)
    event.token_ids.extend(other.token_ids)
    for ours, theirs in lists:
        ours.extend(theirs)
    return True


MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"
"""Upstream's names of host memory and of storage, in releases that have them."""

Place = tuple[str, str | None]
"""Medium and locality of a tier."""

_HOST: Place = (MEDIUM_CPU, None)

REPUBLISHED_PER_STEP = 512
"""Most keys that a step repeats besides its own changes; the next steps have the rest.
This keeps steps short, and batches below the limits of routers: 4,096 events and 16 MiB
in vllm-router."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BlockStored).decode


class TierEvents:
    """Adds the tier's changes to a pool's event queue.

    Upstream's events of computed blocks stay in the queue, with the `medium` of the
    device, and so does a promotion. The rest is emitted once a step, as differences to
    the step before: a block in a new host slot is stored on `CPU`, and what a tier has
    lost is removed there. Neighbours of a chain share one stored event, parents first;
    removed keys of a group and tier share one event. `AllBlocksCleared` clears all
    tiers.

    A key is stored on a medium when the first block has it, and removed when the last
    one is gone, however many device blocks have the same key. So it does not matter
    whether subscribers count.

    A subscriber that connects later than upstream's replay buffer reaches back misses
    earlier events. `republish_all` repeats them as ordinary events: `AllBlocksCleared`,
    then everything that is stored. Other subscribers see a reset, and recover in the
    next steps. The repetition serves all that connect late: as long as a replay reaches
    back to it, which is thousands of steps, requests for another one are ignored.
    Otherwise the next one starts only after this one is complete, and after as many
    steps again.

    Args:
        pool: The pool whose queue is used.
        table: The slot table, which is observed.
        secondary: The secondary tiers, which are observed.
        block_sizes: Tokens of a block, for each group; needed where blocks are found
            that other engines have computed.
        adopts: Slots may have blocks that the engine has not computed, and which it
            publishes once it can describe them.

    """

    def __init__(
        self,
        pool: BlockPool,
        table: SlotTable,
        secondary: SecondaryTierManager | None = None,
        block_sizes: Sequence[int] = (),
        adopts: bool = False,
    ) -> None:
        self._pool = pool
        self._table = table
        self._device_medium = releases.device_medium(pool, MEDIUM_GPU)
        # The event that stores each key alone, encoded.
        self._descriptions: dict[BlockHashWithGroupId, bytes] = {}
        self._device: Place = (self._device_medium, None)
        self._block_sizes = block_sizes
        self._adopts = adopts
        # Whether a key that is on no tier may be on one soon.
        self._is_moving: Callable[[BlockHashWithGroupId], bool] = lambda key: False
        # Finds a key on each tier.
        self._finds: dict[Place, Callable[[BlockHashWithGroupId], object]] = {
            self._device: lambda key: pool.cached_block_hash_to_block.get_one_block(
                key
            ),
            _HOST: table.get,
        }
        if secondary is not None:
            for tier in secondary.tiers:
                locality = tier.settings.locality
                self._finds[MEDIUM_STORAGE, locality] = secondary.finder(locality)
                tier.presence.listeners.append(self.on_secondary_change)
            secondary.reader.on_found = self.on_found
            secondary.on_detached = self.on_secondary_detached
            self._is_moving = secondary.is_moving
        self._published: dict[Place, set[BlockHashWithGroupId]] = {
            place: set() for place in self._finds
        }
        """What subscribers know to be on each tier."""
        # Keys for which they may be out of date, in order of change.
        self._touched: dict[BlockHashWithGroupId, None] = {}
        # Keys to publish again before that, the last one first. And how much of both
        # the last step has left, after which new changes come.
        self._anew: list[BlockHashWithGroupId] = []
        self._num_behind = 0
        self._anew_wanted = False
        # Batches since the last `AllBlocksCleared`, or since the start.
        self._num_since_cleared = -1
        # Steps until the next repetition may start.
        self._num_rest = 0
        table.listeners.append(self)

    @property
    def num_described(self) -> int:
        """Number of keys with a description."""
        return len(self._descriptions)

    # ---------------------------------------------- what upstream's pool has emitted

    def record_cached(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None,
    ) -> None:
        """Keep the parts of the event that `cache_full_blocks` has emitted.

        If subscribers know some of these blocks already, only the rest is emitted.
        """
        event = self._pool.kv_event_queue[-1]
        assert isinstance(event, BlockStored)
        places = [
            i
            for i in range(num_full_blocks - num_cached_blocks)
            if not blocks[num_cached_blocks + i].is_null
            and (block_mask is None or block_mask[i])
        ]
        hashes = self._hashes(request, block_size)
        keys = self._describe(
            event, hashes, num_cached_blocks, places, block_size, kv_cache_group_id
        )
        self._record_upstream(keys)

    def _describe(
        self,
        event: BlockStored,
        hashes: Any,
        first: int,
        places: Sequence[int],
        block_size: int,
        group_id: int,
    ) -> list[BlockHashWithGroupId]:
        """Keep the data of each block of `event`, and return the blocks' keys.

        The blocks are at `places` of a request's blocks, counted from `first`.
        """
        keys, lists = [], by_block(event)
        for n, place in enumerate(places):
            i = first + place
            key = make_block_hash_with_group_id(hashes[i], group_id)
            keys.append(key)
            if key not in self._descriptions:
                if self._adopts:
                    self._touched[key] = None
                start = place * block_size
                self._descriptions[key] = _encode(
                    msgspec.structs.replace(
                        event,
                        parent_block_hash=(
                            maybe_convert_block_hash(hashes[i - 1]) if i else None
                        ),
                        token_ids=event.token_ids[start : start + block_size],
                        **{name: values[n : n + 1] for name, values in lists.items()},
                    )
                )
        return keys

    # ---------------------------------------------------------------- what is below

    def on_secondary_change(self, key: BlockHashWithGroupId) -> None:
        """Note that a secondary tier has `key` now, or no longer."""
        self._touched[key] = None

    def on_found(
        self,
        request: Request,
        keys: Iterable[BlockHashWithGroupId],
        num_tokens: int,
    ) -> None:
        """Describe `keys`, which other engines may have computed.

        They are blocks of the first `num_tokens` tokens of `request`. If one of a group
        is unknown here, upstream describes all blocks of the group up to there.
        """
        queue = self._pool.kv_event_queue
        new = {get_group_id(key) for key in keys if key not in self._descriptions}
        for group_id in sorted(new):
            size = self._block_sizes[group_id]
            num_blocks, hashes = num_tokens // size, self._hashes(request, size)
            num_events = len(queue)
            BlockPool.emit_cached_block_events(
                self._pool, request, num_blocks, size, group_id
            )
            for event in queue[num_events:]:
                assert isinstance(event, BlockStored)
                places = range(num_blocks)
                told = self._describe(event, hashes, 0, places, size, group_id)
                self._touched.update(dict.fromkeys(told))
            del queue[num_events:]

    def on_hit(self, request: Request, used: UsedBlocks) -> None:
        """Publish what a request uses of a pool. `on_loaded` hears nothing of blocks of
        neighbours, and what other engines have computed has no description."""
        told = self._published[self._device]
        if keys := [key for key in used.keys if key not in told]:
            self.on_found(request, keys, len(used.blocks) * used.block_size)
            self._publish_on_device(keys)

    def on_secondary_detached(self) -> None:
        """Note that secondary tiers are not used any more.

        They may have millions of keys, so the next steps remove them in parts.
        """
        for (medium, _), told in self._published.items():
            if medium == MEDIUM_STORAGE:
                self._touched.update(dict.fromkeys(told))
        self._num_behind = len(self._anew) + len(self._touched)

    def record_partial(self, key: BlockHashWithGroupId) -> None:
        """Keep the event that `cache_partial_block` has emitted."""
        event = self._pool.kv_event_queue[-1]
        if isinstance(event, BlockStored):
            if self._adopts:
                self._touched[key] = None
            self._descriptions.setdefault(key, _encode(event))
            self._record_upstream([key])

    def correct_hit(
        self,
        num_events: int,
        request: Request,
        num_cached_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Correct upstream's events of a repeated prefix hit.

        Upstream reports all blocks as on the device.

        Args:
            num_events: Events in the queue before upstream's.
            request: Request of the hit.
            num_cached_blocks: Blocks of the hit.
            block_size: Tokens of a block.
            kv_cache_group_id: Group of the blocks.

        """
        hashes = self._hashes(request, block_size)
        keys = [
            make_block_hash_with_group_id(hashes[i], kv_cache_group_id)
            for i in range(num_cached_blocks)
        ]
        places = [self._place_of(key) for key in keys]
        if _HOST not in places:
            # Those on the device may not have been published again.
            on_device = (p is self._device for p in places)
            self._published[self._device].update(compress(keys, on_device))
            return
        queue = self._pool.kv_event_queue
        del queue[num_events:]
        for place, run in groupby(zip(places, keys), key=lambda each: each[0]):
            if place is not None:
                found = [key for _, key in run]
                self._publish_stored(found, place)
                self._published[place].update(found)
        if "session_id" in BlockStored.__struct_fields__:
            for event in queue[num_events:]:
                assert isinstance(event, BlockStored)
                event.session_id = request.session_id

    def record_removed(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Note that a device block has lost these keys; others may have them."""
        self._touched.update(dict.fromkeys(keys))

    def record_cleared(self) -> None:
        """All tiers are empty, and the last event said so."""
        self._num_behind = 0
        self._anew_wanted = False
        self._num_since_cleared = -1
        self._descriptions.clear()
        self._touched.clear()
        self._anew = []
        for told in self._published.values():
            told.clear()

    # ------------------------------------------------------- what the tier moves

    def on_filled(self, slot: HostSlot) -> None:
        self._touched.update(dict.fromkeys(slot.keys))

    def on_loaded(self, slots: Sequence[HostSlot]) -> None:
        self._publish_on_device([key for slot in slots for key in slot.keys])

    def _publish_on_device(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Publish those of `keys` that have a description, before the blocks that are
        computed after them."""
        if self._num_behind:
            self._touched.update(dict.fromkeys(keys))
            return
        # At once, since upstream emits the blocks computed after these in this step.
        told = self._published[self._device]
        keys = [key for key in keys if key not in told and key in self._descriptions]
        self._publish_stored(keys, self._device)
        told.update(keys)

    def on_forgotten(self, slot: HostSlot) -> None:
        self._touched.update(dict.fromkeys(slot.keys))

    # -------------------------------------------------------------------- events

    def _hashes(self, request: Request, block_size: int) -> Any:
        """Hashes of the blocks of a group with `block_size`."""
        return hashes_of_blocks(request, self._pool.hash_block_size, block_size)

    def _place_of(self, key: BlockHashWithGroupId) -> Place | None:
        """The tier from which a hit takes `key`."""
        for place in (self._device, _HOST):
            if self._finds[place](key) is not None:
                return place
        return None

    def republish_all(self, num_kept: int = 0) -> None:
        """Repeat everything, from the next step on if no repetition is in progress.

        Args:
            num_kept: Batches in the replay buffer. If it reaches back to the last
                reset, nothing needs repeating.

        """
        if self._num_since_cleared >= num_kept:
            self._anew_wanted = True

    def _begin_anew(self) -> None:
        self._anew_wanted = False
        self._num_since_cleared, self._num_rest = 0, 1
        self._pool.kv_event_queue[:] = [AllBlocksCleared()]
        for told in self._published.values():
            told.clear()
        # Descriptions are in the order of computation: parents come first. A list is
        # made in an eighth of the time of a dict.
        self._anew = list(self._descriptions)
        self._anew.reverse()
        self._touched.clear()
        self._num_behind = len(self._anew)

    def publish_changes(self) -> None:
        """Queue events for all changes. Call it before events are taken."""
        self._num_since_cleared += 1
        if self._num_behind:
            self._num_rest += 1
        elif self._num_rest:
            self._num_rest -= 1
        elif self._anew_wanted:
            self._begin_anew()
        touched = self._take_touched()
        touched = [key for key in touched if key in self._descriptions]
        for place, find in self._finds.items():
            told = self._published[place]
            stored = [k for k in touched if k not in told and find(k) is not None]
            removed = [k for k in touched if k in told and find(k) is None]
            self._publish_stored(stored, place)
            self._publish_removed(removed, place)
            told.update(stored)
            told.difference_update(removed)
        for key in touched:
            is_told = any(key in told for told in self._published.values())
            if not is_told and not self._is_moving(key):
                self._descriptions.pop(key, None)

    def _take_touched(self) -> list[BlockHashWithGroupId]:
        """What this step tells of what followers do not know yet."""
        anew, touched = self._anew, self._touched
        num_new = len(anew) + len(touched) - self._num_behind
        num = REPUBLISHED_PER_STEP + max(0, num_new)
        taken: list[BlockHashWithGroupId] = []
        if anew:
            taken = anew[-num:]
            del anew[-num:]
            taken.reverse()
            num = max(0, REPUBLISHED_PER_STEP - len(taken))
        changed = list(islice(touched, num))
        for key in changed:
            del touched[key]
        self._num_behind = len(anew) + len(touched)
        # What is published again may have changed since.
        return [*dict.fromkeys(taken + changed)] if taken else changed

    def _record_upstream(self, keys: list[BlockHashWithGroupId]) -> None:
        """The last event stores `keys` on the device."""
        told = self._published[self._device]
        if self._num_behind:
            # Their parents may not have been emitted yet.
            del self._pool.kv_event_queue[-1]
            self._touched.update(dict.fromkeys(keys))
            return
        if not told.isdisjoint(keys):
            del self._pool.kv_event_queue[-1]
            keys = [key for key in keys if key not in told]
            self._publish_stored(keys, self._device)
        told.update(keys)

    def _publish_stored(
        self, keys: Iterable[BlockHashWithGroupId], place: Place
    ) -> None:
        """Emit one event for each chain of `keys`."""
        events = [_decode(self._descriptions[key]) for key in keys]
        for event in events:
            _set_place(event, place)
        self._pool.kv_event_queue.extend(chains(events))

    def _publish_removed(
        self, keys: Iterable[BlockHashWithGroupId], place: Place
    ) -> None:
        """Emit one event for each group of `keys`."""
        queue = self._pool.kv_event_queue
        events: dict[int, BlockRemoved] = {}
        for key in keys:
            group = get_group_id(key)
            if group in events:
                block_hash = maybe_convert_block_hash(get_block_hash(key))
                events[group].block_hashes.append(block_hash)
                continue
            # Upstream makes the event, since not all releases name the group.
            BlockPool._emit_block_removed_events(self._pool, [key])
            event = queue[-1]
            assert isinstance(event, BlockRemoved)
            _set_place(event, place)
            events[group] = event


def _set_place(event: BlockStored | BlockRemoved, place: Place) -> None:
    event.medium, locality = place
    # Older releases lack the field; they have no secondary tiers with events.
    if locality is not None:
        event.locality = locality


class PublishingBlockPool(TieredBlockPool):
    """A `TieredBlockPool` that publishes KV cache events, see `TierEvents`.

    Upstream emits events at the end of three methods, and `TierEvents` corrects them
    then.
    """

    def __init__(self, layout: KVTierLayout, **kwargs: Any) -> None:
        super().__init__(layout, **kwargs)
        others = layout.pool or layout.secondary
        self.events = TierEvents(
            self,
            self.host,
            self.secondary,
            () if others is None else others.block_sizes,
            adopts=layout.pool is not None,
        )

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        num_events = len(self.kv_event_queue)
        # Older releases have no masks.
        mask: dict[str, Any] = {} if block_mask is None else {"block_mask": block_mask}
        place = (num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id)
        super().cache_full_blocks(request, blocks, *place, **mask)
        if len(self.kv_event_queue) > num_events:
            self.events.record_cached(request, blocks, *place, block_mask)

    def cache_partial_block(
        self, *args: Any, **kwargs: Any
    ) -> BlockHashWithGroupId | None:
        num_events = len(self.kv_event_queue)
        key = super().cache_partial_block(*args, **kwargs)
        if key is not None and len(self.kv_event_queue) > num_events:
            self.events.record_partial(key)
        return key

    def emit_cached_block_events(
        self,
        request: Request,
        num_cached_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """As upstream, which can repeat a prefix hit (`kv_cache_report_mode`)."""
        num_events = len(self.kv_event_queue)
        hit = (request, num_cached_blocks, block_size, kv_cache_group_id)
        super().emit_cached_block_events(*hit)
        self.events.correct_hit(num_events, *hit)

    def _emit_block_removed_events(
        self, block_hashes: list[BlockHashWithGroupId]
    ) -> None:
        self.events.record_removed(block_hashes)

    def _clear_host(self) -> None:
        super()._clear_host()
        self.events.record_cleared()

    def serve_late_subscribers(self, publisher: EventPublisher) -> None:
        """Repeat all events if a replay was requested beyond what `publisher` keeps.

        Called in each step.
        """
        if publisher.has_late_subscribers:
            publisher.has_late_subscribers = False
            self.events.republish_all(releases.num_replayed_batches(publisher))

    def take_events(self) -> list[KVCacheEvent]:
        """As upstream, including all changes since the last call."""
        self.events.publish_changes()
        return super().take_events()
