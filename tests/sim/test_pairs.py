# SPDX-License-Identifier: Apache-2.0
"""Every two features that the simulator has meet in some script.

Scripts are drawn until all pairs have met, each for one that is missing, with as much
else as goes with it. What is checked after each step is what all scripts check.
"""

from random import Random

import pytest

from . import upstream

if not upstream.KNOWS_ALL_FEATURES:
    pytest.skip("this release lacks some of the features", allow_module_level=True)

from .content import Violation
from .pairs import draw, drawn, meet
from .real_ranks import RealRanks
from .step import Step
from .worker import Worker

MAX_SCRIPTS = 150


@pytest.mark.pairs(sorted(drawn()))
def test_all_pairs_meet() -> None:
    missing = drawn()
    for seed in range(MAX_SCRIPTS):
        if not missing:
            return
        rng = Random(seed)
        codes = draw(rng, missing)
        try:
            missing -= meet(codes, rng)
        except Violation as violation:
            pytest.fail(f"seed {seed}, {sorted(codes)}: {violation}")
    pytest.fail(f"{MAX_SCRIPTS} scripts did not have {sorted(missing)}")


def test_wrong_bytes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: loads take the slot beside the right one."""
    load = Worker._load

    def load_other(self: Worker, pairs: list[tuple[int, int]]) -> None:
        load(self, [((slot + 1) % len(self.host), block) for slot, block in pairs])

    monkeypatch.setattr(Worker, "_load", load_other)
    with pytest.raises(Violation):
        for seed in range(5):
            rng = Random(seed)
            meet(draw(rng, drawn()), rng)


def test_wrong_bytes_of_a_real_rank_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same on real memory only."""
    check = RealRanks.begin

    def begin(self: RealRanks, step: Step) -> None:
        check(self, step)
        for block in step.plan.load_blocks:
            self._devices[-1][block] += 1

    monkeypatch.setattr(RealRanks, "begin", begin)
    with pytest.raises(Violation, match="rank 1"):
        for seed in range(20):
            meet({"WB", "TP"}, Random(seed))
