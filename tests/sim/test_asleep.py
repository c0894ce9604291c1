# SPDX-License-Identifier: Apache-2.0
"""Engines that sleep between steps, and whose host outlives it, on the real scheduler.

The device has other bytes afterwards, and other weights now and then, loaded at any
moment. `KV_TIER_SIM_EXAMPLES` and `KV_TIER_SIM_SEED` are as in `test_state_machine.py`.
"""

import os
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from vllm.v1.kv_tier.scheduling.asleep import Asleep, Stage, keep_while_asleep
from vllm.v1.kv_tier.scheduling.rank_calls import RankCalls
from vllm.v1.kv_tier.scheduling.slots import SlotTable

from .content import GARBAGE, Violation
from .engine import Engine
from .scheduler import Setup
from .scripts import Script, random_script

EXAMPLES = int(os.environ.get("KV_TIER_SIM_EXAMPLES", "500"))
SEED = int(os.environ.get("KV_TIER_SIM_SEED", "0"))
NUM_PARTS = 4
MAX_SCRIPTS = 500
LOADS = "load_weights"


class Sleeper(Engine):
    """An engine with `keep_while_asleep`."""

    drains = True
    """Whether copies end before the device's memory goes away."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._calls = RankCalls()
        keep_while_asleep(self._pool, self._calls)

    def sleep(self, rng: Random) -> None:
        """Sleep and wake up, as `EngineCore.sleep` has it: what runs has ended before,
        or begins anew afterwards."""
        while self._in_flight:
            self._process_oldest()
        if not (self._can_reset_running and rng.random() < 0.5):
            for _ in range(len(self._live)):
                self.abort(0)
        options = {"reset_running_requests": True} if self._live else {}
        if not self._scheduler.reset_prefix_cache(**options):
            return
        level, new_weights = rng.choice([1, 1, 1, 2]), rng.random() < 0.3
        # Whoever loads weights does it at any time.
        loads_at = rng.randrange(3) if new_weights else None
        keeps = level == 1 and not new_weights
        had = len(self._pool.host.filled())
        self._loads(loads_at == 0)
        if self.drains:
            self._worker.settle()
        self._calls.sleeps({"level": level})
        device = self._worker.device
        for block in {*range(len(device))} - device.unmapped:
            device[block] = [GARBAGE] * len(device[block])
        self._loads(loads_at == 1)
        self._calls.wakes_up({"tags": None})
        self._loads(loads_at == 2)
        self.events["slept"] += 1
        self.events["kept"] += keeps and bool(had)
        if not new_weights:
            # Nothing of level 2 is wrong either: it is gone.
            self._check()

    def _loads(self, is_now: bool) -> None:
        if is_now:
            self._calls.may_change(LOADS)
            self._change_weights()


def play(script: Script, seed: int) -> Counter[str]:
    """Play a script with sleeps between what it does."""
    rng = Random(seed)
    engine = Sleeper(script.setup)
    for action in script.actions:
        action.run(engine)
        if rng.random() < 0.2:
            engine.sleep(rng)
    engine.drain()
    return engine.events


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_scripts(part: int) -> None:
    events: Counter[str] = Counter()
    for seed in range(SEED + part, SEED + EXAMPLES, NUM_PARTS):
        script = random_script(Random(seed))
        try:
            events.update(play(script, seed))
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}\n{script}")
    assert events["kept"] and events["slept"] > events["kept"] and events["loaded"]


# ------------------------------------------------------------------- planted bugs


def sleep_before_copies_end(patch: pytest.MonkeyPatch) -> None:
    """Stores under way read the device after the sleep."""
    patch.setattr(Sleeper, "drains", False)


def keep_through_new_weights(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks which calls may change weights."""
    patch.setattr(Asleep, "_weights_may_change", lambda self, method: None)


def keep_after_a_reset(patch: pytest.MonkeyPatch) -> None:
    """A step after a reset finds the slots again."""

    def begin_step(self: Asleep) -> None:
        self._table.show()
        self.stage = Stage.RUNS

    patch.setattr(Asleep, "begin_step", begin_step)


def find_hidden_slots(patch: pytest.MonkeyPatch) -> None:
    """Slots are found while it is not known what the reset was for."""
    patch.setattr(SlotTable, "hide", lambda self: None)


CONTENTS = {"device", "host", "read", "tokens"}
BUGS: dict[Callable[[pytest.MonkeyPatch], None], set[str]] = {
    sleep_before_copies_end: CONTENTS,
    keep_through_new_weights: CONTENTS,
    keep_after_a_reset: CONTENTS,
    find_hidden_slots: CONTENTS,
}


@pytest.mark.parametrize("plant", BUGS, ids=[plant.__name__ for plant in BUGS])
def test_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(MAX_SCRIPTS):
        try:
            play(random_script(Random(seed)), seed)
        except Violation as violation:
            assert violation.kind in BUGS[plant]
            return
    pytest.fail(f"not found in {MAX_SCRIPTS} scripts")
