# SPDX-License-Identifier: Apache-2.0
"""What the tier does not work with: everything is refused here, before anything is
allocated.
"""

import inspect
import pkgutil
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import FunctionType
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.layout import BACKEND
from vllm.v1.kv_tier.stores.settings import SECONDARY_TIERS as _FLAG

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.abstract import Executor


def takes_plans(scheduler: type) -> bool:
    """Whether the steps of a scheduler class carry the tier's plan.

    Judged by names in its code: `schedule` takes the plan, or calls the `schedule` of a
    base class that does, or of another object. Compiled code cannot be read, and is
    accepted.
    """
    for base in scheduler.__mro__:
        schedule = vars(base).get("schedule")
        if schedule is None or "schedule" in _abstract_methods(base):
            continue
        schedule = inspect.unwrap(schedule)
        if not inspect.isfunction(schedule):
            return True
        names = set(_names_in(schedule, scheduler, set()))
        if "take_plan" in names:
            return True
        if "schedule" not in names:
            return False
    return True


def _abstract_methods(kind: type) -> frozenset[str]:
    return kind.__abstractmethods__ if isinstance(kind, ABCMeta) else frozenset()


def _names_in(
    function: FunctionType, owner: type, seen: set[FunctionType]
) -> Iterator[str]:
    """Attributes and globals that a function uses.

    Includes those of functions that it closes over (as decorators do), and of methods
    of `owner` that it names.
    """
    seen.add(function)
    codes, names = [function.__code__], set[str]()
    for code in codes:
        names |= set(code.co_names)
        codes += [const for const in code.co_consts if inspect.iscode(const)]
    yield from names
    called = [cell.cell_contents for cell in function.__closure__ or ()]
    methods = dict(inspect.getmembers(owner, inspect.isfunction))
    called += [methods.get(name) for name in names - {"schedule"}]
    for other in called:
        if inspect.isfunction(other) and other not in seen:
            yield from _names_in(other, owner, seen)


def offloading_claim(transfer: Any) -> str | None:
    """Name of a configured connector that offloads to host memory, if any.

    Args:
        transfer: Upstream's `KVTransferConfig`.

    """
    names = [transfer.kv_connector]
    extra = transfer.kv_connector_extra_config or {}
    names += [c.get("kv_connector") for c in extra.get("connectors", [])]
    for name in names:
        if name and ("Offload" in name or "LMCache" in name):
            return name
    return None


_RAY_V2 = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


def refused_executor(vllm_config: "VllmConfig") -> str | None:
    """Why the tier cannot run with the configured executor; None if it can.

    The text, with the fix, ends a sentence that names the setting.

    Args:
        vllm_config: Settings of the engine, checked by upstream.

    """
    executor = vllm_config.parallel_config.distributed_executor_backend
    if executor in (None, "mp", "uni"):
        return None
    if executor == "ray":
        from vllm.platforms import current_platform

        # Upstream raises only when its workers start, without the name of the setting.
        if not current_platform.ray_device_key:
            return (
                f"{executor}: upstream has no Ray executor for "
                f"{current_platform.device_name or current_platform.device_type}. "
                "Use mp."
            )
    from vllm.v1.executor.abstract import Executor

    if _merges_reports(Executor.get_class(vllm_config)):
        return None
    if executor == "ray" and releases.is_ray_v2_off():
        return (
            f"{executor} and {_RAY_V2}=0: the scheduler of that executor would not see "
            f"a copy that failed on one rank. Set {_RAY_V2}=1, or use mp."
        )
    return (
        f"{executor}: a failed copy on one rank would not be seen by the scheduler. "
        "Use mp (or uni on one device)."
    )


def _merges_reports(executor: type["Executor"]) -> bool:
    """Whether steps pass upstream's code that merges the reports of all ranks.

    That is in its multi-process executor, and its Ray executor inherits it. An executor
    with its own methods would silently lose reports.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return releases.step_methods(executor) == releases.step_methods(MultiprocExecutor)


# Outputs for sampled tokens only, which are in no prefix hit.
_HARMLESS_OUTPUTS = frozenset({"return_sampling_mask"})

# Fields of `VllmConfig` in all releases that add nothing per block, or only KV that the
# tier finds among the KV caches, or that are refused elsewhere.
_HARMLESS_CONFIGS = frozenset(
    {
        "additional_config",
        "attention_config",
        "cache_config",
        "compilation_config",
        "decoding_config",
        "device_config",
        "diffusion_config",
        "ec_manager_config",
        "ec_transfer_config",
        "engram_config",
        "instance_id",
        "kernel_config",
        "kv_events_config",
        "kv_transfer_config",
        "load_config",
        "logging_config",
        "lora_config",
        "mamba_config",
        "model_config",
        "observability_config",
        "offload_config",
        "optimization_level",
        "parallel_config",
        "performance_mode",
        "profiler_config",
        "prompt_adapter_config",
        "quant_config",
        "reasoning_config",
        "scheduler_config",
        "shutdown_timeout",
        "speculative_config",
        "structured_outputs_config",
        "watchdog_config",
        "watermark_config",
        "weight_transfer_config",
    }
)


def check_side_objects(vllm_config: "VllmConfig") -> None:
    """Refuse settings that keep more for each block than its KV.

    Raises:
        ValueError: The message names the setting.

    """
    if (setting := side_objects(vllm_config)) is not None:
        raise ValueError(
            f"--kv-offloading-backend core is not supported with {setting}: upstream "
            "keeps what it returns for as many blocks as the device has, and a block "
            "that comes back from the host comes without. Remove one of them."
        )


def side_objects(vllm_config: "VllmConfig") -> str | None:
    """The setting that keeps objects for each block, or might; None if none does."""
    return next(_settings(vllm_config), None)


def _settings(vllm_config: "VllmConfig") -> Iterator[str]:
    # In older releases these outputs are settings of the model.
    model: Any = vllm_config.model_config
    for name, value in releases.field_values(model).items():
        is_output = name.startswith(("return_", "enable_return_"))
        if is_output and name not in _HARMLESS_OUTPUTS and value:
            yield f"--{name.replace('_', '-')}"
    outputs = releases.aux_output_config(vllm_config)
    for name, value in releases.field_values(outputs).items():
        # Other settings say how, not whether.
        if value is True:
            yield f"--aux-output-config {name}"
    known = {*_HARMLESS_CONFIGS, "aux_output_config"}
    for name in releases.changed_fields(vllm_config, known):
        yield f"{name}, which the tier does not know"


def check_secondary_tiers(vllm_config: "VllmConfig") -> None:
    """Refuse an engine that does not support secondary tiers.

    Raises:
        ValueError: The message says what to change.

    """
    if not releases.keys_are_bytes():
        raise ValueError(
            f"{_FLAG} is not supported with this release of vLLM, whose block hashes "
            "are valid in one process only. Remove secondary_tiers."
        )
    _check_events(vllm_config, _FLAG)


def _check_events(vllm_config: "VllmConfig", feature: str) -> None:
    """Refuse KV events where other engines' blocks cannot be described."""
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return
    if not releases.describes_hits():
        raise ValueError(
            f"{feature} is not supported with KV events (--kv-events-config) in this "
            "release of vLLM, which describes only blocks that it has computed. Remove "
            "one of the two."
        )


def check_elastic_memory(vllm_config: "VllmConfig") -> None:
    """Refuse settings that `shrink_after_s` does not support.

    Args:
        vllm_config: Settings of the engine.

    Raises:
        ValueError: The message has the fix.

    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    setting = "--kv-offloading-config: shrink_after_s"
    if not current_platform.is_cuda():
        raise ValueError(
            f"{setting} works on CPUs and on CUDA, not on "
            f"{current_platform.device_name or current_platform.device_type}. "
            "Remove shrink_after_s."
        )
    if find_spec("kvcached") is None:
        raise ValueError(
            f"{setting} needs kvcached on a GPU, which is not installed. Install it "
            "(pip install kvcached --no-build-isolation), or remove shrink_after_s."
        )
    parallel = vllm_config.parallel_config
    executor = parallel.distributed_executor_backend
    if parallel.world_size > 1 or executor not in (None, "uni"):
        raise ValueError(
            f"{setting} on a GPU is for engines with one rank, in the process of the "
            f"scheduler, not for {parallel.world_size} with "
            f"--distributed-executor-backend {executor}. Run one engine for each GPU, "
            "with --distributed-executor-backend uni, or remove shrink_after_s."
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise ValueError(
            f"{setting} and --enable-sleep-mode both release the memory of the KV "
            "cache. Remove one of them."
        )
    if (transfer := vllm_config.kv_transfer_config) is not None:
        raise ValueError(
            f"{setting} on a GPU and --kv-transfer-config "
            f"kv_connector={transfer.kv_connector!r} cannot be combined: connectors "
            "register the memory of the KV cache once. Remove one of them."
        )


def check_pool(vllm_config: "VllmConfig", settings: Mapping[str, bool]) -> None:
    """Refuse an engine that has not been run with a pool.

    Args:
        vllm_config: Settings of the engine.
        settings: Which of the tier are on.

    Raises:
        ValueError: The message says what to change.

    """
    if not releases.keys_are_bytes():
        raise ValueError(
            "--kv-offloading-config: pool is not supported with this release of vLLM, "
            "whose block hashes are valid in one process only. Remove pool."
        )
    _check_events(vllm_config, "--kv-offloading-config: pool")
    parallel = vllm_config.parallel_config
    on = {
        "ranks on several machines": releases.num_machines(parallel) > 1,
        "--distributed-executor-backend ray": parallel.use_ray,
        "--decode-context-parallel-size": releases.decode_context_ranks(parallel) > 1,
        **settings,
    }
    if found := [name for name, is_on in on.items() if is_on]:
        raise ValueError(
            "--kv-offloading-config: pool has not been run with secondary tiers of "
            "several ranks, ranks on several machines, Ray, decode context "
            "parallelism, share_replicas or shrink_after_s. Remove "
            f"{' and '.join(found)}, or pool."
        )


def check_engine(
    vllm_config: "VllmConfig", has_secondary_tiers: bool, gives_memory_back: bool
) -> None:
    """Refuse an engine with which the tier does not work.

    Args:
        vllm_config: Settings of the engine.
        has_secondary_tiers: Whether there are to be some.
        gives_memory_back: Whether `shrink_after_s` is set.

    Raises:
        ValueError: The message names the setting and the fix.

    """
    backend = f"--kv-offloading-backend {BACKEND}"
    if not releases.is_v1_engine():
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
    if releases.has_hisparse(vllm_config):
        raise ValueError(
            f"{backend} and HiSparse both keep KV blocks in host memory. "
            "Remove the HiSparse configuration, or remove the backend."
        )
    check_parallel(vllm_config)
    check_side_objects(vllm_config)
    check_scheduler(vllm_config.scheduler_config.scheduler_cls)
    check_platform()
    if gives_memory_back:
        check_elastic_memory(vllm_config)
    if has_secondary_tiers:
        check_secondary_tiers(vllm_config)
    check_stages(vllm_config)


def check_parallel(vllm_config: "VllmConfig") -> None:
    backend = f"--kv-offloading-backend {BACKEND}"
    if why := refused_executor(vllm_config):
        raise ValueError(
            f"{backend} is not supported with --distributed-executor-backend {why}"
        )
    if releases.has_fault_tolerance(vllm_config.parallel_config):
        raise ValueError(
            f"{backend} is not supported with --enable-fault-tolerance: a step "
            "that is given up takes the ranks' reports of failed copies with it. "
            "Remove one of them."
        )
    ranks = releases.prefill_context_ranks(vllm_config.parallel_config)
    if ranks > 1:
        raise ValueError(
            f"{backend} is not supported with --prefill-context-parallel-size "
            f"{ranks}: the two have not been run together. Remove one of them."
        )


def check_scheduler(scheduler: str | type | None) -> None:
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


def check_platform() -> None:
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
        raise ValueError(
            f"--kv-offloading-backend {BACKEND} runs on CUDA, ROCm and CPU, not "
            f"on {current_platform.device_name or current_platform.device_type}. "
            "Remove the backend."
        )


def check_stages(vllm_config: "VllmConfig") -> None:
    """Refuse the one case in which a step writes blocks after the next has begun.

    The first stages of a pipeline learn of accepted tokens as many steps late as there
    are stages, and then move Mamba states into blocks that have been hashed meanwhile,
    without a fence of the tier: a store would read too early, and a load could be
    overwritten.
    """
    if (
        vllm_config.parallel_config.pipeline_parallel_size > 1
        and vllm_config.speculative_config is not None
        and releases.uses_v2_model_runner(vllm_config)
        and releases.mamba_cache_mode(vllm_config.cache_config) == "align"
    ):
        raise ValueError(
            f"--kv-offloading-backend {BACKEND} is not supported with pipeline "
            "parallelism, speculative decoding and --mamba-cache-mode align "
            "together: the first stages write Mamba states of a step during later "
            "ones. Remove one of them, or the backend."
        )


def engine_can_jump(vllm_config: "VllmConfig", kv_cache_config: Any) -> bool:
    """Whether a running request can skip tokens of its prompt.

    Full attention and MLA need nothing but the KV of a token. Windows and states need
    more, guesses of a draft model have KV of their own, and a KV connector counts
    tokens itself. KV events describe hits at admission.
    """
    events = vllm_config.kv_events_config
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    groups = kv_cache_config.kv_cache_groups
    return (
        releases.has_jump_seam()
        and len(groups) == 1
        and type(releases.spec_of_layer(groups[0].kv_cache_spec)).__name__
        in ("FullAttentionSpec", "MLAAttentionSpec")
        and bool(scheduler.enable_chunked_prefill)
        and vllm_config.speculative_config is None
        and vllm_config.kv_transfer_config is None
        and not (events is not None and events.enable_kv_cache_events)
        and releases.decode_context_ranks(parallel) == 1
        and releases.prefill_context_ranks(parallel) == 1
    )
