# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in the tier. A simulator that misses one proves nothing."""

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest

from vllm.v1.kv_tier.host_table import HostTable
from vllm.v1.kv_tier.pool import TieredBlockPool

from .content import Violation
from .scripts import Script, random_script

MAX_SCRIPTS = 1000


def no_hold_before_promotion(patch: pytest.MonkeyPatch) -> None:
    """The device part of a hit may be evicted by the promotion of the rest."""
    hold, release = TieredBlockPool._hold, TieredBlockPool._release
    patch.setattr(TieredBlockPool, "_hold", lambda self, blocks: None)

    def release_new(self: TieredBlockPool, blocks: list) -> None:
        # What was not held must not be released; new blocks must.
        release(self, [block for block in blocks if block.block_id in self._loads])

    del hold
    patch.setattr(TieredBlockPool, "_release", release_new)


def reuse_slots_in_a_plan(patch: pytest.MonkeyPatch) -> None:
    """A slot that the plan reads or writes may make room for another block."""
    patch.setattr(HostTable, "pin", lambda self, slot: None)


def demote_invalid_content(patch: pytest.MonkeyPatch) -> None:
    """What was found invalid on the device stays on the host, or goes there."""
    patch.setattr(TieredBlockPool, "_invalidate", TieredBlockPool._demote)


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

    def forget_nothing(self: TieredBlockPool, blocks: Iterable) -> None:
        pass

    patch.setattr(TieredBlockPool, "forget_uncomputed", forget_nothing)


def miss_fence(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        take_plan = TieredBlockPool.take_plan

        def take_plan_without(self: TieredBlockPool) -> Any:
            plan = take_plan(self)
            if plan is not None:
                setattr(plan, name, 0)
            return plan

        patch.setattr(TieredBlockPool, "take_plan", take_plan_without)

    plant.__name__ = f"miss_{name}"
    return plant


# With the invariants that may find it first.
MEMORY = {"device", "host", "read", "tokens"}
PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = [
    (no_hold_before_promotion, MEMORY | {"refs"}),
    (reuse_slots_in_a_plan, MEMORY | {"plan", "slots"}),
    (demote_invalid_content, MEMORY),
    (store_before_computed, MEMORY),
    (keep_keys_of_preempted, MEMORY),
    (miss_fence("compute_after_stores"), MEMORY),
    (miss_fence("load_after_stores"), MEMORY),
    (miss_fence("store_after_loads"), MEMORY),
]


@pytest.mark.parametrize(
    ("plant", "kinds"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED]
)
def test_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    kinds: set[str],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    plant(monkeypatch)
    for seed in range(MAX_SCRIPTS):
        script = random_script(Random(seed))
        try:
            script.play()
        except Violation as violation:
            record_property("scripts", seed + 1)
            assert violation.kind in kinds, violation
            return
    pytest.fail(f"{MAX_SCRIPTS} scripts found nothing")
