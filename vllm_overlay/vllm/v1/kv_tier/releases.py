# SPDX-License-Identifier: Apache-2.0
"""What some releases of vLLM have and others lack.

No other module of the overlay looks for an attribute, a method or a module of upstream
that may be missing (`tests/tooling/test_house.py` checks it). A release is recognized
by what it has, never by its version. *Since* and *until* name the first and the last
release among those with a series of patches that has something: where a docstring says
"since v0.16.0", v0.11.0 lacks it.

Most of upstream is imported in functions, because settings are checked before the
engine's modules can be imported. What a step asks for each request is bound to a name
when the asking module is imported or its object is made.

v0.9.2 and v0.11.0 are frozen: they keep the host tier, its metrics and its events. What
needs another seam is refused there at start.
"""

import dataclasses
import inspect
import os
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

try:
    from vllm.exceptions import VLLMValidationError as VLLMValidationError
except ImportError:

    class VLLMValidationError(Exception):  # type: ignore[no-redef]
        """Since v0.16.0. Older releases answer any ValueError with status 400."""


# ----------------------------------------------------------------------- settings
def cache_config(vllm_config: Any) -> Any | None:
    """The `CacheConfig` of an engine. None for stand-ins: upstream's own tests start
    engines with settings that lack it, or the fields of patch 0001."""
    cache = getattr(vllm_config, "cache_config", None)
    return cache if hasattr(cache, "kv_offloading_config") else None


def offloading_backend(settings: Any) -> str | None:
    """`--kv-offloading-backend`, of a `VllmConfig` or of parsed arguments. None for
    stand-ins that lack it, as in upstream's own tests."""
    settings = getattr(settings, "cache_config", settings)
    return getattr(settings, "kv_offloading_backend", None)


def is_v1_engine() -> bool:
    """Whether the engine is V1. Until v0.11.0 vLLM has V0 as well."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_USE_V1", True))


def has_hisparse(vllm_config: Any) -> bool:
    """Whether HiSparse is on: `attention_config.hisparse_config`, since v0.30.0."""
    attention = getattr(vllm_config, "attention_config", None)
    return getattr(attention, "hisparse_config", None) is not None


def has_fault_tolerance(parallel_config: Any) -> bool:
    """`--enable-fault-tolerance`, since v0.28.0."""
    return bool(getattr(parallel_config, "enable_fault_tolerance", False))


def prefill_context_ranks(parallel_config: Any) -> int:
    """`--prefill-context-parallel-size`, since v0.16.0."""
    return getattr(parallel_config, "prefill_context_parallel_size", 1)


def decode_context_ranks(parallel_config: Any) -> int:
    """`--decode-context-parallel-size`, since v0.11.0."""
    return getattr(parallel_config, "decode_context_parallel_size", 1)


def num_machines(parallel_config: Any) -> int:
    """`--nnodes`, since v0.16.0. Older releases need Ray for several machines."""
    return getattr(parallel_config, "nnodes", 1)


def uses_v2_model_runner(vllm_config: Any) -> bool:
    """Whether the V2 model runner is used, since v0.25.1."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def has_jump_seam() -> bool:
    """Whether a running request can skip tokens of its prompt: the patches of some
    releases lack it."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return hasattr(KVCacheManager, "jump")


def mamba_cache_mode(cache_config: Any) -> str | None:
    """`--mamba-cache-mode`, since v0.16.0."""
    return getattr(cache_config, "mamba_cache_mode", None)


def may_capture_whole_forward(compilation_config: Any) -> bool:
    """Whether one CUDA graph may hold the forward pass of a step with prefills.

    `cudagraph_mode` says so since v0.11.0. Older releases do not, so there it may.
    """
    mode = getattr(compilation_config, "cudagraph_mode", None)
    return mode is None or mode.mixed_mode().name == "FULL"


def has_micro_batches(parallel_config: Any) -> bool:
    """Whether steps run as micro-batches: `--enable-dbo` since v0.11.0, of which
    `use_ubatching` knows all forms since v0.16.0."""
    return bool(
        getattr(parallel_config, "use_ubatching", False)
        or getattr(parallel_config, "enable_dbo", False)
    )


def calculates_kv_scales(cache_config: Any) -> bool:
    """`--calculate-kv-scales`, until v0.25.1."""
    return bool(getattr(cache_config, "calculate_kv_scales", False))


def weights_name(model_config: Any) -> str:
    """Where the weights of a model come from. Where they are streamed, `model` has only
    the configuration; until v0.11.0 the field is there in that case only."""
    return getattr(model_config, "model_weights", None) or model_config.model


def load_format(load_config: Any) -> str:
    """`--load-format`. In v0.9.2 it is an enumeration."""
    return getattr(load_config.load_format, "value", load_config.load_format)


def draft_load_config(speculative_config: Any) -> Any | None:
    """How the weights of a draft model are loaded, where that has settings of its own;
    since v0.19.1."""
    return getattr(speculative_config, "draft_load_config", None)


def aux_output_config(vllm_config: Any) -> Any | None:
    """Settings of what the model returns besides tokens, since v0.31.0. Older releases
    have them in `ModelConfig`."""
    return getattr(vllm_config, "aux_output_config", None)


def field_values(config: Any) -> dict[str, Any]:
    """Values of a configuration by field; empty if it has no fields.

    A configuration is a dataclass, a pydantic model, a msgspec struct or a
    `SimpleNamespace`, which differs between releases.
    """
    kind = type(config)
    if dataclasses.is_dataclass(config):
        names: Iterable[str] = [field.name for field in dataclasses.fields(config)]
        # v0.11.0 and v0.9.2 set it without declaring it.
        if "hf_config" not in names and hasattr(config, "hf_config"):
            names = [*names, "hf_config"]
    elif isinstance(config, types.SimpleNamespace):
        names = vars(config)
    else:
        names = (
            getattr(kind, "__struct_fields__", None)
            or getattr(kind, "model_fields", None)
            or ()
        )
    return {name: getattr(config, name, None) for name in names}


def changed_fields(config: Any, but: Collection[str]) -> Iterator[str]:
    """Names of fields of a dataclass, set at its construction, without the default.

    Those of `but` are left out, and no default is made for them: those of some
    configurations log what they would do.
    """
    for field in dataclasses.fields(config):
        if not field.init or field.name in but:
            continue
        if getattr(config, field.name) != _default(field):
            yield field.name


def _default(field: "dataclasses.Field[Any]") -> Any:
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    # pydantic's `FieldInfo`, in some configurations since v0.11.0.
    factory = getattr(default, "default_factory", None)
    return factory() if factory is not None else getattr(default, "default", default)


def as_dict(config: Any) -> Any | None:
    """A configuration of the transformers library as a dictionary. None for others."""
    return config.to_dict() if hasattr(config, "to_dict") else None


def digest_of(config: Any) -> str | None:
    """The digest that an object of vLLM gives of itself. None if it gives none."""
    return str(config.compute_hash()) if hasattr(config, "compute_hash") else None


# -------------------------------------------------------- executors and schedulers
def is_ray_v2_off() -> bool:
    """Whether the environment keeps Ray from running the multi-process executor, in
    releases that let it choose: v0.25.1 to v0.32.0."""
    from vllm import envs

    return not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)


def step_methods(executor: type) -> list[Any]:
    """Methods of an executor class through which the results of a step come.
    `sample_tokens`, since v0.16.0, is None where it lacks."""
    names = ("execute_model", "sample_tokens", "collective_rpc")
    return [getattr(executor, name, None) for name in names]


def tier_of(scheduler: Any) -> Any | None:
    """The pool with a host tier of a scheduler. None: it has no tier, or it is a
    stand-in or class of its own, which need not have upstream's manager."""
    manager = getattr(scheduler, "kv_cache_manager", None)
    return getattr(manager, "kv_tier", None)


def is_paused(scheduler: Any) -> bool:
    """Whether a scheduler is paused: `pause_state`, since v0.19.1."""
    return bool(getattr(scheduler, "pause_state", 0))


def forget_last_step(scheduler: Any) -> None:
    """Let a scheduler not take requests for those of the step before:
    `prev_step_scheduled_req_ids`, since v0.16.0."""
    getattr(scheduler, "prev_step_scheduled_req_ids", set()).clear()


# ------------------------------------------------------------------------ requests
def status_between_inputs() -> Any | None:
    """Status of a request whose prompt comes in parts, between two of them. Since
    v0.16.0; equal to no status before."""
    from vllm.v1.request import RequestStatus

    return getattr(RequestStatus, "WAITING_FOR_STREAMING_REQ", None)


def connector_has_failed(model_runner_output: Any) -> bool:
    """Whether a KV connector left blocks of a step without their content. False where
    a release does not report that."""
    output = getattr(model_runner_output, "kv_connector_output", None)
    return bool(getattr(output, "invalid_block_ids", None))


def failed_status() -> Any:
    """Status of a request that ends with an error of the engine. Since v0.16.0; before,
    it ends as if its client had aborted it."""
    from vllm.v1.request import RequestStatus

    return getattr(RequestStatus, "FINISHED_ERROR", RequestStatus.FINISHED_ABORTED)


def drop_output_in_flight(request: Any) -> None:
    """Let a request that starts over ignore what earlier steps compute for it.

    Since v0.28.0 upstream counts such tokens. In older releases the scheduler skips the
    output of void steps (`take_report`), and what they have reserved is taken back:
    placeholders since v0.11.0, and with them a flag in v0.16.0 and v0.19.1, or a number
    in v0.25.1.
    """
    if hasattr(request, "num_stale_output_tokens"):
        request.drop_stale_output = request.num_stale_output_tokens > 0
        return
    if hasattr(request, "num_output_placeholders"):
        request.num_output_placeholders = 0
    if hasattr(request, "discard_latest_async_tokens"):
        request.discard_latest_async_tokens = False
    if hasattr(request, "async_tokens_to_discard"):
        request.async_tokens_to_discard = 0


def count_prompt_as_computed(request: Any) -> None:
    """Take back that tokens of a prompt were served from a cache, if it starts over
    before its first token.

    Upstream counts them when a request is scheduled first, and not again: in
    `prefill_stats` since v0.25.1, in `num_cached_tokens`, if it is below zero, until
    v0.19.1.
    """
    stats = getattr(request, "prefill_stats", None)
    if stats is not None and stats.num_prompt_tokens:
        stats.set(stats.num_prompt_tokens, 0, 0)
    elif getattr(request, "num_cached_tokens", 0) > 0 and not request.num_output_tokens:
        request.num_cached_tokens = -1


def kv_transfer_params(request: Any) -> dict[str, Any] | None:
    """What a client says of a request's KV. Stand-ins in upstream's tests lack it."""
    return getattr(request, "kv_transfer_params", None)


def scores_prompt(params: Any) -> bool:
    """Whether sampling parameters ask for logprobs of a prompt: `prompt_logprobs`, or
    `prompt_logprob_token_ids` since v0.31.0."""
    ids = getattr(params, "prompt_logprob_token_ids", None)
    return ids is not None or getattr(params, "prompt_logprobs", None) is not None


def token_id_mask(request: "Request") -> Any | None:
    """Which positions of a prompt with embeddings are token ids, since v0.25.1."""
    return getattr(request, "prompt_is_token_ids", None)


def block_hasher(request: "Request") -> Any | None:
    """The function that hashes blocks of a request, the same for all of an engine.

    In `_block_hasher` since v0.16.0; until v0.11.0 bound in a partial.
    """
    hasher = getattr(request, "_block_hasher", None)
    if hasher is None:
        bound = getattr(request, "get_hash_new_full_blocks", None)
        hasher = getattr(bound, "func", None)
    return hasher


def fields_of_adapter(lora: "LoRARequest") -> dict[str, Any]:
    """All that a request for an adapter says. Releases have other fields."""
    return {name: getattr(lora, name) for name in type(lora).__struct_fields__}


def reloads_in_place(lora: "LoRARequest") -> bool:
    """Whether workers load an adapter even if they have it: `load_inplace`, since
    v0.16.0."""
    return getattr(lora, "load_inplace", False)


# --------------------------------------------------------- KV cache and block pool
def pool_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `BlockPool` by name. Releases do not agree on their order."""
    from vllm.v1.core.block_pool import BlockPool

    return inspect.signature(BlockPool).bind(*args, **kwargs).arguments


def has_block_metrics(pool: Any) -> bool:
    """Whether a pool tells a collector of each eviction, since v0.16.0."""
    return getattr(pool, "metrics_collector", None) is not None


def device_medium(pool: Any, default: str) -> str:
    """What KV events call device memory: `BlockPool.medium`, since v0.30.0."""
    return getattr(pool, "medium", default)


def describes_hits() -> bool:
    """Whether upstream can describe blocks in KV events that it has not computed:
    `BlockPool.emit_cached_block_events`, since v0.28.0."""
    from vllm.v1.core.block_pool import BlockPool

    return hasattr(BlockPool, "emit_cached_block_events")


def event_group(event: Any) -> int:
    """The KV cache group of a `BlockStored`: `group_idx`, since v0.25.1."""
    return getattr(event, "group_idx", None) or 0


def num_replayed_batches(publisher: Any) -> int:
    """Batches of KV events that a publisher keeps for replays. Only that for ZMQ has
    them; 0 for the others."""
    kept = getattr(publisher, "_buffer", None)
    return getattr(kept, "maxlen", None) or 0


def random_block_hash(block_hash: Any) -> Any:
    """A hash that no other block has, of the kind of `block_hash`.

    All bytes are random, since KV events contain only the last ones. In v0.9.2 a hash
    is a tuple with a number and the block's tokens.
    """
    if isinstance(block_hash, tuple):
        number = int.from_bytes(os.urandom(8), "big") >> 1
        return block_hash._replace(hash_value=number)  # type: ignore[attr-defined]
    return os.urandom(32)


def keys_are_bytes() -> bool:
    """Whether blocks have keys that are the same in every process: since v0.11.0,
    where `BlockHash` is a new type of bytes."""
    from vllm.v1.core import kv_cache_utils

    kind: Any = kv_cache_utils.BlockHash
    return issubclass(getattr(kind, "__supertype__", kind), bytes)


def none_hash_seed_of() -> Callable[[Any], str] | None:
    """The function that gives the seed of NONE_HASH for a hash function, since v0.30.0.
    None: it is PYTHONHASHSEED, or random."""
    from vllm.v1.core import kv_cache_utils

    return getattr(kv_cache_utils, "resolve_none_hash_seed", None)


def num_token_shares(parallel_config: Any) -> int:
    """Ranks that have their share of a block's tokens each.

    With context parallelism a block stands for as many more tokens. Since v0.25.1,
    which resolves block sizes in one place, only decode shares them.
    """
    from vllm.v1.core import kv_cache_utils

    num_shares = decode_context_ranks(parallel_config)
    if not hasattr(kv_cache_utils, "resolve_kv_cache_block_sizes"):
        num_shares *= prefill_context_ranks(parallel_config)
    return num_shares


def are_tokens_shared(spec: Any) -> bool:
    """Whether decode context parallelism splits the blocks of a `KVCacheSpec`. Since
    v0.31.0 there are layers that stay whole (`dcp_sharded`)."""
    return getattr(spec, "dcp_sharded", True)


def is_prefix_cacheable(spec: Any) -> bool:
    """Whether blocks of a `KVCacheSpec` are hashed: `prefix_cacheable`, since v0.30.0.
    Some hold what is of use to one request only."""
    return getattr(spec, "prefix_cacheable", True)


def spec_of_layer(spec: Any) -> Any:
    """A `KVCacheSpec`, or that of one layer where the layers of a group have a spec
    each (`UniformTypeKVCacheSpecs`, since v0.11.0)."""
    each = getattr(spec, "kv_cache_specs", None)
    return next(iter(each.values())) if each else spec


def spec_of_named(spec: Any, layer: str) -> Any:
    """The spec of one layer of a group with `spec`, see `spec_of_layer`. A layer that
    shares the KV of another one has none of its own: the largest."""
    each = getattr(spec, "kv_cache_specs", None)
    if not each:
        return spec
    return each.get(layer) or max(each.values(), key=lambda s: s.page_size_bytes)


def groups_of_rank(model_runner: Any) -> list[Any]:
    """KV cache groups of a rank. Stand-ins of tests have none."""
    config = getattr(model_runner, "kv_cache_config", None)
    return [] if config is None else config.kv_cache_groups


def num_retained_tokens(spec: Any) -> int:
    """Tokens that a sliding window keeps beyond its length, since v0.28.0."""
    return getattr(spec, "extra_retained_tokens", 0)


def is_chunked_attention(spec: Any) -> bool:
    """Whether a `KVCacheSpec` is of chunked local attention. Since v0.11.0 it has a
    class of its own."""
    from vllm.v1 import kv_cache_interface

    kind = getattr(kv_cache_interface, "ChunkedLocalAttentionSpec", None)
    return kind is not None and isinstance(spec, kind)


def is_latent(spec: Any) -> bool:
    """Whether a `KVCacheSpec` is of MLA. In v0.9.2 specs of full attention have a flag;
    later there is a class of its own."""
    return getattr(spec, "use_mla", "MLA" in type(spec).__name__)


def kv_replicas(kv_cache_config: Any) -> int | None:
    """Tensor parallel ranks that hold the same KV: `kv_tp_replicas`, since v0.31.0.
    None where it is not known."""
    return getattr(kv_cache_config, "kv_tp_replicas", None)


# -------------------------------------------------------------------- model runner
def copies_blocks(scheduler_output: Any) -> bool:
    """Whether a step copies KV blocks before the forward pass, since v0.28.0."""
    return bool(getattr(scheduler_output, "kv_cache_block_copies", None))


def kv_caches_of(layer: Any) -> Any:
    """The KV cache of a layer in the forward context: a tensor, or tensors nested in
    sequences; empty for layers without one, like mixtures of experts."""
    return getattr(layer, "kv_cache", ())


def attention_backend(layer: Any) -> Any | None:
    """What computes an attention layer (`impl`). None: it is no attention layer."""
    return getattr(layer, "impl", None)


def num_head_replicas(module: Any) -> int | None:
    """Consecutive ranks for which a projection computes the same heads of keys and
    values. None: the module is no such projection."""
    return getattr(module, "num_kv_head_replicas", None)


def weight_sources(model_runner: Any) -> list[tuple[str, str]]:
    """Repositories, and folders in them, that models of a rank name as sources of more
    weights (`secondary_weights`).

    A draft model is in `drafter`, or `speculator` since v0.16.0; sources have a
    `subfolder` since v0.19.1. Few models name sources.
    """
    names = ("drafter", "speculator")
    runners = [model_runner, *(getattr(model_runner, name, None) for name in names)]
    models = [getattr(runner, "model", None) for runner in runners]
    return [
        (source.model_or_path, getattr(source, "subfolder", None) or "")
        for model in models
        for source in getattr(model, "secondary_weights", None) or ()
    ]
