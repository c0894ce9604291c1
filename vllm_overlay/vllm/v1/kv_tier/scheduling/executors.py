# SPDX-License-Identifier: Apache-2.0
"""Which executors pass the reports of all ranks to the scheduler."""

from typing import TYPE_CHECKING

from vllm.v1.kv_tier import releases

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.abstract import Executor

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
