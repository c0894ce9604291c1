# SPDX-License-Identifier: Apache-2.0
"""The host tier beside everything else that an engine can do.

The engines `features` and `lora` by default, those that guess tokens ahead with
`KV_TIER_FEATURES=all` as well.
"""

import os
from typing import Any

import pytest

from .compare import assert_same_answers
from .conftest import Results
from .features import SERVED
from .jobs import BLOCK_TOKENS, FEATURES, JOBS, SPECULATED
from .test_answers import cached

compat = pytest.mark.compat
SPECULATIVE = {
    "ngram": "speculative decoding: ngram",
    "eagle": "speculative decoding: EAGLE",
}
ALL = os.environ.get("KV_TIER_FEATURES") == "all"
MODES = {
    "by_priority": "priority scheduling with preemption",
    "structured": "structured output",
    "beams": "beam search",
    "paused": "pause and resume",
    "reset_running": "`reset_prefix_cache` with running requests",
    "new_weights": "weight update (`reload_weights`)",
    "asleep": "`sleep` and `wake_up`",
    "sampling": "`n` > 1",
}
NOTES = {
    "new_weights": "reset the prefix cache, as without a tier",
    "asleep": "levels 0, 1 and 2: the seam; a CPU keeps its memory",
}


def modes(*names: str) -> Any:
    """One case for each workload of the engine `features`."""
    return pytest.mark.parametrize(
        "workload",
        [
            pytest.param(
                name,
                marks=[
                    pytest.mark.engines("large", "features"),
                    compat("engine modes", MODES[name], note=NOTES.get(name, "")),
                ],
            )
            for name in names
        ],
    )


@modes(*FEATURES, "sampling")
def test_same_answers(results: Results, workload: str) -> None:
    found = results("features")["workloads"][workload]["answers"]
    expected = results("large")["workloads"][workload]["answers"]
    assert_same_answers(found, expected)


@modes(*SERVED)
def test_prefixes_come_from_the_host(results: Results, workload: str) -> None:
    counters = results("features")["workloads"][workload]["counters"]
    kind = "resumed_host_hit" if workload == "by_priority" else "host_hit"
    assert counters[f"kv_tier_{kind}_tokens"] >= 4 * BLOCK_TOKENS
    assert counters["kv_tier_loaded_blocks"] > 0


@modes(*SERVED)
def test_a_wrong_block_is_noticed(results: Results, workload: str) -> None:
    expected = results("large")["workloads"][workload]["answers"]
    spoilt = results("features")["workloads"]["spoilt_features"][workload]
    assert spoilt["spoilt"] == [1]
    with pytest.raises(AssertionError, match="other tokens|other samples|off by"):
        assert_same_answers(spoilt["answers"], expected)


@modes("by_priority")
def test_less_important_requests_give_way(results: Results, workload: str) -> None:
    assert results("features")["workloads"][workload]["counters"]["num_preemptions"] > 0


@modes("structured")
def test_grammars_hold(results: Results, workload: str) -> None:
    for answer in results("features")["workloads"][workload]["answers"]:
        assert len(answer["tokens"]) == 10
        assert set(answer["tokens"]) <= set(range(3, 10))


@modes("paused")
def test_a_pause_keeps_or_clears_both_tiers(results: Results, workload: str) -> None:
    kept, cleared = results("features")["workloads"][workload]["filled"]
    assert min(kept) > 0
    assert cleared == [0, 0]


@modes("reset_running")
def test_a_reset_leaves_nothing_to_running_requests(
    results: Results, workload: str
) -> None:
    result = results("features")["workloads"][workload]
    assert result["was_reset"] is True
    assert result["filled"] == [0, 0]
    assert result["counters"]["num_preemptions"] >= 4
    assert result["counters"]["kv_tier_stored_blocks"] > 0


@modes("new_weights")
def test_nothing_of_old_weights_is_served_after_a_reset(
    results: Results, workload: str
) -> None:
    """Without one it is, as by upstream's own cache: the answers show it."""
    result = results("features")["workloads"][workload]
    old, new, again, back = (result["answers"][i : i + 3] for i in range(0, 12, 3))
    assert result["was_reset"] == [True, True]
    assert cached({"answers": old + new + back}) == 9 * [0]
    assert cached({"answers": again}) == 3 * [5 * BLOCK_TOKENS]
    assert_same_answers(back, old)
    assert_same_answers(again, new)
    assert cached({"answers": result["stale"]}) == 3 * [5 * BLOCK_TOKENS]
    for wrong, right in zip(result["stale"], new):
        assert wrong["tokens"] != right["tokens"]


@modes("asleep")
def test_nothing_is_served_after_sleep(results: Results, workload: str) -> None:
    """But level 0 is a pause, and keeps everything."""
    result = results("features")["workloads"][workload]
    paused, *slept = result["filled"]
    assert min(paused) > 0
    assert slept == 2 * [[0, 0]]
    hits = cached(result)
    assert hits == 3 * [5 * BLOCK_TOKENS] + 6 * [0]
    level_0, level_1, level_2 = (result["answers"][i : i + 3] for i in (0, 3, 6))
    assert_same_answers(level_1, level_0)
    for ours, theirs in zip(level_2, level_0):
        assert ours["tokens"] != theirs["tokens"]


@pytest.mark.engines("lora")
@compat("engine modes", "LoRA", note="also reloaded in place, or under another id")
def test_a_reloaded_adapter_finds_nothing_of_the_old_one(results: Results) -> None:
    result = results("lora")["workloads"]["lora_reloads"]
    assert_same_answers(result["answers"], result["expected"])
    assert cached(result) == 4 * [0, 5 * BLOCK_TOKENS]
    assert result["counters"]["kv_tier_loaded_blocks"] >= 4 * 5
    # Every load says something else; and with upstream's keys, what is cached shows.
    assert len({tuple(answer["tokens"]) for answer in result["answers"]}) == 4
    first, stale = result["stale"]
    assert stale["cached_tokens"] == 5 * BLOCK_TOKENS
    assert stale["tokens"] != result["expected"][2]["tokens"]


def speculative(*others: str) -> Any:
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name,
                marks=[
                    pytest.mark.engines(name, *others),
                    compat("engine modes", row),
                    pytest.mark.skipif(
                        not ALL, reason="with KV_TIER_FEATURES=all only"
                    ),
                ],
            )
            for name, row in SPECULATIVE.items()
        ],
    )


@speculative("large")
@pytest.mark.parametrize("workload", SPECULATED)
def test_speculation_changes_nothing(
    results: Results, name: str, workload: str
) -> None:
    found = results(name)["workloads"][workload]["answers"]
    assert_same_answers(found, results("large")["workloads"][workload]["answers"])


@speculative("large")
def test_speculation_is_served_from_the_host(results: Results, name: str) -> None:
    """Upstream's offloading connector stored then, and served nothing (issue 52735)."""
    assert JOBS[name].llm["speculative_config"]["method"] == name
    found = results(name)["workloads"]["conversations"]
    counters = found["counters"]
    hits = counters["kv_tier_host_hit_tokens"] + counters["kv_tier_device_hit_tokens"]
    assert hits == sum(cached(found))
    assert counters["kv_tier_host_hit_tokens"] > 0.5 * hits > 0
    assert counters["spec_decode_num_draft_tokens"] > 0
    expected = sum(cached(results("large")["workloads"]["conversations"]))
    # With a draft model upstream computes the last block of each hit again.
    assert hits >= expected - 12 * BLOCK_TOKENS


@speculative("large")
def test_a_wrong_block_is_noticed_with_speculation(results: Results, name: str) -> None:
    found = results(name)["workloads"]["corrupt_slot"]
    assert found["reads"] >= 1
    with pytest.raises(AssertionError, match="other tokens|off by"):
        assert_same_answers(
            found["answers"],
            results("large")["workloads"]["conversations"]["answers"],
        )
