# SPDX-License-Identifier: Apache-2.0
"""Nobody is served KV of another tenant, on the device or on the host."""

import pytest

from .conftest import Results
from .jobs import BLOCK_TOKENS

HIT = 5 * BLOCK_TOKENS


@pytest.mark.compat("engine modes", "isolation by cache salt and LoRA")
@pytest.mark.engines("lora")
def test_nobody_else_finds_a_tenants_blocks(results: Results) -> None:
    result = results("lora")["workloads"]["tenants"]
    rounds = result["rounds"]
    assert len(rounds) == 8
    for found in rounds:
        others = {name: a["cached_tokens"] for name, a in found["others"].items()}
        assert others == dict.fromkeys(others, 0), found["owner"]
        # The control: they were there all the time.
        assert found["again"]["cached_tokens"] == HIT, found["owner"]
    # What the host served, it served to owners.
    counters = result["counters"]
    assert counters["kv_tier_host_hit_tokens"] == len(rounds) * HIT
    assert counters["kv_tier_loaded_blocks"] == len(rounds) * HIT / BLOCK_TOKENS


@pytest.mark.compat("engine modes", "isolation by cache salt and LoRA")
@pytest.mark.engines("lora")
def test_tenants_get_the_answers_of_their_adapter(results: Results) -> None:
    by_adapter: dict[str, set[tuple[int, ...]]] = {}
    for found in results("lora")["workloads"]["tenants"]["rounds"]:
        owner = [(found["owner"], found[time]) for time in ("first", "again")]
        for name, answer in [*found["others"].items(), *owner]:
            adapter = name.partition(",")[0] if "adapter" in name else "none"
            by_adapter.setdefault(adapter, set()).add(tuple(answer["tokens"]))
    assert all(len(tokens) == 1 for tokens in by_adapter.values())
    assert len(set.union(*by_adapter.values())) == len(by_adapter) == 3


@pytest.mark.compat("engine modes", "`--prefix-caching-hash-algo`")
@pytest.mark.parametrize(
    "name, algorithm",
    [
        pytest.param("lora", "sha256", marks=pytest.mark.engines("lora")),
        pytest.param("verify", "sha256_cbor", marks=pytest.mark.engines("verify")),
    ],
)
def test_keys_are_of_the_chosen_hash_algorithm(
    results: Results, name: str, algorithm: str
) -> None:
    found = results(name)["workloads"]["hash_algorithm"]["found"]
    assert found == {"sha256": 0, "sha256_cbor": 0} | {algorithm: 3}
