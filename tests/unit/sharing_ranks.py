# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own that share host slots, driven by a test.

Each has the same device memory, and carries out what it is told by a pipe.
"""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from vllm.v1.kv_tier.memory.buffer import HostBuffer
from vllm.v1.kv_tier.memory.regions import build_regions
from vllm.v1.kv_tier.memory.shared import Address, SharedMemory
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.sharing import Peers, SharedSlots

from .rank import failed, output, step

NUM_BLOCKS, NUM_SLOTS, BLOCK_BYTES = 6, 4, 256

PATIENT_S = 20.0
"""How long a rank waits for another one, unless a test is about that: longer than a
busy machine takes for anything here."""


class SharingRank:
    """What runs in the process of a rank. Methods are what a test may ask of it."""

    def __init__(
        self, index: int, num_ranks: int, verify: bool, limit_s: float
    ) -> None:
        self.index, self.num_ranks, self.verify = index, num_ranks, verify
        self.limit_s = limit_s
        self.caches = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
        for block in range(NUM_BLOCKS):
            self.caches[block] = block + 1
        self.tier: Any = None
        self.memory: Any = None

    def start(self, address: Address | None) -> Address | None:
        """The first rank makes the memory, the others find it."""
        sizes = NUM_SLOTS, BLOCK_BYTES, self.num_ranks
        if address is None:
            self.memory = SharedMemory.create(*sizes)
        else:
            self.memory = SharedMemory.join(address, *sizes)
        return self.memory.address if address is None else None

    def allocate(self) -> None:
        """What all do once the others have found it."""
        buffer = HostBuffer(
            NUM_SLOTS,
            BLOCK_BYTES,
            pin=False,
            shared=self.memory,
            nodes=None if self.index else set(),
        )
        self.tier = HostTier.allocate(
            build_regions([self.caches], NUM_BLOCKS),
            NUM_SLOTS,
            torch.device("cpu"),
            verify=self.verify,
            tuning=RankTuning(limit_s=self.limit_s),
            shared=SharedSlots(buffer, self.memory, self.index),
        )
        self.memory.close()

    def run(self, seq: int, **plan: Any) -> Any:
        """A step. Returns what failed, and how long it took."""
        begun = time.monotonic()
        self.tier.begin_step(step(seq, **plan))
        report = failed(self.tier.end_step(output()).kv_tier_report)
        return report, time.monotonic() - begun

    def fill(self, block: int, value: int) -> None:
        """As a forward pass does."""
        self.caches[block] = value

    def values(self, block: int) -> set[int]:
        """The bytes of a device block."""
        return set(self.caches[block].tolist())

    def slot(self, slot: int) -> set[int]:
        """The bytes of a host slot."""
        return set(self.tier.buffer.slots[slot].tolist())

    def spoil(self, slot: int) -> None:
        """As bad memory does."""
        self.tier.buffer.slots[slot, 7] += 1

    def delay(self, what: str, seconds: float) -> None:
        """Let each copy of `stores` or `loads` begin that much later."""
        for engine in {self.tier.engines.stores, self.tier.engines.loads}:
            real = getattr(engine, what)

            def late(a: Any, b: Any, real: Any = real) -> Any:
                time.sleep(seconds)
                return real(a, b)

            setattr(engine, what, late)

    def fail(self, what: str) -> None:
        """Let the next copy of `stores` or `loads` fail."""
        engine = getattr(self.tier.engines, what)

        def failing(a: Any, b: Any) -> Any:
            delattr(engine, what)
            raise RuntimeError("a copy fails for the test")

        setattr(engine, what, failing)

    def without_fences(self) -> None:
        """The planted race."""
        setattr(Peers, "_wait", lambda *args: None)  # noqa: B010

    def is_off(self) -> bool:
        return self.tier._is_off

    def leave(self) -> None:
        """As a rank does whose copies hang."""
        self.tier._switch_off(step(99).kv_tier_plan)


def serve(pipe: Connection, *args: Any) -> None:
    torch.set_num_threads(1)
    rank = SharingRank(*args)
    while (asked := pipe.recv()) is not None:
        name, args, kwargs = asked
        try:
            pipe.send((getattr(rank, name)(*args, **kwargs), None))
        except Exception as e:
            pipe.send((None, repr(e)))


# Each begins with all that this file imports, which takes seconds otherwise.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


class Remote:
    """A rank, as the test sees it."""

    def __init__(
        self, index: int, num_ranks: int, verify: bool, limit_s: float
    ) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=serve, args=(theirs, index, num_ranks, verify, limit_s), daemon=True
        )
        self.process.start()
        theirs.close()

    def begin(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Ask for something, and do not wait for it."""
        self._pipe.send((name, args, kwargs))

    def end(self) -> Any:
        """What came of it."""
        assert self._pipe.poll(60), "a rank hangs"
        found, error = self._pipe.recv()
        assert error is None, error
        return found

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.begin(name, *args, **kwargs)
        return self.end()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def start(
    num_ranks: int = 2, verify: bool = False, limit_s: float = PATIENT_S
) -> list[Remote]:
    """Ranks whose tiers are ready."""
    ranks = [Remote(index, num_ranks, verify, limit_s) for index in range(num_ranks)]
    address = ranks[0].ask("start", None)
    for rank in ranks[1:]:
        rank.ask("start", address)
    on_all(ranks, "allocate")
    return ranks


def on_all(ranks: Sequence[Remote], name: str, *args: Any, **kwargs: Any) -> list[Any]:
    for rank in ranks:
        rank.begin(name, *args, **kwargs)
    return [rank.end() for rank in ranks]
