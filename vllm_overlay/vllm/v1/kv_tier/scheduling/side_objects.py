# SPDX-License-Identifier: Apache-2.0
"""Refuses settings that make upstream keep more for each block than its KV.

Upstream stores such objects for as many blocks as the device has. The tier moves KV
only, so a block from the host or a store comes without them, and upstream would crash
or return those of another block. Any setting that is not listed as harmless is refused.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_tier import releases

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
    for name in releases.changed_fields(vllm_config):
        if name not in _HARMLESS_CONFIGS and name != "aux_output_config":
            yield f"{name}, which the tier does not know"
