# SPDX-License-Identifier: Apache-2.0
"""A directory whose reads take as long as a slow disk's."""

import time
from collections.abc import Sequence

from pydantic.dataclasses import dataclass

from vllm.v1.kv_tier.options import SETTINGS
from vllm.v1.kv_tier.stores.fs import FsConfig, FsStore


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class ThrottledConfig(FsConfig):
    rate_file: str
    """A file with bytes per second. It may change while the engine runs."""

    def open(self, namespace: str, rank: int, slot_bytes: int) -> FsStore:
        return ThrottledStore(self, namespace, rank, slot_bytes)


class ThrottledStore(FsStore):
    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        begun = time.monotonic()
        assert isinstance(self._config, ThrottledConfig)
        with open(self._config.rate_file) as file:
            rate = float(file.read())
        done = super().get(keys, rows)
        seconds = sum(row.nbytes for row in rows) / rate
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        return done
