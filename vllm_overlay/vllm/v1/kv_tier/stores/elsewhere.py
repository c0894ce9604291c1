# SPDX-License-Identifier: Apache-2.0
"""A read-only store, for a rank whose objects another rank writes."""

from collections.abc import Sequence

from vllm.v1.kv_tier.stores.base import BlockStore, MemoryFile


class WrittenElsewhere(BlockStore):
    """The store of a rank that holds the same KV as the rank that writes.

    `put` does nothing and answers yes: a block counts as written when all ranks say so,
    and the writing rank is one of them. `delete` does nothing, since the objects belong
    to that rank.

    Args:
        store: A store with the namespace and rank number of the rank that writes.

    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def register(self, memory: memoryview) -> None:
        self._store.register(memory)

    def register_file(self, file: MemoryFile) -> None:
        self._store.register_file(file)

    @property
    def is_apart(self) -> bool:
        return self._store.is_apart

    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        return [True] * len(keys)

    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        return self._store.get(keys, rows)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._store.exists(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        pass

    def take_evicted_bytes(self) -> int:
        return self._store.take_evicted_bytes()

    def close(self) -> None:
        self._store.close()
