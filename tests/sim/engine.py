# SPDX-License-Identifier: Apache-2.0
"""The real scheduler in front of a simulated worker, checked after every step."""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import torch

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_tier.block_keys import note_adapter_unload
from vllm.v1.kv_tier.pool import ElasticBlockPool
from vllm.v1.request import Request, RequestStatus

from ..names import sha256
from . import upstream
from .content import STOP_TOKEN, Sequence, Violation
from .invariants import Invariants
from .layouts import MAX_MODEL_LEN
from .opening import Opening, RingOpening
from .pages import Pages
from .real_ranks import RealRanks
from .scheduler import NUM_DRAFTS, Setup, make_scheduler
from .secondary import Below
from .step import Step
from .worker import Worker

EVENTS = (
    "stored",
    "loaded",
    "loaded ahead",
    "preempted",
    "aborted",
    "reset",
    "reset running",
    "failed",
    "released",
    "retained",
    "forbidden",
)
"""`Engine.events`: blocks stored and loaded, requests preempted for lack of blocks or
aborted in their life, successful resets, steps in which something failed, and steps
with blocks of conversations that are over, with slots that hints or quotas keep, and
with blocks that are not to be stored."""


@dataclass
class Conversation:
    """A request, and what it must become."""

    request: Request
    truth: Sequence
    num_hashes: int = 0
    """Block hashes that the invariants know of."""


class Engine:
    """What `EngineCore` does, one step at a time.

    Every method raises `Violation` when an invariant breaks.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.finished: list[Conversation] = []
        self.events: Counter[str] = Counter()
        """What happened: see `EVENTS`."""
        self.num_cached: dict[str, int] = {}
        """Tokens that each request found when it first ran."""
        self._live: dict[str, Conversation] = {}
        self._num_requests = 0
        self.adapter_load = 0
        """How often the adapter was loaded again."""
        self._epoch = 0
        self._in_flight: deque[Step] = deque()
        self.below = None if setup.below is None else Below(*setup.below)
        self._roots: dict[str, int] = {}
        self.opening: Opening | None = None
        if setup.opens is not None and setup.member is not None:
            self.opening = RingOpening(setup.opens, setup.member, setup.num_ranks)
        elif setup.opens is not None:
            self.opening = Opening(setup.opens, setup.num_slots)
        self._worker = Worker(
            setup.layout,
            setup.num_blocks,
            setup.num_slots,
            self._roots,
            self.below,
            self.opening,
        )
        if setup.real_ranks:
            self._worker.real_ranks = RealRanks(
                setup.num_blocks,
                setup.layout.block_size,
                setup.num_slots,
                setup.real_ranks,
                setup.verify,
                setup.share,
            )
        self._worker.pools = setup.pools
        self._worker.num_drafts = NUM_DRAFTS if setup.speculates else 0
        self._scheduler = make_scheduler(
            setup, self.below, lambda: self._worker.device, self.opening
        )
        self._num_steps = 0
        tier = self._scheduler.kv_cache_manager.kv_tier
        assert tier is not None
        self._pool = tier
        tier.costs.clock = lambda: float(self._num_steps)
        tier.costs.join_s = {0: setup.join_time}
        # With EAGLE some releases hash the token behind a block, too.
        lookahead = getattr(self._scheduler, "num_hash_lookahead_tokens", 0)
        self._hasher = get_request_block_hasher(
            setup.layout.hash_block_size, sha256, *([lookahead] if lookahead else [])
        )
        self._invariants = Invariants(
            setup.layout, self._scheduler.kv_cache_manager.coordinator
        )

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        salt: str | None = None,
        use_lora: bool = False,
        priority: int = 0,
        hints: dict[str, Any] | None = None,
        **inputs: Any,
    ) -> Request:
        """A request arrives. `inputs` are those of its prompt that `_inputs` takes."""
        req_id = str(self._num_requests)
        self._num_requests += 1
        more, name = self._inputs(req_id, prompt, **inputs)
        pools = self.setup.pools
        request = upstream.make_request(
            **{
                "request_id": req_id,
                "prompt_token_ids": prompt,
                "sampling_params": None
                if pools
                else _sampling_params(max_tokens, hints, **self._asked(inputs)),
                "pooling_params": upstream.pooling_params() if pools else None,
                "arrival_time": float(self._num_requests),
                "lora_request": LoRARequest("lora", 1, "lora") if use_lora else None,
                "cache_salt": salt,
                "priority": priority,
                "block_hasher": self._hasher,
            }
            | more
        )
        lora = self.adapter_load if use_lora else 0
        root = hash((0 if salt is None else 1 + ord(salt), use_lora, lora, name))
        self._roots[req_id] = root
        truth = Sequence(root, len(self.setup.layout.groups), self._epoch, prompt)
        conversation = self._live[req_id] = Conversation(request, truth)
        self._learn_hashes(conversation)
        self._scheduler.add_request(request)
        return request

    @staticmethod
    def _asked(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_logprobs": 1} if inputs.get("prompt_logprobs") else {}

    def _inputs(
        self,
        req_id: str,
        prompt: list[int],
        image: int = 0,
        is_embedded: bool = False,
        prompt_logprobs: bool = False,
    ) -> tuple[dict[str, Any], tuple[int, bool]]:
        """What a request has beside tokens, and what its KV depends on for that.

        Args:
            req_id: Of the request.
            prompt: Its tokens.
            image: Which one its first tokens stand for; 0: none.
            is_embedded: The prompt is given as embeddings that stand for the tokens.
            prompt_logprobs: Of the answer, so that nothing cached is read.

        """
        more: dict[str, Any] = {}
        if image:
            num_tokens = min(upstream.IMAGE_TOKENS, len(prompt))
            more["mm_features"] = [upstream.image(image, num_tokens)]
        if is_embedded:
            self._worker.embedded[req_id] = prompt
            more["prompt_token_ids"] = None
            more["prompt_embeds"] = torch.tensor(prompt, dtype=torch.float).view(-1, 1)
        return more, (image, is_embedded)

    def reload_adapter(self) -> bool:
        """The adapter gets other weights, unless a request runs with it."""
        if any(each.request.lora_request for each in self._live.values()):
            return False
        note_adapter_unload(1)
        self.adapter_load += 1
        return True

    def step(
        self, rush: bool = False, fail: str | None = None, abort: int | None = None
    ) -> None:
        """Schedule a step and, when enough are in flight, process the oldest.

        Args:
            rush: Copies run as early as they may, instead of as late.
            fail: What fails: `store`, `load` or `compute`.
            abort: Live request to abort while the step is in flight.

        """
        executed = False
        if fail == "compute" and not self._can_reset_running:
            fail = None
        if self._scheduler.has_requests():
            executed = self._schedule(rush, fail)
        if abort is not None:
            self.abort(abort)
        if len(self._in_flight) == self.setup.depth or (
            self._in_flight and not executed and not self._scheduler.has_requests()
        ):
            self._process_oldest()

    def _schedule(self, rush: bool, fail: str | None = None) -> bool:
        """Schedule a step. Returns whether it runs anything."""
        self._num_steps += 1
        before = self._num_preemptions()
        output = self._scheduler.schedule()
        self.events["preempted"] += self._num_preemptions() - before
        self._invariants.check_no_pins()
        self._invariants.check_released()
        self._invariants.check_hints()
        assert output.kv_tier_plan is not None
        output.kv_tier_plan.check_copies()
        step = self._worker.submit(output, self._epoch, rush, fail)
        self._in_flight.append(step)
        self._count(step)
        step.is_void = self._is_void()
        self._check()
        self.events["jumped"] = self._pool._stats.jumped_tokens
        return output.total_num_scheduled_tokens > 0

    def settle(self, num_steps: int = 1000, rounds: int = 3) -> None:
        """Run until nothing is left to do, and take steps that run nothing, so long
        after that that nothing is due any more.

        Args:
            num_steps: After how many it is due.
            rounds: How often, since what is due may be the begin of something.

        """
        for _ in range(rounds):
            for _ in range(1000):
                if not (self._in_flight or self._scheduler.has_requests()):
                    break
                self.step(rush=True)
            else:
                raise Violation("stuck", f"{list(self._live)} do not end")
            self._num_steps += num_steps
            # So many that stores have ended what they were doing.
            for _ in range(8):
                self._schedule(rush=True)
                self._process_oldest()

    def resize(self, num_slots: int) -> None:
        """An operator changes the number of host slots."""
        self._pool.take_call({"host_bytes": num_slots * self._pool.slot_bytes})

    def abort(self, number: int) -> None:
        """Abort a live request, counted round."""
        if self._live:
            req_id = list(self._live)[number % len(self._live)]
            self._scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
            self.finished.append(self._live.pop(req_id))
            self.events["aborted"] += 1
            self._check()

    def reset(self, running: bool) -> bool:
        """Reset the prefix cache, as after a change of weights."""
        running = running and self._can_reset_running
        options = {"reset_running_requests": True} if running else {}
        done = self._scheduler.reset_prefix_cache(**options)
        if done:
            self.events["reset running" if self._live else "reset"] += 1
            self._change_weights()
        self._check()
        return done

    def _change_weights(self) -> None:
        """What was computed is wrong from now on."""
        self._epoch += 1
        self._invariants.start_over()
        for conversation in self._live.values():
            old = conversation.truth
            root = self._roots[conversation.request.request_id]
            conversation.truth = Sequence(
                root, len(old.values), self._epoch, old.tokens
            )
            conversation.num_hashes = 0
            self._learn_hashes(conversation)

    @property
    def _can_reset_running(self) -> bool:
        if not upstream.RESETS_RUNNING_REQUESTS:
            return False
        return upstream.RESETS_STEPS_IN_FLIGHT or self.setup.depth == 1

    def drain(self) -> None:
        """Run until every request has ended; nothing may be left behind."""
        # v0.11.0 turns the queue around in each step: where steps look up little, the
        # last one of 33 requests is admitted after more than 1,000.
        for number in range(1, 4000):
            if not (self._live or self._in_flight or self._scheduler.has_requests()):
                break
            # Copies end at last, though nobody waits for them. A request may wait for a
            # read, which waits for one, as long as simulated computing takes.
            self.step(rush=not self._live or number % 1000 == 0)
        else:
            raise Violation("stuck", f"{list(self._live)} do not end")
        self._invariants.check_idle()
        if not self.reset(running=False):
            raise Violation("refs", "blocks are in use without a request")
        # This one is no part of a script.
        self.events["reset"] -= 1

    def _num_preemptions(self) -> int:
        return sum(each.request.num_preemptions for each in self._live.values())

    def _count(self, step: Step) -> None:
        plan, events = step.plan, self.events
        for new in step.output.scheduled_new_reqs:
            self.num_cached.setdefault(new.req_id, new.num_computed_tokens)
        if isinstance(self._pool, ElasticBlockPool):
            mapper = self._pool.elastic.mapper
            if isinstance(mapper, Pages):
                events["unmapped"], events["mapped"] = mapper.counts
        if self.opening is not None:
            events["opened"] = self.opening.num_opened
            events["closed"] = self.opening.num_closed
        events["stored"] += len(plan.store_slots) + len(plan.clean_slots)
        events["loaded"] += len(plan.load_slots)
        events["loaded ahead"] += len(plan.ahead_slots)
        copies = {
            "store": plan.store_slots or plan.clean_slots,
            "load": plan.load_slots or plan.ahead_slots,
            "compute": step.output.num_scheduled_tokens,
        }
        events["released"] += bool(self._pool.host_writer.released)
        hinted = self._pool.retention.hinted
        events["retained"] += hinted is not None and bool(hinted.kept)
        shares = {} if hinted is None else hinted.shares
        events["of tenants"] += any(share.resident for share in shares.values())
        events["forbidden"] += bool(self._pool.host_writer.forbidden)
        events["failed"] += bool(step.fail and copies[step.fail])

    def _process_oldest(self) -> None:
        step = self._in_flight.popleft()
        if not step.is_done:
            self._worker.run_until(step)
        if _failed_compute(step):
            self._give_up_spoiled(step)
        self._scheduler.update_from_output(step.output, step.result)
        for tokens in step.result.sampled_token_ids or ():
            self.events["accepted"] += max(0, len(tokens) - 1)
        if step.drafts:
            upstream.take_drafts(self._scheduler, step.drafts)
        for req_id, conversation in list(self._live.items()):
            self._take_tokens(conversation)
            if conversation.request.is_finished():
                self.finished.append(self._live.pop(req_id))
        self._check()
        requests = [each.request for each in self._live.values()]
        steps = [step.output for step in self._in_flight]
        self._invariants.check_in_flight(requests, steps)

    def _give_up_spoiled(self, step: Step) -> None:
        """Fail the requests that `step` and its successors spoiled, and take the
        keys from their blocks.

        As upstream does when a KV connector could not load blocks and its policy
        is to fail.
        """
        self._worker.run_all()
        spoiled = set.union(step.spoiled, *(each.spoiled for each in self._in_flight))
        lost = [self._live.pop(req_id) for req_id in spoiled if req_id in self._live]
        running = [each.request.status == RequestStatus.RUNNING for each in lost]
        self._scheduler.kv_cache_manager.evict_blocks(self._worker.garbage())
        self._scheduler.finish_requests(spoiled, RequestStatus.FINISHED_ERROR)
        self.finished += lost
        if running.count(True) < len(spoiled):
            # Some were preempted or aborted meanwhile, and their blocks evicted: no
            # block id leads to what they left.
            self.reset(running=True)

    def _take_tokens(self, conversation: Conversation) -> None:
        request, truth = conversation.request, conversation.truth
        for token in request.all_token_ids[len(truth.tokens) :]:
            if token != truth.next_token():
                raise Violation(
                    "tokens",
                    f"request {request.request_id} got {token} after {truth.tokens}",
                )
            truth.append(token)
        self._learn_hashes(conversation)
        if request.is_finished() and not (
            self.setup.pools
            or truth.tokens[-1] == STOP_TOKEN
            or request.num_output_tokens == request.max_tokens
            or request.num_tokens == MAX_MODEL_LEN
        ):
            raise Violation("tokens", f"request {request.request_id} ends early")

    def _learn_hashes(self, conversation: Conversation) -> None:
        hashes = conversation.request.block_hashes
        self._invariants.learn(
            hashes, conversation.num_hashes, conversation.truth.values
        )
        conversation.num_hashes = len(hashes)

    def _is_void(self) -> bool:
        return any(
            _failed_compute(step)
            or (
                (report := step.result.kv_tier_report) is not None
                and report.failed_load_seq is not None
            )
            for step in self._in_flight
        )

    def _check(self) -> None:
        self._invariants.check_counts(upstream.deferred_blocks(self._scheduler))
        # What a failure left behind is known to be wrong until the output of its
        # step has been processed.
        reports = [step.result.kv_tier_report for step in self._in_flight]
        known = [report for report in reports if report is not None]
        gives_up = any(report.lost_blocks is not None for report in known)
        if not self._is_void() and not gives_up:
            unreported = {slot for r in known for slot in r.failed_store_slots}
            for worker in self._worker.all_ranks:
                self._invariants.check_contents(worker.settled(), unreported)


def _failed_compute(step: Step) -> bool:
    return step.fail == "compute" and bool(step.output.num_scheduled_tokens)


def _sampling_params(
    max_tokens: int, hints: dict[str, Any] | None, **more: Any
) -> SamplingParams:
    return SamplingParams(
        **more,
        max_tokens=max_tokens,
        stop_token_ids=[STOP_TOKEN],
        extra_args={"kv_transfer_params": {"kv_tier": hints}} if hints else None,
    )
