# SPDX-License-Identifier: Apache-2.0
"""Calls of an engine to its ranks that may change weights.

New weights come in many ways: upstream's own (`reload_weights`, `update_weights`, …),
and methods of a worker extension that have any name. All of them are calls of the
executor, in the scheduler's process. KV of new weights must not be kept under the name
of the old ones, nor be continued with what was computed by these; the reset of the
prefix cache, which tells of new weights too, comes later, and other steps in between.
So a call that is not known to leave weights alone counts as one that changes them.
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
        _listeners[executor] = self


_listeners: WeakKeyDictionary[Any, RankCalls] = WeakKeyDictionary()
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
