# SPDX-License-Identifier: Apache-2.0
"""A real scheduler without an engine, for the benchmarks of its step.

Runs on upstream's tree as well as on the patched one. Import it only where vLLM
is the one to measure.
"""

import json
import tempfile
import time
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

if TYPE_CHECKING:
    from vllm.config.scheduler import SchedulerPolicy
    from vllm.v1.outputs import KVConnectorOutput

try:
    from vllm.utils.hashing import sha256
except ImportError:
    from vllm.utils import sha256  # type: ignore[attr-defined, no-redef]

BLOCK_SIZE = 16
# One layer; a page of 4 KiB, which no offloading code rounds up.
_mla: dict[str, Any] = (
    {"use_mla": False} if "use_mla" in signature(FullAttentionSpec).parameters else {}
)
SPEC = FullAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32, **_mla
)
BLOCK_BYTES = SPEC.page_size_bytes

# Not all releases choose the first hash later than here, and in the first ones the
# scheduler hashes requests.
if hasattr(kv_cache_utils, "init_none_hash"):
    kv_cache_utils.init_none_hash(sha256)
_hashes: dict[str, Any] = {}
if "block_hasher" in signature(Request).parameters:
    _hashes["block_hasher"] = kv_cache_utils.get_request_block_hasher(
        BLOCK_SIZE, sha256
    )


def make_scheduler(
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    kv_tier: Any = None,
    kv_transfer_config: KVTransferConfig | None = None,
    policy: "SchedulerPolicy" = "fcfs",
    kv_events_config: KVEventsConfig | None = None,
) -> Scheduler:
    """A synchronous scheduler over one full-attention group.

    Args:
        num_blocks: Device blocks, the null block among them.
        max_num_seqs: As in `SchedulerConfig`.
        max_num_batched_tokens: As there.
        max_model_len: As in `SchedulerConfig`.
        kv_tier: The `KVTierLayout` of a host tier; upstream's tree takes None only.
        kv_transfer_config: The KV connector to put beside it.
        policy: As in `SchedulerConfig`.
        kv_events_config: Whether and where KV events are published.

    """
    with tempfile.TemporaryDirectory() as folder:
        model_config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": max_model_len,
            "vocab_size": 1000,
        }
        (Path(folder) / "config.json").write_text(json.dumps(model_config))
        model = ModelConfig(model=folder, skip_tokenizer_init=True)
    is_new = "async_scheduling" in signature(SchedulerConfig).parameters
    sync: dict[str, Any] = {"async_scheduling": False} if is_new else {}
    vllm_config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy=policy,
            **sync,
        ),
        kv_transfer_config=kv_transfer_config,
        kv_events_config=kv_events_config,
    )
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    kv_cache_config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[_tensor(num_blocks * BLOCK_BYTES)],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)],
    )
    if kv_tier is not None:
        kv_cache_config.kv_tier = kv_tier
    # The first releases take it from the settings.
    knows_size = "block_size" in signature(Scheduler).parameters
    size: Any = {"block_size": BLOCK_SIZE} if knows_size else {}
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        log_stats=True,
        **size,
    )


def _tensor(size: int) -> KVCacheTensor:
    """Of the one layer, as the release at hand says it."""
    if "layers" in signature(KVCacheTensor).parameters:
        return KVCacheTensor(
            size=size, layers=["layer"], layer_stride=size, block_stride=BLOCK_BYTES
        )
    shared: Any = {"shared_by": ["layer"]}
    return KVCacheTensor(size=size, **shared)


def make_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    hints: dict[str, Any] | None = None,
) -> Request:
    extra: Any = {"kv_transfer_params": {"kv_tier": hints}} if hints else None
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
    params.update_from_generation_config({}, 2)
    older: Any = {
        name: None
        for name in signature(Request).parameters
        if name == "eos_token_id" or name.startswith("multi_modal_")
    }
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        **_hashes,
        **older,
    )


def sampled(
    output: SchedulerOutput, kv_connector_output: "KVConnectorOutput | None" = None
) -> ModelRunnerOutput:
    """What a model runner returns that gave every scheduled request a token."""
    ids = list(output.num_scheduled_tokens)
    # Some releases have a default for all but the first two.
    needed: dict[str, Any] = {
        name: {} if name.endswith("_dict") else None
        for name, parameter in signature(ModelRunnerOutput).parameters.items()
        if parameter.default is Parameter.empty
    }
    values: dict[str, Any] = needed | dict(
        req_ids=ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
        sampled_token_ids=[[7]] * len(ids),
    )
    if kv_connector_output is not None:
        values["kv_connector_output"] = kv_connector_output
    return ModelRunnerOutput(**values)


def timed_step(
    scheduler: Scheduler,
    work: "Callable[[SchedulerOutput], KVConnectorOutput | None]" = lambda _: None,
    report: Callable[[SchedulerOutput], Any] = lambda _: None,
) -> float:
    """Run one step.

    Args:
        scheduler: The scheduler.
        work: What the worker side does with the step; not timed.
        report: What the ranks tell the tier with its output; None: nothing.

    Returns:
        CPU seconds of `schedule` and `update_from_output`: what other processes
        of the machine take does not count.

    """
    started = time.thread_time()
    output = scheduler.schedule()
    took = time.thread_time() - started
    runner_output = sampled(output, work(output))
    if (told := report(output)) is not None:
        runner_output.kv_tier_report = told
    started = time.thread_time()
    scheduler.update_from_output(output, runner_output)
    return took + time.thread_time() - started
