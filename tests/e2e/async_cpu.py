# SPDX-License-Identifier: Apache-2.0
"""Async scheduling on the CPU engine, which upstream turns off there.

The scheduler then runs a step ahead of the model, as it does by default on GPUs.
On a CPU every tensor is ready when its call returns, so that streams and events
may do nothing.
"""

from contextlib import nullcontext
from typing import Any

import torch


class _Nothing:
    """Stands for a stream or event of a device that runs in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, *args: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


def allow_async_scheduling() -> None:
    """Let engines made in this process from now on schedule asynchronously."""
    from vllm.platforms.cpu import CpuPlatform

    upstream = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        upstream(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(  # type: ignore[assignment]
        check_and_update_config
    )
    do_without_streams()


def do_without_streams(wrapper: Any = None) -> None:
    """Let the model runner of this process schedule asynchronously.

    Runs on the ranks too, where they are processes of their own.
    """
    from vllm.v1.worker import cpu_model_runner

    # Some releases put stand-ins of their own there, which can do less.
    if hasattr(cpu_model_runner, "_torch_cuda_wrapper"):
        cpu_model_runner._torch_cuda_wrapper = nullcontext
    torch.Event = torch.cuda.Event = torch.cuda.Stream = _Nothing  # type: ignore
    torch.cuda.current_stream = torch.cuda.default_stream = _Nothing  # type: ignore
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment]
