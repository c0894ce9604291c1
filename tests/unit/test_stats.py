# SPDX-License-Identifier: Apache-2.0
"""Counts of the tier on a real Prometheus registry."""

from collections import Counter
from dataclasses import fields
from functools import partial
from typing import Any

import msgspec
import prometheus_client as prometheus
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm.v1.kv_tier.metrics import (
    METRICS,
    PREFIX,
    KVTierLogging,
    KVTierProm,
    device_hits,
)
from vllm.v1.kv_tier.plan import CopyTime
from vllm.v1.kv_tier.stats import KVTierStats, SecondaryStats
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from .tier import SLOT_BYTES, Tier

LABELS = ["model_name", "engine"]


class Published:
    """The metrics of two engines."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter: Any = partial(prometheus.Counter, registry=self.registry)
        gauge: Any = partial(prometheus.Gauge, registry=self.registry)
        histogram: Any = partial(prometheus.Histogram, registry=self.registry)
        self.sources = counter("by_source", "", [*LABELS, "source"])
        engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
        self.prom = KVTierProm(counter, gauge, histogram, self.sources, LABELS, engines)

    def observe(
        self, stats: KVTierStats | None, engine: int = 0, hits: int = 0
    ) -> None:
        both = PrefixCacheStats(requests=1, queries=1000, hits=hits)
        self.prom.observe(
            SchedulerStats(prefix_cache_stats=both, kv_tier_stats=stats), engine
        )

    def value(self, name: str, engine: int = 0, **labels: str) -> float | None:
        labels = {"model_name": "m", "engine": str(engine)} | labels
        return self.registry.get_sample_value(name, labels)

    def tier(self, name: str, engine: int = 0, **labels: str) -> float | None:
        return self.value(PREFIX + name, engine, **labels)


@pytest.fixture
def published() -> Published:
    return Published()


def test_counters_add_up_and_gauges_follow(published: Published) -> None:
    tier = published.tier
    published.observe(KVTierStats(host_hit_tokens=64, loaded_blocks=2, slots_used=9))
    published.observe(
        KVTierStats(host_hit_tokens=32, loaded_blocks=1, slots_used=4, slot_bytes=10)
    )
    assert tier("host_hit_tokens_total") == 96
    assert tier("loaded_blocks_total") == 3
    assert tier("slots_used") == 4
    assert tier("used_bytes") == 40


def test_slots_have_their_former_name(published: Published) -> None:
    """As a counter: it stays when the tier is switched off."""
    for num_slots in (7, 7, 0):
        published.observe(KVTierStats(slots_total=num_slots))
        assert published.tier("host_slots") == num_slots
        assert published.tier("slots_total") == 7


def test_engines_count_apart(published: Published) -> None:
    published.observe(KVTierStats(stored_blocks=5), 1)
    assert published.tier("stored_blocks_total", 1) == 5
    assert published.tier("stored_blocks_total", 0) == 0


def test_a_step_without_stats_changes_nothing(published: Published) -> None:
    published.observe(KVTierStats(stored_blocks=5))
    before = generate_latest(published.registry)
    published.observe(None)
    assert generate_latest(published.registry) == before


def test_every_metric_is_there_from_the_start(published: Published) -> None:
    for metric in METRICS:
        if metric.label and not metric.values:
            # Which tiers are below is known from what they report.
            continue
        suffix = {"counter": "_total", "histogram": "_count"}.get(metric.kind, "")
        for value in metric.values or (None,):
            label = {metric.label: value} if value else {}
            assert published.tier(metric.name + suffix, **label) == 0


def test_upstreams_own_reader_knows_every_kind(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LLM.get_metrics()` raises for a type that it does not know."""
    reader = pytest.importorskip("vllm.v1.metrics.reader")
    monkeypatch.setattr(reader, "REGISTRY", published.registry)
    names = {metric.name for metric in reader.get_metrics_snapshot()}
    known = [metric for metric in METRICS if metric.values or not metric.label]
    assert names >= {PREFIX + metric.name for metric in known}


def test_tiers_below_are_told_apart(published: Published) -> None:
    counts = {
        f.name: i + 1 for i, f in enumerate(fields(SecondaryStats)) if f.default == 0
    }
    some = SecondaryStats(**counts, times=[("get", 3, 0.5)])  # type: ignore[arg-type]
    other = SecondaryStats(stored_blocks=7, stored_bytes=70)
    published.observe(KVTierStats(secondary={"fs": some, "redis": other}))
    for name, count in counts.items():
        found = published.tier(f"secondary_{name}_total", store="fs")
        if found is None:
            found = published.tier(f"secondary_{name}", store="fs")
        assert found == count, name
    assert published.tier("secondary_stored_blocks_total", store="redis") == 7
    assert published.tier("secondary_stored_bytes_total", store="redis") == 70
    assert published.tier("secondary_get_seconds_sum", store="fs") == 0.5


def test_every_count_is_published(published: Published) -> None:
    counts = {
        f.name: i + 1 for i, f in enumerate(fields(KVTierStats)) if f.default == 0
    }
    published.observe(KVTierStats(**counts))  # type: ignore[arg-type]
    for name in ("refused_no_slot", "refused_pinned"):
        reason = name.removeprefix("refused_")
        assert published.tier("refused_stores_total", reason=reason) == counts.pop(name)
    for name, count in counts.items():
        found = published.tier(f"{name}_total")
        assert count == (published.tier(name) if found is None else found)
    for name in ("stored", "loaded", "loaded_ahead"):
        size = counts[f"{name}_blocks"] * counts["slot_bytes"]
        assert published.tier(f"{name}_bytes_total") == size


def test_copies_requests_and_failures(published: Published) -> None:
    tier = published.tier
    stats = KVTierStats(slot_bytes=10**6)
    stats.record_report(
        failures=Counter(load=1),
        times={
            ("store", 1): CopyTime(100, 0.01),
            ("store", 2): CopyTime(100, 0.2),
            ("load", 2): CopyTime(0, 0.5),
            ("stall", 2): CopyTime(1, 0.25),
        },
    )
    stats.record_report(failures=Counter(load=1, odd=1), times={})
    stats.request_hits = [(0, 64), (16, 0)]
    published.observe(stats)
    assert tier("copy_seconds_count", kind="store") == 2
    assert tier("copy_seconds_sum", kind="store") == pytest.approx(0.21)
    assert tier("copy_bytes_per_second_bucket", kind="store", le="1e+09") == 1
    assert tier("copy_bytes_per_second_bucket", kind="store", le="1e+10") == 2
    # It failed.
    assert tier("copy_seconds_count", kind="load") == 0
    assert tier("load_stall_seconds_sum") == 0.25
    assert tier("failures_total", kind="load") == 2
    assert tier("failures_total", kind="odd") == 1
    assert tier("request_hit_tokens_sum", tier="host") == 64
    assert tier("request_hit_tokens_bucket", tier="device", le="0.0") == 1


def test_a_meeting_point_is_a_part_of_the_prompt(published: Published) -> None:
    stats = KVTierStats()
    stats.record_meeting(1024, 4096)
    stats.record_meeting(3072, 4096)
    published.observe(stats.take())
    assert published.tier("meeting_point_bucket", le="0.3") == 1
    assert published.tier("meeting_point_sum") == 1.0
    assert not stats.meeting_points


def test_hits_are_told_apart_by_source(published: Published) -> None:
    published.observe(KVTierStats(host_hit_tokens=64), hits=96)
    assert published.value("by_source_total", source="host") == 64
    stats = SchedulerStats(prefix_cache_stats=PrefixCacheStats(hits=96))
    assert device_hits(stats) == 96
    stats.kv_tier_stats = KVTierStats(host_hit_tokens=64)
    assert device_hits(stats) == 32


def test_hits_of_what_came_from_below_have_its_source(published: Published) -> None:
    files, server = SecondaryStats(hit_tokens=64), SecondaryStats(hit_tokens=48)
    stats = KVTierStats(host_hit_tokens=128, secondary={"fs-2": files, "redis": server})
    published.observe(stats, hits=160)

    def hits(source: str) -> float | None:
        return published.value("by_source_total", source=source)

    assert (hits("disk"), hits("external_unspecified"), hits("host")) == (64, 48, 16)
    # Resumed requests hit, too, and are not counted: no source has more than all.
    published.observe(KVTierStats(secondary={"fs": SecondaryStats(hit_tokens=9)}))
    assert (hits("disk"), hits("host")) == (64, 16)


def test_hits_by_source_never_go_down(published: Published) -> None:
    """That kills the API server (upstream #36755)."""
    published.observe(KVTierStats(host_hit_tokens=64), hits=32)
    assert published.value("by_source_total", source="host") == 32
    stats = SchedulerStats(kv_tier_stats=KVTierStats(host_hit_tokens=64))
    assert device_hits(stats) == 0


def test_the_log_line_has_the_rate_of_the_host() -> None:
    def line(logging: KVTierLogging) -> str:
        parts: list[str] = []
        values: list[int | float | str] = []
        logging.add_to(parts, values)
        return ", ".join(parts) % tuple(values)

    logging = KVTierLogging()
    both = PrefixCacheStats(requests=2, queries=1000, hits=700)
    stats = SchedulerStats(prefix_cache_stats=both)
    logging.observe(stats)
    assert line(logging) == ""
    stats.kv_tier_stats = KVTierStats(host_hit_tokens=250)
    logging.observe(stats)
    assert line(logging) == "Host KV tier hit rate: 25.0%"
    # As upstream's rate, after a reset of the prefix cache.
    both.reset, stats.kv_tier_stats.host_hit_tokens = True, 500
    logging.observe(stats)
    assert line(logging) == "Host KV tier hit rate: 50.0%"


def test_stats_travel_from_the_engine_to_the_api_server() -> None:
    stats = KVTierStats(host_hit_tokens=3, failures={"load": 1})
    stats.times, stats.request_hits = [("store", 4, 0.5)], [(1, 2)]
    packed = msgspec.msgpack.encode(stats)
    assert msgspec.msgpack.decode(packed, type=KVTierStats) == stats


class Request:
    def __init__(self, num_preemptions: int) -> None:
        self.num_preemptions = num_preemptions


def test_hits_of_new_and_resumed_requests_count_apart() -> None:
    stats = KVTierStats()
    stats.record_hit(Request(0), 96, 64)
    stats.record_hit(Request(2), 320, 32)
    stats.record_hit(Request(1), 32, 0)
    assert stats == KVTierStats(
        device_hit_tokens=32,
        host_hit_tokens=64,
        resumed_device_hit_tokens=320,
        resumed_host_hit_tokens=32,
        resumed_from_host=1,
        request_hits=[(32, 64)],
    )


def test_a_hit_that_ends_inside_a_block_counts_its_tokens_only() -> None:
    """No counter may go down: that kills the API server (upstream #36755)."""
    stats = KVTierStats()
    stats.record_hit(Request(0), 48, 64)
    assert (stats.device_hit_tokens, stats.host_hit_tokens) == (0, 48)


def test_samples_that_nobody_takes_do_not_fill_memory() -> None:
    stats = KVTierStats()
    for seq in range(5000):
        stats.record_hit(Request(0), 48, 32)
        stats.record_report(failures={}, times={("store", seq): CopyTime(1, 1.0)})
    assert len(stats.request_hits) == len(stats.times) == 1000
    assert stats.host_hit_tokens == 5000 * 32


# ------------------------------------------------------------- counts of the pool


def test_a_store_without_a_slot_is_refused_and_its_block_lost() -> None:
    tier = Tier(num_blocks=3, num_slots=1)
    tier.computed("abc")
    tier.begin()
    tier.pool.get_new_blocks(3)
    stats = tier.pool.take_stats()
    # Not as many as are stored.
    assert (stats.refused_no_slot, stats.dropped_blocks) == (2, 2)
    assert stats.slots_used == 1


def test_a_slot_that_the_plan_uses_is_not_replaced() -> None:
    tier = Tier(num_blocks=4, num_slots=10)
    tier.demoted("a")
    tier.begin()
    slot = tier.slot("a")
    tier.promote(tier.find("a"))
    # It has another key beside that of the slot.
    block = tier.pool.get_new_blocks(1)[0]
    tier.cache("b", [block])
    tier.pool.cached_block_hashes_by_block[block.block_id] = {slot.keys[0]}
    assert not tier.pool.host_writer.store([block], before_eviction=False)
    stats = tier.pool.take_stats()
    assert stats.refused_pinned == 1 and stats.promoted_blocks == 1


def test_the_backlog_is_what_the_cleaner_has_not_stored() -> None:
    tier = Tier(num_blocks=1000, num_slots=4000)
    tier.computed("".join(chr(i) for i in range(200, 1100)))
    backlog: list[int] = []
    while not backlog or backlog[-1] != 0:
        tier.idle()
        backlog.append(tier.pool.take_stats().cleaner_backlog_blocks)
        assert len(backlog) < 100
    assert backlog[0] > 200 and backlog == sorted(backlog, reverse=True)


def test_with_write_through_the_backlog_is_what_the_step_computes() -> None:
    tier = Tier(num_blocks=10, store_policy="write_through")
    tier.begin()
    tier.compute("abc")
    tier.end()
    assert tier.pool.take_stats().cleaner_backlog_blocks == 3
    tier.idle()
    assert tier.pool.take_stats().cleaner_backlog_blocks == 0


def test_bytes_are_those_of_all_ranks() -> None:
    assert Tier(num_blocks=4).pool.take_stats().slot_bytes == SLOT_BYTES
