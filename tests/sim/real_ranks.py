# SPDX-License-Identifier: Apache-2.0
"""Real ranks behind the simulated one: its plans are carried out on real memory, too.

The code of a rank runs on a CPU: copies, checksums, slots that ranks share. Forward
passes leave what those of the simulated rank leave, and must find what that one finds.
Where a load of the simulated rank fails, a slot of the real ones is damaged, which they
must refuse to load.
"""

import torch

from vllm.v1.kv_tier.memory.buffer import HostBuffer
from vllm.v1.kv_tier.memory.regions import build_regions
from vllm.v1.kv_tier.memory.shared import SharedMemory
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.sharing import SharedSlots

from . import upstream
from .content import Violation
from .step import Step

WORD = 8
"""Bytes of a value."""


class RealRanks:
    """Host tiers of real ranks, and their device memory.

    Args:
        num_blocks: Of the device.
        width: Values of a block.
        num_slots: Of the host.
        num_ranks: How many there are.
        verify: Whether they check slots.
        share: Whether they hold the same, in slots that they share.

    """

    def __init__(
        self,
        num_blocks: int,
        width: int,
        num_slots: int,
        num_ranks: int,
        verify: bool,
        share: bool,
    ) -> None:
        self.num_loads = self.num_refused = 0
        self._verifies = verify
        self._share = share
        # As wide as what is aligned, so that slots have no gaps.
        wide = -(-width // 8) * 8
        self._devices = [
            torch.zeros(num_blocks, wide, dtype=torch.int64) for _ in range(num_ranks)
        ]
        shared = self._shared(num_slots, wide * WORD) if share else [None] * num_ranks
        self._tiers = [
            HostTier.allocate(
                build_regions([device], num_blocks),
                num_slots,
                torch.device("cpu"),
                verify=verify,
                shared=part,
            )
            for device, part in zip(self._devices, shared, strict=True)
        ]

    def _shared(self, num_slots: int, slot_bytes: int) -> list[SharedSlots | None]:
        num_ranks = len(self._devices)
        sizes = num_slots, slot_bytes, num_ranks
        first = SharedMemory.create(*sizes)
        memories = [first]
        memories += [
            SharedMemory.join(first.address, *sizes) for _ in range(num_ranks - 1)
        ]
        found: list[SharedSlots | None] = []
        for index, memory in enumerate(memories):
            nodes: set[int] | None = None if index else set()
            buffer = HostBuffer(
                num_slots, slot_bytes, pin=False, shared=memory, nodes=nodes
            )
            found.append(SharedSlots(buffer, memory, index))
        return found

    def _value(self, rank: int, values: list[int]) -> torch.Tensor:
        """What a rank holds where the simulated one holds `values`."""
        other = 0 if self._share else rank
        return torch.tensor(values, dtype=torch.int64) ^ other

    def begin(self, step: Step) -> None:
        """A step runs: its copies come first."""
        plan = step.plan
        loads = [*plan.load_slots, *plan.ahead_slots]
        # What this plan stores first would undo the damage.
        stored = {*plan.store_slots, *plan.clean_slots}
        damaged = [slot for slot in loads if slot not in stored][:1]
        if step.fail != "load" or not self._verifies:
            damaged = []
        for rank, tier in enumerate(self._tiers):
            for slot in damaged:
                if not (self._share and rank):
                    tier.buffer.slots[slot, 3] ^= 1
        for tier in self._tiers:
            tier.begin_step(step.output)
            output = tier.end_step(upstream.model_runner_output([]))
            report = output.kv_tier_report
            refused = report is not None and report.failed_load_seq == plan.seq
            if refused != bool(damaged):
                raise Violation("rank", f"loads of {plan} were refused: {refused}")
        for rank, tier in enumerate(self._tiers):
            for slot in damaged:
                if not (self._share and rank):
                    tier.buffer.slots[slot, 3] ^= 1
                    # Plans that were made before the report may load it, too.
                    tier.slots.mark_stored([slot])
        self.num_refused += bool(damaged)
        self.num_loads += len(loads)

    def check(self, block: int, offset: int, values: list[int]) -> None:
        """What a forward pass reads of a block is there on all ranks."""
        for rank, real in enumerate(self._devices):
            found = real[block, offset : offset + len(values)]
            if not torch.equal(found, self._value(rank, values)):
                raise Violation("rank", f"{found} in block {block} of rank {rank}")

    def wrote(self, before: list[list[int]], after: list[list[int]]) -> None:
        """Forward passes, and what comes before them, have changed blocks."""
        for block, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                for rank, real in enumerate(self._devices):
                    real[block, : len(new)] = self._value(rank, new)
