# SPDX-License-Identifier: Apache-2.0
"""Whether a configuration fits the machine, before an engine is started for it."""

import os
import shutil
import subprocess
from typing import Any

from .configs import Config
from .model import SHAPES
from .scales import Scale

GIB = 2**30
WORK_BYTES = 6 * GIB
"""What a GPU needs beside weights and KV cache, generously: activations, graphs."""


def device_bytes(device: str) -> int | None:
    """Memory of the smallest GPU, or of the machine; None if nobody tells.

    CUDA is not asked: who has used it cannot be forked.
    """
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(gpu_bytes("total"), default=None)


def gpu_bytes(which: str) -> list[int]:
    """`total` or `used` memory of each GPU, by all processes; empty if nobody tells."""
    if (smi := shutil.which("nvidia-smi")) is None:
        return []
    query = [smi, f"--query-gpu=memory.{which}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True)
    return [int(n) << 20 for n in done.stdout.split() if n.isdigit()]


def lacks_room(
    config: Config,
    scale: Scale,
    llm: dict[str, Any],
    device: str,
    has_bytes: int | None = None,
) -> str:
    """Why a configuration with a larger device cache cannot run; empty if it can.

    Args:
        config: Whose.
        scale: The sizes.
        llm: Arguments of its engine.
        device: `cuda` or `cpu`.
        has_bytes: Of each device; asked for if not given.

    """
    if config.device_scale == 1:
        # What every configuration needs: its engine says best what is wrong.
        return ""
    has = has_bytes or device_bytes(device)
    ranks = llm.get("tensor_parallel_size", 1) * llm.get("pipeline_parallel_size", 1)
    itemsize = 2 if scale.dtype == "bfloat16" else 4
    weights = SHAPES[scale.shape].num_parameters * itemsize
    needs = llm["kv_cache_memory_bytes"] + weights // ranks
    needs += WORK_BYTES if device == "cuda" else 0
    if has is None or needs <= has:
        return ""
    return (
        f"needs {needs / GIB:.0f} GiB, the device has {has / GIB:.0f}: take fewer with "
        "--device-gib, and raise --tp or lower the workloads with --set"
    )
