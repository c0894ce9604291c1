# SPDX-License-Identifier: Apache-2.0
"""When the copies and the forward pass of each step ran, from within the worker.

`vllm serve --worker-extension-cls demo.recorder.Recorder` imports this module where
the tier works. It writes a line for each span to the file that
`KV_TIER_DEMO_SPANS` names. On a CPU copies are done when their call returns, and
spans are exact.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.worker.copies import Copier
from vllm.v1.kv_tier.worker.host_tier import HostTier

from .spans import SPANS


class Recorder:
    """Nothing but the reason why this module is imported."""


class _Spans:
    """The spans of the step in the making."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._spans: list[dict[str, Any]] = []
        self.begun = 0.0

    def add(self, tier: Any, what: str, seq: int, start: float, blocks: int) -> None:
        slot_bytes = tier.engines.stores.slots.shape[1]
        span = {"seq": seq, "what": what, "start": start, "end": time.perf_counter()}
        self._spans.append(span | {"blocks": blocks, "bytes": blocks * slot_bytes})

    def end_step(self) -> None:
        """Keep the step if it copied something."""
        if any(span["blocks"] for span in self._spans):
            lines = (json.dumps(span) for span in self._spans)
            with self._path.open("a") as file:
                file.write("\n".join(lines) + "\n")
        self._spans.clear()


def _record(spans: _Spans) -> None:
    tier: Any = HostTier
    begin_step, end_step = tier.begin_step, tier.end_step

    def copying(method: str, what: str, blocks_of: Callable[[StepPlan], list]) -> None:
        copy = getattr(Copier, method)

        def timed(self: Any, plan: StepPlan, *args: Any) -> None:
            start = time.perf_counter()
            copy(self, plan, *args)
            if blocks := len(blocks_of(plan)):
                spans.add(self, what, plan.seq, start, blocks)

        setattr(Copier, method, timed)

    def begin(self: Any, scheduler_output: Any) -> None:
        begin_step(self, scheduler_output)
        spans.begun = time.perf_counter()

    def end(self: Any, output: Any) -> Any:
        spans.add(self, "forward", self._seq, spans.begun, 0)
        spans.end_step()
        return end_step(self, output)

    copying("store", "store", lambda plan: plan.store_slots)
    copying("load", "load", lambda plan: plan.load_slots)
    copying("load_ahead", "ahead", lambda plan: plan.ahead_slots)
    copying("clean", "store", lambda plan: plan.clean_slots)
    tier.begin_step, tier.end_step = begin, end


if path := os.environ.get(SPANS):
    _record(_Spans(path))
