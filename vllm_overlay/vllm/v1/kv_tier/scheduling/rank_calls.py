# SPDX-License-Identifier: Apache-2.0
"""Calls of an engine to its ranks that may change weights.

New weights come in many ways: upstream's own (`reload_weights`, `update_weights`, …),
and methods of a worker extension that have any name. All of them are calls of the
executor, in the scheduler's process. KV of new weights must not be kept under the name
of the old ones, nor be continued with what was computed by these; the reset of the
prefix cache, which tells of new weights too, comes later, and other steps in between.
So a call that is not known to leave weights alone counts as one that changes them.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

KEEP_WEIGHTS = frozenset(
    {
        *("execute_model", "sample_tokens", "execute_dummy_batch"),
        *("take_draft_token_ids", "start_worker_execution_loop"),
        *("add_lora", "remove_lora", "pin_lora", "list_loras"),
        *("check_health", "profile", "shutdown", "synchronize_device"),
        # They may be for other weights: the prefix cache, and with it the host and what
        # is known of tiers below, is cleared before.
        *("sleep", "wake_up"),
        *("reset_mm_cache", "reset_encoder_cache", "get_encoder_timing_stats"),
        *("get_supported_tasks", "supports_draft_weight_updates"),
        *("get_kv_connector_handshake_metadata", "get_model_inspection"),
        *("get_cache_block_size_bytes", "get_kv_cache_spec"),
        *("compute_weight_checksums", "save_sharded_state", "save_tensorized_model"),
    }
)
"""Methods of upstream's workers, of all releases, that are called while an engine runs
and change no weight."""

_OURS = "vllm.v1.kv_tier."


class RankCalls:
    """Listens to the calls of an executor."""

    def __init__(self) -> None:
        self.may_change: Callable[[str], None] = lambda method: None
        """Is told the name of what may change weights, before the ranks hear of it."""

    def listen(self, executor: Any) -> None:
        """Hear of all calls of `executor` from now on."""
        # An executor that held itself would outlive its engine.
        call = WeakMethod(executor.collective_rpc)

        # Each step comes by here.
        def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
            if method not in KEEP_WEIGHTS and not _is_ours(method):
                self.may_change(_name(method))
            carry_out = call()
            assert carry_out is not None, "the executor is gone"
            return carry_out(method, *args, **kwargs)

        executor.collective_rpc = collective_rpc


def _is_ours(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith(_OURS)


def _name(method: Any) -> str:
    if isinstance(method, str):
        return method
    return str(getattr(method, "__qualname__", "") or type(method).__qualname__)
