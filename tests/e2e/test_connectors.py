# SPDX-License-Identifier: Apache-2.0
"""KV connectors beside the host tier: what one loads and saves, the other serves."""

import pytest

from vllm.v1.attention.backends import cpu_attn

from .compare import assert_same_answers
from .conftest import Results

ROWS = {
    "example_connector": "KV connector, synchronous",
    "slow_connector": "KV connector, asynchronous",
    "two_connectors": "MultiConnector",
}

_backend = getattr(cpu_attn, "CPUAttentionBackend", None)
_shape = getattr(_backend, "get_kv_cache_shape", None)
KEYS_FIRST = _shape is not None and _shape(8, 32, 2, 16)[0] == 2
UNFIT = ["example_connector", "two_connectors"] if KEYS_FIRST else []
"""Upstream's ExampleConnector takes the heads of such caches for their tokens."""


def beside(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name,
                marks=[
                    pytest.mark.engines("large", name),
                    pytest.mark.compat("engine modes", ROWS[name]),
                    pytest.mark.skipif(
                        name in UNFIT,
                        reason="this release's ExampleConnector does not know the "
                        "layout of CPU attention",
                    ),
                ],
            )
            for name in names or ROWS
        ],
    )


@beside()
def test_same_answers_as_without_connector_and_tier(
    results: Results, name: str
) -> None:
    found = results(name)["workloads"]["handed_over"]
    expected = results("large")["workloads"]["handed_over"]["answers"]
    assert_same_answers(found["answers"], expected)
    assert found["was_reset"]


@beside()
def test_connector_and_tier_both_did_their_part(results: Results, name: str) -> None:
    found = results(name)["workloads"]["handed_over"]
    assert found["external"] > 0
    assert found["counters"]["kv_tier_host_hit_tokens"] > 0
    assert found["counters"]["kv_tier_loaded_blocks"] > 0
    assert found["counters"]["kv_tier_stored_blocks"] > 0


@beside()
def test_wrong_bytes_from_the_connector_are_noticed(
    results: Results, name: str
) -> None:
    """The negative control: answers depend on what the connector loads."""
    found = results(name)["workloads"]["connector_spoils"]["answers"]
    expected = results("large")["workloads"]["handed_over"]["answers"]
    with pytest.raises(AssertionError, match="other tokens"):
        assert_same_answers(found, expected)


@beside("slow_connector", "two_connectors")
def test_blocks_that_are_sent_keep_their_bytes(results: Results, name: str) -> None:
    assert results(name)["workloads"]["handed_over"]["changed"] == [[]]


@pytest.mark.engines("large", "slow_connector")
@pytest.mark.compat("faults", "a connector's load that fails, recomputed")
def test_blocks_that_a_connector_could_not_load_are_computed(results: Results) -> None:
    found = results("slow_connector")["workloads"]["external_load_fails"]["answers"]
    expected = results("large")["workloads"]["handed_over"]["answers"]
    assert_same_answers(found, expected)


@pytest.mark.engines("large", "slow_connector")
@pytest.mark.compat(
    "faults", "a load of the tier fails together with one of a connector"
)
def test_a_request_that_waits_for_a_connector_starts_over(results: Results) -> None:
    workload = "tier_load_fails_beside_a_connector"
    found = results("slow_connector")["workloads"][workload]
    assert found["failures"] == [1]
    expected = results("large")["workloads"][workload]["answers"]
    assert_same_answers(found["answers"], expected)
