# SPDX-License-Identifier: Apache-2.0
"""Device memory that is given back (`shrink_after_s`): the entry of this package.

Nothing outside of it imports one of its modules.
"""

from vllm.v1.kv_tier.elastic.device_memory import (
    kv_cache_memory,
    new_kv_cache,
    num_mapped,
    open_elastic,
)
from vllm.v1.kv_tier.elastic.pool import ElasticBlockPool, ElasticPublishingBlockPool

__all__ = [
    "ElasticBlockPool",
    "ElasticPublishingBlockPool",
    "kv_cache_memory",
    "new_kv_cache",
    "num_mapped",
    "open_elastic",
]
