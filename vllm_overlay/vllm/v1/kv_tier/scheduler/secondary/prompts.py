# SPDX-License-Identifier: Apache-2.0
"""Which blocks of prompts are missing, so that secondary tiers are asked for them."""

from collections.abc import Callable, Sequence

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    get_block_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier.scheduler.kv_groups import hashes_of_blocks
from vllm.v1.kv_tier.scheduler.secondary.tier import Wanted
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request

LoadFilter = Callable[[Request], Callable[[BlockHash], bool] | None]
"""As `ConversationTracker.make_load_filter`."""


class PromptLookup:
    """Looks up which blocks of prompts neither device nor host has, in parts.

    Args:
        block_sizes: Tokens of a block, for each KV cache group.
        hash_size: Tokens of a block hash of a request.
        table: The slot table.
        is_cached: Whether the device has a block.
        tuning: Has the limit of a step.

    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        hash_size: int,
        table: SlotTable,
        is_cached: Callable[[BlockHashWithGroupId], object],
        tuning: SchedulingTuning,
    ) -> None:
        self._block_sizes = block_sizes
        self._hash_size = hash_size
        self._table = table
        self._is_cached = is_cached
        self._max_looks = self._num_left = tuning.max_looks

    @property
    def is_over(self) -> bool:
        """Whether this step has looked up as many blocks as it may."""
        return self._num_left <= 0

    def end_step(self) -> None:
        """Reset the limit of the step."""
        self._num_left = self._max_looks

    def num_tokens(self, request: Request) -> int:
        """Tokens of a request that have hashes."""
        return len(request.block_hashes) * self._hash_size

    def has_blocks(self, request: Request) -> bool:
        """Whether a request has a full block."""
        return self.num_tokens(request) >= min(self._block_sizes)

    def find_missing(
        self, request: Request, begin: int, loadable: LoadFilter | None
    ) -> tuple[int, list[Wanted]]:
        """Look up as many more blocks of a request as the step may.

        Args:
            request: The request.
            begin: Tokens whose blocks were looked up before.
            loadable: Says what may be loaded for it; None for everything.

        Returns:
            Tokens whose blocks are looked up now, and the missing blocks behind
            `begin`, in the order of the prompt.

        """
        num_tokens = int(self._num_left / sum(1 / size for size in self._block_sizes))
        end = begin + max(num_tokens, self._hash_size)
        end = min(end, self.num_tokens(request))
        missing = []
        on_host, on_device = self._table.get, self._is_cached
        for group_id, size in enumerate(self._block_sizes):
            suffix = make_block_hash_with_group_id(BlockHash(b""), group_id)
            hashes = hashes_of_blocks(request, self._hash_size, size)
            first, last = begin // size, end // size
            self._num_left -= last - first
            # A hot path: every block of every prompt.
            missing += [
                (BlockHashWithGroupId(key), num_blocks * size)
                for num_blocks, block_hash in enumerate(hashes[first:last], first + 1)
                if on_host(key := block_hash + suffix) is None  # type: ignore[arg-type]
                and not on_device(key)  # type: ignore[arg-type]
            ]
        if loadable is not None and (may_be := loadable(request)) is not None:
            missing = [w for w in missing if may_be(get_block_hash(w[0]))]
        if len(self._block_sizes) > 1:
            missing.sort(key=lambda wanted: wanted[1])
        return end, missing
