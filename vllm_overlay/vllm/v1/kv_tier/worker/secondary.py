# SPDX-License-Identifier: Apache-2.0
"""One rank's part of the secondary tiers: opens their stores, and moves host slots to
them and back.

Threads read and write directly from and to the slots. The scheduler learns from a
report when a job has ended; until then it neither reuses the job's slots nor serves
their content. Only a step that runs nothing waits for a store.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.copying.engine import slot_offsets
from vllm.v1.kv_tier.gil import fast_switching
from vllm.v1.kv_tier.memory.regions import Region, build_regions, flatten
from vllm.v1.kv_tier.memory.shared import SharedMemory
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan
from vllm.v1.kv_tier.stores.base import BlockStore, MemoryFile, ReadOnlyStore
from vllm.v1.kv_tier.stores.identity import environment, rank_namespace
from vllm.v1.kv_tier.stores.settings import StoreConfig
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.report import StepReportBuilder
from vllm.v1.kv_tier.worker.sharing import find_replicas, owners
from vllm.v1.kv_tier.worker.slots import RankSlots

logger = init_logger(__name__)


def common_objects(executor: Any, num_blocks: int, told: int | None) -> int:
    """How many consecutive ranks can share their objects; 1 if none can.

    Args:
        executor: Reaches all ranks.
        num_blocks: Blocks of the device cache.
        told: Result of `kv_replicas`; None to ask the ranks.

    """
    replicas = 1 if told == 1 else find_replicas(executor, num_blocks, told)
    if replicas == 1:
        return 1
    names = executor.collective_rpc(name_of_rank, args=("", 0, num_blocks))
    if len(names) % replicas or any(
        names[rank] != names[owner] for rank, owner in owners(names, replicas)
    ):
        logger.info(
            "KV tier: %d ranks hold the same KV each, but every rank stores its own "
            "objects in secondary tiers: their layouts or attention backends differ.",
            replicas,
        )
        return 1
    logger.info(
        "KV tier: %d ranks hold the same KV each, and share one object for each block "
        "in secondary tiers.",
        replicas,
    )
    return replicas


# These functions run on the ranks. `wrapper` is a WorkerWrapperBase.
def open_rank(
    wrapper: Any,
    entries: Sequence[StoreConfig],
    space: str,
    num_blocks: int,
    replicas: int,
) -> tuple[str, int]:
    """Open the stores of this rank, or those of the rank that writes its objects.

    Returns:
        Its namespace, and the bytes of an object; 0 bytes for a rank without KV memory.

    """
    tier, rank = wrapper.kv_tier, wrapper.worker.rank
    num_bytes = tier.buffer.slots.shape[1]
    for entry in entries:
        # Other machines have other directories, packages and variables.
        entry.check()
    # The wrapper's rank counts per machine, and would let ranks of two machines share.
    writer = rank - rank % replicas
    name = name_of_rank(wrapper, space, writer, num_blocks)
    if num_bytes and rank == writer:
        tier.open_secondary([each.open(name, rank, num_bytes) for each in entries])
    elif num_bytes:
        tier.open_secondary(
            [
                ReadOnlyStore(each.of_a_reader().open(name, writer, num_bytes))
                for each in entries
            ]
        )
    return name, num_bytes


def name_of_rank(wrapper: Any, space: str, rank: int, num_blocks: int) -> str:
    """The namespace of what a rank stores."""
    described = describe(wrapper.worker, num_blocks)
    if (tier := wrapper.kv_tier) is not None:
        # A pool has whole slots, and is named before the tier is made.
        described.append([*tier.slots.group_bytes])
    return rank_namespace(space, rank, described)


def describe(worker: Any, num_blocks: int) -> list[object]:
    """What shapes the bytes of a slot beyond the model and its settings.

    That is what writes them, and the order and places in which they lie.
    """
    runner = worker.model_runner
    regions = build_regions(runner.kv_caches, num_blocks)
    places = [
        [offset, region.block_bytes]
        for offset, region in zip(slot_offsets(regions), regions)
    ]
    caches = [
        (
            str(tensor.dtype),
            ["blocks" if n % num_blocks == 0 else n for n in tensor.shape[:2]],
            list(tensor.shape[2:]),
            # Order of the dimensions, slowest first.
            sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d)),
            _place(tensor.data_ptr(), regions),
        )
        for tensor in flatten(runner.kv_caches)
    ]
    layers = worker.vllm_config.compilation_config.static_forward_context
    writers = [
        f"{name}: {type(releases.attention_backend(layer) or layer).__qualname__}"
        for name, layer in layers.items()
    ]
    return [type(runner).__module__, caches, places, writers, environment()]


def _place(address: int, regions: Sequence[Region]) -> list[int]:
    """The region that contains `address` of the first block, and the offset in it."""
    for index, region in enumerate(regions):
        offset = address - region.blocks.data_ptr()
        if 0 <= offset < region.blocks.stride(0):
            return [index, offset]
    raise RuntimeError("A KV cache lies in no region.")


Queue = SimpleQueue[Callable[[], None] | None]


class SlotMover:
    """Moves the bytes of jobs between slots and stores, and updates the slots.

    Args:
        stores: The store of each tier.
        row: Returns what a KV cache group needs of the memory of a slot.
        slots: State of the slots.

    """

    def __init__(
        self,
        stores: Sequence[BlockStore],
        row: Callable[[int, int], memoryview],
        slots: RankSlots,
    ) -> None:
        self._stores = stores
        self._row = row
        self._slots = slots

    def begin(self, job: SecondaryJob) -> list[int]:
        """Reserve the slots of a job until `move` has ended.

        Returns:
            Indices of the slots that can be moved, for `move`.

        """
        if job.is_put:
            return self._slots.begin_put(job.slots)
        return self._slots.begin_fetch(job.slots, job.groups)

    def move(
        self, job: SecondaryJob, places: list[int]
    ) -> tuple[list[bool], tuple[int, ...]]:
        """Move a job. Returns per slot whether it was moved, and slots that changed."""
        moved, changed = set[int](), set[int]()
        try:
            if job.is_put:
                moved, changed = self._put(job, places)
            else:
                moved = self._call(job, places)
        except BaseException:
            logger.exception("KV tier: a secondary tier failed.")
        try:
            if job.is_put:
                self._slots.end_put(job.slots)
            else:
                came = [job.slots[i] for i in moved]
                filled = self._slots.end_fetch(job.slots, came)
                moved = {i for i in moved if job.slots[i] in filled}
        except Exception:
            logger.exception("KV tier: fetched blocks could not be used.")
            moved = set()
        return [i in moved for i in range(len(job.slots))], tuple(sorted(changed))

    def _put(self, job: SecondaryJob, places: list[int]) -> tuple[set[int], set[int]]:
        """Write slots. Returns indices of what is stored, and slots that changed."""
        changed = self._slots.mark_changed([job.slots[i] for i in places])
        places = [i for i in places if job.slots[i] not in changed]
        moved = self._call(job, places)
        # A slot that changed before the store read it got a valid checksum in the
        # store.
        late = self._slots.mark_changed([job.slots[i] for i in places])
        if late:
            spoiled = {i for i in places if job.slots[i] in late}
            moved -= spoiled
            self._stores[job.tier].delete([job.keys[i] for i in spoiled])
        return moved, changed | late

    def _call(self, job: SecondaryJob, places: list[int]) -> set[int]:
        """Let the store move these slots. Returns the indices that it has moved."""
        if not places:
            return set()
        store = self._stores[job.tier]
        keys = [job.keys[i] for i in places]
        groups = job.groups or [-1] * len(job.slots)
        rows = [self._row(job.slots[i], groups[i]) for i in places]
        move = store.put if job.is_put else store.get
        try:
            with nullcontext() if store.is_apart else fast_switching():
                moved = move(keys, rows)
            pairs = zip(places, list(moved), strict=True)
            return {i for i, is_done in pairs if bool(is_done)}
        except BaseException:
            # Stores return failures. An exception is a defect, of any class, and must
            # not end this thread.
            logger.exception("KV tier: a secondary tier failed.")
            return set()


class SecondaryIO:
    """Runs the `SecondaryJob`s of one rank.

    Args:
        stores: The store of each tier. Stores spread a job over threads.
        memory: `[num_slots, slot_bytes]`, uint8: the host memory of the rank.
        slots: State of the slots.
        report: Receives the results of jobs.
        tuning: Timeouts and limits.
        shared: The same memory, if other processes can map it and no other rank does.

    """

    def __init__(
        self,
        stores: Sequence[BlockStore],
        memory: torch.Tensor,
        slots: RankSlots,
        report: StepReportBuilder,
        tuning: RankTuning,
        shared: SharedMemory | None = None,
    ) -> None:
        self._stores = stores
        self._memory = rows = memory.numpy()

        def row(slot: int, group: int) -> memoryview:
            return memoryview(rows[slot])[: slots.num_bytes(group, rows.shape[1])]

        self._mover = SlotMover(stores, row, slots)
        # Times until which processes of stores must pause, for launches and for reads.
        self._quiet = np.zeros(8, np.int64) if shared is None else shared.board[0]
        self._is_launched = threading.Event()
        self._is_launched.set()
        self._reads = [
            _Reads(tuning, self._is_launched, self._quiet, 1 + tier % 7)
            for tier in range(len(stores))
        ]
        for store, reads in zip(stores, self._reads):
            store.register(memoryview(self._memory).cast("B"))
            if shared is not None:
                places = tuple(shared.board_at + 8 * i for i in (0, reads.place))
                store.register_file(MemoryFile(shared.fd, places))
            store.give_way(reads.leave_way)
        self._report = report
        report.reports_late = True
        self._tuning = tuning
        self._waiting: list[SecondaryJob] = []
        # Signals the ends of jobs; counts all that have ended.
        self._ends = threading.Condition()
        self._num_ended = 0
        # Separate queues, so that reads, which requests wait for, do not queue behind
        # writes, nor one tier behind another.
        self._queues: dict[tuple[int, bool], Queue] = {}
        for tier in range(len(stores)):
            for is_put, name in ((True, "put"), (False, "get")):
                queue = self._queues[tier, is_put] = SimpleQueue()
                # A process that ends does not wait for queued work.
                threading.Thread(
                    target=_work,
                    args=(queue,),
                    name=f"kv-tier-{name}-{tier}",
                    daemon=True,
                ).start()
        weakref.finalize(self, _end, list(self._queues.values()), stores)

    def begin_step(
        self, plan: StepPlan, have_ended: Callable[[int, int], bool]
    ) -> None:
        """Begin the jobs of this and earlier plans whose copies have ended.

        Args:
            plan: Its copies are queued.
            have_ended: As `CopyOrder.have_ended`.

        """
        if plan.asks_secondary:
            for reads in self._reads:
                reads.expect()
        waiting, self._waiting = self._waiting + plan.secondary, []
        for job in waiting:
            if have_ended(job.after_stores, job.after_loads):
                work = partial(self._run, job, self._mover.begin(job))
                if not job.is_put:
                    self._reads[job.tier].begin()
                self._queues[job.tier, job.is_put].put(work)
            else:
                self._waiting.append(job)
        if plan.awaits_secondary:
            # Without this, an engine that waits for a store would spin.
            tuning, is_read = self._tuning, any(reads.num for reads in self._reads)
            with self._ends:
                self._ends.wait_for(
                    lambda: self._num_ended >= plan.awaits_secondary,
                    tuning.idle_read_s if is_read else tuning.idle_wait_s,
                )

    def set_launching(self, is_launching: bool) -> None:
        """Note that a step's launch begins or has ended.

        During a launch no object write begins, for a limited time.
        """
        gate_ns = int(self._tuning.put_gate_s * 1e9)
        self._quiet[0] = time.monotonic_ns() + gate_ns if is_launching else 0
        if is_launching:
            self._is_launched.clear()
        else:
            self._is_launched.set()

    def flush(
        self,
        jobs: Sequence[tuple[float, Sequence[SecondaryJob]]],
        have_ended: Callable[[int, int], bool],
    ) -> int:
        """Write before the engine ends, after the writes in progress.

        Args:
            jobs: As from `SecondaryTierManager.last_jobs`: seconds and jobs for each
                tier. Jobs that do not fit into the time, or whose copies have not
                ended, are left out.
            have_ended: As `CopyOrder.have_ended`.

        Returns:
            How many of these blocks the tiers have now.

        """
        begun = time.monotonic()
        told: SimpleQueue[int] = SimpleQueue()

        def write(job: SecondaryJob, until: float) -> None:
            if time.monotonic() >= until:
                told.put(0)
                return
            told.put(sum(self._mover.move(job, self._mover.begin(job))[0]))

        num_jobs = 0
        for seconds, of_tier in jobs:
            for job in of_tier:
                if have_ended(job.after_stores, job.after_loads):
                    work = partial(write, job, begun + seconds)
                    self._queues[job.tier, job.is_put].put(work)
                    num_jobs += 1
        num_blocks, end = 0, begun + max((each for each, _ in jobs), default=0.0)
        # Does not wait for a store that hangs.
        with suppress(Empty):
            for _ in range(num_jobs):
                num_blocks += told.get(timeout=max(0.0, end - time.monotonic()))
        return num_blocks

    def _run(self, job: SecondaryJob, places: list[int]) -> None:
        if job.is_put:
            # Reading and writing at the same time would slow down both.
            self._reads[job.tier].leave_way()
        begun = time.monotonic()
        done, changed = self._mover.move(job, places)
        if not job.is_put:
            self._reads[job.tier].end()
        seconds = time.monotonic() - begun
        evicted = self._evicted_bytes(job.tier)
        self._report.record_job(
            SecondaryResult(job.number, done, seconds, evicted, changed)
        )
        with self._ends:
            self._num_ended += 1
            self._ends.notify_all()

    def _evicted_bytes(self, tier: int) -> int:
        try:
            return int(self._stores[tier].take_evicted_bytes())
        except BaseException:
            logger.exception("KV tier: a secondary tier failed.")
            return 0


class _Reads:
    """Counts reads of one tier, queued or in progress, and lets writes wait for them.

    Args:
        tuning: Timeouts and limits.
        is_launched: Cleared while a step is being launched. Writes wait for that too.
        quiet: Numbers for processes of stores, see `MemoryFile`.
        place: Index in `quiet` of the number for this tier.

    """

    def __init__(
        self,
        tuning: RankTuning,
        is_launched: threading.Event,
        quiet: np.ndarray,
        place: int,
    ) -> None:
        self._is_launched = is_launched
        self._quiet, self.place = quiet, place
        self.num = 0
        """Number of reads."""
        self._none = threading.Event()
        self._none.set()
        self._tuning = tuning
        self._lock = threading.Lock()
        self._began = self._ended = -math.inf

    def begin(self) -> None:
        """Count another read."""
        with self._lock:
            self._expect()
            self.num += 1
            self._none.clear()
            self._publish()

    def expect(self) -> None:
        """Expect a read soon, and hold back writes."""
        with self._lock:
            self._expect()
            self._publish()

    def _expect(self) -> None:
        now = time.monotonic()
        if not self.num and now >= self._ended + self._tuning.after_read_s:
            self._began = now
        self._ended = now

    def _until(self) -> float:
        """When writes may go on: some time after the last read, or after a maximum."""
        until = self._began + self._tuning.max_put_delay_s
        if self._none.is_set():
            until = min(until, self._ended + self._tuning.after_read_s)
        return until

    def _publish(self) -> None:
        """Publish the time for processes of stores."""
        self._quiet[self.place] = int(self._until() * 1e9)

    def end(self) -> None:
        """Count the end of a read."""
        with self._lock:
            self.num -= 1
            if not self.num:
                self._ended = time.monotonic()
                self._none.set()
                self._publish()

    def leave_way(self) -> None:
        """Wait before an object is written."""
        self._wait_for_none()
        self._is_launched.wait(self._tuning.put_gate_s)

    def _wait_for_none(self) -> None:
        """Wait until the last read ended some time ago, so that its blocks are loading.

        The wait is limited, also if reads follow one another.
        """
        while (left_s := self._until() - time.monotonic()) > 0:
            if self._none.is_set():
                time.sleep(left_s)
            else:
                self._none.wait(left_s)


def _work(queue: Queue) -> None:
    while (work := queue.get()) is not None:
        work()
        # A thread that waits for more work would keep the objects of the last one
        # alive.
        del work


def _end(queues: Sequence[Queue], stores: Sequence[BlockStore]) -> None:
    for queue in queues:
        with suppress(Empty):
            while True:
                queue.get_nowait()
        queue.put(None)
    for store in stores:
        try:
            store.close()
        except BaseException:
            logger.exception("KV tier: a secondary tier failed.")
