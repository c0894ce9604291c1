# SPDX-License-Identifier: Apache-2.0
"""Which client of Mooncake's is used, and who closes it. Clients stand in for it, since
which thread comes first matters, and a wrong one ends the process."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from vllm.v1.kv_tier.stores import mooncake
from vllm.v1.kv_tier.stores.mooncake import MAX_BATCH, SharedClient

from ...settings import store_config
from .objects import KEYS, NAMESPACE, ROW_BYTES, empty, logged_by


class Calls:
    """What Mooncake has for one client."""

    made: list["Calls"]
    num_refused = 0
    num_failing = 0
    num_slow = 0
    answer = 0

    def __init__(self) -> None:
        Calls.made.append(self)
        self.memory: list[int] = []
        self.is_closed = self.was_closed_in_use = False
        self.num_inside = 0
        self.num_of_call: list[int] = []

    def setup(self, *arguments: object) -> int:
        return 0

    def register_buffer(self, address: int, num_bytes: int) -> int:
        if num_bytes == ROW_BYTES and Calls.num_refused:
            Calls.num_refused -= 1
            return -1
        self.memory.append(num_bytes)
        return 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        assert ROW_BYTES in self.memory and not self.is_closed
        if Calls.num_failing:
            Calls.num_failing -= 1
            raise RuntimeError("its own")
        return [0] * len(names)

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: object, sizes: list[list[int]]
    ) -> list[int]:
        # A node that has stalled takes its time for each object.
        self.num_of_call.append(len(names))
        if Calls.num_slow:
            Calls.num_slow -= 1
            time.sleep(1.1 * len(names))
            return [-800] * len(names)
        return [Calls.answer] * len(names)

    def get_size(self, name: str) -> int:
        return -900

    def close(self) -> None:
        assert not self.is_closed
        self.was_closed_in_use |= bool(self.num_inside)
        self.is_closed = True


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Calls.made, Calls.num_refused, Calls.num_failing, Calls.num_slow = [], 0, 0, 0
    Calls.answer = 0
    monkeypatch.setattr(mooncake, "import_client", lambda: Calls)
    for name in list(os.environ):
        if name.startswith("MC_"):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.fixture
def entry() -> Iterator[Any]:
    with mooncake.socket.create_server(("127.0.0.1", 0)) as listening:
        master = f"127.0.0.1:{listening.getsockname()[1]}"
        yield store_config({"type": "mooncake", "master": master})


@pytest.fixture
def shared(entry: Any) -> SharedClient:
    shared = SharedClient(entry)
    shared.memory = empty()
    return shared


def test_a_client_that_does_not_know_the_memory_is_never_used(
    shared: SharedClient,
) -> None:
    Calls.num_refused = 2
    for _ in range(2):
        with pytest.raises(OSError, match="code -1"), shared.use():
            pytest.fail("it is used")
    with shared.use() as client:
        assert ROW_BYTES in client.calls.memory
    shared.close()
    assert all(each.is_closed for each in Calls.made) and len(Calls.made) == 3


def test_a_late_waiter_closes_no_younger_client(shared: SharedClient) -> None:
    changed, may_wake = shared._changed, threading.Event()
    wake = changed._acquire_restore  # type: ignore[attr-defined]

    def wake_late(state: Any) -> None:
        if threading.current_thread().name == "late":
            may_wake.wait(20)
        wake(state)

    changed._acquire_restore = wake_late  # type: ignore[attr-defined]
    may_end, has_begun = threading.Event(), threading.Semaphore(0)

    def use_long() -> None:
        with shared.use():
            has_begun.release()
            may_end.wait(20)

    def use_and_drop() -> None:
        with shared.use() as client:
            shared.drop(client)
            has_begun.release()

    other = threading.Thread(target=use_long)
    late = threading.Thread(target=use_and_drop, name="late")
    for thread in (other, late):
        thread.start()
        assert has_begun.acquire(timeout=20)
    may_end.set()
    other.join(20)
    assert Calls.made[0].is_closed
    with shared.use() as client:
        younger = client.calls
        younger.num_inside = 1
        shared.drop(client)
        may_wake.set()
        late.join(20)
        assert not late.is_alive() and not younger.is_closed
        younger.num_inside = 0
    assert younger.is_closed and not younger.was_closed_in_use
    shared.close()


def test_a_call_that_does_not_end_is_waited_for_by_nobody_new(
    shared: SharedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "CLOSE_S", 0.05)
    with shared.use() as hanging:
        shared.drop(hanging)
        with pytest.raises(OSError, match="does not end"), shared.use():
            pytest.fail("it is used")
    assert hanging.calls.is_closed
    with shared.use() as client:
        assert client is not hanging
        shared.close()
        assert not client.calls.is_closed


def test_a_client_whose_call_raises_is_closed(entry: Any) -> None:
    store = entry.open(NAMESPACE, 0, ROW_BYTES)
    store.register(empty())
    Calls.num_failing = 1
    assert store.exists(KEYS[:1]) == [False]
    assert [each.is_closed for each in Calls.made] == [True]
    assert store._breaker.is_open
    store.close()


def test_deadlines_that_are_set_stay_and_are_named(
    shared: SharedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "60000")
    with logged_by(mooncake.__name__) as lines, shared.use():
        assert os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] == "1"
        assert os.environ["MC_RPC_TIMEOUT_MS"] == "60000"
    assert (
        len(lines) == 1
        and "MC_RPC_TIMEOUT_MS is set to 60000 instead of 1000" in lines[0]
    )
    shared.close()


def test_a_job_that_still_runs_connects_no_client_after_the_end(entry: Any) -> None:
    store = entry.open(NAMESPACE, 0, ROW_BYTES)
    store.register(empty())
    assert store.exists(KEYS[:1]) == [False]
    store.close()
    assert store.exists(KEYS[:1]) == [False]
    with pytest.raises(OSError, match="closed"), store._client.use():
        pytest.fail("it is used")
    assert [each.is_closed for each in Calls.made] == [True]
    assert not store._breaker.is_open


def test_a_node_that_stalls_at_first_is_waited_for_once(entry: Any) -> None:
    store = entry.open(NAMESPACE, 0, ROW_BYTES)
    store.register(empty())
    Calls.num_slow = 1
    begun = time.monotonic()
    assert store.get(KEYS[:8], [empty() for _ in range(8)]) == [False] * 8
    assert time.monotonic() - begun < 3
    assert [(each.num_of_call, each.is_closed) for each in Calls.made] == [([1], True)]
    assert store._breaker.is_open
    store.close()


def test_a_client_moves_many_objects_at_once_after_the_first(entry: Any) -> None:
    with SharedClient(entry).use() as client:
        # A miss says nothing about the nodes.
        for n, answer in ((9, -704), (MAX_BATCH - 2, 0), (MAX_BATCH, 0), (9, -704)):
            Calls.answer = answer
            call = client.calls.batch_get_into_multi_buffers
            codes = client.move(call, ["name"] * n, [[]] * n, [[]] * n)
            assert codes == [answer] * n
    singles = [1] * (9 + MAX_BATCH)
    assert client.calls.num_of_call == [*singles, MAX_BATCH - 2, 9]
