# SPDX-License-Identifier: Apache-2.0
"""Short turns of the threads that run Python."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier.gil import SWITCH_S, fast_switching
from vllm.v1.kv_tier.plan import SecondaryJob, StepPlan
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.report import StepReportBuilder
from vllm.v1.kv_tier.worker.secondary import SecondaryIO
from vllm.v1.kv_tier.worker.slots import RankSlots

from ...settings import store_config

USUAL_S = 0.004


@pytest.fixture(autouse=True)
def usual_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    yield
    sys.setswitchinterval(before)


def turn_s() -> Any:
    # Whole microseconds.
    return pytest.approx(sys.getswitchinterval(), abs=2e-6)


def test_turns_are_short_until_the_last_one_is_out() -> None:
    with fast_switching():
        with fast_switching():
            assert turn_s() == SWITCH_S
        assert turn_s() == SWITCH_S
    assert turn_s() == USUAL_S


def test_the_shortest_turn_counts() -> None:
    with fast_switching(0.002):
        with fast_switching(0.001):
            assert turn_s() == 0.001
        assert turn_s() == 0.002
    assert turn_s() == USUAL_S


def test_what_fails_inside_leaves_turns_as_they_were() -> None:
    with pytest.raises(ZeroDivisionError), fast_switching():
        _ = 1 / 0
    assert turn_s() == USUAL_S


def test_who_has_shorter_ones_keeps_them() -> None:
    sys.setswitchinterval(SWITCH_S / 2)
    with fast_switching():
        assert turn_s() == SWITCH_S / 2
    assert turn_s() == SWITCH_S / 2


def test_a_store_is_written_and_read_in_short_turns(tmp_path: Path) -> None:
    entry = {"type": "fs", "root_dir": str(tmp_path / "kv"), "max_gib": 1}
    config = store_config(entry)
    config.check()
    store = config.open("0" * 32, 0, 4096)
    seen: list[float] = []
    for name in ("put", "get"):
        real = getattr(store, name)

        def move(keys, rows, real=real):  # type: ignore[no-untyped-def]
            seen.append(sys.getswitchinterval())
            return real(keys, rows)

        setattr(store, name, move)
    report = StepReportBuilder()
    slots, memory = RankSlots(2), torch.zeros(2, 4096, dtype=torch.uint8)
    slots.mark_stored([0])
    io = SecondaryIO([store], memory, slots, report, RankTuning())
    for is_put in (True, False):
        job = SecondaryJob(1 + (not is_put), is_put, [b"key"], [0], 0, 0, 0)
        plan = StepPlan(1, secondary=[job], awaits_secondary=2)
        io.begin_step(plan, lambda stores, loads: True)
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            if len(seen) == 1 + (not is_put) and turn_s() == USUAL_S:
                break
            io.begin_step(
                StepPlan(2, awaits_secondary=2),
                lambda stores, loads: True,
            )
    assert seen == pytest.approx([SWITCH_S, SWITCH_S], abs=2e-6)
    assert turn_s() == USUAL_S
