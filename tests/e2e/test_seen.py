# SPDX-License-Identifier: Apache-2.0
"""What an operator and a router see of the demo's server: metrics and KV events.

The conversations of `make demo`, over HTTP, on a smaller model; then a crowd that
outgrows the device cache. The pool's own state comes from `open_scheduler`.
"""

import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.suite.model import QWEN3, Shape, write_model
from demo.__main__ import Sizes
from demo.client import ChatClient
from demo.prose import chapters
from demo.tokenizer import write_tokenizer
from tests.follower import Follower, Subscriber
from tests.promtool import asked, lint, needs_promtool
from vllm.v1.kv_tier.metrics import METRICS, PREFIX

from .conftest import ROOT, environment
from .prometheus import MISSING, Prometheus
from .release import UNBOUND
from .server import Server

SHAPE = Shape(256, 512, 2, 12, 2, 64, vocab=32768, max_len=4096)
# All are admitted, and outgrow the device cache together.
CROWD, CROWD_CHARS, CROWD_TOKENS = 8, 700, 200
TURNS = 3
PATIENCE_S = 60
HAS_SOURCES = find_spec("vllm.v1.metrics.cache_hit_source") is not None
"""Upstream counts cached tokens by where they come from."""


@dataclass
class Seen:
    """What was seen at rest."""

    cached_tokens: list[int]
    """`usage.prompt_tokens_details.cached_tokens` of every response."""
    samples: dict[tuple[str, frozenset], float]
    """Of /metrics, by name and labels (without engine and model)."""
    state: dict[str, Any]
    follower: Follower
    after_reset: "Seen | None" = None
    log: str = ""
    queried: dict[str, list[float]] | None = None
    """Values of the dashboard's queries; None without a Prometheus."""
    rules: list[dict[str, Any]] = field(default_factory=list)
    page: str = ""
    """/metrics at the end."""

    def value(self, name: str, **labels: str) -> float:
        return self.samples[PREFIX + name, frozenset(labels.items())]


class Watched:
    """A server and its followers."""

    def __init__(self, server: Server, subscriber: Subscriber, state: Path) -> None:
        self.server = server
        self.subscriber = subscriber
        self.follower = Follower()
        self._state = state
        self._cached: list[int] = []

    def talk(self) -> None:
        """Some turns of the demo's conversations; then many write at once."""
        sizes = Sizes()
        sayings = sizes.sayings()
        histories: list[list[dict[str, str]]] = [[] for _ in sayings]
        with ChatClient(self.server.url) as client:
            for turn in range(TURNS):
                for history, said in zip(histories, sayings):
                    history.append({"role": "user", "content": said[turn]})
                    answer = client.ask(history, sizes.answer_tokens)
                    history.append({"role": "assistant", "content": answer.text})
                    self._cached.append(answer.cached_tokens)

            # Who asks again at once finds the device cache.
            self._cached.append(client.ask(history[:-1], 1).cached_tokens)

            def write(i: int) -> int:
                begin = f"{i}. {sayings[i % len(sayings)][0][:CROWD_CHARS]}"
                message = {"role": "user", "content": begin}
                return client.ask([message], CROWD_TOKENS).cached_tokens

            with ThreadPoolExecutor(CROWD) as users:
                self._cached += users.map(write, range(CROWD))

    def reset(self) -> None:
        url = f"{self.server.url}/reset_prefix_cache"
        request = urllib.request.Request(url, method="POST")
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200

    def look(self) -> Seen:
        """Once nothing changes any more."""
        deadline = time.monotonic() + PATIENCE_S
        before: object = None
        while time.monotonic() < deadline:
            events = self.subscriber.receive(timeout_s=1)
            if events is not None:
                self.follower.follow(events)
                continue
            now = self._state.read_text(), self._samples()
            if now == before:
                state, samples = now
                return Seen(
                    self._cached.copy(), samples, json.loads(state), self.follower
                )
            before = now
        raise AssertionError("the server does not come to rest")

    def _samples(self) -> dict[tuple[str, frozenset], float]:
        found: dict[tuple[str, frozenset], float] = {}
        for family in text_string_to_metric_families(self.server.get("/metrics")):
            for sample in family.samples:
                labels = sample.labels.items()
                own = frozenset(x for x in labels if x[0] not in _COMMON)
                found[sample.name, own] = sample.value
        return {k: v for k, v in found.items() if k[0].startswith(_NAMES)}


_COMMON = ("engine", "model_name")
_NAMES = (PREFIX, "vllm:prompt_tokens_cached", "vllm:prefix_cache_hits")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("seen")
    tokenizer = write_tokenizer(folder / "model")
    said = set(tokenizer(" ".join(chapters())).input_ids)
    said -= set(tokenizer.all_special_ids)
    write_model(folder / "model", SHAPE, "cpu", QWEN3, said)
    endpoint = f"ipc://{folder}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    flags = [
        *Sizes().flags(SHAPE, tier=True),
        *("--kv-events-config", json.dumps(events)),
        *("--scheduler-cls", "tests.e2e.open_scheduler.OpenScheduler"),
        # Nobody is deferred for long, but some loads come ahead.
        *("--kv-offloading-config", '{"debug": {"max_load_stall_ms": 0}}'),
    ]
    env = environment() | {
        "HF_HUB_OFFLINE": "1",
        "KV_TIER_STATE": str(folder / "state.json"),
        "VLLM_LOG_STATS_INTERVAL": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        **UNBOUND,
    }
    subscriber = Subscriber(endpoint)
    server = Server(folder / "model", flags, env, folder / "log")
    try:
        yield Watched(server, subscriber, folder / "state.json")
    finally:
        server.kill()
        subscriber.close()


OPS = ROOT / "ops"


@pytest.fixture(scope="module")
def seen(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """After the talk; and after a reset and some more of it."""
    prometheus = None
    if not MISSING:
        folder = tmp_path_factory.mktemp("prometheus") / "own"
        prometheus = Prometheus(watched.server.url, OPS / "alerts.yml", folder)
    try:
        if prometheus is not None:
            prometheus.wait_for("vllm:kv_tier_host_slots")
        watched.talk()
        seen = watched.look()
        seen.follower = _copy(seen.follower)
        watched.reset()
        watched.talk()
        seen.after_reset = watched.look()
        seen.log = watched.server.log()
        seen.page = watched.server.get("/metrics")
        if prometheus is not None:
            host = seen.after_reset.value("host_hit_tokens_total")
            prometheus.wait_for(f"vllm:kv_tier_host_hit_tokens_total == {host}")
            seen.queried = {
                expression: [float(s["value"][1]) for s in prometheus.query(expression)]
                for expression in dashboard_queries()
            }
            seen.rules = prometheus.rules()
    finally:
        if prometheus is not None:
            prometheus.stop()
    return seen


def dashboard_queries() -> list[str]:
    """As Grafana sends them."""
    dashboard = json.loads((OPS / "grafana.json").read_text())
    variables = {"$__rate_interval": "10m", "$model": ".*", "$engine": ".*"}
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    for name, value in variables.items():
        queries = [query.replace(name, value) for query in queries]
    assert not any("$" in query for query in queries)
    return queries


def _copy(follower: Follower) -> Follower:
    new = Follower()
    new.blocks, new.num_events = follower.blocks.copy(), follower.num_events.copy()
    return new


def _both(seen: Seen) -> list[Seen]:
    assert seen.after_reset is not None
    return [seen, seen.after_reset]


@pytest.mark.timed
def test_the_host_was_needed(seen: Seen) -> None:
    """What follows says something of both tiers, of preemptions and loads ahead."""
    assert seen.value("device_hit_tokens_total") > 0
    assert seen.value("host_hit_tokens_total") > 5000
    assert seen.value("loaded_ahead_blocks_total") > 0
    assert seen.value("loaded_blocks_total") > 0
    assert seen.value("resumed_from_host_total") > 0


def test_every_metric_is_on_the_page(seen: Seen) -> None:
    for metric in METRICS:
        suffix = {"counter": "_total", "histogram": "_count"}.get(metric.kind, "")
        if metric.label and not metric.values:
            # Of tiers below the host, which this server does not have.
            assert f"# TYPE {PREFIX}{metric.name}" in seen.page
            continue
        for value in metric.values or (None,):
            label = {metric.label: value} if value is not None else {}
            assert seen.value(metric.name + suffix, **label) >= 0


def test_every_name_in_docs_and_dashboard_is_on_the_page(seen: Seen) -> None:
    """What is copied into PromQL finds something."""
    texts = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("ops/*")]
    found = {
        sample.name
        for family in text_string_to_metric_families(seen.page)
        for sample in family.samples
    }
    # One with a label that nothing has had a value of yet has no samples.
    found |= set(re.findall(r"# TYPE (\S+) (?:counter|gauge)", seen.page))
    for name in re.findall(r"# TYPE (\S+) histogram", seen.page):
        found |= {name + part for part in ("_bucket", "_count", "_sum")}
    if not HAS_SOURCES:
        found.add("vllm:prompt_tokens_cached_by_source_total")
    missing = {
        text.name: names for text in texts if (names := asked(text.read_text()) - found)
    }
    assert not missing


@needs_promtool
def test_promtool_has_nothing_against_the_page(seen: Seen) -> None:
    assert "vllm:kv_tier_host_slots{" in seen.page
    assert lint(seen.page) == []


def test_hits_by_tier_are_the_cached_tokens_of_the_responses(seen: Seen) -> None:
    for each in _both(seen):
        device = each.value("device_hit_tokens_total")
        host = each.value("host_hit_tokens_total")
        assert device + host == sum(each.cached_tokens) > 0
        per_request = {
            tier: each.value("request_hit_tokens_sum", tier=tier)
            for tier in ("device", "host")
        }
        assert per_request == {"device": device, "host": host}
        num_hits = sum(tokens > 0 for tokens in each.cached_tokens)
        assert each.value("request_hit_tokens_count", tier="host") == num_hits
        # Upstream's own, with the source that it has a label for.
        by_source = {
            dict(labels)["source"]: value
            for (name, labels), value in each.samples.items()
            if name == "vllm:prompt_tokens_cached_by_source_total"
        }
        if HAS_SOURCES:
            assert by_source["device"] == device and by_source["host"] == host


def test_the_page_says_what_the_pool_counted(seen: Seen) -> None:
    # These are asked for below.
    gauges = {metric.name for metric in METRICS if metric.kind == "gauge"}
    gauges.add("slots_total")
    for each in _both(seen):
        state, planned = each.state, Counter(each.state["planned"])
        for name, count in state["counted"].items():
            if name in ("refused_no_slot", "refused_pinned"):
                reason = name.removeprefix("refused_")
                assert each.value("refused_stores_total", reason=reason) == count
            elif name not in gauges and name != "secondary":
                assert each.value(f"{name}_total") == count, name
        assert each.value("slots_used") == state["num_slots_used"]
        assert (
            each.value("host_slots") == each.value("slots_total") == state["num_slots"]
        )
        size = state["slot_bytes"]
        assert each.value("used_bytes") == state["num_slots_used"] * size
        assert each.value("total_bytes") == state["num_slots"] * size
        for name in ("stored", "loaded", "loaded_ahead"):
            assert each.value(f"{name}_blocks_total") == planned[name]
            assert each.value(f"{name}_bytes_total") == planned[name] * size
        for kind in ("store", "load", "load_ahead"):
            copies = planned[f"{kind} copies"]
            assert each.value("copy_seconds_count", kind=kind) == copies
            assert each.value("copy_bytes_per_second_count", kind=kind) == copies
        assert each.value("load_stall_seconds_count") == planned["load copies"]
        for kind in ("store", "load", "layer_wait"):
            assert each.value("failures_total", kind=kind) == 0


def test_counters_live_through_a_reset(seen: Seen) -> None:
    first, second = _both(seen)
    for name in ("stored_blocks_total", "host_hit_tokens_total"):
        assert second.value(name) > first.value(name) > 0
    assert second.follower.num_events["AllBlocksCleared"] == 1


def test_the_events_tell_what_both_tiers_hold(seen: Seen) -> None:
    for each in _both(seen):
        for medium, tier in (("GPU", "device"), ("CPU", "host")):
            held = Counter({(group, key): n for group, key, n in each.state[tier]})
            assert held == each.follower.held(medium), medium
            assert len(held) > 20
        assert each.follower.num_events["BlockRemoved GPU"] > 0


def test_a_wrong_follower_is_noticed(seen: Seen) -> None:
    (key, _) = next(iter(seen.follower.held("CPU").items()))
    seen_by_one = _copy(seen.follower)
    del seen_by_one.blocks["CPU", key[0], key[1]]
    with pytest.raises(AssertionError):
        test_the_events_tell_what_both_tiers_hold(
            Seen([], {}, seen.state, seen_by_one, seen.after_reset)
        )


def test_the_log_line_has_the_rate_of_the_host(seen: Seen) -> None:
    assert "Host KV tier hit rate: " in seen.log
    assert "Prefix cache hit rate: " in seen.log


@pytest.mark.skipif(MISSING, reason="Prometheus is not installed")
def test_the_dashboard_shows_something_everywhere(seen: Seen) -> None:
    assert seen.queried is not None
    silent = [query for query, values in seen.queried.items() if not values]
    # This server has no tier below the host.
    assert [query for query in silent if "kv_tier_secondary" not in query] == []
    # Of a kind of copy that did not happen there is no quantile.
    numbers = [v for values in seen.queried.values() for v in values if v == v]
    assert all(v >= 0 for v in numbers) and sum(v > 0 for v in numbers) > 15


@pytest.mark.skipif(MISSING, reason="Prometheus is not installed")
def test_prometheus_evaluates_the_alert_rules(seen: Seen) -> None:
    assert len(seen.rules) == 5
    assert {rule["health"] for rule in seen.rules} <= {"ok", "unknown"}
    # A minute is too short for any but the first, which must not fire.
    assert {rule["state"] for rule in seen.rules} <= {"inactive", "pending"}
    assert seen.rules[0]["state"] == "inactive"
