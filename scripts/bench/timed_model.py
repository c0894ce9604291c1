# SPDX-License-Identifier: Apache-2.0
"""Where a workload loses time, on a modelled GPU: the real scheduler in virtual time.

    python scripts/bench/timed_model.py agent|multiturn|fits|no_reuse [--none]
        [--store-policy P] [--load-us N] [--scale-cpu X] [--steps]

Asks what the scale `h200` of the suite asks, of the real asynchronous scheduler with
the real block pool. The CPU time of the scheduler is taken here, as it passes; what
the device, the copies and the rest of the engine take are the constants of `Costs`.
Copies and forward passes begin when the fences of their plan allow it. Runs without a
GPU, on the patched tree, and is rough: it finds what waits for what, and proves no
speed.

The costs are those of Llama 3.1 8B on an H200, with blocks of 2 MiB: copies as in
docs/benchmarks.md (50 and 45 GB/s), the others read off single runs.

Prints one line. Loaded blocks are needed when a request starts with them. What is
loaded ahead and evicted before that is loaded for nothing.
"""

import argparse
import gc
import heapq
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from scheduler_setup import BLOCK_SIZE, make_request, make_scheduler, sampled
from suite.client import Answer
from suite.scales import SCALES
from suite.workloads import NoReuse, Sessions, spread, summary, tokens, ttft
from timed_costs import Costs, Ends

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_tier.config import DebugConfig, KVTierConfig, StorePolicy
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.plan import CopyTime, StepPlan, StepReport, Times
from vllm.v1.outputs import ModelRunnerOutput

WORKLOADS = ("agent", "multiturn", "rotate", "overfull", "fits", "no_reuse")
SCALE = SCALES["h200"]
SLOT_BYTES = 2 << 20
VOCAB = 1000


@dataclass
class Counts:
    """Blocks, and seconds of the link and the device."""

    loaded: int = 0
    needed: int = 0
    wasted: int = 0
    link_s: float = 0.0
    device_s: float = 0.0


class Step(NamedTuple):
    """A step on its way through the device."""

    output: SchedulerOutput
    result: ModelRunnerOutput
    end: float


class Model:
    """The engine, from clients to copies; times are seconds from its start."""

    def __init__(self, costs: Costs, policy: StorePolicy | None, steps: bool) -> None:
        self.costs = costs
        self.now = 0.0
        self.counts = Counts()
        self._print_steps = steps
        self._scheduler = _scheduler(costs, policy)
        if policy is not None:
            pool: Any = self._scheduler.kv_cache_manager.block_pool
            pool.costs.clock = lambda: self.now
            pool.costs.join_s = {0: costs.launch_mixed}
        self._arrivals: list[tuple[float, int, Answer, list[int], int]] = []
        self._num_sent = 0
        self._live: dict[str, Answer] = {}
        self._device_free = self._store_free = 0.0
        self._computed, self._stored, self._cleaned = Ends(), Ends(), Ends()
        self._loaded, self._loaded_ahead = Ends(), Ends()
        self._reports: deque[tuple[int, CopyTime]] = deque()
        # Device blocks with loaded content that no request has used; True: ahead.
        self._unused: dict[int, bool] = {}

    def send(self, key: str, prompt: list[int], max_tokens: int, at: float) -> None:
        """Send a request at `at`; the scheduler has it a little later."""
        answer = Answer(key, len(prompt), sent=at)
        at += self.costs.send + len(prompt) * self.costs.send_token
        arrival = (at, self._num_sent, answer, prompt, max_tokens)
        heapq.heappush(self._arrivals, arrival)
        self._num_sent += 1

    def run(self, on_done: Callable[[Answer], None] = lambda _: None) -> list[Answer]:
        """Serve until nothing is left, with two steps under way at most.

        Args:
            on_done: Takes each complete answer, and may send more.

        Returns:
            The answers, in the order of their ends.

        """
        done: list[Answer] = []
        steps: deque[Step] = deque()
        while self._arrivals or self._live or steps or self._scheduler.has_requests():
            if not (self._live or steps or self._scheduler.has_requests()):
                self.now = max(self.now, self._arrivals[0][0])
            self._take_arrivals()
            is_idle = False
            if self._scheduler.has_requests():
                output = self._on_cpu(self._scheduler.schedule)
                steps.append(self._submit(output))
                is_idle = not output.total_num_scheduled_tokens
            if len(steps) == 2 or not self._scheduler.has_requests():
                for answer in self._finish(steps.popleft()) if steps else ():
                    done.append(answer)
                    on_done(answer)
            if is_idle:
                self.now += self.costs.pause
        return done

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, number, answer, prompt, max_tokens = heapq.heappop(self._arrivals)
            self._live[str(number)] = answer
            self._scheduler.add_request(make_request(str(number), prompt, max_tokens))

    def _on_cpu(self, work: Callable[..., Any], *args: Any) -> Any:
        started = time.thread_time()
        result = work(*args)
        self.now += (time.thread_time() - started) * self.costs.scale_cpu
        return result

    def _submit(self, output: SchedulerOutput) -> Step:
        """Launch the copies and the forward pass of a step."""
        costs, launched = self.costs, self.now
        plan: StepPlan | None = getattr(output, "kv_tier_plan", None)
        num_prefill = sum(n for n in output.num_scheduled_tokens.values() if n > 1)
        loads_end = self._copy(plan, launched) if plan else 0.0
        end = launched
        if output.total_num_scheduled_tokens:
            self.now += costs.launch_mixed if num_prefill else costs.launch
            took = costs.decode
            if num_prefill:
                took = max(took + num_prefill * costs.prefill, costs.mixed)
            start = max(self._device_free, launched + costs.prepare)
            if plan:
                start = max(
                    start,
                    self._stores_end(plan.compute_after_stores, plan),
                    self._loaded_ahead.up_to(plan.compute_after_loads),
                )
            end = max(start + took, self.now)
            # Time that a forward pass waits for its own loads is not work.
            self.counts.device_s += end - start
            if loads_end:
                end = max(end, loads_end + costs.last_layer)
            self._device_free = end
        if plan:
            self._computed.add(plan.seq, self._device_free)
        self._note_use(output)
        if self._print_steps:
            p = plan or StepPlan(0)
            print(
                f"{launched:.4f} to {end:.4f} s: "
                f"{output.total_num_scheduled_tokens} tokens, "
                f"{len(p.load_blocks)} blocks loaded, {len(p.ahead_blocks)} ahead, "
                f"{len(p.store_blocks)} stored, {len(p.clean_blocks)} ahead"
            )
        result = sampled(output)
        # Looked at now: the next `schedule` changes it.
        for i, req_id in enumerate(result.req_ids):
            if self._scheduler.requests[req_id].is_prefill_chunk:
                result.sampled_token_ids[i] = []
        return Step(output, result, end)

    def _copy(self, plan: StepPlan, launched: float) -> float:
        """Queue the copies of a plan; return when the loads of its step end, or 0."""
        if plan.store_blocks:
            after = plan.store_after_compute, plan.store_after_loads
            end = self._store(len(plan.store_blocks), launched, *after)
            self._stored.add(plan.seq, end)
        ready = max(
            launched,
            self._computed.up_to(plan.load_after_compute),
            self._stores_end(plan.load_after_stores, plan),
            self._loaded_ahead.up_to(plan.load_after_loads),
        )
        loads_end = self._load(plan.seq, plan.load_blocks, ready, ahead=False)
        self._load(plan.seq, plan.ahead_blocks, ready, ahead=True)
        if plan.clean_blocks:
            after = plan.clean_after_compute, plan.clean_after_loads
            ready = max(launched, loads_end)
            end = self._store(len(plan.clean_blocks), ready, *after)
            self._cleaned.add(plan.seq, end)
        return loads_end

    def _stores_end(self, seq: int, plan: StepPlan) -> float:
        """When what a fence of `plan` for stores up to `seq` waits for has ended."""
        cleaned = self._cleaned.up_to(min(seq, plan.seq - 1))
        return max(self._stored.up_to(seq), cleaned)

    def _store(
        self, num_blocks: int, ready: float, computed: int, loaded: int
    ) -> float:
        start = max(
            ready,
            self._store_free,
            self._computed.up_to(computed),
            self._loaded.up_to(loaded),
            self._loaded_ahead.up_to(loaded),
        )
        self._store_free = start + num_blocks * self.costs.store
        return self._store_free

    def _load(self, seq: int, blocks: list[int], ready: float, ahead: bool) -> float:
        if not blocks:
            return 0.0
        took = len(blocks) * self.costs.load
        begin = max(self._loaded.last, ready)
        if ahead:
            end = max(begin, self._loaded_ahead.last) + took
            self._loaded_ahead.add(seq, end)
            self._reports.append((seq, CopyTime(len(blocks), took)))
        else:
            # They overtake loads ahead.
            end = begin + took
            self._loaded.add(seq, end)
            self._loaded_ahead.delay(begin, took)
        self.counts.loaded += len(blocks)
        self.counts.link_s += took
        for block in blocks:
            self.counts.wasted += self._unused.pop(block, False)
            self._unused[block] = ahead
        return end

    def _note_use(self, output: SchedulerOutput) -> None:
        """Count the loaded blocks that requests start with, or overwrite."""
        cached = output.scheduled_cached_reqs
        given = []
        for r in output.scheduled_new_reqs:
            self._live[r.req_id].cached_tokens = r.num_computed_tokens
            given.append((r.block_ids, r.num_computed_tokens))
        for i, req_id in enumerate(cached.req_ids):
            if (new := cached.new_block_ids[i]) is not None:
                resumed = req_id in cached.resumed_req_ids
                given.append((new, cached.num_computed_tokens[i] if resumed else 0))
        for (blocks,), num_computed in given:
            for i, block in enumerate(blocks):
                if block not in self._unused:
                    continue
                ahead = self._unused.pop(block)
                if i < num_computed // BLOCK_SIZE:
                    self.counts.needed += 1
                else:
                    self.counts.wasted += ahead

    def _finish(self, step: Step) -> list[Answer]:
        """Wait for a step and return the answers that it completes."""
        self.now = max(self.now, step.end)
        times: Times = {}
        ended = self._loaded_ahead.up_to
        while self._reports and ended(self._reports[0][0]) <= self.now:
            seq, took = self._reports.popleft()
            times["load_ahead", seq] = took
        if times:
            step.result.kv_tier_report = StepReport(times=times)
        update = self._scheduler.update_from_output
        outputs = self._on_cpu(update, step.output, step.result)
        done = []
        for output in (o for group in outputs.values() for o in group.outputs):
            answer = self._live[output.request_id]
            for token in output.new_token_ids:
                answer.tokens.append(token)
                answer.times.append(self.now + self.costs.receive)
            if output.finish_reason is not None:
                done.append(self._live.pop(output.request_id))
        return done


def _scheduler(costs: Costs, policy: StorePolicy | None) -> AsyncScheduler:
    layout = None
    if policy is not None:
        size = int(SCALE.host_gib * (1 << 30))
        config = KVTierConfig(size, debug=DebugConfig(store_policy=policy))
        num_slots = size // SLOT_BYTES
        layout = KVTierLayout(
            config, num_slots, SLOT_BYTES, costs.load, BLOCK_SIZE, layerwise=True
        )
    made = make_scheduler(
        num_blocks=SCALE.device_bytes // SLOT_BYTES,
        max_num_seqs=SCALE.max_num_seqs,
        max_num_batched_tokens=SCALE.max_num_batched_tokens,
        max_model_len=SCALE.max_model_len,
        kv_tier=layout,
    )
    made.vllm_config.scheduler_config.async_scheduling = True
    return AsyncScheduler(
        vllm_config=made.vllm_config,
        kv_cache_config=made.kv_cache_config,
        structured_output_manager=made.structured_output_manager,
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


def talk(model: Model, work: Sessions) -> tuple[float, list[Answer]]:
    """Hold the conversations; return when they began, and the answers."""
    prompts: list[list[list[int]]] = []
    for i, length in enumerate(spread(*work.first, work.sessions)):
        prompts.append([tokens(VOCAB, length, work.name, 0, i)])
        for turn in range(1, work.turns):
            more = tokens(VOCAB, work.more, work.name, 0, i, turn)
            prompts[i].append(prompts[i][-1] + more)

    def ask(i: int, turn: int, max_tokens: int, at: float) -> None:
        model.send(f"{i}.{turn}", prompts[i][turn], max_tokens, at)

    # Conversations take turns where only some may run at a time.
    line: deque[tuple[int, int]] = deque()

    def next_turn(answer: Answer) -> None:
        i, turn = map(int, answer.key.split("."))
        if turn + 1 < work.turns:
            line.append((i, turn + 1))
        if line:
            ask(*line.popleft(), work.output, answer.times[-1])

    first = 0
    if work.contexts_first:
        for i in range(work.sessions):
            ask(i, 0, 1, model.now)
        model.run()
        model.counts = Counts()
        first = 1
    started = model.now
    line.extend((i, first) for i in range(work.sessions))
    for _ in range(min(work.at_once or work.sessions, work.sessions)):
        ask(*line.popleft(), work.output, started)
    return started, model.run(next_turn)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("workload", choices=WORKLOADS)
    add("--none", action="store_true", help="without the tier")
    add("--store-policy", choices=get_args(StorePolicy), default="write_back")
    add("--load-us", type=float, default=Costs.load * 1e6, help="of a block")
    add("--scale-cpu", type=float, default=1.0, help="times the scheduler's time here")
    add("--steps", action="store_true", help="print every step")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    costs = Costs(load=args.load_us * 1e-6, scale_cpu=args.scale_cpu)
    model = Model(costs, None if args.none else args.store_policy, args.steps)
    # As the engine does when it has started.
    gc.collect()
    gc.freeze()
    work = SCALE.workloads[args.workload]
    if isinstance(work, NoReuse):
        # Conversations of one turn.
        lengths = (work.length, work.length)
        work = Sessions(work.prompts, 1, lengths, 0, work.output, name="no_reuse")
    assert isinstance(work, Sessions)
    started, answers = talk(model, work)
    later = [a for a in answers if not a.key.endswith(".0")]
    seconds = summary(answers, started)["makespan_s"]
    mean = f"{ttft('later', later)['later_ms.mean']:.0f} ms" if later else "none"
    counts = model.counts
    print(
        f"{args.workload}: makespan {seconds:.2f} s, later TTFT {mean}, "
        f"{counts.loaded} blocks loaded for {counts.needed} needed, "
        f"{counts.wasted} loaded ahead for nothing, "
        f"link busy {counts.link_s / seconds:.0%}, "
        f"device busy {counts.device_s / seconds:.0%}"
    )


if __name__ == "__main__":
    main()
