# SPDX-License-Identifier: Apache-2.0
"""Public: the base class of eviction policies, and policies by name.

To use your own, subclass `EvictionPolicy` and set `eviction_policy` to its import path.
"""

from vllm.v1.kv_tier.eviction.base import EvictionPolicy, KeyHint
from vllm.v1.kv_tier.eviction.policies import (
    ARC,
    LRU,
    POLICIES,
    S3FIFO,
    AdaptiveSLRU,
    make_policy,
)

__all__ = [
    "ARC",
    "LRU",
    "POLICIES",
    "S3FIFO",
    "KeyHint",
    "EvictionPolicy",
    "AdaptiveSLRU",
    "make_policy",
]
