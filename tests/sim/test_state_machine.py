# SPDX-License-Identifier: Apache-2.0
"""Random scripts on the real scheduler; every action is followed by all checks.

As many for each layout of KV cache groups, store policy, eviction policy, and for
schedulers that run ahead or not. `KV_TIER_SIM_EXAMPLES` sets how many in sum,
`KV_TIER_SIM_SEED` draws others, and `KV_TIER_SIM_SUMMARY` names a file to which a
line of counts is appended for each of the above.
"""

import json
import os
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from vllm.v1.kv_tier.policy import POLICIES

from . import upstream
from .engine import EVENTS
from .layouts import LAYOUTS, Layout
from .scripts import EXAMPLES, SEED, Script, scripts

ENOUGH = 500
"""So many scripts do everything that `EVENTS` names; fewer may not."""
SUMMARY = os.environ.get("KV_TIER_SIM_SUMMARY")

# Rows of docs/compatibility.md that no engine on a CPU can prove.
ROWS = {"full+mamba, all states": "Mamba, mode `all` (simulated)"}

COMBINATIONS = [
    pytest.param(
        layout,
        *others,
        marks=[pytest.mark.compat("model kinds", ROWS[layout.name])]
        if layout.name in ROWS
        else [],
    )
    for layout, *others in product(
        LAYOUTS, ["write_back", "write_through"], POLICIES, [False, True]
    )
]
EACH = -(-EXAMPLES // len(COMBINATIONS))

_events: dict[Layout, Counter[str]] = {layout: Counter() for layout in LAYOUTS}


def _name(value: object) -> str:
    if isinstance(value, bool):
        return "async" if value else "sync"
    return value.name if isinstance(value, Layout) else str(value)


@pytest.mark.parametrize(
    "layout, store_policy, eviction_policy, is_async", COMBINATIONS, ids=_name
)
def test_scripts(
    layout: Layout, store_policy: str, eviction_policy: str, is_async: bool
) -> None:
    events: Counter[str] = Counter()
    setup = {
        "layout": layout,
        "store_policy": store_policy,
        "eviction_policy": eviction_policy,
        "is_async": is_async,
    }

    # By names: functions of a layout are elsewhere in every process.
    @seed(crc32(repr((SEED, *map(_name, setup.values()))).encode()))
    @settings(
        max_examples=EACH,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(scripts(**setup))
    def play(script: Script) -> None:
        note(str(script))
        events.update(script.play().events)
        events["examples"] += 1

    play()
    _events[layout] += events
    if SUMMARY:
        line = {**setup, "layout": layout.name, "seed": SEED, **events}
        with Path(SUMMARY).open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("layout", LAYOUTS, ids=_name)
def test_scripts_had_all_in_them(layout: Layout) -> None:
    """Else the scripts above, which must run before, prove little."""
    if not _events[layout]:
        pytest.skip("the scripts did not run")
    if EXAMPLES < ENOUGH:
        pytest.skip(f"KV_TIER_SIM_EXAMPLES={EXAMPLES} need not have all in them")
    missing = {event for event in EVENTS if not _events[layout][event]}
    # A window gives up what is behind it, so that hosts are seldom full there, and
    # hits too short to be loaded ahead.
    rare = {"retained", "loaded ahead"}
    assert missing <= rare
    for event in rare:
        assert sum(events[event] for events in _events.values()) >= len(_events)


@pytest.mark.skipif(
    not upstream.PREEMPTS_IN_PIPELINES, reason="upstream's tokens are wrong there"
)
@settings(
    max_examples=max(EXAMPLES // 8, 1),
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(scripts(), st.integers(2, 4))
def test_scripts_of_a_pipeline(script: Script, num_stages: int) -> None:
    """More steps are in flight than in any engine without stages."""
    script = replace(script, setup=replace(script.setup, num_stages=num_stages))
    note(str(script))
    script.play()


def test_scripts_of_a_choosy_tier() -> None:
    """Of many blocks the host has none, and of some a later copy."""
    events: Counter[str] = Counter()

    @settings(
        max_examples=max(EXAMPLES // 8, 10),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(scripts(), st.integers(2, 3))
    def play(script: Script, from_use: int) -> None:
        script = replace(script, setup=replace(script.setup, store_from_use=from_use))
        note(str(script))
        events.update(script.play().events)

    play()
    assert events["stored"] and events["loaded"]
