# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in the tier. A simulator that misses one proves nothing."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_tier.eviction.hinted import ExpiryQueue, Hinted, ProtectedKeys
from vllm.v1.kv_tier.hints.tracker import ConversationTracker, SoleUserIndex
from vllm.v1.kv_tier.pool import TieredBlockPool
from vllm.v1.kv_tier.scheduler.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduler.host_writer import HostWriter
from vllm.v1.kv_tier.scheduler.plan_builder import StepPlanBuilder
from vllm.v1.kv_tier.scheduler.slots import SlotTable

from . import upstream
from .content import Violation
from .scripts import random_script

MAX_SCRIPTS = 1000


def no_hold_before_promotion(patch: pytest.MonkeyPatch) -> None:
    """The device part of a hit may be evicted by the promotion of the rest."""
    release = FreeBlocks.release
    not_held: list = []

    def hold(self: FreeBlocks, blocks: list) -> None:
        not_held[:] = [blocks]

    def release_held(self: FreeBlocks, blocks: list) -> None:
        if not any(blocks is each for each in not_held):
            release(self, blocks)

    patch.setattr(FreeBlocks, "hold", hold)
    patch.setattr(FreeBlocks, "release", release_held)


def reuse_slots_in_a_plan(patch: pytest.MonkeyPatch) -> None:
    """A slot that the plan reads or writes may make room for another block."""
    patch.setattr(SlotTable, "pin", lambda self, slot: None)


def demote_invalid_content(patch: pytest.MonkeyPatch) -> None:
    """What was found invalid on the device goes to the host."""

    def demote(self: HostWriter, block: KVCacheBlock) -> None:
        if block.block_hash is not None and not self.is_clean(block):
            self.demote([block])

    patch.setattr(HostWriter, "invalidate", demote)


def keep_invalid_slots(patch: pytest.MonkeyPatch) -> None:
    """What was found invalid on the device stays on the host."""
    patch.setattr(HostWriter, "invalidate", lambda self, block: None)


def store_before_computed(patch: pytest.MonkeyPatch) -> None:
    """A block is stored as soon as it has a key."""

    def hashed(self: StepPlanBuilder, block: KVCacheBlock) -> None:
        self.computed_by[block.block_id] = 0

    patch.setattr(StepPlanBuilder, "mark_hashed", hashed)


def keep_keys_of_preempted(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a request preempted in the step that scheduled it stay cached."""
    patch.setattr(KVCacheManager, "evict_uncomputed", lambda self, request: None)


def skip_steps_that_failed(patch: pytest.MonkeyPatch) -> None:
    """Outputs of a step whose loads failed are dropped with all that counts them."""
    update = Scheduler.update_from_output

    def update_others(self: Scheduler, output: Any, result: Any) -> Any:
        report = result.kv_tier_report
        if report is not None and report.failed_load_seq is not None:
            output = copy(output)
            output.num_scheduled_tokens = {}
        return update(self, output, result)

    patch.setattr(Scheduler, "update_from_output", update_others)


def keep_marks_of_what_is_used(patch: pytest.MonkeyPatch) -> None:
    """A conversation that goes on is treated as one that is over."""
    patch.setattr(ConversationTracker, "on_hit", lambda self, *of_request: None)


def release_what_others_use(patch: pytest.MonkeyPatch) -> None:
    """A block that others have hit stays its first conversation's."""
    patch.setattr(SoleUserIndex, "record_hit", lambda self, key, user: None)


def never_give_up_what_is_retained(patch: pytest.MonkeyPatch) -> None:
    """A hint pins."""
    patch.setattr(ProtectedKeys, "__bool__", lambda self: False, raising=False)
    patch.setattr(Hinted, "_pop_expired", lambda self: None)
    patch.setattr("vllm.v1.kv_tier.eviction.hinted.KEPT_PART", 1.0)


def protect_what_has_expired(patch: pytest.MonkeyPatch) -> None:
    """A hint holds for ever."""
    patch.setattr(ExpiryQueue, "is_due", lambda self, now: False)


def miss_fence(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        take_plan = TieredBlockPool.take_plan

        def take_plan_without(self: TieredBlockPool, is_idle: bool) -> Any:
            plan = take_plan(self, is_idle)
            if plan is not None:
                setattr(plan, name, 0)
            return plan

        patch.setattr(TieredBlockPool, "take_plan", take_plan_without)

    plant.__name__ = f"miss_{name}"
    return plant


@dataclass(frozen=True)
class Bug:
    plant: Callable[[pytest.MonkeyPatch], None]
    kinds: tuple[str, ...]
    """Invariants that may find it first."""
    setup: dict[str, Any] = field(default_factory=dict)
    """Settings that bring rare bugs within reach of few scripts."""


PIPELINE = {"num_stages": 3, "is_async": False}
AHEAD = {"load_time": 1.0, "max_stall": 0.0}
CONTENTS = ("device", "host", "read", "tokens")
BUGS = [
    Bug(no_hold_before_promotion, CONTENTS),
    Bug(reuse_slots_in_a_plan, (*CONTENTS, "plan", "slots")),
    Bug(demote_invalid_content, CONTENTS),
    Bug(
        keep_invalid_slots,
        CONTENTS,
        {"is_async": True, "store_policy": "write_through"},
    ),
    Bug(store_before_computed, CONTENTS),
    Bug(
        keep_keys_of_preempted,
        CONTENTS,
        {"by_priority": True, "reserve_full_isl": False, "spare_blocks": 0},
    ),
    Bug(skip_steps_that_failed, ("in flight",)),
    Bug(keep_marks_of_what_is_used, ("released",)),
    Bug(release_what_others_use, ("released",)),
    Bug(never_give_up_what_is_retained, ("hints", "slots")),
    Bug(protect_what_has_expired, ("hints",), {"num_slots": 8}),
    Bug(miss_fence("compute_after_stores"), CONTENTS),
    Bug(miss_fence("load_after_stores"), CONTENTS),
    Bug(miss_fence("store_after_loads"), CONTENTS, {"is_async": True, "num_slots": 6}),
    Bug(miss_fence("clean_after_loads"), CONTENTS, {"is_async": True, "num_slots": 6}),
    Bug(miss_fence("store_after_compute"), CONTENTS, {"is_async": True}),
    Bug(miss_fence("clean_after_compute"), CONTENTS, {"is_async": True}),
    Bug(miss_fence("load_after_compute"), CONTENTS, {"is_async": True}),
    # Without asynchronous scheduling only pipelines have several steps in flight.
    Bug(miss_fence("store_after_compute"), CONTENTS, PIPELINE),
    Bug(miss_fence("clean_after_compute"), CONTENTS, PIPELINE),
    Bug(miss_fence("load_after_compute"), CONTENTS, PIPELINE),
    Bug(miss_fence("compute_after_loads"), CONTENTS, AHEAD),
    # Rare: one script in 60 with these settings, in 1500 and more without a pipeline.
    Bug(
        miss_fence("load_after_loads"),
        CONTENTS,
        AHEAD | PIPELINE | {"spare_blocks": 0, "num_slots": 40, "store_from_use": 1},
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=[bug.plant.__name__ for bug in BUGS])
def test_found(
    bug: Bug,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    if "num_stages" in bug.setup and not upstream.PREEMPTS_IN_PIPELINES:
        pytest.skip("pipelines of this release are wrong without bugs of ours")
    if bug.plant is keep_invalid_slots and not upstream.RESETS_STEPS_IN_FLIGHT:
        pytest.skip("nothing becomes invalid there once it is on the host")
    if bug.plant is demote_invalid_content and not upstream.RESETS_RUNNING_REQUESTS:
        pytest.skip("nothing becomes invalid there but by a failed load")
    if bug.plant is skip_steps_that_failed and not upstream.COUNTS_IN_FLIGHT:
        pytest.skip("this release does not count tokens in flight")
    bug.plant(monkeypatch)
    for seed in range(MAX_SCRIPTS):
        script = random_script(Random(seed))
        script = replace(script, setup=replace(script.setup, **bug.setup))
        try:
            script.play()
        except Violation as violation:
            record_property("scripts", seed + 1)
            assert violation.kind in bug.kinds, violation
            return
        except (AssertionError, LookupError):
            # The bug confused the tier itself; a violation is wanted.
            continue
    pytest.fail(f"{MAX_SCRIPTS} scripts found nothing")
