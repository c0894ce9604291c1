# SPDX-License-Identifier: Apache-2.0
"""Faults of copies and of their order, planted in this process and those it forks."""

from typing import Any


def remove_fences() -> None:
    """Begin each copy at once, whatever its plan says it must wait for."""
    from vllm.v1.kv_tier.worker.streams import CudaStreams, Job

    def begin_step(self: Any, plan: Any, copies: Any, layerwise: bool) -> None:
        if plan.store_slots:
            self._store_thread.submit(Job(copies.store, [], len(plan.store_slots)))
        if plan.load_slots:
            self._load_thread.launch(Job(copies.load, [], len(plan.load_slots)))
        if plan.ahead_slots:
            self._load_thread.submit(Job(copies.load_ahead, [], len(plan.ahead_slots)))
        if plan.clean_slots:
            self._store_thread.submit(Job(copies.clean, [], len(plan.clean_slots)))

    CudaStreams.begin_step = begin_step  # type: ignore[method-assign]


def refuse_to_pin() -> None:
    """Make the driver's registration of host memory fail, as a memlock limit does."""
    import torch

    real = torch.cuda.cudart

    class Refusing:
        def cudaHostRegister(self, *args: int) -> int:
            return 2  # cudaErrorMemoryAllocation

        def __getattr__(self, name: str) -> Any:
            return getattr(real(), name)

    torch.cuda.cudart = Refusing  # type: ignore[assignment]


def delay_copies() -> None:
    """Keep every copy waiting on the device, for longer than its launch takes."""
    import torch

    from vllm.v1.kv_tier.worker.copies import Copier

    def delayed(copy: Any) -> Any:
        def run(*args: Any) -> None:
            torch.cuda._sleep(200_000_000)  # cycles: about 100 ms
            copy(*args)

        return run

    for name in ("store", "load", "load_ahead", "clean"):
        setattr(Copier, name, delayed(getattr(Copier, name)))


def delay_stores() -> None:
    """Keep every store waiting on the device, for much longer than a step takes."""
    import torch

    from vllm.v1.kv_tier.worker.copies import Copier

    inner = Copier._store_blocks

    def late(self: Any, kind: str, plan: Any, blocks: Any, *args: Any) -> None:
        if blocks:
            torch.cuda._sleep(600_000_000)  # cycles: about 300 ms
        inner(self, kind, plan, blocks, *args)

    Copier._store_blocks = late  # type: ignore[assignment, method-assign]


def wait_for_no_peer() -> None:
    """Let ranks that share slots load them before they are filled."""
    from vllm.v1.kv_tier.worker.copies import Copier

    Copier._await_owner = lambda self, plan: None  # type: ignore[method-assign]


def bind_no_worker() -> None:
    """Keep NixlConnector from binding all workers on CPUs to the same last core."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.discover_numa_topology = list  # type: ignore[assignment]
