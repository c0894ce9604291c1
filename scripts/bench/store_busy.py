# SPDX-License-Identifier: Apache-2.0
"""A store below the host beside who needs Python's lock (`store_rate.py --busy`).

Beside one that computes all the time: the rates of the store with Python's usual turns
of 5 ms, and with the short ones that the tier takes. Then beside one that computes and
sleeps for 20 ms each, as an engine that launches its steps and waits for the GPU: how
long a launch takes while objects are written all the time, and when none is begun
meanwhile. What a store does in processes of its own, it does with the usual turns.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from vllm.v1.kv_tier.gil import fast_switching
from vllm.v1.kv_tier.stores.base import BlockStore
from vllm.v1.kv_tier.tuning import DEFAULT_TUNING

BUSY_BAR = 2.0
"""Rate of reading with short turns, in that with the usual ones."""
LAUNCH_S = 0.02
NUM_LAUNCHES = 100
Rows = Sequence[memoryview]


def measure_busy(
    store: BlockStore, launching: np.ndarray, out: Rows, back: Rows
) -> bool:
    """Print what both do to each other.

    Args:
        store: This one.
        launching: Has the number that is to be as `MemoryFile` says.
        out: What is written.
        back: What is read.

    Returns:
        Whether short turns clear their bar, where they are taken.

    """
    with Busy() as alone:
        time.sleep(1.0)
    gb = sum(row.nbytes for row in out) / 1e9
    turns: dict[str, Callable[[], AbstractContextManager]] = {
        "usual turns": nullcontext,
    }
    if not store.is_apart:
        turns["short turns"] = fast_switching
    gets: list[float] = []
    for name, take in turns.items():
        keys = new_keys(out)
        with take(), Busy() as busy:
            begun = time.perf_counter()
            store.put(keys, out)
            put_s = time.perf_counter() - begun
            store.get(keys, back)
            get_s = time.perf_counter() - begun - put_s
        store.delete(keys)
        gets.append(gb / get_s)
        print(
            f"  beside a busy thread, {name}: put {gb / put_s:.2f}, "
            f"get {gb / get_s:.2f} GB/s; the thread at "
            f"{busy.rate / alone.rate:.2f} of its speed"
        )
    measure_launches(store, launching, out, max(1, int(LAUNCH_S * alone.rate)))
    return store.is_apart or gets[1] >= BUSY_BAR * gets[0]


def measure_launches(
    store: BlockStore, launching: np.ndarray, out: Rows, num_rounds: int
) -> None:
    """Print how long launches take beside a store that is written to.

    Args:
        store: This one.
        launching: As of `measure_busy`.
        out: What is written, again and again.
        num_rounds: Of computing, for a launch.

    """
    is_launched = threading.Event()
    nobody = np.zeros(1)
    alone = launch_s(num_rounds, is_launched, nobody)
    ways: dict[str, tuple[Callable[[], object], np.ndarray]] = {
        "at any time": (lambda: None, nobody),
        "between launches": (
            lambda: is_launched.wait(DEFAULT_TUNING.put_gate_s),
            launching,
        ),
    }
    for name, (way, number) in ways.items():
        store.give_way(way)  # type: ignore[arg-type]
        with Writer(store, out) as writer:
            took = launch_s(num_rounds, is_launched, number)
        print(
            f"  written {name}: {writer.gb_s:.2f} GB/s; a launch takes "
            f"{took / alone:.2f} of its time"
        )
    store.give_way(lambda: None)


class Busy:
    """A thread that computes in Python while this is entered."""

    def __enter__(self) -> "Busy":
        self.num_rounds = 0
        self._began = time.perf_counter()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._compute)
        self._thread.start()
        return self

    def _compute(self) -> None:
        while not self._ends.is_set():
            compute()
            self.num_rounds += 1

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self._thread.join()
        self.rate = self.num_rounds / (time.perf_counter() - self._began)


class Writer:
    """A thread that writes to a store while this is entered."""

    def __init__(self, store: BlockStore, out: Rows) -> None:
        self._store, self._out = store, out
        self._ends = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.gb_s = 0.0

    def __enter__(self) -> "Writer":
        self._written = self._pool.submit(self._write)
        return self

    def _write(self) -> float:
        begun, gb = time.perf_counter(), 0.0
        with nullcontext() if self._store.is_apart else fast_switching():
            while not self._ends.is_set():
                keys = new_keys(self._out)
                self._store.put(keys, self._out)
                self._store.delete(keys)
                gb += sum(row.nbytes for row in self._out) / 1e9
        return gb / (time.perf_counter() - begun)

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self.gb_s = self._written.result()
        self._pool.shutdown()


def launch_s(
    num_rounds: int, is_launched: threading.Event, launching: np.ndarray
) -> float:
    """Median seconds of launches of so many rounds, with as long a pause after each,
    which the event and the number tell of."""
    times = []
    for _ in range(NUM_LAUNCHES):
        is_launched.clear()
        launching[0] = time.monotonic_ns() + DEFAULT_TUNING.put_gate_s * 1e9
        begun = time.perf_counter()
        for _ in range(num_rounds):
            compute()
        times.append(time.perf_counter() - begun)
        is_launched.set()
        launching[0] = 0
        time.sleep(LAUNCH_S)
    return statistics.median(times)


def compute() -> None:
    """Keep Python's lock for half a millisecond or so."""
    sum(i * i for i in range(10_000))


def new_keys(rows: Rows) -> list[bytes]:
    return [os.urandom(36) for _ in rows]
