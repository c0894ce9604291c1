# SPDX-License-Identifier: Apache-2.0
"""Blocks that requests with hints have computed, and of which nobody has been told.

A request that decodes fills a block every few steps, and to tell of one takes about as
long as to tell of all. Nobody asks before the block is free or another request hits
it: so its request's blocks are told then, at once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

Tell = Callable[[Request, Sequence[KVCacheBlock], int, int], None]
"""As `Releasing.computed`."""

_ID = attrgetter("block_id")


@dataclass(eq=False, slots=True)
class _Run:
    """Blocks of one request, one after another."""

    request: Request
    blocks: list[KVCacheBlock]
    first: int
    block_size: int


class Untold:
    """Computed blocks that wait to be told of.

    Args:
        tell: Is told.

    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.runs: dict[int, _Run] = {}
        """By block id. Public, since asking whether there are some must cost
        nothing."""

    def goes_on(
        self, request: Request, blocks: Sequence[KVCacheBlock], first: int, last: int
    ) -> bool:
        """`request` computes those of its `blocks` from index `first` to `last`.

        Returns:
            Whether they follow what waits to be told, and so do, too.

        """
        # Each block of a decoding request comes by here. All groups have the null block
        # in common, so it belongs to no run.
        runs = self.runs
        run = runs.get(blocks[first - 1].block_id) if first else None
        if run is None or run.request is not request:
            return False
        for block in blocks[first:last]:
            run.blocks.append(block)
            if not block.is_null:
                runs[block.block_id] = run
        return True

    def begin(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_size: int,
    ) -> None:
        """`request` computes `blocks`, from index `first` on, which follow no others
        that wait."""
        run = _Run(request, list(blocks), first, block_size)
        ids = [block.block_id for block in blocks if not block.is_null]
        self.runs.update(dict.fromkeys(ids, run))

    def needed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Tell of `blocks`, as far as nobody has been told, and of all that their
        requests have computed before and since."""
        for run in set(map(self.runs.get, map(_ID, blocks))):
            if run is not None:
                self._end(run)

    def _end(self, run: _Run) -> None:
        for block in run.blocks:
            if self.runs.get(block.block_id) is run:
                del self.runs[block.block_id]
        self._tell(run.request, run.blocks, run.first, run.block_size)
