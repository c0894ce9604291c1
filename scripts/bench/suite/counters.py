# SPDX-License-Identifier: Apache-2.0
"""What an engine's metrics have counted."""

from collections import defaultdict


def counted() -> dict[str, float]:
    """Values of vLLM's metrics in this process, summed over their labels."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = defaultdict(float)
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                found[sample.name] += sample.value
    return {name: value for name, value in found.items() if name.startswith("vllm:")}


def counted_since(before: dict[str, float]) -> dict[str, float]:
    """What counters and sums have grown by since `before`, a result of `counted`."""
    grown = {
        name: round(value - before.get(name, 0.0), 6)
        for name, value in counted().items()
        if name.endswith(("_total", "_sum", "_count"))
    }
    return {name: value for name, value in grown.items() if value}
