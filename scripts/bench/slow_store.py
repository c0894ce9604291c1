# SPDX-License-Identifier: Apache-2.0
"""Files as slow as one wants, for benchmarks and tests of a slow store."""

import time
from collections.abc import Sequence
from pathlib import Path

from pydantic.dataclasses import dataclass

from vllm.v1.kv_tier.stores.fs import FsConfig, FsStore


@dataclass(frozen=True, kw_only=True)
class SlowConfig(FsConfig):
    """`{"type": "slow_store.SlowConfig", …}` of `secondary_tiers`."""

    delay_file: str = ""
    """Has the milliseconds that each object takes longer to get. Read at each `get`."""

    def open(self, namespace: str, rank: int, slot_bytes: int) -> FsStore:
        return SlowStore(self, namespace, rank, slot_bytes)


class SlowStore(FsStore):
    def __init__(self, config: SlowConfig, *args: object) -> None:
        super().__init__(config, *args)  # type: ignore[arg-type]
        self._delay_file = Path(config.delay_file)
        self._longest_s = config.debug.deadline_ms / 1e3

    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        seconds = len(keys) * float(self._delay_file.read_text()) / 1e3
        # As every store: what has not come by the deadline does not come.
        time.sleep(min(seconds, self._longest_s))
        if seconds > self._longest_s:
            return [False] * len(keys)
        return super().get(keys, rows)
