# SPDX-License-Identifier: Apache-2.0
"""A secondary tier of a scheduler without ranks: it has all that is written to it, and
answers at once. It counts keys and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_tier.layout import Answer, SecondaryLayout, SecondaryTier
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepReport


@dataclass
class Moved:
    """What a tier was asked and moved, without headers of objects."""

    asked_keys: int = 0
    found_keys: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    blocks: int = 0
    """Blocks that were written or read."""


class InstantTier:
    """A tier, for one engine after the other.

    Args:
        slot_bytes: Bytes of an object of a group that needs whole slots.
        group_bytes: By KV cache group.

    """

    ask_s = 0.0

    def __init__(self, slot_bytes: int, group_bytes: Sequence[int]) -> None:
        self.keys: set[bytes] = set()
        self.moved = Moved()
        self._slot_bytes, self._group_bytes = slot_bytes, group_bytes

    def ask(self, keys: Sequence[bytes]) -> Answer:
        """As `Lookup.ask`."""
        answer = [key in self.keys for key in keys]
        self.moved.asked_keys += len(keys)
        self.moved.found_keys += sum(answer)
        return lambda until: answer

    def mark_present(self, keys: Sequence[bytes]) -> None:
        """As `Lookup.mark_present`."""

    def layout(self, block_sizes: Sequence[int], num_slots: int) -> SecondaryLayout:
        """Describes it to the scheduler."""
        tier = SecondaryTier(
            "instant", "instant", "LOCAL", self, 1, 1e9, fetches_always=True
        )
        return SecondaryLayout(
            (tier,), 1, tuple(block_sizes), num_slots, 256, 4 * num_slots, 16
        )

    def run(self, jobs: Sequence[SecondaryJob], pool: Any) -> None:
        """Carry out jobs, and report them."""
        for job in jobs:
            if job.is_put:
                done = [True] * len(job.keys)
                self.keys.update(job.keys)
            else:
                done = [key in self.keys for key in job.keys]
            groups = job.groups or [-1] * len(job.keys)
            num_bytes = sum(
                self._slot_bytes if group < 0 else self._group_bytes[group]
                for group, is_moved in zip(groups, done)
                if is_moved
            )
            self.moved.blocks += sum(done)
            if job.is_put:
                self.moved.stored_bytes += num_bytes
            else:
                self.moved.loaded_bytes += num_bytes
            result = SecondaryResult(job.number, done, 0.0)
            pool.apply_report(StepReport(secondary=[result]))
