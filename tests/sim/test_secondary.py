# SPDX-License-Identifier: Apache-2.0
"""Random scripts with a tier below the host, which is late, forgets and loses.

The checks after each step are those of all scripts: what came from below and can be
found must have the bytes of its key.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from vllm.v1.kv_tier.plan import SecondaryResult
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.scheduler.secondary import jobs
from vllm.v1.kv_tier.scheduler.secondary.fetches import Fetch, Fetches
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs
from vllm.v1.kv_tier.scheduler.secondary.manager import SecondaryTierManager
from vllm.v1.kv_tier.scheduler.secondary.writer import SecondaryWriter
from vllm.v1.kv_tier.scheduler.slots import SlotTable

from . import secondary as below
from . import upstream
from .content import Violation
from .layouts import LAYOUTS
from .scripts import EXAMPLES, Reset, Script, Steps, random_script, scripts

pytestmark = pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)

MAX_SCRIPTS = 3000


def with_below(script: Script, seed: int, delay: int, num_ranks: int = 1) -> Script:
    """Few slots, so that much comes back from below. Resets leave it alone. In most of
    them steps leave some of what begins and ends to the next ones, and in some also of
    what they look up and hear."""
    tuning = replace(
        script.setup.tuning,
        fetch_part=1.0,
        assumed_prefill_s=1e3,
        max_fetches=(1, 2, 4096)[seed % 3],
        max_ended=(1, 2, 4096)[seed // 3 % 3],
        max_looks=(4096, 3, 1)[seed // 9 % 3],
    )
    setup = replace(
        script.setup,
        below=(seed, delay, num_ranks),
        num_slots=4 + script.setup.num_slots // 4,
        store_from_use=1,
        tuning=tuning,
    )
    actions = [action for action in script.actions if not isinstance(action, Reset)]
    actions = script.actions if seed % 4 == 0 else [*actions, *actions]
    return Script(setup, actions)


def test_scripts_with_a_tier_below() -> None:
    events: Counter[str] = Counter()

    @settings(
        max_examples=max(EXAMPLES // 3, 60),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(LAYOUTS),
        st.data(),
        st.integers(0, 99),
        st.integers(0, 6),
        st.integers(1, 3),
    )
    def play(
        layout: object, data: st.DataObject, seed: int, delay: int, ranks: int
    ) -> None:
        script = with_below(data.draw(scripts(layout=layout)), seed, delay, ranks)
        note(str(script))
        engine = script.play()
        assert engine.below is not None
        events["put"] += engine.below.num_put
        events["got"] += engine.below.num_got
        events.update(engine.events)

    play()
    least = {"put": 1000, "got": 50, "failed": 10, "reset": 1, "preempted": 10}
    assert all(events[name] >= n * EXAMPLES // 500 for name, n in least.items()), events


def hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """A slot that is being written below may make room."""
    patch.setattr(SlotTable, "hold", lambda self, *held: None)
    patch.setattr(SlotTable, "end_hold", lambda self, *held: None)


def write_what_is_not_settled(patch: pytest.MonkeyPatch) -> None:
    """A slot is written below although a load before it may have failed."""
    write = SecondaryWriter.write
    patch.setattr(
        SecondaryWriter, "write", lambda self, settled: write(self, settled + 100)
    )


def serve_before_it_came(patch: pytest.MonkeyPatch) -> None:
    """A key enters the slot table when its job begins."""
    begin = Fetches.begin

    def begin_and_fill(self: Fetches, *args: Any, **where: Any) -> Fetch | None:
        before = set(self._table._reserved)
        fetch = begin(self, *args, **where)
        blocks = fetch.blocks if fetch is not None else []
        for block, index in zip(blocks, sorted({*self._table._reserved} - before)):
            if self._table.get(block.key) is None:
                self._table.fill(index, block.key, block.num_tokens)
                self._table._reserved.add(index)
        return fetch

    patch.setattr(Fetches, "begin", begin_and_fill)


def serve_what_did_not_come(patch: pytest.MonkeyPatch) -> None:
    """What a rank could not read counts as read."""
    came = Fetches._end
    patch.setattr(Fetches, "_end", lambda self, b, i, there: came(self, b, i, True))


def forget_what_used_a_slot(patch: pytest.MonkeyPatch) -> None:
    """Jobs do not wait for copies that used their slots before."""
    patch.setattr(SlotTable, "last_copies", lambda self, index: (0, 0))


def serve_after_a_reset(patch: pytest.MonkeyPatch) -> None:
    """A reset leaves the tier below as it is."""
    patch.setattr(SecondaryTierManager, "detach", lambda self, reason: None)


def tell_what_still_writes(patch: pytest.MonkeyPatch) -> None:
    """A job that failed is told, and goes on writing to its slots."""
    patch.setattr(below.Below, "tells_early", True)


def end_with_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    """A job is over when one rank has told of it, as those do at once which leave the
    writing to another."""
    init = SecondaryJobs.__init__
    patch.setattr(
        SecondaryJobs,
        "__init__",
        lambda self, table, _, *rest: init(self, table, 1, *rest),
    )


def name_the_first_group(patch: pytest.MonkeyPatch) -> None:
    """Ranks move of each slot what the first KV cache group needs."""
    patch.setattr(jobs, "get_group_id", lambda key: 0)


def believe_any_rank(patch: pytest.MonkeyPatch) -> None:
    """What one rank has done counts as done on all."""
    take = SecondaryJobs.take_results

    def take_any(self: SecondaryJobs, results: list[SecondaryResult]) -> None:
        for result in results:
            if (job := self._jobs.get(result.number)) is not None:
                before = job.done if job.num_told else [False] * len(job.done)
                any_of = [a or b for a, b in zip(before, result.done)]
                job.done = [True] * len(any_of)
                take(self, [result._replace(done=any_of)])

    patch.setattr(SecondaryJobs, "take_results", take_any)


BUGS = [
    tell_what_still_writes,
    hold_nothing,
    write_what_is_not_settled,
    serve_before_it_came,
    serve_what_did_not_come,
    forget_what_used_a_slot,
    serve_after_a_reset,
    name_the_first_group,
]
BUGS_OF_RANKS = [end_with_the_first_rank, believe_any_rank]
"""That show only where several ranks have their objects in common."""


def with_failing_loads(script: Script, rng: Random) -> Script:
    """Loads fail often, and what is computed after them is stored at once."""
    actions = [
        replace(action, fail="load")
        if isinstance(action, Steps) and rng.random() < 0.3
        else action
        for action in script.actions
    ]
    setup = replace(
        script.setup,
        store_policy="write_through",
        is_async=True,
        spare_blocks=6,
        load_time=0,
    )
    return Script(setup, actions)


@pytest.mark.plants
@pytest.mark.parametrize("bug", BUGS + BUGS_OF_RANKS, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    num_ranks = 2 if bug in BUGS_OF_RANKS else 1
    for i in range(MAX_SCRIPTS):
        rng = Random(i)
        script = random_script(rng)
        stages = rng.choice([1, 3]) if upstream.PREEMPTS_IN_PIPELINES else 1
        setup = replace(script.setup, layout=rng.choice(LAYOUTS), num_stages=stages)
        delay = rng.choice([0, 0, 2, 6])
        script = Script(setup, script.actions)
        if bug is write_what_is_not_settled:
            script = with_failing_loads(script, rng)
        if bug is serve_after_a_reset:
            half = len(script.actions) // 2
            script.actions.insert(half, Reset(running=True))
        script = with_below(script, 4 * i + i % 2, delay, num_ranks)
        try:
            script.play()
        except (Violation, AssertionError, KeyError):
            return
    pytest.fail(f"{MAX_SCRIPTS} scripts did not find it")
