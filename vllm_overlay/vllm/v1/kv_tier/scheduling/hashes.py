# SPDX-License-Identifier: Apache-2.0
"""Hashes of the blocks of a KV cache group.

A request has hashes for the smallest unit of tokens of which all groups' blocks are
multiples.
"""

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request


def hashes_of_blocks(
    request: Request, hash_size: int | None, block_size: int
) -> Sequence[BlockHash]:
    """The hashes of a request's full blocks, as upstream uses them in keys.

    Args:
        request: The request.
        hash_size: Tokens of each of its hashes; None: of a block.
        block_size: Tokens of a block.

    """
    if hash_size is None or block_size == hash_size:
        return request.block_hashes
    # Older releases have no blocks of several hashes.
    from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

    blocks = BlockHashListWithBlockSize(request.block_hashes, hash_size, block_size)
    return blocks  # type: ignore[return-value]
