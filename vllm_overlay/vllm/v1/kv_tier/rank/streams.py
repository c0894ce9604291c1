# SPDX-License-Identifier: Apache-2.0
"""The order of copies and compute on a GPU: fences become waits of streams."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from weakref import finalize

import torch

from vllm.v1.kv_tier.plan import CopyTime, PrefillTime, StepPlan, Times
from vllm.v1.kv_tier.rank.copy_order import Copies, Copy, CopyHangs, CopyOrder
from vllm.v1.kv_tier.rank.copy_thread import CopyThread, Done, Gate, Job
from vllm.v1.kv_tier.rank.layers import LayerWaits
from vllm.v1.kv_tier.rank.peers import Peers
from vllm.v1.kv_tier.rank.timing import LoadWait, PrefillTimer
from vllm.v1.kv_tier.rank.tuning import DEFAULT_TUNING, RankTuning
from vllm.v1.kv_tier.stores.turns import short_turns

Jobs = OrderedDict[int, Job]
"""Jobs of one stream by the `seq` of their plan, oldest first. A stream runs in order,
so the latest job up to a fence covers all earlier ones."""


class CudaStreams(CopyOrder):
    """Runs each kind of copy on its own stream, with a thread that launches it.

    The step itself launches its loads, unless that takes long. Stores are launched
    while no step is being launched, and loads ahead while no step waits for loads, so
    that driver lock and link have one user at a time.

    Args:
        device: Device of the compute stream.
        layer_waits: Waits of the layers, if layers wait for their own loads.
        tuning: Queue lengths and timeouts.
        peers: The ranks that share the slots, if any.

    """

    def __init__(
        self,
        device: torch.device,
        layer_waits: LayerWaits | None,
        tuning: RankTuning = DEFAULT_TUNING,
        peers: Peers | None = None,
    ) -> None:
        self._device = device
        self._peers = peers
        self._layer_waits = layer_waits
        self._tuning = tuning
        turns = ExitStack()
        turns.enter_context(short_turns(tuning.switch_interval_s))
        finalize(self, turns.close)
        # Open while no step is being launched.
        self._gate = Gate()
        # Loads of the newest step, if loads ahead may wait for them.
        self._last_load = list[Job]()
        self._store_thread = CopyThread(
            "kv-tier-store",
            device,
            tuning.store_parts_in_flight,
            gate=_step_first(self._gate, tuning),
            tuning=tuning,
        )
        self._ahead_thread = CopyThread(
            "kv-tier-ahead",
            device,
            tuning.ahead_parts_in_flight,
            gate=_loads_first(self._last_load),
            tuning=tuning,
        )
        # High priority, since layers wait for the kernels that load.
        self._load_thread = CopyThread(
            "kv-tier-load", device, parts_in_flight=None, priority=-1, tuning=tuning
        )
        # Position of the compute stream at the begin of each step.
        self._begun: OrderedDict[int, Done] = OrderedDict()
        self._stored, self._cleaned = Jobs(), Jobs()
        self._loaded, self._loaded_ahead = Jobs(), Jobs()
        self._jobs: dict[str, Jobs] = {
            "store": self._stored,
            "clean": self._cleaned,
            "load": self._loaded,
            "load_ahead": self._loaded_ahead,
        }
        # The loads that layers of the newest step wait for.
        self._armed: Job | None = None
        # Device blocks that loads fill, by seq.
        self._filling: dict[int, list[int]] = {}
        # The oldest job of each kind at the last check, and since when it is the
        # oldest.
        self._oldest: dict[str, tuple[Job | None, float]] = {}
        self._waits: OrderedDict[int, list[LoadWait]] = OrderedDict()
        self._times: Times = {}
        self._prefill = PrefillTimer()

    # ------------------------------------------------------------------ a step

    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        self._gate.close()
        self._forget_ended()
        self._check_oldest()
        compute = torch.cuda.current_stream(self._device)
        begun = self._begun[plan.seq] = Done()
        begun.record(compute)
        if plan.store_slots:
            self._stored[plan.seq] = self._store_thread.submit(
                Job(
                    copies.store,
                    self._before_stores(
                        plan.store_after_compute, plan.store_after_loads
                    ),
                    len(plan.store_slots),
                )
            )
        if plan.load_slots or plan.ahead_slots:
            self._queue_loads(plan, copies, layerwise, compute)
        if plan.clean_slots:
            # Loads of the step come first, since both use the link.
            after = [
                *self._before_stores(plan.clean_after_compute, plan.clean_after_loads),
                *_latest(self._loaded, plan.seq),
            ]
            self._cleaned[plan.seq] = self._store_thread.submit(
                Job(copies.clean, after, len(plan.clean_slots))
            )
        if self._peers is not None:
            jobs = {kind: each.get(plan.seq) for kind, each in self._jobs.items()}
            self._peers.begun(plan, jobs, self._device)
        self._fence_compute(plan, compute)

    def end_step(self) -> bool:
        self._gate.open()
        self._prefill.end_step()
        loads, self._armed = self._armed, None
        if loads is None or self._layer_waits is None:
            return True
        all_waited = self._layer_waits.disarm()
        # Later work on the compute stream then needs no wait. A load that waits for a
        # thread must be launched before the next one is queued behind it. If it has
        # ended, it may already be forgotten.
        loads.wait(torch.cuda.current_stream(self._device))
        return all_waited

    def have_ended(self, stores: int, loads: int) -> bool:
        self._forget_ended()
        return not (
            _first(self._stored) <= stores
            or _first(self._cleaned) <= stores
            or _first(self._loaded) <= loads
            or _first(self._loaded_ahead) <= loads
        )

    def finish(self) -> None:
        for jobs in self._jobs.values():
            for job in list(jobs.values())[-1:]:
                job.wait_for_launch()
                job.wait_on_host()

    def _queue_loads(
        self,
        plan: StepPlan,
        copies: Copies,
        layerwise: bool,
        compute: torch.cuda.Stream,
    ) -> None:
        """Queue the loads of the step, and loads ahead."""
        after_stores = self._stores_up_to(plan.load_after_stores, plan)
        after = [
            *self._computed(plan.load_after_compute),
            *after_stores,
            *_latest(self._loaded_ahead, plan.load_after_loads),
        ]
        self._check_old(after)
        self._filling[plan.seq] = [*plan.load_blocks, *plan.ahead_blocks]
        if plan.load_slots:
            self._load(plan, copies, layerwise, after, compute)
        if plan.ahead_slots:
            # A request waits for these loads.
            for store in after_stores:
                store.hurry()
            self._loaded_ahead[plan.seq] = self._ahead_thread.submit(
                Job(copies.load_ahead, after, len(plan.ahead_slots))
            )

    def _load(
        self,
        plan: StepPlan,
        copies: Copies,
        layerwise: bool,
        after: list[Done],
        compute: torch.cuda.Stream,
    ) -> None:
        """Queue loads that the step, or each of its layers, waits for."""
        ends = [Done() for _ in copies.load_parts]
        job = Job(self._telling(copies.load, ends), after, len(plan.load_slots))
        if copies.load_launches_long:
            self._load_thread.submit(job)
        else:
            self._check_launched(after)
            self._load_thread.launch(job)
        self._loaded[plan.seq] = job
        # A thread must not wait for a load that waits for a thread itself.
        is_free = not any(isinstance(done, Job) for done in after)
        self._last_load[:] = [job] if is_free else []
        if layerwise and self._layer_waits is not None:
            waits = [self._new_wait(plan, end) for end in ends]
            self._layer_waits.arm(copies.load_parts, waits)
            self._armed = job
        else:
            self._new_wait(plan, job).wait(compute)

    def _telling(self, copy: Copy, ends: list[Done]) -> Copy:
        """Wrap `copy` to record the end of each of its parts."""

        def run(between_parts: Callable[[], None]) -> None:
            stream = torch.cuda.current_stream(self._device)
            left = iter(ends)
            copy(lambda: next(left).record(stream))
            # The last part, or the parts that a failed load left out.
            for end in left:
                end.record(stream)

        return run

    def _fence_compute(self, plan: StepPlan, compute: torch.cuda.Stream) -> None:
        """Make the forward pass wait for the plan's fences."""
        stores = self._stores_up_to(plan.compute_after_stores, plan)
        loads = [*_latest(self._loaded_ahead, plan.compute_after_loads)]
        after = stores + loads
        self._check_launched(after)
        self._check_old(after)
        if plan.connector_writes and not all(
            done.ends_within(self._tuning.limit_s) for done in after
        ):
            raise CopyHangs
        for store in stores:
            store.wait(compute)
        for load in loads:
            self._new_wait(plan, load).wait(compute)

    def _new_wait(self, plan: StepPlan, done: Done) -> LoadWait:
        wait = LoadWait(done)
        self._waits.setdefault(plan.seq, []).append(wait)
        return wait

    # ------------------------------------------------------------------ fences

    def _computed(self, seq: int) -> Iterator[Done]:
        """The end of all forward passes up to `seq`; nothing if they have ended."""
        if seq:
            for begun, done in self._begun.items():
                if begun > seq:
                    yield done
                    return

    def _before_stores(self, computed: int, loaded: int) -> list[Done]:
        """What fences on forward passes and loads up to these plans wait for."""
        return [
            *self._computed(computed),
            *_latest(self._loaded, loaded),
            *_latest(self._loaded_ahead, loaded),
        ]

    def _stores_up_to(self, seq: int, plan: StepPlan) -> list[Job]:
        """What a fence of `plan` on stores up to `seq` waits for."""
        return [
            *_latest(self._stored, seq),
            *_latest(self._cleaned, min(seq, plan.seq - 1)),
        ]

    # ------------------------------------------------------------------ hangs

    def give_up(self) -> dict[int, list[int]]:
        # First, since jobs that a closed thread drops count as launched.
        self._forget_ended()
        under_way = {*self._loaded, *self._loaded_ahead}
        for thread in (self._store_thread, self._ahead_thread, self._load_thread):
            thread.close()
        self._armed = None
        if self._layer_waits is not None:
            self._layer_waits.disarm()
        return {s: blocks for s, blocks in self._filling.items() if s in under_way}

    def _check_oldest(self) -> None:
        """Check the oldest job of each kind.

        Raises:
            CopyHangs: One has been the oldest for too long.

        """
        now = time.monotonic()
        for kind, jobs in self._jobs.items():
            job = next(iter(jobs.values()), None)
            oldest, since = self._oldest.get(kind, (None, 0.0))
            if job is not oldest:
                self._oldest[kind] = job, now
            elif job is not None and now - since > self._tuning.limit_s:
                if not job.ends_within(self._tuning.grace_s):
                    raise CopyHangs
                self._oldest[kind] = None, now

    def _check_old(self, fences: Iterable[Done]) -> None:
        """Check jobs that were queued long ago.

        Raises:
            CopyHangs: One does not end.

        """
        now = time.monotonic()
        for done in fences:
            is_old = isinstance(done, Job) and now - done.made > self._tuning.old_s
            if is_old and not done.ends_within(self._tuning.limit_s):
                raise CopyHangs

    def _check_launched(self, fences: Iterable[Done]) -> None:
        """Wait until the jobs are launched.

        Raises:
            CopyHangs: The thread that launches one of them does not.

        """
        for done in fences:
            if not done.wait_for_launch(self._tuning.limit_s):
                raise CopyHangs

    # ------------------------------------------------------------------ times

    def take_prefill_time(self, num_tokens: int) -> PrefillTime:
        return self._prefill.next_step(num_tokens)

    def take_copy_times(self) -> Times:
        times, self._times = self._times, {}
        return times

    def _forget_ended(self) -> None:
        for kind, jobs in self._jobs.items():
            for seq, job in list(jobs.items()):
                if not job.has_come():
                    break
                del jobs[seq]
                self._times[kind, seq] = CopyTime(job.num_blocks, job.seconds)
        for seq, waits in list(self._waits.items()):
            if not all(wait.has_ended() for wait in waits):
                break
            del self._waits[seq]
            seconds = sum(wait.seconds for wait in waits)
            self._times["stall", seq] = CopyTime(len(waits), seconds)
        for seq in [*self._filling]:
            if seq not in self._loaded and seq not in self._loaded_ahead:
                del self._filling[seq]
        # Keep the last one that has ended, which covers all earlier ones.
        come = [seq for seq, done in self._begun.items() if done.has_come()]
        for seq in come[:-1]:
            del self._begun[seq]


# Threads outlive the streams, so their gates must not reference them.


def _step_first(gate: Gate, tuning: RankTuning) -> Callable[[Job], None]:
    """A gate that lets launches of steps go before those of stores.

    Both use the driver.
    """
    return lambda job: gate.wait(job, tuning.gate_s)


def _loads_first(last_load: list[Job]) -> Callable[[Job], None]:
    """A gate that lets loads of a step go before loads ahead.

    Both use the link.
    """

    def wait_for_load(job: Job) -> None:
        for load in last_load:
            load.wait_on_host()

    return wait_for_load


def _first(jobs: Jobs) -> float:
    """The plan of the oldest job that has not ended; infinite if there is none."""
    return next(iter(jobs), math.inf)


def _latest(jobs: Jobs, seq: int) -> Iterator[Job]:
    """The last of `jobs` up to `seq`, unless it has ended."""
    latest: Job | None = None
    if seq:
        for recorded, job in jobs.items():
            if recorded > seq:
                break
            latest = job
    if latest is not None:
        yield latest
