# SPDX-License-Identifier: Apache-2.0
"""The block pool of an engine that publishes KV cache events."""

from typing import Any

from vllm.distributed.kv_events import EventPublisher, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.config import KVTierLayout
from vllm.v1.kv_tier.scheduling.block_pool import TieredBlockPool
from vllm.v1.kv_tier.scheduling.events import TierEvents
from vllm.v1.request import Request


class PublishingBlockPool(TieredBlockPool):
    """A `TieredBlockPool` that publishes KV cache events, see `TierEvents`.

    Upstream emits events at the end of three methods, and `TierEvents` corrects them
    then.
    """

    def __init__(self, layout: KVTierLayout, **kwargs: Any) -> None:
        super().__init__(layout, **kwargs)
        self.events = TierEvents(self, self.host, self.backing)

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
            self.events.block_range_cached(request, blocks, *place, block_mask)

    def cache_partial_block(
        self, *args: Any, **kwargs: Any
    ) -> BlockHashWithGroupId | None:
        num_events = len(self.kv_event_queue)
        key = super().cache_partial_block(*args, **kwargs)
        if key is not None and len(self.kv_event_queue) > num_events:
            self.events.partial_block_cached(key)
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
        self.events.hit_told(num_events, *hit)

    def _emit_block_removed_events(
        self, block_hashes: list[BlockHashWithGroupId]
    ) -> None:
        self.events.removed_from_device(block_hashes)

    def _clear_host(self) -> None:
        super()._clear_host()
        self.events.all_cleared()

    def serve_late_subscribers(self, publisher: EventPublisher) -> None:
        """Repeat all events if a replay was requested beyond what `publisher` keeps.

        Called in each step.
        """
        if publisher.has_late_subscribers:
            publisher.has_late_subscribers = False
            self.events.tell_all_anew(releases.num_replayed_batches(publisher))

    def take_events(self) -> list[KVCacheEvent]:
        """As upstream, including all changes since the last call."""
        self.events.tell_changes()
        return super().take_events()
