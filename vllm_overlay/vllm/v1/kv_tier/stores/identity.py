# SPDX-License-Identifier: Apache-2.0
"""What shaped the bytes of KV, as a short name: settings and files of models.

Objects outlive engines, so anything that changes the KV of the same tokens must be part
of their name. A part left out lets an engine read KV with another meaning; a needless
part costs some recomputation. So the name covers all settings of the engine and all
files that it loaded, except for those in `harmless`.

A merge can change a few tensors in the middle of a file and keep name, size and header,
so sampling bytes would serve KV of other weights. Files in a hub's cache are named by
the digest of their bytes. Others are read once; the digest is cached under the file's
inode, size and times, which change when it is written to.

The ranks load the files, and this process reads them afterwards. So it records their
states before the ranks begin (`FileStates`), and refuses a file whose state differs
later: KV of the old bytes would get the name of the new ones.
"""

import enum
import functools
import hashlib
import itertools
import json
import os
import re
import secrets
import stat
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.stores.format import FORMAT_VERSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

# Settings and files of a model that do not shape its KV, each with the reason.
#
# `identity` puts everything else into the name of KV, including settings that later
# releases add. So list only what is known not to change KV, other than by the rounding
# differences that batch sizes also cause. A missing entry costs some recomputation; a
# wrong one gives wrong answers.

_FIELDS: dict[str, dict[str, str]] = {
    "VllmConfig": {
        "metrics, logs and profiles": """observability_config logging_config
            profiler_config watchdog_config""",
        "tells others of KV": "kv_events_config",
        "chooses among computed tokens, which are in the keys": """
            structured_outputs_config decoding_config reasoning_config
            watermark_config""",
        "made of the model's settings and files, which count": "quant_config",
        "sets fields of other configurations, which count": "optimization_level",
        "where weights lie until they are used": "offload_config",
        "weights that arrive later end the use of the tier": "weight_transfer_config",
        "names or ends an engine": "instance_id shutdown_timeout",
    },
    "ModelConfig": {
        "where files are; their bytes count": """model model_weights revision
            tokenizer tokenizer_revision hf_config_path hf_token""",
        "its effect is in hf_config, which counts": "hf_overrides",
        "what clients call the model": "served_model_name",
        "what clients may send; what they send is in the keys": """
            allowed_local_media_path allowed_media_domains enable_prompt_embeds
            skip_tokenizer_init""",
        "chooses among computed tokens, which are in the keys": """seed max_logprobs
            logprobs_mode return_sampling_mask use_fp64_gumbel generation_config
            override_generation_config logits_processors logits_processor_pattern""",
        "captures the same operations: rounding": """enforce_eager
            max_seq_len_to_capture use_async_output_proc""",
        "sleep ends the use of what may have changed": """enable_sleep_mode
            sleep_preserve_parameter_names sleep_mode_backend
            sleep_mode_offload_cudagraph enable_nccl_comm_suspend
            enable_cumem_allocator""",
        "a number of threads": "renderer_num_workers",
    },
    "MultiModalConfig": {
        "where processed inputs are kept and how they travel": """
            mm_processor_cache_gb mm_processor_cache_type
            mm_shm_cache_max_object_size_mb mm_tensor_ipc mm_ipc_gpu_memory_gb
            disable_mm_preprocessor_cache""",
        "what a prompt may have, and what memory is measured with": """
            limit_per_prompt skip_mm_profiling""",
        "order of text, whose tokens are in the keys": "interleave_mm_strings",
    },
    "CacheConfig": {
        "how much memory there is": """gpu_memory_utilization num_gpu_blocks_override
            num_gpu_blocks num_cpu_blocks kv_cache_size_tokens
            kv_cache_max_concurrency kv_cache_memory_bytes swap_space
            cpu_kvcache_space_bytes simple_cpu_offload_num_blocks""",
        "where weights lie until they are used": "cpu_offload_gb",
        "settings of the tiers": """kv_offloading_size kv_offloading_backend
            kv_offloading_config""",
        "which blocks are kept": """enable_prefix_caching
            prefix_cache_retention_interval""",
        "who chose a value that counts": """user_specified_block_size
            user_specified_mamba_block_size _block_size_resolved""",
    },
    "ParallelConfig": {
        "engines with the same weights, each with KV of its own": """
            data_parallel_size data_parallel_size_local data_parallel_rank
            data_parallel_rank_local data_parallel_index data_parallel_master_ip
            data_parallel_rpc_port data_parallel_master_port data_parallel_backend
            data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval
            _data_parallel_master_port_list disable_nccl_for_dp_synchronization""",
        "a product of sizes that count": "world_size",
        "each rank has a name of its own": "rank",
        "on which machines and devices ranks are, and how they are reached": """
            distributed_executor_backend master_addr master_port node_rank nnodes
            placement_group ray_runtime_env ray_workers_use_nsight
            assigned_physical_gpu_ids numa_bind numa_bind_nodes numa_bind_cpus
            _coord_store_port distributed_timeout_seconds
            cpu_distributed_timeout_seconds""",
        "processes that take requests": """_api_process_count _api_process_rank
            tokenizer_pool_config""",
        "how weights are loaded": "max_parallel_loading_workers",
        "what follows a failure": "enable_fault_tolerance fault_tolerance_config",
        "where the same experts are": """eplb_config eplb_window_size
            eplb_step_interval eplb_log_balancedness enable_elastic_ep
            elastic_ep_max_dp_size""",
    },
    "SchedulerConfig": {
        "when a request runs, not what it computes": """max_num_batched_tokens
            max_num_scheduled_tokens max_num_seqs max_num_active_seqs
            long_prefill_token_threshold long_prefill_token_threshold_adaptive
            max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill
            chunked_prefill_enabled max_num_encoder_input_tokens encoder_cache_size
            policy disable_chunked_mm_input scheduler_reserve_full_isl watermark
            prefill_schedule_interval async_scheduling max_num_partial_prefills
            max_long_partial_prefills num_lookahead_slots delay_factor
            preemption_mode num_scheduler_steps""",
        "how answers and settings travel": """stream_interval
            multi_step_stream_outputs send_delta_data""",
        "captures the same operations: rounding": "cuda_graph_sizes",
    },
    "DeviceConfig": {"its type counts, its number does not": "device"},
    "LoadConfig": {
        "where files are, and how they are read; their bytes count": """download_dir
            safetensors_load_strategy safetensors_prefetch_num_threads
            safetensors_prefetch_block_size use_tqdm_on_load""",
    },
    "LoRAConfig": {"how many adapters there is room for": "max_loras max_cpu_loras"},
    "SpeculativeConfig": {
        "the model itself, which counts": "target_model_config target_parallel_config",
        "where files are; their bytes count": "model revision",
        "captures the same operations: rounding": "enforce_eager",
    },
    "KVTransferConfig": {
        "names an engine and how others reach it": """engine_id kv_ip kv_port kv_rank
            kv_parallel_size kv_buffer_size kv_buffer_device""",
        "who computes and who takes; the KV is the same": "kv_role",
    },
    "ECTransferConfig": {
        "names an engine and how others reach it": """engine_id ec_ip ec_port ec_rank
            ec_parallel_size ec_buffer_size ec_buffer_device""",
    },
    "CompilationConfig": {
        "compiles and captures the same operations: rounding": """mode level
            use_inductor ir_enable_torch_wrap splitting_ops
            compile_mm_encoder compile_sizes compile_ranges_endpoints
            compile_ranges_split_points use_inductor_graph_partition full_cuda_graph
            dynamic_shapes_config fast_moe_cold_start use_cudagraph cudagraph_mode
            cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs
            cudagraph_specialize_lora max_cudagraph_capture_size max_capture_size
            cudagraph_mm_encoder encoder_cudagraph_token_budgets
            encoder_cudagraph_max_vision_items_per_batch
            encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay
            decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold
            bs_to_padded_graph_size""",
        "chooses among kernels of one operation: rounding": "custom_ops",
        "where what was compiled is kept": """debug_dump_path cache_dir
            local_cache_dir compile_cache_save_format""",
        "what compiling has found out": """enabled_custom_ops disabled_custom_ops
            traced_files compilation_time encoder_compilation_time""",
        "layers, whose backends are in a rank's name": """static_forward_context
            static_all_moe_layers""",
    },
    "KernelConfig": {
        "chooses among equal kernels, or warms them up: rounding": """
            enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
            enable_cutedsl_warmup enable_jit_warmup""",
    },
}

HARMLESS: dict[str, dict[str, str]] = {
    config: {
        field: reason for reason, names in reasons.items() for field in names.split()
    }
    for config, reasons in _FIELDS.items()
}
"""Reasons by class and field, for all releases."""

VARIABLES = {
    "names a process, or finds others": """VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP
        VLLM_DIST_IDENT VLLM_SERVICE_* VLLM_*_SERVICE_* VLLM_*_PORT VLLM_*PORT_*_TCP*
        VLLM_RPC_BASE_PATH VLLM_RPC_TIMEOUT
        VLLM_PROCESS_NAME_PREFIX VLLM_DP_* VLLM_RAY_* VLLM_NIXL_*
        VLLM_P2P_* VLLM_EC_SIDE_CHANNEL_* VLLM_MOONCAKE_* VLLM_MORIIO_*
        VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS VLLM_SKIP_P2P_CHECK
        VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_ELASTIC_EP_*
        VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_USE_RAY_*""",
    "where files are; their bytes count, or they are caches": """VLLM_CONFIG_ROOT
        VLLM_CACHE_ROOT VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN
        VLLM_XLA_CACHE_PATH VLLM_MODEL_REDIRECT_PATH VLLM_USE_MODELSCOPE
        VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_LORA_RESOLVER_* VLLM_MEDIA_CACHE*
        VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_NCCL_INCLUDE_PATH
        VLLM_DISABLE_COMPILE_CACHE VLLM_COMPILE_CACHE_SAVE_FORMAT
        VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB VLLM_FORCE_AOT_LOAD
        VLLM_ENABLE_STARTUP_PLAN""",
    "logs, metrics and profiles": """VLLM_LOG_* VLLM_LOGGING_* VLLM_CONFIGURE_LOGGING
        VLLM_DISABLE_LOG_* VLLM_DEBUG_* VLLM_TRACE_* VLLM_GC_DEBUG VLLM_USAGE_*
        VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_*_FOR_PROFILING VLLM_TORCH_PROFILER_*
        VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_PATTERN_MATCH_DEBUG
        VLLM_REQUEST_BODY_LOG_LEVEL VLLM_GPU_SYNC_CHECK""",
    "how long and how often something is tried": """VLLM_*_TIMEOUT VLLM_*_TIMEOUT_S
        VLLM_*_TIMEOUT_SECONDS VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_MEDIA_FETCH_MAX_RETRIES
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_SLEEP_WHEN_IDLE""",
    "the server, which sends tokens and hashes of images": """VLLM_API_KEY
        VLLM_SERVER_DEV_MODE VLLM_USE_RUST_* VLLM_RUST_FRONTEND_PATH VLLM_HTTP_*
        VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_CHAT_TEMPLATE_* VLLM_MAX_N_SEQUENCES
        VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS
        VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_ENABLE_RESPONSES_API_STORE
        VLLM_ENABLE_COHERE_API VLLM_GPT_OSS_* VLLM_SYSTEM_START_DATE VLLM_TOOL_*
        VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT
        VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_SKIP_MODEL_NAME_VALIDATION""",
    "chooses among computed tokens, which are in the keys": """
        VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL
        VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_COMPUTE_NANS_IN_LOGITS
        VLLM_RAISE_ON_LOGIT_NANS""",
    "how messages and answers travel": """VLLM_MQ_* VLLM_MSGPACK_ZERO_COPY_THRESHOLD
        VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
        VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD
        VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_USE_SPINLOOP_EXT""",
    "how much memory and how many cores there are": """VLLM_CPU_KVCACHE_SPACE
        VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU
        VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_*_PIN_MEMORY
        VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS
        VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_AUDIO_PREPROCESS_WORKERS
        VLLM_TRITON_JIT_WARMUP_NUM_THREADS""",
    "how the package was built, which its version tells": """VLLM_BUILD_*
        VLLM_DOCKER_BUILD_CONTEXT VLLM_IMAGE_TAG VLLM_USE_PRECOMPILED*
        VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX
        VLLM_MAIN_CUDA_VERSION VLLM_TARGET_DEVICE""",
}
"""Variables of the environment that begin with VLLM_, or patterns of them, of all
releases, by the reason why they do not count."""

OTHER_VARIABLES = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("Q_SCALE_CONSTANT", "K_SCALE_CONSTANT", "V_SCALE_CONSTANT"),
)
"""Variables with other names that change numbers by more than their rounding. Those of
libraries are without number, so these can only be listed the other way round."""

_FILES = {
    ".*": "no loader reads hidden files",
    "*.md": "text for people",
    "*.txt": "text for people, or a vocabulary",
    "*.pdf": "text for people",
    "*.png": "text for people",
    "*.jpg": "text for people",
    "*.jpeg": "text for people",
    "*.svg": "text for people",
    "LICENSE*": "text for people",
    "NOTICE*": "text for people",
    "config.json": "it is in hf_config, as the engine has read it",
    "generation_config.json": "chooses among computed tokens",
    "chat_template*": "makes text of messages; its tokens are in the keys",
    "tokenizer*": "makes tokens of text, and these are in the keys",
    "vocab*": "as the tokenizer",
    "merges.txt": "as the tokenizer",
    "special_tokens_map.json": "as the tokenizer",
    "added_tokens.json": "as the tokenizer",
    "tekken.json": "as the tokenizer",
}
"""Files next to a model's weights, by pattern."""

# Processors of images or audio read these too.
_NOT_IF_MULTIMODAL = frozenset(
    {
        *("*.txt", "config.json", "chat_template*", "tokenizer*", "vocab*"),
        *("merges.txt", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    }
)


def counts(variable: str) -> bool:
    """Whether a variable of the environment may have a part in KV."""
    if not variable.startswith("VLLM_"):
        return variable in OTHER_VARIABLES
    return not any(
        fnmatchcase(variable, pattern)
        for patterns in VARIABLES.values()
        for pattern in patterns.split()
    )


def is_harmless_file(name: str, multimodal: bool) -> bool:
    """Whether a file in a model's directory has no effect on its KV."""
    return any(
        fnmatch(name, pattern)
        for pattern in _FILES
        if not (multimodal and pattern in _NOT_IF_MULTIMODAL)
    )


_SETTING = "--kv-offloading-config: secondary_tiers"
_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
# Loaders that take all weights from the model's folder.
_FROM_FOLDER = {
    *("auto", "hf", "safetensors", "pt", "npcache", "mistral", "gguf"),
    *("bitsandbytes", "sharded_state", "fastsafetensors", "instanttensor"),
    *("runai_streamer", "runai_streamer_sharded"),
}
_MAX_STATES = 100_000
_HEAD_BYTES, _NUM_SAMPLES, _SAMPLE_BYTES = 64 << 10, 16, 4 << 10
_CHUNK_BYTES, _NUM_THREADS = 16 << 20, 4
# Age from which a file's times are trusted: another write then gives another time even
# with a coarse file system clock.
SETTLED_NS = 10 * 10**9
_MAX_REMEMBERED = 4096


class FileStates:
    """States of files before the ranks loaded them.

    Args:
        paths: Files, and folders with all files in them.

    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._before: dict[Path, str] = {}
        for path in paths:
            for file in [path] if path.is_file() else _tree(path):
                # A file without a recorded state is refused later.
                with suppress(OSError):
                    self._before[file] = _state(file)

    def digests(self, paths: Sequence[Path]) -> list[str]:
        """Digests in hex of the bytes of each file, as they were loaded.

        Raises:
            ValueError: A file has changed since.

        """
        with suppress(FileNotFoundError):
            found = _digests(paths)
        for path in paths:
            # Checked after reading, so that no change in between is missed.
            if not self._is_as_before(path):
                raise ValueError(
                    f"{_SETTING}: {path} was written or replaced while the engine "
                    "loaded it, so it is unknown which bytes the engine loaded. Start "
                    "the engine again, and leave its files alone until it runs."
                )
        return found

    def _is_as_before(self, path: Path) -> bool:
        if not path.exists():
            return False
        before = self._before.get(path)
        return _is_only_download(path) if before is None else before == _state(path)


def model_files(
    model: Any, load: Any, subfolders: Iterable[str] = ()
) -> tuple[Path, list[Path]]:
    """The folder of a model, and its files that shape KV.

    Args:
        model: Upstream's `ModelConfig`.
        load: Upstream's `LoadConfig`.
        subfolders: Subfolders that weights were loaded from too.

    Raises:
        ValueError: They are unknown. The message has the fix.

    """
    load_format = releases.load_format(load)
    if load_format == "dummy":
        raise ValueError(
            f"{_SETTING} cannot keep KV of random weights (--load-format dummy): they "
            "differ in each engine. Load weights, or remove secondary_tiers."
        )
    if load_format not in _FROM_FOLDER:
        _check_elsewhere(load_format, load)
    # When weights stream from elsewhere, only the configuration is here.
    name = releases.weights_name(model)
    folder = model_folder(name, model.revision, load)
    multimodal = model.multimodal_config is not None
    files = [folder] if folder.is_file() else _files_in(folder, multimodal)
    for subfolder in subfolders:
        files += _files_in(folder / subfolder, multimodal)
    if not any(path.suffix in _SUFFIXES for path in files):
        raise ValueError(
            f"{_SETTING}: {folder} has no weights ({', '.join(_SUFFIXES)}) to identify "
            f"the KV of model {name!r} by. Give a directory that has them with "
            "--model, or remove secondary_tiers."
        )
    return folder, files


def processor_files(model: Any, load: Any) -> list[tuple[Path, list[Path]]]:
    """Folders and files of image and audio processors beyond `model_files`."""
    if model.multimodal_config is None:
        return []
    names = {model.tokenizer, model.hf_config_path} - {model.model, None}
    found = []
    for name in sorted(filter(None, names)):
        folder = model_folder(name, model.tokenizer_revision, load)
        files = [folder] if folder.is_file() else _files_in(folder, multimodal=True)
        found.append((folder, files))
    return found


def model_folder(name: str, revision: str | None, load: Any) -> Path:
    """The folder of a model's files on this machine.

    Raises:
        ValueError: They are not on this machine.

    """
    if os.path.exists(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    directory = load.download_dir
    try:
        return Path(
            snapshot_download(
                name, revision=revision, cache_dir=directory, local_files_only=True
            )
        )
    except Exception as e:
        raise ValueError(
            f"{_SETTING}: the weights of model {name!r} are not on this machine "
            f"({type(e).__name__}), so its KV cannot be identified. Download the model "
            "and give its directory with --model, or remove secondary_tiers."
        ) from e


def accept_loader(load_format: str) -> None:
    """Let engines with a loader of their own have secondary tiers.

    For the plugin that registers it, in each process of an engine.

    Args:
        load_format: Its name. It must give the same weights for the same files in the
            model's folder, since the KV is identified by these.

    """
    _FROM_FOLDER.add(load_format)


def _check_elsewhere(load_format: str, load: Any) -> None:
    """Refuse weights whose bytes are not available here.

    A loader that gets its files only from settings is allowed: `identity` reads each
    file that a setting names.
    """
    options = str(load.model_loader_extra_config)
    if load_format == "tensorizer" and "://" not in options and "%" not in options:
        return
    raise ValueError(
        f"{_SETTING}: --load-format {load_format} loads weights from elsewhere than "
        "the model's directory, so their KV cannot be identified. Use --load-format "
        "auto with a directory, or remove secondary_tiers."
    )


def _files_in(folder: Path, multimodal: bool) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and not is_harmless_file(path.name, multimodal)
    )


def _tree(folder: Path) -> Iterator[Path]:
    """Files in a folder, recursively and unordered; at most `_MAX_STATES`."""
    walk = (
        Path(parent, name) for parent, _, names in os.walk(folder) for name in names
    )
    return itertools.islice(walk, _MAX_STATES)


def _is_only_download(path: Path) -> bool:
    """Whether a new file is the one that the ranks downloaded and loaded.

    It must be named by the digest of its bytes, and no other snapshot may have weights.
    """
    if not _is_named_by_its_bytes(path):
        return False
    snapshot = next((p for p in path.parents if p.parent.name == "snapshots"), None)
    if snapshot is None:
        return False
    with_weights = {
        other
        for other in snapshot.parent.iterdir()
        if any(file.suffix in _SUFFIXES for file in other.iterdir())
    }
    return with_weights <= {snapshot}


def _digests(paths: Sequence[Path]) -> list[str]:
    """Digests in hex of the bytes of each file."""
    known, digests = _remembered(), {}
    for path in paths:
        if _is_named_by_its_bytes(path):
            digests[path] = _sample(path)
        elif (digest := known.get(_state(path))) is not None:
            digests[path] = digest
    if unknown := [path for path in paths if path not in digests]:
        begun, begun_ns = time.monotonic(), time.time_ns()
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            read = dict(zip(unknown, threads.map(_read, unknown)))
        logger.info(
            "KV tier: read %.1f GB of model files in %.1f s to identify KV by all of "
            "their bytes.",
            sum(path.stat().st_size for path in unknown) / 1e9,
            time.monotonic() - begun,
        )
        digests |= {path: digest for path, (_, digest, _) in read.items()}
        settled = begun_ns - SETTLED_NS
        _remember({s: digest for s, digest, at in read.values() if at < settled})
    return [digests[path] for path in paths]


def _is_named_by_its_bytes(path: Path) -> bool:
    """Whether it links to a file in the hub's cache that is named by its digest."""
    blob = path.resolve()
    return blob.parent.name == "blobs" and bool(
        re.fullmatch("[0-9a-f]{40,}", blob.name)
    )


def _sample(path: Path) -> str:
    """Digest of a file's name in the hub's cache and of samples of its bytes.

    The samples detect most changes that were made to the file in the cache.
    """
    digest = hashlib.blake2b(path.resolve().name.encode(), digest_size=16)
    size = path.stat().st_size
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for i in range(1, _NUM_SAMPLES + 1):
            file.seek(max(size - _SAMPLE_BYTES, 0) * i // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _read(path: Path) -> tuple[str, str, int]:
    """Read a file.

    Returns:
        Its state, the digest of its bytes, and its last change in nanoseconds.

    Raises:
        ValueError: It changed while it was read.

    """
    before, status = _state(path), path.stat()
    digest = blake3(max_threads=blake3.AUTO)
    chunk = bytearray(_CHUNK_BYTES)
    # Not memory-mapped: if the file became shorter, this process would be killed.
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(chunk):
            digest.update(memoryview(chunk)[:num_bytes])
    if _state(path) != before:
        raise ValueError(
            f"{_SETTING}: {path} is being written to, so its KV cannot be identified. "
            "Start the engine when the file is complete."
        )
    return before, digest.hexdigest(16), max(status.st_mtime_ns, status.st_ctime_ns)


def _state(path: Path) -> str:
    """A text that changes when the file is written to."""
    s = path.stat()
    return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}"


# ---------------------------------------------------------------- digest cache
def _memory() -> Path:
    return Path(envs.VLLM_CACHE_ROOT) / "kv_tier" / "weights.json"


def _remembered() -> dict[str, str]:
    """Cached digests by the state of files, if only this user can write the cache."""
    with suppress(OSError, ValueError):
        fd = os.open(_memory(), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
            if is_ours and stat.S_ISREG(status.st_mode):
                found = json.load(file)
                return {str(key): str(value) for key, value in found.items()}
    return {}


def _remember(digests: dict[str, str]) -> None:
    """Add digests to the cache. If that fails, they are computed again next time."""
    if not digests:
        return
    known = _remembered()
    known = dict([*known.items(), *digests.items()][-_MAX_REMEMBERED:])
    path = _memory()
    temporary = path.with_name(f"{secrets.token_hex(8)}.tmp")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.touch(mode=0o600, exist_ok=False)
        temporary.write_text(json.dumps(known))
        temporary.replace(path)


_DIGEST_BYTES = 16

_KEY_HASHES = ("sha256", "sha256_cbor")
"""Algorithms for which no client can construct two prompts with the same key."""


def states_before_loading(vllm_config: "VllmConfig") -> FileStates:
    """States of all files that shape KV, before the ranks load them.

    Raises:
        ValueError: As in `namespace`, as far as it is known by now.

    """
    paths: list[Path] = []
    for model, load in _models(vllm_config):
        names = releases.weights_name(model), model.tokenizer, model.hf_config_path
        for name in filter(None, names):
            # The ranks may still have to download it.
            with suppress(ValueError):
                paths.append(model_folder(name, model.revision, load))

    def note(path: Path) -> str:
        paths.append(path)
        return ""

    _plain_settings(vllm_config, note)
    environment(note)
    return FileStates(paths)


def namespace(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    release: str,
    before: FileStates | None = None,
    sources: Sequence[tuple[str, str]] = (),
) -> str:
    """A name for everything that shapes the bytes and is known to this process.

    Args:
        vllm_config: Settings of the engine.
        kv_cache_config: The scheduler's KV cache configuration.
        release: vLLM's version, since another one may compute different KV.
        before: States of the files before the ranks loaded them. None: take them now.
        sources: (repository, folder in it) of weights that models loaded beyond their
            own files.

    Returns:
        32 hex digits, the same in every process with these settings and files.

    Raises:
        ValueError: Something that shapes the bytes or their keys is unknown, or differs
            between processes. The message says what to change.

    """
    cache = vllm_config.cache_config
    if releases.calculates_kv_scales(cache):
        raise ValueError(
            f"{_SETTING} cannot keep KV whose scales are calculated from the first "
            "request (calculate_kv_scales): they differ in each engine. Set it to "
            "false, or remove secondary_tiers."
        )
    seed = _hash_seed(cache.prefix_caching_hash_algo)
    before = before or states_before_loading(vllm_config)
    digest = functools.partial(_digest_of, before)
    shape = {
        "format": FORMAT_VERSION,
        "vllm": release,
        "settings": _plain_settings(vllm_config, digest),
        "environment": environment(digest),
        "groups": _Plain(digest).of("groups", kv_cache_config.kv_cache_groups),
        "hashes": seed,
        "files": files_of_models(vllm_config, before, sources),
    }
    name = _digest(shape)
    logger.debug("KV tier: %s is the name for %s", name, shape)
    return name


def environment(digest: Callable[[Path], str] | None = None) -> dict[str, Any]:
    """Variables of this process that may shape KV, as they are set.

    Args:
        digest: As of `_Plain`.

    """
    plain = _Plain(digest)
    return {k: plain.of(k, v) for k, v in sorted(os.environ.items()) if counts(k)}


def rank_namespace(namespace: str, rank: int, description: object) -> str:
    """A namespace extended by what only the rank knows: layout, attention backends."""
    return _digest([namespace, rank, _Plain().of("a rank", description)])


def _models(vllm_config: "VllmConfig") -> list[tuple[Any, Any]]:
    """The model, and a draft model if there is one, each with its load settings."""
    load = vllm_config.load_config
    found = [(vllm_config.model_config, load)]
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        draft_load = releases.draft_load_config(speculative) or load
        found.append((speculative.draft_model_config, draft_load))
    return found


def files_of_models(
    vllm_config: "VllmConfig",
    before: FileStates | None,
    sources: Sequence[tuple[str, str]] = (),
) -> list[list[list[object]]]:
    """Name, size and digest of each file that models were loaded from.

    Args:
        vllm_config: Settings of the engine.
        before: States of the files before they were loaded. None: take them now.
        sources: As in `namespace`.

    Raises:
        ValueError: The files are unknown. The message says what to change.

    """
    before = before or states_before_loading(vllm_config)
    found = []
    for folder, paths in _paths_of_models(vllm_config, sources):
        digests = before.digests(paths)
        found.append(
            [
                [os.path.relpath(path, folder.parent if folder in paths else folder)]
                + [path.stat().st_size, digest]
                for path, digest in zip(paths, digests)
            ]
        )
    return found


def youngest_s(
    vllm_config: "VllmConfig", sources: Sequence[tuple[str, str]] = ()
) -> float:
    """When models' files, or the links and folders that lead to them, last changed."""
    return max(
        max(status.st_ctime, status.st_mtime)
        for _, paths in _paths_of_models(vllm_config, sources)
        for path in paths
        for place in (path, *path.absolute().parents[:2])
        for status in (place.stat(), place.lstat())
    )


def _paths_of_models(
    vllm_config: "VllmConfig", sources: Sequence[tuple[str, str]]
) -> list[tuple[Path, list[Path]]]:
    """The folder and the files of each model."""
    models = _models(vllm_config)
    own = {model.model for model, _ in models}
    for name, _ in sources:
        if name not in own:
            raise ValueError(
                f"{_SETTING} cannot keep KV of a model that takes weights from another "
                f"repository ({name}), whose files may change without its own. Remove "
                "secondary_tiers."
            )
    found = []
    for model, load in models:
        inner = sorted({place for name, place in sources if name == model.model} - {""})
        folder, paths = model_files(model, load, inner)
        found.append((folder, paths))
        found += processor_files(model, load)
    return found


def _digest_of(states: FileStates, path: Path) -> str:
    return states.digests([path])[0]


def _hash_seed(algorithm: str) -> list[str]:
    """Algorithm and seed of NONE_HASH, the parent of first blocks.

    Upstream sets NONE_HASH only after the tier has started.
    """
    if algorithm not in _KEY_HASHES:
        raise ValueError(
            f"{_SETTING}: with --prefix-caching-hash-algo {algorithm} a client can "
            "make prompts whose blocks have the same keys as others, and a store "
            "shares the KV of a key with all. Use --prefix-caching-hash-algo "
            f"{_KEY_HASHES[0]}."
        )
    seed = os.getenv("PYTHONHASHSEED")
    resolve = releases.none_hash_seed_of()
    if resolve is not None:
        # Random if it differs between calls. Releases without the function always draw
        # it.
        from vllm.utils.hashing import get_hash_fn_by_name

        function = get_hash_fn_by_name(algorithm)
        first, second = resolve(function), resolve(function)
        seed = first if first == second else None
    # For "random" Python draws a seed, and an algorithm of v0.9.2 uses Python's hash.
    if seed is None or seed == "random":
        other = "" if resolve is None else ", or --prefix-caching-hash-algo sha256"
        raise ValueError(
            f"{_SETTING}: block hashes of --prefix-caching-hash-algo {algorithm} begin "
            "with a random number in each process, so no stored block would ever be "
            f"found. Set PYTHONHASHSEED=0 in the environment of all engines{other}."
        )
    return [algorithm, seed]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _plain_settings(vllm_config: "VllmConfig", digest: Callable[[Path], str]) -> Any:
    fields = _Plain(digest).fields_of("", "VllmConfig", vllm_config)
    return dict(fields)


class _Plain:
    """Converts values to JSON, without addresses or random order.

    Args:
        digest: Digest of a file that a setting names. None: texts that look like paths
            are kept as texts.

    """

    def __init__(self, digest: Callable[[Path], str] | None = None) -> None:
        self._digest = digest

    def of(self, name: str, value: Any) -> Any:
        """Convert the value of the setting `name`.

        Raises:
            ValueError: It has no text that is the same in every process.

        """
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str | PurePath):
            return self._text(str(value))
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, enum.Enum):
            return str(value)
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return self._code(name, value)
        if isinstance(value, functools.partial):
            return self.of(name, [value.func, list(value.args), value.keywords])
        if isinstance(value, Mapping):
            return {str(k): self.of(f"{name}.{k}", v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(name, each) for each in value]
        if isinstance(value, set | frozenset):
            return sorted(
                json.dumps(self.of(name, each), sort_keys=True) for each in value
            )
        return self._object(name, value)

    def fields_of(self, name: str, kind: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Fields of a configuration that are not listed as harmless."""
        harmless = HARMLESS.get(kind, {})
        for field, each in releases.field_values(value).items():
            if field not in harmless:
                inner = f"{name}.{field}" if name else field
                yield field, self.of(inner, each)

    def _object(self, name: str, value: Any) -> Any:
        kind = type(value)
        if (found := releases.as_dict(value)) is not None:
            # A model's configuration. Its location does not matter.
            return self.of(name, _without(found, "_name_or_path"))
        if fields := dict(self.fields_of(name, kind.__name__, value)):
            return [kind.__qualname__, fields]
        if (digest := releases.digest_of(value)) is not None:
            return [kind.__qualname__, digest]
        text = repr(value)
        if re.search(r" at 0x[0-9a-f]+", text):
            raise ValueError(
                f"{_SETTING}: the setting {name} is a {kind.__module__}."
                f"{kind.__qualname__}, which has no text to compare between engines. "
                "Remove that setting, or secondary_tiers."
            )
        return text

    def _text(self, text: str) -> Any:
        # A plain name in the working directory is not taken for a path.
        if self._digest is not None and os.sep in text and os.path.isfile(text):
            return {"file": self._digest(Path(text))}
        return text

    def _code(self, name: str, value: Any) -> str:
        path = f"{value.__module__}.{value.__qualname__}"
        if "<" in path:
            raise ValueError(
                f"{_SETTING}: the setting {name} is {path}, a function without a name "
                "that other engines could import. Remove that setting, or "
                "secondary_tiers."
            )
        return path


def _without(value: Any, key: str) -> Any:
    """A copy without this key, also in nested dictionaries."""
    if isinstance(value, Mapping):
        return {k: _without(v, key) for k, v in value.items() if k != key}
    if isinstance(value, list | tuple):
        return [_without(each, key) for each in value]
    return value
