# SPDX-License-Identifier: Apache-2.0
"""Tests that a copy engine moves the right bytes on this machine.

Engines hand addresses to drivers and kernels for layouts that may be untested there. A
wrong byte in a KV block gives a wrong token, and no other check would notice.
"""

import torch

from vllm.v1.kv_tier.copying.engine import CopyEngine, slot_offsets, wait_for_copies


class WrongBytes(RuntimeError):
    """What an engine copied differs from its source."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} come out wrong with this engine, memory layout and driver. Set "
            "debug.copy_engine to 'auto' in --kv-offloading-config, which takes "
            "another one, and report it."
        )


@torch.inference_mode()
def prove(engine: CopyEngine, blocks: list[int], slots: list[int]) -> None:
    """Store random bytes, load them again, and compare after each.

    Restores the content of the blocks, but not of the slots. On a GPU, run it on a
    stream of its own; it waits for that stream.

    Args:
        engine: The engine to test.
        blocks: Device blocks that are not in use.
        slots: Equally many host slots that hold nothing.

    Raises:
        WrongBytes: A copy differs from its source.

    """
    rows = [region.blocks for region in engine.regions]
    kept = [row[blocks] for row in rows]
    random = torch.Generator(rows[0].device).manual_seed(0)
    wanted = [
        torch.randint(
            256, row.shape, dtype=row.dtype, device=row.device, generator=random
        )
        for row in kept
    ]
    everything = range(len(rows))
    try:
        for row, content in zip(rows, wanted):
            row[blocks] = content
        engine.stores(blocks, slots).copy(everything)
        wait_for_copies(rows[0].device)
        for start, content in zip(slot_offsets(engine.regions), wanted):
            on_host = engine.slots[slots, start : start + content.shape[1]]
            if not torch.equal(on_host, content.cpu()):
                raise WrongBytes("Stores")
        for row, content in zip(rows, wanted):
            row[blocks] = ~content
        engine.loads(slots, blocks).copy(everything)
        wait_for_copies(rows[0].device)
        for row, content in zip(rows, wanted):
            if not torch.equal(row[blocks], content):
                raise WrongBytes("Loads")
    finally:
        for row, content in zip(rows, kept):
            row[blocks] = content
        wait_for_copies(rows[0].device)
