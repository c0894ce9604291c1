# SPDX-License-Identifier: Apache-2.0
"""Alert rules and dashboard in ops/: they load, fire, and ask for what is there.

The dashboard's queries run against a real Prometheus in tests/e2e/test_seen.py.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm.v1.kv_tier.metrics import METRICS, PREFIX

OPS = Path(__file__).parents[2] / "ops"
UPSTREAM = {
    "vllm:prefix_cache_queries_total",
    "vllm:time_to_first_token_seconds_bucket",
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian's package prometheus has it)",
)


def promtool(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *args], cwd=OPS, capture_output=True, text=True, timeout=120
    )


@needs_promtool
def test_the_rules_load() -> None:
    run = promtool("check", "rules", "alerts.yml")
    assert run.returncode == 0, run.stdout + run.stderr


@needs_promtool
def test_the_rules_fire_when_they_should() -> None:
    run = promtool("test", "rules", "alerts_test.yml")
    assert run.returncode == 0, run.stdout + run.stderr


def published() -> set[str]:
    suffixes = {
        "counter": ("_total",),
        "gauge": ("",),
        "histogram": ("_bucket", "_sum", "_count"),
    }
    return {PREFIX + m.name + s for m in METRICS for s in suffixes[m.kind]} | UPSTREAM


def asked(text: str) -> set[str]:
    return set(re.findall(r"vllm:\w+", text))


def test_the_rules_ask_for_what_is_published() -> None:
    names = asked((OPS / "alerts.yml").read_text())
    # Named in a text, not asked for.
    names.discard("vllm:kv_tier_copy_bytes_per_second")
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
        *("slots_used", "slots_total", "slot_bytes", "request_hit_tokens"),
        *("stored_blocks", "loaded_blocks", "loaded_ahead_blocks"),
        *("resumed_device_hit_tokens", "resumed_host_hit_tokens"),
    }
    names = asked((OPS / "grafana.json").read_text())
    shown = {m.name for m in METRICS if any(PREFIX + m.name in n for n in names)}
    assert shown | told == {m.name for m in METRICS}
