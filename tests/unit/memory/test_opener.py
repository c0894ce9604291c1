# SPDX-License-Identifier: Apache-2.0
"""Slots that a rank opens while its engine serves requests, and closes."""

import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.memory.test_buffer import GPU, Driver, MiB, driver, log
from tests.unit.memory.test_pages import num_resident
from vllm.v1.kv_tier.memory import buffer as host_buffer
from vllm.v1.kv_tier.memory import opener as slot_opener
from vllm.v1.kv_tier.memory.buffer import GiB, HostBuffer, Parts
from vllm.v1.kv_tier.memory.opener import FIRST_BYTES, SlotOpener
from vllm.v1.kv_tier.memory.pages import anonymous
from vllm.v1.kv_tier.memory.shared import SharedMemory
from vllm.v1.kv_tier.plan import OpenSlots

__all__ = ["driver", "log"]


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    def warn(text: str, *args: Any) -> None:
        lines.append(text % args)

    monkeypatch.setattr(logging.getLogger(slot_opener.__name__), "warning", warn)
    return lines


def pinned(num_slots: int = 40, **settings: Any) -> HostBuffer:
    """Slots of a mebibyte, of which the first four are open."""
    settings = {"piece_bytes": 4 * MiB, "first_bytes": MiB} | settings
    return HostBuffer(num_slots, MiB, pin=True, device=GPU, **settings)


class Memory:
    """Memory that has no pages yet, as that of a pool before it is mapped."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = anonymous(num_bytes, huge_pages=False)


def opener_of(buffer: HostBuffer, **settings: Any) -> SlotOpener:
    settings = {"piece_bytes": 4 * MiB, "pause": 0.0} | settings
    return SlotOpener(buffer, **settings)


def wait_for(found: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not found():
        assert time.monotonic() < until
        time.sleep(0.001)


def state_of(opener: SlotOpener, number: int) -> OpenSlots:
    """The last state after aim `number`."""
    states = [OpenSlots(-1, 0, False)]

    def is_done() -> bool:
        if (state := opener.take()) is not None:
            states.append(state)
        return states[-1].number == number and states[-1].is_done

    wait_for(is_done)
    return states[-1]


def test_only_the_first_slots_are_open_at_first(driver: Driver) -> None:
    buffer = pinned()
    assert buffer.num_open == 4 and buffer.pinned
    assert sum(driver.registered.values()) == 4 * MiB
    assert num_resident(buffer.slots) == 4 * MiB


def test_a_start_does_not_depend_on_the_size(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(size: int) -> int:
        # As a driver does.
        time.sleep(0.25 * size / GiB)
        return 0

    driver.on_register = register
    monkeypatch.setattr(host_buffer, "touch", lambda address, size: None)
    num_bytes, seconds = [], []
    for gib in (2, 16):
        begun = time.perf_counter()
        buffer = HostBuffer(
            gib << 10, MiB, pin=True, device=GPU, first_bytes=FIRST_BYTES, threads=2
        )
        seconds.append(time.perf_counter() - begun)
        num_bytes.append(sum(driver.registered.values()))
        del buffer
        gc.collect()
    assert num_bytes == [GiB, GiB] and max(seconds) < 1.0


def test_the_others_are_opened_in_order(driver: Driver) -> None:
    buffer = pinned(42)
    opener = opener_of(buffer)
    assert opener.take() is None
    opener.aim(0, 42)
    counts: list[int] = []

    def is_done() -> bool:
        if (state := opener.take()) is not None:
            counts.append(state.num_slots)
            # What is reported is there.
            assert sum(driver.registered.values()) >= state.num_slots * MiB
        return buffer.num_open == 42 and counts[-1:] == [42]

    wait_for(is_done)
    assert counts == sorted(counts) and opener.take() is None
    assert max(driver.registered.values()) == 4 * MiB
    assert num_resident(buffer.slots) == 42 * MiB
    assert not buffer.slots.any()


def test_a_refused_range_is_never_open(driver: Driver, warnings: list[str]) -> None:
    limit = 20 * MiB
    driver.on_register = lambda size: (
        2 if sum(driver.registered.values()) + size > limit else 0
    )
    buffer = pinned()
    opener = opener_of(buffer)
    opener.aim(0, 40)
    assert state_of(opener, 0) == (0, 20, True)
    assert sum(driver.registered.values()) == limit
    assert len(warnings) == 1
    assert "20 of 40 host slots are open on this rank" in warnings[0]
    assert "refused to register it (error 2)" in warnings[0]
    # Another aim is another attempt.
    limit = 30 * MiB
    opener.aim(1, 40)
    assert state_of(opener, 1) == (1, 28, True) and len(warnings) == 2


def test_memory_that_others_took_is_not_opened(warnings: list[str]) -> None:
    left = [9 * MiB]

    def available() -> int:
        left[0] -= 4 * MiB
        return left[0]

    buffer = HostBuffer(40, MiB, pin=False, piece_bytes=4 * MiB, first_bytes=1)
    opener = opener_of(buffer, available=available)
    opener.aim(0, 40)
    assert state_of(opener, 0) == (0, 8, True)
    assert len(warnings) == 1 and "no memory available" in warnings[0]
    assert num_resident(buffer.slots) == 8 * MiB


@pytest.mark.parametrize("num_slots, stride", [(10, 10), (10, 14), (7, 8)])
def test_pieces_lie_in_one_part_each(
    driver: Driver, num_slots: int, stride: int
) -> None:
    """Between parts there is no memory: it is neither touched nor registered."""
    whole = 2 * stride + num_slots
    memory = Memory(whole * MiB)
    buffer = pinned(whole, shared=memory, parts=Parts(num_slots, stride))
    assert buffer.num_open == 4
    opener = opener_of(buffer)
    opener.aim(0, whole)
    assert state_of(opener, 0) == (0, whole, True)
    start = buffer.slots.data_ptr()
    found = sorted((at - start, size) for at, size in driver.registered.items())
    expected = [
        ((part * stride + first) * MiB, min(4, num_slots - first) * MiB)
        for part in range(3)
        for first in range(0, num_slots, 4)
    ]
    assert found == expected
    for part in range(3):
        end = (part + 1) * stride
        assert num_resident(buffer.slots[end - stride + num_slots : end]) == 0


def test_counts_of_open_slots_end_with_a_part() -> None:
    buffer = HostBuffer(
        24,
        MiB,
        pin=False,
        piece_bytes=4 * MiB,
        shared=Memory(24 * MiB),
        first_bytes=1,
        parts=Parts(6, 9),
    )
    counts = [buffer.num_open]
    while buffer.num_open < 24:
        buffer.open_next(4 * MiB)
        counts.append(buffer.num_open)
    assert counts == [4, 6, 13, 15, 22, 24]


def test_the_first_bytes_may_be_those_of_several_parts(driver: Driver) -> None:
    memory = Memory(15 * MiB)
    settings = {"shared": memory, "first_bytes": 11 * MiB}
    buffer = pinned(15, **settings, parts=Parts(4, 5))
    assert buffer.num_open == 14
    assert sum(driver.registered.values()) == 12 * MiB


def test_refusal_leaves_what_is_open_of_a_pool(
    driver: Driver, warnings: list[str]
) -> None:
    driver.on_register = lambda size: (
        2 if sum(driver.registered.values()) + size > 11 * MiB else 0
    )
    buffer = pinned(24, shared=Memory(24 * MiB), parts=Parts(6, 9))
    opener = opener_of(buffer)
    opener.aim(0, 24)
    # Six of its own, and four of the first neighbour.
    assert state_of(opener, 0) == (0, 13, True)
    assert len(warnings) == 1 and "of its keeper" in warnings[0]


def test_closed_slots_give_their_memory_back(driver: Driver) -> None:
    buffer = pinned()
    opener = opener_of(buffer)
    opener.aim(0, 40)
    state_of(opener, 0)
    buffer.slots.fill_(7)
    opener.aim(1, 9)
    # Whole pieces only.
    assert state_of(opener, 1) == (1, 12, True)
    assert sum(driver.registered.values()) == 12 * MiB
    assert num_resident(buffer.slots[:12]) == 12 * MiB
    assert (buffer.slots[:12] == 7).all()
    assert num_resident(buffer.slots[12:]) == 0
    opener.aim(2, 40)
    assert state_of(opener, 2) == (2, 40, True)
    assert sum(driver.registered.values()) == 40 * MiB
    assert not buffer.slots[12:].any()


def test_memory_of_a_file_is_given_back_too() -> None:
    memory = SharedMemory.create(40, MiB, num_ranks=1)
    buffer = HostBuffer(
        40, MiB, pin=False, piece_bytes=4 * MiB, shared=memory, nodes=set()
    )
    buffer.slots.fill_(7)
    opener = opener_of(buffer)
    opener.aim(1, 8)
    assert state_of(opener, 1) == (1, 8, True)
    # Without `resident`: a look would bring pages of a file back.
    assert not buffer.slots[8:].any() and (buffer.slots[:8] == 7).all()
    memory.close()


def test_memory_that_the_driver_made_stays_whole(
    driver: Driver, log: list[str]
) -> None:
    driver.on_register, driver.refuses_to_allocate = lambda size: 801, False
    buffer = pinned()
    assert buffer.num_open == 40
    opener = opener_of(buffer)
    opener.aim(1, 8)
    assert state_of(opener, 1) == (1, 40, True)


def test_the_thread_ends_with_its_slots() -> None:
    buffer = HostBuffer(40, MiB, pin=False, piece_bytes=4 * MiB, first_bytes=1)
    opener = opener_of(buffer)
    opener.aim(0, 40)
    state_of(opener, 0)

    def num_threads() -> int:
        return [each.name for each in threading.enumerate()].count("kv-tier-open")

    before = num_threads()
    del opener
    gc.collect()
    wait_for(lambda: num_threads() == before - 1)
