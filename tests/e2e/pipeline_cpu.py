# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism on the CPU engine without compilation.

Upstream makes the buffers between the stages in the warm-up run, which its CPU
worker leaves out when nothing is compiled: the first step of the second stage
then ends in an AssertionError. Compiling a small model takes longer than all that
is asked of it.
"""

from inspect import getsource
from typing import Any

STAGES = [
    *("--pipeline-parallel-size", "2"),
    *("--worker-extension-cls", "tests.e2e.pipeline_extension.BuffersBetweenStages"),
]
"""Flags of a server with two of them."""


def run_pipelines_in_process() -> None:
    """Let engines in this process have several steps in flight. Those of the first
    releases take the first step for done, in a pipeline too."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core_client import InprocClient

    if "engine_core.step()" not in getsource(InprocClient.get_output):
        return

    def get_output(self: Any) -> EngineCoreOutputs:
        # As the loop of an engine in a process of its own.
        outputs, _ = self.engine_core.step_with_batch_queue()
        return (outputs or {}).get(0) or EngineCoreOutputs()

    InprocClient.get_output = get_output  # type: ignore[method-assign]


def make_buffers_between_stages(wrapper: Any) -> None:
    """On a rank: what upstream's warm-up run does first. See `Engine.on_ranks`."""
    _make_buffers(wrapper.worker.model_runner)


def _make_buffers(runner: Any) -> None:
    from vllm.distributed import get_pp_group

    if not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )
