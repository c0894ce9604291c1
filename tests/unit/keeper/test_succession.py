# SPDX-License-Identifier: Apache-2.0
"""A keeper takes over from another one, as processes, while engines run."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from vllm.v1.kv_tier.keeper import state
from vllm.v1.kv_tier.keeper.client import Member, PoolRefused, join
from vllm.v1.kv_tier.keeper.partition import Partition, rows_of
from vllm.v1.kv_tier.keeper.server import Keeper

from .crowd import KEYS, ONE, OTHER, MiB, eventually, start

ROWS = rows_of(KEYS[:1])


class Processes:
    """Processes that are killed at the end."""

    def __init__(self) -> None:
        self._running: set[int] = set()

    def start(self, body: Callable[[Callable[[], None]], None]) -> int:
        """Run `body` until it says that it is ready."""
        reads, writes = os.pipe()

        def run() -> None:
            os.close(reads)
            body(lambda: os.close(writes))

        pid = start(run)
        self._running.add(pid)
        os.close(writes)
        assert os.read(reads, 1) == b""
        os.close(reads)
        return pid

    def wait(self, pid: int) -> int:
        """Exit code of a process that ends by itself, or is killed by now."""
        until = time.monotonic() + 10
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            assert time.monotonic() < until, "it has not ended"
            time.sleep(0.002)
        self._running.remove(pid)
        return os.waitstatus_to_exitcode(found[1])

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.wait(pid)

    def close(self) -> None:
        for pid in [*self._running]:
            self.kill(pid)


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "keeper.sock")


def serve(make: Callable[[], Keeper]) -> Callable[[Callable[[], None]], None]:
    def body(tell: Callable[[], None]) -> None:
        keeper = make()
        tell()
        keeper.serve()
        keeper.close()
        os._exit(0)

    return body


@pytest.fixture
def first(processes: Processes, path: str) -> int:
    """A keeper of two partitions."""
    return processes.start(serve(lambda: Keeper.make(8 * MiB, 2, Path(path))))


def succeed(processes: Processes, path: str) -> int:
    return processes.start(serve(lambda: Keeper.succeed(Path(path))))


def takes(path: str, identity: bytes) -> Member | None:
    try:
        return Member(path, identity, [4096])
    except PoolRefused as e:
        assert "all 2 partitions" in str(e)
        return None


def opened(member: Member, number: int) -> Partition:
    partition = member.membership.partitions[number]
    partition.open()
    return partition


def reader_of(path: str, number: int) -> Member:
    """An engine that reads the block that partition `number` has published."""
    member = Member(path, ONE, [4096])
    theirs = opened(member, number)
    assert theirs.pin(ROWS, theirs.find(ROWS)[1], member.membership.number, ONE)
    return member


def test_engines_share_on_while_the_keeper_changes(
    processes: Processes, path: str, first: int
) -> None:
    one = Member(path, ONE, [4096])
    _, memory, _ = join(one.place(), 0)
    assert one.membership.own.publish([3], KEYS[:1], [16])
    memory[3 * 4096] = 42
    second = succeed(processes, path)
    assert processes.wait(first) == 0
    # The next one has the same memory, and knows who has which part of it.
    two = Member(path, ONE, [4096])
    assert two.membership.number != one.membership.number
    theirs = opened(two, one.membership.number)
    assert theirs.find(ROWS)[1].tolist() == [3]
    assert join(two.place(), 0)[1][4 * MiB + 3 * 4096] == 42
    # A rank that comes late joins its engine.
    join(one.place(), 0)
    assert takes(path, OTHER) is None
    third = succeed(processes, path)
    assert processes.wait(second) == 0
    assert takes(path, OTHER) is None
    processes.kill(third)
    with pytest.raises(PoolRefused, match="no keeper answers there"):
        Member(path, ONE, [4096])


def test_engine_that_ends_later_leaves_its_partition_to_the_next(
    processes: Processes, path: str, first: int
) -> None:
    reader = Member(path, ONE, [4096])
    assert reader.membership.own.publish([3], KEYS[:1], [16])
    number = reader.membership.number

    def engine(tell: Callable[[], None]) -> None:
        member = reader_of(path, number)
        assert member.membership.own.publish([5], KEYS[1:2], [16])
        opened(member, number).lock.acquire()
        tell()
        time.sleep(60)

    dies = processes.start(engine)
    succeed(processes, path)
    assert takes(path, ONE) is None
    processes.kill(dies)
    assert eventually(lambda: reader.membership.own.unpinned([3]) == [3]) < 1
    heir = Member(path, ONE, [4096])
    assert heir.membership.adopted == ([5], [KEYS[1]], [16])
    # One that says that it ends is heard, too.
    reader.close()
    until = time.monotonic() + 5
    while (last := takes(path, ONE)) is None:
        assert time.monotonic() < until
    assert last.membership.adopted == ([3], [KEYS[0]], [16])


def test_pins_that_could_not_be_cleared_are_cleared_by_the_next(
    processes: Processes, path: str, first: int
) -> None:
    owner = Member(path, ONE, [4096])
    assert owner.membership.own.publish([3], KEYS[:1], [16])
    number = owner.membership.number

    def engine(tell: Callable[[], None]) -> None:
        member = reader_of(path, number)
        assert member.membership.number != number
        tell()
        time.sleep(60)

    dies = processes.start(engine)
    assert owner.membership.own.lock.acquire()
    try:
        processes.kill(dies)
        time.sleep(0.1)
        succeed(processes, path)
        assert processes.wait(first) == 0
    finally:
        owner.membership.own.lock.release()
    assert eventually(lambda: owner.membership.own.unpinned([3]) == [3]) < 1


def test_requests_that_wait_for_a_stopped_keeper_are_answered_by_the_next(
    processes: Processes, path: str, first: int
) -> None:
    os.kill(first, signal.SIGSTOP)

    def engine(tell: Callable[[], None]) -> None:
        tell()
        Member(path, ONE, [4096])
        os._exit(0)

    asks = [processes.start(engine) for _ in range(2)]
    heir = start(lambda: Keeper.succeed(Path(path)).serve())
    time.sleep(0.2)
    os.kill(first, signal.SIGCONT)
    try:
        assert [processes.wait(pid) for pid in [first, *asks]] == [0, 0, 0]
    finally:
        os.kill(heir, signal.SIGKILL)
        os.waitpid(heir, 0)


@pytest.mark.parametrize("num_messages", [0, 1, 2])
def test_keeper_stays_if_its_successor_dies_while_it_takes_over(
    processes: Processes, path: str, first: int, num_messages: int
) -> None:
    member = Member(path, ONE, [4096])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        connection.send(state.SUCCEED)
        for _ in range(num_messages):
            for fd in socket.recv_fds(connection, 1 << 16, 3)[1]:
                os.close(fd)
    other = Member(path, OTHER, [4096])
    assert other.membership.number != member.membership.number
    assert takes(path, OTHER) is None


def test_another_version_is_refused_and_the_keeper_stays(
    path: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "VERSION", state.VERSION + 1)
    with pytest.raises(ValueError, match=f"has version {state.VERSION - 1} .* build"):
        Keeper.succeed(Path(path))
    assert Member(path, ONE, [4096]).membership.num_slots == 1024


def test_another_pid_namespace_is_refused_and_the_keeper_stays(
    path: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "pid_namespace", lambda: 1)
    with pytest.raises(ValueError, match="another PID namespace"):
        Keeper.succeed(Path(path))
    assert Member(path, ONE, [4096]).membership.num_slots == 1024


def test_there_must_be_a_keeper(path: str) -> None:
    with pytest.raises(OSError, match="--succeed: no keeper answers at"):
        Keeper.succeed(Path(path))


@pytest.mark.parametrize("name", ["file", "@name"])
def test_service_manager_learns_which_process_is_the_keeper(
    processes: Processes,
    path: str,
    first: int,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = name if name[0] == "@" else str(tmp_path / name)
    name += str(os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0"))
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        heir = succeed(processes, path)
        assert manager.recv(100) == f"MAINPID={heir}".encode()


def test_all_files_of_an_old_keeper_are_closed(path: str) -> None:
    with ExitStack() as stack:
        before = len(os.listdir("/proc/self/fd"))
        first = Keeper.make(8 * MiB, 2, Path(path))

        def engine() -> None:
            Member(path, ONE, [4096])._connection.close()
            time.sleep(60)

        pid = start(engine)
        stack.callback(os.waitpid, pid, 0)
        stack.callback(os.kill, pid, signal.SIGKILL)
        while not first.num_attached:
            first.serve_once(1)
        # Its connection is closed, its process lives.
        first.serve_once(1)
        heir = start(lambda: Keeper.succeed(Path(path)).serve())
        stack.callback(os.waitpid, heir, 0)
        stack.callback(os.kill, heir, signal.SIGKILL)
        first.serve()
        first.close()
        del first
        assert len(os.listdir("/proc/self/fd")) == before
        assert Member(path, ONE, [4096]).membership.num_slots == 1024
        assert takes(path, ONE) is None


def test_pins_are_left_to_the_next_keeper(path: str) -> None:
    """Their column may be that of another engine by then."""
    with ExitStack() as stack:
        first = Keeper.make(8 * MiB, 2, Path(path))

        def engine() -> None:
            Member(path, ONE, [4096])
            time.sleep(60)

        pid = start(engine)
        while not first.num_attached:
            first.serve_once(1)
        # The engine has it while it takes over what is there.
        assert first.partitions[0].lock.acquire(10.0)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while first.num_peers:
            first.serve_once(1)
        heir = start(lambda: Keeper.succeed(Path(path)).serve())
        stack.callback(os.waitpid, heir, 0)
        stack.callback(os.kill, heir, signal.SIGKILL)
        while not first.num_peers:
            first.serve_once(1)
        # Now it has asked.
        time.sleep(0.2)
        first.partitions[0].lock.release()
        first.serve()
        assert first._state.to_clear == {(0, 0)}
        first.close()
