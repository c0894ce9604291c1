# SPDX-License-Identifier: Apache-2.0
"""What `test_ray.py` asks of processes: `python -m tests.e2e.ray_jobs NAME …`."""

import sys
from typing import Any

from .jobs import BLOCK_TOKENS, COMMON, SMALL, device, tier
from .ray_cpu import count_ranks_as_gpus, end_ray, start_ray
from .release import known
from .workloads import text

ANSWERS = "tokens and hits:"
"""Begins the line with them."""
RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "ray",
}


def without_devices() -> None:
    """Upstream's executor as it is on CPUs."""
    import ray

    from vllm.config import ParallelConfig

    try:
        from vllm.v1.executor.ray_utils import initialize_ray_cluster
    except ImportError:  # The first releases.
        from vllm.executor.ray_utils import (  # type: ignore[import-not-found, no-redef]
            initialize_ray_cluster,
        )

    ray.init(num_cpus=1, num_gpus=2, include_dashboard=False)
    initialize_ray_cluster(ParallelConfig(**RANKS))


def settings(model: str) -> None:
    """Those of an engine, checked."""
    from vllm.engine.arg_utils import EngineArgs

    count_ranks_as_gpus()
    llm = COMMON | RANKS | tier(100)
    EngineArgs(model=model, skip_tokenizer_init=True, **llm).create_engine_config()


def below(model: str, root: str) -> None:
    """Answers, and how many cached tokens they had. The engine ends with what it has
    in memory."""
    from .engine import Engine

    start_ray(2)
    directory = {
        "type": "fs",
        "root_dir": root,
        "max_gib": 0.1,
        "debug": {
            "store_from_use": 1,
            "deadline_ms": 20_000,
            "fetch": "always",
            "flush_s": 60,
        },
    }
    llm = COMMON | device(SMALL, 2) | RANKS | tier(100, secondary_tiers=[directory])
    engine = Engine(model=model, **known(llm))
    prompts = [text(700 + i, 5 * BLOCK_TOKENS + 1) for i in range(3)]
    answers = [engine.generate([prompt], max_tokens=8)[0] for prompt in prompts]
    end_ray(engine)
    tokens = "-".join(str(token) for each in answers for token in each["tokens"])
    print(ANSWERS, tokens, sum(each["cached_tokens"] for each in answers))


if __name__ == "__main__":
    {each.__name__: each for each in (without_devices, settings, below)}[sys.argv[1]](
        *sys.argv[2:]
    )
