# SPDX-License-Identifier: Apache-2.0
"""Which slots are to be written to a tier below, and which of them next."""

from collections.abc import Callable
from itertools import islice

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId


class Due:
    """Keys that are to be written: the begins of prompts before what follows them.

    A block is of no use without all that comes before it in its prompt. So a store that
    takes only a part of what is computed should have the same part of each prompt, and
    not prompts with holes, as it would if the oldest were always next: these are the
    next to be evicted, too, so that a store which cannot keep up gets every other one.

    Args:
        span: Tokens of a prompt whose blocks are equal here: the oldest is the first.

    """

    def __init__(self, span: int) -> None:
        self._span = span
        self._depths: dict[BlockHashWithGroupId, int] = {}
        self._keys: dict[int, dict[BlockHashWithGroupId, None]] = {}

    def __len__(self) -> int:
        return len(self._depths)

    def __contains__(self, key: object) -> bool:
        return key in self._depths

    def add(self, key: BlockHashWithGroupId, num_tokens: int) -> None:
        """`key` is to be written. It covers so many tokens of its prompt."""
        depth = self._depths.setdefault(key, num_tokens // self._span)
        self._keys.setdefault(depth, {})[key] = None

    def remove(self, key: BlockHashWithGroupId) -> bool:
        """`key` is not to be written. Returns whether it was."""
        if (depth := self._depths.pop(key, None)) is None:
            return False
        keys = self._keys[depth]
        del keys[key]
        if not keys:
            del self._keys[depth]
        return True

    def clear(self) -> None:
        """Nothing is to be written."""
        self._depths.clear()
        self._keys.clear()

    def first(
        self, num: int, may_be: Callable[[BlockHashWithGroupId], bool]
    ) -> list[BlockHashWithGroupId]:
        """The next keys to be written, and no more than `num`.

        Args:
            num: How many at most.
            may_be: Whether a key may be written yet. At each depth the oldest are the
                first that may.

        """
        chosen: list[BlockHashWithGroupId] = []
        for depth in sorted(self._keys):
            for key in islice(self._keys[depth], num - len(chosen)):
                if not may_be(key):
                    break
                chosen.append(key)
            if len(chosen) == num:
                break
        return chosen
