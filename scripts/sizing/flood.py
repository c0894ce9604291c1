# SPDX-License-Identifier: Apache-2.0
"""Another tenant, who floods: prompts that nobody needs, and all of them important.

Each is asked for twice, the second time behind the first, so that it counts as used
again, and wants to be retained with priority 100. Hits are counted of the trace only.
"""

from collections.abc import Sequence
from typing import Any

from .shift import Work
from .trace import ID_TOKENS, Call

TENANT = "flood"
HINTS: dict[str, Any] = {"tenant": TENANT, "retain": {"priority": 100}}
"""What each of its requests says."""

_PROMPT_IDS = 24
"""Of each prompt: about as many as the trace's have."""
_OUTPUT_TOKENS = 100


def flooded(work: Work, times: float) -> Work:
    """`work`, with `times` as many prompt tokens of a flood beside what is counted."""
    calls: list[Call] = list(work.calls[: work.num_before])
    # Ids below 0 are answers.
    next_id = 1 + max((i for call in work.calls for i in call.hash_ids), default=0)
    due = 0.0
    for call in work.calls[work.num_before :]:
        calls.append(call)
        due += times * call.input_tokens
        while due > 0:
            ids = range(next_id, next_id + _PROMPT_IDS)
            next_id += _PROMPT_IDS
            one = _call(call.arrival_s, ids)
            calls += [one, one]
            due -= 2 * one.input_tokens
    return Work(tuple(calls), work.num_before)


def _call(arrival_s: float, ids: Sequence[int]) -> Call:
    return Call(
        arrival_s, ID_TOKENS * len(ids), _OUTPUT_TOKENS, tuple(ids), floods=True
    )
