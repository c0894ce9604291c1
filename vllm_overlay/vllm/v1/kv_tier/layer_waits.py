# SPDX-License-Identifier: Apache-2.0
"""The function that upstream's attention layers call before they use the KV cache.

It waits for the layer's own part of the step's loads, as `rank.layers` arranges.
"""

from vllm.v1.kv_tier.rank.layers import LayerWaits

_waits: LayerWaits | None = None


def set_layer_waits(waits: LayerWaits | None) -> None:
    """Set the waits of the rank whose step this process runs."""
    global _waits
    _waits = waits


def wait_for_layer_load(layer: str) -> None:
    """Wait for a layer's loads. Called by every attention layer."""
    if _waits is not None and _waits.is_armed:
        _waits.wait(layer)
