# SPDX-License-Identifier: Apache-2.0
"""What a container must be given for a size of the tier: memory, and time to start."""

import math

PIN_GIB_PER_S = 4.0
"""Host memory touched and pinned, with room: 5.9 in the first engine on a machine, 19
in the next, on an H200 (docs/benchmarks.md, "Host memory")."""
PERIOD_S = 5
"""Of the startup probe."""


def memory_gib(size_gib: float, base_gib: float) -> int:
    """Memory limit, and request, of the container.

    Args:
        size_gib: `--kv-offloading-size`, which is for all ranks of the engine together.
        base_gib: What the same container needs without a tier at its peak, that is
            while it loads the weights.

    """
    return math.ceil(size_gib + base_gib)


def startup_failures(size_gib: float, start_s: float) -> int:
    """`failureThreshold` of a startup probe every `PERIOD_S` seconds.

    Args:
        size_gib: As above.
        start_s: What the same container may take to start without a tier.

    """
    return math.ceil((start_s + size_gib / PIN_GIB_PER_S) / PERIOD_S)
