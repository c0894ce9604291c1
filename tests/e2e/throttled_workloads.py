# SPDX-License-Identifier: Apache-2.0
"""Prompts that are computed from the beginning while a slow directory gives the end."""

import time
from pathlib import Path
from typing import Any

from .engine import Answer, Engine
from .workloads import BLOCK, text, workload

NUM_BLOCKS = 40
NUM_PROMPTS = 2
RATES = (0.2, 0.5, 1.0, 2.0, 5.0, 100.0, 0.0)
"""Bytes per second of the directory, as parts of what computing makes. The last reads
never end."""


def _write_all(engine: Engine) -> None:
    """Let the directory have all that it is to have."""
    writer = engine.pool.secondary.writers[0]
    limit, num_steps = time.monotonic() + 30, 0
    # What the last steps computed is stored and written by the next ones.
    while num_steps < 20 or writer.due or writer.writing:
        num_steps += 1
        assert time.monotonic() < limit, "not all is written"
        engine.core.step_fn()
        time.sleep(1e-3)


def _evict(engine: Engine, seed: int) -> None:
    """Push everything else out of device and host."""
    for i in range(8):
        engine.generate([text(seed + i, NUM_BLOCKS * BLOCK)], max_tokens=1)
        _write_all(engine)


@workload
def meet_in_the_middle(engine: Engine) -> dict[str, Any]:
    """The same prompts at all rates, alone and together."""
    prompts = [text(4000 + i, NUM_BLOCKS * BLOCK + 1) for i in range(NUM_PROMPTS)]
    settings = engine.core.vllm_config.cache_config.kv_offloading_config
    rate_file = Path(settings["secondary_tiers"][0]["rate_file"])
    rate_file.write_text("1e12")
    answers: list[Answer] = []
    seconds = []
    for prompt in prompts:
        engine.generate([text(4500, NUM_BLOCKS * BLOCK)], max_tokens=1)
        begun = time.monotonic()
        answers += engine.generate([prompt], max_tokens=4)
        seconds.append(time.monotonic() - begun)
        _write_all(engine)
    num_bytes = NUM_BLOCKS * engine.pool.slot_bytes
    jumped = {}
    for i, part in enumerate(RATES):
        rate_file.write_text(str(max(1.0, part * num_bytes / min(seconds))))
        _evict(engine, 5000 + 20 * i)
        before = _num_jumped(engine)
        if i % 2:
            answers += engine.generate(prompts, max_tokens=4)
        else:
            for prompt in prompts:
                answers += engine.generate([prompt], max_tokens=4)
        jumped[part] = _num_jumped(engine) - before
        rate_file.write_text("1e12")
    return {"answers": answers, "jumped": jumped}


def _num_jumped(engine: Engine) -> float:
    return engine.counters()["kv_tier_jumped_tokens"]
