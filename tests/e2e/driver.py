# SPDX-License-Identifier: Apache-2.0
"""Run workloads on one engine: `python -m tests.e2e.driver JOB.json RESULT.json`.

A job is `{"llm": {...}, "workloads": [...]}`, a result
`{"facts": {...}, "layout": {...}, "workloads": {name: {"answers", "counters", ...}}}`.
A workload that the release at hand cannot run has `{"lacks": reason}`.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import connector_workloads as connector_workloads
from . import features as features
from . import harmful_workloads as harmful_workloads
from . import meeting as meeting
from . import sharp_weights as sharp_weights  # A load format.
from . import throttled_workloads as throttled_workloads
from .async_cpu import allow_async_scheduling, do_without_streams
from .engine import Engine
from .kinds import IMAGE_TOKEN
from .mamba_cpu import end_prefill_steps_at_blocks, pack_no_weights
from .pipeline_cpu import make_buffers_between_stages, run_pipelines_in_process
from .ray_cpu import end_ray, start_ray
from .release import (
    count_every_step,
    know_image_token,
    known,
    lacking,
    lacking_engine,
)
from .workloads import WORKLOADS


def _prepare(engine: Engine, change: Callable[..., Any]) -> None:
    """Change the ranks, not their weights, which would be the end of secondary
    tiers."""
    secondary = getattr(engine.pool, "secondary", None)
    if secondary is None:
        engine.on_ranks(change)
        return
    calls = secondary._layout.rank_calls
    may_change, calls.may_change = calls.may_change, lambda method: None
    engine.on_ranks(change)
    calls.may_change = may_change


def run(job: dict[str, Any]) -> dict[str, Any]:
    job["llm"] = known(job["llm"])
    if job["llm"].get("async_scheduling"):
        allow_async_scheduling()
        if job["llm"].get("tensor_parallel_size", 1) == 1:
            # Some releases take another process for the rank.
            job["llm"].setdefault("distributed_executor_backend", "uni")
    if job["llm"].get("mamba_cache_mode"):
        end_prefill_steps_at_blocks()
        if job["llm"].get("dtype") == "float32":
            pack_no_weights()
    if why := lacking_engine(job["llm"]):
        lacks = {name: {"lacks": why} for name in job["workloads"]}
        return {"facts": {}, "layout": None, "workloads": lacks}
    unasked = lacking(job["llm"])
    if job["llm"].get("pipeline_parallel_size", 1) > 1:
        run_pipelines_in_process()
    if job["llm"].get("distributed_executor_backend") == "ray":
        start_ray(job["llm"]["tensor_parallel_size"])
    count_every_step()
    if "images" in job["workloads"]:
        know_image_token(IMAGE_TOKEN)
    engine = Engine(**job["llm"])
    if job["llm"].get("async_scheduling"):
        _prepare(engine, do_without_streams)
    if job["llm"].get("pipeline_parallel_size", 1) > 1:
        _prepare(engine, make_buffers_between_stages)
    results: dict[str, Any] = {}
    for name in job["workloads"]:
        if name in unasked:
            results[name] = {"lacks": unasked[name]}
            continue
        # A reset is the end of a tier below, and a new engine has nothing to clear.
        assert not results or engine.reset(), f"The cache is in use before {name}."
        before = engine.counters()
        result = WORKLOADS[name](engine)
        after = engine.counters()
        result["counters"] = {k: v - before.get(k, 0) for k, v in after.items()}
        results[name] = result
    facts = engine.facts
    layout = engine.layout if facts["world_size"] == 1 else None
    if job["llm"].get("distributed_executor_backend") == "ray":
        end_ray(engine)
    return {"facts": facts, "layout": layout, "workloads": results}


if __name__ == "__main__":
    job_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(run(json.loads(job_path.read_text()))))
