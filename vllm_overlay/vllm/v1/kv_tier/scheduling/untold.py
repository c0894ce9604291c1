# SPDX-License-Identifier: Apache-2.0
"""Computed blocks of requests with hints that are not processed yet.

A decoding request fills a block every few steps, and processing one block takes about
as long as processing all. They are needed only when one is freed or another request
hits it, so a request's blocks are processed together then.
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
    """Consecutive blocks of one request."""

    request: Request
    blocks: list[KVCacheBlock]
    first: int
    block_size: int


class Untold:
    """Computed blocks that wait for processing.

    Args:
        tell: Processes them.

    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.runs: dict[int, _Run] = {}
        """Runs by block id. Public, since testing whether there are any must be
        cheap."""

    def goes_on(
        self, request: Request, blocks: Sequence[KVCacheBlock], first: int, last: int
    ) -> bool:
        """Record that `request` computes `blocks[first:last]`.

        Returns:
            Whether they continue a run, and were added to it.

        """
        # A hot path: each block of a decoding request. The null block is shared by all
        # groups, and belongs to no run.
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
        """Begin a run with `blocks` of `request`, from index `first` on."""
        run = _Run(request, list(blocks), first, block_size)
        ids = [block.block_id for block in blocks if not block.is_null]
        self.runs.update(dict.fromkeys(ids, run))

    def needed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Process the runs of `blocks`."""
        for run in set(map(self.runs.get, map(_ID, blocks))):
            if run is not None:
                self._end(run)

    def _end(self, run: _Run) -> None:
        for block in run.blocks:
            if self.runs.get(block.block_id) is run:
                del self.runs[block.block_id]
        self._tell(run.request, run.blocks, run.first, run.block_size)
