# SPDX-License-Identifier: Apache-2.0
"""Makes the block pool of an engine: upstream's, or one with a host tier."""

from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.elastic import ElasticBlockPool, ElasticPublishingBlockPool
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.scheduler.block_pool import TieredBlockPool
from vllm.v1.kv_tier.scheduler.events import PublishingBlockPool
from vllm.v1.kv_tier.scheduler.shared_pool import (
    PublishingSharedBlockPool,
    SharedBlockPool,
)

__all__ = [
    "ElasticBlockPool",
    "PublishingBlockPool",
    "SharedBlockPool",
    "TieredBlockPool",
    "kv_tier_of",
    "make_block_pool",
]

_is_tiered = False
"""Whether the last pool that was made is tiered, for `kv_tier_of`."""


def make_block_pool(kv_cache_config: Any, *args: Any, **kwargs: Any) -> BlockPool:
    """Make the pool for a `KVCacheConfig`; tiered if the engine has a host tier.

    The other arguments are those of upstream's `BlockPool`, by position or name.
    """
    global _is_tiered
    layout: KVTierLayout | None = kv_cache_config.kv_tier
    _is_tiered = layout is not None
    if layout is None:
        return BlockPool(*args, **kwargs)
    kwargs = releases.pool_arguments(args, kwargs)
    publishes = bool(kwargs.get("enable_kv_cache_events"))
    if layout.elastic is not None:
        elastic = ElasticPublishingBlockPool if publishes else ElasticBlockPool
        pool: TieredBlockPool = elastic(layout, **kwargs)
    elif layout.pool is not None:
        shared = PublishingSharedBlockPool if publishes else SharedBlockPool
        pool = shared(layout, **kwargs)
    else:
        pool = (PublishingBlockPool if publishes else TieredBlockPool)(layout, **kwargs)
    if layout.secondary is not None:
        layout.secondary.begun(pool)
    return pool


def kv_tier_of(pool: BlockPool) -> "TieredBlockPool | None":
    """The pool as a `TieredBlockPool`, or None if the engine has no tier.

    Raises:
        ValueError: The engine's tiered pool was replaced.

    """
    if isinstance(pool, TieredBlockPool):
        return pool
    if _is_tiered:
        raise ValueError(
            "--kv-offloading-backend core: the block pool was replaced by "
            f"{type(pool).__module__}.{type(pool).__qualname__}, which has no host "
            "tier. Remove what replaces it (kvcached does: unset ENABLE_KVCACHED), or "
            "remove the backend."
        )
    return None
