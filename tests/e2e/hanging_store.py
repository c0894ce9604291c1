# SPDX-License-Identifier: Apache-2.0
"""A directory that never ends to write."""

import time
from collections.abc import Sequence

from pydantic.dataclasses import dataclass

from vllm.v1.kv_tier.stores.fs import FsConfig, FsStore


@dataclass(frozen=True, kw_only=True)
class HangingConfig(FsConfig):
    def open(self, namespace: str, rank: int, slot_bytes: int) -> FsStore:
        return HangingStore(self, namespace, rank)


class HangingStore(FsStore):
    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        time.sleep(3600)
        return [False] * len(keys)
