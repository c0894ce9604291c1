# SPDX-License-Identifier: Apache-2.0
"""What releases do not share, for the end-to-end tests.

Nothing asks for a version: each line looks at what the release at hand has.
"""

from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from inspect import getsource, signature
from pathlib import Path
from typing import Any, get_args


def _root() -> Path:
    """Of vLLM, for who has not imported it yet, and must not."""
    package = find_spec("vllm")
    assert package is not None and package.origin is not None
    return Path(package.origin).parent


def _no_binding() -> str:
    """`VLLM_CPU_OMP_THREADS_BIND` for threads that run where they like."""
    root = _root()
    files = root / "v1/worker/cpu_worker.py", root / "utils/ompmultiprocessing.py"
    if any('"nobind"' in file.read_text() for file in files if file.exists()):
        return "nobind"
    # The first releases have a word for each of (here) up to four ranks.
    return "|".join(4 * ["all"])


NO_BINDING = _no_binding()
# The attention of this extension fails on one thread when four or more requests with
# the same prefix decode, tier or not.
NUM_THREADS = "1" if find_spec("intel_extension_for_pytorch") is None else "2"


UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": NO_BINDING, "VLLM_NO_USAGE_STATS": "1"}
"""Environment of engines that claim no cores which others may use."""
if '"VLLM_USE_V1"' in (_root() / "envs.py").read_text():
    # The first releases have another engine too, which they may choose by themselves.
    UNBOUND["VLLM_USE_V1"] = "1"
ENVIRONMENT = {**UNBOUND, "OMP_NUM_THREADS": NUM_THREADS}
"""The same, without threads of their own."""


def _says(words: str, place: str) -> bool:
    """Whether the files of a folder of vLLM have these words, in small letters."""
    files = (_root() / place).rglob("*.py")
    return any(words in file.read_text().lower() for file in files)


CHOOSES_REPLICAS = _says("x-data-parallel-rank", "entrypoints")
"""Whether a header of a request says which data parallel engine shall answer."""
REPLICAS_ENVIRONMENT = (
    {"VLLM_CPU_SIM_MULTI_NUMA": "0"} if _says("assigned_node_ids", "utils") else {}
)
"""Of data parallel engines. The newest release gives each a memory node of its own,
which a machine may not have, unless somebody has said whether to simulate nodes."""
KILLED = "force killing remaining processes"
"""What a server logs that kills its own processes at its end."""
LOGS_KILLS = _says(KILLED, "v1")
"""The first releases give an engine five seconds to end, and then kill it in
silence."""


_EXECUTORS = _root() / "v1" / "executor"
HAS_RAY_V2 = (_EXECUTORS / "ray_executor_v2.py").exists()
"""Whether upstream has a Ray executor that works as its multi-process one does."""
HAS_TWO_RAYS = HAS_RAY_V2 and (_EXECUTORS / "ray_executor.py").exists()
"""Whether it has the other one too, which a variable chooses."""
NAMES_PROCESSES = "set_process_title" in (_root() / "v1/engine/core.py").read_text()
"""Whether processes can be told from one another by their titles."""


def _completions_tell_hits() -> bool:
    """Whether `/v1/completions` says how many tokens of a prompt were cached."""
    # In the first releases chats alone do.
    file = _root() / "entrypoints" / "openai" / "serving_completion.py"
    return not file.exists() or "prompt_tokens_details" in file.read_text()


COMPLETIONS_TELL_HITS = _completions_tell_hits()

CACHES_EMBEDS = not (
    _says("--enable-prompt-embeds and --enable-prefix-caching", "engine")
    or _says('feature_name="--enable-prompt-embeds"', "engine")
)
"""Whether an engine with a prefix cache takes embeddings."""
TELLS_WHEN_IDLE = _says("even if there are no request", "v1/core/sched")
"""Whether counts leave an engine without an answer."""


def _hash_algorithms() -> tuple[str, ...]:
    try:
        from vllm.config.cache import PrefixCachingHashAlgo
    except ModuleNotFoundError:
        from vllm.config import (  # type: ignore[attr-defined, no-redef]
            PrefixCachingHashAlgo,
        )
    return get_args(PrefixCachingHashAlgo)


def known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `LLM` that the release has. Others change no answer: the size of the
    device cache in bytes (it is given in blocks, too), asynchronous scheduling, and
    how keys are hashed."""
    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in fields(EngineArgs)}
    optional = {"kv_cache_memory_bytes", "async_scheduling"} - names
    if settings.get("prefix_caching_hash_algo") not in _hash_algorithms():
        optional.add("prefix_caching_hash_algo")
    return {k: v for k, v in settings.items() if k not in optional}


def cache_bytes(size: int) -> list[str]:
    """Flags of `vllm serve` for a device cache of `size` bytes. Servers get its number
    of blocks, too: not all releases take bytes."""
    return [
        f"--{name.replace('_', '-')}={value}"
        for name, value in known({"kv_cache_memory_bytes": size}).items()
    ]


def model_source(name: str) -> str:
    """Of the module of a model."""
    return (_root() / "model_executor" / "models" / f"{name}.py").read_text()


def lacking_engine(llm: dict[str, Any]) -> str | None:
    """Why the release has no engine with these `LLM` arguments on a CPU."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker import cpu_model_runner

    if "speculative_config" in llm and "spec decode is not supported" in getsource(
        cpu_model_runner
    ):
        return "this release does not speculate on CPUs"
    if (
        "kv_transfer_config" in llm
        and "ExampleConnector" not in KVConnectorFactory._registry
    ):
        return "KV connectors of this release are made another way"
    if "runner" in llm and not hasattr(EngineArgs, "runner"):
        return "decoders of this release become embedding models another way"
    if "enable_prompt_embeds" in llm and not CACHES_EMBEDS:
        return "this release has no prefix cache where prompts may be embeddings"
    return None


def lacking(llm: dict[str, Any]) -> dict[str, str]:
    """Workloads that the release cannot be asked on such an engine, and why."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    found: dict[str, str] = {}
    if llm.get("scheduling_policy") == "priority" and "__lt__" not in vars(Request):
        found["sampling"] = "requests of the same time have no order in this release"
    pause = getattr(EngineCore, "pause_scheduler", None)
    if pause is None:
        found["paused"] = "this release cannot pause its scheduler"
    elif "mode" not in signature(pause).parameters:
        found["paused"] = "this release pauses in one way only, which keeps the cache"
    if "paused" in found:
        # Level 0 of sleep is a pause.
        found["asleep"] = found["paused"]
    if (
        "reset_running_requests"
        not in signature(EngineCore.reset_prefix_cache).parameters
    ):
        found["reset_running"] = "this release resets no cache under running requests"
    reload_weights = getattr(GPUModelRunner, "reload_weights", None)
    if (
        reload_weights is None
        or "weights_path" not in signature(reload_weights).parameters
    ):
        found["new_weights"] = "this release reloads no weights from another path"
    if "sha256_cbor" not in _hash_algorithms():
        found["hash_algorithm"] = "this release has other algorithms"
    if "load_inplace" not in LoRARequest.__struct_fields__:
        found["lora_reloads"] = "this release cannot reload an adapter in place"
    return found


def count_every_step() -> None:
    """Let steps without outputs have counts in this process too: some releases ask
    for them, since engines in a process of their own send nothing then."""
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.stats import SchedulerStats

    if "assert outputs.scheduler_stats is not None" not in getsource(LLMEngine.step):
        return
    upstream = InprocClient.get_output

    def get_output(self: Any) -> Any:
        outputs = upstream(self)
        if outputs.scheduler_stats is None:
            outputs.scheduler_stats = SchedulerStats()
        return outputs

    InprocClient.get_output = get_output  # type: ignore[method-assign]


def know_image_token(token: int) -> None:
    """Let BLIP-2 put images where `token` is: some releases look for one token only,
    whatever the config says, and see no image where they do not find it."""
    from vllm.model_executor.models import blip2

    if hasattr(blip2, "_IMAGE_TOKEN_ID"):
        blip2._IMAGE_TOKEN_ID = token
