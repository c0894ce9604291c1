# SPDX-License-Identifier: Apache-2.0
"""The keeper: who gets which partition, and what is left when an engine dies."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from vllm.v1.kv_tier.keeper import server
from vllm.v1.kv_tier.keeper.client import (
    VERSION,
    Geometry,
    Member,
    PoolRefused,
    end_lease,
    join,
    pid_namespace,
)
from vllm.v1.kv_tier.keeper.partition import Claim, rows_of
from vllm.v1.kv_tier.keeper.server import Keeper

from .crowd import KEYS, start

MiB = 1 << 20
ONE, OTHER = b"1" * 32, b"2" * 32


class KeeperThread:
    """A keeper that serves in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.keeper = Keeper(8 * MiB, 2, path)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            self.keeper.serve_once(0.01)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.keeper.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    running = KeeperThread(tmp_path / "keeper.sock")
    yield running.keeper
    running.close()


@pytest.fixture
def path(keeper: Keeper) -> str:
    return str(keeper._path)


def eventually(is_so: Callable[[], bool]) -> float:
    """Seconds until it is so."""
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() < begun + 5
        time.sleep(0.005)
    return time.monotonic() - begun


def test_engines_get_partitions_on_one_grid(path: str) -> None:
    members = Member(path, ONE, [5000]), Member(path, ONE, [5000])
    one, two = (member.membership for member in members)
    assert {one.number, two.number} == {0, 1}
    assert (one.first_slot, one.num_slots) == (0, 4 * MiB // 5000)
    assert two.first_slot * 5000 >= 4 * MiB
    assert (two.first_slot + two.num_slots) * 5000 <= 8 * MiB
    with pytest.raises(PoolRefused, match="more --engines"):
        Member(path, ONE, [5000])


def test_ranks_and_neighbours_map_the_same_bytes(path: str) -> None:
    one, two = Member(path, ONE, [4096]), Member(path, ONE, [4096])
    (_, first), (_, second) = join(one.place(), 0), join(two.place(), 0)
    first[5 * MiB] = 42
    assert second[5 * MiB] == 42
    assert one.membership.own.publish([3], KEYS[:1], [None])
    theirs = two.membership.partitions[one.membership.number]
    theirs.open()
    assert theirs.find(rows_of(KEYS[:1]))[1].tolist() == [3]


@pytest.mark.parametrize(
    "sizes", [[4096], [4096, 4096], [5000, 9000], [960, 700, 4096]]
)
def test_a_rank_has_its_part_of_every_partition(path: str, sizes: list[int]) -> None:
    places = [Member(path, ONE, sizes).place() for _ in range(2)]
    joined = [[join(p, rank) for rank in range(len(sizes))] for p in places]
    slots = []
    for rank, size in enumerate(sizes):
        one, two = (
            np.frombuffer(ranks[rank][1], np.uint8)[: places[0].num_slots * size]
            for ranks in joined
        )
        slots.append((one.reshape(-1, size), two.reshape(-1, size)))
    # Both engines fill their own slots, on all ranks.
    for rank, both in enumerate(slots):
        for number, (place, memory) in enumerate(zip(places, both)):
            numbers = np.array(place.own) % 50 + 100 * number + 50 * (rank % 2)
            memory[place.own] = numbers[:, None]
    for rank, both in enumerate(slots):
        for number, place in enumerate(places):
            assert 0 < len(place.own) >= 0.9 * (4 * MiB // sum(sizes)) - 1
            numbers = np.array(place.own) % 50 + 100 * number + 50 * (rank % 2)
            for memory in both:
                assert (memory[place.own] == numbers[:, None]).all()


def test_parts_of_large_partitions_are_whole_huge_pages() -> None:
    geometry = Geometry(3, 4 << 30)
    for sizes in ([1 << 20, 1 << 20], [60000, 50000, 1 << 18]):
        parts = geometry.parts(sizes)
        assert all(part % (2 * MiB) == 0 for part in parts)
        assert (4 << 30) - sum(parts) < 2 * MiB * len(parts)
        ends = 0
        for number in range(3):
            first, num_slots = geometry.slots_of(number, sizes)
            assert ends <= first
            ends = first + num_slots
            for part, size in zip(parts, sizes):
                assert number * part <= first * size
                assert ends * size <= (number + 1) * part
            assert num_slots >= (4 << 30) * 0.99 // sum(sizes)


def test_successor_adopts_what_a_killed_engine_has_published(
    keeper: Keeper, path: str
) -> None:
    started = os.pipe()

    def engine() -> None:
        member = Member(path, ONE, [4096])
        assert member.membership.own.publish([3, 4], KEYS[:2], [16, 32])
        assert member.membership.own.claim([4]) == [Claim.FREE]
        os.write(started[1], bytes([member.membership.number]))
        time.sleep(60)

    pid = start(engine)
    number = os.read(started[0], 1)[0]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    eventually(lambda: keeper.num_attached == 0)
    # An engine of another identity takes the empty partition.
    other = Member(path, OTHER, [4096])
    assert other.membership.number != number
    heir = Member(path, ONE, [4096])
    assert heir.membership.number == number
    assert heir.membership.adopted == ([3], [KEYS[0]], [16])


def test_content_of_another_identity_is_dropped_once_nobody_reads_it(
    keeper: Keeper, path: str
) -> None:
    one, two = Member(path, ONE, [4096]), Member(path, ONE, [4096])
    assert one.membership.own.publish([3], KEYS[:1], [None])
    theirs = two.membership.partitions[one.membership.number]
    theirs.open()
    rows = rows_of(KEYS[:1])
    _, slots = theirs.find(rows)
    assert theirs.pin(rows, slots, two.membership.number, ONE)
    one.close()
    eventually(lambda: keeper.num_attached == 1)
    found: list[Member] = []
    thread = threading.Thread(target=lambda: found.append(Member(path, OTHER, [4096])))
    thread.start()
    time.sleep(0.3)
    assert not found
    assert theirs.unpin([3], two.membership.number)
    thread.join()
    assert (
        found[0].membership.adopted.slots == []
        and found[0].membership.number == one.membership.number
    )


def test_pins_of_a_dead_reader_are_cleared_within_a_second(
    keeper: Keeper, path: str
) -> None:
    one = Member(path, ONE, [4096])
    assert one.membership.own.publish([3], KEYS[:1], [None])
    ready = os.pipe()

    def engine() -> None:
        member = Member(path, ONE, [4096])
        theirs = member.membership.partitions[one.membership.number]
        theirs.open()
        _, slots = theirs.find(rows_of(KEYS[:1]))
        theirs.pin(rows_of(KEYS[:1]), slots, member.membership.number, ONE)
        # It dies with the lock of a neighbour.
        theirs.lock.acquire()
        os.write(ready[1], b"x")
        time.sleep(60)

    pid = start(engine)
    os.read(ready[0], 1)
    assert one.membership.own.claim([3]) == [Claim.BUSY]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert eventually(lambda: one.membership.own.unpinned([3]) == [3]) < 1


def test_partition_is_kept_while_a_rank_lives(keeper: Keeper, path: str) -> None:
    one = Member(path, ONE, [4096])
    rank, _ = join(one.place(), 0)
    one.close()
    time.sleep(0.1)
    assert keeper.num_attached == 1
    two = Member(path, ONE, [4096])
    assert two.membership.number != one.membership.number
    end_lease(rank)
    eventually(lambda: keeper.num_attached == 1)
    assert Member(path, ONE, [4096]).membership.number == one.membership.number


def test_engines_go_on_without_the_keeper(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    ready = os.pipe()

    def serve() -> None:
        keeper = Keeper(8 * MiB, 2, path)
        os.write(ready[1], b"x")
        keeper.serve()

    pid = start(serve)
    os.read(ready[0], 1)
    one, two = Member(str(path), ONE, [4096]), Member(str(path), ONE, [4096])
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert one.membership.own.publish([3], KEYS[:1], [None])
    theirs = two.membership.partitions[one.membership.number]
    theirs.open()
    assert theirs.find(rows_of(KEYS[:1]))[1].tolist() == [3]
    with pytest.raises(PoolRefused, match="no keeper answers there"):
        Member(str(path), ONE, [4096])
    # The next keeper takes the name that this one has left.
    Keeper(8 * MiB, 2, path).close()


def test_socket_is_for_one_user_and_one_keeper(keeper: Keeper, path: str) -> None:
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="another keeper"):
        Keeper(8 * MiB, 2, Path(path))


WISH = {
    "version": VERSION,
    "pid_namespace": pid_namespace(),
    "identity": ONE.hex(),
    "rank_bytes": [4096],
}


def ask(path: str, message: bytes) -> tuple[dict[str, object], int]:
    """The keeper's answer, and how many files come with it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        connection.send(message)
        data, fds, _, _ = socket.recv_fds(connection, 4096, 2)
        for fd in fds:
            os.close(fd)
        return json.loads(data), len(fds)


NONSENSE = [
    b"{}",
    b"\xff",
    b"[]",
    b"1",
    b"[" * 4000,
    b"x" * 5000,
    *(
        json.dumps({**WISH, **part}).encode()
        for part in (
            {"version": 0},
            {"identity": "00"},
            {"identity": 64},
            {"rank_bytes": 4096},
            {"rank_bytes": [4096, 0]},
            {"rank_bytes": [-1]},
            {"rank_bytes": [1e300]},
            {"rank_bytes": [1 << 80]},
            {"rank_bytes": [True]},
            {"rank_bytes": [], "partition": -1},
            {"rank_bytes": [], "partition": 99},
            {"rank_bytes": [], "partition": 0, "lease": 7},
        )
    ),
]


@pytest.mark.parametrize("message", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_refused(path: str, message: bytes) -> None:
    answer, num_files = ask(path, message)
    assert "refused" in answer and num_files == 0
    assert Member(path, ONE, [4096]).membership.num_slots == 1024


def test_another_pid_namespace_is_refused(path: str) -> None:
    message = json.dumps({**WISH, "pid_namespace": 1}).encode()
    answer, _ = ask(path, message)
    assert "hostPID" in str(answer["refused"])


def test_peers_that_send_without_reading_stop_nobody(keeper: Keeper, path: str) -> None:
    peers = []
    for _ in range(300):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.setblocking(False)
        with suppress(OSError):
            peer.connect(path)
        with suppress(OSError):
            for _ in range(50):
                peer.send(b"{}")
        peers.append(peer)
    eventually(lambda: keeper._num_peers == 0)
    assert Member(path, ONE, [4096]).membership.num_slots == 1024
    for peer in peers:
        peer.close()


def test_late_rank_of_a_dead_engine_gets_no_memory_of_the_next(path: str) -> None:
    one = Member(path, ONE, [4096])
    place = one.place()
    one.close()
    two = Member(path, ONE, [4096])
    assert two.membership.number == place.number
    with pytest.raises(PoolRefused, match="another engine by now"):
        join(place, 0)
    join(two.place(), 0)


def test_late_rank_gets_no_memory_of_the_next_keeper(tmp_path: Path) -> None:
    """Its engine has the memory of a keeper that died while the engine started."""
    path = tmp_path / "keeper.sock"
    first = KeeperThread(path)
    place = Member(str(path), ONE, [4096]).place()
    first.close()
    second = KeeperThread(path)
    try:
        member = Member(str(path), ONE, [4096])
        assert member.place().number == place.number
        with pytest.raises(PoolRefused, match="another engine by now"):
            join(place, 0)
        join(member.place(), 0)
    finally:
        second.close()


def test_partition_is_kept_until_the_process_has_ended(
    keeper: Keeper, path: str
) -> None:
    """A connection says nothing: it is closed before copies of a GPU have stopped."""
    closed = os.pipe()

    def engine() -> None:
        Member(path, ONE, [4096])._connection.close()
        os.write(closed[1], b"x")
        time.sleep(60)

    pid = start(engine)
    os.read(closed[0], 1)
    time.sleep(0.1)
    assert keeper.num_attached == 1
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    eventually(lambda: keeper.num_attached == 0)


@pytest.mark.parametrize("says_so", [True, False])
def test_nothing_is_left_of_an_engine(tmp_path: Path, says_so: bool) -> None:
    """The end of its process and what it has sent are seen at once."""
    keeper = Keeper(8 * MiB, 2, tmp_path / "keeper.sock")
    before = len(os.listdir("/proc/self/fd"))
    ready, ends = os.pipe(), os.pipe()

    def engine() -> None:
        member = Member(str(keeper._path), ONE, [4096])
        os.write(ready[1], b"x")
        os.read(ends[0], 1)
        if says_so:
            member.close()

    pid = start(engine)
    while not keeper.num_attached:
        keeper.serve_once(1)
    os.read(ready[0], 1)
    os.write(ends[1], b"x")
    os.waitpid(pid, 0)
    keeper.serve_once(1)
    assert (keeper.num_attached, keeper._num_peers) == (0, 0)
    for fd in (*ready, *ends):
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
    keeper.close()


def test_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(OSError, match="no socket"):
        Keeper(8 * MiB, 2, path)
    assert path.read_text() == "precious"


def test_more_memory_than_there_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "available_host_bytes", lambda: 7 * MiB)
    with pytest.raises(ValueError, match="earlier keeper"):
        Keeper(8 * MiB, 2, tmp_path / "keeper.sock")


@pytest.mark.parametrize(
    ("size", "engines", "message"),
    [(8 * MiB, 17, "from 1 to 16"), (MiB, 1, "less than 2 MiB")],
)
def test_wrong_sizes_are_refused(
    tmp_path: Path, size: int, engines: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Keeper(size, engines, tmp_path / "keeper.sock")


def test_block_larger_than_a_partition_is_refused(path: str) -> None:
    with pytest.raises(PoolRefused, match="does not fit a partition"):
        Member(path, ONE, [5 * MiB])
