# SPDX-License-Identifier: Apache-2.0
"""Upstream as the simulator calls it. What releases do not share is here only.

Nothing asks for a version: each helper looks at what the release at hand has.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from inspect import Parameter, getsource
from typing import Any, get_args

import torch

from vllm.config import KVTransferConfig, ParallelConfig, SpeculativeConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.pooling_params import PoolingParams
from vllm.v1 import kv_cache_interface
from vllm.v1.core import single_type_kv_cache_manager
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_request_block_hasher,
)
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

try:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
except ImportError:
    # The first releases have other requests.
    MultiModalFeatureSpec = PlaceholderRange = None  # type: ignore[assignment, misc]
try:
    from vllm.v1.outputs import DraftTokenIds
except ImportError:
    DraftTokenIds = None  # type: ignore[assignment, misc]
try:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
except ModuleNotFoundError:
    AsyncScheduler = None  # type: ignore[assignment, misc]
try:
    from vllm.config.cache import MambaCacheMode
except ImportError:
    MambaCacheMode = None  # type: ignore[assignment, misc]
try:
    from vllm.model_executor.layers.mamba.checkpoint import (
        compute_mamba_prefill_checkpoints as compute_mamba_prefill_checkpoints,
    )
except ModuleNotFoundError:
    compute_mamba_prefill_checkpoints = None  # type: ignore[assignment]


signature = cache(inspect.signature)
"""Of what does not change while tests run: helpers ask for it in each step."""


def _has(cls: Any, name: str) -> bool:
    return name in {field.name for field in fields(cls)}


HASHES_LOOKAHEAD = (
    "num_hash_lookahead_tokens" in signature(get_request_block_hasher).parameters
)
"""Whether keys have the token behind a block, where EAGLE needs it."""

HAS_ASYNC = AsyncScheduler is not None
"""Steps are scheduled before the tokens of the last one are there. Older releases have
several in flight in pipelines only, so there one more stage stands for it."""
HAS_PREFILL_CHECKPOINTS = (
    _has(MambaSpec, "num_prefill_checkpoint_blocks")
    and compute_mamba_prefill_checkpoints is not None
)
"""Some releases have the field and not yet the function that fills it."""
HAS_PARTIAL_HITS = (
    "replace_existing_hashes"
    in signature(getattr(BlockPool, "cache_partial_block", BlockPool)).parameters
)
"""Hits end inside blocks, which are copied before the request writes to them. The
first releases that have them leave the keys of a state that a request overwrites."""
COUNTS_IN_FLIGHT = "num_in_flight_tokens" in getsource(Request.__init__)
HAS_GROUPS_OF_BLOCK_SIZES = "hash_block_size" in signature(Scheduler).parameters
"""Hashes are finer than the blocks that are scheduled."""
HAS_SEVERAL_BLOCK_SIZES = (
    "hash_block_size" in signature(KVCacheCoordinator.__init__).parameters
)
"""Groups of one model may differ in their block size, or have different kinds of full
attention."""
HAS_ADMISSION_CAP = hasattr(SlidingWindowSpec, "max_admission_blocks_per_request")
"""A request is admitted when what its windows reach fits, not all of it."""
HAS_STATES = hasattr(
    single_type_kv_cache_manager.SingleTypeKVCacheManager, "new_step_starts"
)
"""States of a prefix are cached (`align`), and rightly so: older releases share a
state in the step that computes it, and get that of resumed requests wrong. Their
series refuses such models."""
HAS_ALL_STATES = HAS_STATES and "all" in get_args(MambaCacheMode)
SlidingWindowMLASpec: Any = getattr(kv_cache_interface, "SlidingWindowMLASpec", None)
HAS_MLA_WINDOWS = SlidingWindowMLASpec is not None
ChunkedLocalAttentionSpec: Any = getattr(
    kv_cache_interface, "ChunkedLocalAttentionSpec", None
)
HAS_CHUNKS = ChunkedLocalAttentionSpec is not None

KNOWS_ALL_FEATURES = (
    HAS_PARTIAL_HITS
    and HAS_SEVERAL_BLOCK_SIZES
    and HAS_MLA_WINDOWS
    and HAS_CHUNKS
    and _has(FullAttentionSpec, "dcp_sharded")
    and None not in (MultiModalFeatureSpec, DraftTokenIds)
)
"""Whether the release has all that `tests/pairs/features.py` lists and the simulator
draws."""

STREAMS = "resumable" in signature(Request).parameters
"""Whether a request may wait for more input."""
EVENTS_TELL_GROUPS = "group_idx" in BlockRemoved.__struct_fields__
"""Older releases have one group only where KV cache events are on."""

EVENTS_NAME_ADAPTERS = "lora_name" in BlockStored.__struct_fields__
"""Older releases give their number only."""

RESETS_RUNNING_REQUESTS = (
    "reset_running_requests" in signature(Scheduler.reset_prefix_cache).parameters
)
"""The cache can be reset while requests run, which then start over."""
RESETS_STEPS_IN_FLIGHT = (
    "drop_stale_output" in signature(Scheduler._preempt_request).parameters
)
"""Running requests can start over while a step is in flight. Older releases then lose
or repeat a token, tier or not."""
PREEMPTS_IN_PIPELINES = RESETS_STEPS_IN_FLIGHT
"""A request can be preempted with more steps in flight than asynchronous scheduling
has. The same releases lose or repeat tokens there, too."""

ERROR = getattr(FinishReason, "ERROR", FinishReason.ABORT)
"""How a request ends that can no longer be computed; older releases call it aborted."""

IMAGE_TOKENS = 6
_HASH_BYTES = 32
_RETENTION = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


def heads(head_size: int, use_mla: bool = False) -> dict[str, Any]:
    """What specs of attention have beside block sizes and windows."""
    values = {"num_kv_heads": 1, "head_size": head_size, "dtype": torch.float32}
    if _has(SlidingWindowSpec, "use_mla"):
        values["use_mla"] = use_mla
    return values


def mla_spec(block_size: int) -> Any:
    # Not all releases have a class for it.
    cls = getattr(kv_cache_interface, "MLAAttentionSpec", FullAttentionSpec)
    return cls(block_size=block_size, **heads(1, use_mla=True))


def mamba_spec(block_size: int, has_checkpoints: bool, mode: str) -> MambaSpec:
    """A state of one value for each prefix."""
    options: dict[str, Any] = {"mamba_cache_mode": mode} if HAS_STATES else {}
    if has_checkpoints and HAS_PREFILL_CHECKPOINTS:
        options["num_prefill_checkpoint_blocks"] = 1
        options["prefill_checkpoint_alignment"] = 1
    if _has(MambaSpec, "dtypes"):
        options["dtypes"] = (torch.float32,)
    else:
        options["dtype"] = torch.float32
    return MambaSpec(block_size=block_size, shapes=((1,),), **options)


def num_checkpoint_blocks(spec: MambaSpec) -> int:
    return getattr(spec, "num_prefill_checkpoint_blocks", 0)


def prefill_checkpoint(
    spec: MambaSpec, start: int, end: int, hash_block_size: int, hit_alignment: int
) -> tuple[int, int]:
    """Where a chunk of a prompt leaves a state inside it: tokens from `start`, and the
    column of the block table; -1 where it does not."""
    options: dict[str, Any] = {
        "hash_block_size": hash_block_size,
        "mamba_block_size": spec.block_size,
        "checkpoint_alignment": spec.prefill_checkpoint_alignment,
        "drop_eagle_block": False,
    }
    name = "cache_hit_alignment_tokens"
    if name in signature(compute_mamba_prefill_checkpoints).parameters:
        options[name] = hit_alignment
    [offset], [index] = compute_mamba_prefill_checkpoints(
        [end], [end - start], **options
    )
    return offset, index


def register_specs(vllm_config: Any) -> None:
    """What an engine does before it makes a scheduler."""
    register = getattr(single_type_kv_cache_manager, "register_all_kvcache_specs", None)
    if register is not None:
        register(vllm_config)


def make_request(**values: Any) -> Request:
    known = signature(Request).parameters
    if "eos_token_id" in known:
        values["eos_token_id"] = None
    for name in known:
        if name.startswith("multi_modal_"):
            values.setdefault(name, None)
    return Request(**values)


def pooling_params() -> Any:
    """Of a request that reads what is cached, as one for an embedding does."""
    return PoolingParams(task="embed", skip_reading_prefix_cache=False)


def kv_cache_config(retention: int | None, **values: Any) -> KVCacheConfig:
    """`retention`: tokens, as `make_scheduler` takes it too."""
    if _has(KVCacheConfig, "prefix_cache_retention_interval"):
        values["prefix_cache_retention_interval"] = retention
    return KVCacheConfig(**values)


def make_scheduler(
    is_async: bool,
    block_size: int,
    hash_block_size: int,
    retention: int | None,
    **values: Any,
) -> Scheduler:
    """A scheduler.

    Args:
        is_async: It runs a step ahead of the model.
        block_size: What is scheduled, a multiple of the block size of every group.
        hash_block_size: Tokens of a hash.
        retention: Tokens of which windows and states keep one tail.
        **values: As `Scheduler` takes them.

    """
    known = signature(Scheduler).parameters
    if HAS_GROUPS_OF_BLOCK_SIZES:
        values |= {"block_size": block_size, "hash_block_size": hash_block_size}
    elif "block_size" in known:
        values["block_size"] = hash_block_size
    cls = AsyncScheduler if is_async and HAS_ASYNC else Scheduler
    with _retention(retention):
        return cls(**values)


def take_drafts(scheduler: Scheduler, drafts: dict[str, list[int]]) -> None:
    """Hand the guesses of a step to the scheduler, but for requests that began anew
    meanwhile."""
    requests = scheduler.requests
    drafts = {
        req_id: tokens
        for req_id, tokens in drafts.items()
        if (request := requests.get(req_id)) and not request.num_in_flight_tokens
    }
    scheduler.update_draft_token_ids(DraftTokenIds([*drafts], [*drafts.values()]))


def deferred_blocks(scheduler: Scheduler) -> list[int]:
    """Blocks that are free once the steps in flight are over."""
    deferred = getattr(scheduler, "deferred_frees", ())
    return [block.block_id for _, blocks in deferred for block in blocks]


def take_images(scheduler: Scheduler) -> None:
    """Room for the outputs of encoders, which the model of the simulator has not."""
    scheduler.max_num_encoder_input_tokens = IMAGE_TOKENS
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=8 * IMAGE_TOKENS)


def image(number: int, num_tokens: int) -> Any:
    """The first tokens of a prompt stand for it."""
    place = PlaceholderRange(offset=0, length=num_tokens)
    return MultiModalFeatureSpec(None, "image", f"image {number}", place)


@contextmanager
def _retention(retention: int | None) -> Iterator[None]:
    """Some releases take the setting from the environment."""
    if retention is not None:
        os.environ[_RETENTION] = str(retention)
    try:
        yield
    finally:
        os.environ.pop(_RETENTION, None)


def last_hash(block_hash: BlockHash) -> BlockHash:
    """Of a block: some releases join the hashes of its parts, others take the last."""
    if not isinstance(block_hash, bytes):
        # The first releases have the tokens beside the hash.
        return block_hash
    return BlockHash(block_hash[-_HASH_BYTES:])


def cached_blocks(
    pool: BlockPool,
) -> Iterator[tuple[BlockHashWithGroupId, list[KVCacheBlock]]]:
    """What `pool` finds by each key."""
    cached: Any = pool.cached_block_hash_to_block
    for key, found in getattr(cached, "_cache", cached).items():
        yield key, [found] if isinstance(found, KVCacheBlock) else [*found.values()]


def detach(new: NewRequestData) -> None:
    """Copy the scheduler's own list, as a message to a worker would."""
    if getattr(new, "prefill_token_ids", None) is not None:
        new.prefill_token_ids = new.prefill_token_ids.copy()  # type: ignore[union-attr]


def prefill_tokens(new: NewRequestData) -> list[int]:
    tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
    if tokens is None:
        assert new.prompt_embeds is not None
        return [0] * len(new.prompt_embeds)
    return tokens


def drafts(output: SchedulerOutput, req_id: str) -> list[int]:
    """The guesses that a step is to check for a request."""
    return list(output.scheduled_spec_decode_tokens.get(req_id, ()))


def remote_loads(output: SchedulerOutput) -> list[Any]:
    """What the KV connector of `remote` is to load in a step."""
    return getattr(output.kv_connector_metadata, "loads", [])


def connect(config: Any, seed: int, alignment: int) -> None:
    """Have the scheduler of `config` ask the KV connector of `remote`."""
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="Remote",
        kv_connector_module_path="tests.sim.remote",
        kv_role="kv_both",
        kv_connector_extra_config={"seed": seed, "alignment": alignment},
    )


def speculate(config: Any, method: str, num_tokens: int) -> None:
    """Have the scheduler of `config` take guesses of a model."""
    config.speculative_config = SpeculativeConfig(
        method="ngram",
        prompt_lookup_max=3,
        num_speculative_tokens=num_tokens,
        target_model_config=config.model_config,
        target_parallel_config=ParallelConfig(),
    )
    # Another method wants the files of a model.
    config.speculative_config.method = method


def resumed_tokens(cached: CachedRequestData, req_id: str) -> list[int] | None:
    """All tokens of a request that starts over, None if it goes on."""
    # Some releases have tokens of others there, too; the first of resumed ones only.
    if req_id in getattr(cached, "resumed_req_ids", cached.all_token_ids):
        return cached.all_token_ids[req_id]
    return None


def empty_step() -> SchedulerOutput:
    """What the scheduler sends when nothing runs."""
    if hasattr(SchedulerOutput, "make_empty"):
        return SchedulerOutput.make_empty()
    values: dict[str, Any] = {
        "scheduled_cached_reqs": CachedRequestData.make_empty(),
        "total_num_scheduled_tokens": 0,
        "finished_req_ids": set(),
        "grammar_bitmask": None,
    }
    for name in signature(SchedulerOutput).parameters:
        if name.endswith(("reqs", "blocks", "hashes")):
            values.setdefault(name, [])
        elif not name.endswith(("metadata", "plan")):
            values.setdefault(name, {})
    return SchedulerOutput(**values)


def model_runner_output(req_ids: list[str]) -> ModelRunnerOutput:
    """Of a step whose tokens are not there yet."""
    values: dict[str, Any] = {
        name: None
        for name, parameter in signature(ModelRunnerOutput).parameters.items()
        if parameter.default is Parameter.empty
    }
    if "prompt_logprobs_dict" in values:
        values["prompt_logprobs_dict"] = {}
    values["req_ids"] = req_ids
    values["req_id_to_index"] = {req_id: i for i, req_id in enumerate(req_ids)}
    return ModelRunnerOutput(**values)


def blocks_to_zero(output: SchedulerOutput) -> list[int]:
    return getattr(output, "new_block_ids_to_zero", None) or []


def block_copies(output: SchedulerOutput) -> list[tuple[int, int]]:
    """(source, target) of copies on write."""
    copies = getattr(output, "kv_cache_block_copies", None) or ()
    return [(copy.src_block_id, copy.dst_block_id) for copy in copies]
