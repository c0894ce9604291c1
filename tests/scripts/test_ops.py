# SPDX-License-Identifier: Apache-2.0
"""Alert rules and dashboard in ops/: they load, fire, and ask for what is there.

The dashboard's queries run against a real Prometheus in tests/e2e/test_seen.py.
"""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from tests.promtool import asked, lint, needs_promtool, promtool
from vllm.v1.kv_tier.metrics import METRICS, PREFIX, KVTierProm

OPS = Path(__file__).parents[2] / "ops"
UPSTREAM = {
    "vllm:prefix_cache_queries_total",
    "vllm:time_to_first_token_seconds_bucket",
}


@needs_promtool
def test_the_rules_load() -> None:
    run = promtool("check", "rules", OPS / "alerts.yml")
    assert run.returncode == 0, run.stdout + run.stderr


@needs_promtool
def test_the_rules_fire_when_they_should() -> None:
    run = promtool("test", "rules", OPS / "alerts_test.yml")
    assert run.returncode == 0, run.stdout + run.stderr


def page() -> str:
    """The tier's part of /metrics, without a server."""
    registry = CollectorRegistry()
    own: dict[str, Any] = {"registry": registry}

    KVTierProm(
        partial(Counter, **own),  # type: ignore[arg-type]
        partial(Gauge, **own),  # type: ignore[arg-type]
        partial(Histogram, **own),  # type: ignore[arg-type]
        None,
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    return generate_latest(registry).decode()


@needs_promtool
def test_promtool_has_nothing_against_the_metrics() -> None:
    assert "vllm:kv_tier_slots_total{" in page(), "the former name"
    assert lint(page()) == []


@needs_promtool
def test_promtool_notices_a_gauge_with_the_name_of_a_counter() -> None:
    old = re.sub(r"kv_tier_host_slots\b", "kv_tier_host_slots_total", page())
    assert len(lint(old)) == 1


def published() -> set[str]:
    suffixes = {
        "counter": ("_total",),
        "gauge": ("",),
        "histogram": ("_bucket", "_sum", "_count"),
    }
    return {PREFIX + m.name + s for m in METRICS for s in suffixes[m.kind]} | UPSTREAM


def test_the_rules_ask_for_what_is_published() -> None:
    names = asked((OPS / "alerts.yml").read_text())
    # Named in a text, not asked for.
    names.discard("vllm:kv_tier_copy_bytes_per_second_bucket")
    assert names and names <= published()
    assert names <= asked((OPS / "alerts_test.yml").read_text()), "untested"


def test_the_dashboard_asks_for_what_is_published() -> None:
    text = (OPS / "grafana.json").read_text()
    assert asked(text) <= published()
    dashboard = json.loads(text)
    labels = {m.label for m in METRICS if m.label} | {"le"}
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert used <= labels
            assert all(re.search(rf"by \([^)]*\b{u}\b", target["expr"]) for u in used)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(
        dashboard["panels"]
    )


def test_every_kind_of_metric_is_on_the_dashboard() -> None:
    """But those that another one on it tells, too."""
    told = {
        *("slots_used", "slots", "host_slots", "slot_bytes", "request_hit_tokens"),
        *("stored_blocks", "loaded_blocks", "loaded_ahead_blocks"),
        *("resumed_device_hit_tokens", "resumed_host_hit_tokens"),
        *("secondary_stored_blocks", "secondary_loaded_blocks"),
        *("secondary_writing_blocks", "secondary_due_blocks", "secondary_is_closed"),
        *("secondary_missed_blocks", "secondary_late_requests"),
        "neighbour_blocks",
        *("hints", "retained_blocks", "yielded_slots", "tenant_slots"),
        "superseded_slots",
    }
    names = asked((OPS / "grafana.json").read_text())
    shown = {m.name for m in METRICS if any(PREFIX + m.name in n for n in names)}
    assert shown | told == {m.name for m in METRICS}


def test_the_dashboard_is_one_to_import() -> None:
    """What Grafana needs of a file that is imported into an instance without it: a
    place for each panel, sources that it can ask for, and variables that exist."""
    dashboard = json.loads((OPS / "grafana.json").read_text())
    # An id is that of another instance's database.
    assert "id" not in dashboard and isinstance(dashboard["schemaVersion"], int)
    assert re.fullmatch(r"[\w-]{1,40}", dashboard["uid"])
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(dashboard)))
    assert used == {*variables}
    source = {"type": "prometheus", "uid": "${datasource}"}
    places: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["title"] and panel["datasource"] == source
        names = [target["refId"] for target in panel["targets"]]
        assert names and len(set(names)) == len(names)
        assert all(target["datasource"] == source for target in panel["targets"])
        x, y, width, height = (panel["gridPos"][name] for name in "xywh")
        taken = {(x + i, y + j) for i in range(width) for j in range(height)}
        assert x + width <= 24 and not taken & places, panel["title"]
        places |= taken
