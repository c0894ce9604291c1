# SPDX-License-Identifier: Apache-2.0
"""What has come from a tier below is loaded on to the device while the rest comes."""

import pytest

from vllm.v1.kv_tier.plan import SecondaryJob, StepPlan
from vllm.v1.kv_tier.releases import keys_are_bytes

from ..prefetching import lack_room
from ..secondary_pool import Below, Request, key

pytestmark = pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)


class Fetched:
    """A request whose blocks, of which a tier below has all, come in jobs of two."""

    def __init__(self, names: str, **below: int) -> None:
        options = {"num_blocks": 64, "num_slots": 128, "max_job": 2, "min_prefetch": 2}
        self.below = Below(**options | below)
        self.names = names
        self.below.store.keys = {key(name) for name in names}
        self.request = Request(names)
        self.below.tier.begin()
        self.below.asked(self.request)
        self.jobs = self.look(is_begun=True).secondary

    @property
    def waits(self) -> bool:
        return self.below.pool.is_loading(self.request, False)  # type: ignore[arg-type]

    def look(self, is_begun: bool = False) -> StepPlan:
        """A step that looks at the prefix as the scheduler does, and cannot admit."""
        tier = self.below.tier
        if not is_begun:
            tier.begin()
        assert not self.waits
        hit = tier.find(self.names)
        assert tier.try_promote(hit, request=self.request) is None
        lack_room(tier, self.names)
        return tier.end()

    def come(self, *jobs: SecondaryJob) -> None:
        for job in jobs:
            self.below.end(job)


def test_half_of_it_is_loaded_while_the_other_half_comes() -> None:
    fetched = Fetched("abcdefgh")
    first, second, third, last = fetched.jobs
    fetched.come(first)
    assert fetched.waits
    fetched.come(second)
    assert not fetched.waits
    plan = fetched.look()
    assert sorted(plan.ahead_slots) == sorted(first.slots + second.slots)
    assert fetched.waits and not plan.secondary
    fetched.come(third)
    assert fetched.waits
    fetched.come(last)
    assert not fetched.waits
    tier = fetched.below.tier
    tier.begin()
    (group,) = tier.promote(tier.find("abcdefgh"), request=fetched.request)
    assert len(group) == 8
    assert sorted(tier.end().load_slots) == sorted(third.slots + last.slots)


def test_ranks_are_told_how_many_jobs_must_end() -> None:
    fetched = Fetched("abcdefgh")

    def awaits() -> int:
        return fetched.below.pool.take_plan(is_idle=True).awaits_secondary

    first, second, third, last = fetched.jobs
    assert awaits() == 2
    fetched.come(first)
    assert awaits() == 2
    fetched.come(second)
    fetched.look()
    assert awaits() == 4
    fetched.come(third)
    assert awaits() == 4
    fetched.come(last)
    assert not fetched.waits and awaits() == 0


def test_the_cleaner_is_told_while_something_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched, told = Fetched("abcdefgh"), []
    pool = fetched.below.pool
    monkeypatch.setattr(
        pool.store_timing, "write", lambda *told_of: told.append(told_of)
    )
    pool.take_plan(is_idle=True)
    fetched.come(*fetched.jobs)
    assert not fetched.waits
    pool.take_plan(is_idle=True)
    assert told == [(True, True), (True, False)]


def test_a_hole_ends_the_wait_for_what_is_behind_it() -> None:
    fetched = Fetched("abcdefgh")
    first, second, *_ = fetched.jobs
    fetched.come(first)
    fetched.below.end(second, False, False)
    tier = fetched.below.tier
    tier.begin()
    assert not fetched.waits
    (group,) = tier.promote(tier.find("ab"), request=fetched.request)
    assert len(group) == 2


@pytest.mark.parametrize("min_prefetch", [16, 17])
def test_a_long_prefix_is_looked_at_once_while_it_comes(min_prefetch: int) -> None:
    names = "".join(map(chr, range(ord("A"), ord("A") + 32)))
    fetched = Fetched(names, min_prefetch=min_prefetch)
    assert len(fetched.jobs) == 16
    looks = []
    for number, job in enumerate(fetched.jobs[:-1], 1):
        fetched.come(job)
        while not fetched.waits:
            fetched.look()
            looks.append(number)
    assert looks == ([8] if min_prefetch == 16 else [])
