# SPDX-License-Identifier: Apache-2.0
"""The tier's metrics `vllm:kv_tier_*`, and its part of the periodic log line."""

import time
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from prometheus_client import Counter, Gauge, Histogram

from vllm.v1.kv_tier.hints.schema import KINDS
from vllm.v1.kv_tier.stats import KVTierStats, SecondaryStats
from vllm.v1.metrics.stats import CachingMetrics, PrefixCacheStats, SchedulerStats

PREFIX = "vllm:kv_tier_"


@dataclass(frozen=True)
class Metric:
    """A metric. `name` excludes `PREFIX` and suffixes that Prometheus adds."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    label: str = ""
    values: tuple[str, ...] = ()
    """Known values of the label, which exist from the start."""
    buckets: tuple[float, ...] = ()


def _decades(first: int, last: int) -> tuple[float, ...]:
    """1, 2 and 5 times each power of ten."""
    powers = range(first, last)
    return (*(float(f"{m}e{e}") for e, m in product(powers, (1, 2, 5))), 10.0**last)


_TIERS = ("device", "host")
_HIT_SOURCES = {"fs": "disk"}
"""Upstream's `CacheHitSource` for hits of secondary tiers, by their type."""
_COPIES = ("store", "clean", "load", "load_ahead")
FAILURES = ("store", "load", "layer_wait", "hang")

_SECONDARY: tuple[tuple[str, Literal["counter", "gauge"], str], ...] = (
    ("loaded_tokens", "counter", "Prompt tokens whose KV was read from it."),
    ("hit_tokens", "counter", "Of these, prompt tokens that requests hit, once each."),
    ("loaded_blocks", "counter", "KV blocks read from it."),
    ("loaded_bytes", "counter", "Bytes of these blocks, all ranks together."),
    ("missed_blocks", "counter", "KV blocks that it had listed but did not deliver."),
    ("overtaken_blocks", "counter", "KV blocks computed while they were being read."),
    ("late_requests", "counter", "Requests that stopped waiting for it."),
    ("stored_blocks", "counter", "KV blocks written to it."),
    ("stored_bytes", "counter", "Bytes of these blocks, all ranks together."),
    ("refused_blocks", "counter", "KV blocks that it did not take: full, or failed."),
    ("dropped_blocks", "counter", "KV blocks that left the host before their turn."),
    ("evicted_bytes", "counter", "Bytes that this engine evicted for max_gib."),
    ("due_blocks", "gauge", "KV blocks that wait to be written."),
    ("writing_blocks", "gauge", "Host slots that are being written."),
    ("filling_blocks", "gauge", "Host slots that are reserved for reads from it."),
    ("is_closed", "gauge", "1 while it is not read from because it was too slow."),
)

METRICS = (
    Metric("slots_used", "gauge", "Host slots that hold a KV block."),
    Metric("host_slots", "gauge", "Host slots that are open: that may be filled."),
    Metric("reserved_slots", "gauge", "Host slots when all are open."),
    # Dashboards of core.1 use this name, which Prometheus reserves for counters.
    Metric(
        "slots",
        "counter",
        "Host slots allocated since the start: former name of host_slots. "
        "Gone in the next version.",
    ),
    Metric("slot_bytes", "gauge", "Bytes of one host slot, all ranks together."),
    Metric("used_bytes", "gauge", "Bytes of the host slots that hold a KV block."),
    Metric("total_bytes", "gauge", "Bytes of all host slots."),
    Metric(
        "device_hit_tokens",
        "counter",
        "Prompt tokens of new requests served from the device KV cache.",
    ),
    Metric(
        "host_hit_tokens",
        "counter",
        "Prompt tokens of new requests served from the host KV tier.",
    ),
    Metric(
        "request_hit_tokens",
        "histogram",
        "Prompt tokens of one new request served from a tier; requests without a "
        "prefix hit are left out.",
        "tier",
        _TIERS,
        (0.0, *(float(16 * 4**i) for i in range(9))),
    ),
    Metric(
        "resumed_device_hit_tokens",
        "counter",
        "Tokens of resumed (preempted) requests served from the device KV cache.",
    ),
    Metric(
        "resumed_host_hit_tokens",
        "counter",
        "Tokens of resumed (preempted) requests served from the host KV tier.",
    ),
    Metric(
        "resumed_from_host",
        "counter",
        "Times that a preempted request went on with blocks from the host KV tier.",
    ),
    Metric(
        "jumped_tokens",
        "counter",
        "Prompt tokens that running requests skipped, fetched or computed meanwhile.",
    ),
    Metric(
        "meeting_point",
        "histogram",
        "Part of its prompt that a request had when it met what was fetched for it.",
        buckets=tuple(i / 10 for i in range(1, 11)),
    ),
    Metric("device_mapped_bytes", "gauge", "Device memory of blocks that have some."),
    Metric("device_unmapped_bytes", "gauge", "Device memory that was given back."),
    Metric("given_back_pages", "counter", "Device pages that were given back."),
    Metric("mapped_pages", "counter", "Device pages that got memory again."),
    Metric("map_seconds", "counter", "Seconds of the driver to map pages (GPU)."),
    Metric("unmap_seconds", "counter", "Seconds of the driver to unmap pages (GPU)."),
    Metric("stored_blocks", "counter", "KV blocks copied from device to host."),
    Metric("stored_bytes", "counter", "Bytes copied from device to host."),
    Metric(
        "loaded_blocks",
        "counter",
        "KV blocks copied from host to device for their own step.",
    ),
    Metric("loaded_bytes", "counter", "Bytes of these blocks."),
    Metric(
        "loaded_ahead_blocks",
        "counter",
        "KV blocks copied from host to device for a later step.",
    ),
    Metric(
        "loaded_ahead_bytes",
        "counter",
        "Bytes copied from host to device for a later step.",
    ),
    Metric(
        "copy_seconds",
        "histogram",
        "Duration of the copies of one kind in one step, on the slowest rank, without "
        "pauses for more urgent work. store: the step waits for it; clean: ahead of "
        "eviction.",
        "kind",
        _COPIES,
        _decades(-4, 1),
    ),
    Metric(
        "copy_bytes_per_second",
        "histogram",
        "Rate of the copies of one kind in one step, all ranks together.",
        "kind",
        _COPIES,
        _decades(8, 12),
    ),
    Metric(
        "load_stall_seconds",
        "histogram",
        "How long the forward pass of a step with loads waited for them, on the "
        "slowest rank.",
        buckets=_decades(-5, 0),
    ),
    Metric("promoted_blocks", "counter", "Host slots that became device blocks."),
    Metric(
        "neighbour_blocks",
        "counter",
        "Blocks loaded from slots of other engines of the pool.",
    ),
    Metric("evicted_slots", "counter", "Host slots evicted to make room."),
    Metric(
        "superseded_slots",
        "counter",
        "Of these, host slots with ends of windows or states of earlier turns, which a "
        "later turn of the same conversation had replaced.",
    ),
    Metric(
        "refused_stores",
        "counter",
        "Stores that were not queued: the current plan uses every slot (no_slot), or "
        "the one that the store would replace (pinned).",
        "reason",
        ("no_slot", "pinned"),
    ),
    Metric(
        "dropped_blocks",
        "counter",
        "KV blocks that the device evicted before they were on the host, and whose "
        "store was refused.",
    ),
    Metric(
        "passed_over_blocks",
        "counter",
        "KV blocks that the device evicted without storing them: not used often enough "
        "(store_from_use), or of a finished conversation.",
    ),
    Metric(
        "released_blocks",
        "counter",
        "KV blocks, on the device or the host, of conversations that a hint released.",
    ),
    Metric("refused_hints", "counter", "Requests with invalid hints."),
    Metric(
        "hints", "counter", "Hints by kind, of requests and after them.", "kind", KINDS
    ),
    Metric("retained_blocks", "counter", "KV blocks that requests asked to keep."),
    Metric("yielded_slots", "counter", "Host slots evicted though retained."),
    Metric("prewarmed_blocks", "counter", "KV blocks requested to be prewarmed."),
    Metric("prewarmed_used_blocks", "counter", "Of these, hit by another request."),
    Metric("prewarmed_late_blocks", "counter", "Of these, computed by one meanwhile."),
    Metric("tenant_slots", "gauge", "Host slots of a tenant with a quota.", "tenant"),
    Metric(
        "cleaner_backlog_blocks",
        "gauge",
        "Blocks to be stored ahead of their eviction that are not stored yet.",
    ),
    Metric(
        "deferred_requests",
        "counter",
        "Times that a waiting request was deferred in a step because its loads would "
        "have held up the others for too long.",
    ),
    Metric(
        "recomputed_lookups",
        "counter",
        "Prefix lookups that ended at a host slot because computing was cheaper.",
    ),
    Metric("load_seconds_per_block", "gauge", "Measured cost of loading one KV block."),
    Metric(
        "prefill_seconds_per_block",
        "gauge",
        "Measured cost of computing one KV block; 0 if not measured yet.",
    ),
    Metric(
        "failures",
        "counter",
        "Steps in which copies failed (store, load), a layer did not wait for its "
        "loads (layer_wait), or a copy did not end (hang); what depends on them is "
        "computed again.",
        "kind",
        FAILURES,
    ),
    *(
        Metric(f"secondary_{name}", kind, f"Of a secondary tier. {text}", "store")
        for name, kind, text in _SECONDARY
    ),
    *(
        Metric(
            f"secondary_{kind}_seconds",
            "histogram",
            f"Of a secondary tier. Duration of the {what} of one step, on the slowest "
            "rank.",
            "store",
            buckets=_decades(-4, 2),
        )
        for kind, what in (("put", "writes"), ("get", "reads"))
    ),
)

_UNLABELLED = tuple(m for m in METRICS if m.kind != "histogram" and not m.label)
_SOURCE = "hits by source"
_SHOWN_S = 1.0


class KVTierProm:
    """Prometheus metrics of the tier, with one child per engine and label value.

    Args:
        counter_cls: Class of counters.
        gauge_cls: Class of gauges.
        histogram_cls: Class of histograms.
        hits_by_source: Upstream's counter of hit tokens, whose last label is the
            `CacheHitSource`. None in releases without it.
        labelnames: Labels of every metric.
        per_engine_labelvalues: Values of these labels, by engine.

    """

    def __init__(
        self,
        counter_cls: type[Counter],
        gauge_cls: type[Gauge],
        histogram_cls: type[Histogram],
        hits_by_source: Counter | None,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._labelvalues = per_engine_labelvalues
        self._metrics: dict[str, Any] = {}
        if hits_by_source is not None:
            self._metrics[_SOURCE] = hits_by_source
        self._allocated = dict.fromkeys(per_engine_labelvalues, 0)
        # Values of gauges, by engine and name, and until when they need not be set
        # if they do not change.
        self._shown: dict[int, dict[str, float]] = {e: {} for e in self._labelvalues}
        self._shown_until = dict.fromkeys(per_engine_labelvalues, 0.0)
        self._children: dict[tuple[str, int, str], Any] = {}
        for metric in METRICS:
            cls: Any = counter_cls
            options: dict[str, Any] = {}
            if metric.kind == "gauge":
                cls, options = gauge_cls, {"multiprocess_mode": "mostrecent"}
            elif metric.kind == "histogram":
                cls, options = histogram_cls, {"buckets": metric.buckets}
            names = [*labelnames, metric.label] if metric.label else labelnames
            name = PREFIX + metric.name
            self._metrics[metric.name] = cls(name, metric.text, names, **options)
            for engine in per_engine_labelvalues:
                # Labels of secondary tiers are known when they report.
                for value in metric.values or ([] if metric.label else [""]):
                    self._child(metric.name, engine, value)

    def _child(self, name: str, engine: int, label: str = "") -> Any:
        key = name, engine, label
        if key not in self._children:
            values = [*self._labelvalues[engine], *([label] if label else [])]
            self._children[key] = self._metrics[name].labels(*values)
        return self._children[key]

    def observe(self, scheduler_stats: SchedulerStats, engine: int) -> None:
        """Publish the stats of `engine`."""
        stats = scheduler_stats.kv_tier_stats
        if stats is None:
            return
        if _SOURCE in self._metrics:
            for source, num_tokens in _host_hits(scheduler_stats).items():
                self._child(_SOURCE, engine, source).inc(num_tokens)
        counts = _counts(stats)
        counts["slots"] = max(0, stats.slots_total - self._allocated[engine])
        self._allocated[engine] += counts["slots"]
        if (now := time.monotonic()) > self._shown_until[engine]:
            # Of the values of several API servers the most recent one counts.
            self._shown[engine].clear()
            self._shown_until[engine] = now + _SHOWN_S
        shown = self._shown[engine]
        for metric in _UNLABELLED:
            # Most have not changed since the step before, and a call of each would
            # take longer than the output of a step in the process that sends answers.
            value = counts[metric.name]
            if metric.kind == "counter":
                if value:
                    self._child(metric.name, engine).inc(value)
            elif shown.get(metric.name) != value:
                shown[metric.name] = value
                self._child(metric.name, engine).set(value)
        refused = {"no_slot": stats.refused_no_slot, "pinned": stats.refused_pinned}
        with_labels = ("failures", stats.failures), ("hints", stats.hints)
        for name, by_label in (("refused_stores", refused), *with_labels):
            for label, count in by_label.items():
                self._child(name, engine, label).inc(count)
        for tenant, num_slots in stats.tenant_slots.items():
            self._child("tenant_slots", engine, tenant).set(num_slots)
        for hit in stats.request_hits:
            for tier, num_tokens in zip(_TIERS, hit):
                self._child("request_hit_tokens", engine, tier).observe(num_tokens)
        for part in stats.meeting_points:
            self._child("meeting_point", engine).observe(part)
        for store, each in stats.secondary.items():
            self._observe_secondary(each, engine, store)
        for kind, num_blocks, seconds in stats.times:
            if kind == "stall":
                self._child("load_stall_seconds", engine).observe(seconds)
            elif num_blocks:
                self._child("copy_seconds", engine, kind).observe(seconds)
                rate = num_blocks * stats.slot_bytes / seconds if seconds else 0.0
                self._child("copy_bytes_per_second", engine, kind).observe(rate)

    def _observe_secondary(
        self, stats: SecondaryStats, engine: int, store: str
    ) -> None:
        counts = vars(stats)
        for name, is_a, _ in _SECONDARY:
            child = self._child(f"secondary_{name}", engine, store)
            (child.inc if is_a == "counter" else child.set)(counts[name])
        for kind, _, seconds in stats.times:
            child = self._child(f"secondary_{kind}_seconds", engine, store)
            child.observe(seconds)


def _counts(stats: KVTierStats) -> dict[str, Any]:
    """Values of the metrics that have no label of their own."""
    size = stats.slot_bytes
    return vars(stats) | {
        "host_slots": stats.slots_total,
        "used_bytes": stats.slots_used * size,
        "total_bytes": stats.slots_total * size,
        "stored_bytes": stats.stored_blocks * size,
        "loaded_bytes": stats.loaded_blocks * size,
        "loaded_ahead_bytes": stats.loaded_ahead_blocks * size,
    }


def device_hits(stats: SchedulerStats) -> int:
    """Tokens of the prefix hits in `stats` that the device had."""
    hits = stats.prefix_cache_stats.hits
    if stats.kv_tier_stats is None:
        return hits
    # A counter that decreases would crash the API server (upstream #36755).
    return max(0, hits - stats.kv_tier_stats.host_hit_tokens)


def _host_hits(stats: SchedulerStats) -> dict[str, int]:
    """Tokens of the prefix hits from host slots, by the tier that they came from."""
    assert stats.kv_tier_stats is not None
    from_host = stats.prefix_cache_stats.hits - device_hits(stats)
    hits: dict[str, int] = {}
    for store, each in stats.kv_tier_stats.secondary.items():
        source = _HIT_SOURCES.get(store.partition("-")[0], "external_unspecified")
        num_tokens = min(each.hit_tokens, from_host)
        hits[source] = hits.get(source, 0) + num_tokens
        from_host -= num_tokens
    return hits | {"host": from_host}


class KVTierLogging:
    """The tier's part of the periodic log line.

    The hit rate covers the same requests as upstream's own.
    """

    def __init__(self) -> None:
        self._hits = CachingMetrics()

    def observe(self, stats: SchedulerStats) -> None:
        if stats.kv_tier_stats is None:
            return
        both = stats.prefix_cache_stats
        self._hits.observe(
            PrefixCacheStats(
                reset=both.reset,
                requests=both.requests,
                queries=both.queries,
                hits=stats.kv_tier_stats.host_hit_tokens,
            )
        )

    def add_to(self, parts: list[str], args: list[int | float | str]) -> None:
        """Append to the format and the values of the log line."""
        if not self._hits.empty:
            parts.append("Host KV tier hit rate: %.1f%%")
            args.append(self._hits.hit_rate * 100)
