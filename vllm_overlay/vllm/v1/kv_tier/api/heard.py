# SPDX-License-Identifier: Apache-2.0
"""What the HTTP request at hand says of its KV, for the engine's input processor.

Not every API of every release has a field that reaches the engine's requests. What an
endpoint does for a request runs in its context, or in tasks that inherit it.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Heard:
    """Hints in other words than the schema's, translated."""

    hints: dict[str, Any] = field(default_factory=dict)
    """Fields of `vllm.v1.kv_tier.hints.Hints`, checked."""
    checked: Mapping[str, Any] = field(default_factory=dict)
    """What `kv_transfer_params` has for the tier, checked."""


NOTHING = Heard()
heard: ContextVar[Heard] = ContextVar("kv_tier_heard", default=NOTHING)
