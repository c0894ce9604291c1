# SPDX-License-Identifier: Apache-2.0
"""Settings of the host tier, checked before anything is allocated."""

import dataclasses
import math
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from vllm import envs
from vllm.v1.kv_tier.memory.limits import check_fits, host_memory, total_host_bytes
from vllm.v1.kv_tier.policy import make_policy
from vllm.v1.kv_tier.scheduling.asleep import check_asleep
from vllm.v1.kv_tier.scheduling.below import SecondaryLayout, check_engine, check_tiers
from vllm.v1.kv_tier.scheduling.connectors import offloading_claim
from vllm.v1.kv_tier.scheduling.executors import refused_executor
from vllm.v1.kv_tier.scheduling.gpu_pages import check_device
from vllm.v1.kv_tier.scheduling.pages import ElasticLayout, check_shrink_after
from vllm.v1.kv_tier.scheduling.quotas import check_quotas
from vllm.v1.kv_tier.scheduling.rank_calls import RankCalls
from vllm.v1.kv_tier.scheduling.side_objects import check_side_objects
from vllm.v1.kv_tier.scheduling.takers import takes_plans
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning
from vllm.v1.kv_tier.stores.by_name import check_entry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND = "core"
GiB = 1 << 30

# For the end of the step under way, and of the processes.
_END_S = 5.0

StorePolicy = Literal["write_back", "write_through"]
COPY_ENGINES = ("auto", "dma", "kernel", "torch")


@dataclass(frozen=True)
class KVTierConfig:
    """`--kv-offloading-backend core`: size and behaviour of the host tier.

    `size_bytes` comes from `--kv-offloading-size` (GiB, all ranks of one engine
    together, as upstream defines it). Every other field is a key of
    `--kv-offloading-config`.
    """

    size_bytes: int
    """Host memory of all ranks of one engine together, in bytes."""

    store_policy: StorePolicy = "write_back"
    """`write_back` stores a block before the device evicts it (those that would go
    first, three quarters at most), so that what fits the rest is never copied.
    `write_through` stores every block in the step after it was filled: more copies,
    but evictions never wait."""

    store_from_use: int | Literal["auto"] = "auto"
    """Store a block only from its n-th use on: being computed is one, and so is a hit.
    `2` spares slots and copies of what never comes back; what does is computed once
    more first. `auto` tries both on a sample, does what had more hits recently, and
    fills empty slots; it is 1 where `secondary_tiers` get what comes by the host."""

    eviction_policy: str = "proven"
    """Which host slot makes room: `proven`, `lru`, `s3fifo`, `arc`, or the import path
    (`package.module.Class`) of a `vllm.v1.kv_tier.policy.EvictionPolicy`."""

    max_load_stall_ms: float | None = 2.0
    """How long a step with other requests may wait for the loads of a request that
    joins it, in milliseconds, beyond the time in which the step computes while layers
    load. A request whose loads take longer waits for them outside, while the others run
    on; those behind it may pass. `0`: a step with other requests never waits. `null`
    (None): no limit, every load is waited for in its step."""

    copy_engine: str = "auto"
    """What copies on a GPU: `dma` (the copy engines, by block or by piece), `kernel`
    (a Triton kernel), `torch` (one copy for each block and region; the only one for
    host memory that is not pinned). `auto` measures them at start and takes the best
    for each direction and size; the log line `KV tier: copy engines …` says which."""

    layerwise_loads: bool = True
    """Let each attention layer wait for its own part of the loads of a step, instead of
    the step for all of them. Where that is not possible the log line `KV tier: steps
    wait for all their loads at once` gives the reason."""

    verify: bool = False
    """Keep a checksum of every host slot, and refuse to load a slot whose bytes have
    changed since it was filled (bad memory, a stray write): nothing of it reaches the
    device, the error names the slots, and what depended on them is computed again. Nor
    is it written to `secondary_tiers`. It reads every stored and loaded byte once more,
    by the CPU, every byte that comes from a secondary tier once, and every byte that
    is written to one twice."""

    share_replicas: bool = False
    """Hold KV that several tensor parallel ranks have (MLA, or fewer heads than ranks)
    once on the host, in memory that they share: with MLA on two ranks the same size
    holds twice the tokens. With `secondary_tiers`, hold it once in these, and on the
    host for each rank. Off, since it has run on two GPUs only."""

    secondary_tiers: list[dict[str, Any]] | None = None
    """Where blocks go on to live below the host, in the order in which they are asked.
    `[{"type": "fs", "root_dir": "/mnt/kv", "max_gib": 200}]` keeps them in
    files, which outlive the engine and serve every engine with the same model and
    settings. The page Below the host has all keys."""

    quotas: dict[str, float] | None = None
    """Parts of the slots, by tenant: `{"tenant-a": 0.5, "tenant-b": 0.25}`. The blocks
    of a tenant that has less than its part make no room for others. Nothing is
    reserved: others have what it does not fill. A tenant is what a request names as
    `tenant` in its hints, else its cache salt. `null` (None): no quotas."""

    shrink_after_s: float | None = None
    """Give device memory back when the engine has run nothing for so many seconds, or
    before when others run short of it; what it held goes to the host. On CPUs, and with
    kvcached on one CUDA GPU. `null` (None): never. The page Giving memory back has the
    rest."""

    keep_while_asleep: bool = False
    """Keep what the host has while the engine sleeps (level 1), for when it wakes up,
    unless anything is called meanwhile that may change weights. What only the device
    had is lost. Not together with `secondary_tiers`, KV events or fp8 KV yet."""

    check_memory: bool = True
    """Refuse a size above the memory that is available at start. `false` on machines
    whose memory grows on demand (ballooning)."""

    @classmethod
    def from_vllm_config(cls, vllm_config: "VllmConfig") -> "KVTierConfig | None":
        """The tier's settings, or None when the tier is off.

        Raises:
            ValueError: A setting is wrong. The message names the flag, the
                value and the mend.

        """
        # Upstream's tests start engines with stand-ins for settings.
        cache: Any = getattr(vllm_config, "cache_config", None)
        if not hasattr(cache, "kv_offloading_config"):
            return None
        options: dict[str, Any] = cache.kv_offloading_config
        if cache.kv_offloading_backend != BACKEND:
            if options:
                raise ValueError(
                    f"--kv-offloading-config {options} is for "
                    f"--kv-offloading-backend {BACKEND}, but the backend is "
                    f"{cache.kv_offloading_backend!r}. Remove it, or set "
                    f"--kv-offloading-backend {BACKEND}."
                )
            return None
        size = cache.kv_offloading_size
        if size is None or not 0 < size < math.inf:
            raise ValueError(
                f"--kv-offloading-backend {BACKEND} needs a --kv-offloading-size "
                f"above 0 (GiB of host memory, all ranks together), got {size}. "
                "Give a size, or remove the backend to run without a host tier."
            )
        config = cls(size_bytes=int(size * GiB), **_known(options))
        config._check_values()
        config._check_engine(vllm_config)
        return config

    @property
    def max_load_stall_s(self) -> float:
        limit = self.max_load_stall_ms
        return math.inf if limit is None else limit / 1e3

    def _check_values(self) -> None:
        flag = "--kv-offloading-config"
        if self.store_policy not in get_args(StorePolicy):
            raise ValueError(
                f"{flag}: unknown store_policy {self.store_policy!r}. "
                f"Use one of {', '.join(get_args(StorePolicy))}."
            )
        uses = self.store_from_use
        is_number = isinstance(uses, int) and not isinstance(uses, bool)
        if uses != "auto" and not (is_number and uses >= 1):
            raise ValueError(
                f"{flag}: store_from_use must be a whole number from 1 (store every "
                f'block) on, or "auto", got {uses!r}.'
            )
        make_policy(self.eviction_policy, num_slots=1)
        check_tiers(self.secondary_tiers)
        check_quotas(self.quotas)
        check_shrink_after(self.shrink_after_s)
        stall = self.max_load_stall_ms
        if stall is not None and not (_is_number(stall) and 0 <= stall < math.inf):
            raise ValueError(
                f"{flag}: max_load_stall_ms must be a number of milliseconds from 0 "
                f"on, or null (no limit), got {stall!r}."
            )
        if self.copy_engine not in COPY_ENGINES:
            raise ValueError(
                f"{flag}: unknown copy_engine {self.copy_engine!r}. "
                f"Use one of {', '.join(COPY_ENGINES)}."
            )
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(
                    f"{flag}: {name} must be true or false, got {value!r}."
                )

    def _check_engine(self, vllm_config: "VllmConfig") -> None:
        backend = f"--kv-offloading-backend {BACKEND}"
        # The first releases have two engines. Those that have none but V1 say it is on,
        # or nothing.
        if not getattr(envs, "VLLM_USE_V1", True):
            raise ValueError(
                f"{backend} is part of the V1 engine, but this is V0 (VLLM_USE_V1=0, "
                "set by you, or by vLLM for a setting, a model or a platform: its log "
                "says which). Set VLLM_USE_V1=1, or remove the backend."
            )
        model = vllm_config.model_config
        if model is not None and model.is_encoder_decoder:
            raise ValueError(
                f"{backend} extends the prefix cache, which upstream does not have "
                f"for encoder-decoder models like {model.model}. Remove the backend."
            )
        if not vllm_config.cache_config.enable_prefix_caching:
            raise ValueError(
                f"{backend} extends the prefix cache, which is off "
                "(--no-enable-prefix-caching, or a model that cannot use it). "
                "Turn prefix caching on, or remove the backend."
            )
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and (claim := offloading_claim(transfer)):
            raise ValueError(
                f"{backend} and --kv-transfer-config kv_connector={claim!r} both "
                "offload KV blocks to host memory. Remove one of them; connectors "
                "for prefill/decode disaggregation can stay."
            )
        attention = getattr(vllm_config, "attention_config", None)
        if getattr(attention, "hisparse_config", None) is not None:
            raise ValueError(
                f"{backend} and HiSparse both keep KV blocks in host memory. "
                "Remove the HiSparse configuration, or remove the backend."
            )
        self._check_parallel(vllm_config)
        check_side_objects(vllm_config)
        self._check_scheduler(vllm_config.scheduler_config.scheduler_cls)
        self._check_platform()
        if self.shrink_after_s is not None:
            check_device(vllm_config)
        if self.secondary_tiers:
            check_engine(vllm_config)
        check_asleep(self.keep_while_asleep, bool(self.secondary_tiers), vllm_config)
        self._check_stages(vllm_config)
        if (
            self.check_memory
            and is_one_machine(vllm_config)
            and self.size_bytes > total_host_bytes()
        ):
            raise ValueError(
                f"--kv-offloading-size {self.size_bytes / GiB:g} is larger than the "
                f"memory of this machine ({total_host_bytes() / GiB:.1f} GiB). "
                "Lower it, or set "
                "--kv-offloading-config '{\"check_memory\": false}' where memory "
                "grows on demand."
            )

    @staticmethod
    def _check_parallel(vllm_config: "VllmConfig") -> None:
        backend = f"--kv-offloading-backend {BACKEND}"
        if why := refused_executor(vllm_config):
            raise ValueError(
                f"{backend} is not supported with --distributed-executor-backend {why}"
            )
        if getattr(vllm_config.parallel_config, "enable_fault_tolerance", False):
            raise ValueError(
                f"{backend} is not supported with --enable-fault-tolerance: a step "
                "that is given up takes the ranks' reports of failed copies with it. "
                "Remove one of them."
            )
        ranks = getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1)
        if ranks > 1:
            raise ValueError(
                f"{backend} is not supported with --prefill-context-parallel-size "
                f"{ranks}: the two have not been run together. Remove one of them."
            )

    @staticmethod
    def _check_scheduler(scheduler: str | type | None) -> None:
        if isinstance(scheduler, str):
            if scheduler.startswith("vllm."):
                return
            try:
                scheduler = pkgutil.resolve_name(scheduler)
            except (ImportError, AttributeError, ValueError):
                # Upstream says so when it needs the class.
                return
        if isinstance(scheduler, type) and not takes_plans(scheduler):
            raise ValueError(
                f"--kv-offloading-backend {BACKEND} does nothing with --scheduler-cls "
                f"{scheduler.__module__}.{scheduler.__qualname__}: its schedule() "
                "neither hands on to upstream's nor sends the tier's plan "
                "(output.kv_tier_plan = self.kv_cache_manager.kv_tier.take_plan()). "
                "Call super().schedule(), send the plan, or remove one of the two."
            )

    def _check_platform(self) -> None:
        from vllm.platforms import current_platform

        if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
            raise ValueError(
                f"--kv-offloading-backend {BACKEND} runs on CUDA, ROCm and CPU, not "
                f"on {current_platform.device_name or current_platform.device_type}. "
                "Remove the backend."
            )

    @staticmethod
    def _check_stages(vllm_config: "VllmConfig") -> None:
        """Refuse the one case in which a step writes blocks after the next has begun.

        The first stages of a pipeline hear of accepted tokens as many steps later as
        there are stages, and only then move Mamba states to the blocks that have been
        hashed since. They do so as a part of the later step, behind the tier's back: a
        store would read too early, and a load could be overwritten.
        """
        if (
            vllm_config.parallel_config.pipeline_parallel_size > 1
            and vllm_config.speculative_config is not None
            and getattr(vllm_config, "use_v2_model_runner", False)
            and getattr(vllm_config.cache_config, "mamba_cache_mode", None) == "align"
        ):
            raise ValueError(
                f"--kv-offloading-backend {BACKEND} is not supported with pipeline "
                "parallelism, speculative decoding and --mamba-cache-mode align "
                "together: the first stages write Mamba states of a step during later "
                "ones. Remove one of them, or the backend."
            )


def check_memory_of_engines(vllm_config: "VllmConfig", num_engines: int) -> None:
    """Refuse a size that engines cannot all have, before they start.

    Each engine looks at what is left when it allocates, later and so more exactly, but
    engines that start side by side do not see what the others are about to take.

    Args:
        vllm_config: Settings of each engine.
        num_engines: Data parallel engines that this machine is about to start.

    Raises:
        ValueError: Less is available than they ask for together.

    """
    config = KVTierConfig.from_vllm_config(vllm_config)
    if config is None or num_engines < 2 or not config.check_memory:
        return
    if not is_one_machine(vllm_config):
        return
    here, needed = host_memory(), num_engines * config.size_bytes
    together = (
        f"each of the {num_engines} data parallel engines on this machine takes as "
        f"much, {needed / GiB:g} GiB together, but "
    )
    check_fits(config.size_bytes, needed, here.available, here.total, together)


def flush_time_s(vllm_config: "VllmConfig") -> float:
    """How long an engine may take to end, in seconds, beyond the time that upstream
    gives to its requests: 0 without a tier below. It may write as an idle one first."""
    config = KVTierConfig.from_vllm_config(vllm_config)
    tiers = (config and config.secondary_tiers) or []
    flush_s = [check_entry(tier, index).flush_s for index, tier in enumerate(tiers)]
    return 2 * max(flush_s) + _END_S if any(flush_s) else 0.0


def is_one_machine(vllm_config: "VllmConfig") -> bool:
    """Whether all ranks of an engine are sure to be on this machine. Ray places them
    where it likes, which is known when they are there."""
    parallel = vllm_config.parallel_config
    # Not all releases can do without Ray for several.
    return getattr(parallel, "nnodes", 1) == 1 and not parallel.use_ray


@dataclass(frozen=True)
class KVTierLayout:
    """The tier as it was allocated: what the scheduler must know of it."""

    config: KVTierConfig
    num_slots: int
    slot_bytes: int
    """Bytes of one slot on all ranks together."""
    load_s: float = 0.0
    """Seconds to load one slot, on the slowest rank, as measured at start."""
    tokens_per_block: float = 0.0
    """Tokens whose KV takes one block; less than the block size where several
    groups of layers have blocks of their own."""
    layerwise: bool = False
    """Whether layers wait for their own part of the loads of a step, on all ranks."""
    tuning: SchedulingTuning = SchedulingTuning()
    """No setting: what tests choose otherwise."""
    secondary: SecondaryLayout | None = None
    """The tier below, if there is one."""
    elastic: ElasticLayout | None = None
    """Who maps device memory, if any of it is given back."""
    rank_calls: RankCalls | None = None
    """Tell of a sleep, if slots are kept meanwhile."""


def _known(options: dict[str, Any]) -> dict[str, Any]:
    keys = [f.name for f in dataclasses.fields(KVTierConfig) if f.name != "size_bytes"]
    for key in options:
        if key not in keys:
            raise ValueError(
                f"--kv-offloading-config: unknown key {key!r} (value "
                f"{options[key]!r}). Known keys: {', '.join(keys)}."
            )
    return options


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
