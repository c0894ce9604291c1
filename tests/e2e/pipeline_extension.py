# SPDX-License-Identifier: Apache-2.0
"""For servers with a pipeline on CPUs; imported by their workers. See `pipeline_cpu`.

Not a call to the ranks: one that the tier does not know may change weights, and it
leaves what is below the host alone then.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from .pipeline_cpu import _make_buffers

_warm_up = CPUWorker.compile_or_warm_up_model


def _warm_up_and_make_buffers(worker: Any) -> Any:
    _make_buffers(worker.model_runner)
    return _warm_up(worker)


CPUWorker.compile_or_warm_up_model = _warm_up_and_make_buffers  # type: ignore


class BuffersBetweenStages:
    """For `--worker-extension-cls`, whose import does all of it."""
