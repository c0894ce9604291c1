# SPDX-License-Identifier: Apache-2.0
"""Gives memory of device blocks back to the system, where the device is a CPU."""

import os
from collections.abc import Sequence

from vllm.logger import init_logger
from vllm.v1.kv_tier.memory.pages import HUGE_PAGE_BYTES, PAGE_BYTES, discard
from vllm.v1.kv_tier.memory.regions import Region

logger = init_logger(__name__)


def blocks_per_page(regions: Sequence[Region], num_blocks: int) -> int:
    """How many blocks to give back together.

    Enough for a whole huge page in each region, but at most an eighth of all blocks. A
    huge page that two of these groups share is freed only with the second.

    Args:
        regions: KV memory of a rank; at least one.
        num_blocks: Number of device blocks.

    """
    width = min(region.block_bytes for region in regions)
    return max(1, min(-(-HUGE_PAGE_BYTES // width), num_blocks // 8))


def discard_blocks(regions: Sequence[Region], first: int, end: int) -> None:
    """Give the memory of blocks `first` to `end - 1` back to the system.

    Their content is lost. They get memory again when they are written to.

    Args:
        regions: KV memory of the rank, in host memory.
        first: First device block.
        end: Device block after the last one.

    """
    for region in regions:
        rows = region.blocks[first:end]
        address = rows.data_ptr()
        until = address + (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1]
        # System pages that other blocks share stay.
        address = -(-address // PAGE_BYTES) * PAGE_BYTES
        num_bytes = until // PAGE_BYTES * PAGE_BYTES - address
        if num_bytes > 0 and (error := discard(address, num_bytes)):
            # For example because memory is locked. It works, but frees nothing.
            logger.warning_once(
                "KV tier: device memory could not be given back (%s). Take "
                "shrink_after_s out of --kv-offloading-config, which has no "
                "effect here.",
                os.strerror(error),
            )
