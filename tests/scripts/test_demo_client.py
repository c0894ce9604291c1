# SPDX-License-Identifier: Apache-2.0
"""What the demo reads from a server's metrics page."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from demo.client import Metrics


@pytest.fixture
def metrics() -> Metrics:
    registry = CollectorRegistry()
    hits = Counter("vllm:hit_tokens", "hits", ["engine"], registry=registry)
    hits.labels("0").inc(32)
    hits.labels("1").inc(64)
    info = Gauge("vllm:cache_info", "info", ["num_gpu_blocks"], registry=registry)
    info.labels("72").set(1)
    return Metrics(generate_latest(registry).decode())


def test_value_sums_engines(metrics: Metrics) -> None:
    assert metrics.value("vllm:hit_tokens_total") == 96


def test_label(metrics: Metrics) -> None:
    assert metrics.label("vllm:cache_info", "num_gpu_blocks") == "72"


def test_a_missing_metric_is_an_error_and_not_zero(metrics: Metrics) -> None:
    with pytest.raises(LookupError, match="no vllm:kv_tier_x: is this .* patched"):
        metrics.value("vllm:kv_tier_x")
    with pytest.raises(LookupError, match="no vllm:cache_info with block_size"):
        metrics.label("vllm:cache_info", "block_size")
