# SPDX-License-Identifier: Apache-2.0
"""Watches an engine's calls to its ranks for those that may change weights.

Weights can change in many ways: by upstream's methods (`reload_weights`,
`update_weights`, …), and by methods of worker extensions with any name. All of them are
calls of the executor, in the scheduler's process. KV of new weights must not be stored
under the name of the old ones, nor continue old KV. The reset of the prefix cache that
follows new weights comes later, possibly after other steps. So any call that is not
known to keep weights counts as a change.
"""

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

KEEP_WEIGHTS = frozenset(
    {
        *("execute_model", "sample_tokens", "execute_dummy_batch"),
        *("take_draft_token_ids", "start_worker_execution_loop"),
        *("add_lora", "remove_lora", "pin_lora", "list_loras"),
        *("check_health", "profile", "shutdown", "synchronize_device"),
        # Other weights may follow, but the prefix cache is cleared before, and with it
        # the host and what is known of secondary tiers.
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


class WeightChangeMonitor:
    """Watches the calls of an executor."""

    def __init__(self) -> None:
        self.may_change: Callable[[str], None] = lambda method: None
        """Called with the name of a method that may change weights, before the ranks
        run it."""

    def listen(self, executor: Any) -> None:
        """Watch all calls of `executor` from now on."""
        _listeners[executor] = self


_listeners: WeakKeyDictionary[Any, WeightChangeMonitor] = WeakKeyDictionary()
"""By executor: a process may run several engines."""


def note_rank_call(executor: Any, method: Any) -> None:
    """An executor is about to call `method` of its ranks."""
    # Each step comes here.
    if method in KEEP_WEIGHTS or (calls := _listeners.get(executor)) is None:
        return
    if isinstance(method, str):
        name = method
    elif not inspect.isroutine(method):
        name = type(method).__qualname__
    elif (method.__module__ or "").startswith(_OURS):
        return
    else:
        name = method.__qualname__
    calls.may_change(name)
