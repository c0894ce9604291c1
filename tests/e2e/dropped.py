# SPDX-License-Identifier: Apache-2.0
"""An engine in the process of its user, who never tells it to end.

    python -m tests.e2e.dropped MODEL ROOT HOW

HOW: `dropped` at the end of a function, or `kept` until the process ends.
"""

import sys
from pathlib import Path

from .engine import Engine
from .jobs import BLOCK_TOKENS
from .release import known
from .secondary import directory
from .workloads import text

NUM_PROMPTS = 3
NUM_BLOCKS = 5

_kept: list[Engine] = []


def main(model: str, root: str, how: str) -> None:
    """Compute some prompts."""
    engine = Engine(
        model=model,
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=40,
        **known({"kv_cache_memory_bytes": 64 << 20}),
        kv_offloading_backend="core",
        kv_offloading_size=0.05,
        kv_offloading_config={
            "store_policy": "write_through",
            "store_from_use": 1,
            "secondary_tiers": [directory(Path(root))],
        },
    )
    for i in range(NUM_PROMPTS):
        engine.generate([text(i, NUM_BLOCKS * BLOCK_TOKENS + 10)], max_tokens=2)
    if how == "kept":
        _kept.append(engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
