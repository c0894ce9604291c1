# SPDX-License-Identifier: Apache-2.0
"""Which pages are given back, when, and what becomes of their blocks."""

from typing import Any

from vllm.v1.kv_tier.elastic.pool import ElasticDevice
from vllm.v1.kv_tier.layout import ElasticLayout
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.pool import ElasticBlockPool

from ..tier import BLOCK, IdleScheduler, Tier, stores

NUM_BLOCKS, PAGE, HEADROOM = 12, 4, 2
"""Blocks 0 to 11 are three pages, the first of which has the null block."""


class Mapper:
    """Maps as many pages as it is told it can."""

    blocks_per_page = PAGE

    def __init__(self, missing: list[int]) -> None:
        self.wanted = 0
        self.spare = 3
        self.is_slow = False
        """Whether it takes time to map a page, which is ready at the next call."""
        self.num_ready = 0
        self.missing = missing
        self.unmapped = [*missing]

    def num_wanted(self) -> int:
        return self.wanted

    def map_pages(self, num_pages: int, wait: bool) -> list[int]:
        num_pages = min(num_pages, self.spare, len(self.unmapped))
        if self.is_slow and not wait:
            num_pages, self.num_ready = min(num_pages, self.num_ready), num_pages
        return [self.unmapped.pop() for _ in range(num_pages)]

    def unmap_pages(self, pages: list[int]) -> None:
        self.unmapped += pages

    def take_seconds(self) -> tuple[float, float]:
        return 0.25, 0.5


class ElasticTier(Tier):
    """A tier whose device has three pages."""

    def __init__(
        self, num_ranks: int = 1, missing: list[int] | None = None, **tuning: Any
    ) -> None:
        self.mapper = Mapper(missing or [])
        layout = ElasticLayout(
            lambda unmap: self.mapper,
            page_bytes=100,
            num_ranks=num_ranks,
            shrink_after_s=5.0,
            block_sizes=(BLOCK,),
            headroom=HEADROOM,
        )
        super().__init__(NUM_BLOCKS - 1, elastic=layout, tuning=tuning)

    @property
    def elastic(self) -> ElasticDevice:
        assert isinstance(self.pool, ElasticBlockPool)
        return self.pool.elastic

    @property
    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()

    def run_idle(self) -> StepPlan:
        self.begin()
        return self.pool.take_plan(is_idle=True)

    def run_idle_for(self, seconds: float) -> StepPlan:
        """Until a plan has come that long after the first."""
        self.run_idle()
        self.now += seconds
        return self.run_idle()

    def tell(self, plan: StepPlan) -> None:
        """A rank tells of the end of a plan."""
        self.pool.apply_report(StepReport(ended=[plan.seq]))

    def give_all_back(self) -> None:
        plan = self.run_idle_for(5.0)
        if not plan.report_end:
            # It stored what the host lacked.
            plan = self.run_idle()
        self.tell(plan)
        assert sorted(self.mapper.unmapped) == [1, 2]


def test_an_idle_engine_gives_back_after_the_time_that_was_set() -> None:
    tier = ElasticTier()
    assert not tier.run_idle_for(4.9).report_end
    assert tier.elastic.is_busy and tier.elastic.is_waiting
    tier.now += 0.1
    plan = tier.run_idle()
    assert plan.report_end and tier.num_free == PAGE - 1
    assert not tier.mapper.unmapped
    tier.tell(plan)
    assert sorted(tier.mapper.unmapped) == [1, 2]
    assert not tier.elastic.is_busy
    stats = tier.pool.take_stats()
    assert (stats.device_mapped_bytes, stats.device_unmapped_bytes) == (100, 200)
    assert stats.given_back_pages == 2 and tier.pool.get_usage() == 0.0
    assert (stats.map_seconds, stats.unmap_seconds) == (0.25, 0.5)


def test_an_idle_engine_goes_on_until_its_ranks_have_been_told() -> None:
    tier = ElasticTier()
    tier.give_all_back()
    assert not tier.elastic.is_busy
    # As `RankPages` does for each page that has gone.
    tier.pool._builder.unmap(PAGE, 2 * PAGE)
    assert tier.elastic.is_busy and not tier.elastic.is_waiting
    assert tier.run_idle().unmap_blocks == ((PAGE, 2 * PAGE),)
    assert not tier.elastic.is_busy


def test_an_engine_without_requests_steps_on() -> None:
    tier = ElasticTier()
    scheduler = IdleScheduler(tier.pool)
    tier.run_idle()
    assert scheduler.has_requests()
    tier.give_all_back()
    assert not scheduler.has_requests()


def test_what_is_not_mapped_at_first_comes_when_it_is_needed() -> None:
    tier = ElasticTier(missing=[2])
    assert tier.num_free == 2 * PAGE - 1
    stats = tier.pool.take_stats()
    assert (stats.device_mapped_bytes, stats.device_unmapped_bytes) == (200, 100)
    tier.computed("abcde")
    assert tier.mapper.unmapped == [2]
    for name in "fghi":
        tier.computed(name)
    assert not tier.mapper.unmapped and tier.num_free == NUM_BLOCKS - 1
    assert {tier.where(name) for name in "abcdefghi"} == {"device"}


def test_a_page_goes_when_all_ranks_have_told() -> None:
    tier = ElasticTier(num_ranks=2)
    plan = tier.run_idle_for(5.0)
    tier.tell(plan)
    assert not tier.mapper.unmapped
    tier.tell(plan)
    assert len(tier.mapper.unmapped) == 2


def test_time_begins_anew_with_each_request() -> None:
    tier = ElasticTier()
    tier.run_idle_for(4.0)
    tier.computed("a")
    assert not tier.run_idle_for(4.0).report_end


def test_nothing_goes_while_a_request_holds_blocks() -> None:
    tier = ElasticTier()
    tier.begin()
    tier.compute("a")
    tier.end()
    assert not tier.run_idle_for(9.0).report_end


def test_what_the_host_lacks_is_stored_by_an_earlier_plan() -> None:
    tier = ElasticTier(clean_part=0.0, min_stores=0, idle_stores=PAGE)
    tier.computed("abcdefghijk")
    plans = [tier.run_idle_for(5.0), *(tier.run_idle() for _ in range(3))]
    first = next(plan for plan in plans if plan.report_end)
    assert not stores(first).keys() & stores(plans[0]).keys()
    assert plans[0] is not first and len(stores(plans[0])) >= PAGE
    # Whatever goes is on the host.
    gone = [n for n in "abcdefghijk" if tier.where(n) != "device"]
    assert len(gone) == 2 * PAGE and all(tier.where(n) == "host" for n in gone)


def test_what_was_used_last_goes_last() -> None:
    tier = ElasticTier()
    tier.begin()
    blocks = tier.compute("abcdefghijk")
    tier.end()
    second, third = blocks[PAGE - 1 : 2 * PAGE - 1], blocks[2 * PAGE - 1 :]
    tier.free(third)
    tier.idle()
    tier.free([*second, *blocks[: PAGE - 1]])
    tier.mapper.wanted = 1
    for _ in range(2):
        tier.run_idle()
    assert list(tier.elastic.leaving.values()) == [[2]]


def test_pressure_takes_free_pages_of_busy_engines_but_not_their_headroom() -> None:
    tier = ElasticTier()
    tier.begin()
    tier.compute("ab")
    tier.end()
    tier.mapper.wanted = 3
    tier.idle()
    # Of nine free blocks two must stay.
    assert tier.num_free == 9 - PAGE
    tier.idle()
    assert tier.num_free == 9 - PAGE


def test_what_is_leaving_comes_back_without_being_mapped() -> None:
    tier = ElasticTier()
    plan = tier.run_idle_for(5.0)
    tier.begin()
    tier.elastic.need(3 + HEADROOM)
    assert tier.num_free == 2 * PAGE - 1
    tier.end()
    tier.tell(plan)
    assert len(tier.mapper.unmapped) == 1


def test_memory_comes_when_a_request_needs_it() -> None:
    tier = ElasticTier()
    tier.give_all_back()
    tier.begin()
    tier.elastic.need(PAGE)
    assert tier.num_free == 2 * PAGE - 1
    assert tier.pool.take_stats().mapped_pages == 1
    # Its blocks are the next ones, since they hold nothing.
    block = tier.pool.get_new_blocks(1)[0]
    assert block.block_id // PAGE not in {0, *tier.mapper.unmapped}


def test_without_memory_there_are_no_blocks_and_no_error() -> None:
    tier = ElasticTier()
    tier.give_all_back()
    tier.mapper.spare = 0
    tier.begin()
    tier.elastic.need(NUM_BLOCKS)
    assert tier.num_free == PAGE - 1
    tier.mapper.spare = 1
    tier.elastic.record_refusal()
    assert tier.num_free == 2 * PAGE - 1


def test_memory_is_taken_before_what_is_cached_is_evicted() -> None:
    tier = ElasticTier()
    tier.give_all_back()
    tier.computed("abc")
    tier.mapper.spare = 1
    tier.computed("d")
    assert tier.where("a") == tier.where("c") == tier.where("d") == "device"
    assert len(tier.mapper.unmapped) == 1


def test_running_requests_keep_headroom() -> None:
    tier = ElasticTier()
    tier.give_all_back()
    tier.begin()
    tier.pool.get_new_blocks(PAGE - 1 - HEADROOM + 1)
    assert tier.num_free >= HEADROOM


def test_a_burst_does_not_wait_as_a_whole_until_all_of_it_has_memory() -> None:
    """The first request waits for its own, the others for what comes meanwhile."""
    tier = ElasticTier()
    tier.give_all_back()
    tier.mapper.is_slow = True
    tier.begin()
    tier.elastic.need_prompt(PAGE, wait=True)
    assert tier.num_free == 2 * PAGE - 1
    tier.pool.get_new_blocks(PAGE)
    tier.elastic.need_prompt(PAGE, wait=False)
    assert tier.num_free == PAGE - 1
    tier.end()
    tier.begin()
    tier.elastic.need_prompt(PAGE, wait=False)
    assert tier.num_free == 2 * PAGE - 1


def test_the_headroom_of_a_step_is_there_when_it_begins() -> None:
    tier = ElasticTier()
    tier.give_all_back()
    tier.mapper.is_slow = True
    tier.begin()
    tier.pool.get_new_blocks(PAGE - 1)
    assert tier.num_free == 0
    tier.end()
    tier.mapper.num_ready = 0
    tier.begin()
    assert tier.num_free >= HEADROOM


def test_a_reset_is_one_of_the_blocks_that_are_there() -> None:
    tier = ElasticTier()
    tier.give_all_back()
    assert tier.pool.reset_prefix_cache()


def test_when_copies_hang_nothing_goes_any_more() -> None:
    tier = ElasticTier()
    plan = tier.run_idle_for(5.0)
    tier.pool.apply_report(StepReport(lost_blocks=[]))
    tier.tell(plan)
    assert not tier.mapper.unmapped and tier.num_free == NUM_BLOCKS - 1
    assert not tier.run_idle_for(9.0).report_end


def prefetched_and_aborted(tier: ElasticTier, names: str) -> None:
    """Loads ahead come at 4, and their request never does."""
    tier.pool.costs.load_s, tier.pool.costs.max_stall_s = 1.0, 0.0
    tier.begin()
    assert tier.try_promote(tier.find(names), among_others=True) is None
    assert tier.deferred and tier.end().ahead_blocks


def test_what_was_loaded_for_an_aborted_request_is_given_back() -> None:
    tier = ElasticTier()
    tier.demoted("abcd")
    prefetched_and_aborted(tier, "abcd")
    tier.now = 100
    plan = tier.run_idle_for(5.0)
    # They went with the pages, and forward passes need not wait for their loads.
    assert plan.report_end and not tier.pool.prefetches.unclaimed
    tier.tell(plan)
    assert sorted(tier.mapper.unmapped) == [1, 2]
    assert not tier.pool.prefetches and not tier.elastic.is_busy


def test_what_is_kept_for_a_request_is_given_back_later() -> None:
    """The time after which memory is given back may be over before."""
    tier = ElasticTier()
    tier.demoted("abcdefgh")
    tier.run_idle()
    prefetched_and_aborted(tier, "abcdefgh")
    tier.run_idle()
    tier.now = 7.9
    # They come at 8, and are kept for a second.
    assert len(tier.run_idle().ahead_blocks) == 0
    assert tier.elastic.is_busy and tier.elastic.is_waiting
    tier.now = 9.1
    plan = tier.run_idle()
    while tier.elastic.is_busy:
        if plan.report_end:
            tier.tell(plan)
        plan = tier.run_idle()
    assert sorted(tier.mapper.unmapped) == [1, 2]


def test_an_idle_engine_gives_back_what_was_in_use_under_pressure() -> None:
    """It had looked for pages while a request held one, and had found another."""
    tier = ElasticTier()
    tier.computed("abcdefg")
    tier.begin()
    held = tier.pool.get_new_blocks(PAGE)
    assert {block.block_id // PAGE for block in held} == {2}
    tier.mapper.wanted = 1
    assert not tier.end().report_end
    tier.free(held)
    plan = tier.run_idle()
    assert plan.report_end
    tier.tell(plan)
    assert tier.mapper.unmapped == [1]
    tier.mapper.wanted = 0
    plan = tier.run_idle_for(5.0)
    assert plan.report_end
    tier.tell(plan)
    assert sorted(tier.mapper.unmapped) == [1, 2]


def test_memory_for_a_request_that_never_ran_is_given_back() -> None:
    """It was aborted while it waited, in a step that ran nothing."""
    tier = ElasticTier()
    tier.give_all_back()
    tier.begin()
    tier.elastic.need_prompt(PAGE, wait=True)
    assert len(tier.mapper.unmapped) == 1
    tier.pool.take_plan(is_idle=True)
    assert tier.elastic.is_busy
    tier.give_all_back()


def test_a_step_looks_at_a_few_pages_only() -> None:
    tier = ElasticTier(max_page_looks=PAGE)
    tier.run_idle()
    tier.now = 5.0
    for _ in range(3):
        assert not tier.mapper.unmapped
        plan = tier.run_idle()
        if plan.report_end:
            break
    while tier.elastic.is_busy:
        if plan.report_end:
            assert tier.num_free >= NUM_BLOCKS - 1 - 2 * PAGE
            tier.tell(plan)
        plan = tier.run_idle()
    assert sorted(tier.mapper.unmapped) == [1, 2]
    assert tier.pool.take_stats().given_back_pages == 2
