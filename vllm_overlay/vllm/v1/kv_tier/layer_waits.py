# SPDX-License-Identifier: Apache-2.0
"""Where attention layers wait for their own part of a step's loads: a door.

Upstream's layers call `wait_for_layer_load`. What they wait for is in `rank.layers`.
"""

from vllm.v1.kv_tier.rank.layers import LayerWaits

_waits: LayerWaits | None = None


def set_layer_waits(waits: LayerWaits | None) -> None:
    """The waits of the rank whose step this process runs."""
    global _waits
    _waits = waits


def wait_for_layer_load(layer: str) -> None:
    """Called by every attention layer before it touches its KV cache."""
    if _waits is not None and _waits.is_armed:
        _waits.wait(layer)
