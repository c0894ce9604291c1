# SPDX-License-Identifier: Apache-2.0
"""Why pipelines that write Mamba states late are refused at start.

A stage that is not the last hears of step n's accepted tokens in `execute_model` of
step n + (number of stages). Only there it copies the running states of step n to the
blocks that the scheduler hashed in that step (`update_pp_decode_requests` of upstream's
newer runner). The tier's copies of that later step are queued before.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.worker.copies import Copies
from vllm.v1.kv_tier.worker.streams import CudaStreams

from .fake_cuda import FakeCuda
from .stream_play import end_threads

NUM_STAGES = 2
LATE = 1 + NUM_STAGES
"""The step that writes the state of the first one."""


def _run(stored: str, loaded: str, patch: pytest.MonkeyPatch) -> str:
    """What a block holds in the end: device and host. `stored` and `loaded` are plans
    that do so: `never`, or a number."""
    cuda = FakeCuda("random", 1)
    memory = {"block": "old", "slot": "other"}
    with patch.context() as inner:
        cuda.install(inner)
        order = CudaStreams(torch.device("cpu"), None)

        def nothing(between_parts: Callable[[], None]) -> None: ...

        def copies(source: str, target: str) -> Callable[[Callable[[], None]], None]:
            def copy(between_parts: Callable[[], None]) -> None:
                cuda.launch(lambda: memory.update({target: memory[source]}))

            return copy

        for seq in range(1, LATE + 2):
            plan = StepPlan(seq)
            if str(seq) == stored:
                plan = StepPlan(
                    seq, clean_blocks=[0], clean_slots=[0], clean_after_compute=seq - 1
                )
            if str(seq) == loaded:
                # The block's last user was the first step.
                plan = StepPlan(
                    seq, ahead_blocks=[0], ahead_slots=[0], load_after_compute=1
                )
            order.begin_step(
                plan,
                Copies(
                    nothing, nothing, copies("slot", "block"), copies("block", "slot")
                ),
                layerwise=False,
            )
            # Early copies have come by now.
            for marks in order._jobs.values():
                for job in marks.values():
                    job.wait_on_host()
            if seq == LATE:
                cuda.launch(partial(memory.update, block="state"))
            order.end_step()
        cuda.wait_for_all()
        del order
        end_threads(cuda)
    return f"{memory['block']} {memory['slot']}"


def test_a_store_reads_a_state_before_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The fence is for the step that hashed the block, which is the first one.
    assert _run("2", "never", monkeypatch) == "state old"
    # Right would be, and is from the step after the late one on:
    assert _run(str(LATE + 1), "never", monkeypatch) == "state state"


def test_a_late_state_overwrites_what_was_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the request has ended meanwhile: upstream still moves its state, to a block
    that is free by then."""
    assert _run("never", str(LATE), monkeypatch) == "state other"
    assert _run("never", str(LATE + 1), monkeypatch) == "other other"
