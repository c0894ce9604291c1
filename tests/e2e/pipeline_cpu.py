# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism on the CPU engine without compilation.

Upstream makes the buffers between the stages in the warm-up run, which its CPU
worker leaves out when nothing is compiled: the first step of the second stage
then ends in an AssertionError. Compiling a small model takes longer than all that
is asked of it.
"""

from typing import Any


def make_buffers_between_stages(wrapper: Any) -> None:
    """On a rank: what upstream's warm-up run does first. See `Engine.on_ranks`."""
    from vllm.distributed import get_pp_group

    if not get_pp_group().is_first_rank:
        runner = wrapper.worker.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )
