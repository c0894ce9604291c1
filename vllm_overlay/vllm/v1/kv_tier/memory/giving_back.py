# SPDX-License-Identifier: Apache-2.0
"""Gives memory of device blocks back to the machine, where the device is a CPU."""

import os
from collections.abc import Sequence

from vllm.logger import init_logger
from vllm.v1.kv_tier.memory.pages import HUGE_PAGE_BYTES, PAGE_BYTES, discard
from vllm.v1.kv_tier.memory.regions import Region

logger = init_logger(__name__)


def blocks_per_page(regions: Sequence[Region], num_blocks: int) -> int:
    """How many blocks to give back together.

    So many that each region gives back whole huge pages, but no more than an eighth of
    all: the machine's pages in which two of ours meet go back with the second only.

    Args:
        regions: KV memory of a rank; at least one.
        num_blocks: Of the device.

    """
    width = min(region.block_bytes for region in regions)
    return max(1, min(-(-HUGE_PAGE_BYTES // width), num_blocks // 8))


def discard_blocks(regions: Sequence[Region], first: int, end: int) -> None:
    """Give the memory of the blocks from `first` to before `end` back. They have no
    content any more, and memory again as soon as somebody writes to them.

    Args:
        regions: KV memory of the rank, in host memory.
        first: Device block.
        end: Device block.

    """
    for region in regions:
        rows = region.blocks[first:end]
        address = rows.data_ptr()
        until = address + (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1]
        # Where blocks begin and end within a page of the machine, it stays.
        address = -(-address // PAGE_BYTES) * PAGE_BYTES
        num_bytes = until // PAGE_BYTES * PAGE_BYTES - address
        if num_bytes > 0 and (error := discard(address, num_bytes)):
            # Locked memory, for one. Nothing is wrong but that it stays.
            logger.warning_once(
                "KV tier: device memory could not be given back (%s). Take "
                "shrink_after_s out of --kv-offloading-config, which has no "
                "effect here.",
                os.strerror(error),
            )
