# SPDX-License-Identifier: Apache-2.0
"""One of the engines that `elastic.py` compares: does what lines of standard input ask,
and writes a line of JSON to a file for each.

    {"burst": 3}    the burst of this number, all of its requests at once
    {"tell": true}  metrics only

It is started as `python elastic_engine.py JOB`, a file with a `Job`.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

# Imported at the top: a spawned engine core imports this module as its main one.
from elastic_processes import Job
from suite.client import Client
from suite.loader import LOAD_FORMAT
from suite.model import SHAPES, write_config

METRICS = (
    "vllm:num_preemptions",
    "vllm:kv_tier_host_hit_tokens",
    "vllm:kv_tier_device_hit_tokens",
    "vllm:kv_tier_device_mapped_bytes",
    "vllm:kv_tier_device_unmapped_bytes",
    "vllm:kv_tier_mapped_pages",
    "vllm:kv_tier_given_back_pages",
    "vllm:kv_tier_map_seconds",
    "vllm:kv_tier_unmap_seconds",
)


def prompt(job: Job, request: int, burst: int) -> list[int]:
    """The same for every configuration."""
    vocab = range(3, SHAPES[job.shape].vocab)
    name = f"{job.name} {burst % job.sets} {request}"
    prefix = random.Random(name).choices(vocab, k=job.prefix)
    tail = random.Random(f"{job.name} {request} {burst}").choices(vocab, k=job.tail)
    return prefix + tail


async def run_burst(job: Job, client: Client, burst: int) -> dict[str, Any]:
    """All requests at once, until the last one has its answer."""
    prompts = [prompt(job, i, burst) for i in range(job.requests)]
    begun = time.time()
    answers = await asyncio.gather(
        *(client.ask(f"{burst}-{i}", p, job.output) for i, p in enumerate(prompts))
    )
    return {
        "begun": begun,
        "ended": time.time(),
        "ttft_s": [round(a.ttft_s, 5) for a in answers],
        "cached": [a.cached_tokens for a in answers],
        "tokens": [a.tokens for a in answers],
        "gaps": [[round(gap, 4) for gap in a.gaps] for a in answers],
    }


def metrics() -> dict[str, float]:
    """Those of `METRICS` that there are."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return {
        m.name: m.value
        for m in get_metrics_snapshot()
        if m.name in METRICS and hasattr(m, "value")
    }


async def serve(job: Job) -> None:
    """Start the engine, warm it up, and do what is asked until standard input ends."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    out = Path(job.out)
    model = out.with_suffix(".model")
    write_config(model, SHAPES[job.shape], job.dtype)
    args = {"model": str(model), "load_format": LOAD_FORMAT} | job.llm
    begun = time.time()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**args, skip_tokenizer_init=True, disable_log_stats=False)
    )

    def tell(**facts: Any) -> None:
        facts["metrics"] = metrics()
        with out.open("a") as file:
            file.write(json.dumps({"engine": job.name, **facts}) + "\n")

    try:
        client = Client(engine, 0, args["max_model_len"], SHAPES[job.shape].vocab)
        client.logprobs = True
        # Whatever is compiled or set up at its first use.
        for length in (64, job.prefix + job.tail):
            warm = random.Random(f"warm-up {length}").choices(range(3, 999), k=length)
            await client.ask("warm-up", warm, 4)
        tell(ready=True, start_s=round(time.time() - begun, 1))
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            if "burst" in asked:
                number = asked["burst"]
                tell(burst=number, **await run_burst(job, client, number))
            else:
                await engine.do_log_stats()
                tell(told=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(Job(**json.loads(Path(sys.argv[1]).read_text()))))
