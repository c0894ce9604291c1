# SPDX-License-Identifier: Apache-2.0
"""The stores by their type in `secondary_tiers`."""

from typing import Any

from vllm.v1.kv_tier.stores.base import BlockStore
from vllm.v1.kv_tier.stores.fs import FsConfig, FsStore

STORES = {"fs": (FsConfig, FsStore)}


def check_entry(entry: Any, index: int = 0) -> FsConfig:
    """The settings of an entry of `secondary_tiers`.

    Args:
        entry: As it was given.
        index: Its place in the list.

    Raises:
        ValueError: No such type, or a setting of it is wrong.

    """
    setting = f"--kv-offloading-config: secondary_tiers[{index}]"
    known = ", ".join(STORES)
    if not isinstance(entry, dict):
        raise ValueError(
            f"{setting} must be an object with a type (one of {known}), got {entry!r}."
        )
    kind = entry.get("type")
    if not isinstance(kind, str) or kind not in STORES:
        raise ValueError(f"{setting}.type must be one of {known}, got {kind!r}.")
    config, _ = STORES[kind]
    return config.from_entry(entry)


def open_store(
    config: FsConfig, namespace: str, rank: int, slot_bytes: int
) -> BlockStore:
    """The store of a rank.

    Args:
        config: From `check_entry`.
        namespace: What shaped the bytes, see `identity`.
        rank: Whose part they are.
        slot_bytes: Size of a row, in bytes.

    Raises:
        OSError: It cannot be used.

    """
    (store,) = (s for c, s in STORES.values() if isinstance(config, c))
    return store(config, namespace, rank, slot_bytes)
