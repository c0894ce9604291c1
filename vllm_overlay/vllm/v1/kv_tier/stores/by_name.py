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


KNOWN = f"one of {', '.join(STORES)}, or the import path of a StoreConfig"
EXAMPLE = '[{"type": "fs", "root_dir": "/mnt/kv", "max_gib": 200}]'


def parse_tiers(tiers: Any) -> tuple[tuple[StoreConfig, ...], list[str]]:
    """The settings of `secondary_tiers`, and those keys that belong into `debug`.

    Args:
        tiers: A list of JSON objects, or None.

    Raises:
        ValueError: A line for each wrong setting names it, its value and the fix.

    """
    if tiers is None:
        return (), []
    if not isinstance(tiers, list | tuple):
        raise ValueError(
            f"{SECONDARY_TIERS} must be a list of tiers, got a {type(tiers).__name__}. "
            f"Use {EXAMPLE}."
        )
    found: list[StoreConfig] = []
    moved: list[str] = []
    lines: list[str] = []
    for index, entry in enumerate(tiers):
        try:
            config, keys = parse_entry(entry, index)
        except ValueError as e:
            lines.append(str(e))
        else:
            found.append(config)
            moved += keys
    if lines:
        raise ValueError("\n".join(lines))
    return tuple(found), moved


def parse_entry(entry: Any, index: int = 0) -> tuple[StoreConfig, list[str]]:
    """The settings of an entry of `secondary_tiers`, and those keys that belong into
    `debug`.

    Args:
        entry: A JSON object.
        index: Its place in the list.

    Raises:
        ValueError: The type is unknown, or one of its settings is wrong.

    """
    setting = f"{SECONDARY_TIERS}[{index}]"
    if not isinstance(entry, dict):
        raise ValueError(
            f"{setting} must be an object with a type ({KNOWN}), got a "
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
        raise ValueError(f"{setting}.type must be {KNOWN}, got {kind!r}.")
    return config.from_entry(entry, index)
