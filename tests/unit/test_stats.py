# SPDX-License-Identifier: Apache-2.0
"""Counts of the tier on a real Prometheus registry."""

from dataclasses import fields
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from vllm.v1.kv_tier.stats import KVTierProm, KVTierStats

LABELS = ["model_name", "engine"]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def prom(registry: CollectorRegistry) -> KVTierProm:
    counter: Any = partial(Counter, registry=registry)
    gauge: Any = partial(Gauge, registry=registry)
    engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    return KVTierProm(counter, gauge, LABELS, engines)


def value(registry: CollectorRegistry, name: str, engine: int = 0) -> float | None:
    labels = {"model_name": "m", "engine": str(engine)}
    return registry.get_sample_value(f"vllm:kv_tier_{name}", labels)


def test_counters_add_up_and_gauges_follow(
    prom: KVTierProm, registry: CollectorRegistry
) -> None:
    prom.observe(KVTierStats(host_hit_tokens=64, loaded_blocks=2, slots_used=9), 0)
    prom.observe(KVTierStats(host_hit_tokens=32, loaded_blocks=1, slots_used=4), 0)
    assert value(registry, "host_hit_tokens_total") == 96
    assert value(registry, "loaded_blocks_total") == 3
    assert value(registry, "slots_used") == 4


def test_engines_count_apart(prom: KVTierProm, registry: CollectorRegistry) -> None:
    prom.observe(KVTierStats(stored_blocks=5), 1)
    assert value(registry, "stored_blocks_total", 1) == 5
    assert value(registry, "stored_blocks_total", 0) == 0


def test_a_step_without_stats_changes_nothing(
    prom: KVTierProm, registry: CollectorRegistry
) -> None:
    prom.observe(KVTierStats(stored_blocks=5), 0)
    before = generate_latest(registry)
    prom.observe(None, 0)
    assert generate_latest(registry) == before


def test_every_count_is_published(
    prom: KVTierProm, registry: CollectorRegistry
) -> None:
    counts = {f.name: i + 1 for i, f in enumerate(fields(KVTierStats))}
    prom.observe(KVTierStats(**counts), 0)
    for name, count in counts.items():
        found = value(registry, f"{name}_total")
        assert count == (value(registry, name) if found is None else found)


class Request:
    def __init__(self, num_preemptions: int) -> None:
        self.num_preemptions = num_preemptions


def test_hits_of_new_and_resumed_requests_count_apart() -> None:
    stats = KVTierStats()
    stats.record_hit(Request(0), 96, 64)  # type: ignore[arg-type]
    stats.record_hit(Request(2), 320, 32)  # type: ignore[arg-type]
    assert stats == KVTierStats(
        device_hit_tokens=32,
        host_hit_tokens=64,
        resumed_device_hit_tokens=288,
        resumed_host_hit_tokens=32,
    )


def test_a_hit_that_ends_inside_a_block_counts_its_tokens_only() -> None:
    """No counter may go down: that kills the API server (upstream #36755)."""
    stats = KVTierStats()
    stats.record_hit(Request(0), 48, 64)  # type: ignore[arg-type]
    assert (stats.device_hit_tokens, stats.host_hit_tokens) == (0, 48)
