# SPDX-License-Identifier: Apache-2.0
"""Starts the host tier once KV caches exist, and writes it to stores at the end."""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import psutil

from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.v1.kv_tier import compatibility, releases
from vllm.v1.kv_tier.about import about
from vllm.v1.kv_tier.block_keys import AdapterLoads, set_adapter_loads
from vllm.v1.kv_tier.config import GiB, KVTierConfig, is_one_machine, tier_config
from vllm.v1.kv_tier.copying.engine import slot_bytes
from vllm.v1.kv_tier.elastic import num_mapped, open_elastic
from vllm.v1.kv_tier.keeper.client import MIN_SLOT_BYTES, Member, Place
from vllm.v1.kv_tier.layout import (
    KVTierLayout,
    PoolLayout,
    SecondaryLayout,
    SecondaryTier,
)
from vllm.v1.kv_tier.memory.limits import (
    HostMemory,
    available_host_bytes,
    check_hosts,
    host_memory,
)
from vllm.v1.kv_tier.memory.opener import FIRST_BYTES, SlotOpener
from vllm.v1.kv_tier.memory.regions import Region, build_regions
from vllm.v1.kv_tier.opening import exists_on_all, labels, secondary_layout
from vllm.v1.kv_tier.plan import StepReport, merge_reports
from vllm.v1.kv_tier.scheduler.kv_groups import (
    GroupBlocks,
    group_blocks,
    prefix_ends,
    reachable_blocks,
    tokens_per_block,
)
from vllm.v1.kv_tier.scheduler.secondary.lookup import AsyncLookup
from vllm.v1.kv_tier.stores.format import advice
from vllm.v1.kv_tier.stores.identity import (
    FileStates,
    files_of_models,
    namespace,
    states_before_loading,
    youngest_s,
)
from vllm.v1.kv_tier.stores.settings import ALWAYS
from vllm.v1.kv_tier.worker.group_bytes import bytes_of_groups, group_bytes
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.layers import make_layer_waits, set_layer_waits
from vllm.v1.kv_tier.worker.pooled import join_pool
from vllm.v1.kv_tier.worker.report import StepReportAggregator
from vllm.v1.kv_tier.worker.secondary import common_objects, name_of_rank, open_rank
from vllm.v1.kv_tier.worker.sharing import (
    held_once,
    kv_replicas,
    may_share,
    share_slots,
    take_shared,
    tell_no_effect,
    why_no_replicas,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_tier.scheduler.block_pool import TieredBlockPool

logger = init_logger(__name__)

# Time for the ranks to receive the last writes and to answer.
_RPC_S = 1.0


def states_of_files(vllm_config: "VllmConfig") -> FileStates | None:
    """States of the files that shape KV, before the ranks load them.

    None without a secondary tier or pool, which identify KV by their bytes.

    Raises:
        ValueError: KV of this engine cannot be identified.

    """
    config = tier_config(vllm_config)
    if config is None or not (config.secondary_tiers or config.pool):
        return None
    with _for_setting("secondary_tiers" if config.secondary_tiers else "pool"):
        return states_before_loading(vllm_config)


@contextmanager
def _for_setting(name: str) -> Iterator[None]:
    """Let messages about the identity of KV, which are written for `secondary_tiers`,
    name the setting that needs it."""
    try:
        yield
    except ValueError as e:
        e.args = (str(e).replace("secondary_tiers", name),)
        raise


def start_kv_tier(
    vllm_config: "VllmConfig",
    executor: Any,
    kv_cache_config: Any,
    states: FileStates | None = None,
) -> None:
    """Allocate the host tier, if any, and set it in the scheduler's `KVCacheConfig`.

    Args:
        vllm_config: Settings of the engine.
        executor: Reaches all ranks of the engine.
        kv_cache_config: The scheduler's KV cache configuration; its `kv_tier` is set.
        states: From `states_of_files`, before the ranks were made.

    Raises:
        ValueError: The size does not fit the machine, or is less than one block.

    """
    config = tier_config(vllm_config)
    set_adapter_loads(None)
    if config is None:
        return
    # Upstream may have changed its own settings since they were made.
    config.check_engine(vllm_config)
    shares = bool(config.secondary_tiers) or config.pool is not None
    set_adapter_loads(loads := AdapterLoads(by_content=shares))
    num_blocks = kv_cache_config.num_blocks
    per_rank = executor.collective_rpc(_block_bytes, args=(num_blocks,))
    groups = group_blocks(vllm_config, kv_cache_config)
    engine = config, vllm_config, executor, kv_cache_config
    pool, place = _join_pool(*engine, groups, per_rank, states)
    if pool is not None:
        replicas, num_slots = 1, pool.member.num_slots
    else:
        replicas, num_slots = _take_slots(*engine, per_rank)
    block_bytes = held_once([num_bytes for _, num_bytes in per_rank], replicas)
    args = num_blocks, num_slots, *_settings_of_ranks(config), place
    ranks = executor.collective_rpc(_start_rank, args=args)
    if len(per_rank) > 1:
        executor.kv_tier_aggregator = StepReportAggregator()
    kv_cache_config.kv_tier = KVTierLayout(
        config,
        num_slots,
        block_bytes,
        open_slots=tuple(num_open for *_, num_open in ranks),
        are_shared=replicas > 1,
        load_s=max(load_s for load_s, *_ in ranks),
        tokens_per_block=tokens_per_block(groups),
        layerwise=all(layerwise for _, layerwise, *_ in ranks),
        secondary=_open_secondary(*engine, groups, num_slots, states),
        elastic=open_elastic(*engine, per_rank),
        prefix_ends=prefix_ends(groups),
        reachable=reachable_blocks(groups, vllm_config.speculative_config is not None),
        group_bytes=bytes_of_groups(
            [needs for *_, needs, _ in ranks], [size for _, size in per_rank], replicas
        ),
        pool=pool,
        adapter_files=loads if shares and vllm_config.lora_config else None,
        can_jump=_requests_meet(config, vllm_config, kv_cache_config),
    )
    _log_start(config, kv_cache_config, replicas)


def _log_start(config: KVTierConfig, kv_cache_config: Any, replicas: int) -> None:
    layout = kv_cache_config.kv_tier
    num_slots, num_open = layout.num_slots, min(layout.open_slots)
    logger.info(
        "KV tier: %d host slots (%.2f GiB on %d ranks%s%s) behind %d device blocks; "
        "%s, %s.",
        num_slots,
        num_slots * layout.slot_bytes / GiB,
        len(layout.open_slots),
        f", of which each {replicas} share theirs" if replicas > 1 else "",
        f"; {num_open} are open now" if num_open < num_slots else "",
        kv_cache_config.num_blocks,
        config.debug.store_policy,
        config.eviction_policy,
    )


def _settings_of_ranks(config: KVTierConfig) -> tuple[str, bool, bool, bool, bool]:
    debug = config.debug
    as_file = any(tier.uses_memory_file for tier in config.secondary_tiers)
    copies = debug.copy_engine, debug.layerwise_loads, debug.verify
    return *copies, as_file, debug.check_memory


def _join_pool(
    config: KVTierConfig,
    vllm_config: "VllmConfig",
    executor: Any,
    kv_cache_config: Any,
    groups: Sequence[GroupBlocks],
    per_rank: Sequence[tuple[HostMemory, int]],
    states: FileStates | None,
) -> tuple[PoolLayout | None, Place | None]:
    """The engine's part of the pool, and where its ranks find it; None without one.

    Raises:
        ValueError: It cannot be used. The message has the setting and the fix.

    """
    if config.pool is None:
        return None, None
    with _for_setting("pool"):
        space = _namespace(vllm_config, executor, kv_cache_config, states)
    names = executor.collective_rpc(
        name_of_rank, args=(space, 0, kv_cache_config.num_blocks)
    )
    rank_bytes = [num_bytes for _, num_bytes in per_rank]
    if not all(rank_bytes):
        raise ValueError(
            "--kv-offloading-config: pool needs KV memory on every rank, but they have "
            f"{rank_bytes} bytes for a block. Change the number of ranks, or remove "
            "pool."
        )
    if config.debug.verify and min(rank_bytes) < MIN_SLOT_BYTES:
        raise ValueError(
            "--kv-offloading-config: pool has room for the checksums of debug.verify "
            f"where a block has {MIN_SLOT_BYTES} bytes on each rank, but they have "
            f"{rank_bytes}. Increase --block-size, or remove debug.verify."
        )
    # Who compares checksums reads only what has some.
    what = [names, rank_bytes, config.debug.verify]
    identity = hashlib.sha256(json.dumps(what).encode()).digest()
    member = Member(config.pool, identity, rank_bytes, FIRST_BYTES)
    logger.info(
        "KV tier: partition %d of the pool at %s, with %d blocks of an earlier engine.",
        member.membership.number,
        config.pool,
        len(member.membership.adopted.slots),
    )
    sizes = tuple(group.block_size for group in groups)
    pool = PoolLayout(member.membership, sizes, len(per_rank), lease=member)
    pool.rank_calls.listen(executor)
    return pool, member.place()


def _requests_meet(
    config: KVTierConfig, vllm_config: "VllmConfig", kv_cache_config: Any
) -> bool:
    """Whether requests compute their prompts while secondary tiers are read."""
    tiers = config.secondary_tiers
    is_on = config.debug.meet and bool(tiers)
    is_on = is_on and all(tier.debug.fetch != ALWAYS for tier in tiers)
    # Memory that comes and goes counts blocks of a prompt at its admission.
    is_on = is_on and config.shrink_after_s is None and config.pool is None
    return is_on and compatibility.engine_can_jump(vllm_config, kv_cache_config)


def flush_kv_tier(scheduler: Any, executor: Any) -> None:
    """Write the most valuable blocks to secondary tiers before the engine ends.

    Does nothing without a secondary tier, for an engine that ends because it failed, or
    when called again.

    Args:
        scheduler: The scheduler, which runs no more steps.
        executor: Its ranks are still running.

    """
    pool = releases.tier_of(scheduler)
    if pool is not None and pool.secondary is not None:
        _flush(pool, executor)


def _flush_at_exit(executor: Any) -> Callable[["TieredBlockPool"], None]:
    """Make a pool flush when the process ends. Most releases do not shut down an engine
    that runs in its user's process."""
    # Weak, or this would keep the executor alive.
    ranks = ref(executor)

    def flush(of_pool: "ref[TieredBlockPool]") -> None:
        pool, executor = of_pool(), ranks()
        if pool is not None and executor is not None:
            _flush(pool, executor)

    def watch(pool: "TieredBlockPool") -> None:
        finalize(pool, flush, ref(pool))

    return watch


def _flush(pool: "TieredBlockPool", executor: Any) -> None:
    secondary = pool.secondary
    assert secondary is not None
    is_first, secondary.is_flushed = not secondary.is_flushed, True
    # Upstream calls this while it handles the exception that ended the engine.
    if not is_first or isinstance(sys.exc_info()[1], Exception):
        return
    begun = time.monotonic()
    try:
        # The last steps may have failed after their reports.
        reports = executor.collective_rpc(_last_report, timeout=_RPC_S)
        if (report := merge_reports(reports)) is not None:
            pool.apply_report(report)
    except Exception as e:
        logger.warning("KV tier: nothing was written at the end (%s).", e)
        return
    jobs = secondary.last_jobs()
    num_blocks = sum(len(job.keys) for _, each in jobs for job in each)
    if not num_blocks:
        return
    limit_s = max(seconds for seconds, _ in jobs) + _RPC_S
    try:
        counts = executor.collective_rpc(_flush_rank, timeout=limit_s, args=(jobs,))
        num_written = min(int(n) for n in counts if n is not None)
    except Exception as e:
        # Ranks may be gone, or in the middle of a step.
        logger.warning("KV tier: nothing was written at the end (%s).", e)
        return
    logger.info(
        "KV tier: wrote %d of %d blocks that the secondary tier lacked, in %.1f s "
        "(flush_s).",
        num_written,
        num_blocks,
        time.monotonic() - begun,
    )


def _take_slots(
    config: KVTierConfig,
    vllm_config: "VllmConfig",
    executor: Any,
    kv_cache_config: Any,
    per_rank: Sequence[tuple[HostMemory, int]],
) -> tuple[int, int]:
    """How many ranks share slots (1 if none do), and the number of slots.

    Allocates the slots that ranks share.

    Raises:
        ValueError: As in `start_kv_tier`.

    """
    num_blocks = kv_cache_config.num_blocks
    sizes = [num_bytes for _, num_bytes in per_rank]
    told: int | None = 1
    if len(per_rank) > 1 and config.share_replicas:
        told = kv_replicas(vllm_config, kv_cache_config)
        if told == 1:
            tell_no_effect(why_no_replicas(vllm_config))
    found = None
    if told != 1:
        one_machine, below = is_one_machine(vllm_config), bool(config.secondary_tiers)
        found = may_share(executor, num_blocks, told, one_machine, below)
    replicas, facts = found or (1, [])
    num_slots = _num_slots(config, held_once(sizes, replicas), num_blocks)
    if config.debug.check_memory:
        # Ranks that share slots are on one machine.
        takes = [(memory, num_slots * size // replicas) for memory, size in per_rank]
        check_hosts(config.size_bytes, takes)
    if facts and not share_slots(executor, num_blocks, num_slots, replicas, facts):
        return 1, _num_slots(config, sum(sizes), num_blocks)
    return replicas, num_slots


def _num_slots(config: KVTierConfig, block_bytes: int, num_blocks: int) -> int:
    """Number of host slots.

    Raises:
        ValueError: There is no KV cache, or the size is less than one block.

    """
    if block_bytes == 0:
        raise ValueError(
            "--kv-offloading-backend core: this model has no KV cache to offload. "
            "Remove the backend."
        )
    if not (num_slots := config.size_bytes // block_bytes):
        raise ValueError(
            f"--kv-offloading-size {config.size_bytes / GiB:g} is not enough for one "
            f"KV block: a block takes {block_bytes} bytes on all ranks together. "
            # One percent more than a block, since the number is rounded.
            f"Set it to at least {1.01 * block_bytes / GiB:.3g} GiB. It is useful from "
            "the size of the device cache on "
            f"({block_bytes * num_blocks / GiB:.3g} GiB)."
        )
    return num_slots


def _open_secondary(
    config: KVTierConfig,
    vllm_config: "VllmConfig",
    executor: Any,
    kv_cache_config: Any,
    groups: Sequence[GroupBlocks],
    num_slots: int,
    states: FileStates | None,
) -> SecondaryLayout | None:
    """Open the secondary tiers on all ranks, if any.

    Raises:
        ValueError: One cannot be used. The message has the setting and the fix.

    """
    if not (entries := config.secondary_tiers):
        return None
    for entry in entries:
        entry.check()
    space = _namespace(vllm_config, executor, kv_cache_config, states)
    num_blocks, replicas = kv_cache_config.num_blocks, 1
    if config.share_replicas:
        told = kv_replicas(vllm_config, kv_cache_config)
        replicas = common_objects(executor, num_blocks, told)
    ranks = executor.collective_rpc(
        open_rank, args=(entries, space, num_blocks, replicas)
    )
    if (hint := advice()) is not None:
        logger.info("KV tier: %s", hint)
    opened = []
    for entry, label in zip(entries, labels([entry.type for entry in entries])):
        logger.info("KV tier: secondary tier %s, namespace %s.", entry.name, space)
        opened.append(
            SecondaryTier(
                name=entry.name,
                label=label,
                locality=entry.locality,
                lookup=AsyncLookup(
                    exists_on_all(entry, ranks[::replicas], replicas),
                    deadline_s=entry.debug.deadline_ms / 1e3,
                ),
                store_from_use=entry.debug.store_from_use,
                deadline_s=entry.debug.deadline_ms / 1e3,
                fetches_always=entry.debug.fetch == ALWAYS,
                flush_s=entry.debug.flush_s,
            )
        )
    with_kv = [num_bytes for _, num_bytes in ranks if num_bytes]
    opened_layout = secondary_layout(
        opened,
        len(with_kv),
        [group.block_size for group in groups],
        num_slots,
        sum(with_kv),
        tokens_per_block(groups),
    )
    opened_layout.rank_calls.listen(executor)
    return replace(opened_layout, begun=_flush_at_exit(executor))


def _namespace(
    vllm_config: "VllmConfig",
    executor: Any,
    kv_cache_config: Any,
    states: FileStates | None,
) -> str:
    """The namespace of this engine's KV. The ranks have loaded the model by now."""
    found = executor.collective_rpc(_weight_sources)
    sources = sorted({source for sources in found for source in sources})
    if not is_one_machine(vllm_config):
        here = files_of_models(vllm_config, states, sources)
        for elsewhere in executor.collective_rpc(_files_of_rank, args=(sources,)):
            if elsewhere not in (None, here):
                raise ValueError(
                    "--kv-offloading-config: secondary_tiers: files of the model on "
                    "another machine of this engine have other bytes than those here, "
                    "or were written after its rank had started. Give all machines "
                    "the same files before the engine starts."
                )
    return namespace(vllm_config, kv_cache_config, about()["tag"], states, sources)


# These functions run on the ranks. `wrapper` is a WorkerWrapperBase.
def _weight_sources(wrapper: Any) -> list[tuple[str, str]]:
    """(repository, folder in it) of additional weights of the models on this rank."""
    return releases.weight_sources(wrapper.worker.model_runner)


def _files_of_rank(
    wrapper: Any, sources: Sequence[tuple[str, str]]
) -> list[Any] | None:
    """Files of the models on this rank's machine.

    None unless it is the first rank there; [] if they are newer than the rank.
    """
    if wrapper.worker.local_rank != 0:
        return None
    config = wrapper.worker.vllm_config
    begun_s = psutil.Process().create_time()
    if youngest_s(config, sources) >= begun_s:
        return []
    return files_of_models(config, None, sources)


def _last_report(wrapper: Any) -> StepReport | None:
    tier = wrapper.kv_tier
    if tier is None:
        return None
    tier.finish()
    return tier.report.take()


def _flush_rank(wrapper: Any, jobs: Any) -> int | None:
    """Blocks that were written; None if the rank has no KV memory."""
    tier = wrapper.kv_tier
    return None if tier is None or tier.secondary is None else tier.flush(jobs)


def _block_bytes(wrapper: Any, num_blocks: int) -> tuple[HostMemory, int]:
    """Memory of this rank's machine, and the rank's bytes of a block."""
    regions = build_regions(wrapper.worker.model_runner.kv_caches, num_blocks)
    return host_memory(), slot_bytes(regions)


def _start_rank(
    wrapper: Any,
    num_blocks: int,
    num_slots: int,
    copy_engine: str,
    layerwise_loads: bool,
    verify: bool,
    as_file: bool,
    check_memory: bool,
    place: Place | None,
) -> tuple[float, bool, list[int], int]:
    """Allocate a rank's part of the tier.

    Returns:
        Seconds to load a slot, whether layers wait for their own loads, how many bytes
        of a slot each KV cache group needs, or none if all need all, and the number of
        slots that are open.

    """
    runner = wrapper.worker.model_runner
    regions = build_regions(runner.kv_caches, num_blocks)
    waits = None
    if layerwise_loads and runner.device.type == "cuda":
        waits = make_layer_waits(wrapper.worker.vllm_config, regions)
    # Cleared, since another engine of this process sets its own in each step that needs
    # it.
    set_layer_waits(None)
    if waits is not None:
        waits.use = set_layer_waits
    # Slots of neighbours are in no table, so that blocks of a pool are whole.
    needs = [] if place else _group_bytes(wrapper.worker, regions, num_blocks)
    shared = take_shared(wrapper)
    tier = HostTier.allocate(
        regions,
        num_slots,
        runner.device,
        copy_engine,
        waits,
        verify,
        shared=shared,
        num_mapped=num_mapped(wrapper, num_blocks),
        as_file=as_file,
        group_bytes=needs,
        first_bytes=FIRST_BYTES,
        pooled=place and join_pool(place, wrapper.rpc_rank, runner.device),
    )
    if shared is not None:
        shared.memory.close()
    tier.is_last_stage = get_pp_group().is_last_rank
    wrapper.kv_tier = tier
    num_open, tier.rank = tier.buffer.num_open, wrapper.rpc_rank
    # The keeper has taken the memory of a pool.
    checks = check_memory and place is None
    tier.opener = SlotOpener(
        tier.buffer, available=available_host_bytes if checks else None
    )
    # With the slots of neighbours, which follow its own.
    if num_open < (all_slots := len(tier.buffer.slots)):
        tier.opener.aim(0, all_slots)
    load_s = slot_bytes(regions) / tier.engines.load_bytes_per_s
    if (checksums := tier.slots.checksums) is not None:
        check_s = checksums.seconds_per_slot()
        logger.info(
            "KV tier: slots are verified before their loads, at %.1f GB/s.",
            slot_bytes(regions) / check_s / 1e9,
        )
        load_s += check_s
    # A rank without KV memory never delays a step.
    return load_s, waits is not None or not regions, needs, num_open


def _group_bytes(worker: Any, regions: Sequence[Region], num_blocks: int) -> list[int]:
    groups = releases.groups_of_rank(worker.model_runner)
    if len(groups) < 2:
        return []
    layers = worker.vllm_config.compilation_config.static_forward_context
    needs = group_bytes(groups, layers, regions, num_blocks)
    if needs:
        logger.info(
            "KV tier: blocks of each KV cache group are copied up to byte %s of %d.",
            needs,
            slot_bytes(regions),
        )
    return needs
