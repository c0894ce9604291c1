# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in the tier. A simulator that misses one proves nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.host_table import HostTable
from vllm.v1.kv_tier.pool import TieredBlockPool

from . import upstream
from .content import Violation
from .scripts import random_script

MAX_SCRIPTS = 1000


def no_hold_before_promotion(patch: pytest.MonkeyPatch) -> None:
    """The device part of a hit may be evicted by the promotion of the rest."""
    release = TieredBlockPool._release
    not_held: list = []

    def hold(self: TieredBlockPool, blocks: list) -> None:
        not_held[:] = [blocks]

    def release_held(self: TieredBlockPool, blocks: list) -> None:
        if not any(blocks is each for each in not_held):
            release(self, blocks)

    patch.setattr(TieredBlockPool, "_hold", hold)
    patch.setattr(TieredBlockPool, "_release", release_held)


def reuse_slots_in_a_plan(patch: pytest.MonkeyPatch) -> None:
    """A slot that the plan reads or writes may make room for another block."""
    patch.setattr(HostTable, "pin", lambda self, slot: None)


def demote_invalid_content(patch: pytest.MonkeyPatch) -> None:
    """What was found invalid on the device goes to the host."""

    def demote(self: TieredBlockPool, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self._demote(block)

    patch.setattr(TieredBlockPool, "_invalidate", demote)


def keep_invalid_slots(patch: pytest.MonkeyPatch) -> None:
    """What was found invalid on the device stays on the host."""
    patch.setattr(TieredBlockPool, "_invalidate", lambda self, block: None)


def store_before_computed(patch: pytest.MonkeyPatch) -> None:
    """A block is stored as soon as it has a key."""
    insert = TieredBlockPool._insert_block_hash

    def insert_computed(
        self: TieredBlockPool, key: Any, block: Any, num_tokens: int | None
    ) -> None:
        insert(self, key, block, num_tokens)
        self._computed_by[block.block_id] = 0

    patch.setattr(TieredBlockPool, "_insert_block_hash", insert_computed)


def keep_keys_of_preempted(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a request preempted in the step that scheduled it stay cached."""
    patch.setattr(KVCacheManager, "evict_uncomputed", lambda self, request: None)


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
    Bug(miss_fence("load_after_loads"), CONTENTS, AHEAD | {"spare_blocks": 0}),
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
