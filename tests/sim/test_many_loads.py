# SPDX-License-Identifier: Apache-2.0
"""Thousands of loads are planned without holding up the steps of others."""

import pytest

from .served import Served

DEVICE, HOST = 16384, 32768
BLOCKS = 6000
"""Of the prefix that is loaded."""
RUNNING = 128

MOST = 2048
"""Loads that one step may plan while others run: some ten milliseconds."""


@pytest.fixture
def served() -> Served:
    served = Served(DEVICE, HOST, load_s=200e-6)
    for document in range(4):
        served.serve(10 + document, BLOCKS, max_tokens=2)
    # All of them are on the host: idle steps store what the device has.
    for i in range(RUNNING):
        served.add(100 + i, 2, max_tokens=4000)
    for _ in range(20):
        served.step()
    return served


def test_no_step_plans_thousands_of_loads(served: Served) -> None:
    request = served.add(10, BLOCKS, max_tokens=4, end=500)
    num_loads = []
    for _ in range(400):
        plan = served.step().kv_tier_plan
        num_loads.append(len(plan.load_blocks) + len(plan.ahead_blocks))
        if request.num_computed_tokens:
            break
    assert request.num_computed_tokens, "never admitted"
    assert sum(num_loads) >= BLOCKS * 0.9
    assert max(num_loads) <= MOST


def test_what_lacks_room_is_loaded_as_far_as_there_is() -> None:
    served = Served(num_blocks=200, num_slots=600)
    for document in range(4):
        served.serve(10 + document, 100)
    served.add(90, 120, max_tokens=400)
    served.step()
    request = served.add(10, 100, max_tokens=1, end=500)
    ahead = [len(served.step().kv_tier_plan.ahead_blocks) for _ in range(3)]
    assert not request.num_computed_tokens, "there was room"
    assert sum(ahead) > 0
