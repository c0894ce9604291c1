# SPDX-License-Identifier: Apache-2.0
"""KV cache events of both tiers, in one stream.

Upstream's pool tells what the device caches while it has the request at hand. A block
goes to the host and comes back without one, so what an event must say is kept for each
key, encoded, as long as one of the tiers has the key.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import msgspec

from vllm.distributed.kv_events import MEDIUM_GPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.kv_tier.config import KVTierLayout
from vllm.v1.kv_tier.host_table import HostSlot
from vllm.v1.kv_tier.pool import Hole, TieredBlockPool
from vllm.v1.request import Request

MEDIUM_CPU = "CPU"
"""As upstream names host memory, in the releases that have a name for it."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BlockStored).decode


class PublishingBlockPool(TieredBlockPool):
    """A `TieredBlockPool` that publishes KV cache events.

    Beside upstream's events, whose `medium` is that of the device: a promotion stores
    on the device, a block that is given a host slot is stored on `CPU`, and one whose
    slot is taken or dropped is removed there. `AllBlocksCleared` clears both.

    A key is stored as often as it is removed. The device may have several blocks with
    the same key, so whoever follows it must count.
    """

    def __init__(self, layout: KVTierLayout, **kwargs: Any) -> None:
        super().__init__(layout, **kwargs)
        self.medium: str = getattr(self, "medium", MEDIUM_GPU)
        # The event that stores each key, and it alone.
        self._descriptions: dict[BlockHashWithGroupId, bytes] = {}
        self.host.on_forget = self._slot_forgotten

    # ---------------------------------------------------- what the device caches

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
        """As upstream; keeps the parts of its event."""
        num_events = len(self.kv_event_queue)
        # Not all releases know masks.
        mask = {} if block_mask is None else {"block_mask": block_mask}
        super().cache_full_blocks(
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            **mask,
        )
        if len(self.kv_event_queue) == num_events:
            return
        event = self.kv_event_queue[-1]
        assert isinstance(event, BlockStored)
        places = [
            i
            for i in range(num_full_blocks - num_cached_blocks)
            if not blocks[num_cached_blocks + i].is_null
            and (block_mask is None or block_mask[i])
        ]
        hashes = self._hashes(request, block_size)
        for n, place in enumerate(places):
            i = num_cached_blocks + place
            key = make_block_hash_with_group_id(hashes[i], kv_cache_group_id)
            if key not in self._descriptions:
                start = place * block_size
                self._descriptions[key] = _encode(
                    msgspec.structs.replace(
                        event,
                        parent_block_hash=(
                            maybe_convert_block_hash(hashes[i - 1]) if i else None
                        ),
                        token_ids=event.token_ids[start : start + block_size],
                        **{name: [v[n]] for name, v in _by_block(event).items()},
                    )
                )

    def cache_partial_block(
        self, *args: Any, **kwargs: Any
    ) -> BlockHashWithGroupId | None:
        """As upstream; keeps its event."""
        num_events = len(self.kv_event_queue)
        key = super().cache_partial_block(*args, **kwargs)
        if key is not None and len(self.kv_event_queue) > num_events:
            event = self.kv_event_queue[-1]
            if isinstance(event, BlockStored):
                self._descriptions.setdefault(key, _encode(event))
        return key

    def emit_cached_block_events(
        self,
        request: Request,
        num_cached_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """As upstream, which tells a request's prefix hit again where that asks for it
        (`kv_cache_report_mode`); each block as on the tier that has it."""
        num_events = len(self.kv_event_queue)
        super().emit_cached_block_events(
            request, num_cached_blocks, block_size, kv_cache_group_id
        )
        hashes = self._hashes(request, block_size)
        keys = [
            make_block_hash_with_group_id(hashes[i], kv_cache_group_id)
            for i in range(num_cached_blocks)
        ]
        media = [self._medium_of(key) for key in keys]
        if MEDIUM_CPU not in media:
            return
        del self.kv_event_queue[num_events:]
        for medium, run in groupby(zip(media, keys), key=lambda each: each[0]):
            if medium is not None:
                self._emit_stored((key for _, key in run), medium)
        if "session_id" in BlockStored.__struct_fields__:
            for event in self.kv_event_queue[num_events:]:
                assert isinstance(event, BlockStored)
                event.session_id = request.session_id

    def _hashes(self, request: Request, block_size: int) -> Any:
        """Of the blocks of a group with `block_size`, as a sequence."""
        # Not all releases have blocks of several sizes.
        if block_size == self.hash_block_size:
            return request.block_hashes
        from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

        return BlockHashListWithBlockSize(
            request.block_hashes, self.hash_block_size, block_size
        )

    def _medium_of(self, key: BlockHashWithGroupId) -> str | None:
        """Of the tier that lookups would find `key` on."""
        if self.cached_block_hash_to_block.get_one_block(key) is not None:
            return self.medium
        return MEDIUM_CPU if self.host.get(key) is not None else None

    def _emit_block_removed_events(
        self, block_hashes: list[BlockHashWithGroupId]
    ) -> None:
        super()._emit_block_removed_events(block_hashes)
        self._forget_descriptions(block_hashes)

    # ------------------------------------------------------- what the tier moves

    def _load(self, holes: list[Hole], hits: list[KVCacheBlock], ahead: bool) -> int:
        seq = super()._load(holes, hits, ahead)
        keys = (key for _, _, slot in holes for key in slot.keys)
        self._emit_stored(keys, self.medium)
        return seq

    def _queue_store(self, block: KVCacheBlock, ahead: bool = False) -> bool:
        if not super()._queue_store(block, ahead):
            return False
        self._emit_stored(self._keys(block), MEDIUM_CPU)
        return True

    def _slot_forgotten(self, slot: HostSlot) -> None:
        num_events = len(self.kv_event_queue)
        super()._emit_block_removed_events(list(slot.keys))
        for event in self.kv_event_queue[num_events:]:
            assert isinstance(event, BlockRemoved)
            event.medium = MEDIUM_CPU
        self._forget_descriptions(slot.keys)

    def _clear_host(self) -> None:
        num_events = len(self.kv_event_queue)
        super()._clear_host()
        # The last event said so already, for both tiers.
        del self.kv_event_queue[num_events:]
        self._descriptions.clear()

    # -------------------------------------------------------------------- events

    def _emit_stored(self, keys: Iterable[BlockHashWithGroupId], medium: str) -> None:
        """One event for each chain of `keys`."""
        last: BlockStored | None = None
        for key in keys:
            event = _decode(self._descriptions[key])
            event.medium = medium
            if last is None or not _append(last, event):
                self.kv_event_queue.append(event)
                last = event

    def _forget_descriptions(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Of those of `keys` that neither tier has any more."""
        for key in keys:
            if self._medium_of(key) is None:
                self._descriptions.pop(key, None)


def _by_block(event: BlockStored) -> dict[str, list[Any]]:
    """Fields of `event` with an entry for each of its blocks."""
    values = {name: getattr(event, name) for name in event.__struct_fields__}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, list)
        and name != "token_ids"
        and len(value) == len(event.block_hashes)
    }


def _append(event: BlockStored, other: BlockStored) -> bool:
    """Append `other` to `event` if it goes on where that ends.

    Returns:
        Whether it does.

    """
    if other.parent_block_hash != event.block_hashes[-1]:
        return False
    lists = ("token_ids", *_by_block(other))
    for name in event.__struct_fields__:
        ours, theirs = getattr(event, name), getattr(other, name)
        if name in lists:
            if not isinstance(ours, list):
                return False
        elif name != "parent_block_hash" and ours != theirs:
            return False
    for name in lists:
        getattr(event, name).extend(getattr(other, name))
    return True
