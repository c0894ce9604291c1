# SPDX-License-Identifier: Apache-2.0
"""Whether a copy engine moves the right bytes on this machine.

Engines hand addresses to drivers and kernels that nobody else has tried with this
layout, and a wrong byte in a KV block is a wrong token that nothing else would notice.
"""

import torch

from vllm.v1.kv_tier.copying.engine import CopyEngine, slot_offsets, wait_for_copies


class WrongBytes(RuntimeError):
    """An engine left other bytes than it was to copy."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} come out wrong with this engine, memory layout and driver. Set "
            "debug.copy_engine to 'auto' in --kv-offloading-config, which takes "
            "another one, and report it."
        )


@torch.inference_mode()
def prove(engine: CopyEngine, blocks: list[int], slots: list[int]) -> None:
    """Store random bytes, load them again, and compare after each.

    The blocks have their content back in the end, the slots have not. On a GPU it
    must run on a stream of its own, which is waited for.

    Args:
        engine: Whose copies to look at.
        blocks: Device blocks that nothing uses.
        slots: As many host slots that hold nothing.

    Raises:
        WrongBytes: What was copied is not what arrived.

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
