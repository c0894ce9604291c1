# SPDX-License-Identifier: Apache-2.0
"""Plays random scripts on the real streams and threads, and ends these threads."""

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from vllm.v1.kv_tier.plan import StepPlan

from . import upstream
from .fake_cuda import FakeCuda, Pace
from .layouts import LAYOUTS
from .scheduler import Setup
from .scripts import Steps, random_script
from .step import Step
from .stream_worker import Luck, StreamEngine, StreamWorker

# Many loads ahead, and many fences.
BUSY = {"load_time": 1.0, "max_stall": 0.0, "is_async": True}


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    """pytest keeps them, with tracebacks that hold the streams."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True, scope="module")
def collect_fast() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def play(
    cuda: FakeCuda, luck: Luck, seed: int, has_faults: bool = True, **setup: Any
) -> int:
    """Returns how many objects came from a tier below."""
    script = random_script(Random(seed))
    engine = StreamEngine(replace(script.setup, **setup), cuda, luck, seed)
    for action in script.actions:
        if isinstance(action, Steps) and not has_faults:
            action = replace(action, fail=None)
        action.run(engine)
    engine.drain()
    return engine.below.num_got if engine.below is not None else 0


def end_threads(cuda: FakeCuda) -> None:
    """Nothing holds the streams any more: their threads end.

    Returns when they have ended. What is queued still, after an error, is dropped.
    """
    end = time.monotonic() + 5.0
    while True:
        gc.collect()
        if not copy_threads():
            return
        assert time.monotonic() < end, "threads do not end"
        # These hold the streams too.
        cuda.wait_for_all()
        cuda.errors.clear()
        time.sleep(0.01)


STUCK: set[threading.Thread] = set()


def copy_threads() -> list[threading.Thread]:
    found = (each for each in threading.enumerate() if each.name.startswith("kv-tier"))
    return [each for each in found if each not in STUCK]


@contextmanager
def device(pace: Pace, seed: int, patch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A device on which nothing may go wrong, and no thread be left."""
    cuda = FakeCuda(pace, seed)
    with patch.context() as inner:
        cuda.install(inner)
        yield cuda
        cuda.check()
        end_threads(cuda)


def run_plans(cuda: FakeCuda, luck: Luck, seed: int) -> None:
    """Random plans, one step after another, two of them in flight."""
    rng = Random(seed)
    setup = Setup(LAYOUTS[0], spare_blocks=10, num_slots=20)
    worker = StreamWorker(setup, {}, cuda, luck, rng)
    steps: deque[Step] = deque()
    for seq in range(1, 50):
        output = upstream.empty_step()
        output.kv_tier_plan = random_plan(rng, seq, setup)
        fail = rng.choice([None] * 8 + ["load", "store"])
        steps.append(worker.submit(output, 0, False, fail))
        if len(steps) == 2:
            worker.run_until(steps.popleft())
    worker.settled()


def random_plan(rng: Random, seq: int, setup: Setup) -> StepPlan:
    """Copies of a few blocks each, behind fences on any plans before."""
    blocks = rng.sample(range(1, setup.num_blocks), 12)
    slots = rng.sample(range(setup.num_slots), 12)
    store, load, ahead, clean = (
        slice(start, start + rng.choice([0, 1, 3])) for start in (0, 3, 6, 9)
    )

    def up_to(last: int) -> int:
        return rng.choice([0, 0, rng.randint(max(0, last - 3), last)])

    return StepPlan(
        seq,
        store_blocks=blocks[store],
        store_slots=slots[store],
        clean_blocks=blocks[clean],
        clean_slots=slots[clean],
        load_blocks=blocks[load],
        load_slots=slots[load],
        ahead_blocks=blocks[ahead],
        ahead_slots=slots[ahead],
        compute_after_stores=up_to(seq),
        compute_after_loads=up_to(seq),
        load_after_stores=up_to(seq),
        load_after_loads=up_to(seq - 1),
        load_after_compute=up_to(seq - 1),
        store_after_compute=up_to(seq - 1),
        store_after_loads=up_to(seq - 1),
        clean_after_compute=up_to(seq - 1),
        clean_after_loads=up_to(seq),
    )
