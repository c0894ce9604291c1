# SPDX-License-Identifier: Apache-2.0
"""Eviction policies by name or import path."""

import inspect

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_tier.eviction.arc import ARC
from vllm.v1.kv_tier.eviction.base import EvictionPolicy
from vllm.v1.kv_tier.eviction.lru import LRU
from vllm.v1.kv_tier.eviction.proven import Proven
from vllm.v1.kv_tier.eviction.s3fifo import S3FIFO

POLICIES: dict[str, type[EvictionPolicy]] = {
    "s3fifo": S3FIFO,
    "lru": LRU,
    "arc": ARC,
    "proven": Proven,
}


def make_policy(name: str, num_slots: int) -> EvictionPolicy:
    """Make a policy from its name or import path.

    Args:
        name: A name in `POLICIES`, or `package.module.Class`.
        num_slots: Most keys that can be resident.

    Raises:
        ValueError: There is no such policy, or it is not an `EvictionPolicy`.

    """
    policy: object = None
    if isinstance(name, str):
        policy = POLICIES.get(name)
        if policy is None and "." in name:
            try:
                policy = resolve_obj_by_qualname(name)
            except (ImportError, AttributeError, ValueError) as e:
                raise ValueError(
                    f"--kv-offloading-config: eviction_policy {name!r} cannot be "
                    f"imported ({e}). Give the path package.module.Class."
                ) from e
    if (
        not isinstance(policy, type)
        or not issubclass(policy, EvictionPolicy)
        or inspect.isabstract(policy)
    ):
        raise ValueError(
            f"--kv-offloading-config: unknown eviction_policy {name!r}. Use one of "
            f"{', '.join(POLICIES)}, or the import path of an EvictionPolicy."
        )
    return policy(num_slots)
