# SPDX-License-Identifier: Apache-2.0
"""What the pool counts is what happened, and nothing goes down."""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import asdict, replace
from random import Random
from typing import Any

import pytest

from vllm.v1.kv_tier.hints.tracker import Prewarms

from . import upstream
from .engine import Engine
from .scheduler import Setup
from .scripts import random_action, random_setup
from .step import Step

SETUPS, ACTIONS = 30, 60


class CountedEngine(Engine):
    """Takes the stats after every step and adds them up."""

    def __init__(self, setup: Setup) -> None:
        self.counted: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        super().__init__(setup)
        tier = self._scheduler.kv_cache_manager.kv_tier
        assert tier is not None
        self.tier = tier
        submit = self._worker.submit

        def watched(*args: Any) -> Step:
            step = submit(*args)
            plan = step.plan
            self.happened["stored_blocks"] += len(plan.store_slots)
            self.happened["stored_blocks"] += len(plan.clean_slots)
            self.happened["loaded_blocks"] += len(plan.load_slots)
            self.happened["loaded_ahead_blocks"] += len(plan.ahead_slots)
            return step

        self._worker.submit = watched  # type: ignore[method-assign]

    def _process_oldest(self) -> None:
        report = self._in_flight[0].result.kv_tier_report
        if report is not None:
            self.happened["times"] += len(report.times)
            self.happened["failures"] += report.failures.total()
        super()._process_oldest()

    def _check(self) -> None:
        super()._check()
        stats = self.tier.take_stats()
        assert stats.slots_used == len(self.tier.host)
        if self.setup.store_policy == "write_back":
            assert stats.cleaner_backlog_blocks < self.setup.num_blocks
        # No engine here has a tier below.
        counts = asdict(stats)
        assert not counts.pop("secondary") and not counts.pop("meeting_points")
        counts["failures"] = sum(stats.failures.values())
        counts["hints"] = sum(stats.hints.values())
        counts["tenant_slots"] = sum(stats.tenant_slots.values())
        counts["times"] = len(stats.times)
        for device, host in counts.pop("request_hits"):
            assert device >= 0 and host >= 0 and device + host > 0
        for name, count in counts.items():
            assert count >= 0, f"{name}: {count}"
            self.counted[name] += count


def test_what_is_counted_is_what_happened() -> None:
    total: Counter[str] = Counter()
    for seed in range(SETUPS):
        rng = Random(seed)
        # In every other engine only blocks that were used twice are stored.
        setup = replace(random_setup(rng), store_from_use=1 + seed % 2)
        engine = CountedEngine(setup)
        for _ in range(ACTIONS):
            random_action(rng).run(engine)
        engine.drain()
        counted, happened = engine.counted, engine.happened
        for name, count in happened.items():
            assert counted[name] == count, f"{name} with {engine.setup}"
        # A load is called off where its request is preempted in its own step.
        loads = counted["loaded_blocks"] + counted["loaded_ahead_blocks"]
        assert counted["promoted_blocks"] >= loads
        # Each block of a prewarm comes to be of use once, if at all.
        used = counted["prewarmed_used_blocks"] + counted["prewarmed_late_blocks"]
        assert used <= counted["prewarmed_blocks"], "prewarmed blocks"
        total += counted
    # Simulated time is another one, and a slot is rarely wanted twice.
    rare = {"refused_pinned", "request_hits", "recomputed_lookups"}
    rare |= {"load_seconds_per_block", "prefill_seconds_per_block"}
    rare |= {"jumped_tokens", "secondary", "given_back_pages", "mapped_pages"}
    rare |= {"device_mapped_bytes", "device_unmapped_bytes"}
    rare |= {"map_seconds", "unmap_seconds", "neighbour_blocks"}
    if not upstream.RESETS_RUNNING_REQUESTS:
        # No script that such a release can play happens to have one.
        rare.add("prewarmed_late_blocks")
    names = {*asdict(engine.tier.take_stats())} - {"meeting_points"}
    never = [name for name in names if not total[name]]
    assert set(never) <= rare


def test_a_wrong_count_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take_plan = Engine.step

    def forget(self: Engine, *args: Any, **kwargs: Any) -> None:
        take_plan(self, *args, **kwargs)
        tier = self._scheduler.kv_cache_manager.kv_tier
        assert tier is not None
        tier._stats.stored_blocks += 1

    monkeypatch.setattr(Engine, "step", forget)
    with pytest.raises(AssertionError, match="stored_blocks"):
        test_what_is_counted_is_what_happened()


def test_prewarmed_blocks_that_are_used_again_and_again_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hit(self: Prewarms, request: object, keys: Iterable[Hashable]) -> None:
        self._stats.prewarmed_used_blocks += len(self.pending.keys() & keys)

    monkeypatch.setattr(Prewarms, "record_hit", hit)
    with pytest.raises(AssertionError, match="prewarmed blocks"):
        test_what_is_counted_is_what_happened()
