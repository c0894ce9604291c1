# SPDX-License-Identifier: Apache-2.0
"""Counts of the host tier, from the pool to Prometheus."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class KVTierStats:
    """What the tier did since the last report, and its fill."""

    device_hit_tokens: int = 0
    """Prompt tokens of admitted requests that the device cache had."""
    host_hit_tokens: int = 0
    """Prompt tokens of admitted requests that came from host slots."""
    resumed_device_hit_tokens: int = 0
    """As above, for requests that were preempted before."""
    resumed_host_hit_tokens: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    loaded_ahead_blocks: int = 0
    deferred_requests: int = 0
    recomputed_lookups: int = 0
    evicted_slots: int = 0
    slots_used: int = 0
    slots_total: int = 0
    slot_bytes: int = 0
    load_seconds_per_block: float = 0.0
    prefill_seconds_per_block: float = 0.0

    def record_hit(
        self, request: "Request", num_tokens: int, num_host_tokens: int
    ) -> None:
        """Count the prefix hit of a request that is being admitted."""
        # A hit may end inside its last block.
        num_host_tokens = min(num_host_tokens, num_tokens)
        if request.num_preemptions > 0:
            self.resumed_device_hit_tokens += num_tokens - num_host_tokens
            self.resumed_host_hit_tokens += num_host_tokens
        else:
            self.device_hit_tokens += num_tokens - num_host_tokens
            self.host_hit_tokens += num_host_tokens


_COUNTERS = {
    "device_hit_tokens": "Prompt tokens served from the device KV cache.",
    "host_hit_tokens": "Prompt tokens served from the host KV tier.",
    "resumed_device_hit_tokens": (
        "Tokens of resumed (preempted) requests served from the device KV cache."
    ),
    "resumed_host_hit_tokens": (
        "Tokens of resumed (preempted) requests served from the host KV tier."
    ),
    "stored_blocks": "KV blocks copied from device to host.",
    "loaded_blocks": "KV blocks copied from host to device for their own step.",
    "loaded_ahead_blocks": "KV blocks copied from host to device for a later step.",
    "deferred_requests": (
        "Times that a waiting request was passed over in a step because the others "
        "would have waited too long for its loads."
    ),
    "recomputed_lookups": (
        "Prefix lookups that ended at a host slot because computing was cheaper."
    ),
    "evicted_slots": "Host slots evicted to make room.",
}
_GAUGES = {
    "slots_used": "Host slots that hold a KV block.",
    "slots_total": "Host slots.",
    "slot_bytes": "Bytes of one host slot, all ranks together.",
    "load_seconds_per_block": "Measured cost of loading one KV block.",
    "prefill_seconds_per_block": "Measured cost of computing one KV block; 0: not yet.",
}


class KVTierProm:
    """Prometheus metrics `vllm:kv_tier_*`, one child per engine."""

    def __init__(
        self,
        counter_cls: type[Counter],
        gauge_cls: type[Gauge],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        def per_engine(metric: Any) -> dict[int, Any]:
            return {i: metric.labels(*v) for i, v in per_engine_labelvalues.items()}

        self._counters = {
            name: per_engine(counter_cls(f"vllm:kv_tier_{name}", text, labelnames))
            for name, text in _COUNTERS.items()
        }
        self._gauges = {
            name: per_engine(
                gauge_cls(
                    f"vllm:kv_tier_{name}",
                    text,
                    labelnames,
                    multiprocess_mode="mostrecent",
                )
            )
            for name, text in _GAUGES.items()
        }

    def observe(self, stats: KVTierStats | None, engine_idx: int) -> None:
        if stats is None:
            return
        for name, counters in self._counters.items():
            counters[engine_idx].inc(getattr(stats, name))
        for name, gauges in self._gauges.items():
            gauges[engine_idx].set(getattr(stats, name))
