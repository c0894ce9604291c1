# SPDX-License-Identifier: Apache-2.0
"""Host slots that ranks open while the engine runs, and that an operator takes away.

`KV_TIER_SIM_EXAMPLES` and `KV_TIER_SIM_SEED` are as in `test_state_machine.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from vllm.v1.kv_tier.plan import StepReport
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.scheduler.host_size import HostSize
from vllm.v1.kv_tier.scheduler.slots import SlotTable

from . import upstream
from .content import Violation
from .scripts import Action, Resize, Script, play_part, random_script

NUM_PARTS = 4
MAX_SCRIPTS = 1000


def opening_script(seed: int, delay: int = 3, often: float = 0.2) -> Script:
    """A random script on an engine whose slots are opened and closed.

    Args:
        seed: Of all that is drawn.
        delay: Steps that a secondary tier may take.
        often: How often the size changes before an action.

    """
    rng = Random(seed)
    script = random_script(rng)
    num_slots = rng.randint(4, 40)
    setup = replace(
        script.setup,
        opens=seed,
        num_slots=num_slots,
        below=rng.choice([None, None, (seed, delay)]) if keys_are_bytes() else None,
        num_stages=rng.choice([1, 1, 1, 3]) if upstream.PREEMPTS_IN_PIPELINES else 1,
    )
    actions: list[Action] = []
    for action in script.actions:
        if rng.random() < often:
            actions.append(Resize(rng.randint(1, num_slots)))
        actions.append(action)
    return Script(setup, actions)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_scripts(part: int) -> None:
    events = play_part(opening_script, part, NUM_PARTS)
    assert events["opened"] and events["closed"] and events["loaded"]


# ------------------------------------------------------------------- planted bugs


def use_what_the_first_rank_has(patch: pytest.MonkeyPatch) -> None:
    """A slot is used before its range is open on the last rank."""
    take_report = HostSize.take_report

    def take(self: HostSize, report: StepReport) -> None:
        take_report(self, report)
        self.num_open = max(each.num_slots for each in self._ranks.values())

    patch.setattr(HostSize, "take_report", take)


def believe_what_was_said_before(patch: pytest.MonkeyPatch) -> None:
    """Counts of ranks that do not know of the last change yet are taken."""
    take_report = HostSize.take_report

    def take(self: HostSize, report: StepReport) -> None:
        take_report(self, report)
        num_open = min(each.num_slots for each in self._ranks.values())
        self.num_open = min(num_open, self._aim.num_slots)

    patch.setattr(HostSize, "take_report", take)


def discard_at_once(patch: pytest.MonkeyPatch) -> None:
    """Slots are closed while copies of earlier plans still use them."""
    patch.setattr(HostSize, "_may_give", lambda self: True)


def close_what_is_written(patch: pytest.MonkeyPatch) -> None:
    """Slots are closed while a secondary tier reads them."""
    close_down = SlotTable.close_down

    def close(self: SlotTable, first: int, most: int) -> None:
        held, self._held = self._held, set()
        try:
            close_down(self, first, most)
        finally:
            self._held = held

    patch.setattr(SlotTable, "close_down", close)


PIPELINE = {"num_stages": 3, "is_async": True, "below": None}
BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = [
    (use_what_the_first_rank_has, {}),
    # Reports must be on their way for long: one script in 40.
    (believe_what_was_said_before, PIPELINE),
    (discard_at_once, {}),
    (close_what_is_written, {}),
]


@pytest.mark.plants
@pytest.mark.parametrize("plant, setup", BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    setup: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if setup and not upstream.PREEMPTS_IN_PIPELINES:
        pytest.skip("pipelines of this release are wrong without bugs of ours")
    if plant is close_what_is_written and not keys_are_bytes():
        pytest.skip("this release has no secondary tiers here")
    plant(monkeypatch)
    for seed in range(MAX_SCRIPTS):
        try:
            script = opening_script(seed, delay=30, often=0.6)
            replace(script, setup=replace(script.setup, **setup)).play()
        except Violation as violation:
            assert violation.kind in ("open", "host", "device", "read", "tokens")
            return
        except (AssertionError, LookupError, StopIteration, ValueError):
            # The bug confused the tier itself; a violation is wanted.
            continue
    pytest.fail(f"{MAX_SCRIPTS} scripts found nothing")
