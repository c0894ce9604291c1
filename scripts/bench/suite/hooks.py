# SPDX-License-Identifier: Apache-2.0
"""What a timeline records: wrappers around methods of vLLM and of the tier.

Installed before an engine starts, in a process that its others are forked from, or in
each of them where they are spawned. Nothing of the engine knows.
"""

import os
import threading
import time
from collections import deque
from typing import Any

from .recorder import Recorder, wrap

now = time.monotonic
STEP = "timeline_step"
"""An attribute of scheduler outputs: the process of the scheduler, and a number."""


class Hooks:
    """The wrappers, and what they must remember.

    Args:
        recorder: Gets the events.
        device_times: Time forward passes and copies on the GPU too, by CUDA events.

    """

    def __init__(self, recorder: Recorder, device_times: bool) -> None:
        self._add = recorder.add
        self._device = DeviceTimes(recorder) if device_times else None
        self._num_steps = 0
        # Of the decision that a wait, if there is one, begins with.
        self._num_prefetch = 0
        self._rank = 0

    def install(self) -> None:
        """Wrap the methods, those of the tier if this vLLM has it."""
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor
        from vllm.v1.executor.uniproc_executor import UniProcExecutor
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        wrap(Scheduler, "schedule", self._schedule)
        wrap(Scheduler, "update_from_output", self._update)
        for executor in (UniProcExecutor, MultiprocExecutor):
            wrap(executor, "execute_model", self._execute)
        wrap(WorkerWrapperBase, "execute_model", self._forward)
        try:
            from vllm.v1.kv_tier.scheduler.block_pool import TieredBlockPool
            from vllm.v1.kv_tier.scheduler.load_admission import LoadAdmission
            from vllm.v1.kv_tier.worker.copies import Copier
            from vllm.v1.kv_tier.worker.host_tier import HostTier
        except ImportError:
            return
        wrap(TieredBlockPool, "take_plan", self._take_plan)
        wrap(TieredBlockPool, "apply_report", self._apply_report)
        wrap(LoadAdmission, "decide", self._decide)
        wrap(LoadAdmission, "begin_wait", self._begin_wait)
        wrap(LoadAdmission, "end_wait", self._admitted)
        wrap(HostTier, "begin_step", self._begin_step)
        for kind in ("store", "clean", "load", "load_ahead"):
            wrap(Copier, kind, self._copy(kind))

    # -------------------------------------------------------------- the scheduler

    def _schedule(self, inner: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        begin = now()
        output = inner(scheduler, *args, **kwargs)
        end = now()
        self._num_steps += 1
        step = [os.getpid(), self._num_steps]
        setattr(output, STEP, step)
        pool = scheduler.kv_cache_manager.block_pool
        prefetches = getattr(pool, "prefetches", None)
        plan = getattr(output, "kv_tier_plan", None)
        self._add(
            "scheduler",
            "schedule",
            begin,
            end,
            step=step,
            seq=plan.seq if plan is not None else 0,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting)
            + len(getattr(scheduler, "skipped_waiting", ())),
            free=pool.get_num_free_blocks(),
            kept=prefetches.num_kept() if prefetches else 0,
            **counts(output),
        )
        return output

    def _update(self, inner: Any, scheduler: Any, output: Any, *args: Any) -> Any:
        begin = now()
        try:
            return inner(scheduler, output, *args)
        finally:
            step = getattr(output, STEP, None)
            self._add("scheduler", "update", begin, now(), step=step)

    def _execute(
        self, inner: Any, executor: Any, output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        begin = now()
        try:
            return inner(executor, output, *args, **kwargs)
        finally:
            step = getattr(output, STEP, None)
            self._add("executor", "execute", begin, now(), step=step)

    def _take_plan(self, inner: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
        begin = now()
        plan = inner(pool, *args, **kwargs)
        numbers = {
            "seq": plan.seq,
            "bytes": pool.slot_bytes,
            "store": len(plan.store_slots),
            "clean": len(plan.clean_slots),
            "load": len(plan.load_slots),
            "ahead": len(plan.ahead_slots),
        }
        self._add("scheduler", "plan", begin, now(), **numbers)
        return plan

    def _apply_report(self, inner: Any, pool: Any, report: Any) -> Any:
        begin = now()
        void = inner(pool, report)
        times = [[*key, *taken] for key, taken in report.times.items()]
        failures = dict(report.failures)
        self._add("scheduler", "report", begin, now(), times=times, failures=failures)
        return void

    def _decide(
        self,
        inner: Any,
        room: Any,
        request: Any,
        hits: Any,
        num_holes: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        decision = inner(room, request, hits, num_holes, *args, **kwargs)
        self._num_prefetch = decision.num_prefetch
        if decision.admit.name == "WITHOUT_ROOM":
            at, request_id = now(), request.request_id
            self._add("waiting", "no room", at, at, request=request_id, lacks=num_holes)
        return decision

    def _begin_wait(
        self,
        inner: Any,
        room: Any,
        request: Any,
        hits: Any,
        num_left: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        at = now()
        inner(room, request, hits, num_left, *args, **kwargs)
        self._add(
            "waiting",
            "wait",
            at,
            at,
            request=request.request_id,
            blocks=len(hits) + self._num_prefetch,
            left=num_left,
            plan=room._waits[request].prefetched_by,
        )

    def _admitted(self, inner: Any, room: Any, request: Any) -> None:
        at = now()
        inner(room, request)
        self._add("waiting", "admitted", at, at, request=request.request_id)

    # -------------------------------------------------------------- a rank

    def _forward(self, inner: Any, worker: Any, output: Any, *args: Any) -> Any:
        self._rank = worker.global_rank
        device = self._device
        if device is not None:
            device.tell()
        begun, begin = device and device.mark(), now()
        result = inner(worker, output, *args)
        end, ended = now(), device and device.mark()
        step = getattr(output, STEP, None)
        track = f"rank {self._rank}"
        self._add(track, "forward", begin, end, step=step)
        if device is not None:
            device.add(track, "forward", begun, ended, step=step)
        return result

    def _begin_step(self, inner: Any, tier: Any, output: Any) -> None:
        device = self._device
        begun, begin = device and device.mark(), now()
        inner(tier, output)
        end, ended = now(), device and device.mark()
        step = getattr(output, STEP, None)
        track = f"rank {self._rank}"
        self._add(track, "begin_step", begin, end, step=step)
        if device is not None:
            # What the stream waits for before the forward pass begins.
            device.add(track, "fences", begun, ended, step=step)

    def _copy(self, kind: str) -> Any:
        def run(inner: Any, copier: Any, plan: Any, *args: Any) -> None:
            slots = getattr(plan, SLOTS[kind])
            if not slots:
                return inner(copier, plan, *args)
            device = self._device
            begun, begin = device and device.mark(), now()
            inner(copier, plan, *args)
            end, ended = now(), device and device.mark()
            track = f"rank {self._rank} copies"
            what = {
                "seq": plan.seq,
                "blocks": len(slots),
                "thread": threading.current_thread().name,
            }
            self._add(track, kind, begin, end, **what)
            if device is not None:
                device.add(track, kind, begun, ended, **what)

        return run


SLOTS = {
    "store": "store_slots",
    "clean": "clean_slots",
    "load": "load_slots",
    "load_ahead": "ahead_slots",
}
"""Lists of a plan by kind of copy."""


class DeviceTimes:
    """Spans of streams, told of once they have ended.

    Args:
        recorder: Gets the events, on tracks of their own.

    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # An event, and when it came by the clock of the host.
        self._base: tuple[Any, float] | None = None
        self._pending: deque[tuple[str, str, Any, Any, dict[str, Any]]] = deque()

    def mark(self) -> Any:
        """Where the current stream is now."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, track: str, name: str, begun: Any, ended: Any, **args: Any) -> None:
        """Something went on between two marks."""
        self._pending.append((f"{track}, GPU", name, begun, ended, args))

    def tell(self) -> None:
        """Record what has ended. Called by one thread, before a step."""
        if self._base is None:
            event = self.mark()
            event.synchronize()
            self._base = event, now()
        base, at = self._base
        for _ in range(len(self._pending)):
            track, name, begun, ended, args = self._pending.popleft()
            if not ended.query():
                self._pending.append((track, name, begun, ended, args))
                continue
            begin, end = (at + base.elapsed_time(e) / 1e3 for e in (begun, ended))
            self._recorder.add(track, name, begin, end, **args)


def counts(output: Any) -> dict[str, int]:
    """What a step is made of, from a scheduler output.

    A request joins when it is new or starts again after a preemption. Without
    speculation, one that did not join and has one token decodes.
    """
    scheduled: dict[str, int] = output.num_scheduled_tokens
    joined = {request.req_id for request in output.scheduled_new_reqs}
    joined |= output.scheduled_cached_reqs.resumed_req_ids
    prefill = [n for key, n in scheduled.items() if n > 1 or key in joined]
    return {
        "joined": len(joined),
        "prefill_requests": len(prefill),
        "prefill_tokens": sum(prefill),
        "decode_tokens": len(scheduled) - len(prefill),
    }
