# SPDX-License-Identifier: Apache-2.0
"""Passes the hints of the current HTTP request to the engine's input processor.

Not every API of every release has a field that reaches the engine. An endpoint works in
the context of its request, or in tasks that inherit it, so a context variable does.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RequestContext:
    """Hints of a request."""

    hints: dict[str, Any] = field(default_factory=dict)
    """Hints from other APIs, as checked fields of
    `vllm.v1.kv_tier.hints.schema.Hints`."""
    checked: Mapping[str, Any] = field(default_factory=dict)
    """The tier's fields of `kv_transfer_params`, checked."""


NOTHING = RequestContext()

request_context: ContextVar[RequestContext] = ContextVar(
    "kv_tier_heard", default=NOTHING
)
