# SPDX-License-Identifier: Apache-2.0
"""Device memory that comes and goes at random, on the real scheduler.

Blocks without memory fail whoever touches them. `KV_TIER_SIM_EXAMPLES` and
`KV_TIER_SIM_SEED` are as in `test_state_machine.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from vllm.v1.kv_tier.elastic.pool import ElasticBlockPool, ElasticDevice
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.worker.host_tier import HostTier

from . import upstream
from .content import Violation
from .pages import Elastic, Pages
from .scripts import Script, play_part, random_script

NUM_PARTS = 4
MAX_SCRIPTS = 1000


def elastic_script(seed: int, by_ranks: bool | None = None) -> Script:
    """A random script on an engine whose memory comes and goes."""
    rng = Random(seed)
    script = random_script(rng)
    elastic = Elastic(
        seed,
        blocks_per_page=rng.choice([1, 2, 3, 5, 8]),
        shrink_after=rng.choice([0, 1, 5]),
        pressure=rng.choice([0.0, 0.2, 0.8]),
        by_ranks=rng.random() < 0.3 if by_ranks is None else by_ranks,
        missing=rng.choice([0.0, 0.0, 0.5, 1.0]),
    )
    setup = replace(
        script.setup,
        elastic=elastic,
        below=rng.choice([None, None, (seed, 3)]) if keys_are_bytes() else None,
        num_stages=rng.choice([1, 1, 1, 3]) if upstream.PREEMPTS_IN_PIPELINES else 1,
    )
    return replace(script, setup=setup)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_scripts(part: int) -> None:
    events = play_part(elastic_script, part, NUM_PARTS)
    assert events["unmapped"] and events["mapped"] and events["loaded"]


# ------------------------------------------------------------------- planted bugs


def unmap_at_once(patch: pytest.MonkeyPatch) -> None:
    """A page is unmapped by the plan that takes its blocks out: before its stores,
    and what runs, have ended."""
    end_step = ElasticDevice.end_step

    def end_and_unmap(self: ElasticDevice, is_idle: bool) -> None:
        end_step(self, is_idle)
        self.record_ended(list(self.leaving))

    patch.setattr(ElasticDevice, "end_step", end_and_unmap)


def tell_before_the_end(patch: pytest.MonkeyPatch) -> None:
    """A rank does not ask whether copies have ended."""

    def tell(self: HostTier, plan: StepPlan) -> None:
        if plan.report_end:
            self.report.record_ended([plan.seq])

    patch.setattr(HostTier, "_report_ends", tell)


def hand_out_what_is_unmapped(patch: pytest.MonkeyPatch) -> None:
    """Blocks go back to the free queue, their memory does not come."""

    def map_pages(self: Pages, num_pages: int, wait: bool) -> list[int]:
        pages = self._unmapped[:num_pages]
        del self._unmapped[:num_pages]
        return pages

    patch.setattr(Pages, "map_pages", map_pages)


def leave_blocks_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a page that leaves can still be had."""
    patch.setattr(ElasticBlockPool, "take_out", lambda self, blocks: None)


def forget_what_is_missing(patch: pytest.MonkeyPatch) -> None:
    """Blocks are in the queue whose memory is not there from the start."""
    patch.setattr(ElasticBlockPool, "_take_missing", lambda self: None)


def unmap_what_was_needed_again(patch: pytest.MonkeyPatch) -> None:
    """A page that was put back is unmapped all the same."""
    need = ElasticDevice.need

    def need_and_forget(
        self: ElasticDevice, num_blocks: int, wait: bool = True
    ) -> None:
        before = {seq: list(pages) for seq, pages in self.leaving.items()}
        need(self, num_blocks, wait)
        self.leaving.update(before)

    patch.setattr(ElasticDevice, "need", need_and_forget)


CONTENTS = {"device", "host", "read", "tokens"}
BUGS: dict[Callable[[pytest.MonkeyPatch], None], set[str]] = {
    unmap_at_once: {"unmapped"},
    tell_before_the_end: {"unmapped", *CONTENTS},
    hand_out_what_is_unmapped: {"unmapped"},
    leave_blocks_in_the_queue: {"refs"},
    unmap_what_was_needed_again: {"refs"},
    forget_what_is_missing: {"unmapped"},
}


@pytest.mark.plants
@pytest.mark.parametrize("plant", BUGS, ids=[plant.__name__ for plant in BUGS])
def test_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    plant(monkeypatch)
    for seed in range(MAX_SCRIPTS):
        try:
            elastic_script(seed, by_ranks=False).play()
        except Violation as violation:
            record_property("scripts", seed + 1)
            assert violation.kind in BUGS[plant], violation
            return
        except (AssertionError, LookupError):
            # The bug confused the tier itself; a violation is wanted.
            continue
    pytest.fail(f"{MAX_SCRIPTS} scripts found nothing")
