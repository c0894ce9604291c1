# SPDX-License-Identifier: Apache-2.0
"""Fences across the processes of ranks that share host slots.

Ranks with the same KV share slots. One of them, the owner, stores; all load. Each
publishes its progress in shared memory: for each kind of copy, the highest plan up to
which all have ended. So the fences of a plan hold across processes:

- a load of another rank waits for the owner's stores that fill its slots,
- a store of the owner waits for the loads of all others from its slots.

All waits are on the host, and only for what precedes in the order of the plans (within
a plan: stores, loads, then stores of what later plans overwrite). All ranks run plans
in that order, so waits cannot form a cycle. No wait takes longer than a copy may.
"""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier.memory.shared import SharedMemory
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.rank.slots import RankSlots
from vllm.v1.kv_tier.rank.tuning import DEFAULT_TUNING, RankTuning

logger = init_logger(__name__)

KINDS = ("store", "clean", "load", "load_ahead")
"""Kinds of copies; columns of the board."""

_STORE, _CLEAN, _LOAD, _AHEAD = range(len(KINDS))
# The next column is 1 once the rank has stopped copying. It is set before copies are
# dropped and read after the others, so that dropped copies do not count as done.
_LEFT = len(KINDS)
_OWNER = 0


class PeerLost(RuntimeError):
    """Copies of another rank will not come, or may not have ended."""


class Ends(Protocol):
    """A copy."""

    def has_come(self) -> bool:
        """Whether it has ended."""


class Peers:
    """One of the ranks that share slots.

    Args:
        memory: Shared memory. Row i of its board belongs to the i-th rank.
        index: This rank's index among them. The first one is the owner.
        slots: Slots of this rank. A store counts as ended when its checksums exist too.
        tuning: Timeouts and intervals.

    """

    def __init__(
        self,
        memory: SharedMemory,
        index: int,
        slots: RankSlots | None = None,
        tuning: RankTuning = DEFAULT_TUNING,
    ) -> None:
        self.is_owner = index == _OWNER
        """Whether this rank stores."""
        self.is_lost = False
        """Whether a wait timed out: this rank must stop copying."""
        self._memory = memory
        self._board = memory.board
        self._index = index
        self._slots = slots
        self._tuning = tuning
        self._watch: _Watch | None = None

    # ------------------------------------------------------------------ waiting

    def wait_for_stores(self, plan: StepPlan) -> None:
        """Wait for the stores up to the fence of `plan`, before slots are loaded.

        Raises:
            PeerLost: They did not end, and will not.

        """
        seq = plan.load_after_stores
        if self.is_owner or not seq:
            return
        # The fence does not cover what the plan itself stores for later ones.
        ends = {_STORE: seq, _CLEAN: min(seq, plan.seq - 1)}
        self._wait(_OWNER, ends, "stores for this one")
        if self._has_left(_OWNER):
            # Copies that it had queued may have been dropped.
            raise PeerLost("The rank that stores for this one has stopped copying.")

    def wait_for_loads(self, seq: int) -> None:
        """Wait for other ranks' loads up to plan `seq`, before slots are overwritten.

        Raises:
            PeerLost: The loads do not end, or the rank has stopped copying.

        """
        if not self.is_owner or not seq:
            return
        for index in range(1, len(self._board)):
            self._wait(index, {_LOAD: seq, _AHEAD: seq}, "loads from the same slots")

    def _wait(self, index: int, ends: Mapping[int, int], what: str) -> None:
        row = self._board[index]
        limit = time.monotonic() + self._tuning.limit_s
        look_s = self._tuning.peer_look_s
        while True:
            has_left = self._has_left(index)
            if all(row[kind] >= seq for kind, seq in ends.items()):
                return
            if has_left:
                raise PeerLost(f"The rank that {what} has stopped copying.")
            if self.is_lost or time.monotonic() > limit:
                self.is_lost = True
                raise PeerLost(
                    f"The rank that {what} has not come so far in "
                    f"{self._tuning.limit_s:g} s. This rank stops copying."
                )
            time.sleep(look_s)
            # Long waits are polled less often, see `fence_look_s`.
            look_s = min(2 * look_s, self._tuning.fence_look_s)

    def _has_left(self, index: int) -> bool:
        return bool(self._board[index, _LEFT])

    # ------------------------------------------------------------------ telling

    def ended(self, kind: str, seq: int) -> None:
        """Publish that all copies of `kind` up to plan `seq` have ended."""
        self._tell(KINDS.index(kind), seq)

    def begun(
        self, plan: StepPlan, jobs: Mapping[str, Ends | None], device: torch.device
    ) -> None:
        """Watch the queued copies of `plan`, and publish when they end.

        Args:
            plan: The next plan.
            jobs: Its copies by kind; None or missing if there are none.
            device: Device of the copies.

        """
        if self._watch is None:
            self._watch = _Watch(self._tell, self.leave, device, self._tuning)
            weakref.finalize(self, self._watch.end)
        slots = {"store": plan.store_slots, "clean": plan.clean_slots}
        for column, kind in enumerate(KINDS):
            job = jobs.get(kind)
            has_come = None
            if job is not None:
                has_come = _whole(job, self._slots, slots.get(kind, ()))
            self._watch.begun(column, plan.seq, has_come)

    def leave(self) -> None:
        """Publish that this rank has stopped copying, so that others do not wait."""
        self._board[self._index, _LEFT] = 1

    def _tell(self, column: int, seq: int) -> None:
        self._board[self._index, column] = seq


def _whole(
    job: Ends, of_rank: RankSlots | None, slots: Sequence[int]
) -> Callable[[], bool]:
    """A test whether a copy has ended and the checksums of its slots exist."""
    if of_rank is None or of_rank.checksums is None or not slots:
        return job.has_come
    return lambda: job.has_come() and of_rank.are_checked(slots)


class _Watch:
    """A thread that polls for the ends of copies while any are in flight."""

    def __init__(
        self,
        tell: Callable[[int, int], None],
        fail: Callable[[], None],
        device: torch.device,
        tuning: RankTuning,
    ) -> None:
        self._tell = weakref.WeakMethod(tell)
        self._fail = weakref.WeakMethod(fail)
        self._device = device
        self._look_s = tuning.fence_look_s
        self._lock = threading.Lock()
        # By column: copies in flight, oldest first, and the last plan that began.
        self._under_way = [deque[tuple[int, Callable[[], bool]]]() for _ in KINDS]
        self._last = [0 for _ in KINDS]
        # Whether the thread polls or sleeps; `_is_over` ends it.
        self._looks = self._is_over = False
        self._wake = queue.SimpleQueue[bool]()
        threading.Thread(target=self._run, name="kv-tier-peers", daemon=True).start()

    def begun(self, column: int, seq: int, has_come: Callable[[], bool] | None) -> None:
        with self._lock:
            self._last[column] = seq
            if has_come is not None:
                self._under_way[column].append((seq, has_come))
                if not self._looks:
                    self._looks = True
                    self._wake.put(True)
            elif not self._under_way[column]:
                self._call(self._tell, column, seq)

    def end(self) -> None:
        self._is_over = True
        self._wake.put(False)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            while self._wake.get():
                while self._look() and not self._is_over:
                    time.sleep(self._look_s)
        except Exception:
            # The device failed. Waiting ranks must not take unfinished copies for done.
            logger.exception("KV tier: the ends of copies cannot be seen.")
            self._call(self._fail)

    def _look(self) -> bool:
        """Publish which copies have ended. Returns whether to poll again."""
        with self._lock:
            for column, jobs in enumerate(self._under_way):
                if not jobs:
                    continue
                while jobs and jobs[0][1]():
                    jobs.popleft()
                ended = jobs[0][0] - 1 if jobs else self._last[column]
                self._call(self._tell, column, ended)
            self._looks = any(self._under_way)
            return self._looks

    @staticmethod
    def _call(method: weakref.WeakMethod, *args: int) -> None:
        if (bound := method()) is not None:
            bound(*args)
