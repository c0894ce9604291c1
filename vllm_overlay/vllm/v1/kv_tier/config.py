# SPDX-License-Identifier: Apache-2.0
"""Settings of the host tier, checked before anything is allocated."""

import dataclasses
import json
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.kv_tier import compatibility, releases
from vllm.v1.kv_tier.hints.schema import MAX_NAME
from vllm.v1.kv_tier.layout import BACKEND
from vllm.v1.kv_tier.memory.limits import check_fits, host_memory, total_host_bytes
from vllm.v1.kv_tier.options import (
    FLAG,
    SETTINGS,
    Flag,
    From0,
    Number,
    Text,
    Whole,
    make,
    with_debug,
)
from vllm.v1.kv_tier.policy import make_policy
from vllm.v1.kv_tier.stores.settings import StoreConfig, parse_tiers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

GiB = 1 << 30

# Seconds for the running step and the processes to end.
_END_S = 5.0

MAX_QUOTAS = 100
"""Most tenants with a quota, since each has its own metrics."""

_REMOVED = {
    "keep_while_asleep": "A sleep of the engine clears the host tier, as it clears the "
    "prefix cache. Take the key out.",
}
"""Settings of earlier versions, and what to do."""

StorePolicy = Literal["write_back", "write_through"]
CopyEngineName = Literal["auto", "dma", "kernel", "torch"]
COPY_ENGINES = get_args(CopyEngineName)
_Tenant = Annotated[Text, Field(min_length=1, max_length=MAX_NAME)]
_Part = Annotated[Number, Field(gt=0, le=1)]


@dataclass(frozen=True, config=SETTINGS)
class DebugConfig:
    """`debug` of `--kv-offloading-config`. Its fields are the keys."""

    store_policy: StorePolicy = "write_back"
    """`write_back` stores blocks before the device evicts them: those that would go
    first, at most three quarters of the device cache. What fits the rest is never
    copied. `write_through` stores every block in the step after it was filled: more
    copies, but evictions never wait."""

    store_from_use: int | Literal["auto"] = "auto"
    """Store a block only from its n-th use on: being computed is one, and so is a hit.
    `2` saves slots and copies of blocks that are never used again; the others are
    computed once more first. `auto` tries both on a sample, does what had more hits
    recently, and fills empty slots; with `secondary_tiers` it is 1."""

    max_load_stall_ms: From0 | None = 2.0
    """How long a request that joins a step with others may make these wait for its
    loads, in milliseconds, not counting the time in which layers compute while others
    load. A request whose loads take longer waits in the queue while the others run;
    later requests may overtake it. `0`: a step with other requests never waits. `null`:
    no limit, every step waits for its loads."""

    copy_engine: CopyEngineName = "auto"
    """What copies on a GPU: `dma` (the copy engines, by block or by piece), `kernel`
    (a Triton kernel), `torch` (one copy for each block and region; the only one for
    host memory that is not pinned). `auto` measures them at start and takes the best
    for each direction and size; the log line `KV tier: copy engines …` says which."""

    layerwise_loads: Flag = True
    """Let each attention layer wait for its own part of the loads of a step, instead of
    the step for all of them. Where that is not possible the log line `KV tier: steps
    wait for all their loads at once` gives the reason."""

    meet: Flag = False
    """With `secondary_tiers`: let a request compute its prompt from the beginning while
    the end is fetched, and skip what has arrived when it gets there. `false`: it waits
    for all of it, or computes all. Off by default, since it costs short prompts
    more than it saves ([measured](secondary-tiers.md#what-happens))."""

    verify: Flag = False
    """Keep a checksum of every host slot, and do not load a slot whose bytes have
    changed since it was filled (bad memory, a stray write): the error names the slots,
    and what depended on them is computed again. Nor is it written to `secondary_tiers`.
    Each stored or loaded byte is read once more by the CPU."""

    check_memory: Flag = True
    """Refuse a size above the memory that is available at start. `false` on machines
    whose memory grows on demand (ballooning)."""

    @field_validator("store_from_use", mode="plain")
    @classmethod
    def _check_uses(cls, uses: Any) -> Any:
        is_whole = isinstance(uses, int) and not isinstance(uses, bool)
        if uses != "auto" and not (is_whole and uses >= 1):
            raise ValueError(
                'must be a whole number from 1 (store every block) on, or "auto", got '
                f"{uses!r}."
            )
        return uses


@dataclass(frozen=True, config=SETTINGS)
class KVTierConfig:
    """`--kv-offloading-backend core`: size and behaviour of the host tier.

    `size_bytes` comes from `--kv-offloading-size` (GiB, all ranks of one engine
    together, as upstream defines it). Every other field is a key of
    `--kv-offloading-config`.
    """

    size_bytes: Whole
    """Host memory of all ranks of one engine together, in bytes."""

    secondary_tiers: tuple[StoreConfig, ...] = ()
    """Where blocks go from the host, in the order in which they are looked up.
    `[{"type": "fs", "root_dir": "/mnt/kv", "max_gib": 200}]` keeps them in files, which
    outlive the engine and serve every engine with the same model and settings. The keys
    of an entry are in the next table."""

    share_replicas: Flag = False
    """Hold KV that several tensor parallel ranks have (MLA, or fewer heads than ranks)
    once on the host, in shared memory: with MLA on two ranks the same size holds twice
    the tokens. With `secondary_tiers`, hold it once there, and on the host for each
    rank. Off by default, since it has run on two GPUs only."""

    quotas: Annotated[dict[_Tenant, _Part], Field(max_length=MAX_QUOTAS)] | None = None
    """Parts of the slots by tenant: `{"tenant-a": 0.5, "tenant-b": 0.25}`. Blocks of a
    tenant that has less than its part are not evicted for others. Nothing is reserved:
    others use what it does not fill. A tenant is what a request names as `tenant` in
    its hints, else its cache salt."""

    shrink_after_s: From0 | None = None
    """Give device memory back when the engine has run nothing for so many seconds, or
    earlier when others run short of it; its blocks go to the host. On CPUs, and with
    kvcached on one CUDA GPU, see [Giving memory back](giving-back.md). `null`:
    never."""

    pool: Annotated[Text, Field(min_length=1)] | None = None
    """Socket of a keeper, whose memory the engines of this machine share: see [One
    pool](one-pool.md). Takes the place of `--kv-offloading-size`."""

    eviction_policy: str = "proven"
    """Which blocks the host evicts first: `proven`, `lru`, `s3fifo`, `arc`, or the
    import path (`package.module.Class`) of a subclass of
    `vllm.v1.kv_tier.policy.EvictionPolicy`."""

    debug: DebugConfig = dataclasses.field(default_factory=DebugConfig)
    """All other settings: for experiments and for finding faults."""

    @field_validator("secondary_tiers", mode="plain")
    @classmethod
    def _check_tiers(cls, tiers: Any) -> Any:
        if isinstance(tiers, tuple) and all(isinstance(t, StoreConfig) for t in tiers):
            return tiers
        return parse_tiers(tiers)[0]

    @field_validator("eviction_policy", mode="plain")
    @classmethod
    def _check_policy(cls, name: Any) -> Any:
        make_policy(name, num_slots=1)
        return name

    @field_validator("quotas")
    @classmethod
    def _check_quotas(cls, quotas: dict[str, float] | None) -> dict[str, float] | None:
        if (total := sum((quotas or {}).values())) > 1 + 1e-9:
            raise ValueError(
                f"are {total:g} of the slots together, which must be at most 1. Lower "
                "some of them."
            )
        return quotas

    @classmethod
    def from_vllm_config(cls, vllm_config: "VllmConfig") -> "KVTierConfig | None":
        """The tier's settings, checked against all others, or None when it is off.

        For the one place where upstream's settings are made; others take `tier_config`.

        Raises:
            ValueError: A setting is wrong. The message names the flag, the value and
                the fix.

        """
        if (found := _parsed_of(vllm_config)) is None:
            return None
        config, moved = found
        if moved:
            logger.warning_once(
                "KV tier: these settings belong into the object debug: %s. Their old "
                "place is accepted in this version only.",
                ", ".join(moved),
            )
        config.check_engine(vllm_config)
        return config

    @property
    def max_load_stall_s(self) -> float:
        limit = self.debug.max_load_stall_ms
        return math.inf if limit is None else limit / 1e3

    def check_engine(self, vllm_config: "VllmConfig") -> None:
        """Refuse an engine with which the tier does not work.

        Raises:
            ValueError: The message names the setting and the fix.

        """
        compatibility.check_engine(
            vllm_config,
            has_secondary_tiers=bool(self.secondary_tiers),
            gives_memory_back=self.shrink_after_s is not None,
        )
        if self.pool is not None:
            self._check_pool(vllm_config)
        if (
            self.debug.check_memory
            and is_one_machine(vllm_config)
            and self.size_bytes > total_host_bytes()
        ):
            raise ValueError(
                f"--kv-offloading-size {self.size_bytes / GiB:g} is larger than the "
                f"memory of this machine ({total_host_bytes() / GiB:.1f} GiB). "
                "Lower it, or set "
                '--kv-offloading-config \'{"debug": {"check_memory": false}}\' where '
                "memory grows on demand."
            )

    def _check_pool(self, vllm_config: "VllmConfig") -> None:
        """Refuse what has not been run with a pool."""
        compatibility.check_pool(
            vllm_config,
            {
                "secondary_tiers with several ranks": bool(self.secondary_tiers)
                and vllm_config.parallel_config.world_size > 1,
                "share_replicas": self.share_replicas,
                "shrink_after_s": self.shrink_after_s is not None,
            },
        )


def tier_config(vllm_config: "VllmConfig") -> KVTierConfig | None:
    """The tier's settings, or None when it is off. A process parses them once.

    Raises:
        ValueError: A setting is wrong.

    """
    found = _parsed_of(vllm_config)
    return found and found[0]


def _parsed_of(vllm_config: "VllmConfig") -> tuple[KVTierConfig, list[str]] | None:
    """The tier's settings, and those keys that belong into `debug`."""
    if (cache := releases.cache_config(vllm_config)) is None:
        return None
    options: dict[str, Any] = cache.kv_offloading_config
    if cache.kv_offloading_backend != BACKEND:
        if options:
            raise ValueError(
                f"{FLAG} {options} is for "
                f"--kv-offloading-backend {BACKEND}, but the backend is "
                f"{cache.kv_offloading_backend!r}. Remove it, or set "
                f"--kv-offloading-backend {BACKEND}."
            )
        return None
    size = cache.kv_offloading_size
    if options.get("pool") is not None:
        if size is not None:
            raise ValueError(
                f"{FLAG}: pool {options['pool']!r} has the memory, so that "
                f"--kv-offloading-size {size:g} has no meaning. Remove one of them."
            )
        size = 1 / GiB
    if size is None or not 0 < size < math.inf:
        raise ValueError(
            f"--kv-offloading-backend {BACKEND} needs a --kv-offloading-size "
            f"above 0 (GiB of host memory, all ranks together), got {size}. "
            "Give a size, or remove the backend to run without a host tier."
        )
    try:
        text = json.dumps(options)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{FLAG} must be JSON: {e}. Give plain values.") from None
    return _parsed(int(size * GiB), text)


@lru_cache(maxsize=8)
def _parsed(size_bytes: int, text: str) -> tuple[KVTierConfig, list[str]]:
    """As `_parsed_of`, from the JSON text of `--kv-offloading-config`."""
    options = json.loads(text)
    for key, advice in _REMOVED.items():
        if key in options:
            raise ValueError(
                f"{FLAG}: {key} (value {options[key]!r}) was removed. {advice}"
            )
    values, moved = with_debug(KVTierConfig, options)
    tiers, moved_in_tiers = parse_tiers(values.get("secondary_tiers"))
    values["secondary_tiers"] = tiers
    config = make(KVTierConfig, values, size_bytes=size_bytes)
    return config, moved + moved_in_tiers


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
    config = tier_config(vllm_config)
    if config is None or num_engines < 2 or not config.debug.check_memory:
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
    """Seconds that an engine may take to end, after the time that upstream gives to its
    requests. 0 without a secondary tier. It may write as an idle engine first."""
    config = tier_config(vllm_config)
    flush_s = [tier.debug.flush_s for tier in config.secondary_tiers] if config else []
    return 2 * max(flush_s) + _END_S if any(flush_s) else 0.0


def is_one_machine(vllm_config: "VllmConfig") -> bool:
    """Whether all ranks of an engine are sure to be on this machine. Where Ray places
    them is known only once they run."""
    parallel = vllm_config.parallel_config
    return releases.num_machines(parallel) == 1 and not parallel.use_ray
