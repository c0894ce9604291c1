# SPDX-License-Identifier: Apache-2.0
"""Memory and counters of a server while it is under load."""

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.e2e.server import Server

KiB = 1 << 10
GAUGES_AT_REST = {
    "vllm:num_requests_running": 0.0,
    "vllm:num_requests_waiting": 0.0,
    "vllm:kv_cache_usage_perc": 0.0,
}


@dataclass
class Memory:
    """Of all processes of a server, in bytes.

    `rss` counts a page that two processes share twice, `pss` half for each: the sum of
    `pss` is what the server takes from the machine.
    """

    seconds: float
    rss: int
    pss: int
    by_process: dict[str, int]
    """`rss` by process id and name. Its `pss` changes with other processes."""


@dataclass
class Watch:
    """Looks at a server every few seconds."""

    server: Server
    every_s: float = 2.0
    samples: list[Memory] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Counters that ran backwards, and values below 0."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._last: dict[str, float] = {}

    async def run(self, ends: float) -> None:
        while time.monotonic() < ends:
            # On a busy machine metrics may come too late. Clients see a dead server.
            with suppress(OSError):
                await asyncio.to_thread(self.look)
            await asyncio.sleep(self.every_s)

    def look(self) -> None:
        self.samples.append(memory_of(self.server, time.monotonic() - self._began))
        self.server.note_shared_memory()
        found = self.server.metrics("vllm:")
        for name, value in found.items():
            if value < 0:
                self.faults.append(f"{name} is {value}")
            is_counter = name.endswith(("_total", "_count", "_bucket"))
            if is_counter and value < self._last.get(name, 0):
                self.faults.append(f"{name} fell from {self._last[name]} to {value}")
        self._last = found

    def value(self, name: str) -> float:
        """The last value of a metric."""
        return self._last.get(name, 0.0)

    def at_rest(self, within_s: float = 30.0) -> list[str]:
        """What is not as it must be when nothing runs."""
        ends = time.monotonic() + within_s
        while True:
            found = self.server.metrics("vllm:")
            wrong = [
                f"{name} is {found[name]} at rest"
                for name, right in GAUGES_AT_REST.items()
                if found[name] != right
            ]
            if not wrong or time.monotonic() > ends:
                return wrong
            time.sleep(0.5)

    def sizes(self, pid: int) -> list[int]:
        """Bytes of a process, of all samples in which it ran."""
        return [
            size
            for memory in self.samples
            for name, size in memory.by_process.items()
            if name.split()[0] == f"{pid}"
        ]

    def mean(self, first_s: float, last_s: float) -> Memory:
        """Mean of the samples of a span."""
        some = [m for m in self.samples if first_s <= m.seconds <= last_s]
        some = some or self.samples[-1:]
        names = some[-1].by_process
        return Memory(
            last_s,
            sum(m.rss for m in some) // len(some),
            sum(m.pss for m in some) // len(some),
            {
                name: sum(m.by_process.get(name, 0) for m in some) // len(some)
                for name in names
            },
        )


def growth(sizes: Sequence[float]) -> float:
    """How much larger the last third of `sizes` is than the first, as a part of it.

    Compares medians, since requests that are being served take memory for a moment. A
    linear leak shows two thirds of what it adds in all.
    """
    third = max(len(sizes) // 3, 1)
    return median(sizes[-third:]) / median(sizes[:third]) - 1


def memory_of(server: Server, seconds: float = 0.0) -> Memory:
    """What the processes of a server take now."""
    rss, pss, by_process = 0, 0, {}
    for pid in server.pids():
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue  # It has just ended.
        found = dict(re.findall(r"^(Rss|Pss): +(\d+) kB$", rollup, re.MULTILINE))
        if found:
            rss += int(found["Rss"]) * KiB
            pss += int(found["Pss"]) * KiB
            by_process[f"{pid} {name}"] = int(found["Rss"]) * KiB
    return Memory(seconds, rss, pss, by_process)
