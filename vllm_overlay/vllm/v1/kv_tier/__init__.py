# SPDX-License-Identifier: Apache-2.0
"""A host-memory tier inside vLLM's own KV cache.

`TieredBlockPool` (scheduler side) answers prefix lookups for device and host together;
`HostTier` (worker side) moves the bytes. They communicate by a `StepPlan` in every
`SchedulerOutput`, and a `StepReport` in the `ModelRunnerOutput` when there is something
to report.
"""

from vllm.v1.kv_tier.about import about

__all__ = ["about"]
