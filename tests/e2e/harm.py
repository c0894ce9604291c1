# SPDX-License-Identifier: Apache-2.0
"""Harm that is done on a rank. `wrapper` is a `WorkerWrapperBase` with a `HostTier`."""

from collections.abc import Collection, Container
from typing import Any

from .jobs import SMALL


def spoil_slot(wrapper: Any, index: int) -> None:
    """Move the bytes of a slot, whole numbers at a time.

    Anything else can make NaNs, which would stay in the device block and harm
    whoever has it next.
    """
    slots = wrapper.kv_tier.buffer.slots
    slots[index].copy_(slots[index].roll(slots.shape[1] // 3 // 8 * 8))


def checks_slots(wrapper: Any) -> bool:
    """Whether a rank compares each slot with its checksum before it loads it."""
    tier = wrapper.kv_tier
    return tier._copier._slots.checksums is not None


def spoil_slots(wrapper: Any, indices: Collection[int]) -> int:
    """`spoil_slot` of each; how many they are."""
    for index in indices:
        spoil_slot(wrapper, index)
    return len(indices)


def host_memory(wrapper: Any) -> dict[str, Any]:
    """Bytes of a slot on a rank, and whether other ranks have the same slots."""
    tier = wrapper.kv_tier
    return {
        "slot_bytes": tier.buffer.slots.shape[1],
        "is_shared": tier._peers is not None,
    }


def fill_with_nans(wrapper: Any, index: int) -> None:
    wrapper.kv_tier.buffer.slots[index].fill_(0xFF)


def spoil_first_load(
    wrapper: Any, among: Container[int], rank: int | None = None
) -> None:
    """Spoil the first slot of `among` that is loaded, before it is.

    On one rank, if it is given, else on all.
    """
    if rank not in (None, wrapper.worker.rank):
        return
    wrapper.spoilt = []
    for engine in copiers(wrapper, "loads"):

        def loads(
            slots: Any, blocks: Any, *groups: Any, real: Any = engine.loads
        ) -> Any:
            if not wrapper.spoilt:
                wrapper.spoilt = [slot for slot in slots if slot in among][:1]
                for slot in wrapper.spoilt:
                    spoil_slot(wrapper, slot)
            return real(slots, blocks, *groups)

        engine.loads = loads


def stop_spoiling(wrapper: Any) -> int:
    """Undo `spoil_first_load`; how many slots were spoilt."""
    for engine in copiers(wrapper, "loads"):
        engine.__dict__.pop("loads", None)
    return len(wrapper.__dict__.pop("spoilt", []))


def copiers(wrapper: Any, name: str) -> list[Any]:
    """The copy engines whose method `name` (`loads` or `stores`) is in use."""
    engines = wrapper.kv_tier.engines
    return [engines.stores] if name == "stores" else [engines.step_loads, engines.loads]


def count_reads(wrapper: Any, index: int) -> int:
    """How often `index` was loaded since the first call."""
    if not hasattr(wrapper, "reads"):
        wrapper.reads = []
        for engine in copiers(wrapper, "loads"):

            def loads(
                slots: Any, blocks: Any, *groups: Any, real: Any = engine.loads
            ) -> Any:
                wrapper.reads += slots
                return real(slots, blocks, *groups)

            engine.loads = loads
    return wrapper.reads.count(index)


def break_copy(wrapper: Any, name: str, skip: int, rank: int = -1) -> None:
    """Let one of the `stores` or `loads` of a rank fail, after `skip` good ones.

    Ranks count from the last one where `rank` is negative.
    """
    if wrapper.worker.rank != rank % wrapper.vllm_config.parallel_config.world_size:
        return
    wrapper.failures = 0
    left = skip
    for engine in copiers(wrapper, name):
        real = getattr(engine, name)

        def failing(
            sources: Any,
            targets: Any,
            *groups: Any,
            engine: Any = engine,
            real: Any = real,
        ) -> Any:
            nonlocal left
            left -= 1
            if left >= 0 or wrapper.failures:
                return real(sources, targets, *groups)
            wrapper.failures += 1
            # It leaves wrong bytes: those of the neighbours.
            others = [(source + 1) % SMALL for source in sources]
            transfer = real(others, targets, *groups)
            transfer.copy(range(len(engine.regions)))
            raise RuntimeError("a copy fails for the test")

        setattr(engine, name, failing)


def lose_store_reports(wrapper: Any) -> None:
    """Drop what the next outputs say of stores that failed."""
    tier = wrapper.kv_tier
    real = tier.attach_report

    def attach_report(output: Any) -> Any:
        # The report in the making.
        report = tier.report._report
        if report is not None:
            report.failed_store_slots.clear()
        return real(output)

    tier.attach_report = attach_report


def lose_no_reports(wrapper: Any) -> None:
    del wrapper.kv_tier.attach_report


def mend_copy(wrapper: Any, name: str) -> int:
    """Undo `break_copy`; how many copies failed."""
    for engine in copiers(wrapper, name):
        engine.__dict__.pop(name, None)
    return wrapper.__dict__.pop("failures", 0)
