# SPDX-License-Identifier: Apache-2.0
"""Which requests may jump, and what a plan says of those that do."""

from typing import Any

import pytest

from vllm import SamplingParams
from vllm.v1.kv_tier.scheduler.jumps import needs_only_kv
from vllm.v1.kv_tier.scheduler.plan_builder import StepPlanBuilder

from ...sim import upstream

SCORES: list[dict[str, Any]] = [
    {"prompt_logprobs": 1},
    {"prompt_logprobs": 1, "skip_reading_prefix_cache": False},
]


def request_for(**params: Any) -> Any:
    return upstream.make_request(
        request_id="a",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=1, **params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
    )


@pytest.mark.skipif(
    not hasattr(SamplingParams, "skip_reading_prefix_cache"), reason="cannot jump"
)
@pytest.mark.parametrize("params", SCORES)
def test_a_prompt_that_is_scored_is_computed(params: dict[str, Any]) -> None:
    """Every position of it is needed, even if the client lets the cache be read."""
    assert needs_only_kv(request_for())
    assert not needs_only_kv(request_for(**params))


def test_a_plan_names_the_requests_of_its_own_step() -> None:
    builder = StepPlanBuilder(4)
    builder.begin()
    builder.name_jump("a")
    assert builder.finish().jumped == {"a"}
    builder.begin()
    assert not builder.finish().jumped
