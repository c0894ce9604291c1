# SPDX-License-Identifier: Apache-2.0
"""When a load is worth it, and when a step should not wait for it.

Costs are measured: seconds to load a block from calibration at start and from
the loads since, seconds to compute one from the prefill steps since, and how long a
step takes in which requests join that have little to compute.
"""

import time

from vllm.v1.kv_tier.plan import StepReport

# How fast measured costs follow the last measurement.
_WEIGHT = 0.2
_SLOW_WEIGHT = 0.05


class LoadPolicy:
    """Costs of loads, and what they say.

    Args:
        load_s: Seconds to load one block, as measured at start; 0: unknown.
        max_stall_s: How long a step with other requests may wait for loads.
            Infinite: every load is waited for in its step.
        layerwise: Whether layers wait for their own part of the loads of a step, so
            that these cost nothing while the layers before compute.

    """

    def __init__(
        self, load_s: float, max_stall_s: float, layerwise: bool = False
    ) -> None:
        self.load_s = load_s
        self.prefill_s = 0.0
        """Seconds to compute one block; 0 until measured."""
        self.join_s: dict[int, float] = {}
        """Seconds of a step in which requests join with little to compute, by the bit
        length of its number of tokens."""
        self.max_stall_s = max_stall_s
        self.layerwise = layerwise
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

    def stalls(self, end: float, hidden_s: float = 0.0) -> bool:
        """Whether a step planned now would wait too long for loads until `end`.

        Args:
            end: When they will have ended.
            hidden_s: Seconds of the step that pass anyway before it waits for the last.

        """
        return end - self.clock() - hidden_s > self.max_stall_s

    def hidden_s(self, num_tokens: int, tokens_per_block: float) -> float:
        """How long a step computes while its own loads come.

        Args:
            num_tokens: That the joining request computes in it.
            tokens_per_block: Tokens whose KV takes one block.

        """
        # A step without prefill may be one CUDA graph.
        if not self.layerwise or num_tokens <= 1:
            return 0.0
        # Above some size steps are not replayed as graphs, and take longer to launch
        # than to compute.
        sizes = [size for size in self.join_s if size <= num_tokens.bit_length()]
        join_s = self.join_s[max(sizes)] if sizes else 0.0
        return max(join_s, num_tokens / tokens_per_block * self.prefill_s)

    @property
    def recompute(self) -> bool:
        """Whether computing a block takes less time than loading it."""
        return 0 < self.prefill_s < self.load_s

    def take(self, report: StepReport, tokens_per_block: float) -> None:
        """Take in what the workers measured."""
        loads, prefill, joins = report.loads, report.prefill, report.joins
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
        for size, cost in joins.items():
            # What holds up a launch now and then hides no load.
            known = self.join_s.get(size, cost)
            weight = _SLOW_WEIGHT if cost > known else 1
            self.join_s[size] = known + weight * (cost - known)
