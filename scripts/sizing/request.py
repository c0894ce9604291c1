# SPDX-License-Identifier: Apache-2.0
"""A request of a trace, as the block pool sees requests."""

from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.kv_tier.hints.schema import KEY as HINTS
from vllm.v1.request import RequestStatus

from .trace import Call


def _block_hash(number: int) -> BlockHash:
    if hasattr(BlockHash, "hash_value"):
        # The first releases have the tokens beside a number.
        make: Any = BlockHash
        return make(number, ())
    return BlockHash(number.to_bytes(12, "big", signed=True))


class Request:
    """A request, and what the tier must know of it. It remembers those that wait."""

    num_preemptions = 0
    cache_salt: str | None = None

    def __init__(
        self, number: int, call: Call, block_size: int, hints: dict[str, Any]
    ) -> None:
        num_tokens = call.input_tokens + call.output_tokens
        ids = call.block_ids(block_size)
        # Blocks that only the answer fills take room, and nobody hits them.
        num_answer = max(0, num_tokens // block_size - len(ids))
        answer = [-1 - number * 2**20 - i for i in range(num_answer)]
        self.number = number
        self.call = call
        self.num_prompt_tokens = call.input_tokens
        self.num_prompt_blocks = len(ids)
        self.num_blocks = -(-num_tokens // block_size)
        self.request_id = str(number)
        self.block_hashes = [_block_hash(i) for i in ids + answer]
        self.kv_transfer_params = {HINTS: hints} if hints else None
        self.blocks: list[KVCacheBlock] = []
        self.num_hits = 0
        self.has_ended = False

    @property
    def status(self) -> RequestStatus:
        """Of all that there are, those that the tier tells apart."""
        ended = RequestStatus.FINISHED_STOPPED
        return ended if self.has_ended else RequestStatus.RUNNING

    def is_finished(self) -> bool:
        return self.has_ended
