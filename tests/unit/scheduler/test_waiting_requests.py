# SPDX-License-Identifier: Apache-2.0
"""A request that waits for its loads waits a few times at most, and leaves room."""

import time
from types import SimpleNamespace
from typing import Any

from ..tier import BLOCK, Asking, Tier, is_empty, loads, loads_ahead

MOST_WAITS = 8
"""More than any request should be made to wait."""


def make_tier(num_blocks: int, **settings: Any) -> Tier:
    """A block takes a second to load; a step waits for half of that."""
    return Tier(
        num_blocks, 8000, **{"load_s": 1.0, "max_load_stall_ms": 500, **settings}
    )


_requests: dict[tuple[int, str], Asking] = {}


def asks(tier: Tier, name: str, prefix: str) -> bool:
    """Whether request `name` is admitted beside others, in the step in the making."""
    request: Any = _requests.setdefault((id(tier), name), Asking(num_preemptions=0))
    managers = [SimpleNamespace(block_size=BLOCK, get_num_skipped_tokens=lambda n: 0)]
    found = (tier.find(prefix),)
    num_tokens = len(prefix) * BLOCK
    pool = tier.pool
    if pool.promote(request, managers, found, num_tokens, 0, 2, True) is not None:
        return True
    # As the scheduler does where it does not admit a request.
    pool.load_ahead(managers, found, num_tokens)
    return False


def take_all(tier: Tier) -> None:
    """Steps that use every block: nothing is left on the device."""
    tier.begin()
    blocks = tier.pool.get_new_blocks(tier.pool.get_num_free_blocks())
    tier.end()
    tier.free(blocks)


def test_a_lack_of_room_does_not_begin_the_waits_anew() -> None:
    """It has waited long enough, but this step still uses the free blocks. In the next
    one it is not made to wait again."""
    tier = make_tier(6)
    tier.demoted("abc")
    num_waits = 0
    while True:
        tier.begin()
        if asks(tier, "r", "abc"):
            break
        num_waits += 1
        tier.end()
        take_all(tier)
        assert num_waits <= MOST_WAITS
    # The same once more, and in the step that would take it nothing can be loaded.
    tier.end()
    take_all(tier)
    for _ in range(num_waits):
        tier.begin()
        assert not asks(tier, "s", "abc")
        tier.end()
        take_all(tier)
    tier.begin()
    running = tier.pool.get_new_blocks(5)
    tier.end()
    tier.begin()
    tier.free(running)
    assert not asks(tier, "s", "abc")
    tier.end()
    take_all(tier)
    tier.begin()
    assert asks(tier, "s", "abc")


def test_a_crowd_does_not_begin_the_waits_anew() -> None:
    """However many others wait meanwhile."""
    tier = make_tier(6)
    tier.demoted("abc")
    for num_waits in range(3 * MOST_WAITS):
        tier.begin()
        if asks(tier, "r", "abc"):
            break
        for i in range(1100):
            assert not asks(tier, f"{num_waits}-{i}", "abc")
        tier.end()
        take_all(tier)
        # The loads have ended long since.
        tier.now += 100.0
    assert num_waits <= MOST_WAITS


def test_what_a_request_waits_for_leaves_blocks_to_those_that_run() -> None:
    """A hit as large as the free part of the device: a running request that takes the
    next block would wait for its load."""
    tier = make_tier(640)
    prefix = "".join(chr(0x4E00 + i) for i in range(640))
    tier.demoted(prefix)
    tier.begin()
    asks(tier, "r", prefix)
    plan = tier.end()
    assert len(loads_ahead(plan)) >= 320
    tier.begin()
    tier.pool.get_new_blocks(8)
    assert tier.end().compute_after_loads == 0


def test_it_is_admitted_all_the_same() -> None:
    """Though the last of its blocks cannot come before its step."""
    tier = make_tier(640)
    prefix = "".join(chr(0x4E00 + i) for i in range(630))
    tier.demoted(prefix)
    for num_waits in range(100):
        tier.begin()
        if asks(tier, "r", prefix):
            break
        tier.end()
        tier.now += 700.0
    assert num_waits <= MOST_WAITS


def test_it_does_not_wait_where_nothing_can_be_prefetched() -> None:
    """All that is free is spared for those that run, and the link is idle."""
    tier = make_tier(8, tuning={"spare": 0.5})
    tier.demoted("abcd")
    tier.begin()
    running = tier.pool.get_new_blocks(4)
    tier.end()
    tier.begin()
    assert asks(tier, "r", "abcd")
    assert len(loads(tier.end())) == 4
    tier.free(running)


def test_it_waits_no_longer_than_the_link_is_busy() -> None:
    """Half of what it lacks may be prefetched, and its step hides nothing of the rest:
    that takes as long later as at once."""
    tier = make_tier(8, tuning={"spare": 0.5})
    tier.demoted("abcdefgh")
    tier.begin()
    assert not asks(tier, "r", "abcdefgh")
    assert len(loads_ahead(tier.end())) == 4
    tier.now = 3.9
    assert not tier.pool.is_loading(_requests[id(tier), "r"], True)
    tier.begin()
    assert asks(tier, "r", "abcdefgh")
    assert len(loads(tier.end())) == 4


def test_it_waits_while_the_link_loads_for_others() -> None:
    tier = make_tier(8, tuning={"spare": 0.5})
    for prefix in ("abcd", "efgh"):
        tier.demoted(prefix)
    tier.begin()
    (group,) = tier.promote(tier.find("efgh"))
    tier.pool.touch(group)
    tier.end()
    tier.begin()
    assert not asks(tier, "r", "abcd")
    assert is_empty(tier.end())
    tier.now = 3.9
    tier.begin()
    assert asks(tier, "r", "abcd")


def test_blocks_that_wait_cost_those_that_run_nothing() -> None:
    """Whoever takes a block does not count those that are kept for another."""

    def seconds(num_kept: int) -> float:
        tier = make_tier(6000, load_s=1.0, tuning={"max_prefetch": 5000})
        prefix = "".join(chr(0x4E00 + i) for i in range(num_kept))
        tier.demoted(prefix)
        tier.begin()
        assert not asks(tier, "r", prefix)
        assert len(loads_ahead(tier.end())) == num_kept
        tier.begin()
        # They lie behind all that is taken now, or are put there.
        tier.pool.get_new_blocks(1)
        begun = time.thread_time()
        for _ in range(300):
            tier.pool.get_new_blocks(1)
        return time.thread_time() - begun

    assert seconds(5000) <= 5 * min(seconds(50) for _ in range(3))


def test_a_request_that_is_admitted_waits_for_nothing_any_more() -> None:
    tier = make_tier(8, tuning={"spare": 0.5})
    tier.demoted("abcdefgh")
    tier.begin()
    assert not asks(tier, "r", "abcdefgh")
    # Half of the blocks are left to those that run.
    assert len(loads_ahead(tier.end())) == 4
    assert tier.pool.load_admission.num_waited_for() == 4
    # Its step waits for half of the last of four seconds.
    request: Any = _requests[id(tier), "r"]
    for tier.now, is_loading in ((3.4, True), (3.6, False)):
        assert tier.pool.is_loading(request, True) == is_loading
    # A second later it may have been aborted.
    for tier.now, num_blocks in ((4.9, 4), (5.1, 0)):
        assert tier.pool.load_admission.num_waited_for() == num_blocks
    tier.now = 3.9
    tier.begin()
    assert asks(tier, "r", "abcdefgh")
    tier.end()
    assert tier.pool.load_admission.num_waited_for() == 0
