# SPDX-License-Identifier: Apache-2.0
"""Random scripts in which requests compute towards what is fetched for them.

Stores are slower and faster than computing, or lose what they had; the checks after
each step are those of all scripts.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from vllm.v1.kv_tier.releases import has_jump_seam, keys_are_bytes
from vllm.v1.kv_tier.scheduler.jumps import Jumps
from vllm.v1.kv_tier.scheduler.plan_builder import StepPlanBuilder
from vllm.v1.kv_tier.scheduler.secondary.meeting import Meetings
from vllm.v1.request import Request

from . import upstream
from .content import Violation
from .engine import Engine
from .layouts import LAYOUTS
from .scheduler import Setup
from .scripts import EXAMPLES, SEED, Add, Script, random_script
from .test_secondary import (
    end_with_the_first_rank,
    serve_before_it_came,
    with_below,
)

pytestmark = [
    pytest.mark.skipif(
        not keys_are_bytes(), reason="refused: hashes are numbers of a process"
    ),
    pytest.mark.skipif(
        not has_jump_seam(),
        reason="requests wait or compute: this release lacks the seam",
    ),
]

MAX_SCRIPTS = 3000
KINDS = [layout for layout in LAYOUTS if layout.name in ("full", "MLA")]


def meeting_script(seed: int, num_ranks: int | None = None) -> Script:
    """A script on a model that can jump, most of whose requests may."""
    rng = Random(seed)
    script = random_script(rng)
    tuning = replace(
        script.setup.tuning,
        answer_patience_s=rng.choice([0, 2, 100]),
        meet_tokens=rng.choice([1, 4, 9]),
        meet_steps=rng.choice([0.0, 3.0]),
    )
    stages = rng.choice([1, 3]) if upstream.PREEMPTS_IN_PIPELINES else 1
    values: dict[str, Any] = {
        "layout": rng.choice(KINDS),
        "num_stages": stages,
        "tuning": tuning,
        "jumps": True,
        "token_budget": rng.choice([4, 5, 8, 8, 12, 20]),
        "max_num_seqs": rng.choice([1, 2, 4, 6]),
    }
    # Requests with hints wait or compute.
    actions = [
        replace(action, hints=None)
        if isinstance(action, Add) and rng.random() < 0.9
        else action
        for action in script.actions
    ]
    script = Script(replace(script.setup, **values), actions)
    delay = rng.choice([0, 0, 2, 6])
    ranks = num_ranks or rng.choice([1, 1, 2, 3])
    script = with_below(script, seed, delay, ranks)
    # Steps that computing a token takes: a fetched block takes one.
    tuning = replace(
        script.setup.tuning, assumed_prefill_s=rng.choice([1e3, 1.0, 0.25, 0.05])
    )
    return Script(replace(script.setup, tuning=tuning), script.actions)


def count_cuts(patch: pytest.MonkeyPatch) -> Counter[str]:
    """How often steps ended where a request would meet its back, or left it out."""
    events: Counter[str] = Counter()
    cut = Meetings.cut

    def cut_and_count(self: Meetings, *args: Any) -> int:
        num_tokens = cut(self, *args)
        *_, num_new_tokens, may_wait = args
        kind = "of running" if may_wait else "of new"
        events[kind] += 0 < num_tokens < num_new_tokens
        events["left out"] += num_tokens == 0
        return num_tokens

    patch.setattr(Meetings, "cut", cut_and_count)
    return events


def test_scripts_with_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    events = count_cuts(monkeypatch)
    num_scripts = max(EXAMPLES // 3, 60)
    for i in range(num_scripts):
        script = meeting_script(1_000_000 * SEED + i)
        try:
            engine = script.play()
        except Exception as e:
            e.add_note(f"meeting_script({1_000_000 * SEED + i}): {script}")
            raise
        events.update(engine.events)
        assert engine.below is not None
        events["got"] += engine.below.num_got
    least = {
        "of running": 10,
        "of new": 10,
        "left out": 10,
        "jumped": 200,
        "got": 200,
        "failed": 50,
        "reset": 5,
        "preempted": 100,
    }
    assert all(events[name] >= n * num_scripts // 166 for name, n in least.items()), (
        events
    )


def _found_elsewhere(distance: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        keys = Jumps.keys

        def other_keys(self: Jumps, request: Request, size: int) -> Any:
            key = keys(self, request, size)
            return lambda index: key(max(0, index + distance))

        patch.setattr(Jumps, "keys", other_keys)

    return plant


def leave_a_hole(patch: pytest.MonkeyPatch) -> None:
    """The jump begins a block behind the front."""
    _found_elsewhere(1)(patch)


def overlap(patch: pytest.MonkeyPatch) -> None:
    """The jump begins a block before the front."""
    _found_elsewhere(-1)(patch)


def jump_over_a_hole(patch: pytest.MonkeyPatch) -> None:
    """A block that is missing does not end a jump."""
    find = Jumps._find_from

    def find_all(
        self: Jumps, request: Request, first: int, size: int, *args: Any
    ) -> list:
        hit = find(self, request, first, size, *args)
        last = (request.num_tokens - 1) // size
        if hit and first + len(hit) + 1 < last:
            more = find(self, request, first + len(hit) + 1, size, *args)
            hit += more
        return hit

    patch.setattr(Jumps, "_find_from", find_all)


def jump_from_inside_a_block(patch: pytest.MonkeyPatch) -> None:
    """The front need not be at the end of a block."""
    jump = Jumps.jump

    def jump_anyway(self: Jumps, request: Request, manager: Any, *args: Any) -> list:
        size = manager.block_size
        rest = request.num_computed_tokens % size
        if not rest or request.num_computed_tokens + size >= request.num_tokens:
            return jump(self, request, manager, *args)
        request.num_computed_tokens += size - rest
        return jump(self, request, manager, *args)

    patch.setattr(Jumps, "jump", jump_anyway)


def name_no_blocks(patch: pytest.MonkeyPatch) -> None:
    """The worker is not told of the blocks of a jump."""
    jump = Jumps.jump

    def jump_silently(self: Jumps, *args: Any) -> list:
        hit = jump(self, *args)
        self._unnamed.clear()
        return hit

    patch.setattr(Jumps, "jump", jump_silently)


def jump_to_any_block(patch: pytest.MonkeyPatch) -> None:
    """A block on the device is taken, whichever step computes it."""
    find = Jumps.find

    def find_any(self: Jumps, key: Any) -> Any:
        return self._pool.cached_block_hash_to_block.get_one_block(key) or find(
            self, key
        )

    patch.setattr(Jumps, "find", find_any)


def name_no_requests(patch: pytest.MonkeyPatch) -> None:
    """A worker that counts tokens itself is not told of a jump."""
    patch.setattr(StepPlanBuilder, "name_jump", lambda self, request_id: None)


BUGS = [
    (end_with_the_first_rank, 2),
    (serve_before_it_came, 1),
    (leave_a_hole, 1),
    (overlap, 1),
    (jump_over_a_hole, 1),
    (jump_from_inside_a_block, 1),
    (name_no_blocks, 1),
    (name_no_requests, 1),
]


@pytest.mark.plants
@pytest.mark.parametrize("bug,num_ranks", BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_planted_bugs_are_found(
    bug: Callable[[pytest.MonkeyPatch], None],
    num_ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug(monkeypatch)
    for i in range(MAX_SCRIPTS):
        try:
            meeting_script(i, num_ranks).play()
        except (Violation, AssertionError, KeyError, IndexError):
            return
    pytest.fail(f"{MAX_SCRIPTS} scripts did not find it")


def preempted_after_others_looked() -> Engine:
    """A step that computes a block for a request, and then preempts it, since one
    behind it lacks a block. Between them runs one that wants the same block next."""
    setup = Setup(
        next(kind for kind in KINDS if kind.name == "full"),
        spare_blocks=1,
        num_slots=20,
        token_budget=24,
        by_priority=True,
        jumps=True,
        reserve_full_isl=False,
    )
    engine = Engine(setup)
    scheduler = engine._scheduler
    scheduler.scheduler_config.long_prefill_token_threshold = 8
    shared = [(3 * i) % 11 + 1 for i in range(28)]
    first = engine.add([*shared, *[12] * 8], 1, priority=9)
    # Some releases let a request that is alone have all.
    scheduler.max_num_scheduled_tokens = 8
    engine.step()
    scheduler.max_num_scheduled_tokens = 24
    engine.add([*shared, *[13] * 9], 1, priority=0)
    engine.add([14] * 12, 1, priority=1)
    engine.step()
    assert not engine.events["jumped"] and not engine.events["preempted"]
    engine.step()
    assert engine.events["preempted"] == 1 and first.num_preemptions == 1
    engine.settle()
    return engine


def test_what_this_step_computes_is_not_jumped_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert preempted_after_others_looked().events["jumped"] > 0
    jump_to_any_block(monkeypatch)
    with pytest.raises(Violation):
        preempted_after_others_looked()
