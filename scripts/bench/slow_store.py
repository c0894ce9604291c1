# SPDX-License-Identifier: Apache-2.0
"""Files as slow as one wants, for benchmarks and tests of a slow store."""

import time
from collections.abc import Sequence
from pathlib import Path

from pydantic.dataclasses import dataclass

from vllm.v1.kv_tier.options import SETTINGS
from vllm.v1.kv_tier.stores.fs import FsConfig, FsStore


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class SlowConfig(FsConfig):
    """`{"type": "slow_store.SlowConfig", …}` of `secondary_tiers`. Its files may change
    while the engine runs: each `get` reads them."""

    delay_file: str = ""
    """Has the milliseconds that each object takes longer to get."""

    rate_file: str = ""
    """Has the bytes per second that are read at most, by one `get` after the other."""

    def open(self, namespace: str, rank: int, slot_bytes: int) -> FsStore:
        return SlowStore(self, namespace, rank)


class SlowStore(FsStore):
    def __init__(self, config: SlowConfig, *args: object) -> None:
        super().__init__(config, *args)  # type: ignore[arg-type]
        self._delay_file, self._rate_file = config.delay_file, config.rate_file
        self._longest_s = config.debug.deadline_ms / 1e3

    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        begun = time.monotonic()
        seconds = len(keys) * _number(self._delay_file, 0.0) / 1e3
        # As every store: what has not come by the deadline does not come.
        time.sleep(min(seconds, self._longest_s))
        if seconds > self._longest_s:
            return [False] * len(keys)
        done = super().get(keys, rows)
        rate = _number(self._rate_file, float("inf"))
        ends = begun + sum(row.nbytes for row in rows) / rate
        time.sleep(max(0.0, ends - time.monotonic()))
        return done


def _number(file: str, default: float) -> float:
    return float(Path(file).read_text()) if file else default
