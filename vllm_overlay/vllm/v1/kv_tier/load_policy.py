# SPDX-License-Identifier: Apache-2.0
"""When a load is worth it, and when a step should not wait for it.

Costs are measured: seconds to load a block from calibration at start and from
the loads since, seconds to compute one from the prefill steps since.
"""

import time

# How fast measured costs follow the last measurement.
_WEIGHT = 0.2


class LoadPolicy:
    """Costs of loads, and what they say.

    Args:
        load_s: Seconds to load one block, as measured at start; 0: unknown.
        max_stall_s: How long a step with other requests may wait for loads.
            Infinite: every load is waited for in its step.

    """

    def __init__(self, load_s: float, max_stall_s: float) -> None:
        self.load_s = load_s
        self.prefill_s = 0.0
        """Seconds to compute one block; 0 until measured."""
        self.max_stall_s = max_stall_s
        self.clock = time.monotonic
        self._calibrated_s = load_s
        # When the loads queued until now will have ended.
        self._link_free_at = 0.0

    def queue(self, num_blocks: int) -> float:
        """Loads of `num_blocks` were queued. Returns when they will have ended."""
        self._link_free_at = self.end_of(num_blocks)
        return self._link_free_at

    def end_of(self, num_blocks: int) -> float:
        """When loads of `num_blocks`, queued now, would end."""
        return max(self.clock(), self._link_free_at) + num_blocks * self.load_s

    def stalls(self, end: float) -> bool:
        """Whether a step planned now would wait too long for loads until `end`."""
        return end - self.clock() > self.max_stall_s

    @property
    def recompute(self) -> bool:
        """Whether computing a block takes less time than loading it."""
        return 0 < self.prefill_s < self.load_s

    def measured(
        self,
        loads: tuple[int, float],
        prefill: tuple[int, float],
        tokens_per_block: float,
    ) -> None:
        """Take (blocks, seconds) of loads and (tokens, seconds) of prefill in."""
        if loads[0]:
            self.load_s += _WEIGHT * (loads[1] / loads[0] - self.load_s)
        elif self.recompute:
            # Without loads nothing is measured: forget a busy link by and by.
            self.load_s += _WEIGHT * (self._calibrated_s - self.load_s)
        if prefill[0]:
            cost = prefill[1] / prefill[0] * tokens_per_block
            self.prefill_s += (_WEIGHT if self.prefill_s else 1) * (
                cost - self.prefill_s
            )
