# SPDX-License-Identifier: Apache-2.0
"""Processes that own and read one partition, and are killed at any instruction."""

import hashlib
import mmap
import os
import random
import signal
import time
import traceback
from collections.abc import Callable

import numpy as np

from vllm.v1.kv_tier.keeper.partition import (
    Claim,
    Partition,
    partition_bytes,
    rows_of,
)

IDENTITY = b"i" * 32
ONE, OTHER = b"1" * 32, b"2" * 32
MiB = 1 << 20
NUM_SLOTS = 24
NUM_KEYS = 48


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "big")).digest() + bytes(4)


KEYS = [key(n) for n in range(NUM_KEYS)]
ROWS = rows_of(KEYS)
NUMBER = {k: n for n, k in enumerate(KEYS)}


class Shared:
    """A partition, the bytes of its slots, and counts, in memory of all processes."""

    def __init__(self) -> None:
        size = partition_bytes(NUM_SLOTS)
        self.partition_memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.partition = Partition(self.partition_memory, NUM_SLOTS)
        self.partition.lock.create()
        assert self.partition.assign(IDENTITY, NUM_SLOTS)
        numbers = np.frombuffer(mmap.mmap(-1, 1 << 16), np.int64)
        self.data = numbers[: 2 * NUM_SLOTS].reshape(NUM_SLOTS, 2)
        self.counts = numbers[1024:]
        """Wrong reads, right reads, stores, and what was found by an heir."""


def own(
    shared: Shared, make: Callable[[Shared], Partition], rng: random.Random
) -> None:
    """Store blocks and reuse slots, as the engine that owns the partition does."""
    partition = make(shared)
    while (found := partition.take_over(0, NUM_SLOTS)) is None:
        pass
    shared.counts[3] += len(found.slots)
    table = dict(zip(found.slots, found.keys))
    waiting = set(range(NUM_SLOTS)) - table.keys()
    free: list[int] = []
    while True:
        if waiting and (ended := partition.unpinned([*waiting])) is not None:
            waiting -= set(ended)
            free += ended
        if not free:
            slot = rng.choice([*table])
            if partition.claim([slot]) != [Claim.FREE]:
                continue
            del table[slot]
            free.append(slot)
        missing = [n for n in range(NUM_KEYS) if KEYS[n] not in table.values()]
        batch = [
            (free.pop(), missing.pop(rng.randrange(len(missing))))
            for _ in range(min(len(free), 3))
        ]
        for slot, number in batch:
            shared.data[slot] = -1, -1
            shared.data[slot, 0] = number
            shared.data[slot, 1] = ~number
        slots = [slot for slot, _ in batch]
        keys = [KEYS[number] for _, number in batch]
        while not partition.publish(slots, keys, [None] * len(keys)):
            pass
        table.update(zip(slots, keys))
        shared.counts[2] += len(batch)


def read(
    shared: Shared,
    make: Callable[[Shared], Partition],
    reader: int,
    rng: random.Random,
) -> None:
    """Read blocks, as a neighbour does."""
    partition = make(shared)
    partition.open()
    while True:
        numbers = np.array(sorted(rng.sample(range(NUM_KEYS), 8)))
        found, slots = partition.find(ROWS[numbers])
        if not len(slots):
            continue
        numbers = numbers[found]
        pinned = partition.pin(ROWS[numbers], slots, reader, IDENTITY)
        if pinned is None:
            continue
        numbers, slots = numbers[pinned], slots[pinned]
        for _ in range(3):
            data = shared.data[slots].copy()
            is_right = (data[:, 0] == numbers) & (data[:, 1] == ~numbers)
            shared.counts[0] += int((~is_right).sum())
            time.sleep(0)
        shared.counts[1] += len(slots)
        while not partition.unpin(slots.tolist(), reader):
            pass


def eventually(is_so: Callable[[], bool]) -> float:
    """Seconds until it is so."""
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() < begun + 5
        time.sleep(0.005)
    return time.monotonic() - begun


def start(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


def play(
    make: Callable[[Shared], Partition], num_kills: int, seed: int, num_readers: int = 2
) -> Shared:
    """Kill and replace an owner and its readers, one after the other."""
    shared, rng = Shared(), random.Random(seed)

    def begin(role: int) -> int:
        of_role = random.Random(rng.random())
        if role == 0:
            return start(lambda: own(shared, make, of_role))
        return start(lambda: read(shared, make, role, of_role))

    running = {role: begin(role) for role in range(1 + num_readers)}
    try:
        for _ in range(num_kills):
            time.sleep(rng.expovariate(1 / 0.004))
            role = rng.randrange(1 + num_readers)
            os.kill(running[role], signal.SIGKILL)
            _, status = os.waitpid(running[role], 0)
            assert os.WIFSIGNALED(status), "a process ended by itself"
            if role:
                while not shared.partition.clear_reader(role):
                    pass
            running[role] = begin(role)
    finally:
        for pid in running.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return shared
