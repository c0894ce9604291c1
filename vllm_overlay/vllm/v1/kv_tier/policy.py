# SPDX-License-Identifier: Apache-2.0
"""Public: the base class of eviction policies, and policies by name.

To use your own, subclass `EvictionPolicy` and set `eviction_policy` to its import path.
"""

from vllm.v1.kv_tier.eviction.arc import ARC
from vllm.v1.kv_tier.eviction.base import About, EvictionPolicy
from vllm.v1.kv_tier.eviction.by_name import POLICIES, make_policy
from vllm.v1.kv_tier.eviction.lru import LRU
from vllm.v1.kv_tier.eviction.proven import Proven
from vllm.v1.kv_tier.eviction.s3fifo import S3FIFO

__all__ = [
    "ARC",
    "LRU",
    "POLICIES",
    "S3FIFO",
    "About",
    "EvictionPolicy",
    "Proven",
    "make_policy",
]
