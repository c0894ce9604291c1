# SPDX-License-Identifier: Apache-2.0
"""Settings as tests give them, where they belong."""

from typing import Any

from vllm.v1.kv_tier.config import DebugConfig
from vllm.v1.kv_tier.options import keys_of
from vllm.v1.kv_tier.stores.settings import parse_entry

DEBUG_KEYS = keys_of(DebugConfig)


def options(**settings: Any) -> dict[str, Any]:
    """`--kv-offloading-config`, with the keys of its `debug` in there."""
    debug = {k: v for k, v in settings.items() if k in DEBUG_KEYS}
    others = {k: v for k, v in settings.items() if k not in DEBUG_KEYS}
    return {**others, "debug": debug} if debug else others


def with_debug(entry: dict[str, Any], **debug: Any) -> dict[str, Any]:
    """An entry of `secondary_tiers` with more keys in its `debug`."""
    return {**entry, "debug": {**entry.get("debug", {}), **debug}}


def store_config(entry: Any, index: int = 0) -> Any:
    """The settings of an entry of `secondary_tiers`, all of it where it belongs."""
    config, moved = parse_entry(entry, index)
    assert not moved
    return config
