# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold the same KV share host slots: who waits for whom.

One of them, the owner, stores; all load. Each tells in memory that they share how far
its copies have come: the highest plan up to which all of a kind have ended. So fences
of a plan hold across processes:

- a load of another rank waits for the owner's stores that fill its slots,
- a store of the owner waits for the loads of all others from its slots.

All waits are on the host, and only for what comes before in the order of the plans
(in a plan: stores, loads, then stores of what later plans overwrite). All ranks take
plans in that order, so that waits cannot go in circles; and none lasts longer than a
copy may.
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
"""Of copies; columns of the board."""

_STORE, _CLEAN, _LOAD, _AHEAD = range(len(KINDS))
# The column behind them: 1 once the rank copies no more. It is set before copies are
# dropped, and read after the others: what was dropped is not taken for done.
_LEFT = len(KINDS)
_OWNER = 0


class PeerLost(RuntimeError):
    """What another rank was to copy will not come, or is not known to have ended."""


class Ends(Protocol):
    """A copy."""

    def has_come(self) -> bool:
        """Whether it has ended."""


class Peers:
    """One rank among those that share slots.

    Args:
        memory: What they share. Row i of its board is that of the i-th.
        index: This rank's place among them. The first one is the owner.
        slots: Of this rank; a store is over when its checksums are there too.
        tuning: How long to wait, and how often to look.

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
        """Whether a wait was in vain: this rank must copy no more."""
        self._memory = memory
        self._board = memory.board
        self._index = index
        self._slots = slots
        self._tuning = tuning
        self._watch: _Watch | None = None

    # ------------------------------------------------------------------ waiting

    def wait_for_stores(self, plan: StepPlan) -> None:
        """Before slots are loaded that stores up to the fence of `plan` have filled.

        Raises:
            PeerLost: They have not, and will not.

        """
        seq = plan.load_after_stores
        if self.is_owner or not seq:
            return
        # The fence is not about what the plan stores for later ones.
        ends = {_STORE: seq, _CLEAN: min(seq, plan.seq - 1)}
        self._wait(_OWNER, ends, "stores for this one")
        if self._has_left(_OWNER):
            # What it had queued may never have been copied.
            raise PeerLost("The rank that stores for this one copies no more.")

    def wait_for_loads(self, seq: int) -> None:
        """Before slots are overwritten that other ranks load in plans up to `seq`.

        A rank that copies no more is not waited for. What it has under way may be late,
        and be right, and steps that wait for it count until the scheduler has heard.

        Raises:
            PeerLost: They do not end, or the rank copies no more.

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
                raise PeerLost(f"The rank that {what} copies no more.")
            if self.is_lost or time.monotonic() > limit:
                self.is_lost = True
                raise PeerLost(
                    f"The rank that {what} has not come so far in "
                    f"{self._tuning.limit_s:g} s. This rank copies no more."
                )
            time.sleep(look_s)
            # What takes long need not be seen at once, see `fence_look_s`.
            look_s = min(2 * look_s, self._tuning.fence_look_s)

    def _has_left(self, index: int) -> bool:
        return bool(self._board[index, _LEFT])

    # ------------------------------------------------------------------ telling

    def ended(self, kind: str, seq: int) -> None:
        """All copies of `kind` of plans up to `seq` have ended, here and now."""
        self._tell(KINDS.index(kind), seq)

    def begun(
        self, plan: StepPlan, jobs: Mapping[str, Ends | None], device: torch.device
    ) -> None:
        """The copies of `plan` are queued: a thread tells of their ends.

        Args:
            plan: The next one.
            jobs: By kind, where it has some.
            device: Whose they are.

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
        """This rank copies no more: nobody waits for it from now on."""
        self._board[self._index, _LEFT] = 1

    def _tell(self, column: int, seq: int) -> None:
        self._board[self._index, column] = seq


def _whole(
    job: Ends, of_rank: RankSlots | None, slots: Sequence[int]
) -> Callable[[], bool]:
    """Whether a copy has ended, and the checksums of the slots that it filled."""
    if of_rank is None or of_rank.checksums is None or not slots:
        return job.has_come
    return lambda: job.has_come() and of_rank.are_checked(slots)


class _Watch:
    """A thread that looks which copies have ended, while there are some under way."""

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
        # By column: what has not ended, oldest first, and the last plan that begun.
        self._under_way = [deque[tuple[int, Callable[[], bool]]]() for _ in KINDS]
        self._last = [0 for _ in KINDS]
        # Whether the thread looks, or sleeps until it is woken; False ends it.
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
            # The device has failed. Who waits must not take what is not known.
            logger.exception("KV tier: the ends of copies cannot be seen.")
            self._call(self._fail)

    def _look(self) -> bool:
        """Tell what has ended. Returns whether to look again."""
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
