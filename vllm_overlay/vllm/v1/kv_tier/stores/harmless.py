# SPDX-License-Identifier: Apache-2.0
"""Settings and files of a model that do not shape its KV, each with the reason.

`identity` puts everything else into the name of KV, including settings that later
releases add. So list only what is known not to change KV, other than by the rounding
differences that batch sizes also cause. A missing entry costs some recomputation; a
wrong one gives wrong answers.
"""

from fnmatch import fnmatch, fnmatchcase

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
