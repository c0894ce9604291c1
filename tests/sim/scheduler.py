# SPDX-License-Identifier: Apache-2.0
"""The settings of an engine, and the real scheduler made of them."""

import json
import tempfile
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_tier.config import DebugConfig, KVTierConfig
from vllm.v1.kv_tier.keeper.client import Membership
from vllm.v1.kv_tier.layout import (
    AdapterFiles,
    ElasticLayout,
    KVTierLayout,
    PoolLayout,
    SecondaryLayout,
    SecondaryTier,
)
from vllm.v1.kv_tier.scheduler.kv_groups import (
    group_blocks,
    prefix_ends,
    reachable_blocks,
)
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.structured_output import StructuredOutputManager

from ..names import init_none_hash, sha256
from . import upstream
from .layouts import MAX_MODEL_LEN, Layout
from .opening import Opening
from .pages import DeviceMemory, Elastic, elastic_layout
from .secondary import Below

SLOT_BYTES = 1 << 20
NUM_DRAFTS = 3

# Prefixes have few blocks here: let none be too few to be prefetched. And the device
# has few: let all be for prefetches.
# No more steps are in flight than five, and ranks tell of failed loads with their step.
TUNING = SchedulingTuning(
    plans_per_report=1,
    min_prefetch=1,
    spare=0.0,
    settled_steps=5,
    settled_outputs=0,
    idle_pause_s=0.0,
)


@dataclass(frozen=True)
class Setup:
    """An engine."""

    layout: Layout
    spare_blocks: int
    """Device blocks beyond those that the longest request takes."""
    num_slots: int
    store_policy: str = "write_back"
    store_from_use: int | Literal["auto"] = 1
    eviction_policy: str = "lru"
    load_time: float = 0.0
    """How long a block takes to load, in steps."""
    max_stall: float = 0.0
    """How long a step may wait for loads, in steps."""
    join_time: float = 0.0
    """How long a step in which requests join computes while its loads come, in steps;
    0: steps wait for all their loads at once."""
    is_async: bool = False
    is_v2: bool = False
    """Speak to the worker as to model runner V2."""
    num_stages: int = 1
    """Of a pipeline, each of which takes the steps in order."""
    token_budget: int = 16
    max_num_seqs: int = 4
    by_priority: bool = False
    retention: int | None = None
    """Blocks of which windows and states keep one tail; 0: only the last."""
    reserve_full_isl: bool = True
    tuning: SchedulingTuning = TUNING
    quotas: tuple[tuple[str, float], ...] = ()
    """Parts of the slots, by tenant."""
    below: tuple[int, int] | tuple[int, int, int] | None = None
    """Seed and delay of a tier below, and how many ranks have it in common."""
    kv_events: KVEventsConfig | None = None
    elastic: Elastic | None = None
    """Device memory that comes and goes."""
    speculates: Literal["ngram", "eagle"] | None = None
    """Steps check guesses of what follows. Only where none runs ahead."""
    remote: int | None = None
    """Seed of a KV connector."""
    real_ranks: int = 0
    """So many real ranks do what the simulated one does."""
    verify: bool = False
    """They check slots before they load them."""
    share: bool = False
    """They hold the same, in slots that they share."""
    member: Membership | None = None
    """The engine's part of a pool with others."""
    num_ranks: int = 1
    """Of an engine with such a part, each with memory of its own."""
    adapter_files: AdapterFiles | None = None
    """What adapters' files are, where keys name them."""
    pools: bool = False
    """The model pools: requests end with their prompts."""
    opens: int | None = None
    """Seed of ranks that open host slots while steps run."""
    jumps: bool = False
    """Prefills skip what has come or was computed meanwhile, where the model lets
    them."""

    @property
    def model_can_jump(self) -> bool:
        return (
            self.jumps
            and len(self.layout.groups) == 1
            and isinstance(self.layout.groups[0].spec, FullAttentionSpec)
            and not self.speculates
            and self.remote is None
        )

    @property
    def num_blocks(self) -> int:
        return self.spare_blocks + self.layout.min_blocks(
            self.depth * self.token_budget, self.depth
        )

    @property
    def depth(self) -> int:
        """Steps in flight."""
        return self.num_stages + self.is_async


_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "float32",
}


@cache
def _base() -> tuple[VllmConfig, StructuredOutputManager]:
    """What all engines share, since it is slow to build."""
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/config.json", "w") as file:
            json.dump(_MODEL, file)
        model_config = ModelConfig(
            model=folder, skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN
        )
        config = VllmConfig(
            model_config=model_config,
            scheduler_config=SchedulerConfig(
                max_model_len=MAX_MODEL_LEN,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                max_num_batched_tokens=MAX_MODEL_LEN,
                max_num_seqs=4,
            ),
            cache_config=CacheConfig(enable_prefix_caching=True),
        )
    upstream.register_specs(config)
    return config, StructuredOutputManager(config)


def _secondary(layout: Layout, below: Below, max_known: int) -> SecondaryLayout:
    return SecondaryLayout(
        tiers=tuple(
            SecondaryTier(
                name="simulated",
                label=f"simulated-{i}",
                locality=("LOCAL", "REMOTE")[i],
                lookup=objects,
                store_from_use=1,
                deadline_s=6.0 - 3.0 * i,
            )
            for i, objects in enumerate(below.tiers)
        ),
        num_ranks=below.num_ranks,
        tokens_per_block=layout.block_size,
        block_sizes=tuple(group.block_size for group in layout.groups),
        max_writing=4,
        max_job=2,
        max_known=max_known,
    )


def _elastic(
    setup: Setup, device: Callable[[], DeviceMemory] | None
) -> ElasticLayout | None:
    if setup.elastic is None or device is None:
        return None
    return elastic_layout(
        setup.elastic, setup.layout, setup.num_blocks, setup.token_budget, device
    )


def _pool(setup: Setup) -> PoolLayout | None:
    if setup.member is None:
        return None
    sizes = tuple(group.block_size for group in setup.layout.groups)
    return PoolLayout(setup.member, sizes, setup.num_ranks)


def _vllm_config(setup: Setup) -> tuple[Any, Any]:
    """Settings of the engine, and the manager that goes with them."""
    layout = setup.layout
    base, structured_output_manager = _base()
    config = copy(base)
    config.scheduler_config = copy(base.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = setup.token_budget
    config.scheduler_config.max_num_scheduled_tokens = setup.token_budget
    config.scheduler_config.max_num_seqs = setup.max_num_seqs
    config.scheduler_config.policy = "priority" if setup.by_priority else "fcfs"
    config.scheduler_config.async_scheduling = setup.is_async and upstream.HAS_ASYNC
    config.scheduler_config.scheduler_reserve_full_isl = setup.reserve_full_isl
    config.parallel_config = copy(base.parallel_config)
    num_stages = setup.depth if not upstream.HAS_ASYNC else setup.num_stages
    config.parallel_config.pipeline_parallel_size = num_stages
    if layout.num_shards > 1:
        config.parallel_config.decode_context_parallel_size = layout.num_shards
    if setup.speculates:
        upstream.speculate(config, setup.speculates, NUM_DRAFTS)
    if setup.remote is not None:
        upstream.connect(config, setup.remote, layout.block_size)
    if setup.pools:
        config.model_config = copy(base.model_config)
        config.model_config.runner_type = "pooling"
    config.kv_events_config = setup.kv_events
    config.cache_config = copy(base.cache_config)
    config.cache_config.num_gpu_blocks = setup.num_blocks
    config.cache_config.block_size = layout.block_size
    config.cache_config.mamba_cache_mode = layout.mamba_cache_mode
    return config, structured_output_manager


def _group_bytes(setup: Setup) -> tuple[int, ...]:
    """Each group but the first needs less than a slot, as far as plans say it. Blocks
    of a pool are whole."""
    num_groups = 1 if setup.member else len(setup.layout.groups)
    return tuple(SLOT_BYTES - i for i in range(num_groups)) if num_groups > 1 else ()


def make_scheduler(
    setup: Setup,
    below: Below | None = None,
    device: Callable[[], DeviceMemory] | None = None,
    opening: Opening | None = None,
) -> Scheduler:
    """A scheduler with a host tier, maybe one below it, and no engine.

    `device` has the memory of its rank, where that comes and goes.
    """
    layout = setup.layout
    config, structured_output_manager = _vllm_config(setup)
    tier = KVTierConfig(
        size_bytes=setup.num_slots * SLOT_BYTES,
        eviction_policy=setup.eviction_policy,
        debug=DebugConfig(
            store_policy=setup.store_policy,  # type: ignore[arg-type]
            store_from_use=setup.store_from_use,
            max_load_stall_ms=1e3 * setup.max_stall,
        ),
        quotas=dict(setup.quotas),
    )
    # Followers are not told of what came from below and was forgotten on its way, which
    # takes more keys in so short a time than engines know.
    max_known = 20 if setup.kv_events is None else 1000
    retention = None
    if setup.retention is not None and layout.can_retain_less:
        retention = setup.retention * layout.block_size
    groups = SimpleNamespace(kv_cache_groups=layout.kv_cache_groups())
    blocks = group_blocks(config, groups)
    kv_cache_config = upstream.kv_cache_config(
        retention,
        num_blocks=setup.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=layout.kv_cache_groups(),
        kv_tier=KVTierLayout(
            tier,
            setup.num_slots,
            SLOT_BYTES,
            open_slots=() if opening is None else tuple(opening.open),
            load_s=setup.load_time,
            tokens_per_block=layout.block_size,
            layerwise=setup.join_time > 0,
            tuning=setup.tuning,
            secondary=None if below is None else _secondary(layout, below, max_known),
            elastic=_elastic(setup, device),
            prefix_ends=prefix_ends(blocks),
            group_bytes=_group_bytes(setup),
            reachable=reachable_blocks(blocks, bool(setup.speculates)),
            can_jump=setup.model_can_jump,
            pool=_pool(setup),
            adapter_files=setup.adapter_files,
        ),
    )
    scheduler = upstream.make_scheduler(
        setup.is_async,
        layout.block_size,
        layout.hash_block_size,
        retention,
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=structured_output_manager,
    )
    scheduler.use_v2_model_runner = setup.is_v2
    upstream.take_images(scheduler)
    return scheduler
