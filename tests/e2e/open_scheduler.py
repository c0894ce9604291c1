# SPDX-License-Identifier: Apache-2.0
"""A scheduler that shows what its pool holds, for `vllm serve --scheduler-cls`.

Whenever no request is left it writes to `KV_TIER_STATE`: the keys of both tiers, what
the pool counted, and what was planned.
"""

import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats


class OpenScheduler(Scheduler):
    """See above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._path = Path(os.environ["KV_TIER_STATE"])
        self._counted: Counter[str] = Counter()
        self._planned: Counter[str] = Counter()
        self._num_steps = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        plan = output.kv_tier_plan
        assert plan is not None
        self._planned["stored"] += len(plan.store_slots) + len(plan.clean_slots)
        self._planned["loaded"] += len(plan.load_slots)
        self._planned["loaded_ahead"] += len(plan.ahead_slots)
        for kind, slots in (
            ("store", plan.store_slots),
            ("clean", plan.clean_slots),
            ("load", plan.load_slots),
            ("load_ahead", plan.ahead_slots),
        ):
            self._planned[f"{kind} copies"] += bool(slots)
        return output

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        assert stats is not None and stats.kv_tier_stats is not None
        for name, value in asdict(stats.kv_tier_stats).items():
            if isinstance(value, int):
                self._counted[name] += value
        return stats

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        self._num_steps += 1
        if not self.has_unfinished_requests():
            self._write()
        return outputs

    def _write(self) -> None:
        pool: Any = self.kv_cache_manager.kv_tier
        cached = pool.cached_block_hash_to_block
        device = {
            key: 1 if isinstance(found, KVCacheBlock) else len(found)
            for key, found in getattr(cached, "_cache", cached).items()
        }
        state = {
            "steps": self._num_steps,
            "device": _listed(device),
            "host": _listed({key: 1 for key, _ in pool.host.places.items()}),
            "num_slots_used": len(pool.host),
            "num_slots": pool.host.num_slots,
            "slot_bytes": pool.slot_bytes,
            "counted": self._counted,
            "planned": self._planned,
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(self._path)


def _listed(counts: dict[Any, int]) -> list[tuple[int, Any, int]]:
    return [
        (get_group_id(key), maybe_convert_block_hash(get_block_hash(key)), count)
        for key, count in counts.items()
    ]
