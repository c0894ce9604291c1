# SPDX-License-Identifier: Apache-2.0
"""Upstream's Ray executor on the CPU engine.

Upstream has none for CPUs: `initialize_ray_cluster` ends in `ValueError: current
platform cpu does not support ray.`, since the platform names no resource of Ray by
which to count devices. The tests name one, GPUs, and start a Ray that believes to have
some. All else is as upstream has it.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .installed import installed

if TYPE_CHECKING:
    from .engine import Engine

_ENVIRONMENT = {
    # Else Ray writes a token to the home of whoever runs the tests.
    "RAY_AUTH_MODE": "disabled",
    # No workers beside those of the engine: each imports vLLM.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers are otherwise nicer than all else on the machine.
    "RAY_worker_niceness": "0",
}


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """For a process that starts Ray, as long as there is one."""
    # Ray's sockets lie in there, whose paths must be short.
    with tempfile.TemporaryDirectory(
        prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        yield {**_ENVIRONMENT, "RAY_TMPDIR": folder, "PYTHONPATH": installed("ray")}


def count_ranks_as_gpus() -> None:
    """In every process of Ray, and in that of the executor."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


def start_ray(num_ranks: int) -> None:
    """A Ray of this process alone, which ends with it."""
    import ray

    ray.init(
        num_cpus=1,
        num_gpus=num_ranks,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={
            "worker_process_setup_hook": f"{__name__}.{count_ranks_as_gpus.__name__}"
        },
        _node_ip_address="127.0.0.1",
    )
    count_ranks_as_gpus()


def end_ray(engine: "Engine") -> None:
    """End an engine and its Ray, which kills workers: what they share in /dev/shm is
    left, with or without a tier."""
    import ray

    names = {name for rank in engine.on_ranks(shared_memory) for name in rank}
    engine.core.shutdown()
    ray.shutdown()
    for name in names:
        Path(name).unlink(missing_ok=True)


def shared_memory(wrapper: Any) -> set[str]:
    """Files in /dev/shm that a rank has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
    return {name for name in found if not name.endswith("(deleted)")}
