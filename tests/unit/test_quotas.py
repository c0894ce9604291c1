# SPDX-License-Identifier: Apache-2.0
"""Parts of the slots by tenant, and what is said of wrong ones."""

import pytest

from vllm.v1.kv_tier.scheduling.quotas import check_quotas


@pytest.mark.parametrize(
    "quotas", [None, {}, {"a": 1}, {"a": 0.5, "b": 0.5}, {"c" * 256: 1e-3}]
)
def test_quotas(quotas: object) -> None:
    check_quotas(quotas)


@pytest.mark.parametrize(
    ("quotas", "words"),
    [
        (["a"], ["quotas must be an object", "['a']"]),
        (0.5, ["quotas must be an object", "0.5"]),
        ({str(i): 0.001 for i in range(101)}, ["at most 100 tenants", "101"]),
        ({"": 0.5}, ["name of 1 to 256 characters", "''"]),
        ({7: 0.5}, ["name of 1 to 256 characters", "7"]),
        ({"a": 0}, ["the part of 'a'", "above 0", "got 0"]),
        ({"a": 1.5}, ["the part of 'a'", "up to 1", "got 1.5"]),
        ({"a": True}, ["the part of 'a'", "got True"]),
        ({"a": "half"}, ["the part of 'a'", "got 'half'"]),
        ({"a": float("nan")}, ["the part of 'a'", "got nan"]),
        ({"a": 0.75, "b": 0.5}, ["1.25 of the slots together", "at most 1"]),
    ],
    ids=str,
)
def test_wrong_quotas(quotas: object, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        check_quotas(quotas)
    for word in ("--kv-offloading-config: quotas", *words):
        assert word in str(error.value)
