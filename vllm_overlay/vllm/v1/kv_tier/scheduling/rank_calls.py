# SPDX-License-Identifier: Apache-2.0
"""Watches an engine's calls to its ranks for those that may change weights.

Weights can change in many ways: by upstream's methods (`reload_weights`,
`update_weights`, …), and by methods of worker extensions with any name. All of them are
calls of the executor, in the scheduler's process. KV of new weights must not be stored
under the name of the old ones, nor continue old KV. The reset of the prefix cache that
follows new weights comes later, possibly after other steps. So any call that is not
known to keep weights counts as a change.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

KEEP_WEIGHTS = frozenset(
    {
        *("execute_model", "sample_tokens", "execute_dummy_batch"),
        *("take_draft_token_ids", "start_worker_execution_loop"),
        *("add_lora", "remove_lora", "pin_lora", "list_loras"),
        *("check_health", "profile", "shutdown", "synchronize_device"),
        # The prefix cache is cleared before these, which is handled elsewhere. See
        # `Asleep`.
        *("sleep", "wake_up"),
        *("reset_mm_cache", "reset_encoder_cache", "get_encoder_timing_stats"),
        *("get_supported_tasks", "supports_draft_weight_updates"),
        *("get_kv_connector_handshake_metadata", "get_model_inspection"),
        *("get_cache_block_size_bytes", "get_kv_cache_spec"),
        *("compute_weight_checksums", "save_sharded_state", "save_tensorized_model"),
    }
)
"""Methods of upstream's workers, in all releases, that do not change weights."""

_OURS = "vllm.v1.kv_tier."


class RankCalls:
    """Watches the calls of an executor."""

    def __init__(self) -> None:
        self.may_change: Callable[[str], None] = lambda method: None
        """Called with the name of a method that may change weights, before the ranks
        are."""
        self.sleeps: Callable[[Mapping[str, Any]], None] = lambda options: None
        """Called before the ranks are put to sleep, with upstream's `level`."""
        self.wakes_up: Callable[[Mapping[str, Any]], None] = lambda options: None
        """Called before the ranks wake up, with upstream's `tags`."""

    def listen(self, executor: Any) -> None:
        """Watch all calls of `executor` from now on."""
        # A strong reference to itself would keep the executor alive after its engine.
        call = WeakMethod(executor.collective_rpc)

        # A hot path: called in each step.
        def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
            if method not in KEEP_WEIGHTS:
                if not _is_ours(method):
                    self.may_change(_name(method))
            elif method == "sleep":
                self.sleeps(kwargs.get("kwargs") or {})
            elif method == "wake_up":
                self.wakes_up(kwargs.get("kwargs") or {})
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
