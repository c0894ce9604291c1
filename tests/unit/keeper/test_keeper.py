# SPDX-License-Identifier: Apache-2.0
"""The keeper: who gets which partition, and what is left when an engine dies."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm.v1.kv_tier.keeper import state
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

from .crowd import KEYS, ONE, OTHER, MiB, eventually, key, start


class KeeperThread:
    """A keeper that serves in a thread of its own."""

    def __init__(self, path: Path, num_engines: int = 2) -> None:
        self.keeper = Keeper.make(4 * MiB * num_engines, num_engines, path)
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


def test_engines_number_slots_from_their_own_on(path: str) -> None:
    members = Member(path, ONE, [5000]), Member(path, ONE, [5000])
    one, two = (member.membership for member in members)
    assert {one.number, two.number} == {0, 1}
    for mine, theirs in ((one, two), (two, one)):
        assert mine.num_slots == 4 * MiB // 5000
        ((first, partition),) = mine.neighbours
        assert partition is mine.partitions[theirs.number]
        # The next page begins with a slot after 512 of them.
        assert first == mine.stride == 1024
        assert mine.end == 1024 + mine.num_slots
    with pytest.raises(PoolRefused, match="more --engines"):
        Member(path, ONE, [5000])


def test_ranks_and_neighbours_map_the_same_bytes(path: str) -> None:
    one, two = Member(path, ONE, [4096]), Member(path, ONE, [4096])
    (_, first, _), (_, second, _) = join(one.place(), 0), join(two.place(), 0)
    first[3 * 4096] = 42
    assert second[4 * MiB + 3 * 4096] == 42
    second[5 * 4096] = 43
    assert first[4 * MiB + 5 * 4096] == 43
    assert one.membership.own.publish([3], KEYS[:1], [None])
    theirs = two.membership.partitions[one.membership.number]
    theirs.open()
    assert theirs.find(rows_of(KEYS[:1]))[1].tolist() == [3]


@pytest.mark.parametrize(
    "sizes", [[4096], [4096, 4096], [5000, 9000], [960, 700, 4096], [41984], [5001]]
)
@pytest.mark.parametrize("num_engines", [1, 3])
def test_a_rank_has_its_part_of_every_partition(
    tmp_path: Path, sizes: list[int], num_engines: int
) -> None:
    path = tmp_path / "keeper.sock"
    running = KeeperThread(path, num_engines)
    members = [Member(str(path), ONE, sizes) for _ in range(num_engines)]
    places = [member.place() for member in members]
    joined = [[join(p, rank) for rank in range(len(sizes))] for p in places]
    running.close()

    def slots(number: int, distance: int, rank: int) -> NDArray[np.uint8]:
        """Slots of an engine's neighbour, as the engine sees them."""
        memory = joined[number][rank][1].reshape(-1, sizes[rank])
        first = distance * places[number].stride
        return memory[first : first + places[number].num_slots]

    num_slots = places[0].num_slots
    assert 0 < num_slots >= 0.9 * (4 * MiB // sum(sizes)) - 1
    of_partition = {place.number: i for i, place in enumerate(places)}

    def numbers(partition: int, rank: int) -> NDArray[np.int64]:
        return np.arange(num_slots)[:, None] % 20 + 60 * partition + 20 * rank

    # All engines fill their own slots, on all ranks.
    for rank in range(len(sizes)):
        for number, place in enumerate(places):
            slots(number, 0, rank)[:] = numbers(place.number, rank)
    for rank, size in enumerate(sizes):
        for number, place in enumerate(places):
            for distance in range(num_engines):
                partition = (place.number + distance) % num_engines
                found = slots(number, distance, rank)
                assert (found == numbers(partition, rank)).all()
                assert found.ctypes.data % 4096 == 0
                assert len(joined[number][rank][1]) % size == 0
    assert len(of_partition) == num_engines


def test_a_rank_sees_no_other_memory_between_parts(path: str) -> None:
    one, two = Member(path, ONE, [5001]).place(), Member(path, ONE, [5001]).place()
    (_, mine, _), (_, theirs, _) = join(one, 0), join(two, 0)
    size = 5001
    mine[: one.num_slots * size] = theirs[: one.num_slots * size] = 7
    for memory in (mine, theirs):
        # Of the pool, the rest of the last page at the most.
        gap = memory[one.num_slots * size : one.stride * size]
        assert len(gap) > MiB and not gap.any()


def test_parts_of_large_partitions_are_whole_huge_pages() -> None:
    geometry = Geometry(3, 4 << 30)
    for sizes in ([1 << 20, 1 << 20], [60000, 50000, 1 << 18]):
        parts = geometry.parts(sizes)
        assert all(part % (2 * MiB) == 0 for part in parts)
        assert (4 << 30) - sum(parts) < 2 * MiB * len(parts)
        num_slots = geometry.num_slots(sizes)
        for part, size in zip(parts, sizes):
            assert num_slots * size <= part
        assert num_slots >= (4 << 30) * 0.99 // sum(sizes)


@pytest.mark.parametrize("gib", [1 / 256, 1, 64])
@pytest.mark.parametrize(
    "sizes, alignment",
    [
        ([2 * MiB], 2 * MiB),
        ([41984], 2 * MiB),
        ([41984, 41984], 2 * MiB),
        ([5001], 2 * MiB),
        # Every 131,072 slots, which would leave a third of the addresses.
        ([60000, 50000, 1 << 18], 4096),
    ],
)
def test_next_part_begins_at_a_page_and_soon(
    gib: float, sizes: list[int], alignment: int
) -> None:
    """At a huge one where that leaves little between two parts."""
    geometry = Geometry(3, int(gib * (1 << 30)))
    num_slots, stride = geometry.num_slots(sizes), geometry.stride(sizes)
    assert stride >= num_slots
    offsets = [stride * size for size in sizes]
    assert all(offset % 4096 == 0 for offset in offsets)
    if gib == 64:
        assert all(offset % alignment == 0 for offset in offsets)
        assert stride <= 1.13 * num_slots
    assert stride - num_slots < max(4096, num_slots / 8)


def test_copies_are_tested_on_slots_that_are_open_at_the_start(path: str) -> None:
    one = Member(path, ONE, [4096], first_bytes=5 * 4096)
    slots = list(range(1024))
    keys = [key(n) for n in slots]
    assert one.membership.own.publish(slots, keys, [16 * (n + 1) for n in slots])
    number = one.membership.number
    one.close()
    heir = Member(path, ONE, [4096], first_bytes=5 * 4096)
    assert heir.membership.number == number
    # No more than there are, of the many that it may drop.
    assert heir.place().empty == (0, 1, 2, 3, 4)
    assert sorted(heir.membership.adopted.slots) == slots[5:]


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
    rank, *_ = join(one.place(), 0)
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
        keeper = Keeper.make(8 * MiB, 2, path)
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
    Keeper.make(8 * MiB, 2, path).close()


def test_socket_is_for_one_user_and_one_keeper(keeper: Keeper, path: str) -> None:
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="another keeper"):
        Keeper.make(8 * MiB, 2, Path(path))


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
    eventually(lambda: keeper.num_peers == 0)
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
    keeper = Keeper.make(8 * MiB, 2, tmp_path / "keeper.sock")
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
    assert (keeper.num_attached, keeper.num_peers) == (0, 0)
    for fd in (*ready, *ends):
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
    keeper.close()


def test_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(OSError, match="no socket"):
        Keeper.make(8 * MiB, 2, path)
    assert path.read_text() == "precious"


def test_more_memory_than_there_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "available_host_bytes", lambda: 7 * MiB)
    with pytest.raises(ValueError, match="earlier keeper"):
        Keeper.make(8 * MiB, 2, tmp_path / "keeper.sock")


@pytest.mark.parametrize(
    ("size", "engines", "message"),
    [(8 * MiB, 17, "from 1 to 16"), (MiB, 1, "less than 2 MiB")],
)
def test_wrong_sizes_are_refused(
    tmp_path: Path, size: int, engines: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Keeper.make(size, engines, tmp_path / "keeper.sock")


def test_block_larger_than_a_partition_is_refused(path: str) -> None:
    with pytest.raises(PoolRefused, match="does not fit a partition"):
        Member(path, ONE, [5 * MiB])
