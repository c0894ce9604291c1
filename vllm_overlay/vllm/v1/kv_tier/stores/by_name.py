# SPDX-License-Identifier: Apache-2.0
"""Store types by their name in `secondary_tiers`, or by import path."""

import inspect
from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_tier.stores.fs import FsConfig
from vllm.v1.kv_tier.stores.mooncake import MooncakeConfig
from vllm.v1.kv_tier.stores.redis import RedisConfig
from vllm.v1.kv_tier.stores.settings import SECONDARY_TIERS, StoreConfig

STORES: dict[str, type[StoreConfig]] = {
    "fs": FsConfig,
    "redis": RedisConfig,
    "mooncake": MooncakeConfig,
}


def check_entry(entry: Any, index: int = 0) -> StoreConfig:
    """Parse and check an entry of `secondary_tiers`.

    Args:
        entry: The entry as given.
        index: Its index in the list.

    Raises:
        ValueError: The type is unknown, or one of its settings is wrong.

    """
    setting = f"{SECONDARY_TIERS}[{index}]"
    known = f"{', '.join(STORES)}, or the import path of a StoreConfig"
    if not isinstance(entry, dict):
        raise ValueError(
            f"{setting} must be an object with a type (one of {known}), got a "
            f"{type(entry).__name__}."
        )
    kind = entry.get("type")
    config: object = STORES.get(kind) if isinstance(kind, str) else None
    if config is None and isinstance(kind, str) and "." in kind:
        try:
            config = resolve_obj_by_qualname(kind.replace(":", "."))
        except (ImportError, AttributeError, ValueError) as e:
            raise ValueError(
                f"{setting}.type {kind!r} cannot be imported ({e}). Give the path "
                "package.module.Class."
            ) from e
    if (
        not isinstance(config, type)
        or not issubclass(config, StoreConfig)
        or inspect.isabstract(config)
    ):
        raise ValueError(f"{setting}.type must be one of {known}, got {kind!r}.")
    return config.from_entry(entry, index)
